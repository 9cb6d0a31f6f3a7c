"""Whether a tensor or a module is spread over ranks, told without torch's library for that.

Importing `torch.distributed.tensor` and `torch.distributed.fsdp` brings sympy and the compiler's symbols with it, the
better part of a second and 40 MB. Who has such a tensor has imported them; a run on one device, or of plain copies,
has none and needs neither.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_spread(tensor: object) -> TypeIs[DTensor]:
    """Return whether a tensor is one of torch's that lie on several ranks (DTensor)."""
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_sharded_unit(module: object) -> TypeIs[FSDPModule]:
    """Return whether a module is one whose weights FSDP2 gathers for its passes (FSDPModule)."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))

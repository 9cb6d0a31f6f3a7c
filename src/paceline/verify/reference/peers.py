"""Whether a program itself calls other ranks: where a proof runs the program on one rank alone, nobody would answer.

The rank would wait for the others, which wait for it in a collective of their own, or take their message for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import ConfigError

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # torch's namespaces of operators that are


class NoPeers(TorchDispatchMode):
    """Within it, ConfigError is raised where a collective is called."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in COLLECTIVES:
            raise ConfigError(
                f"the program calls other ranks by itself: {func.overloadpacket.__name__.strip('_')}",
                "a proof computes model and objective on one device too, where no other rank answers",
                "sums alone: the step adds up what objectives return. An objective that takes `gather_rows` has the"
                ' rows of all ranks; one of a loop of your own with `objective.coupled = "batch"` is given them',
            )
        return func(*args, **(kwargs or {}))

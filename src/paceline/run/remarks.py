"""What of a user's model or data has no part in training, or less: said once, and kept in the journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.run.precision import lost_in_cast
from paceline.task.objective import Objective, next_token

NAMED = 3  # tensors that a remark names
READ_BY_NEXT_TOKEN = ("tokens", "labels", "documents", "positions", "mask", "real")
AUX_LOSS = "router_aux_loss_coef"  # of a Hugging Face config


def remarks_on(model: nn.Module, objective: Objective, dtype: torch.dtype) -> list[str]:
    """Return what is lost of a model whose weights are about to be cast to `dtype`."""
    remarks = []
    if rounded := lost_in_cast(model, dtype):
        more = f" and {len(rounded) - NAMED} more" if len(rounded) > NAMED else ""
        remarks.append(
            f"{', '.join(rounded[:NAMED])}{more}: rounded to {str(dtype).removeprefix('torch.')}, in which weights and "
            "buffers are kept; plan.precision = fp64 keeps their values"
        )
    weight = getattr(getattr(model, "config", None), AUX_LOSS, None)
    if weight and objective is next_token:
        remarks.append(
            f"the model's config has {AUX_LOSS} = {weight:g}, and the objective next_token does not add it: the load "
            "of experts is left to itself; an objective of your own adds it"
        )
    return remarks


def remarks_on_batch(objective: Objective, batch: Any) -> list[str]:
    """Return what is said of entries of a batch that next_token does not read; others read what they want."""
    if objective is not next_token or not isinstance(batch, Mapping):
        return []
    unread = ", ".join(str(name) for name in batch if name not in READ_BY_NEXT_TOKEN)
    return [
        f"the batch's {unread}: not read by the objective next_token, and without effect; labels of -100 leave tokens "
        "out of the loss, documents separate them, and an objective of your own hands on what it wants"
    ] if unread else []  # fmt: skip

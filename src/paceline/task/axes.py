"""Why an axis of parallelism is closed to a model, and what would open it. Imports no torch."""

from __future__ import annotations

_LATER = "needs rules for this model, which come with a later version; dp_replicate and dp_shard need none"

SEQUENCE_RULE = (
    "ranks share sequences where the model says how its tokens meet (forward(tokens, positions=None, mask=None), and "
    "attention through paceline.task.models.attention.CausalAttention) and the objective is a sum over tokens "
    "(next_token, or one of your own with an attribute sums_over_tokens = True)"
)

CLOSED_AXES = {
    "tp": "splitting a layer's matrices needs rules for this model: an attribute `paceline_rules` that names its"
    " column, row and vocabulary layers; dp_replicate and dp_shard need none",
    "pp": "splitting the chain of blocks into stages needs rules for this model: an attribute `paceline_rules` that "
    "names what comes before the blocks, their container and what comes after; dp_replicate and dp_shard need none",
    "cp": SEQUENCE_RULE,
    "ep": "the model has no experts to spread; the sizes moe-2m and mixtral-8x7b, among others, have, and a model of"
    " your own whose attribute `paceline_rules` names them: {'layers.*.experts': 'expert'}",
}

_BATCH_STATISTICS = "BatchNorm statistics would be computed over each {part}; try GroupNorm"
BATCH_STATISTICS = {
    "dp_replicate": _BATCH_STATISTICS.format(part="device's part of the batch"),
    "dp_shard": _BATCH_STATISTICS.format(part="device's part of the batch"),
    "pp": _BATCH_STATISTICS.format(part="micro-batch of the pipeline"),
    "accumulation": _BATCH_STATISTICS.format(part="micro-batch"),  # not an axis, but closed all the same
}


def closed_axes(*opened: str) -> dict[str, str]:
    """Return axis -> why it is closed, for a model whose rules open the given axes."""
    return {axis: because for axis, because in CLOSED_AXES.items() if axis not in opened}

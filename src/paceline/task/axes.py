"""Why an axis of parallelism is closed to a model, and what would open it. Imports no torch."""

from __future__ import annotations

_LATER = "needs rules for this model, which come with a later version; dp_replicate and dp_shard need none"

CLOSED_AXES = {
    "tp": f"splitting a layer's matrices {_LATER}",
    "pp": "splitting the chain of blocks into stages needs rules for this model: an attribute `paceline_rules` that "
    "names what comes before the blocks, their container and what comes after; dp_replicate and dp_shard need none",
    "cp": f"splitting a sequence {_LATER}",
    "ep": f"spreading experts {_LATER}",
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

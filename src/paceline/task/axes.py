"""Why an axis of parallelism is closed to a model, and what would open it. Imports no torch."""

from __future__ import annotations

_LATER = "needs rules for this model, which come with a later version; dp_replicate and dp_shard need none"

CLOSED_AXES = {
    "tp": f"splitting a layer's matrices {_LATER}",
    "pp": f"splitting the chain of blocks into stages {_LATER}",
    "cp": f"splitting a sequence {_LATER}",
    "ep": "the model has no experts to spread; the sizes moe-2m and mixtral-8x7b, among others, have",
}

_BATCH_STATISTICS = "BatchNorm statistics would be computed over each {part}; try GroupNorm"
BATCH_STATISTICS = {
    "dp_replicate": _BATCH_STATISTICS.format(part="device's part of the batch"),
    "dp_shard": _BATCH_STATISTICS.format(part="device's part of the batch"),
    "accumulation": _BATCH_STATISTICS.format(part="micro-batch"),  # not an axis, but closed all the same
}

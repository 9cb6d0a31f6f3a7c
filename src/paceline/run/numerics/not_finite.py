"""Which samples of a batch hold values that are no finite numbers: where a loss that is none may come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from paceline.errors import NumericalStop
from paceline.run.loop.loader import MicroBatch, StepBatch
from paceline.run.process.world import World
from paceline.task.objective import Objective, regression


def of_the_data(error: NumericalStop, batch: StepBatch, objective: Objective, world: World) -> NumericalStop:
    """Return the error of a step whose numbers are not finite, with the samples that explain it, where any do.

    Every rank calls it, after a step that none of them has finished.
    """
    mine = [found for micro in batch.micro_batches for found in _without_numbers(micro, objective)]
    everyone = sorted({found for each in world.gather(mine[:8]) for found in each})
    if not everyone:
        return error
    number, entry = everyone[0]
    more = f" (and so have others, such as sample {everyone[1][0]:,})" if len(everyone) > 1 else ""
    return NumericalStop(
        error.what,
        f"sample {number:,} has NaN or an infinite value in {entry} of its batch{more}; no weight was changed",
        "fill or leave out such values in the data: the loss of a batch with one is none at any learning rate; "
        'run.health.on_nonfinite = "skip" leaves out the updates of such batches',
    ).naming_ranks()


def _without_numbers(micro: MicroBatch, objective: Objective) -> Iterator[tuple[int, str]]:
    """Yield the samples of a micro-batch that have a value which is no finite number, and the entry it is in.

    Masks hold infinities on purpose, and labels of NaN count nothing in the built-in regression.
    """
    data = micro.data
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data if isinstance(data, list | tuple) else [data])
    labels = ("labels", 1) if objective is regression else ()
    for name, value in pairs:
        if not isinstance(value, Tensor) or not value.is_floating_point() or name in labels or "mask" in str(name):
            continue
        if micro.counts and value.dim() and len(value) == len(micro.ids):
            rows = (~value.isfinite()).reshape(len(value), -1).any(1).nonzero().flatten().tolist()
            yield from ((int(micro.ids[row]), f"entry {name!r}") for row in rows)

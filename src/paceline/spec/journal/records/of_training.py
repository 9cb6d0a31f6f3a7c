"""The kinds of record of training itself: steps, where time and memory go, samples, evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.spec.journal.rank_spread import RankSpread
from paceline.spec.journal.record import Ids, Numbers, Record, Table, Told, Words


@dataclass(frozen=True)
class StepRecord(Record):
    """One optimizer update on one global batch."""

    KIND: ClassVar[str] = "step"

    step: Annotated[int | None, Told("number of the step, from 1")]
    position_before: Annotated[int | None, Told("samples consumed before the step, over all ranks", "samples")]
    position_after: Annotated[int | None, Told("samples consumed after the step, over all ranks", "samples")]
    loss: Annotated[float | None, Told("mean over the global batch", "nats per item")]
    weight: Annotated[float | None, Told("how many items the loss counts: tokens, or samples", "items")]
    grad_norm: Annotated[float | None, Told("global norm of the gradient, before clipping")]
    lr: Annotated[float | None, Told("learning rate of this update")]
    seconds: Annotated[
        Numbers,
        Told(
            "`total` and its parts on rank 0: `data` (waiting for the batch), `forward_backward`, `reduce`"
            " (gradient reduction that is not overlapped), `optimizer` (on CUDA that of the step before), `other`",
            "s",
        ),
    ]
    tokens_per_second: Annotated[
        float | None,
        Told(
            "tokens, or samples, that were computed over `seconds.total`: all of a row, as the forecast counts them,"
            " whether the loss counts them or not",
            "items/s",
        ),
    ]
    peak_bytes: Annotated[
        int | None,
        Told(
            "most memory rank 0 has used so far: on CUDA of tensors, as its allocator counts them, and what the process"
            " holds of the device besides; on a CPU resident memory without pages of files",
            "bytes",
        ),
    ]
    loss_scale: Annotated[float | None, Told("with fp16: the loss scale of this step", if_any=True)] = None
    updated: Annotated[
        bool | None, Told("whether the update was made; with fp16, and where it was left out", if_any=True)
    ] = None
    waiting_seconds: Annotated[
        float | None,
        Told(
            "of `forward_backward` and `reduce`, the time in which rank 0 waited for peers or for its core; only"
            " of CPU runs",
            "s",
            if_any=True,
        ),
    ] = None
    router: Annotated[
        Table | None,
        Told(
            "with experts: `load_max` and `load_min` (the fullest and the emptiest expert, 1 is an even load),"
            " `entropy` (mean over tokens and layers, 1 where all experts are equally likely), `balance` (mean"
            " balance loss; `top_k` is even), `dropped` (always 0), and `load`, per layer and expert, for up to"
            " 512 experts in all",
            if_any=True,
        ),
    ] = None
    turns: Annotated[
        Table | None,
        Told(
            "with several objectives: for each that had its turn, by name, `loss`, `weight`, `grad_norm` and"
            " `updated`; the step's own are those of the one that is evaluated",
            if_any=True,
        ),
    ] = None
    sample_ids: Annotated[
        Ids | None, Told("with `run.record_samples`: ids of the samples in order of position", if_any=True)
    ] = None


@dataclass(frozen=True)
class RanksRecord(Record):
    """Where steps spent their time on all ranks, since the record before: beside the checks that ranks agree."""

    KIND: ClassVar[str] = "ranks"

    step: Annotated[int | None, Told("steps done")]
    steps: Annotated[int | None, Told("how many steps the means are of", "steps")]
    ranks: Annotated[int | None, Told("how many ranks they are of", "devices")]
    device: Annotated[str, Told("`cpu` or `cuda`, which says what is known")]
    spreads: Annotated[
        Table,
        Told(
            "means of a step, each with `min`, `median` and `max` over the ranks and the `rank` of the highest: the"
            " parts of `seconds` as in a step, and of `other` that of `scoring` (candidates are scored, the noise scale"
            " is measured); `computing` (of the passes and the reduction) and `waiting` (in"
            " collectives, without what a thread waited for a core) and `waiting_least` (the shortest of a step),"
            " all of CPUs; `queued` (all threads that had work"
            " and no core), `queued_here` (the one that trains) and `queued_sending` (those of gloo), where the kernel"
            " tells; `idle` (the device had"
            " nothing to do between two steps), `awaited` (the host waited for the device) and `held` (the host read"
            " a batch for longer than the device computed), all of CUDA; between two steps `saving` (training waited"
            " for checkpoints), `evaluating` (evaluations and texts) and `between` (all else: callbacks, records, the"
            " loop's body), and `whole` (a step with these three); `read` (reading a batch, by whichever thread),"
            " `depth` (batches asked for ahead) and `ready` (the share of batches that were there when they were"
            " wanted)",
            "s",
        ),
    ]

    def spread(self, name: str) -> RankSpread | None:
        """Return how one of the means is spread over the ranks; None where that is not on record."""
        return RankSpread.read(self.spreads.get(name))


@dataclass(frozen=True)
class MemoryRecord(Record):
    """What a device's memory is spent on, measured after the run's first step and after its last one."""

    KIND: ClassVar[str] = "memory"

    step: Annotated[int | None, Told("steps done")]
    components: Annotated[
        Numbers,
        Told(
            "the largest over the ranks of `weights`, `gradients`, `optimizer`, and the rest:"
            " `activations_and_runtime`, or `activations_and_buffers` and `runtime` where they can be told apart",
            "bytes",
        ),
    ]
    peak_bytes: Annotated[float | None, Told("the highest peak over the ranks", "bytes")]


@dataclass(frozen=True)
class MovedRecord(Record):
    """How far a model that started from weights has moved from them: once, where the run is complete."""

    KIND: ClassVar[str] = "moved"

    step: Annotated[int | None, Told("steps done")]
    blocks: Annotated[
        Table,
        Told(
            "by the name of each block, in order: `distance` (norm of the difference over the norm of the starting"
            " weights), `norm` of the starting weights, and `parameters`; without what started fresh"
        ),
    ]
    distance: Annotated[float | None, Told("the same of the whole model")]
    fresh: Annotated[int | None, Told("parameters that started fresh, or in part")]
    seconds: Annotated[float | None, Told("what it took to read the starting weights again", "s")]


@dataclass(frozen=True)
class SourcesRecord(Record):
    """What each source of a mixture has given so far: beside evaluations, and where a start ends."""

    KIND: ClassVar[str] = "sources"

    step: Annotated[int | None, Told("steps done")]
    position: Annotated[int | None, Told("samples consumed, over all ranks and sources", "samples")]
    given: Annotated[
        Table, Told("by the name of each source its `samples`, and how many `epochs` of all that it has they are")
    ]


@dataclass(frozen=True)
class SelectionRecord(Record):
    """Which of a step's candidates were trained on; only of tasks that select."""

    KIND: ClassVar[str] = "selection"

    step: Annotated[int | None, Told("number of the step")]
    position: Annotated[int | None, Told("samples consumed before the step: the first candidate's place", "samples")]
    candidates: Annotated[int | None, Told("how many samples were read and scored", "samples")]
    chosen: Annotated[
        str,
        Told("which of them were trained on: hexadecimal digits, whose first bit is the first candidate"),
    ]
    digest: Annotated[str, Told("hash of the ids of the samples that were trained on, in their order")]
    loss: Annotated[float | None, Told("mean over all candidates, before the update", "nats per item")]
    seconds: Annotated[float | None, Told("scoring, drawing and reading on rank 0; a part of `other`", "s")]
    spread: Annotated[
        float | None,
        Told(
            "variance over that of an even draw of as many, with losses for the norms of gradients; only where"
            " weights make the draw exact",
            if_any=True,
        ),
    ] = None
    repeated: Annotated[
        bool | None,
        Told("true where an earlier start made this step: what it chose was chosen again", if_any=True),
    ] = None


@dataclass(frozen=True)
class EvaluationRecord(Record):
    """The loss on held-out samples, each counted once."""

    KIND: ClassVar[str] = "evaluation"

    step: Annotated[int | None, Told("steps done")]
    loss: Annotated[float | None, Told("mean over the held-out samples", "nats per item")]
    weight: Annotated[float | None, Told("how many items it counts", "items")]
    seconds: Annotated[float | None, Told("what it took, further sets included", "s")]
    metrics: Annotated[Table | None, Told("the metrics of `task.evaluate.metrics`, by name", if_any=True)] = None
    sets: Annotated[
        Table | None,
        Told("of each further set of held-out data, by name, its `loss`, `weight` and `metrics`", if_any=True),
    ] = None


@dataclass(frozen=True)
class WrittenRecord(Record):
    """What the model wrote behind the prompts of `task.samples`."""

    KIND: ClassVar[str] = "written"

    step: Annotated[int | None, Told("steps done")]
    temperature: Annotated[float | None, Told("by which tokens were drawn; 0 is the likeliest each time")]
    prompts: Annotated[Words, Told("the prompts")]
    texts: Annotated[Words, Told("what was written behind each")]
    seconds: Annotated[float | None, Told("what it took", "s")]


@dataclass(frozen=True)
class LoggedRecord(Record):
    """Numbers that a callback of the user's gave for the record."""

    KIND: ClassVar[str] = "logged"

    step: Annotated[int | None, Told("steps done; before a step its number")]
    by: Annotated[str, Told("the callback")]
    values: Annotated[Numbers, Told("the numbers, by name")]

"""The kinds of record that a journal holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from paceline.spec.journal.bound import TraceRecord, VerdictRecord
from paceline.spec.journal.rank_spread import RankSpread
from paceline.spec.journal.record import Ids, Numbers, Record, Table, Told, Words, read
from paceline.spec.journal.watching import AlertRecord, HealthSample, NodeSample


@dataclass(frozen=True)
class RunStarted(Record):
    """The first record of every start."""

    KIND: ClassVar[str] = "run_started"

    resumed_from: Annotated[str | None, Told("path of the checkpoint it goes on from; null for a fresh start")]
    step: Annotated[int | None, Told("steps done before this start", "steps")]
    position: Annotated[int | None, Told("samples consumed before this start, over all ranks", "samples")]
    spec: Annotated[
        Table,
        Told(
            "the tables `task`, `cluster`, `plan` and `run` with every default filled in; quantities as text with"
            " a unit"
        ),
    ]
    plan: Annotated[
        Table,
        Told(
            "`layout` (degree of each axis), `zero`, `micro_batch`, `accumulation`, `batch_samples`, `recompute`,"
            " `precision`, `compile`, `rows` (of each data rank; empty where the batch is cut evenly)"
        ),
    ]
    plan_text: Annotated[str, Told("the plan in one line")]
    world_size: Annotated[int | None, Told("processes of this start", "devices")]
    versions: Annotated[Table, Told("of paceline, torch and python")]
    host: Annotated[str, Told("name of rank 0's machine")]
    command: Annotated[Words, Told("the command line, one word per item")]
    cluster: Annotated[
        Table, Told("the machines as the planner saw them: every figure with `value`, `source` and `note`")
    ]
    forecast: Annotated[
        Table,
        Told(
            "what was promised: `step_seconds`, `peak_bytes`, `run_seconds`, `usd`, `kwh` and `carbon_g`, each"
            " with `value`, an 80 % interval from `low` to `high`, and `source`; the terms `time` (s per step) and"
            " `memory` (bytes), each with `name`, `value`, `formula`, `source`, `kind` (what it is, such as"
            " `products` or `weights`) and `clock` (which of a step's `seconds` measures it; `none` of bytes);"
            " `steps`, `tokens_per_second`, `model_flops_per_step`, `mfu`; `bill`: money, energy and carbon with"
            " 80 and 95 % intervals and formulas"
        ),
    ]
    placement: Annotated[
        Table,
        Told(
            "where ranks stand: `topology` (devices, nodes, rails, racks; 0 is unknown), `layout`, `order` of the"
            " axes (the last one fastest), and for each of `axes` bytes per second sent, and sent out of a node"
        ),
    ]
    facts: Annotated[
        Table,
        Told(
            "the data: `description`, `samples`, `items_per_sample`, `unit` of an item, `fingerprint`,"
            " `card` (where prepared data are from), and `unigram_loss` (nats) where it is known"
        ),
    ]
    parameters: Annotated[int | None, Told("parameters of the model, shared ones counted once")]
    profile: Annotated[
        Table, Told("what the forecast was made from: the model's blocks, each shape once, and their order")
    ]
    optimizer: Annotated[str, Told("what the forecast was made from: the optimizer's name")]
    headline: Annotated[Words, Told("the lines that announced the run, as printed")]
    provenance: Annotated[
        Table, Told("for each value of the spec where it is from: `default`, a file and line, or `--set`")
    ]
    outlook: Annotated[
        Table | None,
        Told(
            "what a step would take with one thing otherwise, by forecast: `step_seconds` and `pass_seconds` (forward"
            " and backward passes) of the plan, and `changes`, each with the `cause` that it is an answer to, its"
            " `text`, both seconds, and whether it `fits` the memory",
            if_any=True,
        ),
    ] = None
    began: Annotated[
        float | None,
        Told("when its first rank began to read, build and load, in seconds since the epoch", "s", if_any=True),
    ] = None
    boot: Annotated[str | None, Told("which boot of rank 0's machine it was, as its kernel says", if_any=True)] = None
    clock_apart: Annotated[
        float | None,
        Told("the clock of that machine, less the seconds that have passed since the boot", "s", if_any=True),
    ] = None


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
    tokens_per_second: Annotated[float | None, Told("`weight` over `seconds.total`", "items/s")]
    peak_bytes: Annotated[
        int | None,
        Told(
            "most memory rank 0 has used so far: of the device's allocator on CUDA, resident memory on a CPU", "bytes"
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
            " parts of `seconds` as in a step; `computing` (of the passes and the reduction) and `waiting` (in"
            " collectives, without what a thread waited for a core), both of CPUs; `queued` (all threads that had work"
            " and no core) and `queued_here` (the one that trains), where the kernel tells; `idle` (the device had"
            " nothing to do between two steps), `awaited` (the host waited for the device) and `held` (the host read"
            " a batch for longer than the device computed), all of CUDA; between two steps `saving` (training waited"
            " for checkpoints), `evaluating` (evaluations and texts) and `between` (all else: callbacks, records, the"
            " loop's body); `read` (reading a batch, by whichever thread), `depth` (batches asked for ahead) and"
            " `ready` (the share of batches that were there when they were wanted)",
            "s",
        ),
    ]

    def spread(self, name: str) -> RankSpread | None:
        """Return how one of the means is spread over the ranks; None where that is not on record."""
        return RankSpread.read(self.spreads.get(name))


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
class MemoryRecord(Record):
    """What a device's memory is spent on, measured once after the first step of a start."""

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
class VerifyRecord(Record):
    """The proof that the plan computes what a single device computes."""

    KIND: ClassVar[str] = "verify"

    equal: Annotated[
        bool | None, Told("whether all differences are within the tolerances, or rounding that is none in fp64")
    ]
    verdict: Annotated[str, Told("`equal`, or `ill-conditioned` where fp32 cannot tell and fp64 can")]
    ill_conditioned: Annotated[
        Table | None,
        Told(
            "null, or what rounding makes miss a tolerance: `quantity`, `name`, `step`, `relative`, how far one"
            " device moves itself (`moved`), the differences in fp64 (`fp64`)"
        ),
    ]
    seconds: Annotated[
        float | None, Told("what it took; made before the start's processes, it is not part of their time", "s")
    ]
    differences: Annotated[
        Numbers, Told("`loss`, `grad_norm`, `gradients` and `weights` against the single device", "relative")
    ]
    dtype: Annotated[str, Told("precision of the comparison")]
    layout: Annotated[str, Told("what the twin ran as")]
    text: Annotated[str, Told("the result in one line")]
    proved: Annotated[str, Told("the day on which it was made")]
    cached: Annotated[
        bool | None,
        Told("whether it was made at an earlier start of the same task, plan, code and versions; `seconds` is then 0"),
    ]


@dataclass(frozen=True)
class DecisionRecord(Record):
    """An automatic choice."""

    KIND: ClassVar[str] = "decision"

    what: Annotated[str, Told("what was decided on, such as `plan`, `resume`, `replan` or `stop`")]
    before: Annotated[Any, Told("what it was before", key="from")]
    after: Annotated[Any, Told("what it is now", key="to")]
    because: Annotated[str, Told("the reason")]
    evidence: Annotated[Any, Told("the numbers behind it")]


@dataclass(frozen=True)
class CheckpointRecord(Record):
    """A checkpoint that was published whole."""

    KIND: ClassVar[str] = "checkpoint"

    step: Annotated[int | None, Told("steps done")]
    path: Annotated[str, Told("its folder")]
    bytes: Annotated[int | None, Told("its size on disk", "bytes")]
    seconds: Annotated[float | None, Told("from the moment that it holds until it was published", "s")]
    stall_seconds: Annotated[
        float | None,
        Told(
            "in which training waited for it; without it all of `seconds`, as in journals of earlier releases",
            "s",
            if_any=True,
        ),
    ] = None
    tier: Annotated[str | None, Told("`memory` or `remote` where it is not in the run's directory", if_any=True)] = None

    @property
    def cost_seconds(self) -> float | None:
        """What the checkpoint cost the run."""
        return self.seconds if self.stall_seconds is None else self.stall_seconds


@dataclass(frozen=True)
class ReplayRecord(Record):
    """The first step after a resume, held against the same step of an earlier start."""

    KIND: ClassVar[str] = "replay"

    step: Annotated[int | None, Told("number of the step")]
    of_attempt: Annotated[int | None, Told("the start whose record of the step it was held against")]
    differences: Annotated[Numbers, Told("of `loss` and `grad_norm`; 0 is bit for bit", "relative")]


@dataclass(frozen=True)
class FaultRecord(Record):
    """Something that went wrong, whether the run survived it or not."""

    KIND: ClassVar[str] = "fault"

    what: Annotated[str, Told("what happened")]
    because: Annotated[str, Told("because of what")]
    rank: Annotated[int | None, Told("the rank it happened on, where it is known", if_any=True)] = None
    signal: Annotated[int | None, Told("the signal that ended a process", if_any=True)] = None
    evidence: Annotated[
        Table | None,
        Told(
            "of a rank that hung: `silent_seconds`, `limit_seconds`, `median_step_seconds`, the folder of all `stacks`,"
            " of each of `ranks` its `step`, `phase`, `state` (of /proc), `collective`, number and name of the last"
            " collective that it has `reached` in each group, and the innermost frames of its `stack`; and which"
            " `collectives` some ranks have begun and others have not",
            if_any=True,
        ),
    ] = None


@dataclass(frozen=True)
class InjectedRecord(Record):
    """A fault that was made on purpose (`run.faults`) and has struck."""

    KIND: ClassVar[str] = "injected"

    fault: Annotated[int | None, Told("its number in the plan of faults, from 1")]
    what: Annotated[str, Told("its kind")]
    step: Annotated[int | None, Told("the step in which it struck; of `rendezvous` and `load` the number of the start")]
    phase: Annotated[str, Told("where in the step")]
    rank: Annotated[int | None, Told("the rank that it struck")]
    struck: Annotated[float | None, Told("when, in seconds since the epoch: some are recorded by the next start", "s")]


@dataclass(frozen=True)
class RecoveryRecord(Record):
    """The run goes on after a fault: written when the first step after it is made."""

    KIND: ClassVar[str] = "recovery"

    generation: Annotated[int | None, Told("number of the world that goes on; a call begins with 1")]
    rung: Annotated[
        str,
        Told(
            "how that world came about: `reform` (in the processes that were left), `standby` (forked from a process"
            " that had imported torch) or `restart` (new processes)"
        ),
    ]
    because: Annotated[str, Told("the fault")]
    rank: Annotated[int | None, Told("the rank that failed first, where it is known")]
    from_world: Annotated[int | None, Told("ranks before", "devices")]
    to_world: Annotated[int | None, Told("ranks now", "devices")]
    resumed_from: Annotated[str | None, Told("where the state is from; null where the run begins anew")]
    step: Annotated[int | None, Told("steps done before the first step after the fault")]
    steps_lost: Annotated[int | None, Told("steps on record that are made again", "steps")]
    seconds: Annotated[
        Numbers,
        Told(
            "`total` and its parts: `detect` (from when all ranks were last seen to be well), `end` (until nothing of"
            " the old world ran, or was ready to go on), `start` (until rank 0 of the new world began to build),"
            " `restore` (building and loading), `step` (the first step)",
            "s",
        ),
    ]


@dataclass(frozen=True)
class RunEnded(Record):
    """The last record of a start that came to an end."""

    KIND: ClassVar[str] = "run_ended"

    status: Annotated[
        str,
        Told(
            "`complete`; `requeue` (stopped early with a checkpoint, start it again); `stopped` (by its caller);"
            " `failed`"
        ),
    ]
    exit_code: Annotated[int | None, Told("of the process: 0 done, 75 requeue, others as the command line documents")]
    error: Annotated[
        Table | None,
        Told(
            "null, or `what`, `because` and `try` of what ended it; `traceback` where it is an error of the user's code"
        ),
    ]
    step: Annotated[int | None, Told("steps done")]
    seconds: Annotated[float | None, Told("since this start began", "s", if_any=True)] = None
    goes_on: Annotated[
        float | None,
        Told("when the hours of `run.when` begin again, in seconds since the epoch", "s", if_any=True),
    ] = None


@dataclass(frozen=True)
class ClockRecord(Record):
    """The clock of the machine was set since the record before: the time between the two is not what passed."""

    KIND: ClassVar[str] = "clock"

    moved: Annotated[float | None, Told("how far it was set forward; back where negative", "s")]


RECORDS: tuple[type[Record], ...] = (
    RunStarted, StepRecord, RanksRecord, VerdictRecord, TraceRecord, EvaluationRecord, WrittenRecord, LoggedRecord,
    SourcesRecord, SelectionRecord, MemoryRecord, MovedRecord, VerifyRecord, DecisionRecord, CheckpointRecord,
    ReplayRecord, FaultRecord, RecoveryRecord, InjectedRecord, ClockRecord, NodeSample, HealthSample,
    RunEnded,
    AlertRecord,
)  # fmt: skip
BY_KIND = {kind.KIND: kind for kind in RECORDS}


def parse(line: Mapping[str, object]) -> Record | None:
    """Return a line of a journal as the record that it is; None for a kind that this version does not know."""
    kind = BY_KIND.get(str(line.get("kind")))
    return None if kind is None else read(kind, line)

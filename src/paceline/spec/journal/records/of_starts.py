"""The kinds of record of how a run begins and ends, and of what is decided and proven for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from paceline.spec.journal.record import Numbers, Record, Table, Told, Words


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
    versions: Annotated[Table, Told("of paceline, torch, python, numpy, and of transformers where it is used")]
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
class ClockRecord(Record):
    """The clock of the machine was set since the record before: the time between the two is not what passed."""

    KIND: ClassVar[str] = "clock"

    moved: Annotated[float | None, Told("how far it was set forward; back where negative", "s")]


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

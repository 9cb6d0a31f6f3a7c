"""RunSpec: the `[run]` table of a spec. What a run writes, how often, and when it must stop."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError
from paceline.spec.survive.budget import BudgetSpec, SharedBudgetSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.survive.faults import FaultPlan, read_faults
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.nodes import NodesSpec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.spec.watch.alerts import AlertsSpec
from paceline.spec.watch.exports import ExportsSpec
from paceline.spec.watch.observe import ObserveSpec
from paceline.spec.watch.when import WhenSpec
from paceline.units import Amount, format_seconds


@dataclass(frozen=True)
class RunSpec(Declared, table="run"):
    """Where a run lives and what it keeps."""

    dir: str = option("", "the run's directory; empty means runs/NAME")
    log_every: Amount = option(Amount(10, "steps"), "steps between status lines", quantity="amount", units=("steps",))
    checkpoint_every: Amount | None = option(
        Amount(100, "steps"),
        "steps, samples, tokens or epochs between checkpoints; a last one is always written",
        quantity="amount",
        units=("steps", "samples", "tokens", "epochs"),
    )
    keep_last: int = option(3, "how many checkpoints are kept", minimum=1)
    checkpoints: CheckpointsSpec = option(factory=CheckpointsSpec, doc="how checkpoints are written and kept")
    evaluate_every: Amount | None = option(
        Amount(50, "steps"),
        "steps, samples, tokens or epochs between evaluations on held-out data",
        quantity="amount",
        units=("steps", "samples", "tokens", "epochs"),
    )
    evaluate_samples: int = option(64, "held-out samples per evaluation", minimum=1)
    check_every: Amount | None = option(
        Amount(100, "steps"),
        "steps, samples or tokens between checks that ranks which must agree do, bit for bit",
        quantity="amount",
        units=("steps", "samples", "tokens"),
    )
    time_limit: float | None = option(
        None,
        'wall-clock limit, such as "2 h", of one call, recoveries included, anew in each window of run.when; the run'
        " ends with a checkpoint and exit code 75",
        quantity="duration",
        above=0.0,
    )
    usd_limit: float | None = option(
        None,
        "money that one call may cost, recoveries included, anew in each window of run.when, at the cluster's price;"
        " then it ends as at the time limit",
        above=0.0,
    )
    idle_limit: float | None = option(
        None,
        'how long a `Run` of one process may stand still between two steps, such as "30 min"; then it is saved and'
        " ends with exit code 75; a prompt or a notebook goes on, without the run's memory",
        quantity="duration",
        above=0.0,
    )
    verify: bool = option(True, "prove the layout equal to one device before training, where it has more than one")
    replay: bool = option(
        True, "hold the first two steps after a resume against the journal's records, and stop where one is another"
    )
    accept_data: str = option(
        "", "the fingerprint of changed data with which a run may go on; the error that stops it names it"
    )
    record_samples: bool = option(False, "write the sample ids of every step to the journal")
    redact: tuple[str, ...] = option(
        (), "regular expressions of what the journal must not hold, besides secrets of known shapes"
    )
    group_read: bool = option(False, "let the file group read the journal and the report, which are the user's alone")
    read_ahead_limit: int = option(
        2**30, "most bytes of host memory for batches that are read ahead, on each rank", quantity="bytes", minimum=1
    )
    tf32: bool = option(
        False, "let GPUs round the factors of fp32 products to 10 bits, for a rate several times as high"
    )
    cudnn_benchmark: bool = option(
        False, "let cuDNN try its convolutions and keep the fastest, which may sum in another order at the next start"
    )
    deterministic: bool = option(
        False,
        "use kernels alone that give the same bits at every repetition: some are slower, and some operators have none",
    )
    expandable_segments: bool = option(
        True, "let CUDA's allocator grow its segments, unless PYTORCH_ALLOC_CONF says otherwise"
    )
    bind: str = option(
        "auto",
        "give each rank on a GPU its part of the cores, near its device (auto: unless the launcher has given it some)",
        choices=("auto", "on", "off"),
    )
    health: HealthSpec = option(factory=HealthSpec, doc="what is looked for while a run trains")
    observe: ObserveSpec = option(factory=ObserveSpec, doc="what is read of machines, ranks and weights on the way")
    faults: FaultPlan = option(factory=FaultPlan, doc="faults that are made on purpose, to rehearse them")
    budget: BudgetSpec = option(factory=BudgetSpec, doc="what the run may cost over all its starts")
    shared_budget: SharedBudgetSpec = option(
        factory=SharedBudgetSpec, doc="what all runs of the same tag may cost together, beside the run's own budget"
    )
    tags: dict[str, Any] = option(
        factory=dict, doc='words that a bill groups runs by, such as { team = "speech", project = "asr" }'
    )
    when: Any = option(factory=WhenSpec, doc="in which hours the run trains: '18:00-06:00', or a table")
    alerts: AlertsSpec = option(factory=AlertsSpec, doc="what wakes somebody while the run lives, and where it is sent")
    tensorboard: bool = option(False, "also write TensorBoard event files (needs the extra 'tensorboard')")
    exports: ExportsSpec = option(factory=ExportsSpec, doc="other tools that get what the journal has")
    recovery: RecoverySpec = option(factory=RecoverySpec, doc="what is tried when processes of the run are lost")
    nodes: NodesSpec = option(factory=NodesSpec, doc="the nodes of the run, each with a supervisor of its own")

    @property
    def budgets(self) -> tuple[BudgetSpec, ...]:
        """The budgets that set a limit: the run's own, and the one that it shares."""
        return tuple(each for each in (self.budget, self.shared_budget) if each.limits)

    def limit_reached(self, seconds: float, usd: float) -> str:
        """Return which limit of a call is reached that has taken so much time and money, or ""."""
        if self.time_limit is not None and seconds > self.time_limit:
            return f"the time limit of {format_seconds(self.time_limit)} is reached"
        if self.usd_limit is not None and usd > self.usd_limit:
            return f"the money limit of ${self.usd_limit:g} is reached"
        return ""

    def stages_within(self, steps: int) -> bool:
        """Return whether a run of so many steps saves beside training on its way, where the host has room for it.

        Example: 60 steps with a checkpoint every 100 save at the end alone, when no step comes any more.
        """
        every, in_memory = self.checkpoint_every, self.checkpoints.memory_every
        on_the_way = every is not None and not (every.unit == "steps" and every.value >= steps)
        return self.checkpoints.asynchronous != "off" and (on_the_way or in_memory is not None)

    def refuse_contradictions(self) -> None:
        """Raise ConfigError where the same work is asked to be cut otherwise and to give the same bits, and for a
        budget that is shared by a tag which the run does not have."""
        for budget in (self.budget, self.shared_budget):
            shared = budget.shared_by
            if shared and shared not in self.tags:
                because = f"run.tags has {', '.join(self.tags) or 'none'}"
                raise ConfigError(f"{budget.table_name}.shared_by = '{shared}' is no tag of the run", because,
                                  f'run.tags = {{ {shared} = "..." }}')  # fmt: skip
        if self.shared_budget.limits and not self.shared_budget.shared_by:
            raise ConfigError("run.shared_budget is shared with nobody", "it names no tag", 'shared_by = "team"')
        if self.deterministic and self.health.on_straggler == "less_work":
            raise ConfigError(
                "run.health.on_straggler = 'less_work' with run.deterministic",
                "who is slow differs from run to run, and rows of another cut are summed in another order",
                "on_straggler = 'tell' or 'replace'",
            )


def with_faults(run: RunSpec, given: object) -> RunSpec:
    """Return the table with a plan of faults: a TOML file's, or as `read_faults` takes it. Raises ConfigError."""
    return dataclasses.replace(run, faults=read_faults(given))

"""Plan a task: from a spec to the plan and its price, with all that they were made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.time.compute import matrix_peak
from paceline.plan.learn.correct import Learnt
from paceline.plan.learn.measured import read_measurements
from paceline.plan.learn.recall import recall
from paceline.plan.search.search import SearchResult, search
from paceline.spec.amounts import batch_samples, total_steps
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Forecast
from paceline.spec.optimizers import optimizer_key
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import ModelProfile
from paceline.spec.task import ModelSpec, Task
from paceline.task.data.facts import DataFacts, data_facts
from paceline.task.profile.plain import task_key

if TYPE_CHECKING:
    from paceline.plan.placement.place import Placement
    from paceline.plan.risk.contest import Contest
    from paceline.plan.risk.switch import Sensitivity
    from paceline.simulate.expected import Expected
    from paceline.spec.load import Spec

SUPERLATIVES = {
    "time": "fastest",
    "memory": "smallest",
    "money": "cheapest",
    "energy": "least energy",
    "carbon": "least carbon",
}


@dataclass(frozen=True)
class Planned:
    """A task on a cluster, planned: the choice, its price, and everything that both rest on."""

    spec: Spec
    cluster: Cluster
    profile: ModelProfile
    facts: DataFacts
    search: SearchResult
    plan: Plan
    forecast: Forecast
    batch_samples: int
    steps: int
    remarks: tuple[str, ...]
    learnt: Learnt | None = None  # what finished runs on this machine said

    @property
    def reason(self) -> str:
        """Why this plan: the goal, how many others there were, and why this precision."""
        goal = str(self.spec.plan.goal)
        best = SUPERLATIVES.get(goal, f"best by {goal}")
        fit, refused = len(self.search.candidates), len(self.search.refused)
        return f"{best} of {fit} that fit, {refused} refused; {self.search.precision_because}"

    @cached_property
    def contest(self) -> Contest:
        """Which other plans may turn out better, given how far forecasts err, and which few are worth a try."""
        from paceline.plan.risk.contest import contest

        return contest(self.search.candidates, self.spec.plan.goal.weights, self.forecast.step_seconds)

    @cached_property
    def expected(self) -> Expected:
        """The whole run under the cluster's failures; of unknown values where nothing is known of them."""
        from paceline.simulate.expected import expected_run

        return expected_run(self)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """What would change the choice."""
        from paceline.plan.risk.sensitivity import sensitivity

        return sensitivity(self)

    @property
    def prepared(self) -> Prepared:
        """The task without the cluster."""
        return Prepared(self.spec, self.facts, self.profile, self.batch_samples, self.steps)

    @cached_property
    def placement(self) -> Placement:
        """Where the plan's ranks stand on the cluster."""
        from paceline.plan.placement.place import place

        return place(self.profile, self.cluster, self.plan, self.forecast.step_seconds.value)

    @property
    def threads(self) -> int:
        """Compute threads of a CPU device; 0 for accelerators."""
        return self.cluster.device.threads

    def peak_flops(self, precision: str) -> float:
        """Return one device's FLOP/s that utilisation divides by; NaN where unknown."""
        return matrix_peak(self._context, precision)[0]

    def peak_name(self, precision: str) -> str:
        """Return what that peak is: published, or measured by the probe."""
        return matrix_peak(self._context, precision)[1]

    @property
    def _context(self) -> Context:
        return Context(
            self.profile, self.cluster, self.batch_samples, self.steps, optimizer_key(self.spec.task.optimizer)
        )


@dataclass(frozen=True)
class Prepared:
    """A task ready to be planned on any cluster: its data's facts, its model's profile, batch and steps."""

    spec: Spec
    facts: DataFacts
    profile: ModelProfile
    batch_samples: int
    steps: int


def prepare_task(spec: Spec, *, say: Callable[[str], None] | None = None) -> Prepared:
    """Return what planning a spec's task needs to know of it. `say` hears of slow preparations.

    Raises the errors of data and model. Imports no torch for built-in models and text.
    """
    from paceline.plan.placement.grouped import refuse_groups

    refuse_groups(spec)
    task = spec.task
    facts = data_facts(task.data, say)
    profile = profile_task(task, facts)
    batch = batch_samples(task, facts.items_per_sample)
    steps = total_steps(task, batch, facts.items_per_sample, facts.samples)
    return Prepared(spec, facts, profile, batch, steps)


def plan_task(spec: Spec, *, say: Callable[[str], None] | None = None) -> Planned:
    """Return the best plan of a spec's task on its cluster, with its price. `say` hears of slow preparations.

    Raises DoesNotFit where no plan fits, and the errors of data, model and cluster.
    """
    cluster, remarks = resolve_cluster(spec.cluster)
    return plan_prepared(prepare_task(spec, say=say), cluster, tuple(remarks))


def plan_prepared(prepared: Prepared, cluster: Cluster, remarks: tuple[str, ...] = ()) -> Planned:
    """Return the best plan of a prepared task on a cluster. Raises DoesNotFit where none fits or keeps the limits."""
    planned = _planned(prepared, cluster, remarks, goodput=1.0)
    constraints = prepared.spec.plan
    if constraints.deadline is None and constraints.budget_usd is None:
        return planned
    goodput = planned.expected.goodput
    if not goodput < 1:  # failures take nothing, or nothing is known of them
        return planned
    # What failures take hardly depends on the plan: the best one's share tells what they leave of deadline and budget.
    return _planned(prepared, cluster, remarks, goodput)


def _planned(prepared: Prepared, cluster: Cluster, remarks: tuple[str, ...], goodput: float) -> Planned:
    spec, optimizer = prepared.spec, optimizer_key(prepared.spec.task.optimizer)
    learnt = recall(prepared.profile, optimizer, cluster, spec.cluster)
    measured = read_measurements(task_key(prepared.profile, optimizer), cluster) if spec.cluster.learn else {}
    found = search(
        prepared.profile,
        cluster,
        spec.plan,
        batch_samples=prepared.batch_samples,
        steps=prepared.steps,
        optimizer=optimizer,
        goodput=goodput,
        learnt=learnt,
        measured=measured,
    )
    return Planned(
        spec=spec,
        cluster=cluster,
        profile=prepared.profile,
        facts=prepared.facts,
        search=found,
        plan=found.best.plan,
        forecast=found.best.forecast,
        batch_samples=prepared.batch_samples,
        steps=prepared.steps,
        remarks=(
            *remarks,
            *_notes(prepared),
            *_offload_remarks(found.best.plan, spec.plan, cluster),
            *_compile_remarks(found.best.plan, prepared.profile),
        ),
        learnt=learnt,
    )


def _notes(prepared: Prepared) -> tuple[str, ...]:
    """Return what is to be said of the data and of the model's profile."""
    return (*prepared.facts.notes, *filter(None, [prepared.profile.note]), *prepared.profile.remarks)


def _offload_remarks(plan: Plan, asked: PlanSpec, cluster: Cluster) -> tuple[str, ...]:
    """Return what is to be said of a plan that moves state to the host: why it does, or that it is of no use."""
    if plan.offload == "none":
        return ()
    if cluster.device.kind == "cpu":
        return (f"offload = {plan.offload} saves nothing here: a CPU's host memory is the device's own",)
    if asked.offload == "auto":
        return (f"offload = {plan.offload}: without it no plan fits",)
    return ()


def _compile_remarks(plan: Plan, profile: ModelProfile) -> tuple[str, ...]:
    """Return what is to be said of a plan that compiles a model which draws random numbers."""
    if not plan.compile or not profile.drawing:
        return ()
    return (
        f"compile = true: {len(profile.drawing)} blocks draw random numbers and run uncompiled, since the compiler's "
        "own would follow the micro-batch; a dropout of 0 has them compiled",
    )


def profile_task(task: Task, facts: DataFacts) -> ModelProfile:
    """Return the model's profile: analytic for the built-in family on its own objective, else traced.

    Closed in it are also the axes that the task's optimizers close.
    """
    from paceline.task.profile.limits import close_for_task

    return close_for_task(_profile_model(task, facts), task, facts)


def _profile_model(task: Task, facts: DataFacts) -> ModelProfile:
    if is_built_in(task, facts):
        from paceline.task.models.sizes import MoEConfig, resolve_decoder
        from paceline.task.profile.decoder import profile_decoder
        from paceline.task.profile.moe import profile_moe

        config = resolve_decoder(task.model, facts.vocab or 0, facts.items_per_sample)
        if isinstance(config, MoEConfig):
            return profile_moe(config, facts.items_per_sample)
        return profile_decoder(config, facts.items_per_sample)
    from paceline.task.profile.apart import trace_task

    return trace_task(task)


def is_built_in(task: Task, facts: DataFacts) -> bool:
    """Return whether the model is of the built-in family on its own objective: its profile is computed, not traced."""
    from paceline.spec.import_paths import is_import_path

    named = isinstance(task.model, ModelSpec) and not is_import_path(task.model.name)
    return named and facts.unit == "tokens" and task.objective in ("auto", "next_token") and not task.turns

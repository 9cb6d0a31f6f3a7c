"""Choice: a task on a cluster, with the plan that was chosen. Data only; planned.py adds the analyses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.compute import matrix_peak
from paceline.plan.learn.correct import Learnt
from paceline.plan.search.found import SearchResult
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Forecast
from paceline.spec.load import Spec
from paceline.spec.optimizers import optimizer_key
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile
from paceline.task.data.facts import DataFacts

if TYPE_CHECKING:
    from paceline.spec.journal.kinds import DecisionRecord


@dataclass(frozen=True)
class Prepared:
    """A task ready to be planned on any cluster: its data's facts, its model's profile, batch and steps."""

    spec: Spec
    facts: DataFacts
    profile: ModelProfile
    batch_samples: int
    steps: int
    settled: tuple[DecisionRecord, ...] = ()  # what the task left open and its data decided


SUPERLATIVES = {
    "time": "fastest",
    "memory": "smallest",
    "money": "cheapest",
    "energy": "least energy",
    "carbon": "least carbon",
}


@dataclass(frozen=True)
class Choice:
    """What was chosen for a task on a cluster, its price, and everything that both rest on."""

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
    settled: tuple[DecisionRecord, ...] = ()  # what the task left open and its data decided

    @property
    def reason(self) -> str:
        """Why this plan: the goal, how many others there were, why not the first of them, and why this precision."""
        goal = str(self.spec.plan.goal)
        best = SUPERLATIVES.get(goal, f"best by {goal}")
        fit, refused = len(self.search.candidates), len(self.search.refused)
        kept = f"; {self.search.kept_because}" if self.search.kept_because else ""
        return f"{best} of {fit:,} that fit, {refused:,} refused{kept}; {self.search.precision_because}"

    @property
    def prepared(self) -> Prepared:
        """The task without the cluster."""
        return Prepared(self.spec, self.facts, self.profile, self.batch_samples, self.steps, self.settled)

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
    def _context(self) -> PricedTask:
        return PricedTask(
            self.profile, self.cluster, self.batch_samples, self.steps, optimizer_key(self.spec.task.optimizer)
        )

"""A task on a cluster: all that a plan's price depends on besides the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from paceline.plan.cost.constants import Constants, read_constants
from paceline.plan.cost.model_parts import Shapes
from paceline.plan.cost.rates import Rates
from paceline.plan.cost.software import PACELINE, Software
from paceline.plan.learn.correct import Learnt
from paceline.plan.learn.task_measurement import TaskMeasurement
from paceline.spec.cluster import Cluster
from paceline.spec.profile import ModelProfile


@dataclass(frozen=True)
class TaskOnCluster:
    """A task on a cluster, with the device's rates and the model's blocks, looked up once."""

    profile: ModelProfile
    cluster: Cluster
    batch_samples: int
    steps: int
    optimizer: str = "adamw"
    software: Software = PACELINE
    constants: Constants = field(default_factory=read_constants)
    learnt: Learnt | None = None  # what finished runs on this machine say; None: nothing, or it is not asked
    measured: Mapping[str, TaskMeasurement] = field(default_factory=dict)  # of the task itself, by precision
    scored: int = 0  # candidates that are scored for each sample that is trained on; 0 where none are
    stages: bool = False  # whether a run saves beside training, from a copy of its state in host memory

    def rates(self, precision: str) -> Rates:
        """Return the device's rates in a precision; looked up once."""
        if precision not in self._rates:
            self._rates[precision] = Rates(self.cluster.device, precision, self.constants)
        return self._rates[precision]

    @cached_property
    def _rates(self) -> dict[str, Rates]:
        return {}

    @cached_property
    def shapes(self) -> Shapes:
        """The different blocks of the model."""
        return Shapes(self.profile)

    @property
    def recomputable(self) -> bool:
        """Whether there are blocks that activation checkpointing applies to."""
        return self.profile.repeated_blocks > 0

    @cached_property
    def stream_elements(self) -> float:
        """Elements of what one sample passes from block to block."""
        return max((block.input_elements for block in self.profile.blocks), default=0.0)

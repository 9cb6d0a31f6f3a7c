"""How weights are updated: the optimizer, its groups of parameters, and the learning rate as a function of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError
from paceline.spec.import_paths import CALLED
from paceline.units import Amount

BUILT_IN_COURSES = ("constant", "cosine", "linear", "wsd")  # of the learning rate


@dataclass(frozen=True)
class GroupSpec(Declared, table="task.optimizer.groups"):
    """Parameters, by their names, that are trained otherwise than the rest."""

    match: tuple[str, ...] = option(
        (), "patterns of parameter names, `*` for any text; a parameter belongs to the first group that matches it"
    )
    name: Any = option("", "another optimizer for them; empty keeps task.optimizer.name", objects=CALLED)
    lr_scale: float = option(1.0, "their learning rate over the schedule's", minimum=0.0)
    frozen_until: Amount | None = option(
        None, "they stay as they are up to and with this step", quantity="amount", units=("steps",)
    )
    frozen_after: Amount | None = option(
        None, "they stay as they are after this step", quantity="amount", units=("steps",)
    )
    weight_decay: float | None = option(
        None, "their weight decay, whatever their dimensions; unset keeps the default rule", minimum=0.0
    )
    arguments: dict[str, Any] = option(factory=dict, doc="further arguments of the optimizer, by its own names")


@dataclass(frozen=True)
class OptimizerSpec(Declared, table="task.optimizer"):
    """The optimizer and its fixed hyperparameters.

    In Python `name` also takes a callable `factory(parameter_groups, lr=..., **arguments)` that returns a
    `torch.optim.Optimizer`, the classes of torch.optim among them.
    """

    name: Any = option(
        "adamw",
        "update rule: 'adamw', 'sgd', 'adam', 'nadam', 'radam', 'adamax', 'adagrad', 'adadelta', 'rmsprop', 'lion',"
        " 'adafactor', 'muon' (matrices; AdamW for the rest), 'adamw8bit' (needs the extra 8bit), or"
        " `package.module:factory`",
        objects=CALLED,
    )
    lr: float = option(3e-4, "peak learning rate", above=0.0)
    beta1: float = option(
        0.9, "Adam's family and Lion: decay of the first moment; SGD: momentum", minimum=0.0, maximum=0.9999
    )
    beta2: float = option(
        0.95, "Adam's family: decay of the second moment; Lion: of its momentum", minimum=0.0, maximum=0.999999
    )
    eps: float = option(1e-8, "Adam's family: added to the denominator", above=0.0)
    weight_decay: float = option(
        0.1, "weight decay of parameters of two or more dimensions, decoupled where the rule's is", minimum=0.0
    )
    clip_norm: float = option(
        1.0, "global gradient norm above which gradients are scaled down (0 turns clipping off)", minimum=0.0
    )
    arguments: dict[str, Any] = option(
        factory=dict, doc="further arguments of the optimizer, by its own names, such as { nesterov = true }"
    )
    layer_decay: float = option(
        1.0,
        "the learning rate of a block over that of the block above it: the last block has this part of the schedule's,"
        " and what comes before the first block the least",
        above=0.0,
        maximum=1.0,
    )
    groups: tuple[GroupSpec, ...] = option((), "groups of parameters that are trained otherwise, in order")


@dataclass(frozen=True)
class ScheduleSpec(Declared, table="task.schedule"):
    """The learning rate as a function of the step."""

    kind: Any = option(
        "cosine",
        "shape after warm-up, or `package.module:function` of the step that returns the whole learning rate, or of a"
        " scheduler of torch.optim.lr_scheduler, which starts from task.optimizer.lr",
        choices=BUILT_IN_COURSES,
        objects=CALLED,
    )
    warmup: Amount | None = option(None, 'linear warm-up, such as "30 steps"', quantity="amount")
    decay: Amount | None = option(
        None, "wsd: length of the final linear decay; unset means a tenth of the run", quantity="amount"
    )
    final: float = option(0.1, "learning rate at the end as a fraction of the peak", minimum=0.0, maximum=1.0)
    arguments: dict[str, Any] = option(
        factory=dict, doc="further arguments of a function or scheduler, by its own names, such as { T_0 = 10 }"
    )

    @property
    def is_own(self) -> bool:
        """Whether a function or a scheduler of the user's choice gives the rate."""
        return self.kind not in BUILT_IN_COURSES

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for options that would have no effect."""
        own = self.is_own
        without_effect = ("warmup", "decay", "final") if own else ("arguments",)
        defaults: dict[str, object] = {"warmup": None, "decay": None, "final": 0.1, "arguments": {}}
        for name in without_effect:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"task.schedule.{name} is without effect",
                    "a function or scheduler gives the whole learning rate" if own else f"'{self.kind}' takes none",
                    "leave it out",
                )

"""EvaluateSpec: the `[task.evaluate]` table of a spec. What evaluations measure, on what, and what follows from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError, suggestion
from paceline.spec.import_paths import DATA_SETS, METRICS, is_import_path

LOSS = "loss"
# By name whether more is better. `top_K` is any number of classes in the place of K.
BETTER = {
    LOSS: "min", "accuracy": "max", "top_K": "max", "f1_macro": "max", "f1_micro": "max", "perplexity": "min",
    "bits_per_byte": "min", "rmse": "min", "mae": "min", "reward_chosen": "max", "reward_rejected": "min",
    "reward_accuracy": "max", "reward_margin": "max",
}  # fmt: skip
REWARDS = tuple(name for name in BETTER if name.startswith("reward_"))  # of preference pairs, which always have them
TOP = re.compile(r"top_([1-9]\d*)")


@dataclass(frozen=True)
class HeldOutSetSpec(Declared, table="task.evaluate.sets"):
    """A further set of held-out data, by a name of its own. All of it is held out."""

    name: str = option("", "its name in the journal and the report")
    source: Any = option("", "what task.data.source takes; other options are those of task.data", objects=DATA_SETS)
    include: tuple[str, ...] = option((), "file name patterns to read from a folder, in place of task.data.include")


@dataclass(frozen=True)
class EvaluateSpec(Declared, table="task.evaluate"):
    """What evaluations measure besides the loss, and what is done about it. When they are made is run.evaluate_every's.

    A metric is made of sums and counts over all held-out samples, so it is the same on every layout.
    """

    metrics: tuple[Any, ...] = option(
        (),
        "metrics of the held-out samples: 'accuracy', 'top_5' (any number), 'f1_macro', 'f1_micro', 'perplexity',"
        " 'bits_per_byte', 'rmse', 'mae', `package.module:function` of (outputs, batch) that returns a number for"
        " each row, (sum, count), or a dict of such, or `package.module:metric` of torchmetrics (the extra metrics)"
        " whose states are sums",
        objects=METRICS,
    )
    metric: str = option(
        LOSS, "the metric that says which evaluation is the best: for patience, and for checkpoints that are kept"
    )
    mode: str = option(
        "auto", "whether the least or the most of it is best (auto: as is usual of the built-in ones)",
        choices=("auto", "min", "max"),
    )  # fmt: skip
    patience: int = option(
        0, "evaluations without a better one after which training ends early, as complete (0: never)", minimum=0
    )
    min_delta: float = option(0.0, "by how much an evaluation must be better to count as better", minimum=0.0)
    sets: tuple[HeldOutSetSpec, ...] = option(
        (),
        "further sets of held-out data, measured at each evaluation; of a task that holds out none of its own data, the"
        " first of them is what is evaluated",
    )

    @property
    def judged(self) -> str:
        """The name under which an evaluation has `metric`: one of the user's own may be told by its import path too."""
        return self.metric.rpartition(":")[2] if is_import_path(self.metric) else self.metric

    @property
    def sign(self) -> float:
        """1 where less of the metric is better, -1 where more is."""
        return -1.0 if (self.mode if self.mode != "auto" else BETTER.get(_kind(self.metric), "")) == "max" else 1.0


def check_evaluate(spec: EvaluateSpec) -> None:
    """Raise ConfigError where options of the table contradict each other, or name nothing."""
    for metric in spec.metrics:
        if isinstance(metric, str) and not is_import_path(metric) and _kind(metric) not in BETTER:
            raise ConfigError(
                f"there is no metric '{metric}'",
                "one of your own is named by its import path, package.module:function",
                suggestion(metric, _names(BETTER)),
            )
    named = [metric for metric in spec.metrics if isinstance(metric, str) and not is_import_path(metric)]
    named += [spec.metric] if spec.metric in REWARDS and spec.metric not in named else []
    own = len(named) < len(spec.metrics)
    strange = is_import_path(spec.metric) and spec.metric not in spec.metrics
    if spec.metric not in (LOSS, *named) and (not own or strange or _kind(spec.metric) in BETTER):
        raise ConfigError(
            f"task.evaluate.metric = '{spec.metric}' is not measured",
            f"task.evaluate.metrics has {', '.join(str(metric) for metric in spec.metrics) or 'none'}",
            f'task.evaluate.metrics = ["{spec.metric}"]' if _kind(spec.metric) in BETTER
            else suggestion(spec.metric, [LOSS, *(metric for metric in spec.metrics if isinstance(metric, str))]),
        )  # fmt: skip
    if spec.mode == "auto" and _kind(spec.metric) not in BETTER:
        raise ConfigError(
            f"task.evaluate.mode is not set, and task.evaluate.metric is '{spec.metric}'",
            "of a metric of your own nothing says whether less or more is better",
            'task.evaluate.mode = "max", or "min"',
        )
    names = [each.name for each in spec.sets]
    for number, each in enumerate(spec.sets, 1):
        if not re.fullmatch(r"\w[\w .+-]*", each.name) or names.count(each.name) > 1:
            raise ConfigError(
                f"task.evaluate.sets.{number}.name = '{each.name}' cannot be",
                "the journal keeps what is measured on a set under a name of its own", 'a name such as "hard"',
            )  # fmt: skip
        if isinstance(each.source, str) and not each.source:
            raise ConfigError(f"task.evaluate.sets.{number}.source is not set", "nothing says what is read", "a file")


def _kind(name: str) -> str:
    return "top_K" if TOP.fullmatch(name) else name


def _names(known: Iterable[str]) -> list[str]:
    return [name.replace("top_K", "top_5") for name in known if name != LOSS]

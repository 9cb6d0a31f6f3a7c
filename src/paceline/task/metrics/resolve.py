"""The metrics that a task asks for, made from their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.spec.import_paths import is_import_path, load_object
from paceline.spec.watch.evaluate import REWARDS, TOP, EvaluateSpec
from paceline.task.data.protocol import Source
from paceline.task.metrics.built_in import BitsPerByte, built_in
from paceline.task.metrics.kept_states import StateMetric, keeps_states
from paceline.task.metrics.metric import Metric
from paceline.task.metrics.own import TAKEN, OwnMetric
from paceline.task.metrics.rewards import RewardsOfPairs
from paceline.task.metrics.token_bytes import bytes_of_tokens
from paceline.task.objective import next_token


def metrics_of(spec: EvaluateSpec, source: Source, objective: Callable[..., object], cp: int = 1) -> tuple[Metric, ...]:
    """Return the metrics that are measured on samples of a source. Raises ConfigError for what cannot be measured.

    An objective of preference pairs has those of rewards, whether they are asked for or not.

    `cp` is how many ranks share a sequence: functions of the user's then see parts of it.
    """
    # A metric of torchmetrics makes another metric of a comparison, so names alone are compared.
    asked = [each for each in spec.metrics if not (isinstance(each, str) and each in REWARDS)]
    of_pairs = getattr(objective, "told", None) is not None
    if len(asked) < len(spec.metrics) and not of_pairs:
        raise ConfigError(
            f"the metrics {', '.join(REWARDS)} are of preference pairs", "the objective is not 'dpo'", "other metrics"
        )
    made = tuple(_metric(each, source, objective) for each in asked)
    made += (RewardsOfPairs(),) if of_pairs else ()
    for metric in made:
        if cp > 1 and isinstance(metric, OwnMetric) and not getattr(metric.function, "sums_over_tokens", False):
            raise ConfigError(
                f"the metric '{metric.name}' cannot be had with cp = {cp}",
                "ranks share sequences, so it would see parts of them",
                f"an attribute `sums_over_tokens = True` on {metric.name}, if it adds up numbers of tokens; or cp = 1",
            )
    return made


def _metric(asked: object, source: Source, objective: Callable[..., object]) -> Metric:
    if isinstance(asked, str) and not is_import_path(asked):
        top = TOP.fullmatch(asked)
        if asked in ("perplexity", "bits_per_byte") and objective is not next_token:
            raise ConfigError(
                f"the metric '{asked}' is of language models", "the objective is not 'next_token'",
                "the loss itself, or a metric of your own",
            )  # fmt: skip
        if asked == "bits_per_byte":
            return BitsPerByte(bytes_of_tokens(source))
        return built_in(asked, int(top[1]) if top else None)
    found = load_object(asked, "task.evaluate.metrics") if isinstance(asked, str) else asked
    name = asked.rpartition(":")[2] if isinstance(asked, str) else getattr(found, "__name__", type(found).__name__)
    if keeps_states(found):
        return StateMetric(found, name, objective)
    if not callable(found):
        raise ConfigError(
            f"task.evaluate.metrics: '{name}' is a {type(found).__name__}", "it cannot be called",
            f"a function of (outputs, batch) that returns {TAKEN}",
        )  # fmt: skip
    if not _takes_both(found):
        raise ConfigError(
            f"task.evaluate.metrics: '{name}' cannot be called with (outputs, batch)",
            f"its arguments are {inspect.signature(found)}",
            f"a function of (outputs, batch) that returns {TAKEN}; a metric of torchmetrics is named as an object, "
            f"{name} = BinaryAUROC(thresholds=200), and not as what makes it",
        )
    return OwnMetric(found, name)


def _takes_both(found: Callable[..., object]) -> bool:
    """Return whether a function takes the outputs and the batch, as far as its signature tells."""
    try:
        inspect.signature(found).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has none, as some of C have not
        return True
    return True

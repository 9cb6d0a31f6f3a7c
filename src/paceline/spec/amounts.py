"""Amounts of training as whole samples and steps. The global batch is exact or refused; steps are rounded up.

An "item" is what the loss counts: a token of a text, one image. A sample has `items_per_sample` of them at most.
Values are read as the decimal number that was written (0.1 epochs is a tenth, not the nearest binary fraction).
"""

from __future__ import annotations

import math
from fractions import Fraction

from paceline.errors import ConfigError
from paceline.spec.steps.growth import course_of
from paceline.spec.task import Task
from paceline.units import Amount


def batch_samples(task: Task, items_per_sample: int) -> int:
    """Return the samples of one global batch, exactly.

    Of batches whose rows follow from lengths it is how many of the longest there are. Raises ConfigError, naming the
    nearest valid values, where tokens do not make whole samples: a batch that is silently rounded is another
    experiment.
    """
    amount = task.global_batch
    if amount.unit not in ("samples", "tokens"):
        raise ConfigError(
            f"task.global_batch = '{amount}' is not a batch", "a batch is counted in samples or tokens",
            f'"{items_per_sample * 32} tokens" or "32 samples"',
        )  # fmt: skip
    per_sample = 1 if amount.unit == "samples" else items_per_sample
    samples = _exact(amount) / per_sample
    if task.batch_rows == "by_length" and amount.unit == "tokens":
        return max(1, math.floor(samples))
    if samples.denominator == 1 and samples >= 1:
        return int(samples)
    nearest = sorted({max(1, math.floor(samples)), max(1, math.ceil(samples))})
    raise ConfigError(
        f"task.global_batch = '{amount}' is not a whole number of samples",
        "half a sample cannot be drawn" if per_sample == 1 else f"a sample has {per_sample} tokens",
        " or ".join(f'"{count * per_sample} {amount.unit}"' for count in nearest),
    )


def total_steps(task: Task, batch_samples: int, items_per_sample: int, dataset_samples: int) -> int:
    """Return the steps at which the task is complete: `task.stop`, rounded up to a whole step.

    Samples, tokens and epochs are those that are read: with a selection among candidates, the candidates.

    Raises ConfigError where a batch that grows by what is measured leaves their number open.
    """
    growth = task.growth
    if task.batch_rows == "by_length":
        return _steps_of_budget(task, items_per_sample, dataset_samples)
    if growth.by == "noise" and task.stop.unit != "steps":
        raise ConfigError(
            f"task.stop = '{task.stop}' with task.growth.by = 'noise'",
            "how many steps that takes follows from what is measured, and the learning rate's course is in steps",
            'task.stop = "1000 steps"',
        )
    if growth.by != "schedule" or task.stop.unit == "steps":
        read = task.selection.candidates_of(batch_samples)
        return in_steps(task.stop, read, items_per_sample, dataset_samples)
    samples = in_steps(task.stop, 1, items_per_sample, dataset_samples)  # steps of one sample each
    return course_of(growth, batch_samples, items_per_sample).steps_for(samples)


def _steps_of_budget(task: Task, items_per_sample: int, dataset_samples: int) -> int:
    """Return the steps of a task whose batches hold so many tokens: as many as its tokens make, each batch taken full.

    Raises ConfigError where that follows from every length, and for a batch that is not counted in tokens.
    """
    if task.global_batch.unit != "tokens":
        raise ConfigError(
            f"task.global_batch = '{task.global_batch}' with task.batch_rows = 'by_length'",
            "how many samples a batch has follows from its tokens",
            f'task.global_batch = "{items_per_sample * 32} tokens"',
        )
    if task.growth.grows:
        raise ConfigError(
            f"task.growth.by = '{task.growth.by}' with task.batch_rows = 'by_length'",
            "a batch has as many samples as its tokens allow",
            'task.batch_rows = "fixed"',
        )
    if task.stop.unit == "tokens":
        return max(1, math.ceil(_exact(task.stop) / _exact(task.global_batch)))
    if task.stop.unit != "steps":
        raise ConfigError(
            f"task.stop = '{task.stop}' with task.batch_rows = 'by_length'",
            "how many steps that takes follows from the lengths of all samples",
            'task.stop = "1000 steps", or an amount in tokens',
        )
    return in_steps(task.stop, 1, items_per_sample, dataset_samples)


def in_steps(amount: Amount, batch_samples: int, items_per_sample: int, dataset_samples: int) -> int:
    """Return the fewest steps that cover the amount, at least 1.

    `dataset_samples` is only read for epochs; raises ConfigError where it is then not known (0).
    """
    value = _exact(amount)
    if amount.unit == "steps":
        return max(1, math.ceil(value))
    if amount.unit == "epochs" and dataset_samples < 1:
        raise ConfigError(
            f"'{amount}' cannot be counted in steps", "the number of samples of the data set is not known",
            'give steps, samples or tokens, such as "300 steps"',
        )  # fmt: skip
    per_unit = {"samples": Fraction(1), "tokens": Fraction(1, items_per_sample), "epochs": Fraction(dataset_samples)}
    return max(1, math.ceil(value * per_unit[amount.unit] / batch_samples))


def _exact(amount: Amount) -> Fraction:
    return Fraction(repr(amount.value))

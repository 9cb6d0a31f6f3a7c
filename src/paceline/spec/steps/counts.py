"""The amounts of a spec, such as "1 epoch" or "2,000,000 tokens", counted in steps of its run."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec.amounts import in_steps
from paceline.spec.load import Spec
from paceline.units import Amount


@dataclass(frozen=True)
class StepCounts:
    """How long the learning rate warms up and decays, and after how many steps a run does what it does again and again.

    None stands for what is not asked for.
    """

    warmup: int
    decay: int
    check_every: int | None
    write_every: int | None
    evaluate_every: int | None
    checkpoint_every: int | None
    memory_every: int | None  # checkpoints in the machines' memory
    remote_every: int | None  # copies of checkpoints in remote storage
    recompute_every: int | None
    health_every: int
    log_every: int


def step_counts(
    spec: Spec, steps: int, batch_samples: int, items_per_sample: int, dataset_samples: int, has_held_out: bool
) -> StepCounts:
    """Return the amounts of a run of `steps` steps, whose batches have `batch_samples` samples each.

    With "1 epoch" of 1,000 samples and batches of 8, that is 125 steps. Raises ConfigError for an amount in epochs of
    data whose number of samples is not known.
    """
    read = spec.task.selection.candidates_of(batch_samples)

    def count(amount: Amount | None) -> int | None:
        return None if amount is None else in_steps(amount, read, items_per_sample, dataset_samples)

    schedule, run = spec.task.schedule, spec.run
    return StepCounts(
        warmup=count(schedule.warmup) or 0,
        decay=count(schedule.decay) or max(1, steps // 10),
        check_every=count(run.check_every),
        write_every=count(spec.task.samples.every),
        evaluate_every=count(run.evaluate_every) if has_held_out else None,
        checkpoint_every=count(run.checkpoint_every),
        memory_every=count(run.checkpoints.memory_every),
        remote_every=count(run.checkpoints.remote_every),
        recompute_every=count(run.health.recompute_every),
        health_every=count(run.observe.health_every) or 1,
        log_every=count(run.log_every) or 1,
    )

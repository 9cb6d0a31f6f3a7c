"""HealthSpec: the `[run.health]` table of a spec. What is looked for while a run trains, and what is done about it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.units import Amount


@dataclass(frozen=True)
class HealthSpec(Declared, table="run.health"):
    """When a rank counts as hung, a number as wrong, a device as slow."""

    hangs: bool = option(True, "look for ranks that hang, save the stacks of all, and end those that hang")
    hang_factor: float = option(8.0, "a rank hangs that stands still for so many median steps", above=1.0)
    hang_minimum: float = option(10.0, "and for so long at least", quantity="duration", above=0.0)
    hang_still: float = option(
        2.0, "instead of `hang_minimum`, of a rank that a signal has stopped, or that does nothing at all, as the "
        "system tells, in the passes, the reduction or the update of a step",
        quantity="duration", above=0.0,
    )  # fmt: skip
    hang_elsewhere: float = option(
        600.0, "the same outside of steps (loading, saving, evaluating, the loop's own code) and before three steps",
        quantity="duration", above=0.0,
    )  # fmt: skip
    on_nonfinite: str = option(
        "stop", "what a loss or gradient norm that is no finite number does: stop the run, or skip the update",
        choices=("stop", "skip"),
    )  # fmt: skip
    on_spike: str = option(
        "off", "what a spike of the loss or of the gradient norm does: nothing is looked for (off), it is told (warn), "
        "the update is left out (skip), or the run goes back to the newest checkpoint and passes over the step's "
        "samples (rollback)",
        choices=("off", "warn", "skip", "rollback"),
    )  # fmt: skip
    spike_window: int = option(64, "steps that a spike is told from", minimum=8)
    spike_deviations: float = option(
        10.0,
        "a spike is so many of the window's deviations above its median; a deviation is robust, and that of the values "
        "above the median where these reach farther than those below",
        above=0.0,
    )
    most_skips: int = option(3, "updates left out, or rollbacks, at most in `skips_window` steps; then the run stops",
                             minimum=0)  # fmt: skip
    skips_window: int = option(1000, "steps in which `most_skips` are counted", minimum=1)
    recompute_every: Amount | None = option(
        None, "steps, samples or tokens between recomputations of a micro-batch, whose bits must be equal",
        quantity="amount", units=("steps", "samples", "tokens"),
    )  # fmt: skip
    straggler_factor: float = option(1.3, "a rank is slow that computes so many times as long as the median", above=1.0)
    straggler_checks: int = option(3, "checks in a row in which it must be slow before it is named", minimum=1)
    on_straggler: str = option(
        "tell", "what a slow rank does: it is named (tell), it gets fewer rows of each batch and the others more "
        "(less_work), or another process takes its place (replace)", choices=("tell", "less_work", "replace"),
    )  # fmt: skip
    straggler_gain: float = option(
        0.1, "part of the longest computing of a step that other rows must save by forecast", above=0.0
    )
    memory_pressure: float = option(
        0.92, "part of a device's memory in use from which on a run with plan.micro_batch = auto halves it",
        above=0.0, maximum=1.0,
    )  # fmt: skip
    straggler_cuts: int = option(16, "how often one start changes the rows of its ranks at most", minimum=0)

"""The amounts of a spec in steps of its run, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.errors import ConfigError
from paceline.spec.load import Spec
from paceline.spec.steps.counts import StepCounts, step_counts
from paceline.spec.steps.selection import SelectionSpec
from paceline.units import Amount


def warmed_up(warmup: Amount, **run: object) -> Spec:
    spec = Spec()
    task = dataclasses.replace(spec.task, schedule=dataclasses.replace(spec.task.schedule, warmup=warmup))
    return dataclasses.replace(spec, task=task, run=dataclasses.replace(spec.run, **run))  # type: ignore[arg-type]


def counted(spec: Spec, samples: int = 1000, has_held_out: bool = True) -> StepCounts:
    return step_counts(spec, 500, 8, 16, samples, has_held_out)


def test_epochs_samples_and_tokens_are_counted_in_steps() -> None:
    every = {"evaluate_every": Amount(50, "samples"), "checkpoint_every": Amount(1280, "tokens")}
    found = counted(warmed_up(Amount(1, "epochs"), log_every=Amount(7, "steps"), **every))
    assert (found.warmup, found.evaluate_every, found.checkpoint_every, found.log_every) == (125, 7, 10, 7)
    assert found.decay == 50, "a tenth of the run"


def test_what_is_not_asked_for_is_none_and_a_run_without_held_out_data_evaluates_never() -> None:
    spec = warmed_up(Amount(1, "steps"), check_every=None, evaluate_every=Amount(1, "steps"))
    found = counted(spec, has_held_out=False)
    assert found.check_every is None and found.evaluate_every is None


def test_candidates_of_a_selection_count_as_read() -> None:
    """Of 1,000 samples, 8 of 32 candidates a step: an epoch is read in 32 steps."""
    spec = warmed_up(Amount(1, "epochs"))
    selects = dataclasses.replace(spec.task, selection=SelectionSpec(by="loss", candidates=4))
    assert counted(dataclasses.replace(spec, task=selects)).warmup == 32


def test_epochs_of_data_of_unknown_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="not known"):
        counted(warmed_up(Amount(1, "epochs")), samples=0)

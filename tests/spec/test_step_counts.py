"""The amounts of a spec in steps of its run, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.errors import ConfigError
from paceline.spec.load import Spec
from paceline.spec.steps.counts import StepCounts, step_counts
from paceline.spec.steps.selection import SelectionSpec
from paceline.units import Amount


def asked(**run: object) -> Spec:
    spec = Spec()
    return dataclasses.replace(spec, run=dataclasses.replace(spec.run, **run))  # type: ignore[arg-type]


def counted(spec: Spec, samples: int = 1000, has_held_out: bool = True) -> StepCounts:
    return step_counts(spec, 500, 8, 16, samples, has_held_out)


def test_epochs_samples_and_tokens_are_counted_in_steps() -> None:
    found = counted(asked(
        check_every=Amount(1, "epochs"), evaluate_every=Amount(50, "samples"), checkpoint_every=Amount(1280, "tokens"),
        log_every=Amount(7, "steps"),
    ))  # fmt: skip
    assert (found.check_every, found.evaluate_every, found.checkpoint_every, found.log_every) == (125, 7, 10, 7)


def test_what_is_not_asked_for_is_none_and_a_run_without_held_out_data_evaluates_never() -> None:
    found = counted(asked(check_every=None, evaluate_every=Amount(1, "steps")), has_held_out=False)
    assert found.check_every is None and found.evaluate_every is None


def test_candidates_of_a_selection_count_as_read() -> None:
    """Of 1,000 samples, 8 of 32 candidates a step: an epoch is read in 32 steps."""
    spec = asked(check_every=Amount(1, "epochs"))
    selects = dataclasses.replace(spec.task, selection=SelectionSpec(by="loss", candidates=4))
    assert counted(dataclasses.replace(spec, task=selects)).check_every == 32


def test_epochs_of_data_of_unknown_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="not known"):
        counted(asked(check_every=Amount(1, "epochs")), samples=0)

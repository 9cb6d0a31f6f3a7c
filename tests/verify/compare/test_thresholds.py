"""Thresholds of the user's own code: reached on weights far from the start, or told as not tried."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_whole_batch import checked, classifier, logits_of, summed, task_of
from torch import Tensor, nn

from paceline.spec.proof.records import PartProof, Proof
from paceline.units import Amount
from paceline.verify.compare import whole_batch
from paceline.verify.process.start import verify_text
from paceline.verify.reached.ahead import Walk
from paceline.verify.reached.thresholds import ThresholdsSeen


def _losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(logits_of(model, batch), batch["labels"], reduction="none")


def mined_with_a_floor(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Train on rows whose loss is large, and on one at least: at the start all are."""
    losses = _losses(model, batch).sort(descending=True).values
    kept = losses[:1] if losses[0] <= 0.1 else losses[losses > 0.1]
    return kept.sum(), len(losses)


def mined_with_a_floor_of_two(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Keep two rows at least, by a threshold for the second in the line of that for all."""
    losses = _losses(model, batch).sort(descending=True).values
    at = min(2, len(losses) - 1)
    kept = losses[losses > 0.3] if losses[at] > 0.3 else losses[: max(1, at)]
    return kept.sum(), len(losses)


def bounded_sum(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Bound the loss of a piece by a number that none comes near but on weights where it grows."""
    logits = logits_of(model, batch)
    return logits.square().sum().clamp(max=400.0), len(logits)


def bounded_rows(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Bound the loss of every row, which is a sum over rows on both sides."""
    losses = _losses(model, batch)
    return losses.clamp(min=0.1, max=5.0).sum(), len(losses)


def scaled_by_the_largest(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Divide by the largest logit of a piece where Python finds it large: at the start none is."""
    logits = logits_of(model, batch)
    if float(logits.detach().abs().max()) > 9.0:
        logits = logits / logits.abs().max()
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


def by_a_list(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """The same by the numbers of a list."""
    logits = logits_of(model, batch)
    if max(max(row) for row in logits.detach().abs().tolist()) > 9.0:
        logits = logits / logits.abs().max()
    return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


def numbers_of_rows(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Python decides row by row: a sum over rows on both sides."""
    losses = _losses(model, batch)
    return torch.stack([loss * (0.5 if loss.item() < 0.5 else 1.0) for loss in losses]).sum(), len(losses)


def out_of_reach(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Bound the loss of a piece by a number that no weights reach, of which the proof can only say so."""
    losses = _losses(model, batch)
    return losses.sum().clamp(max=1e12), len(losses)


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        (mined_with_a_floor, "32 steps down"),
        (mined_with_a_floor_of_two, "32 steps down"),
        (bounded_sum, "14 steps up"),
        (bounded_rows, ""),
        (scaled_by_the_largest, "32 steps down"),
        (by_a_list, "32 steps down"),
        (numbers_of_rows, ""),
        (out_of_reach, ""),
    ],
)
def test_a_threshold_that_the_start_does_not_reach_is_looked_for(objective: Any, way: str) -> None:
    """The weights of a few steps do not reach it either: told "equal", and late in training it is none."""
    found = checked(dataclasses.replace(task_of(classifier, objective), global_batch=Amount(96, "samples")))
    first = found.first_difference
    assert found.equal is not bool(way)
    untried = [place for place in found.not_tried if objective is out_of_reach]
    assert found.equal is False or (len(found.not_tried), len(untried)) in ((0, 0), (1, 1)), found.not_tried
    assert all(place.startswith("test_thresholds.py:") and "(clamp never acted)" in place for place in untried)
    assert first is None or f"on weights that {way}" in first.likely


@pytest.mark.parametrize(("objective", "ways"), [(summed, 1), (by_a_list, 3)])
def test_thresholds_of_the_data_lead_to_no_far_weights(
    objective: Any, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Pairs` compares where it makes labels: each program on such data went 64 steps, and their looks, for nothing."""
    walked: list[Walk] = []
    monkeypatch.setattr(whole_batch, "walk", lambda model, gradients, way: walked.append(way))
    checked(dataclasses.replace(task_of(classifier, objective), global_batch=Amount(96, "samples")))
    assert len(walked) == ways, walked


def _three_with_one_side() -> Tensor:
    both = (torch.ones(2) >= 0) & (torch.zeros(2) >= 0)
    return both.float().clamp(max=9.0)


def test_thresholds_with_one_side_are_told_in_few_words() -> None:
    """`numbers had one side alone: a.py:1 (ge always), a.py:1 (ge always)` said little, and that at length."""
    with ThresholdsSeen() as seen:
        _three_with_one_side()
    here = [place.removeprefix("test_thresholds.py:").partition(" ")[2] for place in seen.one_sided()]
    assert here == ["(>= always true)", "(clamp never acted)"], "alike ones once"
    places = tuple(f"losses.py:{line} (>= always true)" for line in range(5))
    part = PartProof("whole batch", "whole batch", "dp_replicate=2", "fp64", equal=True, seconds=1.0, left_out="",
                     ill_conditioned=None, steps=1, not_tried=places)  # fmt: skip
    proof = Proof("dp_replicate=2", True, "equal", 1.0, 2, parts=(part, part), differences={"whole batch": 0.0})
    told = verify_text(proof)
    assert told.count("losses.py") == 2 and told.count("and 3 more") == 1 and "the other side of losses.py:0" in told


class Mixed(nn.Module):
    """Draws a number for each row, and six that all rows share: of six rows both are six numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        return self.head(x * torch.rand(len(x), 1) * torch.rand(len(x))[:, None] + torch.randn(6))


def test_thresholds_hide_no_place_that_draws(recwarn: pytest.WarningsRecorder) -> None:
    """Whoever drew under the look for thresholds was nobody known: whose numbers these are was a guess by shape."""
    assert checked(task_of(Mixed, summed)).equal
    assert not [told for told in recwarn if "owner is a guess" in str(told.message)]

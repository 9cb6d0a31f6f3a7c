"""Numbers that a model changes by itself are told: no checkpoint holds them, and micro-batches move them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.run.record.own_counts import LOOKS, OwnCounts
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.reading import read_kind


class Counted(nn.Module):
    """Its second layer begins to learn with the ninth call, which no state holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.calls, self.longest, self.rate, self.is_warm = 0, 0, float("nan"), False
        self.key = 10**400  # more than a float holds

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        self.calls += self.training
        self.longest, self.is_warm = max(self.longest, len(x)), not self.is_warm
        self.second.requires_grad_(self.calls > 8)
        return self.second(self.first(x))


class Plain(Counted):
    """The same without a count: what the first call sets stays."""

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [rows, 2]."""
        self.longest = max(self.longest, len(x))
        return self.second(self.first(x))


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Points of two classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": torch.full((4,), float(index % 2)), "labels": torch.tensor(index % 2)}


def remarks_of(model: nn.Module, folder: Path) -> list[str]:
    """Train four steps on one device, and return what was said of the model's own numbers."""
    task = paceline.Task(
        name="counts", model=model, data=Points(), objective="classification", global_batch="8 samples", stop="4 steps"
    )
    run = paceline.Run(task, plan="micro_batch=2", cluster=1, run={"dir": str(folder)}, verify=False)
    for batch in run:
        run.step(batch)
    told = [record.because for record in read_kind(folder, DecisionRecord) if record.what == "left out"]
    return [text for text in told if "of the model" in text]


def test_a_count_of_calls_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = remarks_of(Counted(), tmp_path / "counted")
    assert told.startswith("'calls' of the model: changes in every step") and "micro-batch" in told
    assert capsys.readouterr().out.count("'calls' of the model") == 1


def test_what_stays_after_the_first_call_is_no_count(tmp_path: Path) -> None:
    assert remarks_of(Plain(), tmp_path / "plain") == []


def test_only_what_changes_between_each_two_looks_counts() -> None:
    model, counts = Counted(), OwnCounts()
    seen = []
    for step in range(LOOKS + 2):
        model.calls, model.longest = 2 * step, min(step, 1)
        seen.append(counts.after_step(model))
    assert [len(remarks) for remarks in seen] == [0, 0, 1, 0, 0] and "'calls'" in seen[2][0]

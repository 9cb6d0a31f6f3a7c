"""Runs with state on the host and activations within a budget resume bit for bit, also from and to runs without."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import paceline, records_of, steps_of, write_spec

# On a CPU nothing is saved, so it has to be asked for.
OFFLOADED = 'offload = "all"\nrecompute = "budget"\nrecompute_budget = 0.5'
PLANS = {"plain": "", "offloaded": OFFLOADED}


def curve(run_dir: Path) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in steps_of(run_dir)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offloaded")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[tuple[float, float]]:
    run_dir = folder / "undisturbed"
    assert paceline("train", write_spec(folder, run_dir, 1, steps=6)).returncode == 0
    return curve(run_dir)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("offloaded", "offloaded", marks=pytest.mark.deep),
        pytest.param("offloaded", "plain", marks=pytest.mark.deep),
        pytest.param("plain", "offloaded", marks=pytest.mark.deep),
    ],
)
def test_resume(folder: Path, undisturbed: list[tuple[float, float]], before: str, after: str) -> None:
    run_dir = folder / f"{before}-{after}"
    first = paceline("train", write_spec(folder, run_dir, 1, PLANS[before], steps=3))
    assert first.returncode == 0, first.stderr
    second = paceline("train", write_spec(folder, run_dir, 1, PLANS[after], steps=6))
    assert second.returncode == 0, second.stderr
    assert records_of(run_dir, "run_started")[-1]["step"] == 3
    assert curve(run_dir) == undisturbed
    assert ("optimizer state and activations in host memory" in first.stdout) == (before == "offloaded")

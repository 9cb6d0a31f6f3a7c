"""Numbers that are not finite, and spikes: what is left out, what is passed over, and that nothing else is."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import records_of, steps_of
from storm import Start, Story, told
from survive_runs import ALONE, Normed, normed, training
from tests_shared import decoder_task
from torch import nn

from paceline.errors import ConfigError, NumericalStop, StorageError
from paceline.run.callbacks.callbacks import CallbackDecisions
from paceline.run.loop.loader import StepBatch
from paceline.run.loop.resume import Progress
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.run.survive.health.go_back import go_back
from paceline.run.survive.health.guard import RollBack, UpdateGuard, guard_of
from paceline.run.survive.health.passed_over import Passage, PassedOver
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.run import RunSpec
from paceline.spec.survive.health import HealthSpec
from paceline.spec.sync import Sync
from paceline.units import Amount

TWO, STEPS, BATCH = {"dp_shard": 2}, 12, 13


def decided(run_dir: Path, *what: str) -> list[dict[str, Any]]:
    return [record for record in records_of(run_dir, "decision") if record["what"] in what]


# ---- the rule -------------------------------------------------------------------------------------------------------


def curve(count: int = 40) -> list[tuple[float, float]]:
    """A falling loss with some noise, and a noisy norm."""
    return [(4.0 - 0.03 * n + 0.05 * math.sin(7 * n), 1.0 + 0.3 * math.cos(5 * n)) for n in range(count)]


def verdicts(guard: UpdateGuard, numbers: list[tuple[float, float]]) -> list[bool | None]:
    return [guard.may_update(step, f"step {step}", "", *pair) for step, pair in enumerate(numbers, 1)]


def test_a_healthy_curve_has_no_spike() -> None:
    guard = UpdateGuard(HealthSpec(on_spike="skip", spike_window=16))
    assert all(verdicts(guard, curve())) and guard.take() == []
    flat = UpdateGuard(HealthSpec(on_spike="skip", spike_window=16))
    assert all(verdicts(flat, [(2.0, 1.0), (2.0001, 1.0)] * 20))


@pytest.mark.parametrize(("spike", "what"), [((9.0, 1.0), "the loss"), ((3.0, 30.0), "the gradient norm")])
def test_a_spike_is_left_out_and_later_ones_are_told_from_what_was_before_it(
    spike: tuple[float, float], what: str
) -> None:
    guard = UpdateGuard(HealthSpec(on_spike="skip", spike_window=16))
    assert verdicts(guard, [*curve(20), spike, spike, *curve(40)[20:]]).count(False) == 2
    first, second = guard.take()
    assert first.what == "skip" and what in first.because and first.evidence == second.evidence
    assert guard.take() == []


def test_what_is_not_finite_is_left_out_a_bounded_number_of_times() -> None:
    guard = UpdateGuard(HealthSpec(on_nonfinite="skip", most_skips=2, skips_window=10))
    assert guard.may_update(1, "step 1", "", math.nan, 1.0) is False
    assert guard.may_update(5, "step 5", "", 1.0, math.inf) is False
    with pytest.raises(NumericalStop, match=r"2 updates were left out within 10 steps"):
        guard.may_update(10, "step 10", "", math.nan, 1.0)
    assert guard.may_update(12, "step 12", "", math.nan, 1.0) is False  # step 1 is long ago


def test_a_guard_that_goes_on_from_a_checkpoint_decides_as_one_that_never_stopped() -> None:
    health, numbers = HealthSpec(on_spike="rollback", spike_window=16), curve()
    straight, first, second = UpdateGuard(health), UpdateGuard(health), UpdateGuard(health)
    verdicts(straight, numbers[:30])
    verdicts(first, numbers[:20])
    second.load(first.state())
    verdicts(second, numbers[20:30])
    assert second.state() == straight.state()
    for loss in (2.0, 3.2, 3.5, 4.0, 5.0, 9.0):
        found = []
        for guard in (straight, second):
            try:
                found.append(guard.may_update(31, "step 31", "", loss, 1.0))
            except RollBack as spike:
                found.append(spike.because)
        assert found[0] == found[1]


def test_without_a_policy_there_is_no_guard() -> None:
    plan = Plan(layout=Layout(), micro_batch=1, accumulation=1, batch_samples=1)
    assert guard_of(HealthSpec(), plan) is None
    assert guard_of(HealthSpec(on_spike="warn"), plan) is not None
    two = Plan(Layout(dp_replicate=2), micro_batch=1, accumulation=1, batch_samples=2, sync=Sync(wire="bf16"))
    with pytest.raises(ConfigError, match="a gradient that is left out would come back"):
        guard_of(HealthSpec(on_nonfinite="skip"), two)


def test_what_is_told_of_a_step_that_is_gone_back_from_are_its_own_samples(tmp_path: Path) -> None:
    """A loop of the user's that counts what it has given away reads this."""
    under = SimpleNamespace(go_back=lambda run: None, order=SimpleNamespace(ids=lambda seed, at: at + 100))
    run = SimpleNamespace(spec=SimpleNamespace(task=SimpleNamespace(seed=0), run=RunSpec()))
    batch = StepBatch(10, 9 * BATCH, BATCH, ())
    passed = PassedOver(tmp_path, World(0, 1, 0, torch.device("cpu")))
    begun = go_back(batch, RollBack("a spike", 9.0, 30.0, {}), under, run, passed, Progress(9, 9 * BATCH))  # type: ignore[arg-type]
    stats = begun.stats
    assert (stats.step, stats.position_before, stats.position_after) == (10, 9 * BATCH, 10 * BATCH)
    assert (stats.loss, stats.grad_norm, stats.weight, stats.lr) == (9.0, 30.0, 0.0, 0.0)
    assert not stats.updated and not stats.stop_requested and stats.seconds == {"total": 0.0}
    assert begun.progress == Progress(9, 9 * BATCH)
    assert begun.decisions[0].evidence["sample_ids"] == list(range(9 * BATCH + 100, 10 * BATCH + 100))
    assert passed.position_from(9 * BATCH) == 10 * BATCH


# ---- whole runs -----------------------------------------------------------------------------------------------------

NAN = {"kind": "nan", "step": 6, "rank": 1}
BURST = {"kind": "flip", "bit": 26, "step": 10, "rank": 1}  # of the exponent: a gradient 256 times as large
KILL = {"kind": "kill", "step": 11, "rank": 0}
SKIPS = {"health": {"on_nonfinite": "skip"}}
BACK = {"health": {"on_spike": "rollback", "spike_window": 8, "spike_deviations": 20.0}}
STORIES = [
    Story("plain", TWO, steps=STEPS),
    Story("watched", TWO, steps=STEPS, run={"health": {**SKIPS["health"], **BACK["health"]}}),
    Story("skips", TWO, [NAN], SKIPS, STEPS),
    Story("skips again", TWO, [NAN], SKIPS, STEPS),
    Story("too many", TWO, [{**NAN, "rate": 1.0, "times": 0, "step": 3}], SKIPS, STEPS, only_once=True),
    Story("back", TWO, [BURST], BACK, STEPS),
    Story("back and killed", TWO, [BURST, KILL], BACK, STEPS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def starts(folder: Path) -> dict[str, list[Start]]:
    return told(folder, STORIES)


def losses(run_dir: Path) -> list[str]:
    return [step["loss"].hex() if isinstance(step["loss"], float) else step["loss"] for step in steps_of(run_dir)]


def test_a_policy_that_finds_nothing_changes_nothing(folder: Path, starts: dict[str, list[Start]]) -> None:
    assert [start.code for start in starts["watched"]] == [0] and losses(folder / "watched") == losses(folder / "plain")
    assert not decided(folder / "watched", "skip", "spike", "rollback")
    assert not (folder / "watched" / "passed_over.json").exists()


def test_a_nan_is_left_out_and_teaches_nothing(folder: Path, starts: dict[str, list[Start]]) -> None:
    assert [start.code for start in starts["skips"]] == [0], starts["skips"]
    (decision,) = decided(folder / "skips", "skip")
    assert "step 6: loss" in decision["because"] and "gradient norm nan" in decision["because"]
    steps = steps_of(folder / "skips")
    assert [step["step"] for step in steps if step.get("updated") is False] == [6]
    assert losses(folder / "skips")[:6] == losses(folder / "plain")[:6]  # the loss itself was sound
    assert losses(folder / "skips")[6:] != losses(folder / "plain")[6:]
    assert [step["sample_ids"] for step in steps] == [step["sample_ids"] for step in steps_of(folder / "plain")]
    assert losses(folder / "skips again") == losses(folder / "skips")


def test_nan_after_nan_stops_the_run(folder: Path, starts: dict[str, list[Start]]) -> None:
    (start,) = starts["too many"]
    assert start.code == 6 and "step 6: loss" in start.what and "most_skips is 3" in start.because
    assert len(decided(folder / "too many", "skip")) == 3


def test_a_spike_sends_the_run_back_and_its_samples_are_passed_over(
    folder: Path, starts: dict[str, list[Start]]
) -> None:
    assert [start.code for start in starts["back"]] == [0], starts["back"]
    (decision,) = decided(folder / "back", "rollback")
    assert decision["evidence"]["passed_over"] == {"step": 10, "position": 9 * BATCH, "samples": BATCH}
    assert "back to step 8" in decision["to"] and "the gradient norm" in decision["because"]
    steps, plain = steps_of(folder / "back"), steps_of(folder / "plain")
    read = list(itertools.chain.from_iterable(step["sample_ids"] for step in steps))
    left_out = decision["evidence"]["sample_ids"]
    assert len(set(read)) == len(read) == STEPS * BATCH and len(left_out) == BATCH
    assert not set(read) & set(left_out)  # nothing twice, and what is passed over is named
    assert set(itertools.chain.from_iterable(step["sample_ids"] for step in plain[:9])) <= set(read)
    assert left_out == plain[9]["sample_ids"]
    assert [step["position_before"] for step in steps] == [n * BATCH for n in (*range(9), *range(10, STEPS + 1))]
    assert losses(folder / "back")[:9] == losses(folder / "plain")[:9]


def test_a_run_that_is_killed_after_it_went_back_passes_over_the_same(
    folder: Path, starts: dict[str, list[Start]]
) -> None:
    assert [start.code for start in starts["back and killed"]] == [137, 0], starts["back and killed"]
    assert losses(folder / "back and killed") == losses(folder / "back")
    assert [s["sample_ids"] for s in steps_of(folder / "back and killed")] == [
        s["sample_ids"] for s in steps_of(folder / "back")
    ]


def test_what_is_passed_over_is_on_disk_in_full_or_nothing_new_is(tmp_path: Path) -> None:
    """A write that failed left its unfinished file, which keeps the room of a full disk."""
    passed = PassedOver(tmp_path, ALONE)
    passed.add(Passage(3, 26, BATCH))
    assert [each.name for each in tmp_path.iterdir()] == ["passed_over.json"]
    assert PassedOver(tmp_path, ALONE).passages == [Passage(3, 26, BATCH)]
    (tmp_path / "passed_over.json").unlink()
    (tmp_path / "passed_over.json").mkdir()  # which no file takes the place of
    with pytest.raises(StorageError, match="cannot write"):
        passed.add(Passage(4, 39, BATCH))
    assert [each.name for each in tmp_path.iterdir()] == ["passed_over.json"]


# ---- what a step that is passed over leaves behind ---------------------------------------------------------------


def spiked(
    run_dir: Path, every: int, patch: pytest.MonkeyPatch, on_spike: str = "rollback"
) -> tuple[Training, dict[int, torch.Tensor]]:
    """Make steps until the fourth spikes; return the run, and the running means after each step before it."""
    task = decoder_task(model=normed, stop=Amount(STEPS, "steps"))
    run = training(run_dir, every, task=task, health=HealthSpec(on_spike=on_spike), asynchronous="off")
    means: dict[int, torch.Tensor] = {}
    for batch in run:
        if batch.step == 4:
            guard = run._stepper.guard
            assert guard is not None
            patch.setattr(guard, "_spike", lambda turn, what, value: (f"{what} {value}", (what, value)))
            assert not run.step(batch).updated
            break
        run.step(batch)
        means[batch.step] = mean_of(run).clone()
    return run, means


def mean_of(run: Training) -> torch.Tensor:
    return run.model.get_buffer("norm.running_mean")


@pytest.mark.parametrize(("every", "step"), [(2, 2), (100, 3)], ids=["to a checkpoint", "without one"])
def test_a_step_that_is_passed_over_leaves_no_running_statistics_and_a_whole_state(
    tmp_path: Path, every: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its passes have moved statistics; and a peer that is lost afterwards must not bring them back."""
    run, means = spiked(tmp_path / "run", every, monkeypatch)
    assert run.progress.step == step and torch.equal(mean_of(run), means[step])
    assert run._stepper.is_whole, "survivors of a loss before the next update have this state to bring"
    run._stepper.buffers.put_back()
    assert torch.equal(mean_of(run), means[step])


def test_a_step_that_is_left_out_moves_no_running_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch with a number that is none they would be none for good, and so would every evaluation."""
    run, means = spiked(tmp_path / "run", 100, monkeypatch, "skip")
    assert run.progress.step == 4 and torch.equal(mean_of(run), means[3]) and not torch.equal(means[2], means[3])


@pytest.mark.parametrize("by", ["a callback", "an overflow"])
def test_a_step_whose_update_nobody_wants_moves_no_running_statistics(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the guard leaves one out: the samples are consumed, and teach nothing."""
    task = decoder_task(model=averaged, stop=Amount(STEPS, "steps"))
    run = training(tmp_path / "run", 100, task=task, precision="fp32" if by == "a callback" else "fp16")
    means: dict[int, torch.Tensor] = {}
    for batch in run:
        if batch.step == 4 and by == "an overflow":
            assert run._stepper.scaler is not None
            run._stepper.scaler.scale = 2.0**60  # above fp16's range: gradients are infinite, and the loss is none
        elif batch.step == 4:
            monkeypatch.setattr(run, "_hook", lambda hook, *given, **more: decided_at(hook))
        updated = run.step(batch).updated
        means[batch.step] = mean_of(run).clone()
        assert updated is (batch.step != 4)
        monkeypatch.undo()
        if batch.step == 4 and run._stepper.scaler is not None:
            run._stepper.scaler.scale = 2.0**10
        if batch.step == 5:
            break
    assert torch.equal(means[3], means[4]) and not torch.equal(means[2], means[3])
    assert not torch.equal(means[4], means[5])


class RunningMean(nn.Module):
    """Gives back what it is given and keeps a running mean of it, in any precision: torch's own has none in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the same."""
        self.running_mean.lerp_(hidden.detach().float().mean((0, 1)), 0.1)
        return hidden


def averaged() -> nn.Module:
    return Averaged()


class Averaged(Normed):
    """Normalises nothing, and keeps the means."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RunningMean()  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.norm(self.embed(tokens)))


def decided_at(hook: str) -> CallbackDecisions:
    return CallbackDecisions(skip=("test", "a bad batch") if hook == "before_step" else None)

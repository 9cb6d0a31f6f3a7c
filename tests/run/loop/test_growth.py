"""The global batch grows by a schedule or by the noise scale: the same in every layout, and after a stop."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import as_json, in_process, paceline, records_of, steps_of, write_spec
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.errors import ConfigError, DataError
from paceline.plan.learn.observe import observe_run
from paceline.run.loop.step import Stepper
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.run.updates.growth import BatchGrowth, growth_of
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.steps.growth import BatchChange, BatchCourse, GrowthSpec, Piece, course_of, rate_factor
from paceline.supervise.told.brief import Brief
from paceline.units import parse_amount


def drawn_course(drawn: random.Random) -> BatchCourse:
    """Return a course of up to four batches that begin at rising places, in steps or in samples."""
    places = sorted(drawn.sample(range(1, 300), drawn.randrange(5)))
    in_steps = drawn.random() < 0.5
    pieces = [Piece(each, None, drawn.randrange(1, 40)) if in_steps else Piece(None, each, drawn.randrange(1, 40))
              for each in places]  # fmt: skip
    return BatchCourse(drawn.randrange(1, 40), tuple(pieces))


def walked(course: BatchCourse, steps: int) -> list[int]:
    """Return the batch of each of so many steps, one after the other."""
    found, position = [], 0
    for step in range(1, steps + 1):
        found.append(course.at(step, position))
        position += found[-1]
    return found


@pytest.mark.parametrize("seed", range(40))
def test_stretches_are_the_steps_one_after_the_other(seed: int) -> None:
    drawn = random.Random(seed)
    course, steps = drawn_course(drawn), drawn.randrange(1, 120)
    plain = walked(course, steps)
    told = list(course.stretches(steps=steps))
    assert [batch for count, batch in told for _ in range(count)] == plain
    samples = drawn.randrange(1, 3000)
    fewest = next(number for number in itertools.count(1) if sum(walked(course, number)) >= samples)
    assert course.steps_for(samples) == fewest


def test_a_schedule_that_is_none_is_refused() -> None:
    def course(*changes: tuple[str, str]) -> BatchCourse:
        spec = GrowthSpec("schedule", changes=tuple(BatchChange(*map(parse_amount, each)) for each in changes))
        return course_of(spec, 4, 16)

    assert course(("2 steps", "128 tokens"), ("5 steps", "16 samples")).pieces == (
        Piece(2, None, 8),
        Piece(5, None, 16),
    )
    assert course(("33 tokens", "8 samples")).pieces == (Piece(None, 3, 8),)
    for place in ("2 steps", "99 samples"):  # no later than the one before, or in another unit
        with pytest.raises(ConfigError, match="begins after"):
            course(("2 steps", "8 samples"), (place, "9 samples"))
    with pytest.raises(ConfigError, match="whole number of samples"):
        course(("2 steps", "17 tokens"))
    assert rate_factor("linear", 16, 4) == 4 and rate_factor("sqrt", 16, 4) == 2 and rate_factor("none", 16, 4) == 1


def test_the_noise_scale_of_known_noise_is_found() -> None:
    """Gradients of mean 1 in 64 places, each sample's with variance 4: S = 256, |G|^2 = 64, the scale 4 samples."""
    torch.manual_seed(0)
    growth = BatchGrowth(GrowthSpec("noise", measure_every=1, measurements=400), BatchCourse(32), largest=64)
    for step in range(1, 401):
        samples = 1 + 2 * torch.randn(32, 64, dtype=torch.float64)
        small = growth.small(step, 32)
        assert small == 4
        norms = float(samples.mean(0).norm()), small, float(samples[:small].mean(0).norm())
        grew = growth.measured(step, 32 * step, 32, *norms)
        assert not grew, "a batch of 32 is larger than the scale"
    spread, square = (sum(each[part] for each in growth._measured) / 400 for part in (0, 1))
    assert spread / square == pytest.approx(4, rel=0.1) and square == pytest.approx(64, rel=0.05)


def test_a_batch_below_the_noise_scale_doubles_up_to_the_largest_and_a_resume_repeats_it() -> None:
    def play(growth: BatchGrowth, steps: range) -> list[int]:
        found = []
        for step in steps:
            samples = growth.at(step, 0)
            if small := growth.small(step, samples):
                norms = math.sqrt(1 + 1000 / samples), small, math.sqrt(1 + 1000 / small)
                growth.measured(step, 0, samples, *norms)
            found.append(samples)
        return found

    def new() -> BatchGrowth:
        return BatchGrowth(GrowthSpec("noise", "sqrt", measure_every=2, measurements=3), BatchCourse(16), largest=48)

    whole = new()
    played = play(whole, range(1, 30))
    assert played == [16] * 6 + [32] * 6 + [48] * 17
    first, *_ = whole.take()
    assert (first.before, first.after) == (16, 32) and first.evidence["noise_scale_samples"] == pytest.approx(1000)
    assert first.evidence["rate_factor"] == math.sqrt(2) and first.evidence["step"] == 6
    for cut in (3, 6, 11):
        before, after = new(), new()
        begun = play(before, range(1, cut + 1))
        after.load(before.state())
        assert begun + play(after, range(cut + 1, 30)) == played


class KilledHere(Exception):
    """What ends a process in the tests, at once."""


@pytest.mark.parametrize("saved_every", [None, 4], ids=["nothing saved", "saved after step 4"])
def test_what_was_decided_after_steps_that_are_made_again_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_every: int | None
) -> None:
    """The second start measures the other way round at every step: what rounding does where the noise scale is near
    the threshold. Only after steps that no start has made before it decides for itself."""

    def start(high: range, last: int) -> list[int]:
        monkeypatch.setattr(Stepper, "grad_norm_of", lambda self, batch: 10.0 if batch.step in high else 0.0)
        growth = GrowthSpec("noise", largest=parse_amount("16 samples"), measure_every=1, measurements=2)
        task = decoder_task(global_batch=parse_amount("4 samples"), stop=parse_amount("9 steps"), growth=growth)
        every = parse_amount(f"{saved_every} steps") if saved_every else None
        run = RunSpec(checkpoint_every=every, evaluate_every=None)
        plan = plan_of(Layout(), batch=4, micro_batch=4)
        brief = Brief(plan, 9, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
        alone = World(0, 1, 0, torch.device("cpu"))
        made = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, alone, tmp_path)
        sizes = []
        with contextlib.suppress(KilledHere):
            for batch in made:
                sizes.append(batch.samples)
                if made.step(batch).step == last:
                    raise KilledHere
        made.take_down()
        return sizes

    first = start(high=range(1, 3), last=6)
    assert first == [4, 4, 8, 8, 8, 8]
    again = start(high=range(3, 10), last=9)
    assert again == [*first[saved_every or 0 :], 16, 16, 16]
    told = [each for each in records_of(tmp_path, "decision") if each["what"] == "global_batch"]
    changes = [(each["evidence"]["step"], each["from"], each["to"], each["evidence"]["repeated"]) for each in told]
    repeated = [] if saved_every else [(2, 4, 8, True)]
    assert changes == [(2, 4, 8, False), *repeated, (6, 8, 16, False)]
    spreads = records_of(tmp_path, "ranks")[-1]["spreads"]
    assert 0 < spreads["scoring"]["max"] <= spreads["other"]["max"], "told apart from what the host does"
    if not saved_every:
        assert told[1]["because"].endswith("an earlier start has decided so")


def test_a_batch_that_cannot_be_measured_is_refused() -> None:
    task = decoder_task(growth=GrowthSpec("noise", largest=parse_amount("16 samples")))
    with pytest.raises(ConfigError, match=r"task\.growth\.by = 'noise'"):
        growth_of(task, plan_of(Layout(), batch=1), SEQ_LEN)


GROWN = """
[task.growth]
by = "{by}"
learning_rate = "sqrt"
{rest}
"""
SCHEDULE = GROWN.format(
    by="schedule",
    rest='changes = [{ after = "3 steps", batch = "21 samples" }, { after = "6 steps", batch = "34 samples" }]',
)
NOISE = GROWN.format(by="noise", rest='largest = "9 samples"\nmeasure_every = 1\nmeasurements = 2\nnoise_ratio = 0.03')
FIRST = {SCHEDULE: 14, NOISE: 3}  # samples of the first batch


def spec_of(folder: Path, name: str, growth: str, devices: int) -> Path:
    path = write_spec(folder, folder / name, devices, steps=9, precision="fp64")
    first = 3 if NOISE in growth else 14
    path.write_text(path.read_text().replace('"14 samples"', f'"{first} samples"') + growth)
    return path


@pytest.mark.parametrize("growth", [SCHEDULE, NOISE], ids=["schedule", "noise"])
def test_a_growing_run_is_one_device_and_goes_on_as_if_never_stopped(tmp_path: Path, growth: str) -> None:
    """Two ranks against one device, in fp64; where measurements are its state, they are stopped after step 4."""
    one, two = tmp_path / "one", tmp_path / "two"
    alone = in_process("train", spec_of(tmp_path, "one", growth, 1))
    assert alone.returncode == 0, alone.stderr
    fault = '\n[[run.faults.each]]\nkind = "signal"\nrank = 0\nstep = 5\n'
    path = spec_of(tmp_path, "two", growth + fault if growth is NOISE else growth, 2)
    assert growth is SCHEDULE or paceline("train", path).returncode == 75
    assert paceline("train", path).returncode == 0
    expected, found = steps_of(one), steps_of(two)
    sizes = [step["position_after"] - step["position_before"] for step in expected]
    first = sizes[0]
    assert first == FIRST[growth] and sizes == sorted(sizes) and len(set(sizes)) > 1
    assert sizes == [14] * 3 + [21] * 3 + [34] * 3 or growth is NOISE
    for mine, his in zip(found, expected, strict=True):
        assert mine["sample_ids"] == his["sample_ids"] and mine["position_after"] == his["position_after"]
        assert mine["lr"] == his["lr"] == pytest.approx(3e-3 * math.sqrt(len(his["sample_ids"]) / first))
        assert mine["loss"] == pytest.approx(his["loss"], rel=1e-9)
    told: dict[Path, list[Any]] = {}
    for each in (one, two):
        decisions = [record for record in records_of(each, "decision") if record["what"] == "global_batch"]
        told[each] = [(record["from"], record["to"], record["evidence"]["step"]) for record in decisions]
    changes = [(before, after) for before, after in itertools.pairwise(sizes) if before != after]
    assert [each[:2] for each in told[one]] == changes
    assert list(dict.fromkeys(told[two])) == told[one]
    with pytest.raises(DataError, match="of the plan's batch"):  # which is too few to learn from
        observe_run(one)


def test_the_price_of_a_run_is_that_of_all_its_batches(tmp_path: Path) -> None:
    plain = in_process("plan", spec_of(tmp_path, "plain", "", 1), "--json")
    grown = in_process("plan", spec_of(tmp_path, "grown", SCHEDULE, 1), "--json")
    assert plain.returncode == grown.returncode == 0, grown.stderr
    assert "3 steps of 14 samples, 3 steps of 21 samples, 3 steps of 34 samples" in grown.stdout
    seconds = [as_json(each.stdout)["forecast"]["run_seconds"]["value"] for each in (plain, grown)]
    assert 1.2 < seconds[1] / seconds[0] < 23 / 14, "between one and the ratio of samples"


@pytest.mark.parametrize(("change", "missing"), [({"after": "2 steps"}, "batch"), ({"batch": "28 samples"}, "after")])
def test_a_change_that_says_half_is_refused(change: dict[str, str], missing: str) -> None:
    growth = GrowthSpec("schedule", changes=(BatchChange(**change),))
    with pytest.raises(ConfigError, match=f"has no `{missing}`"):
        course_of(growth, 14, 16)

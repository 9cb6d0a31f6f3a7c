"""Whatever the probe of micro-batches finds, however the batch grows, wherever a run stops: it is the undisturbed run.

What the probe settled before the first step holds in every later start, under every size that the batch grows to.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import records_of, steps_of, write_spec

from paceline.plan.planned import Planned, plan_task
from paceline.plan.search.micro_batch import TriedMicroBatch
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.session.confirm import micro_batch as module
from paceline.session.confirm.micro_batch import confirm_micro_batch
from paceline.session.ready.brief_of_plan import make_brief
from paceline.spec.load import load_spec

STEPS = 9
GROWTHS = {
    "nothing": "",
    "steps": """
[task.growth]
by = "schedule"
learning_rate = "sqrt"
changes = [{ after = "3 steps", batch = "13 samples" }, { after = "6 steps", batch = "22 samples" }]
""",
    "samples": """
[task.growth]
by = "schedule"
changes = [{ after = "20 samples", batch = "11 samples" }, { after = "43 samples", batch = "17 samples" }]
""",
    "noise": """
[task.growth]
by = "noise"
largest = "17 samples"
measure_every = 1
measurements = 2
noise_ratio = 0.03
""",
}


class Probe:
    """Stands in the place of the probe's processes: seconds as they are drawn, and memory up to a size."""

    def __init__(self, drawn: random.Random) -> None:
        self._drawn, self.calls = drawn, 0
        self.most = drawn.choice([1, 2, 99])  # of a micro-batch that memory has room for

    def __call__(self, planned: Planned, sizes: tuple[int, ...]) -> tuple[tuple[TriedMicroBatch, ...], tuple[int, str]]:
        """Return what was tried, or which size had no memory."""
        self.calls += 1
        if too_large := [size for size in sizes if size > self.most]:
            return (), (too_large[0], "out of memory on rank 0 of a probe")
        return tuple(TriedMicroBatch(size, self._drawn.uniform(0.5, 1.5), 0.0, 1.0) for size in sizes), (0, "")


def start(path: Path, until: int, saves: bool, asked: list[str]) -> int:
    """Plan, confirm and train up to a step, with a checkpoint of it or none; return the micro-batch of the start."""
    planned = plan_task(load_spec(path, asked))
    planned, decisions = confirm_micro_batch(planned, lambda line: None)
    run_dir = Path(planned.spec.run.dir)
    made = Training(planned.spec, make_brief(planned, None, decisions), World(0, 1, 0, torch.device("cpu")), run_dir)
    for batch in made:
        if made.step(batch).step == until:
            if saves:
                made.save()
            break
    made.take_down()
    return planned.plan.micro_batch


def settled_in(run_dir: Path) -> int:
    """Return the micro-batch that the journal has last."""
    return int([each["to"] for each in records_of(run_dir, "decision") if each["what"] == "micro_batch"][-1])


@pytest.fixture(name="probe_of")
def probes(monkeypatch: pytest.MonkeyPatch) -> Callable[[random.Random], Probe]:
    """Return what puts a probe whose findings are drawn in the place of the one in processes."""

    def probe_of(drawn: random.Random) -> Probe:
        probe = Probe(drawn)
        monkeypatch.setattr(module, "_probe", probe)
        return probe

    return probe_of


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("seed", range(3))
def test_any_probe_any_growth_and_any_stops_are_the_undisturbed_run(
    tmp_path: Path, probe_of: Callable[[random.Random], Probe], growth: str, seed: int
) -> None:
    drawn = random.Random(f"{growth} {seed}")
    run_dir, plain_dir = tmp_path / "run", tmp_path / "plain"
    path = write_spec(tmp_path, run_dir, plan='micro_batch = "auto"', steps=STEPS, precision="fp64")
    path.write_text(path.read_text().replace('"14 samples"', '"5 samples"') + GROWTHS[growth])
    # Where any use of memory is too much, the looks during the run halve what the probe has settled.
    asked = ["run.health.memory_pressure=0.000001"] if drawn.random() < 0.3 else []
    probe, stops = probe_of(drawn), [*sorted(drawn.sample(range(1, STEPS), drawn.randint(1, 3))), STEPS]
    for number, until in enumerate(stops):
        before = settled_in(run_dir) if number else 0
        found = start(path, until, drawn.random() < 0.6, asked)
        assert found == before or not number, "what an earlier start has settled, pressure included"
        assert found <= probe.most
        if not number:
            first = probe.calls
            assert settled_in(run_dir) == found or asked
    assert probe.calls == first, "no later start makes a probe"
    assert start(path, STEPS, False, ["plan.micro_batch=5", f"run.dir={plain_dir}"]) == 5
    mine, plain = steps_of(run_dir), steps_of(plain_dir)
    sizes = [each["position_after"] - each["position_before"] for each in plain]
    assert len(mine) == len(plain) == STEPS and sizes[0] == 5 and (len(set(sizes)) > 1 or growth == "nothing")
    for own, other in zip(mine, plain, strict=True):
        assert own["sample_ids"] == other["sample_ids"] and own["lr"] == other["lr"]
        assert own["loss"] == pytest.approx(other["loss"], rel=1e-10)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)

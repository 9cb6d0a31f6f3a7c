"""A probe of a busy machine: noticed, marked, told, short-lived, and no reason for a run to end."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_resolve import HOST, RECORD

from paceline.cluster import resolve
from paceline.cluster.probe import busy, probe
from paceline.cluster.probe.busy import Times, read_times, reasons_between, reasons_of
from paceline.cluster.resolve import is_unprobed, resolve_cluster
from paceline.cluster.store import probe_path, write_probe
from paceline.errors import PacelineError
from paceline.session import start
from paceline.spec.cluster import ClusterSpec
from paceline.spec.load import load_spec


def test_what_is_in_the_way_is_told_from_the_kernels_own_times(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 5 20 1000 10 1 2 7 0 0\ncpu0 1 2 3\n")
    before = read_times(tmp_path / "stat")
    assert before == Times(busy=128, idle=1010, stolen=7)
    assert reasons_between(before, Times(128 + 10, 1010 + 90, 7)) == []
    assert reasons_between(before, Times(128 + 83, 1010 + 17, 7)) == ["other programs took 83% of the cores"]
    assert reasons_between(before, Times(128, 1010 + 90, 7 + 10)) == ["the host took 10% of them away"]
    assert read_times(tmp_path / "none") is None and reasons_between(None, before) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [({}, ""), ({"busy": ["other programs took 83% of the cores"]}, "83%"), ({"core_share": 0.5}, "only 50%"),
     ({"relative_spread": 0.9}, "differed by 90%")],
)  # fmt: skip
@pytest.mark.parametrize("age_hours", [0.1, 2.0])
def test_figures_of_a_busy_machine_are_marked_and_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], told: str, age_hours: float
) -> None:
    monkeypatch.setattr(resolve, "read_machine", lambda: HOST)
    made = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=age_hours)
    record: Any = {**RECORD, "date": made.isoformat(timespec="seconds"), **changes}
    write_probe(record, probe_path(HOST.name, "cpu", 2, 4, tmp_path))
    cluster, remarks = resolve_cluster(ClusterSpec(device="cpu", devices=2), tmp_path)
    counts = not told or age_hours < 1
    assert is_unprobed(cluster) is not counts
    said = [remark for remark in remarks if "busy" in remark]
    assert bool(said) is bool(told)
    if told and counts:
        assert told in said[0] and "wider intervals" in said[0]
        assert all(step.relative_spread == 2 * busy.BUSY_ERROR for step in cluster.device.calibration)
    elif counts:
        assert [step.relative_spread for step in cluster.device.calibration] == [0.05]
    assert bool(reasons_of(record)) is bool(told)


def test_a_probe_of_a_busy_machine_takes_a_third_of_the_time_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def run(request: Any, **limits: object) -> Any:
        asked.append(request["seconds_budget"])
        raise PacelineError("enough was seen")

    monkeypatch.setattr(probe, "_run_workers", run)
    said: list[str] = []
    reasons: list[list[str]] = [[], ["other programs took 83% of the cores"]]
    monkeypatch.setattr(probe, "look_around", lambda: reasons.pop(0))
    for _ in range(2):
        with pytest.raises(PacelineError, match="enough"):
            probe.probe_machine(1, "cpu", said.append, seconds_budget=15.0)
    assert asked == [15.0, 5.0]
    assert [line for line in said if line.startswith("busy")] == [
        "busy     other programs took 83% of the cores: figures will be marked, and count for an hour"
    ]


def test_a_probe_that_something_waits_for_is_given_up_by_the_clock(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as worker:
        with pytest.raises(PacelineError, match="did not finish"):
            probe._wait([worker], tmp_path, timeout_seconds=600, most_seconds=0.05)
        worker.kill()


def test_a_probe_that_fails_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*words: object, **options: object) -> None:
        assert options["most_seconds"]
        raise PacelineError("the probe did not finish", "it has 90 s, and the machine is busy")

    monkeypatch.setattr(start, "probe_machine", fail)
    said: list[str] = []
    add: Callable[[str], None] = said.append
    small = ["task.model=llama-1m", "task.data.max_bytes=100000", "task.data.seq_len=32", "cluster.device=cpu"]
    planned = start.plan_here(load_spec(None, small), add)
    assert any("going on with assumed figures" in line for line in said)
    assert is_unprobed(planned.cluster)


def test_a_run_that_is_not_much_longer_than_the_probe_is_not_kept_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probed: list[object] = []
    monkeypatch.setattr(start, "probe_machine", lambda *words, **options: probed.append(words))
    small = ["task.model=llama-1m", "task.data.max_bytes=100000", "task.data.seq_len=32", "cluster.device=cpu"]
    small.append("task.global_batch=4 samples")
    of_four = start.plan_here(load_spec(None, [*small, "task.stop=4 steps"]), lambda line: None)
    half_a_minute = round(30 / of_four.forecast.step_seconds.value)
    for steps, times in ((4, 0), (half_a_minute, 0), (100_000, 1)):
        said: list[str] = []
        planned = start.plan_here(load_spec(None, [*small, f"task.stop={steps} steps"]), said.append)
        assert len(probed) == times
        assert any("not for a run of about" in line for line in said) is (times == 0), said
        assert is_unprobed(planned.cluster)

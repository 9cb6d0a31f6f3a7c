"""A node's samples: their size does not grow with ranks, energies have no gap, and each file has one writer."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from paceline.run.observe.node import NodeSampler, SamplesOfFirst, SamplesOfOthers
from paceline.run.observe.sensors.sensor_reading import SeenRank, SensorReading
from paceline.run.observe.summed import MOST_DETAILED, node_sample
from paceline.run.record.lines import append_line
from paceline.spec.journal.line import line_of
from paceline.spec.journal.reading import node_files, read_nodes
from paceline.spec.journal.watching import NodeSample


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Made:
    """A sensor that says what it is told to."""

    def __init__(self, ranks: int, celsius: float = 60.0) -> None:
        self.ranks, self.celsius, self.joules = ranks, celsius, 50.0

    def read(self, into: SensorReading, seconds: float) -> None:
        for rank in range(self.ranks):
            into.of_rank(rank, "celsius", self.celsius + rank % 7)
            into.of_rank(rank, "watts", 300.0)
        into.of_host("cpu_joules", self.joules)

    def close(self) -> None:
        pass


def sampled(ranks: int, nodes: int = 1, **more: object) -> tuple[NodeSampler, SamplesOfFirst, Clock, Made]:
    taken, clock, made = SamplesOfFirst(), Clock(), Made(ranks)
    seen = [SeenRank(rank, rank + 1) for rank in range(ranks)]
    return NodeSampler("n", seen, [made], taken, 10.0, nodes, clock=clock, **more), taken, clock, made  # type: ignore[arg-type]


def test_a_record_is_as_large_for_many_ranks_as_for_few() -> None:
    sizes = {}
    for ranks in (1, 8, 64, 16_384):
        reading = SensorReading()
        Made(ranks).read(reading, 10.0)
        sizes[ranks] = len(line_of(node_sample(reading, "n", range(min(ranks, 8)), 5, 10.0, detail=False)))
    assert sizes[16_384] <= sizes[8] + 8 and sizes[64] <= sizes[8] + 8


def test_ranks_are_told_as_least_median_most_and_the_worst() -> None:
    reading = SensorReading()
    Made(8).read(reading, 10.0)
    sample = node_sample(reading, "n", range(8), 5, 10.0, detail=False)
    heat = [reading.ranks[rank]["celsius"] for rank in range(8)]
    expected = {"min": 60, "median": statistics.median(heat), "max": 66, "rank": 6}
    assert sample.signals["celsius"] == expected and sample.detail is None and sample.flagged == ()


def test_numbers_of_single_ranks_are_kept_of_those_that_stand_out() -> None:
    reading = SensorReading()
    Made(40, celsius=82.0).read(reading, 10.0)
    reading.ranks[3]["throttled"] = 1.0
    sample = node_sample(reading, "n", range(40), 5, 10.0, detail=False)
    assert "rank 3 throttled" in sample.flagged and "rank 5 hot (87 °C)" in sample.flagged
    assert sample.detail is not None and set(sample.detail) <= {str(rank) for rank in range(40)}
    assert len(sample.detail) <= MOST_DETAILED and "0" not in sample.detail
    assert len(node_sample(reading, "n", range(40), 5, 10.0, detail=True).detail or {}) == 40


def test_nodes_beyond_the_first_few_write_less_often_and_lose_no_energy() -> None:
    sampler, taken, clock, made = sampled(2, nodes=64)  # a quarter of the samples
    for _ in range(9):
        clock.now += 10
        sampler.sample()
    found = taken.taken()
    assert [sample.seconds for sample in found] == [10, 30, 40]
    assert [sample.host["cpu_joules"] for sample in found] == [50, 150, 200]
    clock.now += 10
    made.celsius = 90.0
    sampler.sample()
    sampler.sample()
    assert [len(sample.flagged) for sample in taken.taken()] == [2]  # told at once, and once


def test_the_thread_samples_and_ends(tmp_path: Path) -> None:
    taken = SamplesOfFirst()
    sampler = NodeSampler("n", [SeenRank(0, 1)], [Made(1)], taken, 0.01, detail=False)
    sampler.start()
    while not (found := taken.taken()):
        pass
    sampler.close()
    assert isinstance(found[0], NodeSample) and not sampler._thread.is_alive()


def test_another_nodes_file_is_read_with_the_run_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    sampler, taken, clock, _ = sampled(1)
    clock.now += 10
    sampler.sample()
    (sample,) = taken.taken()
    others = SamplesOfOthers(tmp_path, 3, "rack/7 b")
    others(sample)
    with others.path.open("ab") as file:
        file.write(b'{"schema":1,"kind":"node","ti')
    SamplesOfOthers(tmp_path, 3, "rack/7 b")(sample)
    append_line(tmp_path / "journal" / "0003.jsonl", line_of(sample))
    assert [number for number, _ in node_files(tmp_path)] == [3]
    found = list(read_nodes(tmp_path))
    assert [(each.node, each.attempt, each.seconds) for each in found] == [("n", 3, 10.0)] * 3
    assert others.path.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_is_full_costs_samples_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, taken, clock, _ = sampled(1)
    clock.now += 10
    sampler.sample()
    (sample,) = taken.taken()
    (tmp_path / "journal").write_text("in the way of the folder")
    SamplesOfOthers(tmp_path, 1, "n")(sample)
    assert (tmp_path / "journal").is_file()


def test_a_record_is_plain_data(tmp_path: Path) -> None:
    sampler, taken, clock, _ = sampled(2)
    clock.now += 10
    sampler.sample()
    line = json.loads(line_of(taken.taken()[0]))
    assert line["kind"] == "node" and line["ranks"] == [0, 1] and line["signals"]["watts"]["rank"] == 0

"""Ranks of one machine get cores of their own, near their devices."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline.cluster.here.cores import (
    is_bound,
    memory_nodes,
    node_of_device,
    parse_cores,
    split_cores,
    threads_not_heeded,
)

TWO_NODES = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]  # with the second threads of each core
ALL = range(16)


def parts(allowed: list[int], nodes: list[list[int]], places: list[int | None]) -> list[list[int]]:
    return [split_cores(allowed, nodes, places, rank) for rank in range(len(places))]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0, 0, 1, 1], [[0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]]),
        ([1, 0], [TWO_NODES[1], TWO_NODES[0]]),  # the first GPU hangs on the second node
        ([None, None], TWO_NODES),  # nothing is known of the devices: ranks are spread
        ([None], [TWO_NODES[0]]),
        ([7, 7], TWO_NODES),  # a node that the machine does not have is as good as none
    ],
)
def test_ranks_are_near_their_devices(places: list[int | None], expected: list[list[int]]) -> None:
    assert parts([*ALL], TWO_NODES, places) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("allowed", [[*ALL], [0, 1, 4, 5], [4, 5, 6]])
def test_parts_are_even_and_nobody_elses(ranks: int, allowed: list[int]) -> None:
    found = parts(allowed, TWO_NODES, [None] * ranks)
    assert all(part and set(part) <= set(allowed) for part in found)
    if ranks <= len([core for core in allowed if core in TWO_NODES[1]]):
        assert not any(set(one) & set(other) for one, other in itertools.combinations(found, 2))


def test_more_ranks_than_cores_take_turns() -> None:
    assert parts([3], [[3]], [None, None]) == [[3], [3]]
    assert parts([0, 1], [[0, 1]], [None] * 3) == [[0], [0], [1]]


def test_a_machine_without_nodes_is_one(tmp_path: Path) -> None:
    assert len(memory_nodes(tmp_path)) == 1
    for number, cores in ((0, "0-1,4-5\n"), (2, "2-3,6-7\n")):  # numbers may have gaps
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(cores)
    assert memory_nodes(tmp_path) == [[0, 1, 4, 5], [], [2, 3, 6, 7]]
    assert parts([*range(8)], memory_nodes(tmp_path), [2, 0]) == [[2, 3, 6, 7], [0, 1, 4, 5]]


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8", [0, 1, 2, 3, 8]), ("5", [5]), ("\n", []), ("0,2,4-5\n", [0, 2, 4, 5])]
)
def test_lists_of_the_kernel(text: str, cores: list[int]) -> None:
    assert parse_cores(text) == cores


def test_where_a_device_hangs(tmp_path: Path) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text("1\n")
    assert node_of_device("0000:3B:00.0", tmp_path) == 1
    (folder / "numa_node").write_text("-1\n")  # a machine of one node, or a virtual one
    assert node_of_device("0000:3b:00.0", tmp_path) is None
    assert node_of_device("0000:af:00.0", tmp_path) is None and node_of_device("", tmp_path) is None


def test_who_has_been_given_cores_keeps_them() -> None:
    assert is_bound([0, 1], 16) and not is_bound([*ALL], 16)


def test_threads_that_were_asked_for_in_vain_are_told() -> None:
    """torchrun sets the variable for everybody, so under it nobody has asked."""
    said = threads_not_heeded(2, {"OMP_NUM_THREADS": "8"})
    assert "OMP_NUM_THREADS = 8 is not heeded" in said and "2 threads" in said
    for heeded in ({}, {"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": ""},
                   {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}):  # fmt: skip
        assert threads_not_heeded(2, heeded) == ""

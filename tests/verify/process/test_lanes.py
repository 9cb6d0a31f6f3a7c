"""Groups of ranks that are at work at a time: every job is in one of them, and each is done once."""

from __future__ import annotations

import itertools
import os

from hypothesis import given
from hypothesis import strategies as st

from paceline.verify.process.lanes import JOBS_PER_FORK, handed_out, in_groups, lanes_here


@given(st.lists(st.integers(1, 4), max_size=40), st.integers(1, 3))
def test_every_job_is_in_one_group_of_one_number_of_ranks(ranks: list[int], lanes: int) -> None:
    ranks = sorted(ranks, reverse=True)
    groups = in_groups(ranks, lanes)
    assert list(itertools.chain(*groups)) == list(range(len(ranks)))
    for group in groups:
        assert 0 < len(group) <= JOBS_PER_FORK and len({ranks[job] for job in group}) == 1
    for number in set(ranks):  # lanes have something to do at a time, where there are jobs for them
        alike = [group for group in groups if ranks[group[0]] == number]
        assert len(alike) >= min(lanes, ranks.count(number)) - 1


def test_processes_share_out_the_groups() -> None:
    reads, writes = os.pipe()
    with handed_out(300) as following:
        children = []
        for _ in range(3):
            if not (child := os.fork()):
                while (number := following()) is not None:
                    os.write(writes, number.to_bytes(4, "little"))
                os._exit(0)
            children.append(child)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        assert following() is None
    os.close(writes)
    told = os.read(reads, 4 * 301)
    os.close(reads)
    assert sorted(int.from_bytes(told[at : at + 4], "little") for at in range(0, len(told), 4)) == list(range(300))


def test_one_job_needs_no_second_lane() -> None:
    assert lanes_here(1) == 1 and 1 <= lanes_here(10) <= 2

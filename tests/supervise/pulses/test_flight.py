"""A rank that hangs tells its last collectives: torch's own record of them, from a thread beside the one that hangs."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from runs import wait_until

from paceline.supervise.pulses.flight import (
    FlightTeller,
    ask_flight,
    flight_path,
    last_collectives,
    missing_from,
    reached,
    read_flight,
    torch_dump,
)
from paceline.supervise.pulses.stacks import FLIGHT_MARK, parted


def entry(group: str, number: int, name: str = "nccl:all_reduce", **more: Any) -> dict[str, Any]:
    return {"process_group": [group, ""], "collective_seq_id": number, "profiling_name": name, **more}


def test_the_collective_that_some_have_begun_and_others_have_not_is_named() -> None:
    told = {
        0: {"entries": [entry("0", 7), entry("1", 3), entry("2", 9, "nccl:send", is_p2p=True)]},
        1: {"entries": [entry("0", 90), entry("0", 6, "nccl:broadcast"), entry("1", 3)]},  # 90: an older world's
        2: {"missing": "the rank did not answer"},
    }
    assert reached(told[1]) == {"0": (6, "broadcast"), "1": (3, "all_reduce")}
    (sentence,) = missing_from(told)
    assert sentence == "all_reduce number 7 of group 0 was begun by rank 0, and rank 1 had come to number 6"
    assert missing_from({0: told[0], 2: told[2]}) == []


def test_a_dump_that_is_not_there_or_fails_is_told_as_such() -> None:
    assert "this torch has none of" in last_collectives(None)["missing"]

    def broken() -> bytes:
        raise RuntimeError("no recorder")

    assert last_collectives(broken)["missing"] == "torch's dump failed: RuntimeError: no recorder"
    assert (
        "ValueError" in last_collectives(lambda: b"{")["missing"] or "JSON" in last_collectives(lambda: b"{")["missing"]
    )
    many = {"entries": [entry("0", number, time_created_ns=number, other=1) for number in range(200)], "version": "2"}
    told = last_collectives(lambda: json.dumps(many), since_ns=100)
    assert told["recorded"] == 100 and len(told["entries"]) == 64 and told["version"] == "2"
    assert told["entries"][-1]["collective_seq_id"] == 199 and "other" not in told["entries"][0]


def test_a_thread_answers_for_a_process_whose_main_thread_does_not(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of tests before: some may end meanwhile
    teller = FlightTeller(tmp_path, 3, dump=lambda: lambda: json.dumps({"entries": [entry("0", 5)]}))
    wait_until(lambda: (ask_flight(tmp_path, 3), flight_path(tmp_path, 3).exists())[1])  # until it waits there
    stacks, told = parted(f"Thread 0x1{FLIGHT_MARK}{read_flight(tmp_path, 3)}")
    assert stacks == "Thread 0x1" and reached(told) == {"0": (5, "all_reduce")}
    assert "did not answer" in parted("Thread 0x1")[1]["missing"]
    wait_until(lambda: (teller.stop(), set(threading.enumerate()) <= before)[1])
    ask_flight(tmp_path, 3)  # nobody waits there any more, and nobody is waited for
    ask_flight(tmp_path, 4)


def _behind(rank: int) -> dict[str, Any]:
    """Make one collective more on rank 0 than on rank 1, which comes when rank 0 has told what it waits in."""
    dump, store = torch_dump(), dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(3))
    waits = dist.all_reduce(torch.ones(5), async_op=True) if rank == 0 else None
    told = last_collectives(dump)
    store.set(f"told-{rank}", "yes")
    store.wait([f"told-{1 - rank}"])
    if rank:
        dist.all_reduce(torch.ones(5))
    elif waits is not None:
        waits.wait()
    return told


def _record() -> dict[str, Any]:
    return _behind(dist.get_rank())


@pytest.mark.skipif(torch_dump() is None, reason="this torch has no dump of its flight recorder")
def test_the_collectives_of_gloo_are_on_record_too() -> None:
    """The real dump: on CUDA it is the same function, of which no machine here can tell."""
    told = dict(enumerate(run_ranks(_record, 2)))
    (sentence,) = missing_from(told)
    assert sentence.startswith("all_reduce number ") and sentence.endswith(f"number {reached(told[1])['0'][0]}")
    assert "was begun by rank 0, and rank 1 had come to" in sentence
    assert told[0]["entries"][-1]["input_sizes"] == [[5]]

"""A world of more ranks than gloo connects each to each for saves, in real processes on this machine.

    python benchmarks/worlds/large_world.py 264 [--meshed] [--on-demand-above 256] [--limit 270] [--json FILE] [--save]

The processes are forked from one that has imported torch, and share what it holds. They join a world, make the group
of saves, save twice beside training, load, and bring the ids of a batch to rank 0; then one rank is killed and the
others begin a save. Written is what each of these took: seconds, CPU, connections, and who failed.

gloo connects the world's own group on demand too, in place of NCCL, which has no such connections; with `--meshed` it
connects each rank to each, as in a world on CPUs. More processes than cores wait for each other: what counts is the CPU
time of one rank. Ranks that have not ended within the limit are listed with what they were at. A thread of gloo's looks
100 times a second whether anything has come, for each group of each rank: 264 ranks of three groups are 79,000 looks a
second, which is most of what two cores can do.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import operator
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from paceline.checkpoint import KeptPlan, load_checkpoint
from paceline.checkpoint import ranks as together
from paceline.checkpoint.beside.flight import SaveInFlight, SaveTo
from paceline.checkpoint.beside.stage import HostStage
from paceline.run.loop.loader import MicroBatch, StepBatch
from paceline.run.process import groups
from paceline.run.process.sockets import _connections
from paceline.run.process.world import build_mesh, join_world
from paceline.run.record.samples_read import ids_read
from paceline.spec.layout import Layout
from paceline.supervise.forked import fork
from paceline.supervise.told.place import KEPT_STORE, Place
from paceline.system.descriptors import make_room

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import keep, machine, strict_json

TENSORS, ROWS_OF_A_RANK, COLUMNS = 24, 2, 16
IDS_OF_A_RANK = 4
FLAGS = 10
LIMIT_SECONDS = 30.0  # how long a save waits for a rank that is gone
STORE_SECONDS = timedelta(minutes=5)


@dataclass
class RankStory:
    """What parts of a rank's life took: wall seconds, CPU seconds, and sockets that are open after each; how it ended.

    It is written after each part, so that a rank which is ended from outside has left what it did.
    """

    to: Path
    took: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    at: str = ""  # what it has begun and not done
    ended: str = ""
    says: str = ""

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Note what the block takes."""
        self.at = what
        self.write()
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.took[what] = time.perf_counter() - wall, time.process_time() - cpu, len(_connections())

    def write(self) -> None:
        """Write the story as it is, whole or not at all."""
        aside = self.to.with_suffix(".part")
        aside.write_text(json.dumps({"took": self.took, "at": self.at, "ended": self.ended, "says": self.says}))
        aside.rename(self.to)


def be_a_rank(out: Path, port: int, rank: int, ranks: int) -> None:
    """Live as one rank, and write what that took."""
    story, layout = RankStory(out / f"{rank}.json"), Layout(dp_shard=ranks)
    place = Place(rank, ranks, rank, ranks, f"{KEPT_STORE}127.0.0.1:{port}/world")
    with story.part("joining the world"):
        world = join_world("cpu", 1, place)
        world.wait()
    with story.part("a sum over all ranks"):
        assert world.sum([1.0]) == [ranks]
    with story.part("groups of a layout"):
        mesh = build_mesh(layout, world)
        world.wait()
    assert mesh is not None
    os.environ.pop(groups.ON_DEMAND, None)  # the group of saves is made as the product makes it
    with story.part("group of saves"):
        group = world.groups.beside(timedelta(seconds=LIMIT_SECONDS))
    world.wait()
    for what, rings in ((f"{FLAGS} flags round gloo's ring", ranks), (f"{FLAGS} flags along a tree", 0)):
        together.RINGS = rings
        with story.part(what):
            assert not any(together.Ranks(group).any_of([False])[0] for _ in range(FLAGS))
        world.wait()
    together.RINGS = groups.MESHED  # as in a world that is too large to be connected each to each
    own = [torch.full((ROWS_OF_A_RANK, COLUMNS), float(rank + ranks * number)) for number in range(TENSORS)]
    state = {f"t{number}": DTensor.from_local(part, mesh["fsdp"], [Shard(0)]) for number, part in enumerate(own)}
    stage, to = HostStage(), SaveTo(out / "checkpoints", 2, KeptPlan())
    for step, what in enumerate(("first save", "save like the last"), 1):
        with story.part(what):
            flight = SaveInFlight([to], stage.take(step, state, {}), group, 10 * LIMIT_SECONDS)
            assert flight.wait(), "the save hangs"
        (outcome,) = flight.outcomes
        if outcome.error is not None:
            raise outcome.error
        world.wait()
    for part in own:
        part.zero_()
    assert outcome.info is not None
    with story.part("load"):
        load_checkpoint(outcome.info.path, state)
    assert all(bool((part == rank + ranks * number).all()) for number, part in enumerate(own)), "other values"
    ids = np.arange(rank * IDS_OF_A_RANK, (rank + 1) * IDS_OF_A_RANK)
    batch = StepBatch(1, 0, ranks * IDS_OF_A_RANK, (MicroBatch(None, ids, int(ids[0])),))
    for what, factor in (("ids of a batch", 1), ("ids of a batch that depart, to rank 0", 2)):
        with story.part(what):
            found = ids_read(batch, world, layout, functools.partial(operator.mul, factor))
        assert found == (list(range(ranks * IDS_OF_A_RANK)) if rank == 0 else None)
    with story.part("what ranks of a machine tell each other"):
        told = world.told_at("here", {"rank": rank})
    assert [number for number, _ in told["here"]] == list(range(ranks))
    world.wait()
    if rank == ranks // 2 + 1:  # no power of two from rank 0: one that not everybody has talked to
        story.ended = "killed"
        story.write()
        os._exit(0)
    with story.part("a save without one rank"):
        flight = SaveInFlight([to], stage.take(3, state, {}), group, LIMIT_SECONDS)
        has_ended = flight.wait()
    with story.part("giving the save up"):
        flight.abandon(5.0)
        world.groups.forget()
    story.ended = f"save {'ended' if has_ended else 'hung'}, {'runs on' if flight.is_running else 'given up'}"
    story.says = str(flight.outcomes[0].error) if flight.outcomes else "nothing"
    story.write()


def live(out: Path, port: int, rank: int, ranks: int) -> int:
    """Be a rank, and return the exit code; an error is written beside its story."""
    try:
        be_a_rank(out, port, rank, ranks)
        return 0
    except BaseException:
        (out / f"{rank}.error").write_text(traceback.format_exc())
        return 1


def measured(ranks: int, meshed: bool, most_meshed: int, seconds: float) -> dict[str, Any]:
    """Return what a world of so many ranks took: of each part the mean and the most of all ranks, and their ends."""
    torch.set_num_threads(1)
    make_room(4 * ranks)
    groups.MESHED = most_meshed
    gc.collect()
    gc.freeze()  # or each rank's collections would copy what all of them share
    environ = {"GLOO_SOCKET_IFNAME": "lo"} | ({} if meshed else {groups.ON_DEMAND: "1"})
    with tempfile.TemporaryDirectory() as folder:
        out, began, load = Path(folder), time.monotonic(), os.getloadavg()[0]
        reader, writer = os.pipe()
        served = fork(functools.partial(serve, writer), {})  # its threads must not be in the process that forks
        port = int(os.read(reader, 16))
        processes = [fork(functools.partial(live, out, port, rank, ranks), environ) for rank in range(ranks)]
        while any(process.poll() is None for process in processes) and time.monotonic() < began + seconds:
            time.sleep(0.05)
        took = time.monotonic() - began
        # Before any is ended here: those that are left longest would tell of connections that their peers have closed.
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
        errors = {int(path.stem): path.read_text() for path in out.glob("*.error")}
        stories = {int(path.stem): json.loads(path.read_text()) for path in out.glob("*.json")}
        for process in (*processes, served):
            if process.poll() is None:
                os.kill(process.pid, 9)
                process.wait()
    return {
        "machine": machine(), "load": [load, os.getloadavg()[0]], "ranks": ranks, "meshed": meshed,
        "meshed up to": most_meshed, "seconds": took,
        "parts": parts_of(list(stories.values())),
        "ends": counted(each["ended"] for each in stories.values() if each["ended"]),
        "late": late, "late at": counted(stories[rank]["at"] if rank in stories else "its start" for rank in late),
        "failed": len(errors), "first error": errors[min(errors)] if errors else "",
        "says": sorted({each["says"].replace(folder, "") for each in stories.values() if each["says"]})[:4],
    }  # fmt: skip


def parts_of(stories: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return of each part how many ranks have done it, the most seconds, the mean CPU seconds, and open sockets."""
    parts = {}
    for part in dict.fromkeys(what for each in stories for what in each["took"]):
        rows = [each["took"][part] for each in stories if part in each["took"]]
        wall, cpu, sockets = zip(*rows, strict=True)
        parts[part] = {"ranks": len(rows), "seconds": max(wall), "cpu": sum(cpu) / len(rows),
                       "sockets": sum(sockets) / len(rows), "most_sockets": max(sockets)}  # fmt: skip
    return parts


def counted(words: Iterable[str]) -> dict[str, int]:
    """Return how often each word comes."""
    return dict(Counter(words))


def serve(writer: int) -> int:
    """Serve the store in which ranks meet, until this process is killed."""

    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=STORE_SECONDS, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    while True:
        time.sleep(3600)


def main(arguments: list[str]) -> int:
    """Measure and print; 1 where a rank failed or hangs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/large_world.md and its figures")
    parser.add_argument("--meshed", action="store_true", help="connect each rank to each for training")
    parser.add_argument("--on-demand-above", type=int, default=groups.MESHED, metavar="N", help="ranks up to which "
                        "the group of saves connects each to each (the product's own figure)")  # fmt: skip
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    found = measured(options.ranks, options.meshed, options.on_demand_above, options.limit)
    printed = page(found)
    print(printed)
    if found["first error"]:
        print(found["first error"], file=sys.stderr)
    if options.json:
        options.json.write_text(strict_json(found))
    if options.save:
        keep("large_world", found, printed)
    return int(bool(found["failed"] or found["late"]))


def page(found: dict[str, Any]) -> str:
    """Return the result as a page."""
    facts, (before, after) = found["machine"], found["load"]
    lines = [
        f"# A world of {found['ranks']} real ranks",
        "",
        f"`python benchmarks/worlds/large_world.py {found['ranks']}{' --meshed' if found['meshed'] else ''}"
        f" --on-demand-above {found['meshed up to']} --save`",
        "",
        f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores · torch {facts['torch']} · load average "
        f"{before:.0f} before and {after:.0f} after · {found['seconds']:.0f} s in all",
        "",
        "Seconds are the slowest rank's and mostly those of waiting for a core; CPU is the mean of a rank.",
        "",
        "| what | ranks that did it | s | ms of CPU | sockets open after it, mean | most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for what, row in found["parts"].items():
        lines.append(f"| {what} | {row['ranks']} | {row['seconds']:,.2f} | {1000 * row['cpu']:,.1f} "
                     f"| {row['sockets']:.0f} | {row['most_sockets']} |")  # fmt: skip
    ends = [f"{word}: {count}" for word, count in found["ends"].items()]
    late = [f"{count} at {word}" for word, count in found["late at"].items()]
    lines += ["", f"Ends: {', '.join(ends) or 'none'}. Failed: {found['failed']}. Not done within the limit: "
              f"{', '.join(late) or 'none'}."]  # fmt: skip
    lines += [
        "",
        "What ranks say of the last save:",
        "",
        *(f"    {line}" for says in found["says"] for line in says.split("\n")),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

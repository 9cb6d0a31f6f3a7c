"""Bookkeeping of a world of N ranks without processes and without tensors: the objects of one rank, and of rank 0.

The model has `TENSORS` weights, each with two moments, sharded over all ranks but for `dp_replicate = 2`.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from shared.listed import write_lists

from paceline.checkpoint.files.flushes import Flushes
from paceline.checkpoint.index import IndexReader, encode_kinds, encode_part
from paceline.checkpoint.manifest import (
    MANIFEST_NAME,
    TABLE_NAME,
    FileEntry,
    Manifest,
    encode_list,
    encode_manifest,
    files_of,
    list_counts,
    lists_in_a_list,
    part_name,
    ranks_in_a_list,
    read_manifest,
    shard_name,
)
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.save_plan import KeptPlan, SavePlan
from paceline.checkpoint.shards import Chunk, write_file
from paceline.checkpoint.snapshot import Part, Snapshot
from paceline.checkpoint.writers.choose import WriterChoice, choose_writers
from paceline.checkpoint.writers.lists import FILE_ROW, LIST_ROW, bring
from paceline.checkpoint.writers.talk import carry
from paceline.plan.planned import plan_task
from paceline.run.process.groups import own_part
from paceline.run.process.spread import spread_over
from paceline.run.process.world import World
from paceline.session.ready.brief_of_plan import make_brief
from paceline.spec.load import spec_from_dict
from paceline.spec.survive.phases import PHASES
from paceline.supervise.nodes.far import FarSight
from paceline.supervise.nodes.lookout import Lookout
from paceline.supervise.pulses.pulse import BEAT, HEAD, SIZE, STEP, pulse_path
from paceline.supervise.pulses.sight import NearSight
from paceline.supervise.pulses.silences import HangLimits

TENSORS = 8  # weights of the simulated model
KINDS = ("", ".exp_avg", ".exp_avg_sq")
ROWS, WIDTH = 2**15, 64
MEANS = 20  # that a record of where steps spend their time has
EACH = 8  # ranks of a node
NEAR = 8  # ranks around the last whose parts of the index are written

Costs = dict[tuple[str, str, str], float]  # (what, whose, unit) -> cost
T = TypeVar("T")


def simulated(ranks: int) -> Costs:
    """Return the costs of the bookkeeping of a world."""
    found: Costs = {}
    axes = {"pp": 1, "dp_replicate": 2, "fsdp": ranks // 16, "tp": 8}
    timed(found, "the ranks of its groups", "a rank", lambda: [own_part(axes, (axis,), ranks - 1) for axis in axes])
    of_ranks = [held_by(rank, ranks) for rank in range(ranks)]
    choices = first_save(found, of_ranks)
    save_like_the_last(found, of_ranks[-1], choices)
    spreads(found, ranks)
    pulses(found, ranks)
    with tempfile.TemporaryDirectory() as folder:
        files(found, Path(folder), of_ranks, choices)
    return {**found, **planned(ranks)}


def timed(found: Costs, what: str, whose: str, work: Callable[[], T]) -> T:
    """Return what `work` does and note the CPU time that it takes: the least of five for a rank's own."""
    least = math.inf
    for _ in range(1 if whose == "rank 0" else 5):
        began = time.process_time()
        result = work()
        least = min(least, time.process_time() - began)
    found[what, whose, "ms of CPU"] = 1e3 * least
    return result


def held_by(rank: int, ranks: int) -> list[Part]:
    """Return the parts that a rank holds: a share of the rows of each tensor, the same in both copies."""
    shards = ranks // 2
    share, first = ROWS // shards, rank % shards * (ROWS // shards)
    names = [f"model.layers.{at}.weight{kind}" for at in range(TENSORS) for kind in KINDS]
    return [Part(name, "float32", (ROWS, WIDTH), (first, 0), (share, WIDTH)) for name in names]


def first_save(found: Costs, of_ranks: Sequence[Sequence[Part]]) -> list[WriterChoice]:
    """Return what all ranks choose to write in a save without a plan, and note what that takes of each."""
    ranks = len(of_ranks)
    began = time.process_time()
    choices, heard = carry([choose_writers(parts, rank, ranks) for rank, parts in enumerate(of_ranks)])
    found["the plan of the first save", "a rank", "ms of CPU"] = 1e3 * (time.process_time() - began) / ranks
    found["what it hears for that plan", "rank 0", "kB"] = heard[0] / 1e3
    found["what it hears for that plan", "the rank that hears most", "kB"] = max(heard) / 1e3
    return choices


class OneOfMany(Ranks):
    """The last of many ranks, whose peers hold what it does and tell it nothing."""

    def __init__(self, ranks: int) -> None:
        self.group, self.alone, self.rank, self.size, self.sent = None, True, ranks - 1, ranks, 0

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return the flags."""
        self.sent += len(flags)
        return list(flags)

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers."""
        self.sent += 16 * len(numbers)
        return list(numbers)


def save_like_the_last(found: Costs, parts: Sequence[Part], choices: Sequence[WriterChoice]) -> None:
    """Note what a save takes of the last rank where the plan of the save before holds."""
    peers, own = OneOfMany(len(choices)), choices[-1]
    plan = SavePlan(len(choices), tuple(parts), list(choices[0].kinds), own.writers, own.shares)
    held: Any = dict.fromkeys(replace(part, fingerprint=7) for part in parts)  # without the values
    taken = Snapshot(1, held, {})
    timed(found, "the plan of a save like the last", "a rank", lambda: KeptPlan(plan).for_save("", taken, peers))
    peers.sent = 0
    timed(found, "fingerprints of a save", "a rank", lambda: plan.fingerprints(taken, peers))
    found["sums of fingerprints of a save", "a rank", "kB"] = peers.sent / 5 / 1e3


class CountedWorld(World):
    """The last of many ranks, which all have the same numbers, and what it has sent."""

    sent = 0  # bytes; a class's own, since a world is frozen

    def add_up(self, vector: torch.Tensor) -> None:
        """Put the sum in the place of a vector."""
        CountedWorld.sent += vector.nbytes
        vector.mul_(self.size)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the values."""
        CountedWorld.sent += 8 * len(values)
        return values


def spreads(found: Costs, ranks: int) -> None:
    """Note what the spread of a step's means over the ranks takes of one, by sums, and what a gather would bring."""
    world, means = CountedWorld(ranks - 1, ranks, 0, torch.device("cpu")), [1.5 * number for number in range(MEANS)]
    timed(found, f"the spread of {MEANS} means, by sums", "a rank", lambda: spread_over(world, means, few=0))
    found[f"the spread of {MEANS} means, by sums", "a rank", "kB"] = CountedWorld.sent / 5 / 1e3
    CountedWorld.sent = 0
    found[f"{MEANS} means of every rank, as a gather brings", "a rank", "kB"] = ranks * len(pickle.dumps(means)) / 1e3


def pulses(found: Costs, ranks: int) -> None:
    """Note what the coordinator of a run on nodes of 8 ranks hears of them: as they come, make steps, and one hangs.

    The nodes look five times a second, at files in memory that one process of this machine stands behind.
    """
    nodes, steps = max(1, ranks // EACH), 20
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        beat = [functools.partial(write_pulse, Path(folder), rank) for rank in range(EACH)]
        lookout = Lookout(NearSight(Path(folder), range(EACH), HangLimits(8.0, 10.0, 600.0, 2.0)), range(EACH))
        told: list[str] = []

        def attend(message: Mapping[str, Any]) -> None:
            lookout.attend(message["scrutiny"], message["load"])

        sight = FarSight(attend, lambda ranks, by_signal: None)
        now = time.monotonic()

        def look(passed: float) -> list[str]:
            """Return what a node has to tell after some time."""
            nonlocal now
            now += passed
            return [json.dumps(message) for message in lookout.news((), now)]

        def hear(lines: Sequence[str]) -> None:
            """Take what every node tells, where all tell the same, and look at what they show together."""
            for node in range(nodes):
                for line in lines:
                    sight.told(node, json.loads(line), now)
            sight.overview((), 0.2, now)

        for one in beat:  # ranks come one after the other
            one(PHASES[0], 0, now)
            told += look(0.2)
        for step in range(1, steps):
            for one in beat:
                one("forward", step, now)
            told += look(0.2)
        hear(told)  # that all are there
        quiet = look(0.2)
        timed(found, "a look at ranks that make steps", "the coordinator", lambda: hear(quiet))
        found["what it hears a look", "the coordinator", "kB"] = nodes * sum(map(len, quiet)) / 1e3
        found["what it hears when a world begins", "the coordinator", "kB"] = nodes * sum(map(len, told)) / 1e3
        late: list[str] = []
        while not late:
            late = look(0.2)
        timed(found, "a look as every node finds a rank late", "the coordinator", lambda: hear(late))
        found["what it hears as every node finds a rank late", "the coordinator", "kB"] = (
            nodes * sum(map(len, late)) / 1e3
        )


def write_pulse(folder: Path, rank: int, phase: str, step: int, now: float) -> None:
    """Write the pulse of a rank as the rank itself does."""
    content = bytearray(SIZE)
    HEAD.pack_into(content, 0, os.getpid(), 0)
    BEAT.pack_into(content, HEAD.size, step, step, PHASES.index(phase), int(1e9 * now))
    STEP.pack_into(content, HEAD.size + BEAT.size, step, 10**8)
    pulse_path(folder, rank).write_bytes(content)


def files(found: Costs, folder: Path, of_ranks: Sequence[Sequence[Part]], choices: Sequence[WriterChoice]) -> None:
    """Write what is not shards of a checkpoint, as far as the last rank reads it, and note what that takes."""
    ranks, last = len(of_ranks), len(of_ranks) - 1
    entry, kinds = FileEntry(10**9, "0" * 64), choices[0].kinds
    listed = {one(rank, ranks): entry for rank in range(ranks) for one in (shard_name, part_name)}
    with Flushes() as flushes:
        for rank in range(max(0, last - NEAR), ranks):  # those that a load of the last rank may open
            content = encode_part(chunks_of(of_ranks[rank], choices[rank], ranks))
            listed[part_name(rank, ranks)] = write_file(folder / part_name(rank, ranks), content, flushes)
        listed[TABLE_NAME] = write_file(folder / TABLE_NAME, encode_kinds(kinds), flushes)
        found["the table of tensors", "rank 0", "kB"] = listed[TABLE_NAME].bytes / 1e3
        lists_of(found, folder, listed, ranks, flushes)
        manifest = Manifest(1, 1, "", ranks, listed, {})
        encoded = timed(found, "the manifest of a save", "rank 0", lambda: encode_manifest(manifest))
        found["the manifest", "rank 0", "kB"] = len(encoded) / 1e3
        write_file(folder / MANIFEST_NAME, encoded, flushes)

    def load() -> tuple[Manifest, IndexReader]:
        read = read_manifest(folder)
        index = IndexReader(folder, read)
        index.find(wanted, near=last)
        read.share(last, ranks)
        return read, index

    wanted = {part.name: [part.box] for part in of_ranks[last]}
    read, index = timed(found, "manifest, lists and index for a load", "a rank", load)
    opened = len(encoded) + getattr(read.files, "bytes_read", 0)
    found["of manifest and lists, what a load reads", "a rank", "kB"] = opened / 1e3
    found["parts of the index that a load opens", "a rank", "files"] = float(len(index.parts_read))


def lists_of(found: Costs, folder: Path, listed: dict[str, FileEntry], ranks: int, flushes: Flushes) -> None:
    """Write the lists of files, which take the place of these in `listed`; note what they take.

    What the first rank of a list and rank 0 hear of files is carried as real ranks carry it.
    """
    of_a_list, of_lists = ranks_in_a_list(ranks), lists_in_a_list(ranks)
    within = heard(len(files_of(0, ranks)) * FILE_ROW.size, of_a_list or ranks)
    counts = list_counts(ranks, of_a_list, of_lists) if of_a_list else ()
    among = [heard(LIST_ROW.size, min(count, of_lists or count)) for count in counts]
    found["lengths and digests of files", "the rank that hears most", "kB"] = (within + sum(among)) / 1e3
    first = {name: listed[name] for rank in range(of_a_list) for name in files_of(rank, ranks) if name in listed}
    if first:
        timed(found, "a list of files", "the first rank of a list", lambda: encode_list(first))
    else:
        found["a list of files", "the first rank of a list", "ms of CPU"] = 0.0
    found["a list of files", "the first rank of a list", "kB"] = write_lists(folder, listed, ranks, flushes) / 1e3


def heard(length: int, ranks: int) -> int:
    """Return the bytes that the first of so many ranks hears of their rows of one length."""
    return max(carry([bring(bytes(length), place, ranks, 0) for place in range(ranks)])[1])


def chunks_of(parts: Sequence[Part], choice: WriterChoice, ranks: int) -> dict[str, list[Chunk]]:
    """Return what a rank's part of the index lists."""
    chunks: dict[str, list[Chunk]] = {}
    for part, writer in zip(parts, choice.writers, strict=True):
        chunks.setdefault(part.name, []).append(Chunk(part.offsets, part.sizes, shard_name(writer, ranks), part.key))
    return chunks


def planned(ranks: int) -> Costs:
    """Return what planning a task on so many devices takes, and how long the brief is that every rank gets."""
    values: dict[str, Any] = {
        "task": {"name": "scale", "model": {"name": "llama-1b"}, "global_batch": f"{2 * ranks} samples",
                 "data": {"source": "stdlib", "tokenizer": "bytes", "seq_len": 1024, "max_bytes": "1 MB"}},
        "cluster": {"devices": ranks, "device": "h100-sxm"},
    }  # fmt: skip
    began = time.process_time()
    brief = make_brief(plan_task(spec_from_dict(values)))
    taken = time.process_time() - began
    return {
        ("the plan of the task, of all layouts", "rank 0", "ms of CPU"): 1e3 * taken,
        ("the brief of a start", "a rank", "kB"): len(brief.to_json()) / 1e3,
    }

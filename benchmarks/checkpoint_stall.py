"""What checkpoints cost: the stall against the step, and the rate of saves and loads against the disk's own.

    python benchmarks/checkpoint_stall.py [--quick] [--model llama-11m] [--device cpu] [--devices 2] [--json OUT]

The same run is made with checkpoints beside training, with training waiting for them, and with saves as often as the
run itself chooses (`interval = "auto"`) where each device fails once an hour: the stall over all steps of that one is
what saving costs. The disk's own rate is that of
as many bytes, written to the same folder by one process in one piece and flushed, and read again; it is measured in the
same minutes, once as any program does it and once past the system's memory in pieces by several threads (O_DIRECT),
which is the most that this disk gives.

A save is counted until it is durable under its name, beside the plain write; and to its end, when it was read back from
the disk and older checkpoints may go, beside a plain write with a plain read from the disk after it. A file that was
just written is read from memory: both loads are measured, that one and one from the disk, for which the system is asked
to forget the files (`posix_fadvise`). Rounds of the disk and of Paceline take turns, and what part of the disk's own
rate Paceline reaches is the median of rounds: a disk that others use changes within minutes. Beside each rate stands
what it costs in CPU seconds of the process, user and system. All of it is measured again with the state `--times` over,
as of a larger model: what a save costs whatever its size counts for less there; and with as many bytes in small tensors
(512 KB each), of which each costs something besides its bytes.

A virtual machine may give memory that it does not use back to its host, within seconds; to have it again takes longer
than to read what comes there. Before what fills the system's memory the files are read, and forgotten again where they
are to come from the disk: then memory is there, for Paceline and for the disk's own rate alike.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import keep, machine, strict_json

from paceline.checkpoint import (
    CheckpointInfo,
    Found,
    KeptPlan,
    list_checkpoints,
    load_checkpoint,
    read_index,
    save_checkpoint,
)
from paceline.checkpoint.files.digests import best_kind, new_digest
from paceline.checkpoint.files.past_caches import PastCaches, page_room
from paceline.checkpoint.files.threads import Hands, at_once
from paceline.spec.journal.reading import read_journal

PIECE_BYTES, HASHED_BYTES = 2**26, 2**22
ROUNDS, THREADS = 5, 4
CHOSEN = "chosen"
KINDS = {"on": "beside training", "off": "training waits", CHOSEN: "beside training, as often as the run chooses"}
MTBF_HOURS = 1  # of a device: worse than any that is published, so that a short run chooses to save at all


def train(options: argparse.Namespace, run_dir: Path, kind: str) -> dict[str, float]:
    """Train and return seconds of a step, of a stall and of a whole save, and a checkpoint's bytes (medians).

    `stall_share` is what all saves but the last stood still, over the time of all steps.
    """
    is_chosen = kind == CHOSEN
    settings = {
        "task.model.name": options.model, "task.data.source": "stdlib", "task.data.max_bytes": "1 MB",
        "task.data.seq_len": 128, "task.global_batch": f"{options.samples} samples",
        "task.stop": f"{options.steps} steps",
        "cluster.device": options.device, "cluster.devices": options.devices, "cluster.probe": False,
        "run.checkpoint_every": f"{options.steps if is_chosen else options.every} steps", "run.evaluate_every": "none",
        "run.verify": False, "run.checkpoints.asynchronous": "on" if is_chosen else kind, "run.dir": str(run_dir),
        "run.checkpoints.interval": "auto" if is_chosen else "fixed",
        "cluster.reliability.mtbf_hours_per_device": MTBF_HOURS,
    }  # fmt: skip
    words = [sys.executable, "-m", "paceline", "train"]
    for key, value in settings.items():
        words += ["--set", f"{key}={json.dumps(value) if isinstance(value, bool) else value}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    journal = list(read_journal(run_dir))
    steps = [line["seconds"]["total"] for line in journal if line["kind"] == "step" and line["step"] > 1]
    saves = [line for line in journal if line["kind"] == "checkpoint"]
    saves = saves[:-1] or saves  # the last one is waited for in any case
    return {
        "saves": len(saves),
        "stall_share": sum(line["stall_seconds"] for line in saves) / sum(steps),
        "step_seconds": statistics.median(steps),
        "stall_seconds": statistics.median(line["stall_seconds"] for line in saves),
        "save_seconds": statistics.median(line["seconds"] for line in saves),
        "bytes": saves[-1]["bytes"],
    }


BESIDE = (
    ("save", "disk_write"), ("save", "disk_write_past_caches"),
    ("save_and_back", "disk_write_and_back"),
    ("load", "disk_read"), ("load", "disk_read_past_caches"), ("load_memory", "memory_read"),
)  # fmt: skip
IN_MEMORY = ("memory_read", "load_memory")
TAKES_MEMORY = ("disk_write", "disk_write_and_back", "disk_read", "disk_read_past_caches", "load")
SMALL_SHAPE = (512, 256)  # float32: 512 KB


def write_raw(path: Path, size: int, piece: bytes) -> None:
    """Write so many bytes into one file, a piece again and again, and have the disk take them."""
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        for begin in range(0, size, PIECE_BYTES):
            file.write(memoryview(piece)[: size - begin])
        os.fsync(file.fileno())


def read_raw(path: Path) -> None:
    """Read a file from its beginning to its end."""
    buffer = bytearray(PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget(paths: Iterable[Path]) -> None:
    """Have the system drop the files' content from its memory."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_and_read_raw(path: Path, size: int, piece: bytes) -> None:
    """Write a file as `write_raw` does, and read it back from the disk: what a save that trusts no disk asks of it."""
    write_raw(path, size, piece)
    forget([path])
    read_raw(path)


def move_past_caches(path: Path, size: int, piece: bytes, writes: bool) -> None:
    """Write a file of so many bytes and have the disk take it, or read it, past the system's memory by several threads.

    Ends the script where the file system has no such way.
    """
    if writes:
        path.unlink(missing_ok=True)
    with path.open("x+b" if writes else "rb", buffering=0) as file, Hands(THREADS, "raw") as hands:
        past = PastCaches(path, file.fileno(), writes)
        rooms = [page_room(HASHED_BYTES) for _ in range(THREADS)]
        for room in rooms if writes else ():
            room[:] = piece[: len(room)]

        def move(number: int) -> None:
            for at in range(number * HASHED_BYTES, size, THREADS * HASHED_BYTES):
                part = rooms[number][: min(HASHED_BYTES, size - at)]
                past.write(part, at) if writes else past.read(part, at)

        made = [hands.submit(move, number) for number in range(THREADS)]
        for each in made:
            each.result()
        if not past.is_used:
            raise SystemExit(f"{path}: its file system has no way past the system's memory")
        past.close()
        if writes:
            os.fsync(file.fileno())


def hash_raw(size: int, piece: bytes) -> None:
    """Hash so many bytes in pieces, by as many threads as a save works with at once."""
    with Hands(at_once(), "hash") as hands:
        lengths = [min(HASHED_BYTES, size - begin) for begin in range(0, size, HASHED_BYTES)]
        for each in [hands.submit(hash_piece, memoryview(piece)[:length]) for length in lengths]:
            each.result()


def hash_piece(content: memoryview) -> None:
    """Hash it as a piece of a file is."""
    digest = new_digest(best_kind())
    digest.update(content)
    digest.digest()


@dataclass
class Rounds:
    """Seconds and CPU seconds of every piece of work, a number for each round."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def make(self, name: str, call: Callable[[], CheckpointInfo | None]) -> None:
        """Do some work. Of a save the part after it was durable under its name is noted apart."""
        began, times = time.perf_counter(), os.times()
        info = call()
        wall, ended = time.perf_counter() - began, os.times()
        cpu = ended.user + ended.system - times.user - times.system
        self._add(name if info is None else f"{name}_and_back", wall, cpu)
        if info is not None:
            self._add(name, wall - info.after_seconds, cpu)

    def _add(self, name: str, wall: float, cpu: float) -> None:
        self.wall.setdefault(name, []).append(wall)
        self.cpu.setdefault(name, []).append(cpu)


def state_of(run_dir: Path, times: int) -> tuple[Found, dict[str, torch.Tensor]]:
    """Return a checkpoint and what it holds: the newest of a run, or one of its own with that state so many times."""
    newest = list_checkpoints(run_dir / "checkpoints").complete[0]
    index = read_index(newest.path, newest.manifest)
    state = {name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in index.items()}
    load_checkpoint(newest.path, state)
    if times == 1:
        return newest, state
    return saved(
        run_dir / "many", {f"{name}.{each}": held.clone() for name, held in state.items() for each in range(times)}
    )


def small_state(run_dir: Path, size: int) -> tuple[Found, dict[str, torch.Tensor]]:
    """Return a checkpoint of about so many bytes in small tensors, at least two, and what it holds."""
    count = max(2, size // (4 * math.prod(SMALL_SHAPE)))
    return saved(run_dir / "small", {f"small.{number}": torch.randn(SMALL_SHAPE) for number in range(count)})


def saved(root: Path, state: dict[str, torch.Tensor]) -> tuple[Found, dict[str, torch.Tensor]]:
    """Save a state into a folder of its own; return what was found there, and the state."""
    save_checkpoint(root, 1, state, {}, keep_last=1)
    return list_checkpoints(root).complete[0], state


@dataclass(frozen=True)
class SaveRates:
    """Bytes per second, what part each is of the disk's own, and nanoseconds of CPU a byte."""

    bytes: int
    tensors: int
    rates: dict[str, float]
    parts: dict[str, float]
    cpu_ns_a_byte: dict[str, float]


def measured(run_dir: Path, newest: Found, state: dict[str, torch.Tensor]) -> SaveRates:
    """Return the rates of the disk, and of a save and loads by one process of a state and the checkpoint that has it.

    The parts of the disk's own rate are medians over rounds: a disk that others use changes between rounds.
    """
    size, raw, root, kept = newest.manifest.total_bytes, run_dir / "raw", run_dir / "again", KeptPlan()
    piece = os.urandom(PIECE_BYTES)  # made before: that takes as long as a fast disk does
    work: dict[str, Callable[[], Any]] = {
        "disk_write": lambda: write_raw(raw, size, piece),
        "save": lambda: save_checkpoint(root, 1, state, {}, keep_last=1, kept=kept),
        "disk_write_past_caches": lambda: move_past_caches(raw, size, piece, writes=True),
        "disk_write_and_back": lambda: write_and_read_raw(raw, size, piece),
        "hash": lambda: hash_raw(size, piece),
        "memory_read": lambda: read_raw(raw),
        "load_memory": lambda: (load_checkpoint(newest.path, state), None)[1],
        "disk_read": lambda: read_raw(raw),
        "load": lambda: (load_checkpoint(newest.path, state), None)[1],
        "disk_read_past_caches": lambda: move_past_caches(raw, size, piece, writes=False),
    }
    rounds = Rounds()
    for _ in range(ROUNDS):
        for name, call in work.items():
            files = [*newest.path.iterdir(), *([raw] if raw.exists() else [])]
            for path in files if name in IN_MEMORY + TAKES_MEMORY else ():
                read_raw(path)
            if name in TAKES_MEMORY:
                forget(files)
            rounds.make(name, call)
    taken = rounds.wall
    parts = {
        f"{name} of {of}": statistics.median(its / own for own, its in zip(taken[name], taken[of], strict=True))
        for name, of in BESIDE
    }
    speeds = {name: size / statistics.median(seconds) for name, seconds in taken.items()}
    shutil.rmtree(root)
    cpu = {name: statistics.median(seconds) / size * 1e9 for name, seconds in rounds.cpu.items()}
    return SaveRates(size, len(state), speeds, parts, cpu)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="llama-11m")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6)
    parser.add_argument("--times", type=int, default=8, help="how often the state is saved and loaded at once as well")
    parser.add_argument("--dir", type=Path, help="a folder on the disk that is measured")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.model, options.devices, options.samples, options.steps, options.every = "llama-1m", 1, 2, 6, 2
        options.times = 2
    with tempfile.TemporaryDirectory(prefix="checkpoint-stall-", dir=options.dir) as folder:
        runs = {name: train(options, Path(folder, name), name) for name in KINDS}
        run_dir = Path(folder, "on")
        found = [measured(run_dir, *state_of(run_dir, times)) for times in dict.fromkeys((1, options.times))]
        small = measured(run_dir, *small_state(run_dir, found[0].bytes))
    result: dict[str, Any] = {"machine": machine(), "model": options.model, "devices": options.devices, "runs": runs}
    result |= asdict(found[0]) | {"larger": [asdict(each) for each in found[1:]], "small tensors": asdict(small)}
    print(f"{options.model} on {options.devices} processes, {runs['on']['bytes'] / 1e6:.0f} MB a checkpoint\n")
    print("| checkpoints | step | saves | stall | stall over step | stalls over all steps | whole save |")
    print("|---|---|---|---|---|---|---|")
    for name, title in KINDS.items():
        one = runs[name]
        ratio = one["stall_seconds"] / one["step_seconds"]
        print(f"| {title} | {one['step_seconds']:.3f} s | {one['saves']} | {one['stall_seconds'] * 1e3:.1f} ms |"
              f" {ratio:.1%} | {one['stall_share']:.2%} | {one['save_seconds']:.3f} s |")  # fmt: skip
    for each in [*found, small]:
        what = f"{each.bytes / 1e6:.0f} MB in {each.tensors:,}{' small' if each is small else ''} tensors"
        print(f"\n| one process, {what} | MB/s | of CPU, ns a byte | over the disk's own |")
        print("|---|---|---|---|")
        for name, rate in each.rates.items():
            beside = [f"{each.parts[f'{name} of {of}']:.0%} of {of.replace('_', ' ')}"
                      for one, of in BESIDE if one == name]  # fmt: skip
            cpu = each.cpu_ns_a_byte[name]
            print(f"| {name.replace('_', ' ')} | {rate / 1e6:.0f} | {cpu:.2f} | {', '.join(beside)} |")
    if options.json:
        options.json.write_text(strict_json(result))
    if options.save:
        keep("checkpoint_stall", result)


if __name__ == "__main__":
    main()

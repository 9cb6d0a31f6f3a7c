"""Seconds from SIGKILL of a rank to the next optimizer step: Paceline's three rungs, and what others have.

Besides, the loss of a node: everything on one of two nodes (two supervisors on this machine) is killed at once and its
part of the RAM disk is emptied. With copies the state is in the ranks that are left, with shards in the memory of both.
"restart, forked" is the loss of the process that forks ranks, and of all ranks with it: torch is imported anew, once.
In "restart" each rank imports torch. And "cold": the supervisor is killed, its ranks end after their
step, and the run is started again at once.

    python benchmarks/recovery.py [--quick] [--rounds 5] [--ranks 4] [--only NAME ...] [--add JSON ...] [--json OUT]
                                  [--python ray=PATH] [--python torchft=PATH] [--save]

Contenders take turns. With `--only` some of them do, and `--add` counts the rounds of earlier calls on this machine:
where a call may not last for long, the rounds are made in parts. Paceline's seconds are those of its journal, in which
every phase is apart; they count from the moment at which the supervisor last saw all ranks well. The loop by hand
(recovering/by_hand.py) is a DDP model of the same size in order of magnitude that saves a checkpoint after every step
and notes the time of each.

torchrun starts its workers again. It runs as torchrun comes, and with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without
which a restart over gloo meets the dead workers' addresses (torch 2.13). Ray Train starts the same loop's workers
again. torchft leaves the dead replica out and goes on with the others, without a checkpoint; it runs with the five
seconds of silence after which a replica is lost by default, and with half a second. Ray and torchft run by interpreters
of their own: install `recovering/requirements/PACKAGE.txt` into an environment, and name its interpreter; without it
their rows are left out. A contender that has made no step after its limit is told as such. What a contender has
started ends with its round, and with this script, however that ends: Ray's workers are in no group of their starter's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import keep, machine, median_of
from shared import orphans

from paceline.patience import Patience
from paceline.spec.journal.reading import read_journal

PHASES = ("detect", "end", "start", "restore", "step")
RUNGS = {
    "reform, copies": ("dp_replicate", ()),
    "reform, shards": ("dp_shard", ()),
    "standby": ("dp_shard", ("run.recovery.reform=false",)),
    "restart, forked": ("dp_shard", ("run.recovery.reform=false",)),
    "restart": ("dp_shard", ("run.recovery.reform=false", "run.recovery.standby=false")),
}
LOST_NODES = {
    "a lost node, copies": ("dp_replicate", ()),
    "a lost node, shards": ("dp_shard", ("run.checkpoint_every=none", "run.checkpoints.memory_every=1 steps")),
}
FORKER = "paceline-standb"  # the name of the process that forks ranks, as the system cuts it
PORT, MARK = 29437, "PACELINE_BENCHMARK"
LIMIT_SECONDS = 90.0  # of an idle machine
SPEC = """
[task]
name = "recovery"
model = {{ name = "llama-1m" }}
data = {{ source = "{corpus}", seq_len = 64, cache_dir = "{folder}/cache" }}
global_batch = "16 samples"
stop = "100000 steps"
[cluster]
device = "cpu"
devices = {ranks}
probe = false
[plan]
{axis} = {ranks}
[run]
dir = "{run_dir}"
verify = false
checkpoint_every = "5 steps"
evaluate_every = "none"
"""
RECOVERING = Path(__file__).parent / "recovering"
SILENCE = {"torchft": 5000, "torchft, 0.5 s of silence": 500}  # milliseconds after which a replica is lost


def wait_for(found: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """Return what `found()` returns once that is something; None where it never is, or the process ends."""
    patience = Patience(LIMIT_SECONDS)
    while not patience.is_over and process.poll() is None:
        result = found()
        if result:
            return result
        time.sleep(0.01)
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and wait for it; its own children end with it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def process_of(supervisor: int, name: str) -> int:
    """Return the process whose name begins so: a child of the supervisor, or of its standby."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) if pid else 0

    for entry in Path("/proc").glob("[0-9]*"):
        try:
            above = parent(int(entry.name))
            if (entry / "comm").read_text().startswith(name) and supervisor in (above, parent(above)):
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return 0


def paceline(rung: str, ranks: int, folder: Path) -> dict[str, float] | None:
    """Return the seconds of one recovery by its phases, and the steps that were made again."""
    axis, options = RUNGS[rung]
    corpus, run_dir = folder / "corpus", folder / "run"
    corpus.mkdir()
    (corpus / "text.txt").write_text(" ".join(str(number * number % 9973) for number in range(20000)))
    spec = folder / "spec.toml"
    spec.write_text(SPEC.format(corpus=corpus, folder=folder, ranks=ranks, axis=axis, run_dir=run_dir))
    changes = [word for option in options for word in ("--set", option)]
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "train", str(spec), *changes],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:

        def of(kind: str) -> list[dict[str, Any]]:
            return [record for record in read_journal(run_dir) if record["kind"] == kind]

        if not wait_for(lambda: [each for each in of("step") if each["step"] >= 12], process):
            return None
        victim = FORKER if rung == "restart, forked" else f"rank-{ranks - 1}-"
        os.kill(process_of(process.pid, victim), signal.SIGKILL)
        (record,) = wait_for(lambda: of("recovery"), process) or [None]
        return {**record["seconds"], "steps_lost": record["steps_lost"]} if record else None
    finally:
        end(process)


def cold(ranks: int, folder: Path) -> dict[str, float] | None:
    """Return the seconds from the end of all processes of a run to the next step of a run that is started then."""
    corpus, run_dir, spec = folder / "corpus", folder / "run", folder / "spec.toml"
    corpus.mkdir()
    (corpus / "text.txt").write_text(" ".join(str(number * number % 9973) for number in range(20000)))
    spec.write_text(SPEC.format(corpus=corpus, folder=folder, ranks=ranks, axis="dp_shard", run_dir=run_dir))

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", str(spec)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def steps(attempt: int) -> list[float]:
        told = [record for record in read_journal(run_dir) if record["kind"] == "step"]
        return [record["time"] for record in told if record["step"] >= 12 and record["attempt"] == attempt]

    process = start()
    try:
        if not wait_for(lambda: steps(1), process):
            return None
        process.kill()  # its ranks end after their step, which they save
        killed, _ = time.time(), process.wait()
        process = start()
        after = wait_for(lambda: steps(2), process)
        return {"total": after[0] - killed} if after else None
    finally:
        end(process)


def lost_node(case: str, ranks: int, folder: Path) -> dict[str, float] | None:
    """Return the seconds from the loss of one of two nodes to the next step in a world of the other's ranks."""
    axis, options = LOST_NODES[case]
    corpus, run_dir, spec = folder / "corpus", folder / "run", folder / "spec.toml"
    corpus.mkdir()
    (corpus / "text.txt").write_text(" ".join(str(number * number % 9973) for number in range(20000)))
    spec.write_text(SPEC.format(corpus=corpus, folder=folder, ranks=ranks, axis=axis, run_dir=run_dir))
    words = [word for option in options for word in ("--set", option)]
    nodes, cores = [], sorted(os.sched_getaffinity(0))
    for node in (0, 1):
        own = set(cores[node::2]) or set(cores)  # a node counts its cores, and the two share this machine's
        place = ["--nodes", "2", "--node", str(node), "--rendezvous", f"127.0.0.1:{PORT}"]
        nodes.append(subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", str(spec), *place, *words], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", MARK: f"{folder}-{node}"},
            preexec_fn=functools.partial(os.sched_setaffinity, 0, own),
        ))  # fmt: skip
    try:

        def of(kind: str) -> list[dict[str, Any]]:
            return [record for record in read_journal(run_dir) if record["kind"] == kind]

        if not wait_for(lambda: [each for each in of("step") if each["step"] >= 12], nodes[0]):
            return None
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={folder}-1" in (entry / "environ").read_text(errors="replace"):
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue
        for held in Path("/dev/shm").glob("paceline-pieces-1-*"):
            shutil.rmtree(held, ignore_errors=True)
        (record,) = wait_for(lambda: of("recovery"), nodes[0]) or [None]
        return {**record["seconds"], "steps_lost": record["steps_lost"]} if record else None
    finally:
        for process in nodes:
            end(process)


def begin(*words: object, **environ: str) -> subprocess.Popen[bytes]:
    """Start a program of `recovering/`, in a group of its own."""
    return subprocess.Popen(
        [str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip


def end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    """End programs with all that they have started in their groups."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def killed(ranks: int, folder: Path, process: subprocess.Popen[bytes], fewer: bool) -> dict[str, float] | None:
    """Kill the last rank of a program of `recovering/`; return the seconds to the next step on record.

    With `fewer` that is the first step that one rank less has made. Else it is one of as many ranks, which come after a
    restart: a step may be on its way when the worker dies, and none is made within half a second.
    """
    steps = folder / "steps"

    def told() -> list[tuple[float, int]]:
        lines = steps.read_text().splitlines() if steps.exists() else []
        return [(float(line.split()[0]), int(line.split()[1])) for line in lines if len(line.split()) == 2]

    def goes_on() -> list[float]:
        later = [each for each in told() if each[0] > at]
        return [moment for moment, count in later if (count == ranks - 1 if fewer else moment > at + 0.5)]

    if not wait_for(lambda: len([1 for _, count in told() if count == ranks]) >= 12, process):
        return None
    os.kill(int((folder / f"rank-{ranks - 1}").read_text()), signal.SIGKILL)
    at = time.time()
    after = wait_for(goes_on, process)
    return {"total": after[0] - at} if after else None


def torchrun(ranks: int, folder: Path, **environ: str) -> dict[str, float] | None:
    """Return the seconds from the kill of a worker to the next step on record."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3"]
    process = begin(sys.executable, *words, RECOVERING / "by_hand.py", folder, **environ)
    try:
        return killed(ranks, folder, process, fewer=False)
    finally:
        end_all([process])


def ray(python: str, ranks: int, folder: Path) -> dict[str, float] | None:
    """Return the same of a worker of Ray Train."""
    process = begin(python, RECOVERING / "ray_train.py", folder, ranks)
    try:
        return killed(ranks, folder, process, fewer=False)
    finally:
        end_all([process])


def torchft(python: str, silence: int, ranks: int, folder: Path) -> dict[str, float] | None:
    """Return the same of a replica of torchft, whose silence of so many milliseconds is its loss."""
    script, processes = RECOVERING / "torchft_train.py", list[subprocess.Popen[bytes]]()
    try:
        processes.append(begin(python, script, folder, "lighthouse", silence))
        if not wait_for((folder / "lighthouse").exists, processes[0]):
            return None
        processes += [begin(python, script, folder, rank, ranks) for rank in range(ranks)]
        return killed(ranks, folder, processes[1], fewer=True)
    finally:
        end_all(processes)


def earlier(name: str, ranks: int, here: dict[str, Any], files: list[Path]) -> list[dict[str, float] | None]:
    """Return the rounds of a contender in earlier calls. Ends the script where they were on another machine or day."""
    found: list[dict[str, float] | None] = []
    for path in files:
        report = json.loads(path.read_text())
        if (report["machine"], report["ranks"]) != (here, ranks):
            sys.exit(f"{path}: {report['ranks']} ranks on {report['machine']}, and this call has {ranks} on {here}")
        row = report["contenders"].get(name, {"never": 0})
        found += [*row.get("results", ()), *[None] * row["never"]]
    return found


def main() -> None:
    """Run every contender in turn, print the table, and keep the figures if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round with two ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders of this call")
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="JSON", help="figures of earlier calls")
    parser.add_argument("--python", action="append", default=[], metavar="PACKAGE=PATH")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    rounds, ranks = (1, 2) if chosen.quick else (chosen.rounds, chosen.ranks)
    contenders: dict[str, Callable[[Path], dict[str, float] | None]] = {
        **{name: functools.partial(paceline, name, ranks) for name in RUNGS},
        **{name: functools.partial(lost_node, name, ranks) for name in LOST_NODES},
        "cold": lambda folder: cold(ranks, folder),
        "torchrun": lambda folder: torchrun(ranks, folder),
        "torchrun, own store": lambda folder: torchrun(ranks, folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
    }
    pythons = dict(each.split("=", 1) for each in chosen.python)
    if "ray" in pythons:
        contenders["Ray Train"] = lambda folder: ray(pythons["ray"], ranks, folder)
    for name, silence in SILENCE.items() if "torchft" in pythons else ():
        contenders[name] = functools.partial(torchft, pythons["torchft"], silence, ranks)
    here = machine()
    found = {name: earlier(name, ranks, here, chosen.add) for name in contenders}
    mark = orphans.watch()
    for _ in range(rounds):
        for name, contender in contenders.items():
            if name not in (chosen.only or contenders):
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[name].append(contender(Path(folder)))
                finally:
                    orphans.end(mark)
    print(f"{'':26}{'seconds':>9}{'95 %':>16}  " + "".join(f"{phase:>9}" for phase in PHASES) + "  never")
    rows: dict[str, dict[str, Any]] = {}
    for name, results in found.items():
        if not results:
            continue
        made = [result for result in results if result]
        rows[name] = {"rounds": len(results), "never": len(results) - len(made)}
        if made:
            total = median_of([result["total"] for result in made])
            parts = {
                phase: median_of([result[phase] for result in made]).median for phase in PHASES if phase in made[0]
            }
            rows[name] |= {"total": asdict(total), "phases": parts, "results": made}
            shown = "".join(f"{parts[phase]:9.3f}" if phase in parts else f"{'':9}" for phase in PHASES)
            print(f"{name:26}{total.median:9.3f}{f'{total.low:.2f} to {total.high:.2f}':>16}  {shown}"
                  f"{rows[name]['never']:7}")  # fmt: skip
        else:
            print(f"{name:26}{'never':>9}")
    report = {"machine": here, "ranks": ranks, "contenders": rows}
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1))
    if chosen.save:
        keep("recovery", report)


if __name__ == "__main__":
    main()

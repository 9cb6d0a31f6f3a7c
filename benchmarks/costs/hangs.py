"""How soon a rank that hangs is found, where a step takes 50 ms; and that ranks which are merely slow are let be.

    python benchmarks/costs/hangs.py [--quick] [--ranks 2] [--rounds 1] [--only stopped] [--json OUT]

A rank comes to a standstill in the passes of one step: it is stopped (SIGSTOP), waits for a lock that nobody frees,
sleeps, looks for something that never comes, computes for ever, or makes a collective that its peers do not. Told are
the seconds from there to the moment at which the supervisor ends it, and to the next step (the journal's recovery). In
`calm` nothing hangs: from time to time a rank takes seconds for a step, as it computes, lets a child compute, collects
garbage, reads a file past the cache, pauses, or waits for a socket or for a thread of its own that does. No rank may be
ended there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.spec.journal.reading import read_journal

sys.path.insert(0, str(Path(__file__).parents[1]))  # what benchmarks share
from common import machine, median_of

SPEC = """
[task]
name = "hangs"
model = {{ name = "llama-1m", hidden = 32 }}
objective = "standing_still:loss"
data = {{ source = "{corpus}", seq_len = 32, cache_dir = "{folder}/cache" }}
global_batch = "{batch} samples"
stop = "{steps} steps"
[cluster]
device = "cpu"
devices = {ranks}
probe = false
learn = false
[plan]
dp_shard = {ranks}
precision = "fp32"
[run]
dir = "{run_dir}"
verify = false
checkpoint_every = "none"
evaluate_every = "none"
"""
OBJECTIVE = """
import gc, os, signal, socket, subprocess, sys, tempfile, threading, time
from pathlib import Path
import torch.distributed as dist
from paceline.task.objective import next_token

KIND, FOLDER, AT = os.environ["HANGS"], Path(os.environ["HANGS_IN"]), 40
CHILD = [sys.executable, "-c", "import time\\nend = time.time() + 4\\nwhile time.time() < end: pass"]
passes = 0


def computes(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def with_a_child():
    done = threading.Event()
    threading.Thread(target=lambda: (subprocess.run(CHILD), done.set())).start()
    done.wait()


def reads():
    with tempfile.TemporaryFile(dir=FOLDER) as file:
        for _ in range(40):
            file.write(bytes(2**22)); file.flush(); os.fsync(file.fileno())


def asks():
    ours, theirs = socket.socketpair()
    threading.Timer(4.0, lambda: theirs.send(b"1")).start()
    ours.recv(1)


def asks_in_a_thread():
    asking = threading.Thread(target=asks)
    asking.start()
    asking.join()


SLOW = [lambda: computes(3.0), with_a_child, lambda: [gc.collect() for _ in range(40)], reads, asks,
        asks_in_a_thread, lambda: time.sleep(4.0)]
HANGS = {
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP), "locked": lambda: threading.Event().wait(),
    "sleeps": lambda: time.sleep(10**6), "polls": lambda: [time.sleep(0.01) for _ in range(10**9)],
    "computes": lambda: computes(10**6), "collective": dist.barrier,
}


def loss(model, batch):
    global passes
    passes += 1
    time.sleep(0.04)
    is_one = os.environ.get("RANK") == "1"
    if KIND == "calm":
        if is_one and passes >= AT and passes % 10 == 0:
            SLOW[passes // 10 % len(SLOW)]()
    elif is_one and passes >= AT and not (FOLDER / "struck").exists():
        (FOLDER / "struck").touch()
        HANGS[KIND]()
    return next_token(model, batch)
"""
KINDS = ("stopped", "locked", "sleeps", "collective", "polls", "computes")


def told_of(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what a run's journal tells of its hangs: how many, and the seconds that the first one took."""
    folder.mkdir()
    (folder / "standing_still.py").write_text(OBJECTIVE)
    values = {"folder": folder, "run_dir": folder / "run", "corpus": options.corpus, "ranks": options.ranks,
              "batch": options.ranks, "steps": options.calm_steps if kind == "calm" else 80}  # fmt: skip
    (folder / "spec.toml").write_text(SPEC.format(**values))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HANGS": kind, "HANGS_IN": str(folder)}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-m", "paceline", "train", str(folder / "spec.toml")]
    ended = subprocess.run(words, env=environ, capture_output=True, text=True)
    records = list(read_journal(folder / "run"))
    of_kind = {name: [each for each in records if each["kind"] == name] for name in ("fault", "recovery", "step")}
    found: dict[str, Any] = {"code": ended.returncode, "hangs": len(of_kind["fault"]), "steps": len(of_kind["step"])}
    found["longest"] = max((each["seconds"]["total"] for each in of_kind["step"]), default=0.0)
    if of_kind["recovery"]:
        seconds = of_kind["recovery"][0]["seconds"]
        found |= {"detect": seconds["detect"], "total": seconds["total"]}
    if of_kind["fault"]:
        found["because"] = of_kind["fault"][0]["because"]
        evidence = of_kind["fault"][0].get("evidence") or {}
        found |= {name: evidence.get(name) for name in ("median_step_seconds", "silent_seconds", "limit_seconds")}
    if ended.returncode:
        print(ended.stderr[-2000:], file=sys.stderr)
    return found


def main() -> int:
    """Measure and print; 1 where a hang was not survived, or a rank was ended that was merely slow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one kind of hang")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=(*KINDS, "calm"))
    parser.add_argument("--calm-steps", type=int, default=200)
    parser.add_argument("--corpus", default=str(Path(__file__).parents[2] / "src" / "paceline" / "spec"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds = (options.only,) if options.only else ("locked",) if options.quick else (*KINDS, "calm")
    told: dict[str, list[dict[str, Any]]] = {}
    for at in range(options.rounds):
        for kind in kinds:
            with tempfile.TemporaryDirectory() as name:
                found = told_of(kind, options, Path(name) / "run")
            told.setdefault(kind, []).append(found)
            print(f"{kind:10}  round {at}  load {os.getloadavg()[0]:4.1f}  {found}", flush=True)
    print(f"\n{machine()}\n\n| a rank that | found after | and the next step after |\n|---|---|---|")
    for kind, each in told.items():
        if kind != "calm" and all("detect" in one for one in each):
            shown = [median_of([one[name] for one in each]).median for name in ("detect", "total")]
            print(f"| {kind} | {shown[0]:.2f} s | {shown[1]:.2f} s |")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "told": told}, indent=1))
    hung = any(one["code"] or one["hangs"] != 1 for kind in told for one in told[kind] if kind != "calm")
    return int(hung or any(one["code"] or one["hangs"] for one in told.get("calm", ())))


if __name__ == "__main__":
    sys.exit(main())

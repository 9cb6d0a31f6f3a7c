"""The stacks that ranks write when they are asked for them: read, and kept in the run's directory. Torch-free."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path

FOLDER = "hangs"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<at>\d+) in (?P<name>.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
# Code whose innermost frame says that a thread waits for peers.
WAITING = ("torch/distributed/", "paceline/run/replicas/", "paceline/run/process/")
OF_TORCH = "/torch/"
NOBODYS = ("/site-packages/", "/lib/python3", "/paceline/", OF_TORCH)  # parts of files that are no program of a user's
INNERMOST = 3  # frames in which a wait shows
FLIGHT_MARK = "\nflight recorder: "  # between a rank's stacks and its last collectives
NO_COLLECTIVES = ("wrapper", "_fn", "wait", "__call__")
# What calls torch's autograd. It waits without a frame of its own for collectives that copies of the model (DDP) make.
IN_BACKWARD, BACKWARD = "torch/autograd/graph.py", "_engine_run_backward"


def main_thread(text: str) -> list[str]:
    """Return the main thread's frames, the innermost first, as `function (file:line)`; none where there is no stack."""
    return [f"{found['name']} ({found['file']}:{found['at']})" for found in _frames(text)]


def collective_in(text: str) -> str:
    """Return the name of the collective that a thread waits in, as its stack tells; empty where none does."""
    frames = _frames(text)
    inside = [found for found in frames[:INNERMOST] if any(part in found["file"] for part in WAITING)]
    named = [found["name"] for found in inside if found["name"] not in NO_COLLECTIVES]
    return named[0] if named else "a wait" if inside else ""


def waits_in(text: str) -> str:
    """Return the collective in which a thread waits whose innermost frame is of torch's; empty where that is another's.

    A backward pass counts as one. What a collective calls of the user's, as a hook, may wait for something else.
    """
    frames = _frames(text)
    if not frames or OF_TORCH not in frames[0]["file"]:
        return ""
    is_backward = IN_BACKWARD in frames[0]["file"] and frames[0]["name"] == BACKWARD
    return "a backward pass" if is_backward else collective_in(text)


def called_by(text: str) -> str:
    """Return the innermost frame of a main thread that is neither a library's nor ours; empty where there is none."""
    for found in _frames(text):
        if found["file"].startswith("/") and not any(part in found["file"] for part in NOBODYS):
            return f"{found['name']} ({found['file']}:{found['at']})"
    return ""


def parted(answer: str) -> tuple[str, dict[str, object]]:
    """Return what a rank has answered as its stacks and what its flight recorder holds."""
    stacks, _, flight = answer.partition(FLIGHT_MARK)
    try:
        told = json.loads(flight) if flight else {"missing": "the rank did not answer"}
    except ValueError as error:
        told = {"missing": f"what the rank answered is no JSON: {error}"}
    return stacks, told


def save_stacks(
    run_dir: Path,
    stacks: Mapping[int, str],
    flights: Mapping[int, Mapping[str, object]],
    states: Mapping[int, str],
    step: int,
) -> Path | None:
    """Keep the stacks and the last collectives of all ranks in a folder of the run; None where the disk takes none."""
    folder = run_dir / FOLDER / f"step-{step:08d}-{time.time_ns() // 10**6}"
    try:
        folder.mkdir(parents=True)
        for rank, text in stacks.items():
            answered = text or "no stack: it did not answer, as one that is stopped cannot\n"
            (folder / f"rank-{rank}.txt").write_text(f"state {states[rank]} (of /proc)\n{answered}")
            (folder / f"rank-{rank}.flight.json").write_text(json.dumps(flights[rank], indent=1))
    except OSError:  # a full disk may be why they hang: what is told without the files is told all the same
        return None
    return folder


def _frames(text: str) -> list[re.Match[str]]:
    """Return the frames of the thread that is written last: threads are told newest first, so it is the main one."""
    threads = list(_THREAD.finditer(text))
    return list(_FRAME.finditer(text, threads[-1].start())) if threads else []

"""Whole runs of the command line in processes of their own, on a tiny corpus, for tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from started.popen import Warm

from paceline.cli.main import main
from paceline.patience import Patience
from paceline.spec.journal.reading import final_steps, parsed_line, read_journal, records_of_kind, starts_of

SPEC = """
[task]
name = "tiny"
model = {{ name = "llama-1m", hidden = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
data = {{ source = "{corpus}", seq_len = 16, validation_fraction = 0.2, cache_dir = "{cache}" }}
optimizer = {{ lr = 3e-3 }}
schedule = {{ kind = "constant" }}
global_batch = "14 samples"
stop = "{steps} steps"

[cluster]
device = "cpu"
devices = {devices}
probe = false

[plan]
precision = "{precision}"
{plan}

[run]
dir = "{run_dir}"
record_samples = true
verify = false
checkpoint_every = "4 steps"
evaluate_every = "none"
log_every = "1 steps"
"""


STARTED: list[subprocess.Popen[str]] = []
LOOK_SECONDS = 0.02  # between two looks at what is waited for


def write_corpus(folder: Path) -> Path:
    """Write a few dozen small documents with something to learn in them."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number in range(40):
        words = " ".join(f"{number * step % 97} plus {step} is {number * step % 97 + step}." for step in range(60))
        (corpus / f"{number:02d}.txt").write_text(words)
    return corpus


def write_spec(
    folder: Path, run_dir: Path, devices: int = 1, plan: str = "", steps: int = 16, precision: str = "fp32"
) -> Path:
    """Write a spec for a tiny decoder and return its path.

    Losses of different layouts are compared in fp64: in fp32 Adam makes a whole update of rounding (rounding.py).
    """
    path = folder / f"{run_dir.name}-{devices}.toml"
    corpus = write_corpus(folder)
    path.write_text(
        SPEC.format(
            corpus=corpus,
            cache=folder / "cache",
            run_dir=run_dir,
            devices=devices,
            plan=plan,
            steps=steps,
            precision=precision,
        )
    )
    return path


def environment(**changes: str) -> dict[str, str]:
    """Return an environment in which a run reads nothing of this machine's own state."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


def paceline(*arguments: Any, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end and return how it ended."""
    options.setdefault("env", environment())
    return run_patiently([sys.executable, "-m", "paceline", *map(str, arguments)], timeout, **options)


def in_process(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no ranks in this process, which has imported all it needs, and return how it ended."""
    words, stdout, stderr = [str(argument) for argument in arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(words)
    return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())


def run_patiently(
    command: Sequence[Any], timeout: float = 120, input: str | None = None, is_cold: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return how it ended; `timeout` is in seconds of an idle machine.

    The process is forked from one that has imported torch (started/) where that comes to the same; `is_cold` is for
    tests of what a new interpreter does.
    """
    words = [str(word) for word in command]
    pipes = {"stdin": subprocess.PIPE if input is not None else None, "stdout": subprocess.PIPE,
             "stderr": subprocess.PIPE}  # fmt: skip
    with (subprocess.Popen if is_cold else Warm)(words, text=True, **pipes, **options) as process:
        try:
            stdout, stderr = ending(process, timeout, input)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def ending(process: subprocess.Popen[str], timeout: float, input: str | None = None) -> tuple[str, str]:
    """Return what a process has printed when it ends (standard output, error); `timeout` as in `run_patiently`."""
    patience = Patience(timeout)
    while True:
        try:
            return process.communicate(input, timeout=1)
        except subprocess.TimeoutExpired:
            input = None  # taken already
            if patience.is_over:
                raise


def start(*arguments: Any) -> subprocess.Popen[str]:
    """Start the command line in the background. It is killed at the end of its test, if it runs on (conftest.py)."""
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    begun = Warm(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), process_group=0)
    STARTED.append(begun)
    return begun


def end_started() -> None:
    """End what a test has started in the background and left, so that it takes no cores from the tests after it."""
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step records that count, in order."""
    return final_steps(list(read_journal(run_dir)))


def records_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind. No other line is parsed: of a long run that is waited for that takes a core."""
    found = [(number, record) for number, path in starts_of(run_dir) for record in records_of_kind(path, kind)]
    return [{"attempt": number, **record} for number, record in found]


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str], timeout: float = 90) -> None:
    """Return as soon as the journal holds the step."""
    patience, read = Patience(timeout), dict[Path, int]()
    while not patience.is_over:
        has_ended = process.poll() is not None  # asked first: what it has written since then is seen below
        if any(made >= step for made in _new_steps(run_dir, read)):
            return
        if has_ended:
            raise AssertionError(f"ended before step {step}: {process.communicate()}")
        time.sleep(LOOK_SECONDS)
    raise AssertionError(f"no step {step} in {timeout} s")


def _new_steps(run_dir: Path, read: dict[Path, int]) -> Iterator[int]:
    """Yield the steps that were added since the last look; `read` are the bytes of each file that are known."""
    for _, path in starts_of(run_dir):
        with path.open("rb") as file:
            file.seek(read.setdefault(path, 0))
            lines, end, _ = file.read().rpartition(b"\n")
        read[path] += len(lines) + len(end)
        for record in filter(None, map(parsed_line, (line for line in lines.split(b"\n") if b'"step"' in line))):
            if record["kind"] == "step":
                yield int(str(record["step"]))


def as_json(text: str) -> Any:
    """Return the JSON on standard output."""
    return json.loads(text)


def wait_until(condition: Callable[[], bool], timeout: float = 90) -> None:
    """Return as soon as the condition holds."""
    patience = Patience(timeout)
    while not condition():
        assert not patience.is_over, f"not in {timeout} s"
        time.sleep(LOOK_SECONDS)


def is_running(pid: int) -> bool:
    """Return whether a process is there and has not ended, whoever's child it is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_forked(pid: int) -> bool:
    """Return whether a process was forked for a test from the one that has imported torch (started/)."""
    return "started.nursery" in Path(f"/proc/{pid}/cmdline").read_text()


def ranks_of(supervisor: int) -> dict[int, int]:
    """Return the process of each rank that a supervisor has, started by itself or forked by its standby."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name, parent = (entry / "comm").read_text(), parent_of(int(entry.name))
            if name.startswith("rank-") and supervisor in (parent, parent_of(parent)) and is_running(int(entry.name)):
                found[int(name.split("-")[1])] = int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return found


def parent_of(pid: int) -> int:
    """Return the number of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) if pid else 0

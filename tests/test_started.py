"""A command that is forked for a test is the process that a new interpreter would have been."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import environment, is_forked
from started.command import is_alike, read
from started.popen import COLD, Warm

from paceline.patience import Patience

SCRIPT = """
import atexit, json, os, signal, sys
atexit.register(print, "left")
told = {"argv": sys.argv[1:], "name": __name__, "cwd": os.getcwd(), "own": os.environ["OWN"], "path": sys.path[:2],
        "stdin": sys.stdin.read(), "torch": "torch" in sys.modules, "group": os.getpgid(0) == os.getpid(),
        "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "buffered": sys.stdout.line_buffering,
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:3], "encoding": sys.stdout.encoding}
print(json.dumps(told))
import torch
assert torch.ones(2).sum() == 2 and torch.__spec__.name == "torch"
ending = sys.argv[1]
if ending == "error":
    raise LookupError("of the script")
if ending == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
if ending == "interrupt":
    raise KeyboardInterrupt
sys.exit(int(ending) if ending.isdigit() else ending)
"""


def ended(kind: type[subprocess.Popen[str]], folder: Path, ending: str) -> tuple[int, str, str, bool]:
    """Return how a script ended in a process of the kind, and whether its number was that of a running process."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with kind([sys.executable, str(path), ending], cwd=folder, env=environment(OWN="1"), text=True, process_group=0,
              **pipes) as process:  # type: ignore[call-overload]  # fmt: skip
        was_there = process.poll() is None and os.getpgid(process.pid) == process.pid
        stdout, stderr = process.communicate("typed")
    return process.returncode, stdout, stderr, was_there


@pytest.mark.parametrize("ending", ["3", pytest.param("text", marks=pytest.mark.deep), "error", "signal", "interrupt"])
def test_a_forked_command_ends_and_sees_what_a_new_one_does(tmp_path: Path, ending: str) -> None:
    code, stdout, stderr, was_there = ended(Warm, tmp_path, ending)
    told, left = json.loads(stdout.splitlines()[0]), stdout.splitlines()[1:]
    assert was_there
    assert told == {"argv": [ending], "name": "__main__", "cwd": str(tmp_path), "own": "1", "stdin": "typed",
                    "path": [str(tmp_path), environment()["PYTHONPATH"].split(os.pathsep)[0]], "torch": False,
                    "group": True, "int": True, "buffered": False, "files": [0, 1, 2], "encoding": "utf-8"}  # fmt: skip
    assert code == {"3": 3, "text": 1, "error": 1, "signal": -signal.SIGTERM, "interrupt": -signal.SIGINT}[ending]
    assert left == ([] if ending == "signal" else ["left"])
    assert ("LookupError: of the script" in stderr) == (ending == "error") and "become.py" not in stderr


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["3", "text", "error", "signal", "interrupt"])
def test_a_new_interpreter_says_the_same(tmp_path: Path, ending: str) -> None:
    assert ended(Warm, tmp_path, ending)[:2] == ended(COLD, tmp_path, ending)[:2]


def test_descriptors_that_it_is_given_have_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(
        "import os, sys\nfor number in sys.argv[1:]:\n    os.write(int(number), number.encode())\n"
        "print([int(each) for each in os.listdir('/proc/self/fd') if int(each) > 2 and each in sys.argv])\n"
    )
    ends = [os.pipe() for _ in range(2)]
    wanted = [fcntl.fcntl(far, fcntl.F_DUPFD, number) for number, (_, far) in zip((3, 90), ends, strict=True)]
    words = [sys.executable, str(tmp_path / "writes.py"), *map(str, wanted)]
    with Warm(words, env=environment(), pass_fds=wanted, stdout=subprocess.PIPE, text=True) as process:
        assert is_forked(process.pid)
        said, _ = process.communicate()
    assert sorted(json.loads(said)) == sorted(wanted)
    assert [os.read(near, 9).decode() for near, _ in ends] == [str(number) for number in wanted]
    for number in (*wanted, *(each for pair in ends for each in pair)):
        os.close(number)


def test_what_imports_would_read_makes_a_new_interpreter(tmp_path: Path) -> None:
    warm = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "/a", "LANG": "C.UTF-8"}
    for other in ({"OMP_NUM_THREADS": "4"}, {"HOME": "/b"}, {"LC_CTYPE": "C.UTF-8"}, {"PYTHONHASHSEED": "0"},
                  {"PYTHONPATH": f"/a:{tmp_path}"}):  # fmt: skip
        assert is_alike({**warm, **other}, warm, "/"), other
    for other in ({"OMP_WAIT_POLICY": "active"}, {"PYTHONHASHSEED": "1"}, {"TORCH_LOGS": "all"}, {"LANG": "C"}):
        assert not is_alike({**warm, **other}, warm, "/"), other
    (tmp_path / "paceline").mkdir()
    assert not is_alike({**warm, "PYTHONPATH": f"/a:{tmp_path}"}, warm, "/") and not is_alike(warm, warm, str(tmp_path))


def test_only_commands_of_python_alone_are_forked() -> None:
    assert read([sys.executable, "-u", "-m", "paceline", "plan"]).whole()[1:] == ["-u", "-m", "paceline", "plan"]  # type: ignore[union-attr]
    for words in (["bash"], [sys.executable], [sys.executable, "-c", "1"], [sys.executable, "-X", "dev", "a.py"],
                  [sys.executable, "-m", "pytest"], [sys.executable, "-"]):  # fmt: skip
        assert read(words) is None, words


KILLED = """
import os, signal, subprocess, sys
from pathlib import Path
from runs import environment, is_forked
from started.popen import Warm

def test_that_starts_processes_and_is_killed():
    words = [sys.executable, str(Path(__file__).with_name("sleeps.py"))]
    cold = subprocess.Popen(["sleep", "1000"], env=environment(), start_new_session=True)
    warm = Warm(words, env=environment(), process_group=0, stdout=subprocess.PIPE, text=True)
    child = warm.stdout.readline().strip()
    Path(__file__).with_name("started.txt").write_text(f"{cold.pid} {warm.pid} {child}")
    os.kill(os.getpid(), signal.SIGKILL)
"""
OWN_CONFTEST = f"""
import runpy
own_cache = runpy.run_path({str(Path(__file__).with_name("conftest.py"))!r})["own_cache"]
"""
SLEEPS = """
import subprocess, time
print(subprocess.Popen(["sleep", "1000"], process_group=0).pid, flush=True)
time.sleep(1000)
"""


def test_what_a_killed_test_run_has_started_ends(tmp_path: Path) -> None:
    """The nodes of a test outlived a pytest that was killed, and took a core from the tests after it."""
    (tmp_path / "test_killed.py").write_text(KILLED)
    (tmp_path / "conftest.py").write_text(OWN_CONFTEST)
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c",
             os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_killed.py")]  # fmt: skip
    with (tmp_path / "said.txt").open("w") as said:  # not a pipe, which processes that live on would hold open
        killed = subprocess.run(words, env=environment(), stdout=said, stderr=said, check=False)
    assert killed.returncode == -signal.SIGKILL, (tmp_path / "said.txt").read_text()
    started = [int(number) for number in (tmp_path / "started.txt").read_text().split()]
    patience = Patience(20)
    try:
        while running := [number for number in started if is_running(number)]:
            assert not patience.is_over, f"{running} of {started} outlive their pytest"
            time.sleep(0.02)
    finally:
        for number in filter(is_running, started):
            os.kill(number, signal.SIGKILL)


def is_running(number: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

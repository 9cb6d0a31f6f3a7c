"""`recovery.py` leaves nothing behind: what a contender starts ends with its round, and with the script."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from runs import environment
from started.popen import Warm

from paceline.patience import Patience

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "recovery.py"
# As Ray does: a worker in a session of its own, that outlives who started it. It is called with the script of Ray's.
CONTENDER = """#!{python}
import os, sys, time
from pathlib import Path
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
Path({told!r}).write_text(str(os.getpid()))
time.sleep({seconds})
"""


def left(folder: Path) -> list[int]:
    """Return which processes that the contender started still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if f"OF_TEST={folder}".encode() in (entry / "environ").read_bytes().split(b"\0") and state not in "ZX":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "seconds",
    [pytest.param(0, id="its round ends"), pytest.param(600, id="the script is killed", marks=pytest.mark.deep)],
)
def test_a_worker_in_a_session_of_its_own_ends(tmp_path: Path, seconds: int) -> None:
    told, contender, out = tmp_path / "told", tmp_path / "contender", tmp_path / "out.json"
    contender.write_text(CONTENDER.format(python=sys.executable, told=str(told), seconds=seconds))
    contender.chmod(0o755)
    words = ["--quick", "--only", "Ray Train", "--python", f"ray={contender}", "--json", str(out)]
    patience = Patience(60)
    with Warm([sys.executable, str(SCRIPT), *words], env=environment(OF_TEST=str(tmp_path)), cwd=tmp_path) as script:
        while not told.exists():
            assert script.poll() is None and not patience.is_over
        if seconds:
            assert left(tmp_path)
            os.kill(script.pid, signal.SIGKILL)
        script.wait(60)
    while left(tmp_path):
        assert not patience.is_over, "a worker runs on"
    assert out.exists() == (not seconds)

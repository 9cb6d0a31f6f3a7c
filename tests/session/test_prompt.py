"""At a prompt: Ctrl-C saves and hands control back, the same lines go on from there, and a finished run says so."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path

import pytest
from runs import environment, records_of, run_patiently

import paceline
from paceline.errors import ConfigError
from paceline.session import begin
from paceline.session.run import is_script
from paceline.session.verbs.spec_given import spec_of

TYPED = """
import os, signal
import paceline
task = paceline.Task(name="typed", model="llama-1m", data=paceline.DataSpec("stdlib", seq_len=16, max_bytes=100_000), \
global_batch="4 samples", stop="6 steps")
def make():
    return paceline.Run(task, cluster={"device": "cpu", "probe": False}, run={"dir": RUN_DIR})

run = make()
for batch in run:
    if batch.step == 3: os.kill(os.getpid(), signal.SIGINT)
    stats = run.step(batch)

print("still here after step", stats.step)
run = make()
for batch in run:
    stats = run.step(batch)

print("went on to step", stats.step)
run = make()
print("loops:", len([batch for batch in run]))
"""


PYTHON = ["-i", "-c", "pass"]
IPYTHON = ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=nocolor"]
without = pytest.mark.skipif(
    importlib.util.find_spec("IPython") is None, reason="not installed: IPython (extra 'test')"
)


@pytest.mark.parametrize("prompt", [PYTHON, pytest.param(IPYTHON, marks=without)], ids=["python", "ipython"])
def test_a_prompt_outlives_ctrl_c_and_goes_on(tmp_path: Path, prompt: list[str]) -> None:
    command, typed = [sys.executable, *prompt], TYPED.replace("RUN_DIR", repr(str(tmp_path / "run")))
    ended = run_patiently(command, input=typed, env=environment(IPYTHONDIR=str(tmp_path / "ipython")))
    told = ended.stdout + ended.stderr
    assert "still here after step 2" in ended.stdout, told
    assert "HandedBack" in told and "make the run again" in told, told
    assert "went on to step 6" in ended.stdout and "loops: 0" in ended.stdout, told
    assert "has all its 6 steps" in ended.stdout, told
    assert [record["step"] for record in records_of(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6]
    ends = [record["status"] for record in records_of(tmp_path / "run", "run_ended")]
    assert ends == ["requeue", "complete", "complete"]


def test_a_run_over_several_devices_is_refused_before_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of a plan that no prompt can start took a minute before the error came."""
    monkeypatch.setattr(begin, "_brief", lambda *given: pytest.fail("it was proven first"))
    data = paceline.DataSpec("stdlib", seq_len=16, max_bytes=100_000)
    task = paceline.Task(model="llama-1m", data=data, global_batch="4 samples", stop="2 steps")
    spec = spec_of(task, {"dp_replicate": 2}, {"device": "cpu", "devices": 2, "probe": False}, ())
    with pytest.raises(ConfigError, match="cannot start from a notebook"):
        begin.planned_brief(spec, say=lambda line: None, is_script=False)


def test_a_thread_is_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop in a worker of Ray's has a thread: what was started again for each device was Ray's own program."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    found = list[bool]()
    thread = threading.Thread(target=lambda: found.append(is_script()))
    thread.start()
    thread.join()
    assert is_script() and found == [False]

"""One run directory, one run: who holds it, who is refused, and what an older run may no longer write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import environment, is_running, run_patiently

from paceline import lock as lock_module
from paceline import lock_file
from paceline.checkpoint import list_checkpoints, save_checkpoint
from paceline.errors import RunInUse, StorageError
from paceline.lock import LOCK_VARIABLE, RunLock, is_live, live_since, take
from paceline.lock_file import NAME
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.reading import read_journal

HOLD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline.lock import take
lock = take(Path(sys.argv[1]))
"""


def holder(run_dir: Path, then: str = "time.sleep(600)") -> subprocess.Popen[str]:
    """Return a process that holds the directory and then does something."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}\nprint('held', flush=True)\n{then}", str(run_dir)],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file system one that has no locks."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)


def record(process: int, began: str = "", host: str = "") -> str:
    return json.dumps({"token": "theirs", "host": host or platform.node(), "started": "2026-03-01T00:00:00+00:00",
                       "processes": [[process, began]]})  # fmt: skip


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path, end: signal.Signals) -> None:
    first = holder(tmp_path / "run")
    try:
        with pytest.raises(RunInUse) as refusal:
            take(tmp_path / "run")
        told = str(refusal.value)
        assert f"process {first.pid} on {platform.node()} has held it since 20" in told
        assert "is in use by another run" in told and f"kill -TERM {first.pid}" in told and "run.dir" in told
        assert refusal.value.exit_code == 74
        take(tmp_path / "other").release()
    finally:
        first.send_signal(end)
        first.wait()
    with take(tmp_path / "run") as lock:
        lock.check()


def test_a_run_that_has_not_ended_and_the_one_after_it_do_not_refuse_a_third(tmp_path: Path) -> None:
    first = take(tmp_path)
    take(tmp_path).release()
    with take(tmp_path) as third:
        third.check()
        assert first.is_lost
    first.release()


def test_a_forked_worker_does_not_hold_the_directory(tmp_path: Path) -> None:
    """A data loader's worker may outlive its rank for a moment; a new start does not wait for it."""
    # One of the two processes prints, since lines of two may mix, and not before the other is a process of its own.
    told = "told, tell = os.pipe()\nchild = os.fork()\n"
    first = holder(tmp_path, f"{told}if child: os.read(told, 1); print(child, flush=True)\n"
                             "else: os.write(tell, b'x')\nsignal.pause()")  # fmt: skip
    assert first.stdout is not None
    child = int(first.stdout.readline())
    first.kill()
    first.wait()
    try:
        assert is_running(child)
        take(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_that_inherits_the_lock_keeps_it_and_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 holds the directory with its supervisor, and without it where the supervisor is killed: it saves then."""
    inherits = f"{HOLD}print('held', flush=True)\nsignal.pause()"
    then = (
        f"child = subprocess.Popen([sys.executable, '-c', {inherits!r}, sys.argv[1]], pass_fds=[lock.descriptor],"
        " env={**os.environ, **lock.for_first_rank()})\nprint(child.pid, flush=True)\nchild.wait()"
    )
    first = holder(tmp_path, then)
    assert first.stdout is not None
    words = {first.stdout.readline().strip(), first.stdout.readline().strip()}
    child = int((words - {"held"}).pop())
    first.kill()
    first.wait()
    said: list[str] = []

    def tell(line: str) -> None:
        said.append(line)
        os.kill(child, signal.SIGKILL)  # it has saved

    try:
        with monkeypatch.context() as patched, pytest.raises(RunInUse):
            patched.setattr(lock_module, "ORPHANS_SECONDS", 0.0)
            take(tmp_path)
        monkeypatch.setattr(lock_module, "say_line", tell)
        take(tmp_path).release()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert len(said) == 1 and f"process {first.pid} on" in said[0] and "its ranks save and end" in said[0]
    assert not is_running(child)


@pytest.mark.parametrize("given", ["", "nonsense", "999:abc", "0:abc", "x:abc"])
def test_a_handed_lock_that_is_none_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    first = holder(tmp_path)
    monkeypatch.setenv(LOCK_VARIABLE, given)
    try:
        with pytest.raises(RunInUse):
            take(tmp_path)
        assert LOCK_VARIABLE not in os.environ, "what this process starts has no lock of a supervisor"
    finally:
        first.kill()
        first.wait()


def older_and_newer(run_dir: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> tuple[RunLock, RunLock]:
    """Return the lock of a run and that of one which has taken the directory over, in one of the possible ways."""
    if how == "without locks":
        without_locks(monkeypatch)
    older = take(run_dir)
    if how == "folder made anew":
        shutil.rmtree(run_dir)
    elif how == "file deleted":
        (run_dir / NAME).unlink()
    elif how == "without locks":  # the newer one, in another process, has read the file before the older one wrote
        lock_module._HELD.clear()
        (run_dir / NAME).write_text("")
    return older, take(run_dir)


@pytest.mark.parametrize("how", ["same process", "file deleted", "folder made anew", "without locks"])
def test_the_older_runs_writes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    run_dir = tmp_path / "run"
    older, newer = older_and_newer(run_dir, how, monkeypatch)
    with pytest.raises(RunInUse, match="has taken over"):
        Journal(run_dir, older.check).write(DecisionRecord("mine", None, None, "", None))
    root = run_dir / "checkpoints"
    save_checkpoint(root, 3, {"a": torch.ones(2)}, {}, keep_last=1, fence=newer.check)
    with pytest.raises(StorageError) as refusal:
        save_checkpoint(root, 4, {"a": torch.zeros(2)}, {}, keep_last=1, fence=older.check)
    assert "has taken over" in str(refusal.value)
    assert [found.manifest.step for found in list_checkpoints(root).complete] == [3], "neither added nor pruned"
    journal = Journal(run_dir, newer.check)
    journal.write(DecisionRecord("theirs", None, None, "", None))
    assert [each["what"] for each in read_journal(run_dir)] == ["theirs"]
    older.release()
    newer.check()
    assert older.is_lost and not newer.is_lost
    if how != "without locks":
        refused = run_patiently([sys.executable, "-c", HOLD, run_dir], env=environment())
        assert "is in use by another run" in refused.stderr, "the older one's end frees nothing"
    newer.release()


WRITES = """
from paceline.checkpoint import save_checkpoint
from paceline.errors import PacelineError, RunInUse
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import DecisionRecord
import torch

def looks():  # where whoever looks has nothing left to do but to write
    print("looks", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    lock.check()

run_dir, refused = Path(sys.argv[1]), []
for write in (lambda: Journal(run_dir, looks).write(DecisionRecord("mine", None, None, "", None)),
              lambda: save_checkpoint(run_dir / "checkpoints", 4, {"a": torch.zeros(2)}, {}, keep_last=1, fence=looks)):
    try:
        write()
    except PacelineError as error:
        refused.append(str(error))
print(refused, flush=True)
"""


def test_who_was_stopped_and_goes_on_when_it_is_replaced_writes_nothing(tmp_path: Path) -> None:
    """A rank of another node stands still before a record, and before a checkpoint is published; a world follows."""
    lock = take(tmp_path / "run")
    environ = {**environment(), **lock.for_far_ranks()}
    words = [sys.executable, "-c", f"{HOLD}{WRITES}", str(lock.run_dir)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ)
    assert process.stdout is not None
    is_replaced = False
    while (line := process.stdout.readline()) == "looks\n":
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        if not is_replaced:
            lock.next_generation()
            is_replaced = True
        process.send_signal(signal.SIGCONT)
    assert process.wait() == 0 and line.count("generation 1 of the run") == 2, line
    assert list(read_journal(lock.run_dir)) == []
    assert list_checkpoints(lock.run_dir / "checkpoints").complete == ()
    lock.release()


def test_of_many_that_begin_at_once_one_has_the_directory(tmp_path: Path) -> None:
    """As many as a scheduler starts by mistake: none of the others writes a word of the run's."""
    tells = f"""
sys.stdin.readline()
try:
    {HOLD.strip().splitlines()[-1]}
except Exception as error:
    print(type(error).__name__, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
"""
    begins = "\n".join(HOLD.strip().splitlines()[:-1])
    many = [
        subprocess.Popen([sys.executable, "-c", f"{begins}{tells}", str(tmp_path / "run")], text=True,
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) for _ in range(6)
    ]  # fmt: skip
    for process in many:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.stdout.readline().strip() for process in many if process.stdout is not None]
    assert sorted(told) == ["RunInUse"] * 5 + ["held"]
    for process in many:
        process.communicate("\n")


def test_a_run_that_kept_nothing_leaves_no_directory(tmp_path: Path) -> None:
    with take(tmp_path / "runs" / "empty"):
        pass
    assert not (tmp_path / "runs" / "empty").exists()
    with take(tmp_path / "runs" / "kept"):
        (tmp_path / "runs" / "kept" / "journal").mkdir()
    assert sorted(path.name for path in (tmp_path / "runs" / "kept").iterdir()) == ["journal", NAME]


def test_a_file_is_read_again_only_where_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record looks at the file."""
    reads: list[Path] = []
    read = lock_module.read_holder
    monkeypatch.setattr(lock_module, "read_holder", lambda path: reads.append(path) or read(path))
    with take(tmp_path) as lock:
        reads.clear()
        lock.check()
        lock.check()
        assert len(reads) == 2, "it was written a moment ago: another write could leave the same times"
        monkeypatch.setattr(lock_file, "SETTLED_NANOSECONDS", 0)
        for _ in range(3):
            lock.check()
        assert len(reads) == 3
        told, before = (tmp_path / NAME).read_text(), (tmp_path / NAME).stat().st_mtime_ns
        while (tmp_path / NAME).stat().st_mtime_ns == before:
            (tmp_path / NAME).write_text(told.replace(lock.token, "0" * len(lock.token)))
        for _ in range(2):
            with pytest.raises(RunInUse, match="another start has taken over"):
                lock.check()
        (tmp_path / NAME).write_text(told)
        lock.check()
        lock.generation = 0
        with pytest.raises(RunInUse, match="generation 0 of the run"):
            lock.check()


def test_a_deleted_lock_file_alone_stops_nothing(tmp_path: Path) -> None:
    lock = take(tmp_path)
    (tmp_path / NAME).unlink()
    lock.check()
    assert not lock.is_lost


@pytest.mark.parametrize(
    ("who", "refused"),
    [("ourselves", True), ("nobody", False), ("elsewhere", True), ("number given again", False), ("released", False)],
)
def test_without_locks_the_processes_of_the_file_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, refused: bool
) -> None:
    without_locks(monkeypatch)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own = lock_file.began_at(os.getpid())
    texts: dict[str, Any] = {
        "ourselves": record(os.getpid(), own), "nobody": record(gone.pid, "12"),
        "elsewhere": record(1, "1", "far-away"),
        "number given again": record(os.getpid(), "12"), "released": "",
    }  # fmt: skip
    (tmp_path / NAME).write_text(texts[who])
    if not refused:
        take(tmp_path).release()
        assert (tmp_path / NAME).read_text() == ""
        return
    with pytest.raises(RunInUse, match="this file system has no locks"):
        take(tmp_path)


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(StorageError, match="cannot lock the run's directory"):
        take(tmp_path)


def test_a_generation_that_is_not_on_disk_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        raise OSError(30, "Read-only file system")

    with take(tmp_path / "run") as lock:
        monkeypatch.setattr(lock_module.os, "pwrite", full)
        with pytest.raises(StorageError, match="cannot begin generation 2"):
            lock.next_generation()
        assert lock.generation == 1
        monkeypatch.undo()
        assert lock.next_generation() == 2


def test_who_asks_whether_a_run_lives_takes_nothing(tmp_path: Path) -> None:
    assert not is_live(tmp_path)
    lock = take(tmp_path)
    assert is_live(tmp_path)
    other = {"host": "another machine", "machine": "another boot", "processes": [[1, ""]]}
    elsewhere = json.loads((tmp_path / "lock").read_text()) | other
    lock.release()
    assert not is_live(tmp_path)
    (tmp_path / "lock").write_text(json.dumps(elsewhere))
    assert is_live(tmp_path), "nobody here knows of its processes"
    (tmp_path / "lock").write_text(json.dumps({**elsewhere, "host": platform.node(), "processes": [[2**22 + 1, "1"]]}))
    assert not is_live(tmp_path), "it was killed"


@pytest.mark.parametrize("content", ["[]", "5", '{"token": "x"}', "without", "numbers", "empty"])
def test_a_lock_file_with_something_else_in_it_names_nobody(tmp_path: Path, content: str) -> None:
    """What another program or a damaged disk has left there neither holds the directory nor ends who asks."""
    processes = {"without": 5, "numbers": [1, 2], "empty": []}
    told = {**json.loads(record(1)), "processes": processes[content]} if content in processes else None
    (tmp_path / NAME).write_text(json.dumps(told) if told else content)
    assert not is_live(tmp_path) and live_since(tmp_path) is None
    with take(tmp_path) as lock:
        assert is_live(tmp_path) and lock.next_generation() == 2


def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this machine another name than the one that the processes which hold a directory have known."""
    monkeypatch.setattr(platform, "node", lambda: "renamed-meanwhile")


def test_a_machine_that_got_another_name_still_sees_whether_a_run_of_its_own_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes counted as another machine's: alive for ever, where a file system has no locks."""
    first = holder(tmp_path)
    renamed(monkeypatch)
    try:
        assert is_live(tmp_path) and live_since(tmp_path) is not None
        with pytest.raises(RunInUse, match="is in use by another run"):
            take(tmp_path)
    finally:
        first.kill()
        first.wait()
    assert not is_live(tmp_path)
    without_locks(monkeypatch)
    with take(tmp_path) as lock:
        lock.check()


def test_ranks_are_waited_for_that_save_and_end_though_their_machine_got_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their supervisor was killed: the next start was refused at once."""
    then = "child = subprocess.Popen(['sleep', '600'], pass_fds=(lock.descriptor,)); print(child.pid, flush=True)"
    first = holder(tmp_path, f"{then}; time.sleep(600)")
    assert first.stdout is not None
    rank = int(first.stdout.readline())
    first.kill()
    first.wait()
    renamed(monkeypatch)
    monkeypatch.setattr(lock_module.time, "sleep", lambda seconds: os.kill(rank, signal.SIGKILL))  # it has saved
    with take(tmp_path) as lock:
        lock.check()

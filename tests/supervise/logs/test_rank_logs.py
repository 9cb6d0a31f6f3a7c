"""What ranks print is kept, line by line, whatever ends them, and is printed as if nobody kept it."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from paceline.spec.journal.redact import Redactor
from paceline.spec.run import RunSpec
from paceline.spec.watch.observe import ObserveSpec
from paceline.supervise.groups import Process
from paceline.supervise.logs.files import ERR, OUT, RankLog, log_path
from paceline.supervise.logs.pump import LogPump, pump_of
from paceline.supervise.logs.rank import LOGS_VARIABLE, into_log, pipe_path
from paceline.supervise.logs.tee import kept_here
from paceline.supervise.starting import Starter
from paceline.supervise.supervisor import starter

KEPT = RunSpec(observe=ObserveSpec(log_limit=4096))


def texts(run_dir: Path, rank: int = 0, older: int = 0) -> list[str]:
    lines = log_path(run_dir, rank, older).read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (out|err) ", line) for line in lines)
    return [line.partition(" ")[2] for line in lines]


def kept(run_dir: Path, limit: int = 4096, files: int = 2) -> RankLog:
    return RankLog(run_dir, 0, limit, files, Redactor())


# ---- one file --------------------------------------------------------------------------------------------------------


def test_lines_are_kept_when_they_are_whole_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    log = kept(tmp_path)
    log.write(OUT, b"one\ntw")
    log.write(ERR, "é\n".encode()[:1])
    log.write(ERR, "é\n".encode()[1:])
    log.write(OUT, b"o\nthree")
    assert texts(tmp_path) == ["out one", "err é", "out two"]
    log.close()
    assert texts(tmp_path)[-1] == "out three"
    assert log_path(tmp_path, 0).stat().st_mode & 0o777 == 0o600


def test_of_what_is_printed_over_the_last_is_kept(tmp_path: Path) -> None:
    log = kept(tmp_path)
    for part in (b"\r10%", b"\r20%", b"\r30%\r40%", b"\r100%\ndone\r\n"):
        log.write(ERR, part)
    log.close()
    assert texts(tmp_path) == ["err 100%", "err done"]


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    log = RankLog(tmp_path, 0, 4096, 2, Redactor(("tulip-[0-9]+",)))
    log.write(OUT, b"the word is tulip-77\nexport API_TOKEN=abcdef123456\n")
    log.close()
    assert texts(tmp_path)[0] == "out the word is [redacted]" and "abcdef" not in log_path(tmp_path, 0).read_text()


def test_full_files_are_set_aside_and_the_oldest_go(tmp_path: Path) -> None:
    log = kept(tmp_path, limit=4096, files=2)
    for number in range(400):
        log.write(OUT, f"line {number:06d} {'x' * 20}\n".encode())
    log.close()
    found = [line for older in (2, 1, 0) for line in texts(tmp_path, older=older)]
    numbers = [int(line.split()[2]) for line in found]
    assert numbers == list(range(numbers[0], 400)) and 0 < numbers[0] < 300
    assert all(log_path(tmp_path, 0, older).stat().st_size <= 4096 for older in (0, 1, 2))
    assert not log_path(tmp_path, 0, 3).exists()


def test_one_file_alone_begins_again(tmp_path: Path) -> None:
    log = kept(tmp_path, files=0)
    for number in range(200):
        log.write(OUT, f"line {number:06d} {'x' * 20}\n".encode())
    log.close()
    assert texts(tmp_path)[-1].split()[2] == "000199" and not log_path(tmp_path, 0, 1).exists()


def test_a_line_without_an_end_is_cut_and_a_torn_one_has_its_own(tmp_path: Path) -> None:
    log = kept(tmp_path, limit=1 << 20)
    log.write(OUT, b"y" * 200_000)
    log.close()
    assert sum(len(line) - 4 for line in texts(tmp_path)) == 200_000
    with log_path(tmp_path, 0).open("ab") as file:
        file.write(b"2026-01-01T00:00:00.000Z out torn")
    again = kept(tmp_path, limit=1 << 20)
    again.write(OUT, b"after\n")
    again.close()
    assert texts(tmp_path)[-2:] == ["out torn", "out after"]


def test_a_disk_that_takes_nothing_costs_lines_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    log = kept(tmp_path)
    log.write(OUT, b"one\ntwo\n")
    log.close()
    assert log.left_out == 2


# ---- processes -------------------------------------------------------------------------------------------------------


def ranks(run_dir: Path, run: RunSpec, script: str, count: int = 1, world: int = 0) -> list[Process]:
    """Run `python -c SCRIPT` as so many ranks, and return how they ended."""
    pump = pump_of(run_dir, run)
    start = Starter(starter([sys.executable, "-c", script], os.environ), None, print, logs=pump)
    places = [{"RANK": str(rank), "WORLD_SIZE": str(world or count)} for rank in range(count)]
    processes = [start(place) for place in places]
    for process in processes:
        process.wait()
    start.close()
    return processes


def test_output_of_a_rank_is_printed_and_kept_with_that_of_its_children(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "import os, sys; os.system('echo child'); print('own'); print('wrong', file=sys.stderr); 1 / 0"
    ranks(tmp_path, KEPT, script)
    printed = capfd.readouterr()
    assert printed.out == "child\nown\n" and printed.err.startswith("wrong\n")
    assert "ZeroDivisionError: division by zero" in printed.err
    found = texts(tmp_path)
    assert {"out child", "out own", "err wrong", "err ZeroDivisionError: division by zero"} <= set(found)


def test_what_a_rank_wrote_before_it_was_killed_is_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "import os; os.write(1, b'one\\n' * 2000 + b'last'); os.kill(os.getpid(), 9)"
    (process,) = ranks(tmp_path, dataclasses.replace(KEPT, observe=ObserveSpec()), script)
    assert process.returncode == -signal.SIGKILL
    assert texts(tmp_path) == ["out one"] * 2000 + ["out last"]
    assert capfd.readouterr().out == "one\n" * 2000 + "last"


def test_of_many_ranks_the_first_is_printed_and_all_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path, KEPT, "import os; print('rank', os.environ['RANK'])", count=2, world=1000)
    assert capfd.readouterr().out == "rank 0\n"
    assert texts(tmp_path, 1) == ["out rank 1"]


def test_a_reader_who_has_left_is_told_to_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a log: who prints to somebody who has gone is told so."""
    real = os.write

    def gone(number: int, data: bytes) -> int:
        if number == 1:
            raise BrokenPipeError(32, "Broken pipe")
        return real(number, data)

    monkeypatch.setattr(os, "write", gone)
    (process,) = ranks(tmp_path, KEPT, "while True: print('more', flush=True)")
    assert process.returncode == 1 or process.returncode == 120


def test_logs_that_are_off_change_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ranks(tmp_path, RunSpec(observe=ObserveSpec(logs=False)), "print('said')")
    assert capfd.readouterr().out == "said\n" and not (tmp_path / "logs").exists()


def test_a_process_that_takes_another_ranks_place_writes_there(tmp_path: Path) -> None:
    pump = LogPump(tmp_path, KEPT)
    told = [pump.place({"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    script = (
        "import os; from paceline.supervise.logs.rank import into_log; into_log(); print('as 0');"
        " os.environ['RANK'] = '1'; into_log(); print('as 1');"
        " os.environ['RANK'] = '7'; into_log(); print('still as 1')"
    )
    process = starter([sys.executable, "-c", script], os.environ)({**told[0], "RANK": "0"})
    assert process.wait() == 0
    pump.close()
    assert texts(tmp_path) == ["out as 0"] and texts(tmp_path, 1) == ["out as 1", "out still as 1"]


def test_a_rank_for_which_no_pipe_can_be_had_prints_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full folder of temporary files, or no descriptor, ended the run when a rank was replaced."""
    real = os.mkfifo
    calls = [0]

    def full(path: Path, mode: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, mode)

    monkeypatch.setattr(os, "mkfifo", full)
    ranks(tmp_path, KEPT, "print('said')")
    assert capfd.readouterr().out == "said\n" and not (tmp_path / "logs").exists()
    pump = LogPump(tmp_path, KEPT)
    assert pump.place({"RANK": "0"}) and pump.place({"RANK": "0"}), "and again, once there is room"
    pump.close()


def test_a_process_that_nobody_listens_to_keeps_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for stream in (OUT, ERR):
        os.mkfifo(pipe_path(tmp_path, 0, stream))
    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path))
    into_log()
    os.write(1, b"here\n")
    assert capfd.readouterr().out == "here\n"


# ---- without a supervisor --------------------------------------------------------------------------------------------


def test_a_process_of_its_own_keeps_what_python_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with kept_here(tmp_path, KEPT, rank=2):
        print("said", 1)
        sys.stdout.writelines(["a", "b\n"])
        print("wrong", file=sys.stderr)
        assert sys.stdout.isatty() is False
    assert sys.stdout is before
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("said 1\nab\n", "wrong\n")
    assert texts(tmp_path, 2) == ["out said 1", "out ab", "err wrong"]

"""What a process prints is printed by a thread: a reader that does not read holds up nobody."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from paceline.supervise.logs.aside import AsideStream, Printer, printed_aside
from paceline.supervise.nodes.meeting import STEPPED_DOWN

SAYS = (
    "import os, sys, threading; from paceline.said import say_line;"
    " from paceline.supervise.logs.aside import printed_aside;"
)


def run(script: str, **options: object) -> subprocess.Popen[bytes]:
    """Start a script whose standard output nobody reads so far."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", SAYS + script], stdout=pipe, stderr=pipe, **options)  # type: ignore[call-overload]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The two ends of a pipe that is taken for standard output by what writes to it."""
    read, written = os.pipe()
    real = os.write
    monkeypatch.setattr(os, "write", lambda number, data: real(written if number == 1 else number, data))
    return read, written


def test_all_is_printed_in_order_to_who_reads(ends: tuple[int, int]) -> None:
    printer = Printer()
    for number in range(2000):
        printer.put(1, b"%d\n" % number, is_own=bool(number % 3))
    printer.flush(1)
    printer.close()
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as read:
        assert read.read().split() == [b"%d" % number for number in range(2000)]


def test_a_lock_that_a_signal_handler_has_left_taken_holds_up_no_end(ends: tuple[int, int]) -> None:
    """One that raises just as a thread has the lock, and has not begun what gives it up: nobody can tell it was had."""

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError("the thread of the printer waits for a lock that nobody gives up")

    printer = Printer()
    printer.put(1, b"one\n", is_own=True)
    printer.flush(1)
    printer.changed.acquire()  # nothing waits to be printed: the end waits for the thread alone
    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 20.0)
    try:
        printer.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as read:
        assert read.read() == b"one\n"


def test_who_prints_is_not_held_up_by_who_does_not_read_and_hears_what_was_left_out(tmp_path: Path) -> None:
    """More than twice what a pipe and the printer hold, of ranks; what the process says itself is all there."""
    script = (
        "\nwith printed_aside() as printer:"
        "\n    for number in range(60_000):"
        "\n        printer.put(1, b'rank line %06d %s\\n' % (number, b'x' * 40))"
        "\n        if number % 10_000 == 0: say_line(f'own {number}')"
        "\n    print('printed', file=sys.stderr, flush=True)"
        "\n    sys.stdin.read()"
    )
    process = run(script, stdin=subprocess.PIPE)
    assert process.stderr is not None and process.stdin is not None and process.stdout is not None
    assert process.stderr.readline() == b"printed\n", "with 3.5 MB that nobody has read"
    process.stdin.close()
    lines = process.stdout.read().decode().splitlines()
    assert process.wait() == 0
    notes = [line for line in lines if line.startswith("note")]
    ranks = [line for line in lines if line.startswith("rank")]
    assert [line for line in lines if line.startswith("own")] == [f"own {10_000 * at}" for at in range(6)]
    assert ranks[-1].split()[2] == "059999" and all(len(line) == 57 for line in ranks)
    left_out = sum(int(re.findall(r"\d+", line)[0]) for line in notes)
    assert left_out + len(ranks) == 60_000 and left_out > 30_000
    assert len(b"\n".join(line.encode() for line in ranks)) < (1 << 20) + (2 << 16)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_terminal_that_is_stopped_or_that_nobody_reads_holds_up_nobody(is_stopped: bool) -> None:
    master, terminal = pty.openpty()
    if is_stopped:
        termios.tcflow(terminal, termios.TCOOFF)  # as Ctrl-S does
    script = (
        "\nwith printed_aside(seconds=0.5):"
        "\n    for number in range(20_000): say_line(f'line {number:06d} of a terminal')"
        "\n    print('printed', file=sys.stderr, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", SAYS + script], stdout=terminal, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.read() == b"printed\n" and process.wait() == 0
    termios.tcflush(terminal, termios.TCIOFLUSH)
    os.close(master)
    os.close(terminal)


def test_the_end_waits_for_a_slow_reader_and_not_for_one_that_reads_nothing() -> None:
    script = (
        "\nwith printed_aside(seconds=0.5):\n    for n in range(5000): say_line('x' * 60)\nsys.stderr.write('over')"
    )
    process = run(script)
    assert process.stderr is not None
    assert process.stderr.read() == b"over" and process.wait() == 0
    assert process.stdout is not None
    assert len(process.stdout.read()) <= 1 << 16


def test_a_reader_who_has_left_is_an_error_of_whoever_prints_next() -> None:
    process = run("\nwith printed_aside():\n    while True: print('more', flush=True)")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "BrokenPipeError" in process.stderr.read().decode() and process.wait() != 0


def test_a_full_disk_costs_lines_alone() -> None:
    script = "\nwith printed_aside():\n    for n in range(3): say_line('lost')\nsys.stderr.write('over')"
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run([sys.executable, "-c", SAYS + script], stdout=full, stderr=subprocess.PIPE)
    assert process.returncode == 0 and process.stderr == b"over"


def test_a_forked_process_prints_by_itself_what_both_streams_have_keeps_its_order() -> None:
    script = (
        "\nwith printed_aside():"
        "\n    print('before', flush=True)"
        "\n    print('wrong', file=sys.stderr)"
        "\n    if os.fork() == 0:"
        "\n        print('child', flush=True)"
        "\n        os._exit(0)"
        "\n    os.wait()"
        "\n    with printed_aside(): print('nested', flush=True)"
        "\n    print('half', end='')"
        "\n    assert sys.stdout.fileno() == 1 and not sys.stdout.isatty()"
        "\nprint('after')"
    )
    quiet = ["-W", "ignore::DeprecationWarning"]  # of forks beside threads, since Python 3.12
    words = [sys.executable, *quiet, "-c", SAYS + script]
    found = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert found.stdout.split() == [b"before", b"wrong", b"child", b"nested", b"halfafter"]
    assert found.returncode == 0


def test_who_keeps_the_stream_prints_by_itself_once_the_printer_is_closed(tmp_path: Path) -> None:
    """What a handler of `logging` said that was made in a run, as torch's are where a run imports it, was lost."""
    script = (
        "\nimport logging"
        "\nbefore = len(os.listdir('/proc/self/fd'))"
        "\nwith printed_aside() as printer: handler, kept = logging.StreamHandler(), sys.stdout"
        "\nhandler.emit(logging.makeLogRecord({'msg': 'later'}))"
        "\nprinter.put(2, b'of a rank')"
        "\nprint('own', file=kept)"
        "\nassert len(os.listdir('/proc/self/fd')) == before"
    )
    found = subprocess.run([sys.executable, "-c", SAYS + script], capture_output=True)
    assert (found.stdout, found.stderr, found.returncode) == (b"own\n", b"later\nof a rank", 0)


def test_a_printer_that_gives_up_leaves_neither_thread_nor_descriptor() -> None:
    script = (
        "\nbefore = len(os.listdir('/proc/self/fd')), threading.active_count()"
        "\nwith printed_aside(seconds=0.5):"
        "\n    for n in range(5000): say_line('x' * 60)"
        "\nassert (len(os.listdir('/proc/self/fd')), threading.active_count()) == before"
        "\nos._exit(0)"
    )
    process = run(script)
    assert process.wait(60) == 0, process.stderr and process.stderr.read()


def test_a_coordinator_that_steps_down_has_said_so(tmp_path: Path) -> None:
    """It ends at once, and the thread with it: of a slow disk its last line was lost."""
    script = (
        "\nimport time; from types import SimpleNamespace; from paceline.session.nodes.coordinate import _step_down"
        "\nwrite = os.write"
        "\nos.write = lambda number, data: (number == 1 and time.sleep(0.2), write(number, data))[1]"
        "\nwith printed_aside(): _step_down(SimpleNamespace(release=int), say_line)"
    )
    with (tmp_path / "out").open("wb") as out:
        assert subprocess.run([sys.executable, "-c", SAYS + script], stdout=out).returncode == STEPPED_DOWN
    assert b"steps down" in (tmp_path / "out").read_bytes()


def test_what_is_led_to_standard_error_is_printed_there_by_the_printer() -> None:
    """As `paceline train --json` has it, whose standard output is the JSON alone."""
    script = (
        "\nsys.stdout = sys.stderr"
        "\nwith printed_aside(): print('told', flush=True); print(type(sys.stdout).__name__)"
        "\nsys.__stdout__.write('json')"
    )
    found = subprocess.run([sys.executable, "-c", SAYS + script], capture_output=True)
    assert found.stdout == b"json" and found.stderr.split() == [b"told", b"AsideStream"]


def test_streams_of_somebody_else_stay(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with printed_aside():
        assert sys.stdout is before and not isinstance(sys.stderr, AsideStream)
        print("kept")
    assert capsys.readouterr().out == "kept\n"

"""Runs on several nodes for tests: each node is a supervisor of its own, on this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from runs import ending, environment
from started.popen import Warm

from paceline.supervise.nodes.held_in_memory import PREFIX

PORTS = range(20_000, 29_000)  # below those that the system gives to connections


def opened_by(process: int) -> list[Path]:
    """Return the files that a process has open, such as the lock of its node's memory; none where it has ended."""
    found = []
    with contextlib.suppress(OSError):
        for path in list(Path(f"/proc/{process}/fd").iterdir()):
            with contextlib.suppress(OSError):  # it was closed just now
                found.append(path.readlink())
    return found


def free_port() -> int:
    """Return a port at which nobody listens here."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port


class Nodes:
    """The supervisors of one run. All that a node starts is known by the folder that it runs in, as nothing else is."""

    def __init__(self, spec: Path, count: int, *options: str, within: Sequence[Sequence[str]] = ()) -> None:
        """`within` are words before the command line of each node, which put it elsewhere."""
        self.spec, self.count, self.options, self.within = spec, count, options, within
        self.mark, self.host = secrets.token_hex(8), "127.0.0.1"
        self.port = free_port()
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, *numbers: int) -> None:
        """Start the supervisors of nodes."""
        for number in numbers or range(self.count):
            words = [
                *(self.within[number] if self.within else ()), sys.executable, "-m", "paceline", "train", self.spec,
                "--nodes", self.count, "--node", number, "--rendezvous", f"{self.host}:{self.port}", *self.options,
            ]  # fmt: skip
            folder = self.folder(number)
            folder.mkdir(exist_ok=True)
            with self._said(number).open("a") as said:  # not a pipe, which would be full some day
                self.processes[number] = Warm(
                    [str(word) for word in words], stdout=said, stderr=said, text=True, env=environment(),
                    process_group=0, cwd=folder,
                )  # fmt: skip

    def ended(self, number: int, timeout: float = 120) -> tuple[int, str]:
        """Return the exit code of a node's supervisor and what it has printed, when it has ended."""
        process = self.processes[number]
        ending(process, timeout)
        return process.returncode, self._said(number).read_text()

    def folder(self, number: int) -> Path:
        """Return the folder that a node runs in, and all that it starts."""
        return self.spec.with_name(f"{self.spec.stem}-{self.mark}-{number}").resolve()

    def _said(self, number: int) -> Path:
        folder = self.folder(number)
        return folder.with_name(f"{folder.name}.txt")  # its name may hold a dot, as that of the spec

    def running(self, number: int | None = None) -> dict[int, str]:
        """Return the processes of a node, or of all, that run: their names by number."""
        folders = {self.folder(each) for each in ([number] if number is not None else range(self.count))}
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_one = (process / "cwd").readlink() in folders
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if is_one and state not in "ZX":
                    found[int(process.name)] = (process / "comm").read_text().strip()
            except OSError:  # it has ended meanwhile
                continue
        return found

    def coordinator(self) -> int:
        """Return the number of the coordinator's process."""
        (found,) = [number for number, name in self.running().items() if name == "paceline-coord"]
        return found

    def lose(self, number: int) -> None:
        """End all that runs on a node at once, and empty its memory, as when its power fails."""
        folders = {file.parent for process in self.running(number) for file in opened_by(process)}
        for process in self.running(number):
            os.kill(process, signal.SIGKILL)
        for folder in folders:  # this run's, and not that of another test on this machine
            if folder.name.startswith(PREFIX):
                shutil.rmtree(folder)

    def close(self) -> None:
        """End what is left."""
        for process in self.running():
            os.kill(process, signal.SIGKILL)
        for each in self.processes.values():
            if each.poll() is None:
                each.kill()
            each.communicate()

"""The nursery: `python -m started.nursery PATH`, a process that has imported torch and forks commands when asked.

It listens at PATH. A request is a line of JSON (words, environment, folder, group, kept) that comes with three
descriptors, and one more for each number of those that the process keeps; the answer is the process's number, and when
it has ended its status. The process is collected once the other side has closed the connection, so that its number
stays its own as long as somebody may send it a signal.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys

import warm  # noqa: F401
from strict_json import be_strict

from paceline.cluster.catalog.file import load_catalog
from paceline.spec.load import parse_spec
from started.become import PRISTINE, ROOMS, Aside, fork
from started.command import read
from started.popen import COLD, MOST_KEPT, Nested
from started.pristine import Pristine
from started.whole import TORCH_FREE, import_rooms

MOST_BYTES = 1 << 16


def main() -> None:
    """Fork what is asked for until the process that has started this one is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever wanted the first command may have held signals back
    for number in (signal.SIGCHLD, signal.SIGINT):  # Ctrl-C is the test runner's
        signal.signal(number, lambda number, frame: None)
    subprocess.Popen = Nested  # type: ignore[misc]
    for module in list(sys.modules.values()):  # torchrun's has it under a name of its own
        names = getattr(module, "__dict__", {})
        if names.get("Popen") is COLD:
            names["Popen"] = Nested
    be_strict()
    import_rooms(*TORCH_FREE)
    load_catalog(), parse_spec("")  # of which every command reads the tables of the package, as they are
    assert not {"huggingface_hub", "transformers"} & set(sys.modules), "they have read the environment (command.py)"
    ROOMS.append(Aside("torch"))
    PRISTINE.append(Pristine("paceline"))
    gc.collect()
    gc.freeze()  # or every process's collections would go through, and so copy, all that this one holds
    print("ready", flush=True)
    os.dup2(2, 1)
    running: dict[socket.socket, int] = {}
    left: set[int] = set()  # nobody waits for them any more
    while True:
        ready = select.select([listener, wake, sys.stdin, *running], [], [])[0]
        if sys.stdin in ready:
            return
        for peer in [peer for peer in ready if peer in running]:
            left.add(running.pop(peer))
            peer.close()
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _tell_ends(running)
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        if listener in ready:
            peer = listener.accept()[0]
            running[peer] = _fork(peer)


def _tell_ends(running: dict[socket.socket, int]) -> None:
    """Tell of processes that have ended. Their numbers stay theirs until the other side has closed the connection."""
    for peer, pid in running.items():
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None:
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            with contextlib.suppress(OSError):  # told already
                peer.sendall(f"{code}\n".encode())
                peer.shutdown(socket.SHUT_WR)


def _fork(peer: socket.socket) -> int:
    text, descriptors = b"", list[int]()
    while not text.endswith(b"\n"):
        part, found, _, _ = socket.recv_fds(peer, MOST_BYTES, 3 + MOST_KEPT)
        text, descriptors = text + part, descriptors + list(found)
    asked = json.loads(text)
    command = read(asked["words"])
    assert command is not None
    streams, given = descriptors[:3], descriptors[3:]
    pid = fork(command, asked["environ"], asked["folder"], streams, asked["group"], asked["kept"], given=given)
    for each in descriptors:
        os.close(each)
    peer.sendall(f"{pid}\n".encode())
    return pid


if __name__ == "__main__":
    from started.nursery import main as hatch

    hatch()

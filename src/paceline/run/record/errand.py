"""Work on a disk that may never answer: done in a thread, and waited for no longer than some seconds.

A file server that is gone keeps a process waiting in a write for as long as it likes. Only what is on another machine
does that, so only there is a thread worth its time: about 50 µs for each piece of work.
"""

from __future__ import annotations

import errno
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.units import format_seconds

MOUNTS = Path("/proc/self/mountinfo")
REMOTE = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "9p", "afs", "orangefs",
    "pvfs2", "wekafs", "virtiofs", "ocfs2", "gfs2",
})  # fmt: skip
_OCTAL = re.compile(r"\\([0-7]{3})")
DiskWork = Callable[[], OSError | None]


def is_remote(path: Path) -> bool:
    """Return whether a path is on another machine's disk, as far as the system's list of mounts tells."""
    try:
        lines = MOUNTS.read_text().splitlines()
        place = path.resolve()
    except OSError:
        return False
    best, kind = -1, ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) > 4 and rest:
            mounted = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), words[4]))  # a space is \040 there
            if place.is_relative_to(mounted) and len(mounted.parts) >= best:
                best, kind = len(mounted.parts), rest.split()[0]
    return kind in REMOTE or kind.startswith("fuse.")


class Errand:
    """A thread that does one piece of work at a time; whoever sends it waits for `patience_seconds`, and goes on."""

    def __init__(self, patience_seconds: float) -> None:
        self._patience = patience_seconds
        self._work: queue.SimpleQueue[DiskWork] = queue.SimpleQueue()
        self._done = threading.Event()
        self._is_under_way = False
        self._returned: OSError | None = None
        self._raised: BaseException | None = None
        threading.Thread(target=self._run, name="paceline-journal", daemon=True).start()

    def send(self, work: DiskWork) -> OSError | None:
        """Return what the work returns; an OSError (ETIMEDOUT) where it, or the work before it, does not end.

        Raises what the work raises.
        """
        if self._is_under_way and not self._done.is_set():
            return self._late()
        self._take()
        self._done.clear()
        self._is_under_way = True
        self._work.put(work)
        if not self._done.wait(self._patience):
            return self._late()
        self._take()
        return self._returned

    def _take(self) -> None:
        self._is_under_way, raised, self._raised = False, self._raised, None
        if raised is not None:
            raise raised

    def _late(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"the file system has not answered for {format_seconds(self._patience)}")

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                self._returned = work()
            except BaseException as error:  # told to whoever sent the work
                self._raised = error
            self._done.set()

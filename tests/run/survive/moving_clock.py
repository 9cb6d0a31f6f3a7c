"""A clock that is set while a run goes on: forward and back, by seconds, hours and days, for all of its processes."""

from __future__ import annotations

import mmap
import random
import struct
import threading
import time

MOVES = (86_400.0, -259_200.0, 3_600.0, -40.0, 40.0, 172_800.0)
WAITS = (0.05, 0.3, 1.0)


class MovingClock:
    """What `time.time` and `time.time_ns` show in this process and in its forks, which share how it is set."""

    def __init__(self) -> None:
        self._apart = mmap.mmap(-1, 8)  # shared with forks
        self._real, self._real_ns = time.time, time.time_ns
        self._moves = threading.Event()
        time.time = lambda: self._real() + self._now()
        time.time_ns = lambda: self._real_ns() + int(self._now() * 1e9)
        threading.Thread(target=self._work, daemon=True).start()

    def is_set(self, moves: bool) -> None:
        """Begin to set the clock, or leave it as it is."""
        self._moves.set() if moves else self._moves.clear()

    def _now(self) -> float:
        return float(struct.unpack("d", self._apart[:8])[0])

    def _work(self) -> None:
        drawn = random.Random(0)
        while True:
            self._moves.wait()
            self._apart[:8] = struct.pack("d", self._now() + drawn.choice(MOVES))
            time.sleep(drawn.choice(WAITS))

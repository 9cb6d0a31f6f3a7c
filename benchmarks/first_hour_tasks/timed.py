"""Runs a script, or a module with `-m`, as Python does, and writes when its optimizer made steps.

    python timed.py OUT.json [-m] NAME [ARGUMENT ...]

It is held to one core: how many threads a variable allows is heeded by some and not by others. The moments are seconds
since the process began; torch is imported when the script does it, and not before.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

OPTIMIZERS = "torch.optim.optimizer"
TICKS = 100.0  # of a second, in /proc/PID/stat


def age() -> float:
    """Return for how many seconds this process has been there."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return float(Path("/proc/uptime").read_text().split()[0]) - float(fields[19]) / TICKS


class Hooked(importlib.abc.MetaPathFinder):
    """Notes the steps of every optimizer from the moment at which torch's are imported."""

    def __init__(self, moments: list[float]) -> None:
        self.moments = moments

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the optimizers' module as others do, and hook their steps behind its execution."""
        if name != OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def hooked(module: Any) -> None:
            execute(module)
            module.register_optimizer_step_post_hook(lambda *_: self.moments.append(time.perf_counter()))

        spec.loader.exec_module = hooked  # type: ignore[method-assign]
        return spec


def main() -> None:
    """Run the script and write what was noted, however it ends."""
    began = time.perf_counter() - age()
    out, *words = sys.argv[1:]
    as_module = words[0] == "-m"
    sys.argv = words[1:] if as_module else words
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    moments: list[float] = []
    sys.meta_path.insert(0, Hooked(moments))
    sys.path[0] = "" if as_module else str(Path(words[0]).parent)
    code: Any = 0
    try:
        if as_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path(out).write_text(json.dumps({"steps": [moment - began for moment in moments], "peak_bytes": peak}))
    sys.exit(code)


if __name__ == "__main__":
    main()

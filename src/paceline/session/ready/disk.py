"""Whether a run's checkpoints have room where they are to be saved, said before anything is computed."""

from __future__ import annotations

import shutil

from paceline.plan.choice import Choice
from paceline.plan.explain.lines import wrap
from paceline.plan.risk.failing_machines import saving_for
from paceline.spec.arguments import run_directory
from paceline.units import format_bytes


def disk_lines(planned: Choice) -> list[str]:
    """Return lines where the run's disk has no room for a checkpoint, none where it has or where it does not say.

    A checkpoint is priced as weights and optimizer state in fp32 of what is trained. Some file systems say size 0.
    """
    needed, run_dir = saving_for(planned).state_bytes, run_directory(planned.spec)
    usage = shutil.disk_usage(next(there for there in (run_dir, *run_dir.absolute().parents) if there.exists()))
    if not usage.total or usage.free >= needed:
        return []
    remark = f"a checkpoint takes about {format_bytes(needed)}, and {format_bytes(usage.free)} are free where {run_dir}"
    return wrap("note     ", f"{remark} is: free space, or choose another run.dir")

"""What a proof depends on, as one key: the task, the plan, the code, the versions, the machine.

A proof is remembered only under a key that holds all of it. Where something cannot be known, such as the state of a
module object, there is no key and the proof is made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.plan.planned import Planned
from paceline.run.process.handover import holds_objects
from paceline.spec.load import spec_to_dict, spec_values
from paceline.task.own_code import OURS, contents, installed_at, own_code
from paceline.verify.process.group import Job

# Environment variables with these beginnings choose kernels, threads or rounding.
NUMERIC = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_")
LAUNCHER = ("TORCHELASTIC_", "TORCH_NCCL_", "OMP_NUM_THREADS")  # set by torchrun; the proof sets its own threads


def proof_key(planned: Planned, jobs: Sequence[Job]) -> str | None:
    """Return the key of a planned task's proof, or None where not all of what it depends on can be known."""
    spec = planned.spec
    if holds_objects(spec):
        return None
    values = [value for key, value in spec_values(spec) if key.startswith("task.")]
    code = own_code(values, [Path(spec.path).parent] if spec.path else [])
    if code is None:
        return None
    parts = {
        "task": spec_to_dict(spec)["task"],
        "plan": dataclasses.asdict(planned.plan),
        "facts": dataclasses.asdict(planned.facts),
        "jobs": [_job(job) for job in jobs],
        "own code": code,
        "paceline": contents(sorted(OURS.rglob("*.py"))),
        "torch": installed_at("torch"),
        "packages": sorted(_installed()),
        "python": (sys.version, sys.flags, sys.path, installed_at("sitecustomize"), installed_at("usercustomize")),
        "machine": (platform.node(), platform.machine(), platform.platform()),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(NUMERIC) and not name.startswith(LAUNCHER)
        },
    }
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()


def _job(job: Job) -> dict[str, object]:
    """Return a job as plain data, without the origin of its spec's values."""
    rest = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "spec"}
    return {**rest, "plan": dataclasses.asdict(job.plan), "task": spec_to_dict(job.spec)["task"]}


def _installed() -> Iterator[str]:
    """Yield the names of installed packages with their versions, as their folders spell them."""
    for folder in map(Path, sys.path):
        if folder.is_dir():
            yield from (path.name for path in folder.glob("*.dist-info"))

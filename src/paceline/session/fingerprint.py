"""What a proof depends on, as one key: the task, the plan, the code, the versions, the machine.

A proof is remembered only under a key that holds all of it. Where something cannot be known, such as the state of a
module object, there is no key and the proof is made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.plan.planned import Planned
from paceline.run.process.handover import holds_objects
from paceline.spec.import_paths import is_import_path
from paceline.spec.load import Spec, spec_to_dict, spec_values
from paceline.verify.process.group import Job

MOST_FILES = 1000  # of the user's own code; a folder with more is not read, and nothing is remembered
# Environment variables with these beginnings choose kernels, threads or rounding.
NUMERIC = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_")
LAUNCHER = ("TORCHELASTIC_", "TORCH_NCCL_", "OMP_NUM_THREADS")  # set by torchrun; the proof sets its own threads


def proof_key(planned: Planned, jobs: Sequence[Job]) -> str | None:
    """Return the key of a planned task's proof, or None where not all of what it depends on can be known."""
    spec = planned.spec
    if holds_objects(spec):
        return None
    code = _own_code(spec)
    if code is None:
        return None
    parts = {
        "task": spec_to_dict(spec)["task"],
        "plan": dataclasses.asdict(planned.plan),
        "facts": dataclasses.asdict(planned.facts),
        "jobs": [_job(job) for job in jobs],
        "own code": code,
        "paceline": _contents(sorted(Path(__file__).parents[1].rglob("*.py"))),
        "torch": _where("torch"),
        "packages": sorted(_installed()),
        "python": (sys.version, sys.flags, sys.path, _where("sitecustomize"), _where("usercustomize")),
        "machine": (platform.node(), platform.machine(), platform.platform()),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(NUMERIC) and not name.startswith(LAUNCHER)
        },
    }
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()


def _job(job: Job) -> dict[str, Any]:
    """Return a job as plain data, without the origin of its spec's values."""
    rest = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "spec"}
    return {**rest, "plan": dataclasses.asdict(job.plan), "task": spec_to_dict(job.spec)["task"]}


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in nested plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _own_code(spec: Spec) -> str | None:
    """Return a digest of all Python code in the folders that the task's import paths can reach, None where too much.

    A module may import others at any time, by any name: so what is read is whole folders, not the module alone.
    """
    values = [value for key, value in spec_values(spec) if key.startswith("task.")]
    modules = [text.partition(":")[0].strip() for text in _texts(values) if is_import_path(text)]
    if not modules:
        return ""
    folders = [Path(spec.path).parent] if spec.path else []
    folders += [Path.cwd(), *(Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    for module in modules:
        found = importlib.util.find_spec(module.partition(".")[0])
        inside = list(found.submodule_search_locations or ()) if found else []  # of a package
        if found and found.origin:
            inside.append(str(Path(found.origin).parent))
        if not inside:
            return None
        folders += map(Path, inside)
    files: set[Path] = set()
    ours = Path(__file__).resolve().parents[1]  # a part of every key
    for folder in {folder.resolve() for folder in folders}:
        for path in _python_files(folder):
            if path.is_relative_to(ours):
                continue
            files.add(path)
            if len(files) > MOST_FILES:
                return None
    return _contents(sorted(files))


def _python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, leaving out hidden folders and environments of their own."""
    for where, inner, names in os.walk(folder):
        if "pyvenv.cfg" in names:
            inner.clear()
            continue
        inner[:] = [name for name in inner if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(where) / name for name in names if name.endswith((".py", ".so", ".pyd")))


def _contents(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _where(module: str) -> tuple[str, int, int] | None:
    """Return a module's file, its size and when it was written, without importing it."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    status = Path(found.origin).stat()
    return found.origin, status.st_size, status.st_mtime_ns


def _installed() -> Iterator[str]:
    """Yield the names of installed packages with their versions, as their folders spell them."""
    for folder in map(Path, sys.path):
        if folder.is_dir():
            yield from (path.name for path in folder.glob("*.dist-info"))

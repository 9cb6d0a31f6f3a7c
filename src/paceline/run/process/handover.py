"""Handing a spec to another process: as JSON where the spec is plain data, pickled by value where it holds objects."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, MissingExtra
from paceline.spec.import_paths import make_importable
from paceline.spec.load import Spec, spec_from_dict, spec_to_dict
from paceline.spec.optimizers import names_of
from paceline.spec.steps.turns import objectives_named
from paceline.spec.task import DataSpec, ModelSpec


def holds_objects(spec: Spec) -> bool:
    """Return whether the task holds a module, a data set or a function instead of names of them."""
    task = spec.task
    plain = isinstance(task.model, ModelSpec) and isinstance(task.data, DataSpec)
    named = [*objectives_named(task).values(), *names_of(task.optimizer), getattr(task.data, "collate", ""),
             task.schedule.kind, *filter(callable, task.schedule.arguments.values()),
             *task.callbacks, *task.evaluate.metrics, *(each.source for each in task.evaluate.sets)]  # fmt: skip
    return not plain or not all(isinstance(name, str) for name in named)


def hand_over(spec: Spec, folder: Path) -> Path:
    """Write the spec into `folder` for another process and return the file."""
    if not holds_objects(spec):
        path = folder / "spec.json"
        path.write_text(json.dumps({"spec": spec_to_dict(spec), "path": str(spec.path) if spec.path else None}))
        return path
    try:
        import cloudpickle
    except ImportError as error:
        raise MissingExtra(
            "cloudpickle", "notebook", "handing a model or data set object to other processes"
        ) from error
    path = folder / "spec.pickle"
    try:
        # Classes of modules go by name, and those stand where this process finds them: beside its script, say.
        path.write_bytes(pickle.dumps((list(sys.path), cloudpickle.dumps(spec))))
    except Exception as error:  # a user's object may fail to pickle in any way
        raise ConfigError(
            "the task cannot be handed to other processes",
            f"pickling it failed: {type(error).__name__}: {error}",
            "give import paths ('package.module:factory') instead of objects",
        ) from error
    return path


def take_over(path: Path) -> Spec:
    """Return the spec that `hand_over` wrote. The pickle is our own parent's, in a folder only we can read."""
    if path.suffix == ".json":
        written: dict[str, Any] = json.loads(path.read_text())
        return spec_from_dict(written["spec"], path=Path(written["path"]) if written["path"] else None)
    import cloudpickle

    folders, held = pickle.loads(path.read_bytes())
    make_importable(filter(None, folders))
    spec = cloudpickle.loads(held)
    assert isinstance(spec, Spec)
    return spec

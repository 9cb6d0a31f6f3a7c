"""What a Python caller gives a verb to work on, made into a spec: a Task, a spec file's path, or a finished Spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import ConfigError
from paceline.spec.arguments import make_spec
from paceline.spec.load import Spec, load_spec
from paceline.spec.task import Task


def spec_of(
    task: Task | Spec | Mapping[str, object] | str | Path,
    plan: object = "auto",
    cluster: object = "auto",
    overrides: Sequence[str] = (),
    run: object = None,
    verify: bool | None = None,
    faults: object = None,
) -> Spec:
    """Return the spec of a task, a spec file or a spec.

    `overrides` are those of a file ("cluster.devices=4"). `plan` and `cluster` other than "auto", and `run` other than
    None, take the place of the file's whole table; `verify` and `faults` that of one option of it. Raises ConfigError
    for overrides of what is no file, and for what `make_spec` refuses.
    """
    if isinstance(task, str | Path):
        spec = load_spec(task, overrides)
    elif overrides:
        because = "a task in Python has its values already"
        raise ConfigError("overrides without a spec file", because, "plan=..., cluster=..., or a path as the task")
    elif isinstance(task, Spec):
        spec = task
    else:
        return make_spec(task, plan, cluster, run, verify, faults)
    made = make_spec(
        spec.task,
        spec.plan if plan == "auto" else plan,
        spec.cluster if cluster == "auto" else cluster,
        spec.run if run is None else run,
        verify,
        faults,
    )
    return dataclasses.replace(spec, plan=made.plan, cluster=made.cluster, run=made.run)

"""What Python callers may write for a plan, a cluster and run options, made into a spec."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from paceline.config.build import build, mapping_layer
from paceline.config.plain import to_plain
from paceline.config.shape import Option, Table
from paceline.config.values import plain
from paceline.errors import ConfigError, suggestion
from paceline.spec.cluster import ClusterSpec
from paceline.spec.load import Spec, table
from paceline.spec.plan import Plan, PlanSpec, counts_text
from paceline.spec.run import RunSpec, with_faults
from paceline.spec.sync import Sync, sync_of
from paceline.spec.task import Task


def make_spec(
    task: Task,
    plan: Any = "auto",
    cluster: Any = "auto",
    run: Any = None,
    verify: bool | None = None,
    faults: Any = None,
) -> Spec:
    """Return the spec that Python arguments describe; each takes the typed spec, a dict of it, or a shorthand.

    A dict may hold what a spec file would: {"checkpoint_every": "2 steps", "time_limit": "2 h"}. `verify` replaces
    `run.verify` where it is not None, and `faults` (a file, or the tables of one) `run.faults`.
    """
    if isinstance(plan, Plan):
        layout = dataclasses.asdict(plan.layout)
        same = ("zero", "micro_batch", "recompute", "recompute_save", "recompute_budget", "offload", "precision",
                "compile", "schedule", "virtual_stages", "cp_method", "sync")  # fmt: skip
        rest = {name: getattr(plan, name) for name in same}
        rest |= {"stages": counts_text(plan.stages), "rows": counts_text(plan.rows)}
        plan = PlanSpec(**layout, **rest)
    elif isinstance(plan, str):
        plan = plan_spec(plan)
    elif isinstance(plan, dict):
        plan = _from_dict("plan", plan)
    if isinstance(cluster, int):
        cluster = ClusterSpec(devices=cluster)
    elif isinstance(cluster, str):
        cluster = ClusterSpec(device=cluster)
    elif isinstance(cluster, dict):
        cluster = _from_dict("cluster", cluster)
    run = _from_dict("run", run) if isinstance(run, dict) else run or RunSpec()
    if verify is not None:
        run = dataclasses.replace(run, verify=verify)
    if faults is not None:
        run = with_faults(run, faults)
    return Spec(task=task, cluster=cluster, plan=plan, run=run)


def _from_dict(name: str, given: dict[str, Any]) -> Any:
    """Return a table's dataclass from values as a file or the dataclass has them. Raises ConfigError as a file does."""
    member = table().members[name]
    assert isinstance(member, Table)
    values = {key: _as_in_a_file(member.members.get(key), value) for key, value in given.items()}
    tables, _ = build(table(), mapping_layer(table(), {name: values}, lambda key: name))
    return getattr(tables, name)


def _as_in_a_file(member: Option | Table | None, value: Any) -> Any:
    """Return a typed value as a file would hold it; what is not typed stays as it is."""
    if isinstance(member, Table):
        return to_plain(member, value) if isinstance(value, member.cls) else value
    if member is None or isinstance(value, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if member.kind == "duration" and not isinstance(value, int | float):
        return value
    return plain(member, value)


def plan_spec(text: str) -> PlanSpec:
    """Return the constraints in "auto", "dp_shard=2, precision=bf16" or "dp_replicate=2 sync=outer sync.every=8"."""
    if text == "auto":
        return PlanSpec()
    known = {field.name: field for field in dataclasses.fields(PlanSpec)}
    known |= {f"sync.{field.name}": field for field in dataclasses.fields(Sync)}
    found: dict[str, Any] = {}
    for part in re.split(r"\s*,\s*|\s+(?=[\w.]+\s*=)", text.strip()):  # as options have them, as layouts are printed
        name, _, value = (piece.strip() for piece in part.partition("="))
        name = "sync.kind" if name == "sync" else name
        if name not in known or not value:
            raise ConfigError(
                f"plan = '{text}' is not a plan",
                f"'{part.strip()}' is not of the form name=value with one of {', '.join(known)}",
                '"auto", or for example "dp_shard=2, precision=bf16"',
            )
        read, choices = _read(value, type(known[name].default)), known[name].metadata["choices"]
        chosen = read if isinstance(read, tuple) else (read,)
        if type(read) is not type(known[name].default) or (choices and not set(chosen) <= set(choices)):
            kinds = {int: "a whole number", float: "a number", bool: "true or false"}
            kind = kinds.get(type(known[name].default), "one of the choices")
            raise ConfigError(
                f"plan = '{text}' is not a plan", f"{name} = '{value}' is not {kind}",
                suggestion(value, choices) if choices else f"{name}={known[name].default or 2}".lower(),
            )  # fmt: skip
        found[name] = read
    sync = {name.removeprefix("sync."): found.pop(name) for name in list(found) if name.startswith("sync.")}
    return PlanSpec(**found, sync=sync_of(sync))


def _read(text: str, kind: type) -> Any:
    """Return a value of the type, with the parts of a list joined by "+"; the text itself where it is none."""
    if kind is tuple:
        return tuple(part.strip() for part in text.split("+"))
    if kind is float and text.replace(".", "", 1).isdigit():
        return float(text)
    if kind is int and text.isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text) if kind is bool else text


def run_directory(spec: Spec) -> Path:
    """Return the run's directory: run.dir, or runs/NAME of the task."""
    return Path(spec.run.dir or f"runs/{spec.task.name}")

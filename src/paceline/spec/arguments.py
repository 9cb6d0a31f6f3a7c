"""What Python callers may write for a task, a plan, a cluster and run options, made into a spec."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.declared import declared_table, from_file, told_at_caller
from paceline.config.other_words import option_meant
from paceline.config.shape import Option, ShapedTable
from paceline.config.values import kind_of, literal
from paceline.errors import ConfigError
from paceline.spec.cluster import ClusterSpec
from paceline.spec.load import Spec, check
from paceline.spec.plan import Plan, PlanSpec, counts_text
from paceline.spec.run import RunSpec
from paceline.spec.run_files import checkpoints_folder
from paceline.spec.survive.faults import read_faults
from paceline.spec.task import Task


def make_spec(
    task: object,
    plan: object = "auto",
    cluster: object = "auto",
    run: object = None,
    verify: bool | None = None,
    faults: object = None,
) -> Spec:
    """Return the spec that Python arguments describe; each takes the typed spec, a dict of it, or a shorthand.

    A dict may hold what a spec file would: {"checkpoint_every": "2 steps", "time_limit": "2 h"}. `verify` replaces
    `run.verify` where it is not None, and `faults` (a file, or the tables of one) `run.faults`. Raises ConfigError,
    with the caller's place, for all that is wrong with them.
    """
    made: dict[str, Any] = {}
    with told_at_caller() as problems:
        with problems.noting():
            made["task"] = _task(task)
        with problems.noting():
            made["plan"] = _plan(plan)
        with problems.noting():
            made["cluster"] = _cluster(cluster)
        changes: dict[str, Any] = {}
        with problems.noting():
            changes = {"faults": read_faults(faults)} if faults is not None else {}
        with problems.noting():
            if verify is not None and not isinstance(verify, bool):
                raise _no("verify", verify, "True or False")
            changes |= {} if verify is None else {"verify": verify}
        with problems.noting():
            made["run"] = dataclasses.replace(_run(run), **changes)
        if not problems:
            spec = Spec(**made)
            with problems.noting():
                check(spec)
    return spec


def _task(given: object) -> Task:
    if isinstance(given, Task):
        return given
    if isinstance(given, Mapping):
        return Task(**given)
    if isinstance(given, Spec):
        raise ConfigError("the task is a whole Spec", "its task, cluster, plan and run are arguments of their own",
                          "spec.task, plan=spec.plan, cluster=spec.cluster, run=spec.run")  # fmt: skip
    a_file = isinstance(given, str | Path)
    raise ConfigError(
        f"{literal(str(given) if isinstance(given, Path) else given)} is no task", f"it is {kind_of(given)}",
        f"paceline.spec.load.load_spec({str(given)!r}).task, or `paceline train {given}`" if a_file
        else "paceline.Task(model=..., data=...), or a dict of its options",
    )  # fmt: skip


def _plan(given: object) -> PlanSpec:
    if isinstance(given, PlanSpec):
        return given
    if isinstance(given, Plan):
        return _constraints_of(given)
    if isinstance(given, str):
        return plan_spec(given)
    if isinstance(given, Mapping):
        return PlanSpec(**given)
    raise _no("plan", given, '"auto", "dp_shard=2, precision=bf16", a dict of options, or PlanSpec(...)')


def _constraints_of(plan: Plan) -> PlanSpec:
    """Return the constraints that only this plan keeps."""
    same = ("zero", "micro_batch", "recompute", "recompute_save", "recompute_budget", "offload", "frozen", "precision",
            "compile", "schedule", "virtual_stages", "cp_method", "expert_slots", "sync")  # fmt: skip
    rest = {name: getattr(plan, name) for name in same}
    rest["gradients"] = "whole" if plan.reduces_once else "shards"
    rest |= {"stages": counts_text(plan.stages), "rows": counts_text(plan.rows)}
    if plan.layout.state_degree == 1:
        # fields of every plan, which mean nothing where no state is sharded
        del rest["zero"], rest["gradients"]
    if plan.layout.pp == 1:
        rest = {name: value for name, value in rest.items() if name not in ("schedule", "virtual_stages", "stages")}
    return PlanSpec(**dataclasses.asdict(plan.layout), **rest)


def _cluster(given: object) -> ClusterSpec:
    if isinstance(given, ClusterSpec):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return ClusterSpec(devices=given)
    if isinstance(given, str):
        return ClusterSpec(device=given)
    if isinstance(given, Mapping):
        return ClusterSpec(**given)
    raise _no("cluster", given, '"auto", a number of devices, a device\'s name, a dict of options, or ClusterSpec(...)')


def _run(given: Any) -> RunSpec:
    if given is None:
        return RunSpec()
    if isinstance(given, RunSpec):
        return given
    if isinstance(given, Mapping):
        return RunSpec(**given)
    raise _no("run", given, '{"dir": "runs/first"}, or RunSpec(...)')


def _no(name: str, given: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} = {literal(given)} cannot be used", f"it is {kind_of(given)}", wanted)


def plan_spec(text: str) -> PlanSpec:
    """Return the constraints in "auto", "dp_shard=2, precision=bf16" or "dp_replicate=2 sync=outer sync.every=8"."""
    if text.strip() == "auto":
        return PlanSpec()
    known = {".".join(key): option for key, option in declared_table(PlanSpec).options()}
    shorthands = {f"{name}": f"{name}.{member.shorthand}" for name, member in declared_table(PlanSpec).members.items()
                  if isinstance(member, ShapedTable) and member.shorthand}  # fmt: skip
    found: dict[str, Any] = {}
    for part in re.split(r"\s*,\s*|\s+(?=[\w.]+\s*=)", text.strip()):  # as options have them, as layouts are printed
        name, _, value = (piece.strip() for piece in part.partition("="))
        name = shorthands.get(name, name)
        if name not in known or not value:
            because, fix = f"there is no '{name}' in a plan", option_meant(name, known)
            if not name or not value:
                because = f"'{part.strip()}' is not of the form name=value"
                fix = '"auto", or for example "dp_shard=2, precision=bf16"'
            raise ConfigError(f"plan = '{text}' is not a plan", because, fix)
        if name in found:
            raise ConfigError(f"plan = '{text}' is not a plan", f"it has {name} twice", "name each once")
        found[name] = _read(value, known[name])
    for name in shorthands:
        inner = {key.partition(".")[2]: found.pop(key) for key in list(found) if key.startswith(f"{name}.")}
        found |= {name: inner} if inner else {}
    try:
        with from_file():  # the place of the caller comes before the whole text
            return PlanSpec(**found)
    except ConfigError as error:
        raise ConfigError(f"plan = '{text}' is not a plan", error.what, error.try_) from error


def _read(text: str, option: Option) -> Any:
    """Return a value of the option's kind, with the parts of a list joined by "+"; the text itself where it is none."""
    if option.kind == "texts":
        return tuple(part.strip() for part in text.split("+"))
    if option.kind == "flag":
        return {"true": True, "false": False}.get(text.lower(), text)
    if option.kind in ("whole", "number"):
        try:
            return int(text) if option.kind == "whole" else float(text)
        except ValueError:
            return text
    return text


def run_directory(spec: Spec) -> Path:
    """Return the run's directory: run.dir, or runs/NAME of the task."""
    return Path(spec.run.dir or f"runs/{spec.task.name}")


def has_checkpoint(run_dir: Path) -> bool:
    """Return whether a run's directory holds a checkpoint, from which a start would go on."""
    return any(checkpoints_folder(run_dir).glob("*/manifest.json"))

"""Profile a user's module: traced in a child process, so that planning never imports torch into this one.

Where torch is already here, or the task holds Python objects that cannot travel, it is traced in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.errors import ConfigError, PacelineError
from paceline.scratch import Scratch
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.adapt.preference import PreferenceSpec
from paceline.spec.data.augment import AugmentSpec
from paceline.spec.data.mix import mix_of
from paceline.spec.profile import ModelProfile
from paceline.spec.steps.turns import objectives_named
from paceline.spec.task import DataSpec, ModelSpec, Task, TurnSpec
from paceline.task.profile.plain import pack_profile, unpack_profile
from paceline.task.profile.turns import together

EXAMPLE_ROWS = 2  # samples in the example batch: enough to tell what grows with the batch
MOST_ROWS = 512  # of a batch that is never cut, where so few are none to an objective


def trace_task(task: Task) -> ModelProfile:
    """Return the profile of a task's model on its own data and objective. Raises ConfigError where the model fails."""
    return trace_here(task) if "torch" in sys.modules or not travels(task) else _trace_in_child(task)


def travels(task: Task) -> bool:
    """Return whether all that is traced of a task is plain data, and no Python object."""
    plain = isinstance(task.model, ModelSpec) and isinstance(task.data, DataSpec) and isinstance(task.data.collate, str)
    return plain and all(isinstance(objective, str) for objective in objectives_named(task).values())


def traced_parts(task: Task) -> dict[str, object]:
    """Return what of a task that travels its profile depends on, as plain data."""
    return {
        "model": dataclasses.asdict(task.model),
        "data": dataclasses.asdict(task.data),
        "objective": task.objective,
        "turns": [dataclasses.asdict(turn) for turn in task.turns],
        "adapter": dataclasses.asdict(task.adapter),
        "train": task.train,
        "preference": dataclasses.asdict(task.preference),
        "seed": task.seed,
    }


def trace_here(task: Task) -> ModelProfile:
    """Return the profile, traced in this process: of several objectives all passes together. Imports torch."""
    import numpy as np
    from torch import nn

    from paceline.spec.amounts import batch_samples
    from paceline.task.coupling import declares_coupling
    from paceline.task.data.order.lengths import lengths_of
    from paceline.task.data.source import open_sources
    from paceline.task.models.build import build_model
    from paceline.task.models.copied import copied
    from paceline.task.profile.adapted import adapted_profile
    from paceline.task.profile.traced import profile_module
    from paceline.task.turns import Turn, turns_of

    model = task.model
    source, _ = open_sources(task.data, task.seed)
    lengths = lengths_of(source)  # the longest samples are priced: memory must hold them
    longest = None if lengths is None else np.argsort(-np.asarray(lengths), kind="stable")

    def example(rows: int) -> Any:
        first = np.arange(min(rows, source.samples), dtype=np.int64) if longest is None else longest[:rows]
        return source.read(first.astype(np.int64), first.astype(np.int64))

    def built(device: str) -> nn.Module:
        return build_model(model, source.vocab or 0, source.items_per_sample, task.seed, device, task.adaptation)

    def real() -> nn.Module:
        if not isinstance(model, nn.Module):
            return built("cpu")
        own = copied(model)
        return own if task.adaptation.is_full else build_model(own, 0, 0, task.seed, adaptation=task.adaptation)

    try:
        module = built("meta")
    except ConfigError:  # a factory may ask for values too, as timm's do of a torch.linspace
        module = built("cpu")
    turns = turns_of(task, source.unit)

    def profiled(turn: Turn, rows: int = EXAMPLE_ROWS) -> ModelProfile:
        try:
            return profile_module(module, example(rows), turn.objective, source.items_per_sample, real)
        except ConfigError as error:
            if not declares_coupling(module, turn.objective):
                raise
            whole = min(batch_samples(task, source.items_per_sample), MOST_ROWS, source.samples)
            if rows >= whole:
                raise
            with contextlib.suppress(ConfigError):  # the five nearest rows of a batch, say, of which two have none
                return profiled(turn, whole)
            raise error

    profiles = [profiled(turn) for turn in turns]
    profiles = [
        adapted_profile(profile, module, getattr(turn.objective, "forward_passes", 1))
        for profile, turn in zip(profiles, turns, strict=True)
    ]
    return profiles[0] if len(turns) == 1 else together(profiles, [turn.every for turn in turns])


def _trace_in_child(task: Task) -> ModelProfile:
    import subprocess  # a profile that is known needs no child

    request = {**traced_parts(task), "path": sys.path}
    with Scratch("trace") as name:
        ask, answer = Path(name) / "request.json", Path(name) / "answer.json"
        ask.write_text(json.dumps(request), "utf-8")
        child = subprocess.run(
            [sys.executable, "-m", "paceline.task.profile.apart", str(ask), str(answer)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if not answer.exists():
            lines = child.stderr.strip().splitlines()
            because = lines[-1] if lines else f"the tracing process ended with status {child.returncode}"
            raise PacelineError("the model could not be profiled", because, "look at the model's forward pass")
        result = json.loads(answer.read_text("utf-8"))
    if "error" in result:
        raise _rebuilt(result)
    return unpack_profile(result)


def _rebuilt(record: dict[str, Any]) -> PacelineError:
    """Return the child's error as what it was, so that it keeps its exit code."""
    kind = getattr(errors, record["error"], PacelineError)
    simple = isinstance(kind, type) and issubclass(kind, PacelineError) and kind.__init__ is PacelineError.__init__
    return (kind if simple else errors.ConfigError)(record["what"], record["because"], record["try"])


def main() -> None:
    """Trace the task of a request file and write the profile, or the error, to the answer file."""
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    sys.path[:] = request["path"]
    given = request["data"]
    tables = {"mix": mix_of(given["mix"]), "augment": AugmentSpec(**given["augment"])}
    data = DataSpec(**{**given, "include": tuple(given["include"]), **tables})
    try:
        turns = tuple(TurnSpec(**{**turn, "match": tuple(turn["match"])}) for turn in request["turns"])
        model, objective = ModelSpec(**request["model"]), request["objective"]
        adapter = AdapterSpec(**{**request["adapter"], "targets": tuple(request["adapter"]["targets"])})
        rest: dict[str, Any] = {"adapter": adapter, "train": tuple(request["train"]), "seed": request["seed"],
                                "preference": PreferenceSpec(**request["preference"])}  # fmt: skip
        profile = trace_here(Task(model=model, data=data, objective=objective, turns=turns, **rest))
        answer = pack_profile(profile)
    except PacelineError as error:
        answer = error.as_dict()
    partial = Path(sys.argv[2] + ".partial")
    partial.write_text(json.dumps(answer), "utf-8")
    partial.replace(sys.argv[2])


if __name__ == "__main__":
    main()

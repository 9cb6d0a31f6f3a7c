"""The loss and the metrics of a run's checkpoint, on one device: on what the run held out, or on other data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.spec.load import Spec, spec_from_dict
from paceline.spec.plan import Plan, plan_from_dict
from paceline.spec.task import Task
from paceline.spec.watch.evaluate import LOSS, HeldOutSetSpec, check_evaluate

if TYPE_CHECKING:
    from paceline.run.assemble import Assembled
    from paceline.run.process.world import World
    from paceline.session.verbs.weights import Chosen
    from paceline.task.data.protocol import Source

SavedSpec = Mapping[str, Any]
OF_A_PROGRAM = "__main__:"  # how the objects of the program that trained are called in a checkpoint


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """What the samples of some data gave under a checkpoint's weights."""

    checkpoint: Path
    step: int
    source: str  # "" of what the run held out; of an object the name of its class
    samples: int
    of_samples: int  # that there are
    loss: float  # mean per item
    weight: float  # items
    metrics: Mapping[str, float]
    seconds: float
    skipped: tuple[str, ...] = ()  # why newer checkpoints were passed over


def evaluate_run(
    run_dir: Path,
    source: object = "",
    step: int | str | None = None,
    samples: int | None = None,
    metrics: Sequence[object] = (),
    task: Task | None = None,
) -> EvaluatedCheckpoint:
    """Return the mean loss and the metrics of a run's newest sound checkpoint, or of the one of `step` (or "best").

    Without `source` they are of what the run held out; else of all samples of that source, which are read as the run
    reads its own. `samples` at most are read, the same ones each time. `metrics` stand in the place of
    task.evaluate.metrics, and `task` in that of the checkpoint's, which cannot hold objects of a program. Nothing is
    written.

    Raises as `choose_checkpoint`; ConfigError for a task made of a program's own objects, one that is not the
    checkpoint's, and for data that are not of the run's kind; and the errors of reading them.
    """
    import torch

    from paceline.run.assemble import assemble
    from paceline.run.loop.evaluate import evaluate
    from paceline.run.process.world import join_world
    from paceline.session.verbs.weights import choose_checkpoint
    from paceline.task.coupling import is_coupled
    from paceline.task.data.rows.packed import for_device
    from paceline.task.metrics.resolve import metrics_of

    chosen = choose_checkpoint(run_dir, step)
    extra = chosen.manifest.extra
    spec = _task_of(run_dir, extra["spec"], task)
    task = _measuring(spec.task, metrics)
    world = join_world("cuda" if torch.cuda.is_available() else "cpu", run=spec.run)
    trained_on, held_out = _opened(task, source, world, run_dir, extra["data_fingerprint"])
    trained = plan_from_dict(extra["plan"])
    plan = _on_one_device(trained, trained.micro_batch)
    built = assemble(task, plan, world, trained_on, trained_on.items_per_sample, read=False)
    _load(built, chosen)
    stepper = built.stepper
    main = stepper.turns[stepper.main].turn.objective
    if is_coupled(built.model, main):  # rows that see each other are read as many at a time as the ranks had together
        stepper.plan = _on_one_device(trained, trained.micro_batch * trained.layout.data_degree)
    measured = metrics_of(task.evaluate, held_out, main, 1)
    count = min(samples or held_out.samples, held_out.samples)
    found = evaluate(stepper, for_device(held_out, world.device.type, task.model), count, 0, measured, keeps=False)
    return EvaluatedCheckpoint(
        chosen.path, chosen.manifest.step, _name(source), count, held_out.samples, found.loss, found.weight,
        found.metrics, found.seconds, chosen.skipped,
    )  # fmt: skip


def _task_of(run_dir: Path, written: SavedSpec, given: Task | None) -> Spec:
    """Return the spec of a checkpoint, with a task that is given in the place of its own.

    Raises ConfigError for a task of which something is an object of the program that trained it.
    """
    from paceline.session.verbs.weights import with_kept_folder
    from paceline.task.settled import settle

    if given is not None:
        own = {name: table for name, table in written.items() if name != "task"}
        return settle(dataclasses.replace(spec_from_dict(own, origin="the checkpoint"), task=given)).spec
    task = written["task"]
    objects = [task[name] for name in ("model", "data") if isinstance(task[name], str)]
    objects += [name for name in _texts(task) if name.startswith(OF_A_PROGRAM)]
    if objects:
        raise ConfigError(
            f"'{run_dir}' was trained by a program with objects of its own",
            f"a checkpoint has no more of them than a name, such as {objects[0].removeprefix(OF_A_PROGRAM)}",
            f'in that program: paceline.load_run("{run_dir}").evaluate(task=task)',
        )
    spec = spec_from_dict(written, origin="the checkpoint")
    return settle(dataclasses.replace(spec, task=with_kept_folder(run_dir, spec.task))).spec


def _measuring(task: Task, metrics: Sequence[object]) -> Task:
    """Return the task with other metrics, where there are any. Raises ConfigError for names of none."""
    if not metrics:
        return task
    measured = dataclasses.replace(task.evaluate, metrics=tuple(metrics), metric=LOSS, mode="auto")
    check_evaluate(measured)
    return dataclasses.replace(task, evaluate=measured)


def _name(source: object) -> str:
    return source if isinstance(source, str) else type(source).__name__


def _texts(value: object) -> list[str]:
    if isinstance(value, Mapping):
        return [text for each in value.values() for text in _texts(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def _opened(task: Task, source: object, world: World, run_dir: Path, fingerprint: str) -> tuple[Source, Source]:
    """Return what the run was trained on, and what is evaluated."""
    from paceline.run.loop.sources import open_set, open_sets, open_together

    trained_on, held_out = open_together(task.data, task.seed, world)
    if source != "":
        return trained_on, open_set(task, HeldOutSetSpec("", source), world, trained_on, f"'{_name(source)}'")
    if held_out is None and task.evaluate.sets:  # then the first of them is what the run evaluated
        held_out = next(iter(open_sets(task, world, trained_on).values()))
    if held_out is None:
        raise ConfigError(
            f"'{run_dir}' held out no data",
            "its data have no validation part",
            f"paceline evaluate {run_dir} SOURCE, with data that it has not seen",
        )
    if trained_on.fingerprint != fingerprint:
        raise ConfigError(
            f"the data of '{run_dir}' are not those that it was trained on",
            f"their fingerprint was {fingerprint} and is now {trained_on.fingerprint}, so what it held out is unknown",
            f"restore the data; or paceline evaluate {run_dir} SOURCE, with data that it has not seen",
        )
    return trained_on, held_out


def _on_one_device(plan: Plan, micro_batch: int) -> Plan:
    """Return a plan for forward passes on one device, in the precision of the one that trained."""
    micro_batch = min(plan.batch_samples, micro_batch)
    return Plan(
        micro_batch=micro_batch,
        accumulation=-(-plan.batch_samples // micro_batch),
        batch_samples=plan.batch_samples,
        precision=plan.precision,
        logits_elements=plan.logits_elements,
    )


def _load(built: Assembled, chosen: Chosen) -> None:
    """Put a checkpoint's weights and buffers into what was built, and nothing of its optimizer."""
    from paceline.checkpoint import load_checkpoint, training_state
    from paceline.checkpoint.index import read_index
    from paceline.checkpoint.state import MODEL

    names = read_index(chosen.path, chosen.manifest)
    others = tuple(name for name in names if not name.startswith(MODEL))
    load_checkpoint(chosen.path, training_state(built.model), verify=False, may_skip=others)  # verified when chosen

"""What of a run with adapters, or with a teacher, is exported: adapters alone, merged weights, the student alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import StorageError
from paceline.spec.model_folder import folder_of
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.huggingface.road import road_of

if TYPE_CHECKING:
    from torch import Tensor

DISTILLED = "paceline.task.adapt.distill:"
REFERENCED = "paceline.task.adapt.referenced:"
BRIDGE = "bridge.weight"  # a student's way to its teacher's hidden states


def write_adapters(
    task: Task,
    base: str,
    tensors: Mapping[str, Tensor],
    out: Path,
    *,
    is_decoder: bool,
    turned: Collection[str] = (),
) -> list[Path]:
    """Write the adapters of a run, and what is trained beside them, in peft's format; return the files.

    `base` is where the frozen weights came from, `turned` the layers whose weights lie the other way round.
    """
    from paceline.task.adapt.peft import write_adapter
    from paceline.task.adapt.trained import named

    trained, architecture = named(list(tensors), task.train), ""
    if isinstance(task.model, ModelSpec) and folder_of(task.model.name) is not None and not is_decoder:
        architecture = str(task.model.arguments.get("architecture") or road_of(task.model.name).architecture)
    return write_adapter(
        tensors, task.adapter, trained, out, base=base, is_decoder=is_decoder, architecture=architecture,
        is_turned=bool(turned),
    )  # fmt: skip


def merged_tensors(task: Task, tensors: Mapping[str, Tensor], turned: Collection[str]) -> Mapping[str, Tensor]:
    """Return a run's weights with its adapters added to them, each when it is asked for.

    `turned` are the layers that a checkpoint tells of as such.
    """
    from paceline.task.adapt.merge import MergedTensors

    return MergedTensors(tensors, task.adapter, turned)


def write_whole(tensors: Mapping[str, Tensor], out: Path) -> None:
    """Write tensors to one file, one at a time in memory."""
    from paceline.checkpoint.shards import TensorToWrite, dtype_name, write_plain
    from paceline.durable import publish

    entries = []
    for name, tensor in tensors.items():
        load = partial(tensors.__getitem__, name)
        entries.append(TensorToWrite(name, dtype_name(tensor.dtype), tuple(tensor.shape), load))
    part = out.with_name(out.name + ".part")
    try:
        part.unlink(missing_ok=True)  # of an export that was killed
        write_plain(part, entries, {"format": "pt"})
        publish(part, out)
    except OSError as error:
        raise StorageError(f"cannot write {out}", str(error), "free space or choose another place") from error


def without_teacher(task: Task) -> Task:
    """Return the task with the trained model alone, without a teacher or reference: checkpoints hold no other."""
    if not isinstance(task.model, ModelSpec) or not task.model.name.startswith((DISTILLED, REFERENCED)):
        return task
    from paceline.task.adapt.distill import student_of
    from paceline.task.adapt.referenced import trained_of

    trained = student_of(task.model) or trained_of(task.model)
    return task if trained is None else dataclasses.replace(task, model=trained)


def of_student(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a decoder's tensors without what stands beside a student."""
    return tensors if BRIDGE not in tensors else {name: value for name, value in tensors.items() if name != BRIDGE}

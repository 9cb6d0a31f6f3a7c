"""One device and the numbers that a batch gives it, in whatever pieces: loss and gradients per item."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.protocol import Source
from paceline.task.models.held import buffers_kept
from paceline.task.sums import back_through
from paceline.task.turns import Turn
from paceline.verify.compare.asked import Asked
from paceline.verify.compare.difference import reach_of, wide
from paceline.verify.compare.tolerance import FLOOR
from paceline.verify.reached.meeting import RowsThatMeet, read_meeting
from paceline.verify.reached.remembered import Remembered
from paceline.verify.reference.passes import norm_together, reference_randomness
from paceline.verify.rounding.conditioning import Move

MOST_IN_TWO = 8  # rows of a batch that is cut in two pieces of every size


@dataclass(frozen=True)
class OneProgram:
    """The model of one device, and the random numbers of its samples."""

    model: nn.Module
    randomness: SampleRandomness
    remembered: Remembered  # what it had before it was called

    @property
    def looked(self) -> Survey:
        """What is known of its random numbers: another model of the program need not be called for it."""
        return self.randomness.survey


@dataclass(frozen=True)
class PiecesNumbers:
    """What one way to cut the batch gives, per item."""

    sizes: tuple[int, ...]
    loss: float
    magnitude: float  # of the pieces' losses, signs aside: what rounding is relative to
    gradients: dict[str, torch.Tensor]
    reach: float  # what the loss counts as at least
    moved: tuple[str, ...]  # names of the buffers that the passes have moved
    takes_gradients: bool = False  # whether the objective changed gradients by itself


@dataclass(frozen=True)
class PiecesDifference:
    """How far a number, or a gradient, of the batch in pieces is from the whole one's."""

    name: str
    relative: float
    whole: float  # the element that differs most, or the number
    cut: float
    ratio: float


def cuts(rows: int) -> tuple[tuple[int, ...], ...]:
    """Return ways to cut so many rows into pieces: in one, in two of every size, and one by one.

    What a program does to a piece of one number of rows alone shows, whatever that number is. What it does where *all*
    rows of a piece are alike, such as full, it does to every such row that is alone. Of many rows growing pieces, and
    all but one, stand for all sizes.
    """
    pairs: list[tuple[int, ...]] = [(rows - fewer, fewer) for fewer in range(1, rows // 2 + 1)]
    if rows > MOST_IN_TWO:
        pairs = [growing(rows), (rows - 1, 1)]
    return tuple(dict.fromkeys(((rows,), *pairs, (1,) * rows)))


def growing(rows: int) -> tuple[int, ...]:
    """Return pieces of one row, of two, of three, and so on; the last one has what is left."""
    found: list[int] = []
    while sum(found) < rows:
        found.append(min(len(found) + 1, rows - sum(found)))
    return tuple(found)


def one_device(
    asked: Asked, turns: Sequence[Turn], move: Move | None = None, looked: Survey | None = None
) -> OneProgram:
    """Return the model of one device, its weights moved where asked, with the random numbers of its samples.

    It is called to learn whose these are, unless that is known.
    """
    model, objectives = asked.model(move), [turn.objective for turn in turns]
    remembered, given = Remembered(model, objectives), (asked.task, asked.plan, asked.source, model, objectives)
    randomness = reference_randomness(*given, MASTER_DTYPES[asked.plan.precision], looked)
    return OneProgram(model, randomness, remembered)


def numbers_of(
    asked: Asked,
    program: OneProgram,
    turn: Turn,
    sizes: tuple[int, ...],
    scale: float = 1.0,
    *,
    still: bool = False,
    alike: bool = False,
    meeting: RowsThatMeet | None = None,
) -> PiecesNumbers:
    """Return loss and gradients per item of the first batch in pieces of these sizes, on the weights of the start.

    The loss is scaled before its backward pass, and the gradients back again. With `still` every piece begins with the
    buffers of the first one; with `alike` random numbers of all samples are those of the first one. With `meeting` rows
    meet in one piece that do not in pieces of two.
    """
    task, source, model = asked.task, asked.source, program.model
    model.zero_grad(set_to_none=True)
    loss = weight = magnitude = 0.0
    start, takes = 0, False
    before = _versions(model)
    with buffers_kept(model):
        for size in sizes:
            each = buffers_kept(model) if still else contextlib.nullcontext()
            positions = np.arange(start, start + size, dtype=np.int64)
            given = (source, task.seed, positions)
            data = read_at(*given) if meeting is None else read_meeting(*given, meeting)
            held = _gradients_of(model)
            drawn_for = np.zeros_like(positions) if alike else positions
            with each:
                with program.randomness.during(SampleRows(drawn_for, turn.draws_as(1), length_of(data))):
                    loss_sum, count = turn.objective(model, cast_floats(data, MASTER_DTYPES[asked.plan.precision]))
                takes = takes or _gradients_of(model) != held
                back_through(loss_sum * scale, turn.objective)
            piece = float(loss_sum.detach())
            loss, magnitude, weight, start = loss + piece, magnitude + abs(piece), weight + float(count), start + size
        moved = tuple(name for name, version in _versions(model).items() if version != before.get(name))
    gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    by = weight or 1.0
    means = {name: grad / (by * scale) for name, grad in gradients.items()}
    norm = norm_together(means.values())
    reach = reach_of(norm, (weight for name, weight in model.named_parameters() if name in means))
    return PiecesNumbers(sizes, loss / by, magnitude / abs(by), means, reach, moved, takes)


def differences_of(whole: PiecesNumbers, cut: PiecesNumbers) -> list[PiecesDifference]:
    """Return how far the cut batch is from the whole one: the loss, then every gradient."""
    relative = abs(cut.loss - whole.loss) / max(abs(whole.loss), cut.magnitude, whole.reach, 1e-300)
    found = [PiecesDifference("loss", relative, whole.loss, cut.loss, cut.loss / (whole.loss or 1))]
    floor = FLOOR * float(torch.stack([g.norm() for g in whole.gradients.values()]).norm()) if whole.gradients else 0.0
    for name in {**whole.gradients, **cut.gradients}:
        known = whole.gradients.get(name, cut.gradients.get(name))
        assert known is not None
        expected, ours = (wide(one.gradients.get(name, torch.zeros_like(known))) for one in (whole, cut))
        off = (ours - expected).flatten()
        if not off.numel():
            continue
        at, size = int(off.abs().argmax()), float(expected.norm())
        relative = float(off.norm()) / max(size, floor, 1e-300)
        ratio = float(ours.norm()) / size if size else 1.0
        found.append(PiecesDifference(name, relative, float(expected.flatten()[at]), float(ours.flatten()[at]), ratio))
    return found


def not_finite(whole: PiecesNumbers) -> list[str]:
    """Return the names of what has numbers that are not finite."""
    found = {"loss": torch.tensor(whole.loss), **whole.gradients}
    return [name for name, tensor in found.items() if not tensor.isfinite().all()]


def read_at(source: Source, seed: int, positions: np.ndarray) -> Any:
    """Return the samples at some positions of the data's order."""
    return source.read(ids_at(source, seed, positions), positions)


def _gradients_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return which tensor each gradient is, and how often it was changed in place, by the parameter's name."""
    held = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (id(gradient), gradient._version) for name, gradient in held.items()}


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return which tensor each buffer is, and how often it was changed in place, by name."""
    held = dict(model.named_buffers())
    return {name: (id(buffer), 0 if buffer.is_inference() else buffer._version) for name, buffer in held.items()}

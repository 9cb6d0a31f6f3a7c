"""Whether the loss is a sum over rows: the whole global batch in one piece against the same batch in several.

The step divides a sum of losses by a sum of weights, whatever pieces the batch is cut in. A loss that is no such sum
(a mean, a contrast between rows, statistics over a batch) changes with the cut, and so trains otherwise on every
layout, while each layout equals a reference that is cut in the same way. One device computes all of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from paceline.errors import NumericalStop
from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of
from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, FirstDifference, Rounding
from paceline.spec.steps.turns import main_turn
from paceline.spec.task import Task
from paceline.task.coupling import is_coupled
from paceline.task.data.protocol import Source
from paceline.task.turns import Turn, turns_of
from paceline.verify.compare.asked import Asked
from paceline.verify.compare.diagnosis import LISTED, NOT_REPRODUCIBLE, told
from paceline.verify.compare.difference import Difference
from paceline.verify.compare.in_a_group import has_evaluations, own_metrics
from paceline.verify.compare.pieces import (
    OneProgram,
    PiecesDifference,
    PiecesNumbers,
    cuts,
    differences_of,
    growing,
    not_finite,
    numbers_of,
    one_device,
    read_at,
)
from paceline.verify.compare.tolerance import tolerance
from paceline.verify.compare.whole_evaluation import Evaluation, evaluation_apart
from paceline.verify.compare.work import WorkSeen
from paceline.verify.reached.ahead import FAR_WALKS, Walk, sleeps, walk
from paceline.verify.reached.causes import (
    FOR_OTHERS,
    KEEPS_DRAWS,
    LEFT_BEHIND,
    MOVES,
    NO_SUM,
    OUT_OF_PROPORTION,
    TAKES_GRADIENTS,
)
from paceline.verify.reached.kept_rows import row_that_keeps_its_draws
from paceline.verify.reached.meeting import APART, PIECES, RowsThatMeet, meetings_of
from paceline.verify.reached.remembered import AsItWas
from paceline.verify.reached.thresholds import ThresholdsSeen
from paceline.verify.reference.plain_documents import placed_plainly
from paceline.verify.rounding.conditioning import Move, beyond_rounding, computed_again, settled

QUANTITY = "whole batch"
# A larger batch is looked at too, of as many rows as the task's at most: programs keep the hardest sixteen rows, fill
# experts up to eight, or take statistics of groups of sixteen, and nothing of that shows in a few rows.
MANY_ROWS = 512
LATER_ROWS = 64  # on other weights
# That a piece of so many rows may take, by what few take: a large model has fewer. They are reckoned from what is
# computed (work.py), so that a program has as many rows, and one verdict, on every machine and at every load.
MANY_SECONDS = 0.5
MOST_SHOWN = 12  # pieces that are told one by one
LATER = ", on weights that {} have moved,"
FAR_SECONDS = 1.0  # that all steps to weights which reach a threshold may take, reckoned as MANY_SECONDS are

# A step scales losses by a power of two near its items, and in fp16 by more: what sums to the same gradient otherwise.
SCALED = 2.0**-6
PROPORTION = 1e-3  # a threshold on a gradient's way does more, and rounding in fp16 inside of a program less


@dataclass(frozen=True)
class _Look:
    """Some rows in one piece and in several, on the weights of the start, or on those of a few steps later."""

    whole: PiecesNumbers
    others: list[PiecesNumbers]
    way: Walk | None = None  # from the weights of the start to these
    kept: tuple[str, ...] = ()  # what calls change, where each cut was of a program that had not been called
    meeting: RowsThatMeet | None = None  # whether rows were made to meet


def whole_batch(
    task: Task, plan: Plan, world: World, source: Source, items_per_sample: int, steps: int, kept: dict[object, object]
) -> CheckProof:
    """Return what this check finds: loss and gradients of the first batch, whole and cut, per item, in fp64.

    Random numbers belong to the samples and are the same for every cut. A program some of whose numbers do not is not
    compared, nor one that says itself that its rows see each other and so is never cut: `left_out` tells why. One whose
    kernels know no fp64, as those of fake quantisation, is compared in fp32.
    """
    began, asked, turns = time.perf_counter(), Asked(task, plan, source, items_per_sample), turns_of(task, source.unit)
    if (sample := row_that_keeps_its_draws(source)) is not None:
        return CheckProof(False, plan.precision, 1, time.perf_counter() - began, {QUANTITY: 1.0}, _keeping(sample))
    uncalled = [AsItWas(turn.objective) for turn in turns]
    exact = _held(asked.in_format("fp64"), turns, uncalled)
    if not exact.fails:
        return exact.proof
    coarse = _held(asked.in_format("fp32"), turns, uncalled)
    return exact.proof if coarse.fails else coarse.proof


@dataclass(frozen=True)
class _FoundInFormat:
    """What the check finds in one format, and whether the program fails there."""

    proof: CheckProof
    fails: bool


def _held(asked: Asked, turns: Sequence[Turn], every_uncalled: Sequence[AsItWas]) -> _FoundInFormat:
    began, precision = time.perf_counter(), asked.plan.precision
    program = one_device(asked, turns)
    left_out, fails = _why_not(program.model, turns, program.randomness.survey.strays), False
    first, rounding, relative, seen = None, None, 0.0, ThresholdsSeen(read_at)
    for turn, uncalled in () if left_out else zip(turns, every_uncalled, strict=True):
        try:
            with seen:
                whole, *others = (numbers_of(asked, program, turn, sizes) for sizes in cuts(asked.plan.batch_samples))
        except Exception as error:
            left_out, fails = _does_not_take(program.randomness, error), True
            break
        _require_numbers(whole, turn)
        looks = _looks(asked, program, turn, _Look(whole, others), seen)
        for look in itertools.chain(looks, _uncalled(asked, program, turn, uncalled)):
            found = [(difference, other) for other in look.others for difference in differences_of(look.whole, other)]
            relative = max(relative, *(difference.relative for difference, _ in found))
            wrong = [(d, other) for d, other in found if not d.relative <= tolerance(QUANTITY, precision)]
            wrong, explained, itself = _beyond_rounding(wrong, asked, program, turn, uncalled, look)
            rounding = rounding or explained
            if itself is not None:
                first = first or told(itself, [itself], NOT_REPRODUCIBLE)
            elif wrong and first is None:
                moved = _moving(asked, turn, look, wrong[0][1]) if not look.kept else ()
                if not (moved or look.kept):
                    look = _of_uncalled(asked, program, turn, uncalled, look, wrong[0][1])
                is_drawn = not (moved or look.kept) and _is_drawn(asked, program, turn, look, wrong[0][1])
                first = _first(wrong, look, turn, program.randomness.told, moved=moved, is_drawn=is_drawn)
            if first is not None:
                break
        first = first or _out_of_proportion(asked, program, turn, whole)
        if first is None and turn is turns[main_turn(asked.task)]:
            first = _evaluation_apart(asked, program, turn, whole.reach)
    seconds = time.perf_counter() - began
    found_all = CheckProof(first is None, precision, 1, seconds, {QUANTITY: relative}, first, left_out=left_out,
                           not_tried=() if left_out or first else tuple(seen.one_sided()))  # fmt: skip
    # Of what fp64 does not know it has nothing to say.
    return _FoundInFormat(settled(found_all, rounding if precision == "fp64" else None, lambda: found_all), fails)


def _looks(asked: Asked, program: OneProgram, turn: Turn, first: _Look, sides: ThresholdsSeen) -> Iterator[_Look]:
    """Yield the look at a few rows, that at many, and one at weights of later steps, as far as these can be had.

    Of a program with thresholds of its own, looks at weights far from the start follow: what a piece of few rows does
    beyond one may be what the whole does, near the start.
    """
    yield first
    yield from _meetings(asked, program, turn, first)
    batch, few = asked.task.global_batch, asked.plan.batch_samples
    wanted = min(MANY_ROWS, int(batch.value)) if batch.unit == "samples" else 0
    with WorkSeen() as seen:
        numbers_of(asked, program, turn, (few,))
    rows = max(few, min(wanted, int(MANY_SECONDS / max(seen.seconds / few, 1e-9))))
    rows_later = max(few, min(LATER_ROWS, rows))
    if rows > few and (larger := _in_growing_pieces(asked, program, turn, rows, sides)):
        yield larger
    if seen.seconds <= MANY_SECONDS or sleeps(first.whole.gradients):
        yield from _later(asked, turn, rows_later, Walk(), sides)
    if sides.has_any and seen.seconds * sum(way.steps for way in FAR_WALKS) <= FAR_SECONDS:
        for way in FAR_WALKS:
            yield from _later(asked, turn, rows_later, way, sides)


def _meetings(asked: Asked, program: OneProgram, turn: Turn, first: _Look) -> Iterator[_Look]:
    """Yield looks at rows that meet, of a program whose calls leave nothing.

    One that keeps something for each sample may use a sample once in a batch alone.
    """
    if first.whole.moved or program.remembered.changed():
        return
    for meeting in meetings_of(asked.source):
        try:
            whole, cut = (numbers_of(asked, program, turn, s, meeting=meeting) for s in ((2 * APART,), PIECES))
        except Exception:  # whatever a program says to rows that were put together
            continue
        if not (not_finite(whole) or not_finite(cut)):
            yield _Look(whole, [cut], meeting=meeting)


def _uncalled(asked: Asked, known: OneProgram, turn: Turn, was: AsItWas) -> Iterator[_Look]:
    """Yield the look at a few rows whose cuts are each of a program that nobody has called, where calls leave anything.

    `was` is what the turn's objective held before it was called.
    """
    few, kept = asked.plan.batch_samples, known.remembered.changed()
    if not kept:
        return
    try:
        whole, other = (_numbers_anew(asked, known, turn, was, sizes) for sizes in ((few,), growing(few)))
    except Exception:  # whatever a program says that wants to be called before
        return
    if not not_finite(whole):
        yield _Look(whole, [other], kept=kept)


def _of_uncalled(asked: Asked, known: OneProgram, turn: Turn, was: AsItWas, look: _Look, cut: PiecesNumbers) -> _Look:
    """Return a look whose cuts differ, with what calls change where those of programs that nobody has called do not."""
    kept = known.remembered.changed()
    if not kept or look.way is not None or look.meeting is not None:
        return look
    try:
        whole, other = (_numbers_anew(asked, known, turn, was, each.sizes) for each in (look.whole, cut))
    except Exception:  # whatever a program says that wants to be called before
        return look
    is_sum = all(d.relative <= tolerance(QUANTITY, asked.plan.precision) for d in differences_of(whole, other))
    return dataclasses.replace(look, kept=kept) if is_sum else look


def _numbers_anew(
    asked: Asked, known: OneProgram, turn: Turn, was: AsItWas, sizes: tuple[int, ...], move: Move | None = None
) -> PiecesNumbers:
    """Return what a program gives that is made for this cut, of whose random numbers all is known."""
    with was.again():
        return numbers_of(asked, one_device(asked, [turn], move, known.looked), turn, sizes)


def _later(asked: Asked, turn: Turn, rows: int, way: Walk, sides: ThresholdsSeen) -> Iterator[_Look]:
    """Yield the look at so many rows on the weights to which `way` leads, where it can be had."""
    walked = _walked(asked, one_device(asked, [turn]), turn, way)
    if walked is not None and (later := _in_growing_pieces(asked, walked, turn, rows, sides)):
        yield dataclasses.replace(later, way=way)


def _in_growing_pieces(asked: Asked, program: OneProgram, turn: Turn, rows: int, sides: ThresholdsSeen) -> _Look | None:
    """Return what so many rows give in one piece and in growing ones; None where they give no numbers.

    A program that fails on so many says nothing here: ranks give it fewer.
    """
    try:
        with sides:
            whole, other = (numbers_of(asked, program, turn, sizes) for sizes in ((rows,), growing(rows)))
    except Exception:  # whatever a program says to more rows, or to other weights, than it is given
        return None
    return _Look(whole, [other]) if not not_finite(whole) else None


def _walked(asked: Asked, program: OneProgram, turn: Turn, way: Walk) -> OneProgram | None:
    """Return the program with the weights of later steps, None where it fails on its way."""
    try:
        walk(program.model, lambda: numbers_of(asked, program, turn, (asked.plan.batch_samples,)).gradients, way)
    except Exception:  # whatever a program says to other weights than its first
        return None
    return program


def _moving(asked: Asked, turn: Turn, look: _Look, cut: PiecesNumbers) -> tuple[str, ...]:
    """Return the names of the buffers that calls of the model move, where the loss is a sum over rows but for them."""
    program = one_device(asked, [turn])
    if look.way is not None:
        _walked(asked, program, turn, look.way)
    moved = numbers_of(asked, program, turn, look.whole.sizes).moved
    if not moved or look.meeting is not None:
        return ()
    whole, others = (numbers_of(asked, program, turn, each.sizes, still=True) for each in (look.whole, cut))
    most = tolerance(QUANTITY, asked.plan.precision)
    return moved if all(d.relative <= most for d in differences_of(whole, others)) else ()


def _is_drawn(asked: Asked, program: OneProgram, turn: Turn, look: _Look, cut: PiecesNumbers) -> bool:
    """Return whether a program that draws for samples is a sum over rows where it draws the same for all."""
    if not program.looked.patterns or look.way is not None or look.meeting is not None:
        return False
    whole, other = (numbers_of(asked, program, turn, each.sizes, alike=True) for each in (look.whole, cut))
    return all(d.relative <= tolerance(QUANTITY, asked.plan.precision) for d in differences_of(whole, other))


def _out_of_proportion(asked: Asked, program: OneProgram, turn: Turn, whole: PiecesNumbers) -> FirstDifference | None:
    """Return what says that the gradient of a scaled loss is not the scaled gradient, None where it is."""
    scaled = numbers_of(asked, program, turn, whole.sizes, SCALED)
    found = [d for d in differences_of(whole, scaled) if d.relative > PROPORTION]
    again = numbers_of(asked, program, turn, whole.sizes) if found else whole
    known = [d.name for d in differences_of(whole, again) if d.relative > tolerance(QUANTITY, asked.plan.precision)]
    wrong = [(d, scaled) for d in found if d.name not in known]
    return _first(wrong, _Look(whole, [scaled]), turn, (), is_scaled=True) if wrong else None


def _evaluation_apart(asked: Asked, program: OneProgram, turn: Turn, reach: float) -> FirstDifference | None:
    """Return what says that an evaluation is another one of rows that are cut, None where none is made or it is not."""
    task, source, dtype = asked.task, asked.source, MASTER_DTYPES[asked.plan.precision]

    def read(start: int, size: int) -> tuple[contextlib.AbstractContextManager[object], object]:
        positions = np.arange(start, start + size, dtype=np.int64)
        data = cast_floats(read_at(source, task.seed, positions), dtype)
        drawn_for = SampleRows(positions, turn.draws_as(1), length_of(data))
        return program.randomness.during(drawn_for), placed_plainly(turn.objective, data)

    metrics = own_metrics(task, source, turn.objective)
    evaluation = Evaluation(program.model, turn.objective, metrics, read)
    found = evaluation_apart(evaluation, cuts(asked.plan.batch_samples), reach)
    return found if found is not None and has_evaluations(task) else None  # data are opened for what is found alone


def _require_numbers(whole: PiecesNumbers, turn: Turn) -> None:
    """Raise NumericalStop where the whole batch gives no numbers: no way to cut it says anything then."""
    if names := not_finite(whole):
        of = f" of {turn.name}" if turn.name else ""
        raise NumericalStop(
            f"step 1: {names[0]}{of} is not finite on one device",
            f"on the weights of the start, its first {sum(whole.sizes)} samples in one piece and in fp64 give numbers "
            "that are not finite, whatever the layout",
            "look at what the model divides by, takes roots or logarithms of, and masks; and at the data for NaN",
        )


def _beyond_rounding(
    wrong: list[tuple[PiecesDifference, PiecesNumbers]],
    asked: Asked,
    known: OneProgram,
    turn: Turn,
    was: AsItWas,
    look: _Look,
) -> tuple[list[tuple[PiecesDifference, PiecesNumbers]], Rounding | None, Difference | None]:
    """Return the differences that rounding does not explain, and a record of those it does (conditioning.py).

    The last is how far the whole batch is from itself where it gives other numbers when it is computed once more.
    """

    def computed(made: int, move: Move | None) -> PiecesNumbers:
        if look.kept:
            return _numbers_anew(asked, known, turn, was, look.whole.sizes, move)
        program = one_device(asked, [turn], move)
        if look.way is not None:
            _walked(asked, program, turn, look.way)
        return numbers_of(asked, program, turn, look.whole.sizes, meeting=look.meeting)

    def apart(ours: PiecesNumbers, known: PiecesNumbers) -> list[Difference]:
        return [_in_the_shape_of_a_layouts(d) for d in differences_of(known, ours)]

    again = computed_again(computed, apart, asked.narrowest)
    found = [_in_the_shape_of_a_layouts(d) for d, _ in wrong]
    left, rounding = beyond_rounding(found, asked.plan.precision, again, World(0, 1, 0, torch.device("cpu")))
    if left and not left[0].is_reproducible:
        return [], None, left[0]
    kept = [pair for pair, shaped in zip(wrong, found, strict=True) if shaped in left]
    return kept, rounding, None


def _keeping(sample: int) -> FirstDifference:
    """Return what is told of a sample that keeps what it drew."""
    name = f"sample {sample}"
    return FirstDifference(
        quantity=QUANTITY, name=name, step=1, rank=0, relative=1.0, ratio=math.nan, ours=math.nan, reference=math.nan,
        copies_agree=True, tensors=(name,), tensors_in_all=1, family=KEEPS_DRAWS.family,
        likely=KEEPS_DRAWS.likely.format(shown=sample),
    )  # fmt: skip


def _in_the_shape_of_a_layouts(d: PiecesDifference) -> Difference:
    return Difference(QUANTITY, d.name, 1, 0, d.relative, d.ratio, d.cut, d.whole)


def _why_not(model: nn.Module, turns: Sequence[Turn], strays: tuple[str, ...]) -> str:
    if any(is_coupled(model, turn.objective) for turn in turns):
        return "rows see each other, as is declared or in an nn.SyncBatchNorm: the batch is never cut"
    return f"random numbers that belong to no sample: {'; '.join(strays)}" if strays else ""


def _does_not_take(randomness: SampleRandomness, error: Exception) -> str:
    """Return why a program that failed on a cut is not compared; the error goes on where looks found no reason."""
    if not randomness.survey.failed:
        raise error
    return f"the program does not take every number of samples, {randomness.survey.failed}"


def _first(
    wrong: list[tuple[PiecesDifference, PiecesNumbers]],
    look: _Look,
    turn: Turn,
    guesses: tuple[str, ...],
    is_scaled: bool = False,
    moved: tuple[str, ...] = (),
    is_drawn: bool = False,
) -> FirstDifference:
    """Return the first difference in the shape of those of a layout.

    `guesses` are random numbers whose owner is a guess: where it is wrong, they are others in every cut. `moved` are
    buffers without whose moves the loss is a sum over rows.
    """
    difference, cut = wrong[0]
    names = list(dict.fromkeys(d.name for d, _ in wrong))
    of = f" of {turn.name}" if turn.name else ""
    sizes = [str(size) for size in cut.sizes]
    pieces = " + ".join(sizes if len(sizes) <= MOST_SHOWN else [*sizes[:3], "...", sizes[-1]])
    other = f"where the loss is scaled by {SCALED:g}, and it by as much back" if is_scaled else f"in pieces of {pieces}"
    later = LATER.format(look.way) if look.way is not None else look.meeting.value if look.meeting is not None else ""
    shown = (
        f"{difference.name}{of} of {sum(look.whole.sizes)} rows{later} is {difference.whole:.6g} an item in one piece"
        f" and {difference.cut:.6g} {other}"
    )
    guessed = f"; or these random numbers are not whose they are taken for: {'; '.join(guesses)}" if guesses else ""
    seen = {
        TAKES_GRADIENTS: look.whole.takes_gradients or cut.takes_gradients,
        OUT_OF_PROPORTION: is_scaled,
        MOVES: bool(moved),
        LEFT_BEHIND: bool(look.kept),
        FOR_OTHERS: is_drawn,
    }
    cause = next((one for one, is_so in seen.items() if is_so), NO_SUM)
    names_moved = ", ".join((moved or look.kept)[:LISTED])
    return FirstDifference(
        quantity=QUANTITY, name=f"{difference.name}{of}", step=1, rank=0, relative=difference.relative,
        ratio=difference.ratio, ours=difference.cut, reference=difference.whole, copies_agree=True,
        tensors=tuple(names[:LISTED]), tensors_in_all=len(names), family=cause.family,
        likely=cause.likely.format(shown=shown, names=names_moved) + guessed,
    )  # fmt: skip

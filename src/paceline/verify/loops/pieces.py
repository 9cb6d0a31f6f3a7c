"""The batches of a loop's ranks and micro-batches as one: is the loss a sum over rows, and does each row come once?

A loop takes a batch in pieces. One device that takes the same pieces computes the same numbers, whether rows see each
other or not: contrast with the negatives of one rank, or statistics of one rank's rows, would be told "equal". So the
loss of all rows in one piece is held against the sum of the pieces', once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.errors import ConfigError
from paceline.spec.proof.records import FirstDifference
from paceline.task.models.copied import copied
from paceline.verify.compare.difference import reach_of
from paceline.verify.loops.gradients import dense
from paceline.verify.loops.mistakes import FITS, MicroBatches, sampled
from paceline.verify.loops.unwrapped import named
from paceline.verify.reached.causes import NO_SUM

AnyObjective = Callable[[nn.Module, Any], tuple[Tensor, Any]]
CopyOf = Callable[[nn.Module], nn.Module]
NARROW = 8.0  # units in the last place of the narrowest format: kernels round otherwise by the number of rows
LIKELY = (
    "this loss is not a sum over rows: of {rows} it is {whole:.6g} in one piece, as one device has them, and {cut:.6g}"
    " in the {pieces} pieces that ranks and micro-batches take, where rows see those of their own piece alone, as in"
    " batch statistics (nn.SyncBatchNorm sees all ranks') or in contrast with a rank's own negatives. Where the loop"
    ' brings the rows of all ranks together, objective.coupled = "batch" has one device take them in one piece'
)

LIKELY_GRADIENT = (
    "the gradient of this loss is not a sum over rows, though the loss is: of {rows} its norm is {whole:.6g} in one"
    " piece, as one device has them, and {cut:.6g} in the {pieces} pieces that ranks and micro-batches take. What"
    " scales or normalises gradients on their way back, in a hook or the backward pass of a Function, sees the rows of"
    " its own piece alone"
)
FP32_EPS = torch.finfo(torch.float32).eps  # of anything narrower a gradient is rounded otherwise by the number of rows


def joined(pieces: Sequence[object]) -> object:
    """Return one batch of the rows of all pieces, None where they are not alike but for their number of rows.

    The first dimension of every tensor of a piece must be its rows; what is no tensor must be the same in all.
    """
    found = [tree_flatten(piece) for piece in pieces]
    spec, rows = found[0][1], []
    for leaves, own in found:
        sizes = {leaf.shape[0] if leaf.dim() else None for leaf in leaves if isinstance(leaf, Tensor)}
        if own != spec or len(sizes) != 1 or None in sizes:
            return None
        rows.append(leaves)
    columns = list(zip(*rows, strict=True))
    if not all(_are_alike(column) for column in columns):
        return None
    return tree_unflatten([torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns], spec)


def otherwise_joined(pieces: Sequence[object]) -> Iterator[object]:
    """Yield what `joined` may have to be instead, where rows are no rows alone; None for what cannot be.

    Numbers from zero on that never fall may say which segment or graph of the piece a row belongs to: those of the
    next piece come after them. A list with an entry for each row has those of all pieces, one after the other.
    """
    yield joined([_renumbered(pieces, at) for at in range(len(pieces))])
    yield _joined_by_lists(pieces)


def _renumbered(pieces: Sequence[object], at: int) -> object:
    """Return a piece whose numbers of segments come after those of all pieces before it."""
    columns = zip(*(tree_flatten(piece)[0] for piece in pieces), strict=False)
    before = [sum(int(leaf[-1]) + 1 for leaf in column[:at]) if all(map(_numbers_segments, column)) else 0
              for column in columns]  # fmt: skip
    leaves, spec = tree_flatten(pieces[at])
    return tree_unflatten([leaf + more if more else leaf for leaf, more in zip(leaves, before, strict=False)], spec)


def _numbers_segments(leaf: object) -> bool:
    if not isinstance(leaf, Tensor) or leaf.dim() != 1 or leaf.is_floating_point() or leaf.is_complex():
        return False
    return len(leaf) > 0 and leaf.dtype != torch.bool and int(leaf[0]) == 0 and bool((leaf.diff() >= 0).all())


def _joined_by_lists(pieces: Sequence[Any]) -> object:
    """Return one batch of pieces that are dictionaries or tuples, of tensors with rows and of lists of as many entries.

    None where they are none of these.
    """
    kinds = {type(piece) for piece in pieces}
    if len(kinds) != 1 or not issubclass(kind := kinds.pop(), dict | tuple | list):
        return None
    held = [piece if issubclass(kind, dict) else dict(enumerate(piece)) for piece in pieces]
    rows = [next((len(value) for value in each.values() if isinstance(value, Tensor) and value.dim()), 0)
            for each in held]  # fmt: skip
    if len({tuple(each) for each in held}) != 1 or not any(isinstance(value, list) for value in held[0].values()):
        return None
    whole = {}
    for name in held[0]:
        column = [each[name] for each in held]
        if not all(isinstance(value, list | Tensor) and len(value) == many
                   for value, many in zip(column, rows, strict=True)):  # fmt: skip
            return None
        is_list = isinstance(column[0], list)
        whole[name] = [entry for value in column for entry in value] if is_list else torch.cat(column)
    return whole if issubclass(kind, dict) else kind(whole.values())


def together(batches: Sequence[Sequence[object]]) -> list[list[object]]:
    """Return all rows of a step as one micro-batch of one part, as a coupled objective wants them.

    Raises ConfigError where they cannot be put together.
    """
    whole = joined([piece for part in batches for piece in part])
    if whole is None:
        raise ConfigError(
            "the batches of the ranks cannot be put together into one",
            'objective.coupled = "batch" has one device take all rows in one piece, and these differ in more than'
            " their number of rows, or hold tensors whose first dimension is not the rows",
            "batches whose tensors have the rows as their first dimension, padded to one length",
        )
    return [[whole]]


def not_a_sum(
    module: nn.Module,
    copy: CopyOf,
    objective: AnyObjective,
    pieces: Sequence[object],
    parts: MicroBatches,
    dtype: str,
    eps: Callable[[], float],
) -> FirstDifference | None:
    """Return what says that a loss, or its gradient, is no sum over rows; None where it is, or none can tell.

    `module` is what the `parts` of the pieces were computed with, `copy` makes copies of it, and `eps()` is a unit in
    the last place of the narrowest format in it. A loss that is another one when it is computed again says nothing, nor
    does one that is a sum over columns: where time comes first, as in torch's recurrent layers, these are the samples.
    """
    whole = joined(pieces) if len(pieces) > 1 else None
    if whole is None:
        return None
    found = _apart(module, copy, objective, pieces, whole, parts, dtype, eps)
    if found is not None and any(
        _is_sum(module, copy, objective, other, parts, dtype) for other in otherwise_joined(pieces)
    ):
        return None
    return found


def _is_sum(
    module: nn.Module, copy: CopyOf, objective: AnyObjective, whole: object, parts: MicroBatches, dtype: str
) -> bool:
    """Return whether loss and gradient of the whole are the sums of the pieces'."""
    if whole is None:
        return False
    cut = torch.stack(parts.gradients).sum(0)
    try:
        loss = abs(_loss(module, objective, whole) - sum(parts.losses))
        gradient = float((_gradient(copy(module), objective, whole) - cut).norm())
    except Exception:  # such as of labels that were taken for numbers of segments
        return False
    return loss <= FITS[dtype] * sum(map(abs, parts.losses)) and gradient <= FITS[dtype] * float(cut.norm())


def _apart(
    module: nn.Module,
    copy: CopyOf,
    objective: AnyObjective,
    pieces: Sequence[object],
    whole: object,
    parts: MicroBatches,
    dtype: str,
    eps: Callable[[], float],
) -> FirstDifference | None:
    """Return what says that a loss, or its gradient, is another one of the pieces than of the whole."""
    rows = next(len(leaf) for leaf in tree_flatten(whole)[0] if isinstance(leaf, Tensor))
    known = {"rows": f"{rows} rows", "pieces": len(pieces)}
    cut = sum(parts.losses)
    try:
        found = _loss(module, objective, whole)
        reach = reach_of(float(torch.stack(parts.gradients).sum(0).norm()), named(module).values())
        far = abs(found - cut) / max(abs(found), sum(map(abs, parts.losses)), reach, 1e-300)
        if not far > FITS[dtype] or not far > NARROW * eps():
            if eps() > FP32_EPS:
                return None
            return _gradient_not_a_sum(lambda: copy(module), objective, whole, parts, dtype, known)
        if abs(_loss(module, objective, whole) - found) > FITS[dtype] * abs(found):
            return None
        if _sums_columns(module, objective, pieces, dtype):
            return None
    except Exception:  # whatever an objective says to other numbers of rows than its own
        return None
    return _told("loss", found, cut, far, LIKELY.format(**known, whole=found, cut=cut))


def _gradient_not_a_sum(
    made: Callable[[], nn.Module],
    objective: AnyObjective,
    whole: object,
    parts: MicroBatches,
    dtype: str,
    known: dict[str, object],
) -> FirstDifference | None:
    """Return what says that the gradient of a loss is no sum over rows, though the loss itself is."""
    cut, found = torch.stack(parts.gradients).sum(0), _gradient(made(), objective, whole)
    ours, size = float(cut.norm()), float(found.norm())
    far = float((found - cut).norm()) / max(ours, size, 1e-300)
    if not far > FITS[dtype]:
        return None
    if float((_gradient(made(), objective, whole) - found).norm()) > FITS[dtype] * size:
        return None
    return _told("gradient", size, ours, far, LIKELY_GRADIENT.format(**known, whole=size, cut=ours))


def _gradient(own: nn.Module, objective: AnyObjective, batch: object) -> Tensor:
    """Return values of the gradient of a batch in one piece, as the parts of a step have them."""
    own.zero_grad(set_to_none=True)
    objective(own, batch)[0].backward()
    weights = named(own)
    return sampled({name: dense(p.grad) for name, p in weights.items() if p.grad is not None}, weights)


def _told(name: str, found: float, cut: float, far: float, likely: str) -> FirstDifference:
    return FirstDifference(
        quantity="whole batch", name=name, step=1, rank=0, relative=far, ratio=cut / found if found else math.nan,
        ours=cut, reference=found, copies_agree=True, tensors=(name,), tensors_in_all=1,
        family=NO_SUM.family, likely=likely,
    )  # fmt: skip


def _sums_columns(module: nn.Module, objective: AnyObjective, pieces: Sequence[object], dtype: str) -> bool:
    """Return whether the loss of a piece is the sum of that of its first column and of all others."""
    for piece, cut in ((piece, _by_columns(piece)) for piece in pieces):
        if cut is None:
            continue
        try:
            whole, parts = _loss(module, objective, piece), [_loss(module, objective, each) for each in cut]
        except Exception:  # columns are features, of which a model wants all
            return False
        return abs(sum(parts) - whole) <= FITS[dtype] * max(abs(whole), sum(map(abs, parts)))
    return False


def _by_columns(piece: object) -> tuple[object, object] | None:
    """Return a piece's first column and its others; None where its tensors do not all have the same number, over 1."""
    leaves, spec = tree_flatten(piece)
    sizes = {leaf.shape[1] if leaf.dim() > 1 else 0 for leaf in leaves if isinstance(leaf, Tensor)}
    if len(sizes) != 1 or min(sizes) < 2:
        return None

    def of(columns: slice) -> object:
        return tree_unflatten([x[:, columns].contiguous() if isinstance(x, Tensor) else x for x in leaves], spec)

    return of(slice(0, 1)), of(slice(1, None))


def _loss(module: nn.Module, objective: AnyObjective, batch: object) -> float:
    """Return the loss of a batch in one piece, without a graph where the objective wants none."""
    try:
        with torch.no_grad():
            return float(objective(copied(module), batch)[0])
    except RuntimeError:  # it goes back itself
        return float(objective(copied(module), batch)[0].detach())


def require_different(batches: Sequence[object], number: int) -> None:
    """Raise ConfigError where two ranks have the same batch: one device takes every row of a step once."""
    for (rank, one), (other, theirs) in combinations(enumerate(batches), 2):
        if _is_same(one, theirs):
            raise ConfigError(
                f"ranks {rank} and {other} have the same batch in step {number}",
                "every rank is a part of its own, and one device takes each row of a step once",
                "rows of its own for every rank (a DistributedSampler), or an equal part=... on ranks that share"
                " theirs, as a tensor-parallel group does; part=rank says that they are meant to be the same",
            )


def _are_alike(column: Sequence[object]) -> bool:
    first = column[0]
    if isinstance(first, Tensor):
        return all(isinstance(x, Tensor) and (x.shape[1:], x.dtype) == (first.shape[1:], first.dtype) for x in column)
    return all(type(x) is type(first) and bool(x == first) for x in column)


def _is_same(one: object, other: object) -> bool:
    (ours, spec), (theirs, their_spec) = tree_flatten(one), tree_flatten(other)
    pairs = list(zip(ours, theirs, strict=False))
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor)]
    rows = any(a.numel() for a, _ in tensors)  # of no rows none is taken twice
    return spec == their_spec and rows and all(torch.equal(a.cpu(), b.cpu()) for a, b in tensors)

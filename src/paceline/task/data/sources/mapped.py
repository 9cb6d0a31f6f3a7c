"""MapSource: any map-style data set as a source, its random augmentation a pure function of (seed, position)."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from paceline.config.given import not_streamed, reads_by_number
from paceline.errors import DataError, suggestion
from paceline.task.data.order.permutation import keyed
from paceline.task.data.undrawn import UndrawnGenerators

Kind = TypeVar("Kind")

Collate = Callable[..., Any]
UNITS = ("tokens", "samples")
PROBES = 4  # samples whose content goes into the fingerprint
LISTED_PARTS = 4  # of a list of alike ones: more are counted


class MapSource:
    """Wraps a data set with `__len__` and `__getitem__`; rows are collated as by torch's DataLoader, or by `collate`.

    A data set may declare `items_per_sample`, `unit` ("tokens" or "samples"), `vocab` and `fingerprint`; without
    the last the fingerprint is a hash of the length and of four samples. It may have a `collate` of its own.

    `collate(samples)` or `collate(samples, ids)` returns a batch of samples of any shape. How far it pads depends on
    the samples that meet in a micro-batch, so padding must not count: masks, and labels of -100.

    Before each row Python's, numpy's and torch's CPU generators are seeded from (seed, position), and set back
    afterwards: the row is the same whichever rank reads it and after any resume. Python's and numpy's are not, as long
    as no row draws from them; the first row that is read shows whether rows follow from their state. The generators
    are global, so read it from the thread that trains. Generators that a data set owns are out of reach.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate | None = None) -> None:
        """Wrap `dataset`. Raises DataError where it is no map-style data set, is empty, or fails."""
        if isinstance(dataset, Mapping) and 0 not in dataset:
            raise DataError(
                f"{type(dataset).__name__} is not a map-style data set",
                f"it holds {', '.join(map(str, dataset)) or 'nothing'} by name, and samples are taken by their number",
                "one of them, or a pair of them (train, validation)",
            )
        reads = "__getitem__" if not hasattr(dataset, "__getitems__") else "__getitems__"
        missing = [name for name in ("__len__", reads) if not hasattr(dataset, name)]
        if reads == "__getitem__" and reads not in missing and not reads_by_number(dataset):
            missing.append(reads)  # torch's IterableDataset has one that raises
        if missing:
            raise DataError(
                f"{type(dataset).__name__} is not a map-style data set",
                f"it has no {' and no '.join(missing)}; the order of samples needs to reach any of them by its number",
                f"{not_streamed(dataset)}give it both: list(...) of what it gives in turn, where that fits into memory;"
                " or write it as text, JSONL or Parquet",
            )
        try:
            self.samples = len(dataset)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{type(dataset).__name__} does not know its length", str(error), "define __len__"
            ) from error
        if self.samples < 1:
            raise DataError(f"{type(dataset).__name__} is empty", "its length is 0", "give it a sample")
        self.dataset, self.seed = dataset, seed
        # Whether a row was seen to draw from Python's or numpy's generators, or to follow from where they stand.
        self._draws, self._is_looked_at, self._undrawn = False, False, UndrawnGenerators()
        # One at a time all the same: what is random in a row must not depend on the rows beside it.
        self._in_lists = hasattr(dataset, "__getitems__") and _lacks_single_items(dataset)
        own = getattr(dataset, "collate", None)
        self.collate: Collate | None = collate or (own if callable(own) else None)
        # Makes batches of its kind as wide as each other; not those that a function of the user's has made.
        self.filled_alike = None if collate else getattr(dataset, "filled_alike", None)
        self.items_per_sample = _declared(dataset, "items_per_sample", int) or 1
        self.unit = _declared(dataset, "unit", str) or "samples"
        self.vocab: int | None = _declared(dataset, "vocab", int)
        if self.unit not in UNITS:
            raise DataError(
                f"{type(dataset).__name__}.unit = '{self.unit}' is not a unit",
                "it says what the loss counts",
                suggestion(self.unit, UNITS),
            )
        self.lengths = self._lengths()
        # Of samples that are filled up to the longest beside them, the length of the longest of all.
        fills = self.lengths is not None and bool(getattr(dataset, "fills_up", False))
        self.longest = int(self.lengths.max()) if fills and self.lengths is not None else 0
        self.fingerprint = _declared(dataset, "fingerprint", str) or self._probe()

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the rows, collated. Without positions, a row's random numbers follow from its id."""
        places = np.asarray(ids if positions is None else positions)
        assert len(places) == len(ids), "as many positions as ids"
        seeds, indices = keyed(self.seed, places.astype(np.uint64)).tolist(), np.asarray(ids).tolist()
        if not self._draws and self._undrawn.begin():
            batch = self._read_undrawn(indices, seeds)
            if not self._draws:
                return batch
        rows = []
        with generators_kept():
            for index, seed in zip(indices, seeds, strict=True):
                random.seed(seed)
                np.random.seed(seed % 2**32)
                torch.default_generator.manual_seed(seed)
                rows.append(self.row(index))
            return self._collate(rows, indices)

    def _read_undrawn(self, indices: list[int], seeds: list[int]) -> Any:
        """Return the rows, collated, of a data set that draws from no generator of Python or numpy: few do.

        Where it does after all, that is noted, and what is returned does not count. torch's generator is cheap to seed.
        """
        kept, rows = torch.default_generator.get_state(), []
        try:
            for index, seed in zip(indices, seeds, strict=True):
                torch.default_generator.manual_seed(seed)
                rows.append(self.row(index))
            if rows and not self._is_looked_at:
                self._is_looked_at, self._draws = True, self._follows_state(indices[0], seeds[0], rows[0])
            return None if self._draws else self._collate(rows, indices)
        except DataError:
            self._draws = self._undrawn.were_drawn_from()
            if not self._draws:
                raise
            return None  # it may have come of what was drawn
        finally:
            torch.default_generator.set_state(kept)
            self._draws = self._undrawn.were_drawn_from() or self._draws  # in this order: it sets them back

    def _follows_state(self, index: int, seed: int, row: object) -> bool:
        """Return whether a row is another one where Python's and numpy's generators stand elsewhere.

        It may read their state, and draw nothing. Once for a data set: a later row that begins to do so is not seen.
        """
        with generators_kept():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            again = self.row(index)
            try:
                return list(_content(again)) != list(_content(row))
            except RuntimeError:  # sparse and nested tensors, which a collate makes dense, show no bytes
                return False

    def _lengths(self) -> npt.NDArray[np.int64] | None:
        """Return the lengths that the data set declares of its samples. Raises DataError where they are not as many."""
        declared = getattr(self.dataset, "lengths", None)
        if declared is None or callable(declared):
            return None
        lengths = np.asarray(declared)
        if lengths.shape != (self.samples,) or not np.issubdtype(lengths.dtype, np.number):
            raise DataError(
                f"{type(self.dataset).__name__}.lengths are not the lengths of its samples",
                f"they have the shape {lengths.shape}, and there are {self.samples:,} samples",
                "one number for each sample, in their order",
            )
        bad = ~(np.isfinite(lengths) & (lengths >= 0)) if np.isrealobj(lengths) else np.ones(self.samples, dtype=bool)
        if bad.any() or not lengths.any():
            at = int(np.flatnonzero(bad)[0]) if bad.any() else 0
            raise DataError(
                f"{type(self.dataset).__name__}.lengths are not the lengths of its samples",
                f"lengths[{at}] is {lengths[at]}" if bad.any() else "all of them are 0",
                "numbers of items from 0 on, of which one at least is above 0",
            )
        return lengths.astype(np.int64)

    def row(self, index: int) -> Any:
        """Return a sample of the data set. Raises DataError where it cannot be read."""
        try:
            return self.dataset.__getitems__([index])[0] if self._in_lists else self.dataset[index]
        except Exception as error:  # a user's data set may raise anything; the traceback stays attached
            raise DataError(
                f"sample {index:,} of {type(self.dataset).__name__} cannot be read",
                f"{type(error).__name__}: {error}",
                f"dataset[{index}] shows it",
            ) from error

    def _collate(self, rows: list[object], ids: list[int]) -> object:
        if self.collate is not None:
            return self._collate_as_asked(self.collate, rows, ids)
        try:
            return default_collate(rows)
        except (TypeError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(
                f"samples of {type(self.dataset).__name__} do not make a batch",
                f"{_unlike(rows, ids)}{type(error).__name__}: {error}",
                "return tensors or numbers of one shape, in dicts or tuples of one form; of samples of any shape a "
                "function collate(samples) makes a batch: dataset.collate = pad in Python, task.data.collate in a file",
            ) from error

    def _collate_as_asked(self, collate: Collate, rows: list[object], ids: list[int]) -> object:
        try:
            return collate(rows, ids) if _takes_ids(collate) else collate(rows)
        except Exception as error:  # a user's function may raise anything; the traceback stays attached
            raise DataError(
                f"samples {', '.join(map(str, ids[:4]))} of {type(self.dataset).__name__} cannot be collated",
                f"{type(error).__name__}: {error}",
                "call it by hand with a list of these samples",
            ) from error

    def _probe(self) -> str:
        """Return a hash of the length and the content of a few samples."""
        digest = hashlib.blake2b(f"{self.samples}".encode(), digest_size=16)
        chosen = np.unique(np.linspace(0, self.samples - 1, PROBES).astype(np.int64))
        for index in chosen:
            for part in _content(self.read(np.array([index]))):
                digest.update(part)
        return digest.hexdigest()


def _unlike(rows: list[object], ids: list[int]) -> str:
    """Return "sample 17 is [0] where sample 3 is [20]; " of the first row of another form; "" where all are alike."""
    forms = [_form(row) for row in rows]
    odd = next((at for at, form in enumerate(forms) if form != forms[0]), None)
    return "" if odd is None else f"sample {ids[odd]:,} is {forms[odd]} where sample {ids[0]:,} is {forms[0]}; "


def _form(row: object) -> str:
    """Return the shapes of what a row holds, as text: "{x: [20], y: [1]}"; the type of what has none.

    Of a list of numbers, which has thousands, it is "512 x int".
    """
    if isinstance(row, Mapping):
        return f"{{{', '.join(f'{name}: {_form(value)}' for name, value in row.items())}}}"
    if isinstance(row, list | tuple):
        forms = [_form(part) for part in row]
        if len(forms) >= LISTED_PARTS and len(set(forms)) == 1:
            return f"{len(forms):,} x {forms[0]}"
        return f"({', '.join(forms)})"
    shape = getattr(row, "shape", None)
    return str([*shape]) if isinstance(shape, tuple) else type(row).__name__


def _lacks_single_items(dataset: object) -> bool:
    """Return whether a data set has no `__getitem__` of its own; torch's base class has one that only raises."""
    own = getattr(type(dataset), "__getitem__", None)
    return own is None or own is torch.utils.data.Dataset.__getitem__


def _declared(dataset: object, name: str, kind: type[Kind]) -> Kind | None:
    """Return what the data set says of itself. A `vocab` that is an object of its own, say, is not meant for us."""
    value = getattr(dataset, name, None)
    return value if isinstance(value, kind) else None


def _takes_ids(collate: Collate) -> bool:
    """Return whether a function asks for the samples' ids as its second argument."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [one for one in inspect.signature(collate).parameters.values() if one.kind in positional]
    return len(found) > 1 and found[1].default is inspect.Parameter.empty


def _content(batch: object, within: tuple[object, ...] = ()) -> Iterator[bytes]:
    """Yield bytes that stand for a collated batch: tensors by type, shape and values, the rest by its text.

    An object whose text says nothing but where it lies in memory stands for what it holds, but for those `within` which
    it lies.
    """
    if isinstance(batch, torch.Tensor):
        yield f"{batch.dtype} {tuple(batch.shape)}".encode()
        flat = batch.detach().cpu().reshape(-1).contiguous()
        yield flat.view(torch.uint8).numpy().tobytes() if batch.numel() else b""
    elif isinstance(batch, Mapping):
        for name in batch:
            yield str(name).encode()
            yield from _content(batch[name], within)
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _content(part, within)
    elif type(batch).__repr__ is object.__repr__ and type(batch).__str__ is object.__str__:
        yield type(batch).__qualname__.encode()
        if not any(batch is each for each in within):
            yield from _content(getattr(batch, "__dict__", {}), (*within, batch))
    else:
        yield str(batch).encode()


@contextmanager
def generators_kept() -> Iterator[None]:
    """Set the global generators back to where they were. Those of accelerators are not touched in between."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])

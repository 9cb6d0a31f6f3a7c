"""Fit the constants of the cost formulas on tables of measurements: few numbers, the same for every row and model.

The logarithms of the constants are moved by damped Gauss-Newton steps (Levenberg 1944, Marquardt 1963) to where the sum
of Huber's losses (1964) of log(forecast / measured) is smallest, so that a row that is off for reasons of its own pulls
no harder than one that is off by `HUBER`. Every file counts as one of at most `ROWS_PER_FILE` rows, whatever its
length. Where the data say nothing about a constant, it stays where it started. Intervals of time come from what
constants fitted without a table miss of it, those of memory from what is left over.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from paceline.backtest.fitting.descent import STEP, descend, logarithms, nearby, rounded, with_values
from paceline.backtest.fitting.generations import COLLECTED, SharesTold, blended, shares_told
from paceline.backtest.price import (
    Priced,
    alike_cases,
    allocated_and_kept,
    price_cases,
    seconds_of_cases,
    software_of,
)
from paceline.backtest.rows import Case, Reader, with_one_micro_batch
from paceline.backtest.schema import CollectiveRow, StepRow
from paceline.backtest.step_parts import compare_collectives
from paceline.backtest.table import MeasuredTable, read_table
from paceline.errors import DataError
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.constants import BY_FAMILY, FAMILIES, Constants, FittedOn, constants_text, family_of
from paceline.plan.cost.power_limit import pooled

Item = TypeVar("Item")
FITTED = ("operand_traffic", "unfused_moves", "unfused_launches", "memory_share", "launch_seconds", "node_link_share",
          "network_link_share", "collective_seconds", "pipeline_wait_seconds", "flush_seconds",
          "node_hop_seconds", "network_hop_seconds", "overlap", "fixed_seconds")  # fmt: skip
ROWS_PER_FILE = 60
FEWEST = 3  # rows of a table that says how far off forecasts are
HELD_TABLES = 0.8  # part of tables in which an interval holds what it says
# Links that are no switch: groups of some sizes share them unevenly, which no share of a rate describes.
UNSWITCHED = ("V100",)

# Where every fit starts, and what a constant that no row tells of keeps: round numbers of the orders that data sheets,
# the roofline and nccl-tests show. Not the constants of an earlier fit, or fits of the same rows would wander.
START = Constants(
    share=dict.fromkeys((*FAMILIES, "other"), 0.65),
    # FlashAttention-2 on H100 reaches 335 TFLOP/s (Dao 2023, arXiv:2307.08691, section 4.1).
    attention={**dict.fromkeys((*FAMILIES, "other"), 0.75), "hopper": 0.57},
    operand_traffic=0.5,
    unfused_moves=2.0,
    unfused_launches=1.5,
    memory_share=0.85,
    launch_seconds=2e-5,
    node_link_share=0.75,
    network_link_share=0.75,
    collective_seconds=2e-5,
    pipeline_wait_seconds=2e-4,
    flush_seconds=1.0,
    node_hop_seconds=1e-6,
    network_hop_seconds=1.5e-5,
    overlap=0.8,
    fixed_seconds=3e-3,
    allocator_share=0.03,
    time_80=0.2,
    time_95=0.4,
    memory_80=0.15,
    memory_95=0.3,
)


@dataclass(frozen=True)
class Residuals:
    """What the forecast of a file's rows misses: log(forecast / measured)."""

    file: str
    values: Floats


@dataclass(frozen=True)
class Fit:
    """The fitted constants, and what they miss."""

    constants: Constants
    residuals: tuple[Residuals, ...]
    memory: tuple[Residuals, ...]

    def text(self) -> str:
        """Return the constants as the file that the planner reads."""
        return constants_text(self.constants)

    def lines(self) -> list[str]:
        """Return what was fitted on what, and how well, for people."""
        lines = [f"constants {self.constants.sha256}"]
        for what, parts in (("time", self.residuals), ("memory", self.memory)):
            for part in parts:
                sizes = np.abs(np.expm1(part.values))
                lines.append(
                    f"{what:8}{part.file:40}{len(part.values):6} rows, mean error {np.mean(sizes):.1%}, median "
                    f"{np.median(sizes):.1%}, bias {np.expm1(np.median(part.values)):+.1%}"
                )
        return lines


def fit(paths: Sequence[Path], start: Constants = START) -> Fit:
    """Return the constants fitted on tables, from `start` on. Raises DataError where no row can be fitted on."""
    return Fitting([read_table(path) for path in paths], Reader(), start).fit()


@dataclass(frozen=True)
class Fitting:
    """Tables to be fitted on, and where their fits start."""

    tables: Sequence[MeasuredTable]
    reader: Reader
    start: Constants = START

    @cached_property
    def parts(self) -> list[FittedTable]:
        """The tables as the fit sees them. Raises DataError where none can be fitted on."""
        found = [part for table in self.of_one if (part := _part(table, self.reader)) is not None]
        if not found:
            raise DataError(
                "nothing to fit on", "no row of these files has a time that can be forecast", "other tables"
            )
        return found

    @cached_property
    def of_one(self) -> Sequence[MeasuredTable]:
        """The tables that are no collections of strangers' rows; all, where there are none but these."""
        return [table for table in self.tables if not _is_collection(table)] or self.tables

    @cached_property
    def told(self) -> SharesTold:
        """What the sources of collections say of generations, at the optimum of the other tables."""
        collections = [table for table in self.tables if table not in self.of_one]
        cases = [case for table in collections for case in _cases(table, self.reader, "step_seconds")]
        return shares_told(cases, _pooled(self._optimum, self.parts)) if cases else {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What is fitted: shares of the generations that the tables have, and the rest."""
        families = sorted(frozenset[str]().union(*(part.generations for part in self.parts)))
        return (*(f"{name}.{family}" for name in BY_FAMILY for family in families), *FITTED)

    @cached_property
    def constants(self) -> Constants:
        """The constants of all tables, those of allocators and intervals aside."""
        return self._told_too(_pooled(self._optimum, self.parts), self.parts)

    def _told_too(self, constants: Constants, parts: Sequence[FittedTable], without: Collection[str] = ()) -> Constants:
        """Return constants whose shares the sources of collections have a say in, but for those `without` it."""
        shares = blended(constants.share, rows_of_generations(parts), self.told, without)
        return replace(constants, share={family: rounded(share) for family, share in shares.items()})

    @cached_property
    def _optimum(self) -> Constants:
        """The constants at the least loss over all tables, before generations tell of each other."""
        return descend(self.names, self.start, [part.missed for part in self.parts])

    def without(self, left_out: Collection[FittedTable]) -> Constants:
        """Return the constants fitted without some tables; what no other table tells of stays where fits start.

        The share of a generation that no other table has is what the other generations say of it.

        By the slopes at the full fit: a table's absence moves the constants little, so the others' misses are taken to
        change in proportion, and the loss is minimised by weighing rows anew until it rests.
        """
        others = [place for place, part in enumerate(self.parts) if part not in left_out]
        if len(others) == len(self.parts):
            return self.constants
        if not others:
            return self.start
        found = nearby(self.names, self.start, self._optimum, [self._slopes[place] for place in others])
        kept, gone = [self.parts[place] for place in others], {name for part in left_out for name in part.sources}
        return self._told_too(_pooled(with_values(self._optimum, self.names, found), kept), kept, gone)

    @cached_property
    def _slopes(self) -> list[tuple[Floats, Floats]]:
        """What every table misses at the full fit, and how that changes with each constant's logarithm."""
        at = logarithms(self._optimum, self.names)
        here = [part.missed(self._optimum) for part in self.parts]
        moved = [
            [part.missed(with_values(self._optimum, self.names, at + STEP * row)) for part in self.parts]
            for row in np.eye(len(at))
        ]
        return [
            (misses, np.column_stack([(found[place] - misses) / STEP for found in moved]))
            for place, misses in enumerate(here)
        ]

    def fit(self) -> Fit:
        """Return the constants with the intervals that left-out tables give."""
        constants = self.constants
        held = [(table.file, cases) for table in self.of_one if (cases := _held(table, self.reader))]
        constants = replace(constants, allocator_share=_allocator_share(held, constants))
        residuals = tuple(Residuals(part.file, part.missed(constants)) for part in self.parts)
        memory = tuple(Residuals(name, _memory_misses(cases, constants)) for name, cases in held)
        unseen = self._left_out() or residuals
        time_80, time_95 = (quantile(unseen, share) for share in (0.80, 0.95))
        memory_80, memory_95 = (quantile(memory, share) for share in (0.80, 0.95)) if memory else (0.15, 0.30)
        constants = replace(
            constants,
            time_80=time_80, time_95=time_95, memory_80=memory_80, memory_95=memory_95,
            files=tuple(Path(table.file).name for table in self.tables), date=datetime.date.today().isoformat(),
            seen=seen_in(self.parts),
        )  # fmt: skip
        return Fit(constants, residuals, memory)

    def _left_out(self) -> list[Residuals]:
        """Return what constants fitted on all others miss of each table of steps: what a new table is to expect.

        A table that alone tells of a generation has nothing else to be forecast from, and is not among them.
        """
        found = []
        for part in self.parts:
            known = frozenset[str]().union(*(other.generations for other in self.parts if other is not part))
            if part.generations and part.generations <= known:
                found.append(Residuals(part.file, part.missed(self.without([part]))))
        return found


def _pooled(constants: Constants, parts: Sequence[FittedTable]) -> Constants:
    """Return constants whose shares of generations are drawn together, by how many sources tell of each."""
    shares = pooled(constants.share, _sources(parts))
    return replace(constants, share={family: rounded(share) for family, share in shares.items()})


def rows_of_generations(parts: Sequence[FittedTable]) -> dict[str, int]:
    """Return how many rows of training steps the tables have of each generation."""
    return dict(Counter(family_of(case.cluster.device.name) for part in parts for case in part.cases))


def _is_collection(table: MeasuredTable) -> bool:
    """Return whether a table has rows of several sources, and so few of each."""
    return len({row.source for row in table.rows if isinstance(row, StepRow)}) >= COLLECTED


def _sources(parts: Sequence[FittedTable]) -> dict[str, int]:
    """Return how many sources measured each generation."""
    told = {family: {source for part in parts if family in part.generations for source in part.sources}
            for family in FAMILIES}  # fmt: skip
    return {family: len(sources) for family, sources in told.items() if sources}


def seen_in(parts: Sequence[FittedTable]) -> FittedOn:
    """Return what the rows of tables had."""
    cases = [case for part in parts for case in part.cases]
    return FittedOn(
        families=tuple(sorted({family_of(case.cluster.device.name) for case in cases} - {"other"})),
        precisions=tuple(sorted({case.plans[0].precision for case in cases})),
        programs=tuple(sorted({software_of(case).name for case in cases})),
        devices=max((case.cluster.devices for case in cases), default=1),
        once=tuple(family for family, sources in sorted(_sources(parts).items()) if sources == 1),
    )


@dataclass(frozen=True)
class FittedTable:
    """The rows of one table as the fit sees them."""

    file: str
    missed: Callable[[Constants], Floats]  # what constants miss of its rows: log(forecast / measured)
    generations: frozenset[str]  # that its training steps ran on; none: it has single collectives
    cases: tuple[Case, ...] = ()  # its training steps, each with the one plan that it is taken to have run

    @property
    def sources(self) -> frozenset[str]:
        """Where the rows are from."""
        return frozenset(case.row.source for case in self.cases)


def _part(table: MeasuredTable, reader: Reader) -> FittedTable | None:
    """Return what constants miss of a table's rows, None for a table that says nothing of them."""
    if table.kind == "collectives":
        rows = _thinned([row for row in cast(tuple[CollectiveRow, ...], table.rows) if _tells(row)])

        def missed(constants: Constants) -> Floats:
            found, _ = compare_collectives(rows, reader.machines, constants)
            return np.log([item.forecast / item.measured for item in found])

        return FittedTable(table.file, missed, frozenset()) if rows else None
    cases = _settled(_thinned(_cases(table, reader, "step_seconds")))
    if not cases:
        return None
    generations = frozenset(family_of(case.cluster.device.name) for case in cases)
    measured, groups = np.array([case.step_seconds for case in cases], dtype=np.float64), alike_cases(cases)

    def missed_by(constants: Constants) -> Floats:
        return np.log(seconds_of_cases(cases, constants, groups) / measured)

    return FittedTable(table.file, missed_by, generations, tuple(cases))


def _settled(cases: Sequence[Case]) -> list[Case]:
    """Return the cases with the plan that each is taken to have run: the fit moves constants, not plans."""
    priced = price_cases(cases)
    return [replace(case, plans=(item.plan,)) for case, item in zip(cases, priced, strict=True)
            if isinstance(item, Priced)]  # fmt: skip


def _tells(row: CollectiveRow) -> bool:
    """Return whether a collective tells of a share of its links: their rate is known, and a switch joins them."""
    across = (row.nodes or 1) > 1
    return not across and not any(name in row.accelerator for name in UNSWITCHED)


def _cases(table: MeasuredTable, reader: Reader, measured: str) -> list[Case]:
    """Return the cases of a table's rows that measured something and can be forecast."""
    if table.kind != "steps":
        return []
    cases = [reader.case(row)[0] for row in cast(tuple[StepRow, ...], table.rows)]
    alike = with_one_micro_batch([case for case in cases if case is not None])
    whole = [case for case in alike if case.profile.trained_parameters == case.profile.parameters]  # no adapters
    found = [case for case in whole if getattr(case, measured)]
    return [case for case, priced in zip(found, price_cases(found), strict=True) if isinstance(priced, Priced)]


def _held(table: MeasuredTable, reader: Reader) -> list[Case]:
    """Return the cases of a table's rows that measured memory and say of which micro-batch."""
    return [case for case in _cases(table, reader, "memory_bytes") if case.row.micro_batch]


def _thinned(items: list[Item]) -> list[Item]:
    """Return at most ROWS_PER_FILE of the items, evenly spread."""
    return items[:: -(-len(items) // ROWS_PER_FILE)] if items else []


def _memory_misses(cases: Sequence[Case], constants: Constants) -> Floats:
    priced = [item for item in price_cases(cases, constants) if isinstance(item, Priced)]
    measured = np.array([case.memory_bytes for case in cases], dtype=np.float64)
    return np.log(np.array([item.memory_bytes for item in priced]) / measured)


def _allocator_share(held: Sequence[tuple[str, Sequence[Case]]], constants: Constants) -> float:
    """Return what allocators reserve beyond what is allocated: of each table the median row, of those the median.

    So no long table decides it alone.
    """
    shares = []
    for _, cases in held:
        reserved = [case for case in cases if case.memory_kind == "reserved"]
        found = zip(reserved, allocated_and_kept(reserved, constants), strict=True)
        of_table = [
            (case.memory_bytes - allocated) / kept * constants.allocator_share
            for case, (allocated, kept) in found
            if kept and case.memory_bytes
        ]
        shares += [float(np.median(of_table))] if len(of_table) >= FEWEST else []
    return rounded(max(0.0, float(np.median(shares)))) if shares else constants.allocator_share


def quantile(parts: Sequence[Residuals], share: float) -> float:
    """Return the half-width that holds a share of the rows of so many in a hundred tables.

    Rows of one table miss alike, so a new table is like a draw from tables, not from rows: of each, the half-width that
    holds a share of its rows; of those, the quantile over tables. Tables of a row or two say little of a quantile.
    """
    widths = [np.quantile(np.abs(part.values), share) for part in parts if len(part.values) >= FEWEST]
    return rounded(float(np.quantile(widths or [np.quantile(np.abs(parts[0].values), share)], HELD_TABLES)))

"""Misuses of the public interface: values that no option or argument can hold, and draws of calls with one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import paceline
from paceline.config.shape import Option, ShapedTable
from paceline.spec.load import table

TASK = paceline.Task(model="llama-1m", global_batch="4 samples", stop="2 steps")

# What no option of a kind can hold. Nothing of it is read from the code that is tested.
NEVER: list[Any] = [object(), {1, 2}, b"7", 1j, lambda: 3.0, range(3), Exception("no")]
WRONG: dict[str, list[Any]] = {
    "text": [7, 1.5, True, None, ["a"], {"a": 1}],
    "texts": ["*.py", 7, [7], [None], {"a": "b"}, None, True],
    "whole": ["7", 1.5, True, None, [7], 10**400, float("nan"), float("inf"), "", {"a": 1}],
    "number": ["1e-3", True, [0.1], float("nan"), float("inf"), float("-inf"), {"a": 1}, ""],
    "flag": [0, 1, "true", "yes", 0.0, None, []],
    "amount": [300, 1.5, "300", "300 stepz", "-3 steps", "0 steps", "steps", "", True, [], "1e999 steps", "nan steps"],
    "duration": [7200, 1.5, "7200", "2 hors", "-1 h", "", True, [], "1e999 s"],
    "bytes": ["7", "12 parsecs", "", True, 1.5, [], "-1 GiB", 10**400],
    "free": [7, "x", [1], None, True, {3: 4}, {"a": float("nan")}],
    "tables": [7, "x", {"a": 1}, None, [7], ["x"], [{"no_such": 1}]],
}
Way = tuple[tuple[str, bool], ...]  # from the spec to a table: names, and whether each is a list of tables


def every_table(of: ShapedTable, way: Way = ()) -> Iterator[tuple[Way, ShapedTable]]:
    """Yield every table below a table, lists of tables too, and the way to it."""
    for name, member in of.members.items():
        inner = member if isinstance(member, ShapedTable) else member.item
        if inner is not None:
            there = (*way, (name, inner is not member))
            yield there, inner
            yield from every_table(inner, there)


TABLES = list(every_table(table()))


def wrong_value(member: Option | ShapedTable, draw: random.Random) -> Any:
    """Return a value that the option cannot hold, by its kind and its rules."""
    return draw.choice(wrong_values(member))


def wrong_values(member: Option | ShapedTable) -> list[Any]:
    """Return values that the option cannot hold, by its kind and its rules."""
    if isinstance(member, ShapedTable):
        return [7, None, True, 1.5, iter(()), {"no_such_option": 1}, {3: 4}, b"x"]
    wrong = list(WRONG[member.kind])
    wrong += [f"{member.default}x"] if member.choices else []
    if member.kind in ("whole", "number"):
        wrong += [member.minimum - 1] if member.minimum is not None else []
        wrong += [member.above] if member.above is not None else []
        wrong += [member.maximum + 1] if member.maximum is not None else []
    return [value for value in (*wrong, *NEVER) if not _fits(member, value)]


def _fits(member: Option, value: Any) -> bool:
    """Return whether an option of this kind may hold the value after all: a function, or a data set such as a list."""
    is_data_set = "__len__ __getitem__" in member.objects and isinstance(value, list | range)
    return (value is None and member.optional) or bool(member.objects and callable(value)) or is_data_set


def misspelt(name: str, draw: random.Random) -> str:
    at = draw.randrange(len(name))
    return draw.choice([name[:at] + name[at + 1 :], name + "s", name[:at] + "x" + name[at:], name.upper()])


def misuse(draw: random.Random) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a public callable, or a dataclass of any table, and named arguments of which at least one is wrong."""
    if draw.random() < 0.3:
        name = draw.choice(list(CALLED))
        argument = draw.choice([*CALLED[name], "tsak"])
        wrong = {argument: draw.choice(ARGUMENTS.get(argument, [1]))}
        return getattr(paceline, name), {"task": TASK} | wrong if "task" in CALLED[name] else wrong
    way, of = draw.choice(TABLES)
    name = draw.choice(list(of.members))
    wrong = {name: wrong_value(of.members[name], draw)}
    if draw.random() < 0.2:
        other = misspelt(name, draw)
        wrong |= {other: 1} if other not in of.members else {}
    if draw.random() < 0.4:
        return of.cls, wrong
    held: Any = wrong
    for part, listed in reversed(way):
        held = {part: [held] if listed else held}
    publics = [paceline.fit, paceline.Run] + ([paceline.plan] if "run" not in held else [])
    return draw.choice(publics), {"task": TASK} | held


ARGUMENTS: dict[str, list[Any]] = {
    "task": [7, None, "no.toml", [TASK], object(), {"modle": "x"}, b"x", 1.5, {"model": 7}],
    "plan": [7, "dp_shard=two", None, "dp_shard", ["dp_shard=2"], "", "precision=bf17", "zero=4", "tp=2 tp=2",
             {"layuot": 1}, object(), "dp_shard=-2", "dp_shard=2.5"],
    "cluster": [-1, 1.5, None, True, {"device": 3}, object(), b"x", {"devcies": 2}, [0], [], [True], ["cpu", 1.5]],
    "run": [7, "runs/x", {"dri": "x"}, {"dir": 3}, {"checkpoint_every": 50}, [], True, object()],
    "verify": ["yes", 1, 0, [], {}, object()],
    "faults": ["no.toml", 7, [{"kind": "meteor"}], [{"knd": "kill"}], {"kind": "kill"}, True, object(), [7]],
    "overrides": ["task.stop=4 steps", ["stop"], [7], None, {"a": 1}, ["task.stpo=4 steps"], object()],
    "layout": [7, "dp_shard", "dp_shard=two", [], True, {"dp_shard": 2}, "tp=2 tp=2"],
    "every": ["4", -1, 1.5, True, None],
    "steps": [0, -1, "3", 1.5, True, None],
    "dtypes": ["fp32", ["fp31"], [7], 7, True, {"fp32": 1}],
    "days": ["3", 0, -1, True, float("nan"), [1]],
    "policies": ["spares", [7], 7, ["no_such"], {"a": 1}, ["spares,every=soon"]],
    "runs": [0, -1, 1.5, "50", True, None, [7]],
    "seed": [-1, "7", 1.5, True, None],
    "intervals": [1, "yes", None],
    "measured": [7, "no_such_dir", True, []],
    "measure": [1, "yes", None],
    "say": [7, "x", True],
    "run_dir": [7, None, "no_such", True, b"x"],
    "by": [7, None, True],
    "since": ["1st of May", 7, True, 1.5],
    "until": ["2026-13-01", 7, []],
    "prices": [7, "no.toml", True],
    "price_class": [7, None, True],
    "files": [7, None, [7], {"a": 1}, True],
}  # fmt: skip
TRAINS = ("task", "plan", "cluster", "run", "verify", "faults", "overrides")
CALLED: dict[str, tuple[str, ...]] = {
    "fit": TRAINS,
    "Run": TRAINS,
    "plan": ("task", "plan", "cluster", "overrides", "measure", "say"),
    "verify": ("task", "layout", "every", "cluster", "overrides", "steps", "dtypes", "say"),
    "simulate": ("task", "plan", "cluster", "overrides", "days", "policies", "runs", "seed", "intervals", "measured",
                 "say"),
    "backtest": ("files",),
    "report": ("run_dir",),
    "load_run": ("run_dir",),
    "bill": ("runs", "by", "since", "until", "prices", "price_class"),
}  # fmt: skip
# `verify_loop` takes a loop of the user's.
LOOP: dict[str, list[Any]] = {
    "step": [7, None, "x"],
    "model": [7, None, "llama-1m", object(), lambda batch: batch],
    "batches": [7, None, iter(()), {"a": 1}, [], b"x"],
    "objective": [7, None, "x"],
    "plain": [7, "x", object()],
    "optimizer": [7, "adamw"],
    "clip_norm": ["1", -1.0, None, True, float("nan"), [1]],
    "part": ["0", -1, 1.5, True],
    "split": [7, "x"],
}

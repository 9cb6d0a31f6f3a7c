"""Python as strict as files: whatever is wrong with a public argument is an error of ours before anything starts."""

from __future__ import annotations

import dataclasses
import inspect
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import environment, run_patiently

import paceline
from paceline.config.declared import Declared
from paceline.config.shape import Option, ShapedTable
from paceline.errors import ConfigError, ConfigErrors, PacelineError
from paceline.session.verbs.given import spec_of
from paceline.spec.load import parse_spec, table

TASK = paceline.Task(model="llama-1m", global_batch="4 samples", stop="2 steps")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: paceline.ScheduleSpec(kind="cosin"), ["task.schedule.kind", "did you mean 'cosine'?"]),
        (lambda: paceline.Task(seed="7"), ["task.seed", "without quotes"]),
        (lambda: paceline.Task(stop=300), ["task.stop", '"300 steps", with a unit']),
        (lambda: paceline.OptimizerSpec(lr="1e-3"), ["task.optimizer.lr", "1e-3, without quotes"]),
        (lambda: paceline.Task(stop="300 stepzs"), ["unit 'stepzs'", "did you mean 'steps'?"]),
        (lambda: paceline.Task(stop="300 stepz"), ["unit 'stepz'", "did you mean 'steps'?"]),
        (lambda: paceline.RunSpec(time_limit=7200), ["run.time_limit", '"7200 s", with a unit']),
        (lambda: paceline.RunSpec(checkpoint_evry="2 steps"), ["unknown option", "did you mean 'checkpoint_every'?"]),
        (lambda: paceline.fit(TASK, clutser=2), ["unknown argument 'clutser'", "did you mean 'cluster'?"]),
        (lambda: paceline.Run(TASK, plan="dp_shrad=2"), ["is not a plan", "dp_shrad"]),
        (lambda: paceline.fit(TASK, run={"dir": 3}), ["run.dir = 3", "text in quotes"]),
        (lambda: paceline.fit(TASK, cluster=True), ["cluster = true"]),
        (lambda: paceline.Task(evaluate={"sets": [{"name": "far", "source": {"a": 1}}]}), ["by their number"]),
    ],
)
def test_the_misuses_that_once_passed_in_silence(make: Callable[[], Any], told: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.exit_code == 2
    assert "test_misuse.py:" in caught.value.what
    assert all(part in str(caught.value) for part in told), str(caught.value)


@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        (lambda run: run.step(7), "for batch in run: run.step(batch)"),
        (lambda run: run.replan("dp_shard=2"), 'paceline.plan(task, "dp_shard=2", cluster=2).plan'),
        (lambda run: run.evaluate("validation"), "name the arguments"),
        (lambda run: run.save(path="mine"), "unknown argument 'path'"),
    ],
)
def test_methods_of_a_run_are_as_strict(misuse: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        misuse(object.__new__(paceline.Run))  # nothing of it is needed to tell
    assert told in str(caught.value) and "test_misuse.py:" in caught.value.what


@pytest.mark.parametrize(
    ("misuse", "told"),
    [
        (lambda run: run.records("stpe"), "did you mean 'step'?"),
        (lambda run: run.checkpoint("newest"), "a whole number is expected"),
        (lambda run: run.weights(-1), "step"),
        (lambda run: run.export(7), "out"),
        (lambda run: run.export("out", merge="yes"), "merge"),
        (lambda run: run.export("out", marge=True), "did you mean 'merge'?"),
    ],
)
def test_methods_of_a_runs_folder_are_as_strict(misuse: Callable[[Any], Any], told: str, tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    with pytest.raises(ConfigError) as caught:
        misuse(paceline.load_run(tmp_path))
    assert told in str(caught.value), caught.value


def test_units_are_text_and_tables_are_dicts() -> None:
    assert paceline.ScheduleSpec(warmup="60 steps").warmup == paceline.Amount(60, "steps")
    assert paceline.RunSpec(checkpoint_every="50 steps", time_limit="2 h").time_limit == 7200.0
    by_dicts = paceline.Task(schedule={"kind": "linear"}, model={"name": "llama-1m"}, optimizer={"lr": 0.1})
    assert by_dicts.schedule == paceline.ScheduleSpec(kind="linear") and by_dicts.model.name == "llama-1m"
    assert spec_of({"seed": 3}, {"goal": "memory"}, 2, ()).plan.goal.name == "memory"
    same = dataclasses.replace(paceline.RunSpec(time_limit="2 h"), keep_last=2)
    assert same.time_limit == 7200.0 and same.keep_last == 2


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigErrors) as caught:
        paceline.Task(stepzs=3, schedule={"kind": "cosin", "warmpu": 3}, seed=-1, optimizer="adamw", model=5)
    told = str(caught.value)
    for part in ("stepzs", "task.schedule.kind", "warmpu", "task.seed", "OptimizerSpec(name='adamw')", "task.model"):
        assert part in told
    assert [error["exit_code"] for error in caught.value.as_dict()["errors"]] == [2] * 6  # type: ignore[attr-defined]


def test_all_errors_of_a_file_are_told_with_their_lines() -> None:
    lines = [
        "[task]",
        "sead = 7",
        "stop = 300",
        "[task.schedule]",
        'kind = "cosin"',
        "[rnu]",
        "[plan]",
        'dp_shard = "2"',
    ]
    with pytest.raises(ConfigErrors) as caught:
        parse_spec("\n".join(lines), "x.toml", ["task.optimizer.lr=fast", "task.modle=3"])
    told = [error.what for error in caught.value.errors]
    assert [what.partition(" ")[0] for what in told[:5]] == [f"x.toml:{line}:" for line in (2, 3, 5, 6, 8)]
    assert len(told) == 7 and all(what.startswith("--set: ") for what in told[5:])


SCRIPT = """
import sys
import paceline
try:
    paceline.Task(seed="7")
except paceline.PacelineError:
    print("torch" in sys.modules)
paceline.Task(seed="8")
"""


def test_a_script_ends_with_exit_code_2_before_torch_is_there(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    ended = run_patiently([sys.executable, script], env=environment())
    assert (ended.returncode, ended.stdout) == (2, "False\n")
    assert 'mine.py:8: task.seed = "8" is not a whole number' in ended.stderr


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
    if isinstance(member, ShapedTable):
        return draw.choice([7, None, True, 1.5, iter(()), {"no_such_option": 1}, {3: 4}, b"x"])
    wrong = list(WRONG[member.kind])
    wrong += [f"{member.default}x"] if member.choices else []
    wrong += [member.minimum - 1] if member.minimum is not None and member.kind in ("whole", "number") else []
    wrong += [member.above] if member.above is not None and member.kind in ("whole", "number") else []
    wrong += [member.maximum + 1] if member.maximum is not None and member.kind in ("whole", "number") else []
    value = draw.choice([*wrong, *NEVER])
    fits = (value is None and member.optional) or (member.objects and (callable(value) or isinstance(value, range)))
    return object() if fits else value


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


def test_every_argument_of_every_public_function_is_misused() -> None:
    """What is public and takes arguments is in the table above; `verify_loop` takes modules and has its own tests."""
    for name in paceline.__all__:
        function = getattr(paceline, name)
        if name == "verify_loop" or (isinstance(function, type) and name != "Run"):
            continue
        taken = [each for each in inspect.signature(function).parameters if each != "self"]
        assert set(taken) == set(CALLED[name]), name
        assert set(taken) <= set(ARGUMENTS), name


MISUSES = 2000


def test_no_misuse_is_silent_or_starts_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def started(*arguments: object, **options: object) -> None:
        raise AssertionError(f"a process was started: {arguments}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr("os.fork", started)
    for number in range(MISUSES):
        function, arguments = misuse(random.Random(number))
        try:
            function(**arguments)
        except PacelineError as error:
            assert error.exit_code == 2, (number, function, arguments, error)
        except Exception as error:
            raise AssertionError((number, function, arguments)) from error
        else:
            raise AssertionError(f"{number}: {function} took {arguments} in silence")
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_every_table_of_a_spec_keeps_its_declarations_in_python() -> None:
    def tables(of: ShapedTable, key: str) -> Iterator[tuple[str, Any]]:
        yield key, of.cls
        for name, member in of.members.items():
            inner = member if isinstance(member, ShapedTable) else member.item
            if inner is not None:
                yield from tables(inner, f"{key}.{name}".strip("."))

    for key, cls in tables(table(), ""):
        assert issubclass(cls, Declared) and cls.table_name == key, f"{cls} is the table '{key}'"

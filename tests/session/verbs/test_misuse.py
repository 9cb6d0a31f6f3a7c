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
from misuses import ARGUMENTS, CALLED, LOOP, TABLES, TASK, misuse, wrong_values
from runs import environment, run_patiently

import paceline
from paceline.config.declared import Declared
from paceline.config.shape import ShapedTable
from paceline.errors import ConfigError, ConfigErrors, PacelineError
from paceline.session.verbs.run_folder import RunFolder
from paceline.session.verbs.spec_given import spec_of
from paceline.spec.load import parse_spec, table


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


def test_every_argument_of_every_public_function_is_misused() -> None:
    """What is public and takes arguments is in the tables of `misuses.py`."""
    for name in paceline.__all__:
        function = getattr(paceline, name)
        if isinstance(function, type) and name != "Run":
            continue
        taken = [each for each in inspect.signature(function).parameters if each != "self"]
        assert set(taken) == set(LOOP if name == "verify_loop" else CALLED[name]), name
        assert name == "verify_loop" or set(taken) <= set(ARGUMENTS), name


def test_a_loop_that_cannot_be_proven_is_told() -> None:
    from torch import nn

    model = nn.Linear(2, 2)
    right = {"step": lambda batch: None, "model": model, "batches": [1], "objective": lambda model, batch: None}
    for name, values in LOOP.items():
        for value in values:
            with pytest.raises(ConfigError) as caught:
                paceline.verify_loop(**{**right, name: value})
            assert caught.value.exit_code == 2, (name, value)


def test_every_option_of_every_table_refuses_what_it_cannot_hold() -> None:
    silent, foreign, tried = [], [], 0
    for _, of in TABLES:
        for name, member in of.members.items():
            for value in wrong_values(member):
                tried += 1
                try:
                    of.cls(**{name: value})
                except PacelineError as error:
                    assert error.exit_code == 2, (of.cls, name, value, error)
                except Exception as error:
                    foreign.append((of.cls.__name__, name, value, error))
                else:
                    silent.append((of.cls.__name__, name, value))
    assert not foreign, foreign
    assert not silent, silent
    assert tried > 2000


@pytest.mark.parametrize("cls", [paceline.Run, RunFolder])
def test_every_public_method_knows_its_arguments(cls: type) -> None:
    for name, method in vars(cls).items():
        if name.startswith("_") or not inspect.isfunction(method) or name == "step":  # which is called in every step
            continue
        with pytest.raises(ConfigError, match="unknown argument 'tsak'"):
            method(object.__new__(cls), tsak=1)


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

"""Specs: layers, provenance, messages, round trips and checks across options."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.build import Override
from paceline.errors import ConfigError
from paceline.spec.load import (
    Spec,
    dump_toml,
    load_spec,
    parse_spec,
    provenance_lines,
    spec_from_dict,
    spec_to_dict,
    table,
)
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.units import Amount, Seconds

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


def test_defaults_without_a_file() -> None:
    spec = load_spec(None)
    assert spec == Spec() and set(spec.provenance.values()) == {"default"}


def test_defaults_then_file_then_command_line() -> None:
    text = '[task.optimizer]\nlr = 1e-3\nbeta1 = 0.8\n[run]\nlog_every = "5 steps"\n'
    spec = parse_spec(text, "x.toml", ["task.optimizer.lr=2e-3", "task.optimizer.lr=4e-3", "plan.precision=bf16"])
    assert (spec.task.optimizer.lr, spec.task.optimizer.beta1, spec.plan.precision) == (4e-3, 0.8, "bf16")
    origins = {key: spec.provenance[f"task.optimizer.{key}"] for key in ("lr", "beta1", "beta2")}
    assert origins == {"lr": "--set", "beta1": "x.toml:3", "beta2": "default"}
    assert spec.provenance["run.log_every"] == "x.toml:5"


def test_a_string_in_the_place_of_model_and_data() -> None:
    spec = parse_spec('task.model = "llama-3m"\ntask.data = "digits"\n', "x.toml", ["task.model.hidden=64"])
    assert spec.task.model == ModelSpec(name="llama-3m", hidden=64) and spec.task.data == DataSpec(source="digits")
    assert spec.provenance["task.model.name"] == "x.toml:1"
    kept = parse_spec("[task.model]\nhidden = 64\n", "x.toml", ["task.model=llama-1m"])
    assert kept.task.model == ModelSpec(name="llama-1m", hidden=64)


def test_command_line_text_needs_no_quotes() -> None:
    overrides = ["task.name=2026", "task.stop=300 steps", "task.data.include=*.py", "plan.compile=true",
                 "task.data.source='a b'", "run.time_limit=90 min", "run.checkpoint_every=none",
                 "cluster={devices=4, carbon_g_per_kwh=56}", "task.model.arguments.deep.er=[1, 2]"]  # fmt: skip
    spec = load_spec(None, overrides)
    assert (spec.task.name, spec.task.stop, spec.task.data.include) == ("2026", Amount(300, "steps"), ("*.py",))
    assert (spec.plan.compile, spec.task.data.source, spec.run.time_limit) == (True, "a b", 5400)
    assert spec.run.checkpoint_every is None and spec.cluster.carbon_g_per_kwh == 56.0
    assert spec.task.model.arguments == {"deep": {"er": [1, 2]}}


def test_user_arguments_merge_key_by_key() -> None:
    text = "[task.model]\narguments = { width = 8, inner = { a = 1, b = 2 } }\n"
    spec = parse_spec(text, "x.toml", ["task.model.arguments.inner.b=3", "task.model.arguments.new=x"])
    assert spec.task.model.arguments == {"width": 8, "inner": {"a": 1, "b": 3}, "new": "x"}
    replaced = parse_spec(text, "x.toml", ["task.model.arguments.inner=5"])
    assert replaced.task.model.arguments == {"width": 8, "inner": 5}


BAD = [
    ("[task.optimizer]\nlrr = 1", 2, "unknown key 'task.optimizer.lrr'", "did you mean 'lr'?"),
    ("[task]\n\nlr = 1", 3, "unknown key 'task.lr'", "did you mean 'task.optimizer.lr'?"),
    ("[tsak]\nseed = 1", 1, "unknown key 'tsak'", "did you mean 'task'?"),
    ("[optimizer]\nlr = 1", 1, "unknown key 'optimizer'", "did you mean 'task.optimizer'?"),
    ("[task]\nseed = 1.5", 2, "is not a whole number", "1 or 2"),
    ("[task]\nseed = true", 2, "is not a whole number", "default is 7"),
    ("[task]\nseed = -1", 2, "out of range", ""),
    ("[task]\nseed = 99999999999999999999", 2, "out of range", ""),
    ("[task.optimizer]\nlr = 0", 2, "out of range", ""),
    ("[task.optimizer]\nlr = nan", 2, "out of range", ""),
    ("[task.optimizer]\nlr = '1e-3'", 2, "is not a number", ""),
    ("[task.optimizer]\nname = 'adamm'", 2, "there is no optimizer 'adamm'", "did you mean 'adam'?"),
    ("[task]\nstop = 300", 2, "is not an amount with a unit", "300 steps"),
    ("[task]\nstop = '300 stpes'", 2, "is not an amount in", "did you mean 'steps'?"),
    ("[task]\nglobal_batch = '3 steps'", 2, "is not an amount in samples, tokens", ""),
    ("[task]\nglobal_batch = '2.5 samples'", 2, "is not whole", '"2 samples"'),
    ("[task]\nglobal_batch = '1000 tokens'", 2, "not a whole number of samples", '"1024 tokens"'),
    ("[run]\nlog_every = '1 epoch'", 2, "is not an amount in steps", ""),
    ("[run]\ntime_limit = 7200", 2, "is not a duration", '"2 h"'),
    ("[run]\ntime_limit = '0 s'", 2, "out of range", ""),
    ("[run]\nverify = 'yes'", 2, "is not true or false", "default is true"),
    ("[cluster]\nmemory_per_device = '80 Gb'", 2, "is not a size", "GiB"),
    ("[task.data]\ninclude = '*.py'", 2, "is not a list of texts", '["*.py", "*.md"]'),
    ("[task.model]\narguments = { when = 2026-01-01 }", 2, "is a date", "quotes"),
    ("[task]\nmodel = 3", 2, "is not a table", ""),
    ("[task]\noptimizer = 'adamw'", 2, "is not a table", "name, lr"),
    ("[[task]]\nseed = 1", 1, "is not a table", ""),
    ("[task]\nname = '../up'", 2, "cannot be", ""),
    ("[task.schedule]\ndecay = '40 steps'", 2, "cannot be", "wsd"),
]


@pytest.mark.parametrize(("text", "line", "what", "fix"), BAD)
def test_errors_say_where_what_and_what_to_try(text: str, line: int, what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text, "x.toml")
    error = caught.value
    assert error.what.startswith(f"x.toml:{line}: ") and what in error.what
    assert error.because and fix in error.try_


@pytest.mark.parametrize("override", ["a", "=1", "task..seed=1", "task.seed=", "task.seed=[1", "task=1", "nope.x=1"])
def test_errors_of_overrides_name_the_option(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_spec(None, [override])


@pytest.mark.parametrize("key", ["task.evaluate", "task.data", "plan.goal", "task.model.arguments", "run"])
def test_an_empty_table_on_the_command_line_is_an_error_and_no_silence(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"--set: {key} = \{{\}} sets nothing"):
        load_spec(None, [f"{key}={{}}"])


def test_a_shorthand_option_is_named_as_the_origin() -> None:
    spec = load_spec(None, [Override("task.stop", "5 steps", "--steps")])
    assert spec.provenance["task.stop"] == "--steps"
    with pytest.raises(ConfigError, match=r"--steps: task\.stop"):
        load_spec(None, [Override("task.stop", "0 steps", "--steps")])


def test_a_trial_may_be_shorter_than_the_warm_up() -> None:
    text = '[task.schedule]\nwarmup = "400 steps"\n'
    assert parse_spec(text, "x.toml", ["task.stop=5 steps"]).task.schedule.warmup == Amount(400, "steps")


def test_provenance_lists_every_option_once() -> None:
    spec = parse_spec("[task.model]\narguments = { a = 1, b = {} }\n", "x.toml")
    lines = provenance_lines(spec)
    assert "task.model.arguments.a = 1" in lines[2] and lines[2].endswith("x.toml:2")
    assert len(lines) == len(list(table().options())) + 1
    last, _ = list(table().options())[-1]
    assert lines[-1].startswith(f"{'.'.join(last)} = ") and lines[-1].endswith("default")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_survive_a_round_trip(path: Path) -> None:
    spec = load_spec(path)
    assert parse_spec(dump_toml(spec)) == spec
    assert parse_spec(dump_toml(spec, comments=True)) == spec
    again = spec_from_dict(spec_to_dict(spec))
    assert again == spec and again.path == path.resolve()


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(
    text=NAMES, arguments=st.dictionaries(NAMES, PLAIN, max_size=3), lr=st.floats(1e-300, 1e300),
    epochs=st.floats(1e-6, 1e6), seconds=st.floats(1e-3, 1e9), size=st.integers(0, 2**50),
)  # fmt: skip
def test_any_spec_survives_toml_and_json(
    text: str, arguments: dict[str, object], lr: float, epochs: float, seconds: float, size: int
) -> None:
    base = Spec()
    task = dataclasses.replace(
        base.task, model=ModelSpec(name=text or "x", arguments=arguments),
        data=DataSpec(text_field=text, include=(text,)),
        optimizer=dataclasses.replace(base.task.optimizer, lr=lr), stop=Amount(epochs, "epochs"),
    )  # fmt: skip
    run = dataclasses.replace(base.run, time_limit=Seconds(seconds), checkpoint_every=None)
    spec = Spec(task=task, run=run, cluster=dataclasses.replace(base.cluster, memory_per_device=size))
    assert parse_spec(dump_toml(spec)) == spec
    assert spec_from_dict(spec_to_dict(spec)) == spec


def test_objects_of_the_user_become_import_paths() -> None:
    spec = Spec(task=Task(model=subprocess.run, data=[1, 2], objective=os.path.join))
    values = spec_to_dict(spec)["task"]
    assert (values["model"], values["objective"]) == ("subprocess:run", "posixpath:join")
    assert 'model = "subprocess:run"' in dump_toml(spec)


def test_paths_are_found_beside_the_spec_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "stdlib").mkdir()
    file = tmp_path / "x.toml"
    file.write_text(
        '[task.data]\nsource = "corpus"\ntokenizer = "bytes"\ncache_dir = "~/cache"\n[run]\ndir = "corpus"\n'
    )
    monkeypatch.setenv("HOME", "/somewhere")
    spec = load_spec(file)
    assert spec.task.data.source == str(tmp_path / "corpus") and spec.task.data.cache_dir == "/somewhere/cache"
    assert spec.run.dir == "corpus"
    assert load_spec(file, ["task.data.source=stdlib"]).task.data.source == "stdlib"
    assert load_spec(file, ["task.data.source=elsewhere"]).task.data.source == "elsewhere"


def test_code_beside_the_spec_file_can_be_imported_in_any_process(tmp_path: Path) -> None:
    (tmp_path / "beside_spec_model.py").write_text("def build():\n    return 'built'\n")
    file = tmp_path / "x.toml"
    file.write_text('task.model = "beside_spec_model:build"\n')
    script = (
        "import json, sys\nfrom paceline.spec.import_paths import load_object\n"
        "from paceline.spec.load import spec_from_dict\n"
        "spec = spec_from_dict(json.loads(sys.argv[1]))\nprint(load_object(spec.task.model.name, 'model')())\n"
    )
    values = json.dumps(spec_to_dict(load_spec(file)))
    done = subprocess.run([sys.executable, "-c", script, values], capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout == "built\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[task]\nname = "a"\n[task.evaluate]\nmetric = "accuracy"\n', 4),  # of a table: its first option that is there
        ('[task]\nname = "a"\n[[task.evaluate.sets]]\nsource = "x"\n', 3),
        ('[task.data]\nsource = "stdlib"\nseq_len = 100000\n', 3),  # beside the batch that was left out
        ("[plan.sync]\nevery = 8\n", 2),
    ],
)
def test_an_option_that_was_left_out_is_told_where_its_table_stands(tmp_path: Path, text: str, line: int) -> None:
    """It was told as the line of the program that had called us, "python" at a prompt, or "default"."""
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_spec(path)
    assert caught.value.what.startswith(f"{path}:{line}: ")

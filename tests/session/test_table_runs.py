"""A table of texts and labels from one line of a spec to a named prediction; resumed, it reads on where it stopped;
real texts are told apart far better than by a guess, and spread over ranks the gradients are one device's."""

from __future__ import annotations

import csv
import itertools
import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from runs import as_json, in_process, paceline, records_of, steps_of

from paceline.task.models.predicting import predictor

SPEC = """
[task]
name = "reviews"
model = {{ name = "llama-1m", hidden = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
data = {{ source = "{table}", seq_len = 32, validation_fraction = 0.2, cache_dir = "{cache}"{more} }}
optimizer = {{ lr = 1e-2 }}
schedule = {{ kind = "constant" }}
global_batch = "16 samples"
stop = "{steps} steps"

[cluster]
device = "cpu"
devices = {devices}
probe = false

[plan]
precision = "fp32"

[run]
dir = "{run}"
verify = false
checkpoint_every = "10 steps"
evaluate_every = "none"
record_samples = true
"""


def write_spec(folder: Path, rows: list[tuple[str, str]], name: str = "run", more: str = "", **options: Any) -> Path:
    """Write a table and a spec of a task on it, and return the spec's path."""
    table = folder / "reviews.csv"
    with table.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("text", "label"), *rows])
    given = {"devices": 1, "steps": 20, **options}
    path = folder / f"{name}.toml"
    path.write_text(SPEC.format(table=table, cache=folder / "cache", run=folder / name, more=more, **given))
    return path


def reviews(count: int) -> list[tuple[str, str]]:
    """Return rows that a word decides, of uneven length, with line ends inside."""
    return [(f"no {at}:\n{'so ' * (at % 5)}{('dull', 'fine')[at % 2]}", ("bad", "good")[at % 2]) for at in range(count)]


def test_a_table_is_trained_on_resumed_exported_and_its_predictions_are_named(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, reviews(120))
    planned = in_process("plan", spec)
    assert planned.returncode == 0, planned.stderr
    told = " ".join(planned.stdout.split())
    assert "120 texts of 2 classes" in told and "-> bad (class 0)" in told
    stopped = in_process("train", spec, "--set", 'task.stop="10 steps"')
    assert stopped.returncode == 0, stopped.stderr
    done = in_process("train", spec)
    assert done.returncode == 0, done.stderr
    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == list(range(1, 21)) and steps[-1]["loss"] < 0.2 < steps[0]["loss"]
    whole = in_process("train", write_spec(tmp_path, reviews(120), "whole"))
    assert whole.returncode == 0, whole.stderr
    assert [step["sample_ids"] for step in steps_of(tmp_path / "whole")] == [step["sample_ids"] for step in steps]
    assert [step["loss"] for step in steps_of(tmp_path / "whole")] == [step["loss"] for step in steps]
    (started, *_) = records_of(tmp_path / "run", "run_started")
    assert started["facts"]["card"]["labels"]["classes"] == ["bad", "good"]
    decided = {record["what"]: record["because"] for record in records_of(tmp_path / "run", "decision")}
    assert "2 different values in 120 rows" in decided["task.data.labels"] and "task.model" in decided
    exported = in_process("export", tmp_path / "run", tmp_path / "out")
    assert exported.returncode == 0, exported.stderr
    assert json.loads((tmp_path / "out" / "classes.json").read_text())["classes"] == ["bad", "good"]
    chances = predictor(tmp_path / "out")(["no 7:\nfine", "no 8:\nso so dull"])
    assert [max(row, key=row.__getitem__) for row in chances] == ["good", "bad"]


def test_batches_of_so_many_tokens_hold_as_many_rows_as_their_lengths_allow(tmp_path: Path) -> None:
    rows = [(f"{at} " + "x" * (at * 7 % 60), ("bad", "good")[at % 2]) for at in range(60)]
    spec = write_spec(tmp_path, rows, more=', shuffle = "bucketed", shuffle_bucket = 8', steps=4)
    asked = ["--set", "task.batch_rows=by_length", "--set", 'task.global_batch="128 tokens"']
    done = in_process("train", spec, *asked, "--set", "run.record_samples=true")
    assert done.returncode == 0, done.stderr
    counts = [len(step["sample_ids"]) for step in steps_of(tmp_path / "run")]
    assert len(set(counts)) > 1 and min(counts) >= 4  # rows are of at most 32 tokens
    assert "· 128 tokens/step at most ·" in done.stdout


def test_inspect_shows_rows_as_the_model_sees_them(tmp_path: Path) -> None:
    spec = write_spec(tmp_path, reviews(30))
    shown = in_process("data", "inspect", spec)
    assert shown.returncode == 0, shown.stderr
    assert "30 texts of 2 classes" in shown.stdout and "train rows: bad" in shown.stdout
    assert "-> good (class 1)" in shown.stdout or "-> bad (class 0)" in shown.stdout
    told = as_json(in_process("data", "inspect", spec, "--json").stdout)
    assert told["card"]["labels"]["classes"] == ["bad", "good"] and len(told["samples"]) == 3


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2,tp=2"])
def test_spread_over_ranks_the_gradients_are_those_of_one_device(tmp_path: Path, layout: str) -> None:
    rows = [(f"{at} " + "x" * (at * 7 % 60), ("bad", "good", "odd")[at % 3]) for at in range(60)]
    for labels in ("classification", "multi_label"):
        spec = write_spec(tmp_path, rows, more=f', labels = "{labels}"', devices=2)
        proven = paceline("verify", spec, "--layout", layout, timeout=300)
        assert proven.returncode == 0, proven.stdout + proven.stderr
        assert "equal to one device" in proven.stdout


@pytest.mark.deep
def test_real_texts_are_told_apart_far_better_than_by_a_guess(tmp_path: Path) -> None:
    """Lines of the standard library: which package is a line from? A guess is right for a third of them."""
    root, packages = Path(sysconfig.get_path("stdlib")), ("asyncio", "email", "xml")
    rows: list[tuple[str, str]] = []
    for package in packages:
        lines = [
            line.strip() for file in sorted((root / package).rglob("*.py")) for line in file.read_text().splitlines()
        ]
        long = list(dict.fromkeys(line for line in lines if len(line) > 30))[:700]
        rows += [(line, package) for line in long]
    spec = write_spec(tmp_path, rows, steps=150)
    more = ["--set", "task.data.seq_len=64", "--set", "task.optimizer.lr=3e-3", "--set", "task.model.hidden=64"]
    done = paceline("train", spec, *more, "--set", 'task.global_batch="32 samples"', timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert paceline("export", tmp_path / "run", tmp_path / "out").returncode == 0
    from paceline.spec.load import load_spec
    from paceline.task.data.sources.tables.store import open_table
    from paceline.task.settled import settle

    data = settle(load_spec(spec, more[1::2][:1])).spec.task.data
    held = open_table(data)
    tokens, offsets = held.corpus.validation.open(), held.corpus.validation.offsets()
    decode = held.corpus.open_tokenizer().decode
    texts = [decode(tokens[start:stop]) for start, stop in itertools.pairwise(offsets.tolist())]
    wanted = [held.labels.classes[at] for at in held.label_array("validation").tolist()] if held.labels else []
    chances = predictor(tmp_path / "out")(texts)
    right = [max(row, key=row.__getitem__) == name for row, name in zip(chances, wanted, strict=True)]
    assert len(right) > 200 and sum(right) / len(right) > 0.55

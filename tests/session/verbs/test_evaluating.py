"""A run's weights are evaluated beside the run: as its journal has it, and on a test set as by hand."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import write_model, write_tokenizer
from runs import as_json, in_process, records_of
from runs import paceline as run_command

import paceline
from paceline.errors import ConfigError
from paceline.task.models.predicting import predictor

NAMES = ("bad", "good", "odd")
SPEC = """
[task]
name = "reviews"
model = {{ name = "llama-1m", hidden = 32, layers = 1, heads = 4, kv_heads = 2, ffn = 48 }}
data = {{ source = "{folder}/reviews.csv", seq_len = 32, validation_fraction = 0.2, cache_dir = "{folder}/cache" }}
evaluate = {{ metrics = ["accuracy"], metric = "accuracy" }}
optimizer = {{ lr = 1e-2 }}
global_batch = "16 samples"
stop = "6 steps"
[cluster]
device = "cpu"
devices = 1
probe = false
[plan]
precision = "fp32"
micro_batch = 4
[run]
dir = "{folder}/run"
evaluate_every = "2 steps"
checkpoint_every = "2 steps"
"""


def write_table(path: Path, rows: list[tuple[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([("text", "label"), *rows])
    return path


def evaluated(*arguments: Any) -> Any:
    done = in_process("evaluate", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return as_json(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on texts of three classes, with its spec beside it."""
    folder = tmp_path_factory.mktemp("evaluated")
    rows = [(f"no {at}: {'so ' * (at % 5)}{('dull', 'fine', 'hm')[at % 3]}", NAMES[at % 3]) for at in range(150)]
    write_table(folder / "reviews.csv", rows)
    (folder / "spec.toml").write_text(SPEC.format(folder=folder))
    done = in_process("train", folder / "spec.toml")
    assert done.returncode == 0, done.stderr
    return folder


def test_what_a_run_held_out_gives_what_its_journal_has(folder: Path) -> None:
    recorded = {each["step"]: each for each in records_of(folder / "run", "evaluation")}
    before = {file: file.stat().st_mtime_ns for file in (folder / "run").rglob("*")}
    for step in (2, 6):
        told = evaluated(folder / "run", "--step", step, "--samples", 64)
        assert told["step"] == step and told["samples"] == told["of_samples"] <= 64
        assert told["loss"] == recorded[step]["loss"] and told["weight"] == recorded[step]["weight"]
        assert told["metrics"] == recorded[step]["metrics"]
    best = max(recorded.values(), key=lambda each: each["metrics"]["accuracy"])
    told = evaluated(folder / "run", "--step", "best")
    assert told["metrics"]["accuracy"] == best["metrics"]["accuracy"]
    assert paceline.load_run(folder / "run").evaluate(step="best").step == told["step"]
    assert before == {file: file.stat().st_mtime_ns for file in (folder / "run").rglob("*")}, "nothing is written"


def test_a_test_set_is_read_by_the_tokenizer_that_the_runs_own_text_has_learnt(folder: Path) -> None:
    pytest.importorskip("tokenizers")
    changes = ("task.data.tokenizer=bpe", "task.data.vocab=300", "task.stop=2 steps", f"run.dir={folder / 'bpe'}")
    done = in_process("train", folder / "spec.toml", *(word for each in changes for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    rows = [
        (f"zzz {at} {('dull', 'fine', 'hm')[at % 3]}", NAMES[at % 3]) for at in range(20)
    ]  # a BPE of its own differs
    assert in_process("export", folder / "bpe", folder / "bpe-out").returncode == 0
    by_hand = predictor(folder / "bpe-out")([text for text, _ in rows])
    loss = -sum(math.log(found[label]) for found, (_, label) in zip(by_hand, rows, strict=True)) / len(rows)
    told = evaluated(folder / "bpe", write_table(folder / "other.csv", rows))
    assert told["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_test_set_counts_the_classes_of_the_run_though_it_lacks_some(folder: Path) -> None:
    rows = [(f"at {at} {('fine', 'hm')[at % 2]}", ("good", "odd")[at % 2]) for at in range(37)]
    path = write_table(folder / "test.csv", rows)
    out = folder / "out"
    assert in_process("export", folder / "run", out).returncode == 0
    by_hand = predictor(out)([text for text, _ in rows])
    loss = -sum(math.log(found[label]) for found, (_, label) in zip(by_hand, rows, strict=True)) / len(rows)
    right = sum(max(found, key=found.__getitem__) == label for found, (_, label) in zip(by_hand, rows, strict=True))

    told = evaluated(folder / "run", path, "--metrics", "accuracy", "f1_macro")
    assert told["samples"] == told["of_samples"] == told["weight"] == 37
    assert told["loss"] == pytest.approx(loss, rel=1e-5)
    assert told["metrics"]["accuracy"] == pytest.approx(right / 37) and "f1_macro" in told["metrics"]
    shown = in_process("evaluate", folder / "run", path)
    assert f"on all 37 samples of {path}" in shown.stdout and "  accuracy  " in shown.stdout


def test_a_test_set_may_have_rows_of_one_class_alone(folder: Path) -> None:
    rows = [(f"at {at} hm", "odd") for at in range(9)]
    assert in_process("export", folder / "run", folder / "out-odd").returncode == 0
    by_hand = predictor(folder / "out-odd")([text for text, _ in rows])
    told = evaluated(folder / "run", write_table(folder / "odd.csv", rows), "--metrics", "accuracy")
    assert told["samples"] == told["weight"] == 9
    assert told["loss"] == pytest.approx(-sum(math.log(found["odd"]) for found in by_hand) / 9, rel=1e-5)
    assert told["metrics"]["accuracy"] == sum(max(found, key=found.__getitem__) == "odd" for found in by_hand) / 9


def test_what_cannot_be_evaluated_is_told(folder: Path, tmp_path: Path) -> None:
    strange = write_table(tmp_path / "strange.csv", [("fine", "good"), ("hm", "new")] * 5)
    found = in_process("evaluate", folder / "run", strange)
    assert found.returncode == 2 and "good, new and bad, good, odd" in found.stderr
    assert f"the samples of '{strange}' are not like" in found.stderr
    assert in_process("evaluate", tmp_path / "none").returncode == 2
    assert in_process("evaluate", folder / "run", "--step", "3").returncode == 2
    with pytest.raises(ConfigError, match="accurracy"):
        paceline.load_run(folder / "run").evaluate(metrics=["accurracy"])


@pytest.mark.parametrize("adapter", ["", "{ kind = 'lora', rank = 2 }"], ids=["full", "LoRA"])
def test_a_run_is_evaluated_in_the_tokens_it_knows_whatever_becomes_of_its_folder(tmp_path: Path, adapter: str) -> None:
    pytest.importorskip("tokenizers")
    model = write_tokenizer(write_model(tmp_path / "llama", "Llama"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number}.txt").write_text(" ".join(f"{at} plus {number} is {at + number}" for at in range(9)))
    settings = {"task.model": model, "task.data.source": texts, "task.data.seq_len": 8,
                "task.data.cache_dir": tmp_path / "cache", "task.data.validation_fraction": 0.2,
                "task.global_batch": "4 samples", "task.stop": "1 steps", "cluster.device": "cpu",
                "cluster.devices": 1, "cluster.probe": "false", "plan.precision": "fp32", "run.dir": tmp_path / "run",
                **({"task.adapter": adapter} if adapter else {})}  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = in_process("train", *words)
    assert done.returncode == 0, done.stderr
    before = [evaluated(tmp_path / "run", *other)["loss"] for other in ((), (texts,))]
    told = json.loads((model / "tokenizer.json").read_text())
    told["model"]["vocab"] = {word: (at + 1) % 204 for word, at in told["model"]["vocab"].items()}
    (model / "tokenizer.json").write_text(json.dumps(told))
    assert [evaluated(tmp_path / "run", *other)["loss"] for other in ((), (texts,))] == before
    shutil.rmtree(model)
    assert evaluated(tmp_path / "run")["loss"] == before[0]


def test_a_folder_that_is_no_run_says_what_it_is(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "weights" / "config.json").write_text("{}")
    for path, told in (("run/checkpoints", f"name the run: {folder / 'run'}"), ("", f"one of: {folder}"),
                       ("weights", "the run that they came from")):  # fmt: skip
        found = in_process("evaluate", folder / path)
        assert found.returncode == 2 and told in found.stderr, found.stderr


class Waves:
    """Sine waves; the label is the frequency."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(torch.linspace(0, 6.28, 8) * (index % 3 + 1)), torch.tensor(index % 3)


def network() -> torch.nn.Module:
    return torch.nn.Linear(8, 3)


def test_a_run_of_a_programs_own_objects_is_evaluated_there(tmp_path: Path) -> None:
    data, run = (Waves(40), Waves(13)), {"dir": tmp_path / "run"}
    task = paceline.Task(name="own", model=network, data=data, global_batch="10 samples", stop="2 steps")
    here = {"devices": 1, "device": "cpu", "probe": False, "learn": False}
    paceline.fit(task, "precision=fp32", cluster=here, run=run)
    recorded = records_of(tmp_path / "run", "evaluation")[-1]
    found = paceline.load_run(tmp_path / "run").evaluate(task=task)
    assert (found.loss, found.weight, found.samples) == (recorded["loss"], 13, 13)
    refused = in_process("evaluate", tmp_path / "run")
    assert refused.returncode == 2 and ".evaluate(task=task)" in refused.stderr and "network" in refused.stderr
    other = dataclasses.replace(task, data=(Waves(41), Waves(13)))
    with pytest.raises(ConfigError, match="not those that it was trained on"):
        paceline.load_run(tmp_path / "run").evaluate(task=other)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_what_two_ranks_shared_is_evaluated_by_one_device_as_they_did(tmp_path: Path, axis: str) -> None:
    settings = {
        "task.data.source": "stdlib", "task.data.max_bytes": "300 kB", "task.data.seq_len": 64,
        "task.global_batch": "8 samples", "task.stop": "2 steps", "cluster.device": "cpu", "cluster.devices": 2,
        "cluster.probe": "false", f"plan.{axis}": 2, "plan.precision": "fp32", "run.verify": "false",
        "run.evaluate_every": "2 steps", "run.evaluate_samples": 16, "run.dir": tmp_path / "run",
    }  # fmt: skip
    model = "task.model={ name = 'llama-1m', hidden = 32, layers = 1, heads = 4, kv_heads = 2, ffn = 48 }"
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = run_command("train", "--set", model, *words)
    assert done.returncode == 0, done.stderr
    (journal,) = (record for record in records_of(tmp_path / "run", "evaluation") if record["step"] == 2)
    found = evaluated(tmp_path / "run", "--samples", "16")
    assert found["loss"] == pytest.approx(journal["loss"], rel=1e-6)

"""Export: what a run has learned, loaded by others, computes what the run measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import in_process, paceline, records_of, write_spec
from safetensors.torch import load_file

from paceline import load_run
from paceline.run.loop.loader import held_out_ids
from paceline.spec.load import load_spec
from paceline.task.data.source import open_sources

MODULE = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(257, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 257, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.body(x))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """Return the directory of a run over two processes, with an evaluation at its end."""
    spec = write_spec(folder, folder / "run", 2, "dp_shard = 2", steps=8)
    ended = paceline("train", spec, "--set", "run.evaluate_every=8 steps")
    assert ended.returncode == 0, ended.stderr
    return folder / "run"


def held_out_loss(model: Any, spec_path: Path) -> float:
    """Return the mean next-token loss of a transformers model on the samples that evaluations read."""
    spec = load_spec(spec_path)
    _, held_out = open_sources(spec.task.data, spec.task.seed)
    assert held_out is not None
    batch = held_out.read(held_out_ids(held_out, spec.run.evaluate_samples))
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


def test_transformers_computes_the_held_out_loss_of_the_journal(folder: Path, trained: Path) -> None:
    from transformers import LlamaForCausalLM

    done = paceline("export", trained, folder / "weights", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["weights_format"], told["step"], told["skipped"]) == ("huggingface", 8, [])
    assert told["files"] == ["config.json", "model.safetensors"]
    assert told["bytes"] == sum((folder / "weights" / name).stat().st_size for name in told["files"])
    model = LlamaForCausalLM.from_pretrained(folder / "weights").eval()
    measured = records_of(trained, "evaluation")[-1]
    assert measured["step"] == 8
    assert held_out_loss(model, folder / "run-2.toml") == pytest.approx(measured["loss"], rel=1e-5)


def test_python_reads_the_same_weights(folder: Path, trained: Path) -> None:
    run = load_run(trained)
    assert run.spec.task.stop == load_spec(folder / "run-2.toml").task.stop
    written = run.export(folder / "by-python", step=4)
    assert (written.step, written.format, written.skipped) == (4, "huggingface", ())
    assert run.checkpoint(4).name == "step-00000004" and run.checkpoint().name == "step-00000008"
    there = load_file(written.out / "model.safetensors")
    assert torch.equal(run.weights(4)["embed_tokens.weight"], there["model.embed_tokens.weight"])


def test_an_earlier_step_has_other_weights(folder: Path, trained: Path) -> None:
    done = in_process("export", trained, folder / "earlier", "--step", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("export   step 4 to ")
    earlier = load_file(folder / "earlier" / "model.safetensors")
    assert in_process("export", trained, folder / "latest").returncode == 0
    latest = load_file(folder / "latest" / "model.safetensors")
    assert earlier.keys() == latest.keys()
    assert all(not torch.equal(earlier[name], latest[name]) for name in earlier)


def test_a_damaged_checkpoint_is_passed_over_and_said(folder: Path, trained: Path) -> None:
    run_dir = folder / "damaged"
    shutil.copytree(trained, run_dir)
    shard = next((run_dir / "checkpoints" / "step-00000008").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    told = json.loads(in_process("export", run_dir, folder / "sound", "--json").stdout)
    assert told["step"] == 4 and "damaged" in told["skipped"][0]
    asked = in_process("export", run_dir, folder / "asked", "--step", "8")
    assert asked.returncode == 74 and "no checkpoint" in asked.stderr and "damaged" in asked.stderr
    assert not (folder / "asked").exists()


@pytest.mark.deep
def test_a_users_module_keeps_its_names_and_loads_with_them(folder: Path) -> None:
    (folder / "tied_model.py").write_text(MODULE)
    spec = write_spec(folder, folder / "own", steps=4)
    text = "\n".join(
        'model = "tied_model:Tied"' if x.startswith("model =") else x for x in spec.read_text().split("\n")
    )
    spec.write_text(text)
    ended = paceline("train", spec)
    assert ended.returncode == 0, ended.stderr
    done = in_process("export", folder / "own", folder / "own-weights", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_format"] == "safetensors"
    weights = load_file(folder / "own-weights" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in weights.items()} == {
        "body.bias": (12,), "body.weight": (12, 12), "embed.weight": (257, 12),
    }  # fmt: skip
    restart = paceline("train", spec, "--set", f"task.model.weights={folder / 'own-weights'}", "--run-dir",
                       folder / "on", "--steps", "1")  # fmt: skip
    assert restart.returncode == 0, restart.stderr
    assert records_of(folder / "on", "step")[0]["loss"] < records_of(folder / "own", "step")[0]["loss"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [(["{run}/nowhere", "{out}"], 2, "there is no such folder"), (["{run}", "{out}", "--step", "5"], 2, "4, 8"),
     (["{run}", "{run}/journal/0001.jsonl"], 74, "cannot export weights"), (["{run}"], 2, "OUT is missing"),
     (["{run}", "/proc/nowhere"], 74, "cannot export weights")],
)  # fmt: skip
def test_errors(trained: Path, tmp_path: Path, words: list[str], code: int, says: str) -> None:
    done = in_process("export", *(word.format(run=trained, out=tmp_path / "out") for word in words))
    assert done.returncode == code and says in done.stderr
    assert "Traceback" not in done.stderr and "\n  because  " in done.stderr


def test_the_reference_batch_is_the_held_out_one(folder: Path, trained: Path) -> None:
    spec = load_spec(folder / "run-2.toml")
    _, held_out = open_sources(spec.task.data, spec.task.seed)
    assert held_out is not None
    ids = held_out_ids(held_out, spec.run.evaluate_samples)
    assert len(np.unique(ids)) == len(ids) == min(64, held_out.samples)

"""A run that starts from a folder of Hugging Face: what each rank reads, what is on record, and what comes back out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_kept, run_ranks
from model_folders import SHAPE, loaded, write_model, write_tokenizer
from runs import in_process, paceline, records_of, write_corpus
from safetensors.torch import load_file, save_file
from tests_shared import decoder_task, plan_of, run_steps, world_here

from paceline.checkpoint import WholeTensors
from paceline.run.updates.distance_moved import moved
from paceline.session.verbs.weights import choose_checkpoint
from paceline.spec.journal.kinds import MovedRecord
from paceline.spec.layout import Layout
from paceline.spec.task import ModelSpec
from paceline.task.models.huggingface.files import LazyTensors, read_safetensors
from paceline.task.models.huggingface.start import starting_weights

SPEC = """
[task]
name = "tuned"
model = "{model}"
data = {{ source = "{corpus}", seq_len = 16, cache_dir = "{cache}", validation_fraction = 0.2 }}
global_batch = "4 samples"
stop = "2 steps"

[cluster]
device = "cpu"
devices = {devices}
probe = false

[plan]
{plan}

[run]
dir = "{run}"
verify = false
"""


def read_and_step(name: str, layout: Layout) -> tuple[int, float, float]:
    """Return how many elements of files this rank has read, and the first step's loss and gradient norm."""
    read: list[int] = []
    part = LazyTensors.part

    def counted(self: LazyTensors, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        found = part(self, name, offsets, sizes)
        read.append(found.numel())
        return found

    LazyTensors.part = counted  # type: ignore[method-assign]
    task = decoder_task(model=ModelSpec(name=name))
    stats, _ = run_steps(task, plan_of(layout), 1)
    return sum(read), stats[0].loss, stats[0].grad_norm


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("Qwen2", Layout(dp_shard=2, tp=2)),
        pytest.param("Qwen3Moe", Layout(dp_shard=2, ep=2), marks=pytest.mark.deep),
        pytest.param("Llama", Layout(pp=2), marks=pytest.mark.deep),
        pytest.param("GPT2", Layout(dp_shard=2), marks=pytest.mark.deep),
        pytest.param("hf:Mixtral", Layout(dp_shard=2, ep=2), marks=pytest.mark.deep),
    ],
)
def test_each_rank_reads_its_own_slices(tmp_path: Path, family: str, layout: Layout) -> None:
    """And every layout starts from the same weights: loss and gradient norm are one device's."""
    folder = write_model(tmp_path / "m", family.removeprefix("hf:"), shards="20KB")
    name = f"hf:{folder}" if family.startswith("hf:") else str(folder)
    stored = read_safetensors(folder)
    held = sum(torch.Size(stored.shape(each)).numel() for each in stored)
    ((alone, loss, norm),) = run_ranks(read_and_step, 1, name, Layout())
    assert alone == held
    for read, loss_there, norm_there in run_ranks(read_and_step, layout.devices, name, layout):
        assert read <= held * (0.7 if layout.pp > 1 else 1.15 / layout.devices)  # norms are whole under some axes
        assert loss_there == pytest.approx(loss, rel=1e-6) and norm_there == pytest.approx(norm, rel=1e-5)


def distances(name: str, layout: Layout) -> tuple[float, dict[str, float]]:
    """Return how far a few steps move a model, in all and by block."""
    task = decoder_task(model=ModelSpec(name=name))
    world = world_here()
    _, built = run_steps(task, plan_of(layout), 3, world)
    found = moved(built.model, task, world, 3)
    assert isinstance(found, MovedRecord) and found.distance is not None
    return found.distance, {block: table["distance"] for block, table in found.blocks.items()}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("Qwen2", Layout(dp_shard=2, tp=2)), pytest.param("Llama", Layout(pp=2), marks=pytest.mark.deep)],
)
def test_a_model_has_moved_as_far_on_every_layout(tmp_path: Path, family: str, layout: Layout) -> None:
    """Parts that several ranks hold count once, and a block is the same whichever ranks hold it."""
    name = str(write_model(tmp_path / "m", family))
    ((alone, blocks),) = run_kept(distances, 1, name, Layout())
    assert list(blocks)[-1] in ("norm", "lm_head") and alone > 1e-3
    for distance, of_blocks in run_kept(distances, layout.devices, name, layout):
        assert distance == pytest.approx(alone, rel=1e-4)
        assert of_blocks == pytest.approx(blocks, rel=1e-3)


def distances_of_adapted(name: str, train: tuple[str, ...]) -> list[str] | None:
    """Return the blocks that are told to have moved, beside adapters on a base that rests in bf16."""
    adapter = {"kind": "lora", "rank": 2, "base_dtype": "bf16"}
    task = decoder_task(model=ModelSpec(name=name), adapter=adapter, train=train)
    world = world_here()
    _, built = run_steps(task, plan_of(Layout()), 1, world)
    found = moved(built.model, task, world, 1)
    return list(found.blocks) if isinstance(found, MovedRecord) else None


def test_a_frozen_base_does_not_move(tmp_path: Path) -> None:
    """What `base_dtype` rounds is no movement, and "0.00 % from the starting weights" says nothing of adapters."""
    name = str(write_model(tmp_path / "m", "Llama"))
    assert run_kept(distances_of_adapted, 1, name, ()) == [None]
    assert run_kept(distances_of_adapted, 1, name, ("norm",)) == [["norm"]]


def distances_of_a_part(name: str) -> dict[str, float] | None:
    """Return how far the blocks have moved of a model of which the last norm is trained alone, without adapters."""
    task = decoder_task(model=ModelSpec(name=name), train=("norm.*",))
    world = world_here()
    _, built = run_steps(task, plan_of(Layout()), 1, world)
    found = moved(built.model, task, world, 1)
    return (
        {block: table["distance"] for block, table in found.blocks.items()} if isinstance(found, MovedRecord) else None
    )


def test_what_is_frozen_without_adapters_is_told_to_have_stayed(tmp_path: Path) -> None:
    (found,) = run_kept(distances_of_a_part, 1, str(write_model(tmp_path / "m", "Llama")))
    assert found is not None and {name for name, distance in found.items() if distance} == {"norm"}
    assert {"embed_tokens", "layers.0", "layers.1"} <= set(found)


def write_spec(folder: Path, model: str, devices: int = 1, plan: str = "") -> Path:
    text = SPEC.format(model=model, corpus=write_corpus(folder), cache=folder / "cache", devices=devices, plan=plan,
                       run=folder / "run")  # fmt: skip
    path = folder / "spec.toml"
    path.write_text(text)
    return path


def run_well(*arguments: Any) -> str:
    done = in_process(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_starts_from_a_folder_goes_on_without_it_and_comes_back(tmp_path: Path) -> None:
    """The weights are on record, read once, and exported as the folder's own class loads them, tokenizer and all."""
    folder = write_tokenizer(write_model(tmp_path / "m", "Mistral", shards="20KB"))
    spec = write_spec(tmp_path, "./m")  # beside the spec file
    said = run_well("train", spec)
    assert "model    MistralForCausalLM as the built-in decoder: every entry" in said
    assert "the tokenizer is the folder's tokenizer.json" in said
    (decision,) = [record for record in records_of(tmp_path / "run", "decision") if record["what"] == "model"]
    assert decision["from"] == "MistralForCausalLM" and decision["evidence"]["differences"] == []
    weights = decision["evidence"]["weights"]
    assert weights["tensors"] == 21 and weights["fingerprint"] == starting_weights(str(folder)).fingerprint
    assert (tmp_path / "run" / "model" / "config.json").read_bytes() == (folder / "config.json").read_bytes()

    start, end = (record["loss"] for record in records_of(tmp_path / "run", "evaluation"))
    assert end < start  # what the weights could do before they were trained, and after
    (compared,) = records_of(tmp_path / "run", "moved")
    before, after = read_safetensors(folder), WholeTensors(choose_checkpoint(tmp_path / "run").path)
    for block in ("layers.1", "embed_tokens"):
        names = [name for name in after if name.startswith(block)]
        by = sum(float((after[name] - before[f"model.{name}"]).double().square().sum()) for name in names)
        of = sum(float(before[f"model.{name}"].double().square().sum()) for name in names)
        assert compared["blocks"][block]["distance"] == pytest.approx((by / of) ** 0.5, rel=1e-9)
    assert "Since the starting weights" in (tmp_path / "run" / "report.html").read_text()

    for file in folder.glob("*.safetensors*"):
        file.unlink()
    run_well("train", spec, "--set", "task.stop=3 steps")
    shutil.rmtree(folder)
    said = run_well("export", tmp_path / "run", tmp_path / "out")
    assert "step 3" in said and "MistralForCausalLM.from_pretrained loads it" in said
    assert (tmp_path / "out" / "tokenizer.json").is_file() and (tmp_path / "out" / "generation_config.json").is_file()
    stored = WholeTensors(choose_checkpoint(tmp_path / "run").path)
    theirs = loaded(tmp_path / "out")
    assert type(theirs).__name__ == "MistralForCausalLM" and theirs.config.sliding_window == 4096  # as it came
    assert theirs.config.vocab_size == SHAPE["vocab_size"]
    state = theirs.state_dict()
    for name in stored:
        assert torch.equal(state[name if name == "lm_head.weight" else f"model.{name}"], stored[name])


@pytest.mark.deep
@pytest.mark.parametrize("family", ["GPT2", "Qwen2"])
def test_an_export_of_shards_has_equal_logits(tmp_path: Path, family: str) -> None:
    """Weights of two ranks, one of them of transformers' own class, come back as a folder with the same logits."""
    write_model(tmp_path / "m", family)
    done = paceline("train", write_spec(tmp_path, "./m", 2, "dp_shard = 2"))
    assert done.returncode == 0, done.stderr
    run_well("export", tmp_path / "run", tmp_path / "out")
    tensors = WholeTensors(choose_checkpoint(tmp_path / "run").path)
    prefix = "" if family == "GPT2" else "model."
    trained = loaded(tmp_path / "m")
    names = {name: name if name == "lm_head.weight" else prefix + name for name in tensors}
    missing = trained.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    tokens = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "out").eval()(tokens).logits, trained.eval()(tokens).logits)
    assert not torch.equal(next(iter(loaded(tmp_path / "m").parameters())), next(iter(trained.parameters())))


def test_weights_in_bf16_are_read_as_they_are(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "Llama")
    file = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(rounded, file)
    run_well("train", write_spec(tmp_path, "./m"), "--set", "task.stop=1 steps", "--set", "task.optimizer.lr=1e-30",
             "--set", "plan.precision=fp32")  # fmt: skip
    stored = WholeTensors(choose_checkpoint(tmp_path / "run").path)
    assert all(torch.equal(stored[name], rounded[f"model.{name}"].float()) for name in stored)


def test_plan_refuses_weights_that_do_not_fit(tmp_path: Path) -> None:
    """Exit code 2 and all names, before a process starts."""
    folder = write_model(tmp_path / "m", "GPT2")
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("c_fc.bias")}
    save_file({**tensors, "other": torch.ones(2)}, file)
    done = in_process("plan", write_spec(tmp_path, "./m"))
    assert done.returncode == 2
    assert "2 missing: transformer.h.*.mlp.c_fc.bias (2); 1 unexpected: " in " ".join(done.stderr.split())

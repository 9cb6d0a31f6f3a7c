"""The tensor axis computes the numbers of one device: alone, with the data axes, and for models of every kind."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import tensor_models
import torch
import torch.nn.functional as F
from distributed import run_kept, run_ranks
from rounding import MEAN_LOSS_BF16, assert_curves_close
from tests_shared import SEQ_LEN, decoder_task, device_here, run_steps, world_here
from tests_shared import coarse_plan as plan_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from paceline.checkpoint import load_latest, materialise_optimizer_state, save_checkpoint, training_state
from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import ModelSpec, Task
from paceline.task.declared import declared_rules, tensor_axis
from paceline.task.models.build import build_model
from paceline.task.rules import Rules
from paceline.verify.compare.layout import compare

TP2, TP2_SHARD2, TP2_COPIES2 = Layout(tp=2), Layout(tp=2, dp_shard=2), Layout(tp=2, dp_replicate=2)


def compared(task: Task, plan: Plan, steps: int = 2) -> CheckProof:
    """Return the comparison with one device."""
    return compare(task, plan, world_here(), task.data, SEQ_LEN, steps)


def assert_equal_to_one_device(task: Task, plan: Plan) -> None:
    result = run_kept(compared, plan.layout.devices, task, plan)[0]
    assert result.equal, result.first_difference


def small_decoder(**changes: Any) -> Task:
    spec = dataclasses.replace(decoder_task().model, layers=2, **changes)
    return decoder_task(model=spec)


@pytest.mark.parametrize(
    ("layout", "setting"),
    [(TP2, {}), (TP2, {"recompute": "full"}), (TP2, {"recompute": "selective"}), (TP2_COPIES2, {}),
     (TP2_SHARD2, {"zero": 1, "recompute": "full"}), (TP2_SHARD2, {"zero": 2, "recompute": "selective"}),
     (TP2_SHARD2, {"zero": 3})],
    ids=str,
)  # fmt: skip
def test_a_decoder_with_a_split_sequence(layout: Layout, setting: dict[str, Any]) -> None:
    # 13 rows in micro-batches of 2: accumulation, ranks with different numbers of rows; 61 tokens: uneven vocabulary.
    assert_equal_to_one_device(small_decoder(), plan_of(layout, precision="fp64", **setting))


@pytest.mark.parametrize("layout", [TP2, Layout(tp=4)], ids=str)
def test_an_untied_decoder_of_uneven_width(layout: Layout) -> None:
    assert_equal_to_one_device(small_decoder(tied=False, kv_heads=4, ffn=41), plan_of(layout, precision="fp64"))


@pytest.mark.parametrize("layout", [TP2, TP2_SHARD2], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "Whole",
        "Tied",
        "SequenceDropout",
        *(pytest.param(kind, marks=pytest.mark.deep) for kind in ("WholeHead", "Sequence", "InnerDropout")),
    ],
)
def test_a_module_of_ones_own(kind: str, layout: Layout) -> None:
    task = decoder_task(model=getattr(tensor_models, kind), objective="next_token")
    assert_equal_to_one_device(task, plan_of(layout, precision="fp64"))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "gemma2",
        *(pytest.param(name, marks=pytest.mark.deep) for name in ("llama", "qwen2", "mistral", "llama_with_dropout")),
    ],
)
def test_hugging_face_models_bring_their_rules(family: str) -> None:
    task = decoder_task(model=getattr(tensor_models, family), objective="next_token")
    assert_equal_to_one_device(task, plan_of(TP2, batch=6, precision="fp64"))


def losses(task: Task, plan: Plan) -> list[float]:
    return [stats.loss for stats in run_steps(task, plan, 4)[0]]


@pytest.mark.parametrize("layout", [TP2, TP2_SHARD2], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_one_device(layout: Layout, precision: str) -> None:
    (expected,) = run_kept(losses, 1, small_decoder(), plan_of(Layout(), precision=precision))
    for ours in run_kept(losses, layout.devices, small_decoder(), plan_of(layout, precision=precision)):
        assert_curves_close(ours, expected, MEAN_LOSS_BF16)


# ---- what a rank holds ---------------------------------------------------------------------------------------------


def held(layout: Layout) -> dict[str, Any]:
    task, plan = small_decoder(), plan_of(layout)
    built = assemble(task, plan, world_here(), task.data, SEQ_LEN)
    model, tokens = built.model, torch.zeros(2, SEQ_LEN, dtype=torch.int64, device=device_here())
    inputs: list[torch.Size] = []
    model.layers[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0].shape))
    logits = model(tokens)
    assert isinstance(logits, DTensor)
    own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    return {
        "logits": (logits.shape, logits.to_local().shape), "stream": inputs[0], "own": own, "vectors": vectors,
        "all": sum(p.numel() for p in model.parameters()),
        "names": sorted(name for name, _ in model.named_parameters()),
    }  # fmt: skip


def test_weights_logits_and_the_stream_are_parts() -> None:
    ranks = run_kept(held, 2, TP2)
    whole = sorted(
        name for name, _ in build_model(small_decoder().model, 61, SEQ_LEN, 7, device="meta").named_parameters()
    )
    for rank, found in enumerate(ranks):
        assert found["names"] == whole
        assert found["stream"] == (2, SEQ_LEN // 2, 32)
        assert found["logits"] == ((2, SEQ_LEN, 61), (2, SEQ_LEN, (31, 30)[rank]))
        matrices = found["all"] - found["vectors"]
        assert found["own"] - found["vectors"] == pytest.approx(matrices / 2, rel=0.01)


def activations_left(task: Task) -> list[int]:
    """Return how many activations are alive after each of three steps, without the help of the collector."""
    plan, world = plan_of(TP2), world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    alive: list[weakref.ref[Any]] = []
    for layer in built.model.modules():
        layer.register_forward_hook(
            lambda _m, _i, out: alive.append(weakref.ref(out[0] if isinstance(out, tuple) else out))
        )
    gc.collect()
    gc.disable()
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    found = []
    for step in range(3):
        built.stepper.step(stream.at(step * plan.batch_samples), 1e-3)
        found.append(sum(ref() is not None for ref in alive))
    gc.enable()
    return found


@pytest.mark.parametrize("task", [small_decoder(), decoder_task(model=tensor_models.Whole, objective="next_token")])
def test_no_activation_outlives_its_step(task: Task) -> None:
    for found in run_ranks(activations_left, 2, task):
        assert found[0] == found[-1] == 0


def save_or_load(root: str, layout: Layout, load: bool) -> dict[str, torch.Tensor]:
    """Train two steps and save, or load without a step; return the full state."""
    task, plan, world = small_decoder(tied=False), plan_of(layout), world_here()
    built = assemble(dataclasses.replace(task, seed=1 if load else 0), plan, world, task.data, SEQ_LEN)
    if load:
        materialise_optimizer_state(built.optimizer)
        assert load_latest(Path(root), training_state(built.model, built.optimizer)) is not None
    else:
        stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
        for step in range(2):
            built.stepper.step(stream.at(step * plan.batch_samples), 1e-3)
        save_checkpoint(Path(root), 2, training_state(built.model, built.optimizer), {}, keep_last=1)
    state = training_state(built.model, built.optimizer)
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in state.items()}


@pytest.mark.parametrize(
    "before", [TP2_SHARD2, *(pytest.param(layout, marks=pytest.mark.deep) for layout in (TP2, Layout()))], ids=str
)
def test_a_checkpoint_loads_into_any_other_layout(tmp_path: Path, before: Layout) -> None:
    saved = run_ranks(save_or_load, before.devices, str(tmp_path), before, False)[0]
    for after in (Layout(), TP2, TP2_SHARD2, Layout(dp_shard=2), TP2_COPIES2):
        for loaded in run_ranks(save_or_load, after.devices, str(tmp_path), after, True):
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("HalfTied", "tied to a weight that is spread"), ("Forgotten", "no rule for 'layers.0.norm2'"),
     ("Misfit", "rule 'row' for 'norm'"),
     ("deepseek_v2", "mla_kv_a_proj")],
)  # fmt: skip
def test_what_would_compute_something_else_is_an_error(kind: str, reason: str) -> None:
    task = decoder_task(model=getattr(tensor_models, kind), objective="next_token")
    with pytest.raises(ConfigError) as error:
        run_ranks(losses, 2, task, plan_of(TP2, batch=6))
    assert reason in str(error.value)


def plain_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of logits, taken for a plain tensor."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def loss_of_whole(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same with a z-loss, of logits that are made whole where ranks share them."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss + 1e-2 * (logits.logsumexp(-1).square() * (labels != -100)).sum(), (labels != -100).sum()


@pytest.mark.parametrize("layout", [TP2, TP2_SHARD2], ids=str)
def test_an_objective_that_takes_spread_logits_for_plain_ones_is_told_the_way_out(layout: Layout) -> None:
    """torch's words were all that was said, or that a weight was used outside of its block, or that rules are wrong."""
    task = decoder_task(model=tensor_models.Whole, objective=plain_loss)
    with pytest.raises(ConfigError) as error:
        run_ranks(losses, layout.devices, task, plan_of(layout, batch=6))
    assert "plain_loss computes with logits that tensor ranks share" in str(error.value)
    assert "logits.full_tensor()" in error.value.try_
    task = decoder_task(model=tensor_models.Whole, objective=loss_of_whole)
    assert_equal_to_one_device(task, plan_of(layout, precision="fp64"))


def test_a_model_without_rules_says_which_would_open_the_axis() -> None:
    limits, because = tensor_axis(nn.Linear(3, 3))
    assert limits is None and not because
    limits, because = tensor_axis(tensor_models.deepseek_v2())
    assert limits is None and "mla_kv_a_proj" in because
    limits, _ = tensor_axis(tensor_models.Whole())
    assert limits is not None and limits.counts == {"heads": 4} and min(limits.splits) == 16


def test_rules_that_match_nothing_or_are_none() -> None:
    model = tensor_models.Whole()
    model.paceline_rules = Rules(tensor={"layers.*.qq": "column"})
    with pytest.raises(ConfigError, match="matches no module"):
        tensor_axis(model)
    model.paceline_rules = {"layers.*.q": "column"}
    with pytest.raises(ConfigError, match="of type dict"):
        declared_rules(model)


def test_the_chain_of_a_hugging_face_model() -> None:
    rules = declared_rules(tensor_models.llama())
    assert rules is not None
    assert (rules.first, rules.blocks, rules.last) == (
        ("model.embed_tokens",),
        "model.layers",
        ("model.norm", "lm_head"),
    )
    assert rules.tensor["lm_head"] == rules.tensor["model.embed_tokens"] == "vocabulary"
    assert declared_rules(build_model(ModelSpec("llama-1m"), 61, SEQ_LEN, 7, device="meta")) is not None


def uneven_columns() -> str:
    layer = nn.Linear(5, 4, bias=False, device=device_here())
    mesh = init_device_mesh(device_here().type, (2,), mesh_dim_names=("fsdp",))
    try:
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    except NotImplementedError as error:
        return str(error)
    return ""


def test_torch_still_shards_uneven_columns_not_at_all() -> None:
    # When this fails, plan/feasible/tensor.py need no longer refuse widths that dp_shard * cp does not divide.
    assert "does not support uneven sharding on dim 1" in run_ranks(uneven_columns, 2)[0]

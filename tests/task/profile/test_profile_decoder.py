"""The analytic profile against the model that is built: parameters, FLOPs, and what autograd really keeps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_shared import PaddedText, decoder_task
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from paceline.run.memory.recompute import checkpoint_block
from paceline.spec.task import DataSpec, ModelSpec
from paceline.task.data.facts import data_facts
from paceline.task.models.build import build_model
from paceline.task.models.decoder import Decoder
from paceline.task.models.init import initialise
from paceline.task.models.layers import gradients_ahead
from paceline.task.models.layers.loss import cross_entropy_sum
from paceline.task.models.shape import DecoderConfig, MoEConfig
from paceline.task.models.sizes import NAMED_SIZES, nominal_vocab
from paceline.task.objective import next_token
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.moe import profile_moe
from paceline.task.profile.of_task import profile_task
from paceline.task.profile.traced import REST, profile_module

ROWS, SEQ = 2, 48
SHAPES = {
    "tied, grouped": DecoderConfig("a", 64, 3, 4, 2, 16, 160, vocab=97, tied=True),
    "untied": DecoderConfig("b", 48, 2, 4, 4, 12, 96, vocab=33, tied=False),
}


@pytest.fixture(params=SHAPES)
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return SHAPES[request.param]


class Products(TorchDispatchMode):
    """Counts the FLOPs of products of matrices, attention's own aside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it where it is such a product."""
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def batch(vocab: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, vocab, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "labels": tokens}


def saved_bytes(model: Decoder) -> dict[torch.dtype, int]:
    """Return the bytes that autograd keeps in one real forward pass, by dtype; weights and the batch not counted."""
    example = batch(model.config.vocab)
    ours = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *example.values()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sum, _ = next_token(model, example)
    assert loss_sum.requires_grad
    found: dict[torch.dtype, int] = {}
    for address, tensor in kept.items():
        if address not in ours:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("name", NAMED_SIZES)
def test_parameters_equal_the_built_model(name: str) -> None:
    config = dataclasses.replace(NAMED_SIZES[name], vocab=nominal_vocab(NAMED_SIZES[name]))
    model = build_model(ModelSpec(name=name), config.vocab, seq_len=128, seed=0, device="meta")
    profile = profile_moe(config, 128) if isinstance(config, MoEConfig) else profile_decoder(config, 128)
    assert profile.parameters == sum(parameter.numel() for parameter in model.parameters()) == config.parameters
    by_name = {block.name: block.parameters for block in profile.blocks}
    for index, layer in enumerate(model.layers):
        assert by_name[f"layers.{index}"] == sum(parameter.numel() for parameter in layer.parameters())


def test_flops_equal_torchs_counter(config: DecoderConfig) -> None:
    with torch.device("meta"):
        model = Decoder(config)
        tokens = torch.zeros(ROWS, SEQ, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    profile = profile_decoder(config, SEQ)
    # torch counts attention without regard to causality.
    full = profile.forward_flops + sum(block.attention_flops for block in profile.blocks)
    assert counter.get_total_flops() == pytest.approx(ROWS * full, rel=1e-9)


def test_full_recompute_runs_all_of_a_block_again_but_its_last_product(config: DecoderConfig) -> None:
    counted = {}
    for mode in ("none", "selective", "full"):
        model = Decoder(config)
        initialise(model, seed=0)
        for layer in model.layers:
            checkpoint_block(layer, mode, compiled=True)
        with Products() as products:
            model(batch(config.vocab)["tokens"]).sum().backward()
        counted[mode] = products.flops
    layers = [block for block in profile_decoder(config, SEQ).blocks if block.recomputable]
    again = sum(block.matmul_flops - block.last_flops for block in layers)
    assert counted["full"] - counted["none"] == ROWS * again
    assert counted["selective"] == counted["none"], "products are kept"


def test_keys_are_under_a_mask_where_documents_are_apart(tmp_path: Path) -> None:
    """A data set given as an object says nothing of documents: its plans ended with an AttributeError."""
    (tmp_path / "a.txt").write_text("some text of no meaning " * 50)
    files = DataSpec(str(tmp_path), seq_len=16, cache_dir=str(tmp_path / "cache"))
    apart = dataclasses.replace(files, cross_documents=False)
    found = []
    for data in (PaddedText(), files, apart):
        task = decoder_task(data=data, model=ModelSpec("llama-1m"))
        found.append(profile_task(task, data_facts(data)))
    assert [each.source for each in found] == ["analytic"] * 3
    assert [each.masked for each in found] == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_bytes_are_what_autograd_keeps(config: DecoderConfig, dtype: torch.dtype) -> None:
    model = Decoder(config)
    initialise(model, seed=0)
    kept = saved_bytes(model.to(dtype))
    profile = profile_decoder(config, SEQ)
    compute = ROWS * sum(block.saved_elements for block in profile.blocks)
    wide = ROWS * sum(block.saved_fp32_elements for block in profile.blocks)
    fixed = sum(block.fixed_elements for block in profile.blocks)
    rotary = 2 * SEQ * config.head_dim  # the tables, shared by all layers and rows: not in the profile
    if dtype == torch.bfloat16:
        assert kept[torch.bfloat16] == 2 * (compute + rotary)
        assert kept[torch.float32] == 4 * (wide + fixed)
    else:
        assert kept[torch.float32] == 4 * (compute + rotary + wide + fixed)
    total = compute * dtype.itemsize + 4 * (wide + fixed)
    assert sum(kept.values()) == pytest.approx(total, rel=0.05)


def test_trace_agrees_with_the_formulas(config: DecoderConfig) -> None:
    with torch.device("meta"):
        model = Decoder(config)
    analytic, traced = profile_decoder(config, SEQ), profile_module(model, batch(config.vocab), next_token)
    assert traced.parameters == analytic.parameters
    assert traced.tokens_per_sample == analytic.tokens_per_sample == SEQ
    assert traced.forward_flops == pytest.approx(analytic.forward_flops, rel=1e-9)
    assert traced.closed_axes == analytic.closed_axes
    ours = {block.name: block for block in analytic.blocks}
    assert [block.name for block in traced.blocks] == [name for name in ours if name.startswith("layers")] + [REST]
    for theirs in traced.blocks[1:-1]:  # the first layer's also holds the rotary tables
        mine = ours[theirs.name]
        for field in ("parameters", "matmul_flops", "attention_flops", "saved_elements", "saved_fp32_elements",
                      "selective_elements", "input_elements", "operators", "matmul_width"):  # fmt: skip
            assert getattr(theirs, field) == getattr(mine, field), field
        assert theirs.moved_elements == pytest.approx(mine.moved_elements, rel=0.02)
        assert theirs.recomputable
        assert mine.recomputable


def test_selective_is_between_full_and_none() -> None:
    for size in NAMED_SIZES.values():
        profile = profile_decoder(dataclasses.replace(size, vocab=nominal_vocab(size)), 512)
        layer = profile.blocks[1]
        assert layer.input_elements < layer.selective_elements < layer.saved_elements


def test_a_tied_heads_weight_is_counted_once_and_its_work_is_not() -> None:
    tied = profile_decoder(SHAPES["tied, grouped"], SEQ)
    untied = profile_decoder(dataclasses.replace(SHAPES["tied, grouped"], tied=False), SEQ)
    assert tied.blocks[-1].tied_to == "embed_tokens"
    assert untied.parameters - tied.parameters == 97 * 64
    assert tied.forward_flops == untied.forward_flops


def test_logits_are_capped_by_the_chunk() -> None:
    head = profile_decoder(NAMED_SIZES["llama-1b"], 8192).blocks[-1]
    assert head.transient_elements == head.transient_cap_elements < 1.5 * 8192 * 128_256
    large = profile_decoder(NAMED_SIZES["llama-70b"], 8192).blocks[-1]
    assert large.transient_elements == large.transient_cap_elements == 0.5 * 128_256 * 8192, "its gradient, in bf16"


def most_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes that stand at once of what work allocates and lets go of."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = sorted((e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"),
                    key=lambda event: event.start_ns())  # fmt: skip
    return max(itertools.accumulate(event.nbytes() for event in events))


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 6), (torch.float32, 4)])
def test_a_chunk_of_logits_stands_once_in_each_dtype(dtype: torch.dtype, each: int) -> None:
    """Nothing of the former chunk is left, and exponentials and gradients are written over the logits."""
    tokens, width, vocab, chunk = 2000, 16, 2500, 500
    hidden, head = (torch.randn(rows, width, dtype=dtype, requires_grad=True) for rows in (tokens, vocab))
    labels = torch.zeros(tokens, dtype=torch.int64)
    most = most_bytes(lambda: cross_entropy_sum(hidden, head, labels, chunk * vocab))
    kept = tokens * width * dtype.itemsize + 4 * vocab * width
    assert most - kept == pytest.approx(each * chunk * vocab, rel=0.04)
    assert each <= 4 * 1.5, "of the profile, in fp32 elements"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_heads_gradient_is_made_by_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products beside their sum, and what is scaled beside what is cast, are those of some rows."""
    monkeypatch.setattr(gradients_ahead, "ROWS_ELEMENTS", 20 * 512)
    hidden, head = (torch.randn(rows, 512, dtype=dtype, requires_grad=True) for rows in (1000, 2500))
    labels, chunk, found = torch.zeros(1000, dtype=torch.int64), 50, list[Tensor]()
    forward = most_bytes(lambda: found.append(cross_entropy_sum(hidden, head, labels, chunk * 2500)[0]))
    kept = dtype.itemsize * 1000 * 512 + 4 * 2500 * 512
    if dtype == torch.float32:  # products in 16 bits may want memory of their own, by processor
        assert forward - kept == pytest.approx(4 * chunk * 2500, rel=0.3)
    assert most_bytes(found[0].backward) == pytest.approx(dtype.itemsize * (1000 + 2500) * 512, rel=0.04)


@pytest.mark.parametrize("rows", [7, 64])
def test_rows_at_a_time_are_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = (torch.randn(count, 8, dtype=torch.float64, requires_grad=True) for count in (12, 30))
    labels = torch.randint(0, 30, (12,))
    monkeypatch.setattr(gradients_ahead, "ROWS_ELEMENTS", rows * 8)
    loss, _ = cross_entropy_sum(hidden, head, labels, 5 * 30)
    (3 * loss).backward()
    own = [tensor.grad for tensor in (hidden, head)]
    hidden.grad = head.grad = None
    whole = torch.nn.functional.cross_entropy(hidden @ head.T, labels, reduction="sum")
    (3 * whole).backward()
    torch.testing.assert_close(own, [hidden.grad, head.grad])
    torch.testing.assert_close(loss, whole)

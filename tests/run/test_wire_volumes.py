"""What real ranks put on the wire in a step, counted, against the collectives that price and placement count."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_kept
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of, world_here
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.collectives.of_a_step import collectives
from paceline.plan.cost.collectives.within_passes import expert_passes
from paceline.plan.cost.sheet import PricedTask
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.parallel.context import exchange, sequence_attention
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.cluster import ClusterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.build import build_model
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.adapted import adapted_profile
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.moe import profile_moe

BATCH = 8
SCALARS = 100  # bytes of a buffer: what is smaller is the step's own accounting (weights, norms, agreement)
KINDS = {"allgather": "all_gather", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
         "allreduce": "all_reduce", "all_reduce": "all_reduce", "alltoall": "all_to_all", "send": "send"}  # fmt: skip


WHOLE = AdapterSpec()  # none


class WireCount(TorchDispatchMode):
    """Counts the bytes of the whole buffers of every collective that runs while it is active, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it where it is a collective."""
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__.strip("_")
        kind = next((kind for prefix, kind in KINDS.items() if name.startswith(prefix)), None)
        if func.namespace in ("c10d", "_c10d_functional") and kind:
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            largest = max(
                tensor.nbytes for tensor in tensors
            )  # of a gather what it leaves, of a reduction what it takes
            self.buffer_bytes[kind] += largest if largest >= SCALARS else 0
        return result

    def inside(self, kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Return a collective that is counted where an operator of ours makes it, out of this mode's sight."""

        def counts(output: torch.Tensor, own: torch.Tensor, *rest: Any, **more: Any) -> Any:
            self.buffer_bytes[kind] += max(output.nbytes, own.nbytes)
            return collective(output, own, *rest, **more)

        return counts


class PackedText(PaddedText):
    """The same rows, each of two documents that do not see each other."""

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return the rows, with the document of each token."""
        documents = torch.ones(len(ids), SEQ_LEN, dtype=torch.int64)
        documents[:, SEQ_LEN // 2 - 1 :] = 2
        return {**super().read(ids, positions), "documents": documents}


def task_of(adapter: AdapterSpec, experts: int, masked: bool = False) -> Task:
    """Return a decoder, with experts in every layer where there are to be any."""
    task = decoder_task(adapter=adapter, data=PackedText() if masked else PaddedText())
    if experts:
        sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": task.data.vocab}
        model = ModelSpec("moe-2m", experts=experts, top_k=2, ffn=24, **sizes)
        task = dataclasses.replace(task, model=model)
    return task


def counted(plan: Plan, adapter: AdapterSpec = WHOLE, experts: int = 0, masked: bool = False) -> dict[str, int]:
    """Return the bytes of this rank's collectives in its second step."""
    task = task_of(adapter, experts, masked)
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    built.stepper.step(stream.at(0), 1e-3)
    with WireCount() as count, pytest.MonkeyPatch.context() as patch:
        for kind in ("all_gather", "reduce_scatter"):
            for module in (exchange, sequence_attention):
                patch.setattr(module, kind, count.inside(kind, getattr(module, kind)))
        built.stepper.step(stream.at(BATCH), 1e-3)
    return dict(count.buffer_bytes)


def told(plan: Plan, adapter: AdapterSpec = WHOLE, masked: bool = False) -> Counter[str]:
    """Return what the one description of collectives says of the same step."""
    task = decoder_task(adapter=adapter)
    model = profile_decoder(resolve_decoder(task.model, task.data.vocab, SEQ_LEN), SEQ_LEN)
    model = adapted_profile(model, build_model(task.model, task.data.vocab, SEQ_LEN, 0, "meta", task.adaptation))
    model = dataclasses.replace(model, masked=masked)
    where = resolve_cluster(ClusterSpec("a100-80", plan.layout.devices))[0]
    found: Counter[str] = Counter()
    for one in collectives(PricedTask(model, where, BATCH, 1).sheet(plan)):
        if plan.layout.group(one.axis)[0] > 1:
            found[one.kind] += float(one.buffer_bytes[0])
    if plan.layout.tp > 1:  # gradients of norms are parts of a sum over tp too: a few vectors, which nobody prices
        size = resolve_decoder(task.model, task.data.vocab, SEQ_LEN)
        found["all_reduce"] += (2 * size.layers + 1) * size.hidden * 4
    return Counter({kind: value for kind, value in found.items() if value})


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [("dp_replicate", "none"), ("dp_shard", "none"), ("cp", "none"), ("cp", "selective"), ("cp", "full"),
     ("tp", "none"), ("tp", "selective"), ("tp", "full")],
)  # fmt: skip
def test_counted_bytes_are_those_told(layout: str, recompute: str) -> None:
    for zero, whole in ((1, False), (3, False), (3, True)) if layout == "dp_shard" else ((1, False),):
        plan = plan_of(
            Layout(**{layout: 2}), BATCH, precision="fp32", zero=zero, recompute=recompute, whole_gradients=whole
        )
        expected = told(plan)
        for seen in run_kept(counted, 2, plan):
            for kind, value in expected.items():
                assert seen[kind] == pytest.approx(value, rel=0.01), (zero, whole, kind)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_keys_of_packed_documents_are_gathered_once_and_again_in_recompute(recompute: str) -> None:
    """They are kept for the backward pass, which gathered them a second time by the price; around a ring too."""
    for method in ("gather", "ring"):
        plan = plan_of(Layout(cp=2), BATCH, precision="fp32", recompute=recompute, cp_method=method, zero=1)
        expected = told(plan, masked=True)
        for seen in run_kept(counted, 2, plan, WHOLE, 0, True):
            for kind, value in expected.items():
                assert seen[kind] == pytest.approx(value, rel=0.01), (method, kind)


def test_recompute_sends_tokens_to_their_experts_and_back_once_more() -> None:
    """Twice in each pass, and as often again where a block's products are kept as where nothing is.

    How many rows cross depends on the router, so what is held to the formula is their part of those without recompute.
    """
    layout, crossed = Layout(dp_shard=2, ep=2), {}
    for recompute in ("none", "selective", "full"):
        plan = plan_of(layout, BATCH, precision="fp32", recompute=recompute)
        crossed[recompute] = sum(seen["all_to_all"] for seen in run_kept(counted, 2, plan, WHOLE, 4))
        task = task_of(WHOLE, 4)
        config = resolve_decoder(task.model, task.data.vocab, SEQ_LEN)
        where = resolve_cluster(ClusterSpec("a100-80", 2))[0]
        sheet = PricedTask(profile_moe(config, SEQ_LEN), where, BATCH, 1).sheet(plan)
        assert crossed[recompute] / crossed["none"] == pytest.approx(float(expert_passes(sheet)[0]) / 4), recompute
    assert crossed["full"] == pytest.approx(1.5 * crossed["none"])


@pytest.mark.parametrize(("kind", "recompute"), [("lora", "none"), ("dora", "full")])
def test_the_bytes_of_spread_four_bits_are_those_told(kind: str, recompute: str) -> None:
    """Of copies whose adapters alone are reduced: all that is gathered is the four bits, whenever they are unpacked."""
    adapter = AdapterSpec(kind=kind, rank=4, init="random", base_dtype="nf4")
    plan = plan_of(Layout(dp_replicate=2), BATCH, precision="fp32", frozen="spread", recompute=recompute)
    expected = told(plan, adapter)
    assert set(expected) == {"all_gather", "all_reduce"}
    # The first block's query, key and value read what has no gradient, and unpack nothing in the backward pass.
    size = resolve_decoder(decoder_task().model, decoder_task().data.vocab, SEQ_LEN)
    width = size.hidden * (size.heads + 2 * size.kv_heads) / size.heads
    expected["all_gather"] -= plan.accumulation * 0.5 * size.hidden * width
    for seen in run_kept(counted, 2, plan, adapter):
        assert seen["all_gather"] == pytest.approx(expected["all_gather"], rel=1e-6)

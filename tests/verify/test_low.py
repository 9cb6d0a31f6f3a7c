"""Low precision: layouts in bf16 and fp16 hold against one device, and what keeps or sends less than fp32 is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, Dropout, decoder_task, plan_of

from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.run import precision, step
from paceline.run.parallel import data
from paceline.run.replicas.allreduce import ReducedGradients
from paceline.run.world import join_world
from paceline.task.models import decoder as decoders
from paceline.task.task import ModelSpec, OptimizerSpec, Task
from paceline.verify.low import low

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": VOCAB}
DENSE = decoder_task(model=ModelSpec("llama-1m", **SMALL), optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))
EXPERTS = decoder_task(model=ModelSpec("moe-2m", **{**SMALL, "ffn": 24, "experts": 8, "top_k": 2}))
DROPS = decoder_task(model=Dropout, objective="next_token")
REPLICATED, SHARDED = Layout(dp_replicate=2), Layout(dp_shard=2)


def plan_in(layout: Layout, dtype: str = "bf16", **changes: Any) -> Plan:
    return plan_of(layout, precision=dtype, **changes)


def proofs(cases: list[tuple[Task, Plan]], bug: str = "") -> list[dict[str, Any]]:
    """Return the check's results in this world, with a bug planted in it."""
    world = join_world("cpu", threads=1)
    with ExitStack() as stack:
        if bug:
            stack.enter_context(globals()[bug]())
        return [low(task, plan, world, task.data, SEQ_LEN, 2) for task, plan in cases]


def right_cases() -> list[tuple[Task, Plan]]:
    plans = [plan_in(REPLICATED), plan_in(SHARDED, zero=1), plan_in(SHARDED, zero=2), plan_in(Layout(tp=2)),
             plan_in(Layout(cp=2)), plan_in(Layout(pp=2), recompute="full")]  # fmt: skip
    plans += [plan_in(layout, "fp16") for layout in (REPLICATED, SHARDED, Layout(tp=2))]
    return [(DENSE, plan) for plan in plans] + [
        (EXPERTS, plan_in(Layout(dp_shard=2, ep=2))), (EXPERTS, plan_in(Layout(tp=2))), (DROPS, plan_in(SHARDED)),
    ]  # fmt: skip


def test_right_layouts_are_equal_in_low_precision() -> None:
    cases = right_cases()
    for (task, plan), proof in zip(cases, run_ranks(proofs, 2, cases, timeout_seconds=200)[0], strict=True):
        assert proof["equal"], (task.model, str(plan), proof["first_difference"])


# ---- planted bugs ----------------------------------------------------------------------------------------------------


@contextmanager
def shards_reduced_in_bf16() -> Iterator[None]:
    policy = data.MixedPrecisionPolicy
    with patch.object(data, "MixedPrecisionPolicy", lambda **given: policy(given["param_dtype"], torch.bfloat16)):
        yield


@contextmanager
def copies_reduced_in_bf16() -> Iterator[None]:
    plain = dist.all_reduce

    def rounded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() < 100:
            return plain(tensor, *args, **kwargs)
        small = tensor.bfloat16()
        plain(small, group=kwargs.get("group"))
        tensor.copy_(small)
        return plain(torch.zeros(1), async_op=True)

    with patch.object(dist, "all_reduce", rounded):
        yield


@contextmanager
def accumulated_in_bf16() -> Iterator[None]:
    before = ReducedGradients.before_micro_batch

    def rounding(self: ReducedGradients, last: bool) -> None:
        for bucket in self._buckets:
            bucket.flat.copy_(bucket.flat.bfloat16())
        before(self, last)

    with patch.object(ReducedGradients, "before_micro_batch", rounding):
        yield


@contextmanager
def weights_kept_in_bf16() -> Iterator[None]:
    with patch.dict(precision.MASTER_DTYPES, {"bf16": torch.bfloat16}):
        yield


@contextmanager
def weights_rounded_to_bf16() -> Iterator[None]:
    update = step.Stepper._update

    def rounding(self: step.Stepper, *args: Any) -> bool:
        updated = update(self, *args)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.bfloat16())
        return updated

    with patch.object(step.Stepper, "_update", rounding):
        yield


@contextmanager
def moments_rounded_to_bf16() -> Iterator[None]:
    update = step.Stepper._update

    def rounding(self: step.Stepper, *args: Any) -> bool:
        updated = update(self, *args)
        for state in self.optimizer.state.values():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())
        return updated

    with patch.object(step.Stepper, "_update", rounding):
        yield


@contextmanager
def skipped_on_one_rank() -> Iterator[None]:
    update = precision.LossScaler.update

    def alone(self: precision.LossScaler, overflowed: bool) -> None:
        update(self, overflowed and dist.get_rank() == 0)

    with patch.object(precision.LossScaler, "update", alone):
        yield


@contextmanager
def loss_in_bf16() -> Iterator[None]:
    forward = decoders.Decoder.forward

    def rounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, weight = forward(self, *args, **kwargs)
        return loss.bfloat16(), weight

    with patch.object(decoders.Decoder, "forward", rounded):
        yield


@pytest.mark.parametrize(
    ("bug", "plan", "quantity", "named"),
    [
        ("shards_reduced_in_bf16", plan_in(SHARDED), "dtype", "reduce_scatter"),
        ("shards_reduced_in_bf16", plan_in(SHARDED, zero=1), "dtype", "reduce_scatter"),
        ("copies_reduced_in_bf16", plan_in(REPLICATED), "dtype", "allreduce"),
        ("accumulated_in_bf16", plan_in(REPLICATED), "gradients", ""),
        ("weights_kept_in_bf16", plan_in(SHARDED), "dtype", "the weight of"),
        ("weights_rounded_to_bf16", plan_in(SHARDED), "weights", ""),
        ("moments_rounded_to_bf16", plan_in(REPLICATED), "dtype", "exp_avg in the optimizer"),
        ("skipped_on_one_rank", plan_in(REPLICATED, "fp16"), "decision", "the loss scale"),
        ("loss_in_bf16", plan_in(SHARDED), "dtype", "the sum of losses"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_bugs_are_found_by_name(bug: str, plan: Plan, quantity: str, named: str) -> None:
    proof = run_ranks(proofs, 2, [(DENSE, plan)], bug)[0][0]
    assert not proof["equal"]
    first = proof["first_difference"]
    assert first["quantity"] == quantity and named in first["name"], first

"""`paceline.verify_loop` where rounding is large: right loops are never unequal, wrong ones are, at the same place."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_kept
from set_ups import net
from tests_shared import VOCAB
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import paceline
from paceline.spec.proof.records import LoopProof

STEPS, CLIP_NORM = 3, 0.1
MISTAKES = {  # -> the quantity and the step at which it shows first
    "mean of the ranks' means": ("gradients", 1),
    "zero_grad forgotten": ("gradients", 2),
    "clipping forgotten": ("gradients", 1),
    "weight decay forgotten": ("weights", 1),
    "rate two hundredths too large": ("weights", 1),
    "rate one step late": ("weights", 2),
}


@dataclass(frozen=True)
class Program:
    """What is trained: Adam's eps and learning rate, and the format."""

    eps: float
    lr: float = 1e-3
    dtype: torch.dtype = torch.float32


# Keys' biases have gradients that are zero but for rounding, which Adam divides by their own size.
ROUNDING = Program(eps=1e-12)
TAME = Program(eps=1e-4)


def objective(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return loss, (labels != -100).sum()


def batches_of(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return token rows of which every rank has another number of labels that count."""
    generator = torch.Generator().manual_seed(10 + rank)
    rows = [torch.randint(0, VOCAB, (4, 12), generator=generator) for _ in range(STEPS)]
    return [(row, row.roll(-1, 1).index_fill(1, torch.arange(1 + 4 * rank), -100)) for row in rows]


def adamw(
    parameters: Any, program: Program, weight_decay: float = 0.1, factor: float = 1.0, late: int = 0
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """Return AdamW with a rate that falls in every step, and its schedule."""
    optimizer = torch.optim.AdamW(parameters, lr=factor * program.lr, eps=program.eps, weight_decay=weight_decay)
    return optimizer, LambdaLR(optimizer, lambda done: 1 / (1 + max(0, done - late)))


def loop(program: Program, mistake: str = "") -> LoopProof:
    """Hold a loop on DDP, with one mistake or none, against one device."""
    torch.manual_seed(3)
    model = DistributedDataParallel(net().to(program.dtype))
    optimizer, schedule = adamw(
        model.parameters(),
        program,
        weight_decay=0.0 if mistake == "weight decay forgotten" else 0.1,
        factor=1.02 if mistake == "rate two hundredths too large" else 1.0,
        late=int(mistake == "rate one step late"),
    )

    def step(batch: Any) -> torch.Tensor:
        if mistake != "zero_grad forgotten":
            optimizer.zero_grad()
        loss, weight = objective(model, batch)
        total = torch.stack([loss.detach().double(), weight.double()])
        dist.all_reduce(total)
        world = dist.get_world_size()
        (loss / weight if mistake == "mean of the ranks' means" else loss * world / total[1].to(loss.dtype)).backward()
        if mistake != "clipping forgotten":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        return total[0] / total[1]

    result: LoopProof = paceline.verify_loop(
        step, model, batches_of(dist.get_rank()), objective=objective, clip_norm=CLIP_NORM,
        optimizer=functools.partial(adamw, program=program),
    )  # fmt: skip
    return result


def loops(program: Program, mistakes: list[str]) -> list[LoopProof]:
    return [loop(program, mistake) for mistake in mistakes]


def test_a_right_loop_that_rounding_drives_is_ill_conditioned() -> None:
    ranks = run_kept(loops, 2, ROUNDING, [""])
    (found,) = ranks[0]
    assert all(other == [dataclasses.replace(found, seconds=other[0].seconds)] for other in ranks)
    rounding = found.ill_conditioned
    assert found.verdict == "ill-conditioned" and found.equal is None and found.first_difference is None
    assert (rounding.quantity, rounding.step) == ("weights", 1) and ".k.bias" in rounding.name
    assert rounding.relative > rounding.tolerance and rounding.relative <= 6 * rounding.moved
    assert "where rounding weights to fp32 moves one device by" in found.text and "double" in found.text


@pytest.mark.parametrize("program", [ROUNDING, TAME, Program(eps=1e-12, lr=1e-5), Program(eps=1e-4, lr=1e-5)], ids=str)
def test_a_wrong_loop_is_unequal_where_it_goes_wrong(program: Program) -> None:
    """Whether rounding is large or not, and however small the rate."""
    for mistake, found in zip(MISTAKES, run_kept(loops, 2, program, list(MISTAKES))[0], strict=True):
        first = found.first_difference
        assert found.equal is False and found.verdict == "unequal" and found.ill_conditioned is None, mistake
        assert (first.quantity, first.step) == MISTAKES[mistake], mistake
        assert f"NOT equal to one device: {first.quantity} of {first.name} at step" in found.text
        assert "differs by" in found.text


def test_fp64_and_tame_programs_are_equal() -> None:
    programs = [TAME, *(Program(eps, dtype=torch.float64) for eps in (1e-4, 1e-12))]
    for program in programs:
        (found,) = run_kept(loops, 2, program, [""])[0]
        assert found.equal is True and found.verdict == "equal", found.first_difference
        assert found.text.startswith("equal to one device: loss ")


def delta_net() -> nn.Module:
    """Return a small Qwen3Next, whose delta rule computes in fp32 whatever it is asked for."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(1)
    config = Qwen3NextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        experts_implementation="eager",
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).double()


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_loop_that_divides_first_is_equal_where_parts_are_in_fp32(factor: float) -> None:
    model = delta_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def of_logits(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return objective(lambda tokens: model(tokens, use_cache=False).logits, batch)  # type: ignore[arg-type]

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss, weight = of_logits(model, batch)
        (loss / weight * factor).backward()
        optimizer.step()
        return loss.detach() / weight

    found = paceline.verify_loop(
        step, model, batches_of(0)[:2], objective=of_logits, optimizer=lambda given: torch.optim.SGD(given, lr=0.1)
    )
    assert found.equal is (factor == 1.0), found.text

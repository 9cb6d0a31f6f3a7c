"""Ranks that must agree do, and one that departs is named."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_kept, run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, run_steps, world_here
from tests_shared import coarse_plan as plan_of

from paceline.errors import VerificationFailed
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.numerics.invariants import bits_of, check_agreement, fingerprint, is_due, numbers_of
from paceline.spec.layout import Layout
from paceline.spec.task import ModelSpec

SMALL = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": VOCAB, "experts": 8, "top_k": 2}
TIED = "the tied weight"


def trained(layout: Layout, name: str = "", rank: int = 1) -> None:
    """Train two steps, then move one weight of one rank by one unit in the last place and check."""
    world = world_here()
    task = decoder_task(model=ModelSpec("moe-2m", **SMALL)) if layout.ep > 1 else decoder_task()
    stats, built = run_steps(task, plan_of(layout), 2, world)
    if name == TIED:
        name = next(n for n, weight in built.model.named_parameters() if weight in built.stepper.stages_holding)
    if world.rank == rank and name:
        weight = built.model.get_parameter(name).detach()
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        flat = local.view(-1)
        flat[0] = torch.nextafter(flat[0], torch.tensor(1e9))
    check_agreement(built.model, {"gradient norm": stats[-1].grad_norm, "lr": stats[-1].lr}, 2, world, layout)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_replicate=2),
        Layout(dp_shard=2),
        Layout(dp_replicate=2, dp_shard=2),
        Layout(tp=2),
        Layout(pp=2),
        Layout(dp_shard=4, ep=2),
    ],
    ids=str,
)
def test_no_correct_layout_is_stopped(layout: Layout) -> None:
    assert run_kept(trained, layout.devices, layout) == [None] * layout.devices


@pytest.mark.parametrize(
    ("layout", "name", "ranks"),
    [
        (Layout(dp_replicate=2), "layers.1.mlp.up_proj.weight", "ranks 0 and 1"),
        (Layout(tp=2), "layers.0.input_layernorm.weight", "ranks 0 and 1"),
        (Layout(dp_replicate=2, dp_shard=2), "layers.2.self_attn.q_proj.weight", "and 3|and 1"),
        (Layout(dp_replicate=2, dp_shard=2, ep=2), "layers.2.mlp.experts.down_proj", "1 and 3"),
        (Layout(dp_shard=2, tp=2), "layers.2.input_layernorm.weight", "2 and 3"),
        (Layout(pp=2), TIED, "ranks 0 and 1"),
    ],
    ids=str,
)
def test_one_unit_in_the_last_place_is_named(layout: Layout, name: str, ranks: str) -> None:
    with pytest.raises(
        VerificationFailed, match=rf"step 2: .*({ranks}).* no longer agree on {'' if name == TIED else name}"
    ) as caught:
        run_ranks(trained, layout.devices, layout, name, layout.devices - 1)
    assert caught.value.exit_code == 4


def sent(layout: Layout) -> tuple[int, int]:
    """Return how many numbers a rank reduces in a check, and how often the ranks tell each other objects in it."""
    world = world_here()
    stats, built = run_steps(decoder_task(), plan_of(layout), 1, world)
    reduce, gather, numbers, objects = dist.all_reduce, dist.all_gather_object, [0], [0]

    def reduced(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        numbers[0] += tensor.numel()
        return reduce(tensor, *args, **options)

    def gathered(*args: Any, **options: Any) -> Any:
        objects[0] += 1
        return gather(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", reduced)
        patch.setattr(dist, "all_gather_object", gathered)
        check_agreement(built.model, numbers_of(stats[-1], None), 1, world, layout)
    return numbers[0], objects[0]


def test_a_check_sends_no_more_among_more_ranks() -> None:
    two, four = run_kept(sent, 2, Layout(dp_shard=2)), run_kept(sent, 4, Layout(dp_shard=4))
    assert {*two, *four} == {two[0]}
    assert two[0][0] == 2 * 5 + 1, "smallest and largest of the step's numbers, and whether any differ"
    assert two[0][1] == 0, "fingerprints are gathered where copies differ, to name a rank"


def test_fingerprints_differ_by_a_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight = torch.randn(33, dtype=torch.float32).to(dtype)
        other = weight.clone()
        other[5] += other[5].abs() * 0.02
        assert fingerprint(weight) == fingerprint(weight.clone())
        assert fingerprint(weight) != fingerprint(other)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, 5000), (4095, 8191), (0, 9999)])
def test_fingerprints_tell_the_order_of_values(first: int, second: int) -> None:
    weight = torch.arange(10_000, dtype=torch.float32)
    other = weight.clone()
    other[[first, second]] = weight[[second, first]]
    assert fingerprint(weight) == fingerprint(weight.clone()) != fingerprint(other)


def skipped(odd: str = "") -> None:
    """Make a step that overflows in fp16 on two copies, on one of which something goes another way, and check."""
    world, plan = world_here(), plan_of(Layout(dp_replicate=2), precision="fp16")
    task = decoder_task()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    scaler = built.stepper.scaler
    assert scaler is not None
    scaler.scale = 2.0**40
    stream = BatchStream(task.data, task.seed, plan, world.rank, world.device)
    stats = built.stepper.step(stream.at(0), 1e-3)
    assert not math.isfinite(stats.grad_norm) and not stats.updated
    if world.rank == 1 and odd == "the loss scale":
        scaler.scale *= 2
    if world.rank == 1 and odd == "whether the step updated the weights":
        stats = dataclasses.replace(stats, updated=True)
    numbers = {**numbers_of(stats, scaler.scale), "a norm that is not a number": math.nan}
    check_agreement(built.model, numbers, 1, world, plan.layout)


def test_a_skipped_step_does_not_stop_a_healthy_run() -> None:
    assert run_kept(skipped, 2) == [None, None]


@pytest.mark.parametrize("odd", ["the loss scale", "whether the step updated the weights"])
def test_a_rank_that_skips_alone_is_named(odd: str) -> None:
    with pytest.raises(VerificationFailed, match=f"ranks 0 and 1 no longer agree on {odd}"):
        run_ranks(skipped, 2, odd)


def chose(odd: bool) -> None:
    """Check a step of two copies, one of which says that it has chosen other candidates."""
    world, layout = world_here(), Layout(dp_replicate=2)
    stats, built = run_steps(decoder_task(), plan_of(layout), 1, world)
    chosen = "a0" if odd and world.rank == 1 else "60"
    check_agreement(built.model, numbers_of(stats[-1], None, chosen), 1, world, layout)


def test_ranks_that_chose_other_candidates_are_named() -> None:
    assert run_ranks(chose, 2, False) == [None, None]
    with pytest.raises(VerificationFailed, match="ranks 0 and 1 no longer agree on which samples were chosen"):
        run_ranks(chose, 2, True)


def test_bits_tell_what_equality_does_not() -> None:
    assert bits_of(0.0) != bits_of(-0.0) and bits_of(math.nan) == bits_of(-math.nan) == bits_of(float("nan"))
    assert bits_of(1.0) != bits_of(math.nextafter(1.0, 2.0)) and bits_of(math.inf) != bits_of(-math.inf)


def test_the_first_ten_steps_of_a_process_are_checked() -> None:
    assert [step for step in range(1, 41) if is_due(step, 1, 20)] == [*range(1, 11), 20, 40]
    assert [step for step in range(24, 61) if is_due(step, 24, 50)] == [*range(24, 34), 50], "after a resume too"


KINDS = (
    "bool", "uint8", "int8", "float8_e4m3fn", "float16", "bfloat16", "float32", "int64", "float64", "complex64",
    "complex128",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_tells_one_number_of_any_kind_and_its_place(kind: str) -> None:
    def one_at(*places: int) -> int:
        values = torch.zeros(5000)
        values[list(places)] = 1.0
        return int(fingerprint(values.to(getattr(torch, kind))))

    found = [one_at(), one_at(0), one_at(1), one_at(4096), one_at(4999), one_at(0, 1)]
    assert len(set(found)) == len(found) and one_at(4999) == found[4]

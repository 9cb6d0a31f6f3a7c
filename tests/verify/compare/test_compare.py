"""Correct layouts equal one device: decoders, a user's modules, transformers' and images, over real ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, Dropout, decoder_task, plan_of
from torch import nn

from paceline.run.process.world import World, join_world
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.data.sources.digits import open_digits
from paceline.verify.compare.layout import compare
from paceline.verify.compare.measures import tensor_differences
from paceline.verify.compare.tolerance import QUANTITIES, TOLERANCES

BATCH = 7  # over 2 and over 4 ranks: uneven


class Images(nn.Module):
    """Convolutions, repeated residual blocks with norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        block = lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(6, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, 10] of images [rows, 1, 8, 8]."""
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def llama() -> nn.Module:
    """Return a tiny model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, vocab_size=VOCAB, tie_word_embeddings=True))


@pytest.mark.parametrize("changed", ["real", "imaginary"])
def test_both_parts_of_complex_numbers_are_compared(changed: str) -> None:
    alone = World(0, 1, 0, torch.device("cpu"))
    weight = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    other = torch.complex(weight.real + (changed == "real"), weight.imag + (changed == "imaginary"))
    (found,) = tensor_differences("weights", {"w": other}, {"w": weight}, 1, alone, Layout())
    assert found.relative == pytest.approx(math.sqrt(12) / float(weight.norm()), rel=1e-6)
    (same,) = tensor_differences("weights", {"w": weight.clone()}, {"w": weight}, 1, alone, Layout())
    assert same.relative == 0


@pytest.mark.parametrize("huge", [float(torch.finfo(torch.float32).min), -math.inf], ids=["least", "infinite"])
@pytest.mark.parametrize("kind", ["weights", "buffers"])
def test_a_table_that_stays_as_it_is_hides_nothing_and_differs_in_nothing(kind: str, huge: float) -> None:
    alone = World(0, 1, 0, torch.device("cpu"))
    before = {"mask": torch.full((3, 3), huge).triu(1), "nobody's": torch.full((2,), math.nan), "own": torch.ones(4)}
    known = {**before, "own": torch.full((4,), 1.5)}
    ours = {name: tensor.clone() for name, tensor in {**before, "own": torch.full((4,), 2.0)}.items()}
    mask, unknown, own = tensor_differences(kind, ours, known, 1, alone, Layout(), before)
    assert mask.relative == unknown.relative == 0
    assert own.relative > 0.1
    ours["mask"][0, 1] = 0.0
    other, *_ = tensor_differences(kind, ours, known, 1, alone, Layout(), before)
    assert not other.relative <= 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_of_one_key_are_not_small_beside_those_of_another(key: str, dtype: torch.dtype) -> None:
    alone, precision = World(0, 1, 0, torch.device("cpu")), {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    gradient = 1e-5 * torch.arange(1, 7, dtype=dtype)
    known = {
        "w.step": torch.tensor(3.0, dtype=dtype),
        "w.exp_avg": gradient,
        "w.exp_avg_sq": gradient.square(),
        "zero.exp_avg": 1e-7 * gradient,  # of a gradient that is zero but for noise
        "zero.exp_avg_sq": (1e-7 * gradient).square(),
    }
    wrong = {**known, f"w.{key}": 1.01 * known[f"w.{key}"], f"zero.{key}": 1.01 * known[f"zero.{key}"]}
    found = {d.name: d for d in tensor_differences("moments", wrong, known, 1, alone, Layout())}
    assert found[f"w.{key}"].relative == pytest.approx(0.01, rel=1e-3)
    noise = found[f"zero.{key}"].relative
    assert noise < 1e-4 and found["w.step"].relative == 0
    assert found[f"w.{key}"].relative > found[f"w.{key}"].tolerance_in(precision)


def decoder(tied: bool) -> Task:
    task = decoder_task()
    shape = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 24}
    return dataclasses.replace(task, model=dataclasses.replace(task.model, **shape, tied=tied))


def tasks() -> dict[str, Task]:
    """Return the tasks by name."""
    optimizer = OptimizerSpec(lr=3e-3, eps=1e-4)  # see verify/twin/task.py for eps
    digits, _ = open_digits(0.0)
    found = {
        "decoder, tied": decoder(tied=True),
        "decoder": decoder(tied=False),
        "dropout": decoder_task(model=Dropout, objective="next_token"),
        "images": decoder_task(model=Images, data=digits, objective="auto"),
        "transformers": decoder_task(model=llama, objective="next_token"),
    }
    return {name: dataclasses.replace(task, optimizer=optimizer) for name, task in found.items()}


NAMES = ("decoder, tied", "images", "transformers")
ALIKE = ("decoder", "dropout")  # others prove such programs equal: test_story.py, test_sample_randomness.py
PLANS: dict[str, Plan] = {
    "copies": plan_of(Layout(dp_replicate=2), BATCH),
    "copies, full recompute": plan_of(Layout(dp_replicate=2), BATCH, recompute="full"),
    "zero 1": plan_of(Layout(dp_shard=2), BATCH, zero=1),
    "zero 2": plan_of(Layout(dp_shard=2), BATCH, zero=2),
    "zero 3, selective recompute": plan_of(Layout(dp_shard=2), BATCH, zero=3, recompute="selective"),
    "hybrid, zero 1": plan_of(Layout(dp_replicate=2, dp_shard=2), BATCH, zero=1),
    "hybrid, zero 3": plan_of(Layout(dp_replicate=2, dp_shard=2), BATCH, zero=3),
    "four shards, zero 2": plan_of(Layout(dp_shard=4), BATCH, zero=2),
    "four shards, zero 3": plan_of(Layout(dp_shard=4), BATCH, zero=3, recompute="selective"),
}
ALIKE_PLANS = ("copies, full recompute", "zero 2", "hybrid, zero 1", "four shards, zero 2")  # as others are
Results = dict[tuple[str, str, str], CheckProof]


def compare_all(ranks: int, names: tuple[str, ...], labels: tuple[str, ...]) -> Results:
    """Return the proofs of these tasks with these plans, those that this world can run, in all dtypes."""
    world = join_world("cpu", threads=1)
    found: Results = {}
    for name, task in ((name, task) for name, task in tasks().items() if name in names):
        for label, plan in ((label, PLANS[label]) for label in labels):
            # Four ranks on few cores are slow: the exact dtype says it all, the other is left to two ranks.
            for dtype in ("fp64",) if plan.layout.devices > 2 else ("fp64", "fp32"):
                if plan.layout.devices == ranks:
                    asked = dataclasses.replace(plan, precision=dtype)
                    items = task.data.items_per_sample
                    found[name, label, dtype] = compare(task, asked, world, task.data, items, steps=2)
    return found


@pytest.fixture(scope="module")
def results() -> Callable[[str, str], Results]:
    """Return what makes the proofs of a task under a plan, and of those that are asked for with them, once."""

    @functools.cache
    def proofs(names: tuple[str, ...], labels: tuple[str, ...]) -> Results:
        found: Results = {}
        for ranks in (2, 4):
            found |= run_ranks(compare_all, ranks, ranks, names, labels, timeout_seconds=180)[0]
        return found

    others = tuple(label for label in PLANS if label not in ALIKE_PLANS)
    return lambda name, plan: proofs(ALIKE if name in ALIKE else NAMES, ALIKE_PLANS if plan in ALIKE_PLANS else others)


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=[pytest.mark.deep] * (plan in ALIKE_PLANS)) for plan in PLANS]
)
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.deep) for name in ALIKE)])
def test_equal_to_one_device(name: str, plan: str, results: Callable[[str, str], Results]) -> None:
    proofs = results(name, plan)
    dtypes = [dtype for found, label, dtype in proofs if (found, label) == (name, plan)]
    assert "fp64" in dtypes
    for dtype in dtypes:
        result = proofs[name, plan, dtype]
        assert result.equal and result.first_difference is None, result.first_difference
        assert set(result.differences) == set(QUANTITIES) - {"whole batch"}
        for quantity, difference in result.differences.items():
            assert difference <= TOLERANCES[quantity][dtype], quantity


def test_one_device_is_equal_to_itself_up_to_the_order_of_sums() -> None:
    task, world = decoder(tied=False), join_world("cpu", threads=1)
    task = dataclasses.replace(task, optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))
    result = compare(task, plan_of(Layout(), BATCH, precision="fp64"), world, task.data, SEQ_LEN, steps=2)
    assert result.equal, result.first_difference
    assert result.differences["samples"] == result.differences["initial"] == result.differences["weight"] == 0


def test_tolerances_are_what_is_promised() -> None:
    assert {quantity: by["fp64"] for quantity, by in TOLERANCES.items()} == {
        "whole batch": 1e-10, "position": 0.0, "samples": 0.0, "initial": 0.0, "weight": 0.0, "router": 0.0,
        "loss": 1e-12, "gradients": 1e-10, "grad_norm": 1e-10, "lr": 1e-12,
        "weights": 1e-10, "buffers": 1e-10, "moments": 1e-10, "evaluation": 1e-12,
    }  # fmt: skip
    assert {quantity: by["fp32"] for quantity, by in TOLERANCES.items()} == {
        "whole batch": 1e-5, "position": 0.0, "samples": 0.0, "initial": 0.0, "weight": 0.0, "router": 0.0,
        "loss": 1e-5, "gradients": 1e-4, "grad_norm": 1e-5, "lr": 1e-12,
        "weights": 1e-4, "buffers": 1e-4, "moments": 1e-4, "evaluation": 1e-5,
    }  # fmt: skip

"""Low precision: layouts in bf16 and fp16 hold against one device; tests/mutations plants what must be found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_kept
from tests_huggingface import hf_task
from tests_shared import SEQ_LEN, VOCAB, Dropout, decoder_task
from tests_shared import coarse_plan as plan_of
from torch import nn

from paceline.run.process.world import join_world
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.proof.records import CheckProof, Proof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.objective import next_token
from paceline.units import Amount
from paceline.verify.compare.diagnosis import Diagnosis, told
from paceline.verify.low.low import _meaning, low
from paceline.verify.low.watch import wrong_at
from paceline.verify.process.start import failure_of, verify_spec, verify_text

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40, "vocab": VOCAB}
DENSE = decoder_task(model=ModelSpec("llama-1m", **SMALL), optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))
EXPERTS = decoder_task(model=ModelSpec("moe-2m", **{**SMALL, "ffn": 24, "experts": 8, "top_k": 2}))
WIDE = decoder_task(model=ModelSpec("llama-1m", **{**SMALL, "kv_heads": 4, "layers": 3}))
DROPS = decoder_task(model=Dropout, objective="next_token")
REPLICATED, SHARDED = Layout(dp_replicate=2), Layout(dp_shard=2)
SPREAD = Layout(dp_shard=2, ep=2)
TIED = decoder_task(model=ModelSpec("llama-1m", **SMALL, tied=True), optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))


def both_ways(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """An objective that calls the model twice: every weight is used in two passes whose gradients come together."""
    forth, back = next_token(model, batch), next_token(model, {**batch, "tokens": batch["tokens"].flip(1)})
    return forth[0] + back[0], forth[1] + back[1]


def advantages(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy gradients at the policy itself: every ratio is one, and advantages sum to zero over each row."""
    tokens = batch["tokens"]
    places = batch["positions"] if "positions" in batch else torch.arange(SEQ_LEN).expand_as(tokens)
    logits = model(tokens, positions=places)
    classes = batch["labels"].clamp(min=0)
    chances = logits.float().log_softmax(-1).gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    table = torch.linspace(1, 7, SEQ_LEN).sin() * 3
    table = torch.cat((table - table.mean(), table.new_zeros(SEQ_LEN)))  # what fills up a sequence has none
    return -((chances - chances.detach()).exp() * table[places]).sum(), (places < SEQ_LEN).sum()


advantages.sums_over_tokens = True  # type: ignore[attr-defined]
CANCELS = decoder_task(model=DENSE.model, optimizer=DENSE.optimizer, objective=advantages)
TWICE = decoder_task(model=DENSE.model, optimizer=DENSE.optimizer, objective=both_ways)


class ChannelsLast(nn.Module):
    """A convolution whose weights lie channels last: for them torch has another kernel than for rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 48), nn.Linear(8, VOCAB)
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens).mT.unflatten(1, (3, 16))  # [rows, 3, 16, seq]
        return self.head(torch.relu(self.conv(x)).mean(2).mT)


LAST = decoder_task(model=ChannelsLast, optimizer=DENSE.optimizer, objective="next_token")


def plan_in(layout: Layout, dtype: str = "bf16", **changes: Any) -> Plan:
    return plan_of(layout, batch=7, precision=dtype, **changes)


def proofs(cases: list[tuple[Task, Plan]]) -> list[CheckProof]:
    """Return the check's results in this world."""
    world = join_world("cpu", threads=1)
    return [low(with_held_out(task), plan, world, task.data, SEQ_LEN, 2) for task, plan in cases]


def with_held_out(task: Task) -> Task:
    """Return the task with held-out data too, the same: a task without any is never evaluated."""
    return dataclasses.replace(task, data=(task.data, task.data))


def right_cases() -> list[tuple[Task, Plan]]:
    plans = [plan_in(REPLICATED), plan_in(SHARDED, zero=1), plan_in(SHARDED, zero=3, recompute="full"),
             plan_in(Layout(pp=2)), plan_in(Layout(tp=2)), plan_in(Layout(cp=2)),
             plan_in(REPLICATED, "fp16")]  # fmt: skip
    return [*((DENSE, plan) for plan in plans), (LAST, plan_in(SHARDED))]


def brief_proofs(cases: list[tuple[Task, Plan]]) -> list[CheckProof]:
    """Return the same of the check before training."""
    world = join_world("cpu", threads=1)
    return [low(with_held_out(task), plan, world, task.data, SEQ_LEN, 2, brief=True) for task, plan in cases]


def routed_cases() -> list[tuple[Task, Plan]]:
    cases = [(EXPERTS, plan_in(layout)) for layout in (SHARDED, Layout(tp=2))]
    return [*cases, (hf_task("Mixtral"), plan_in(SPREAD))]


def more_routed_cases() -> list[tuple[Task, Plan]]:
    cases = [(dataclasses.replace(EXPERTS, seed=seed), plan_in(layout, dtype, recompute="full"))
             for seed in (1, 2) for dtype in ("bf16", "fp16")
             for layout in (SPREAD, Layout(tp=2), Layout(cp=2), Layout(cp=2, ep=2))]  # fmt: skip
    families = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss")
    cases += [(EXPERTS, plan_in(Layout(pp=2)))]
    cases += [(hf_task("Mixtral"), plan_in(layout)) for layout in (Layout(cp=2), Layout(cp=2, ep=2))]
    return cases + [(hf_task(family), plan_in(SPREAD, dtype)) for family in families for dtype in ("bf16", "fp16")]


def tied_cases() -> list[tuple[Task, Plan]]:
    return [(TIED, plan_in(SHARDED, zero=1)), (TIED, plan_in(SHARDED, zero=3)), (TIED, plan_in(REPLICATED)),
            (TWICE, plan_in(SHARDED, zero=1)), (TWICE, plan_in(SHARDED, zero=3)), (TWICE, plan_in(REPLICATED)),
            (hf_task("GPT2"), plan_in(SHARDED))]  # fmt: skip


def more_right_cases() -> list[tuple[Task, Plan]]:
    layouts = (SHARDED, Layout(tp=2), Layout(pp=2), Layout(cp=2))
    plans = [plan_in(layout, "fp16") for layout in layouts] + [plan_in(Layout(cp=2), cp_method="ring")]
    others = [(EXPERTS, plan_in(SHARDED)), (DROPS, plan_in(SHARDED)), (DROPS, plan_in(REPLICATED, "fp16"))]
    return [(DENSE, plan) for plan in plans] + others


def assert_equal(world: int, cases: list[tuple[Task, Plan]]) -> list[CheckProof]:
    proved = run_kept(proofs, world, cases, timeout_seconds=300)[0]
    for (task, plan), proof in zip(cases, proved, strict=True):
        assert proof.equal, (task.model, str(plan), proof.first_difference)
        assert proof.of_bound < 0.5, (task.model, str(plan), proof.of_bound)
    return proved


def test_right_layouts_are_equal_in_low_precision() -> None:
    proved = assert_equal(2, right_cases())
    for proof in proved[:3]:  # the very products of one device, bit for bit
        assert proof.differences["loss"] == 0 and proof.differences["gradients"] < 1e-6
    assert proved[4].differences["gradients"] > 1e-4, "tp rounds in between"


def test_before_training_later_updates_and_an_evaluation_are_compared() -> None:
    cases = [(DENSE, plan_in(SHARDED, "fp16")), (DENSE, plan_in(Layout(tp=2))), (EXPERTS, plan_in(SPREAD))]
    for proof in run_kept(brief_proofs, 2, cases, timeout_seconds=300)[0]:
        assert proof.equal and not proof.left_out, proof
        assert 0 < proof.of_bound < 0.5 and proof.differences["gradients"] > 0 and "evaluation" in proof.differences


@pytest.mark.deep
def test_routed_layouts_are_held_to_one_device_with_the_same_choices() -> None:
    cases = routed_cases()
    proved = assert_equal(2, cases)
    for (task, plan), proof in zip(cases, proved, strict=True):
        assert not proof.left_out, proof.left_out
        elsewhere = plan.layout != SHARDED  # inside of layers
        assert (proof.differences["gradients"] > 1e-4) == elsewhere, (task.model, str(plan))


@pytest.mark.deep
def test_more_routed_layouts_are_held_to_one_device() -> None:
    for proof in assert_equal(2, more_routed_cases()):
        assert not proof.left_out, proof.left_out


@pytest.mark.deep
def test_routed_layouts_of_two_axes_are_held_to_one_device() -> None:
    layouts = (
        Layout(dp_shard=2, tp=2, ep=2),
        Layout(tp=2, pp=2),
        Layout(cp=2, tp=2),
        Layout(dp_replicate=2, cp=2, ep=2),
    )
    for proof in assert_equal(4, [(EXPERTS, plan_in(layout)) for layout in layouts]):
        assert not proof.left_out, proof.left_out


@pytest.mark.deep
def test_a_weight_of_several_uses_is_summed_as_the_layout_gathers_it() -> None:
    for proof in assert_equal(2, tied_cases()):
        assert proof.differences["gradients"] < 1e-6, "the very products and sums of one device"


@pytest.mark.deep
def test_more_right_layouts_are_equal_in_low_precision() -> None:
    assert_equal(2, more_right_cases())


def test_a_loss_of_terms_that_cancel_is_equal_in_low_precision() -> None:
    """What is left of it is rounding, which no move of weights shows: it was told as other numbers."""
    for found in assert_equal(2, [(CANCELS, plan_in(Layout(cp=2))), (CANCELS, plan_in(REPLICATED))]):
        assert not found.left_out


def rare_cases() -> list[tuple[Task, Plan]]:
    """Options that move weights far, hardly, or otherwise than in the reference of most: later updates are held too."""

    def dense(**optimizer: Any) -> Task:
        return decoder_task(model=DENSE.model, optimizer=OptimizerSpec(**{"lr": 1e-2, "eps": 1e-5, **optimizer}))

    lora = AdapterSpec(kind="lora", rank=4, alpha=8, dropout=0.3)
    rules = [("sgd", 0.1, "bf16", 1), ("lion", 1e-3, "fp16", 2), ("muon", 1e-2, "bf16", 3)]
    own = [(decoder_task(model=DENSE.model, optimizer=OptimizerSpec(name=name, lr=lr)),
            plan_in(SHARDED, dtype, zero=zero)) for name, lr, dtype, zero in rules]  # fmt: skip
    return [
        *own,
        (dense(lr=1.0), plan_in(REPLICATED)),
        (dense(lr=1.0), plan_in(Layout(tp=2))),
        (dense(lr=1e-6), plan_in(Layout(tp=2))),
        (dense(layer_decay=0.5), plan_in(Layout(pp=2), "fp16")),
        (dense(), plan_in(SHARDED, offload="optimizer")),
        (dataclasses.replace(dense(), adapter=lora), plan_in(Layout(tp=2))),
        (dataclasses.replace(dense(), embedding_noise=5.0), plan_in(Layout(cp=2))),
        (DROPS, plan_in(SHARDED, zero=1)),
    ]


@pytest.mark.deep
def test_rare_options_are_equal_in_low_precision() -> None:
    for proof in assert_equal(2, rare_cases()):
        assert not proof.left_out and proof.differences["evaluation"] >= 0, proof


@pytest.mark.deep
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_right_layouts_take_less_than_half_of_the_margin(seed: int) -> None:
    dense, wide = (dataclasses.replace(task, seed=seed) for task in (DENSE, WIDE))
    layouts = (Layout(tp=2, cp=2), Layout(tp=2, pp=2), Layout(dp_shard=2, tp=2))
    cases = [(wide, plan_in(Layout(tp=4), dtype)) for dtype in ("bf16", "fp16")]
    cases += [(dense, plan_in(layout, dtype)) for layout in layouts for dtype in ("bf16", "fp16")]
    cases += [(dense, plan_in(Layout(cp=4), dtype, cp_method="ring")) for dtype in ("bf16", "fp16")]
    assert_equal(4, cases)


def test_the_command_proves_the_precision_asked_for() -> None:
    small = ModelSpec("llama-1m", hidden=16, layers=1, heads=2, kv_heads=2, ffn=24)
    spec = Spec(
        task=Task(name="low", model=small, data=DataSpec(seq_len=16), global_batch=Amount(8, "samples")),
        plan=PlanSpec(precision="bf16"),
    )
    found = verify_spec(spec, layout="dp_shard=2", steps=1, dtypes=("fp32",))
    assert found.equal, found.first_difference
    (part,) = (part for part in found.parts if part.part == "low precision")
    assert part.dtype == "bf16" and part.equal
    assert found.dtypes["bf16"]["gradients"] < 1e-6


class FailsEvaluated(Dropout):
    """Wants more of its rows where it is evaluated than a batch of training has."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.training, "the rows of an evaluation have names"
        return super().forward(tokens)


def never_evaluated() -> CheckProof:
    task, world = decoder_task(model=FailsEvaluated, objective="next_token"), join_world("cpu", threads=1)
    return low(task, plan_in(REPLICATED), world, task.data, SEQ_LEN, 2, brief=True)


def test_a_task_that_is_never_evaluated_is_not_in_low_precision_either() -> None:
    """A model that fails there, in a task without held-out data, ended the proof with an error."""
    found = run_kept(never_evaluated, 2)[0]
    assert found.equal and found.differences["gradients"] > 0 and "evaluation" not in found.differences


class Transforms(Dropout):
    """A model with an operator that a CPU does not have in bf16."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + torch.linalg.qr(hidden)[0].sum())


def test_what_one_device_cannot_compute_is_left_out_with_a_reason() -> None:
    task = decoder_task(model=Transforms, objective="next_token")
    (proof,) = run_kept(proofs, 2, [(task, plan_in(SHARDED))])[0]
    assert proof.equal and "one device cannot compute it in bf16" in proof.left_out


def test_what_a_difference_means_does_not_depend_on_how_its_name_is_worded() -> None:
    families = {"exchange": "other format", "choice": "router choice", "": "half-reduced precision"}
    for kind, family in families.items():
        for words in ("in any words", "what it sends to other ranks", "tokens went to others than the best"):
            wrong = wrong_at("decision" if kind == "choice" else "dtype", words, 1, 0, kind)  # type: ignore[arg-type]
            assert _meaning(wrong).family == family
            assert "kind" not in vars(told(wrong, [wrong], _meaning(wrong))), "the family says so"


def test_who_has_no_spec_file_is_told_what_to_call() -> None:
    """A script that was refused was told to try `paceline verify SPEC`, and `--no-verify`, neither of which it has."""
    first = told(wrong := wrong_at("dtype", "w", 1, 0), [wrong], Diagnosis("other format", ""))
    proof = Proof("dp_shard=2 tp=2", False, "unequal", 1.0, 2, first_difference=first)
    assert failure_of(proof, "my.toml").try_ == (
        "paceline verify my.toml --layout dp_shard=2,tp=2 --json for every quantity; --no-verify trains all the same"
    )
    assert failure_of(proof, "").try_ == (
        "paceline.verify(task, layout='dp_shard=2,tp=2') for every quantity; verify=False trains all the same"
    )
    alone = dataclasses.replace(proof, layout="single device")
    assert "--layout" not in failure_of(alone, "my.toml").try_ and "layout" not in failure_of(alone, "").try_


def test_what_has_no_size_is_told_without_one() -> None:
    wrong = wrong_at("dtype", "the weight of w is in torch.bfloat16, not torch.float32", 1, 0)
    first = told(wrong, [wrong], Diagnosis("other format", ""))
    first = dataclasses.replace(first, part="low precision", dtype="bf16", ran_as="dp_shard=2")
    text = verify_text(Proof("dp_shard=2", False, "unequal", 1.0, 2, first_difference=first))
    assert text == (
        "NOT equal to one device: the weight of w is in torch.bfloat16, not torch.float32 at step 1 on rank 0"
        " (low precision in bf16)"
    )

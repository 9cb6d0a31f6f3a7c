"""Distillation: the loss by hand, what is frozen and priced, and the numbers of one device on layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_kept, run_ranks
from tests_shared import SEQ_LEN, VOCAB, PaddedText, decoder_task, run_steps
from tests_shared import coarse_plan as plan_of

from paceline.errors import ConfigError, VerificationFailed
from paceline.run.numerics.invariants import check_agreement
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import ModelSpec, Task
from paceline.task.adapt.distill import Distilled, _paired, distillation, distilled, student_of
from paceline.task.models.build import build_model
from paceline.task.models.held import local_of
from paceline.task.profile.apart import trace_here
from paceline.verify.compare.layout import compare

PATH = "paceline.task.adapt.distill:"
STUDENT = {"name": "llama-1m", "hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 24, "vocab": VOCAB}
TEACHER = {**STUDENT, "hidden": 32, "layers": 3}
GIVEN: dict[str, Any] = {"student": STUDENT, "teacher": TEACHER, "vocab": VOCAB, "hidden": 0.3, "weight": 0.6}


def task(**changes: Any) -> Task:
    return decoder_task(
        model=ModelSpec(PATH + "distilled", arguments=GIVEN), objective=PATH + "distillation", **changes
    )


def batch() -> dict[str, torch.Tensor]:
    return PaddedText().read(torch.arange(3).numpy())


def test_the_loss_of_logits_by_hand() -> None:
    torch.manual_seed(0)
    model, data = distilled(**{**GIVEN, "hidden": 0.0}, temperature=3.0).double(), batch()
    loss, weight = distillation(model, data)
    counted = data["labels"] != -100
    own, theirs = (part(data["tokens"])[counted] for part in (model.student, model.teacher))
    p, q = (theirs / 3).softmax(-1), (own / 3).softmax(-1)
    expected = 0.4 * F.cross_entropy(own, data["labels"][counted], reduction="sum")
    expected = expected + 0.6 * 9 * (p * (p.log() - q.log())).sum()
    torch.testing.assert_close(loss, expected)
    assert int(weight) == int(counted.sum())


def test_hidden_states_are_compared_at_the_same_part_of_the_depth() -> None:
    torch.manual_seed(0)
    model, data = distilled(**{**GIVEN, "weight": 0.0}).double(), batch()
    seen: dict[str, torch.Tensor] = {}
    for name in ("student.layers.0", "student.layers.1", "teacher.model.layers.0", "teacher.model.layers.2"):
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: seen.update({name: out}))
    loss, _ = distillation(model, data)
    counted = data["labels"] != -100
    expected = F.cross_entropy(model.student(data["tokens"])[counted], data["labels"][counted], reduction="sum")
    for mine, theirs in (
        ("student.layers.0", "teacher.model.layers.0"),
        ("student.layers.1", "teacher.model.layers.2"),
    ):
        apart = (model.bridge(seen[mine]) - seen[theirs])[counted]
        expected = expected + 0.3 / 2 * apart.square().mean(-1).sum()
    torch.testing.assert_close(loss, expected)


def test_a_deeper_student_begins_at_the_teachers_first_block() -> None:
    deep, flat = (build_model(ModelSpec(**{**STUDENT, "layers": layers}), VOCAB, 8, seed=1) for layers in (4, 2))
    pairs = [list(flat.layers).index(theirs) for _, theirs in _paired(deep, flat)]
    assert pairs == [0, 0, 0, 1]


def test_packed_documents_are_learnt_each_by_itself() -> None:
    torch.manual_seed(0)
    model = distilled(**GIVEN)
    first, other, own = torch.randint(0, VOCAB, (3, 1, 6)).unbind(0)
    labels = torch.cat([torch.full_like(own, -100), own], 1)
    packed = {"labels": labels, "documents": torch.tensor([[1] * 6 + [2] * 6])}
    told = [distillation(model, {"tokens": torch.cat([before, own], 1), **packed})[0] for before in (first, other)]
    assert torch.equal(*told)
    mixed = [distillation(model, {"tokens": torch.cat([each, own], 1), "labels": labels})[0] for each in (first, other)]
    assert not torch.equal(*mixed)


def test_the_teacher_is_frozen_and_no_part_of_a_checkpoint() -> None:
    model = build_model(task().model, VOCAB, SEQ_LEN, seed=3)
    assert isinstance(model, Distilled) and model.student.training and not model.teacher.training
    assert not any(p.requires_grad for p in model.teacher.parameters())
    plain = build_model(ModelSpec(**STUDENT), VOCAB, SEQ_LEN, seed=3)
    assert set(model.state_dict()) == {*plain.state_dict(), "bridge.weight"}
    assert student_of(task().model) == ModelSpec(**STUDENT) and student_of(ModelSpec("llama-1m")) is None


def test_the_teacher_is_priced_by_its_forward_pass() -> None:
    profile = trace_here(task())
    blocks = {block.name: block for block in profile.blocks}
    taught = blocks["teacher.model.layers.1"]
    assert taught.frozen_parameters == taught.parameters and taught.backward_products == 0.0
    assert taught.matmul_flops > 0 and taught.saved_elements == 0.0
    assert blocks["student.layers.1"].backward_products == 2.0
    teacher: Any = build_model(task().model, VOCAB, SEQ_LEN, seed=3).teacher
    assert profile.forward_only_parameters == sum(parameter.numel() for parameter in teacher.parameters())


def test_another_vocabulary_is_refused() -> None:
    model = distilled(STUDENT, {**TEACHER, "vocab": VOCAB + 1}, VOCAB)
    with pytest.raises(ConfigError, match="logits are compared"):
        distillation(model, batch())


def compared(plans: list[Plan]) -> list[CheckProof]:
    """Return comparisons with one device."""
    world = join_world("cpu", threads=1)
    return [compare(task(), plan, world, PaddedText(), SEQ_LEN, 2) for plan in plans]


def test_distillation_equals_one_device() -> None:
    plans = [plan_of(Layout(dp_shard=2), precision="fp64", zero=zero) for zero in (1, 3)]
    plans.append(plan_of(Layout(dp_replicate=2), precision="fp64", recompute="full"))
    for proof in run_kept(compared, 2, plans)[0]:
        assert proof.equal, proof.first_difference


def spread(layout: Layout, **changes: Any) -> Plan:
    return plan_of(layout, frozen="spread", **changes)


def test_a_spread_teacher_equals_one_device() -> None:
    """Over all ranks that read different samples, whether the student is copied, or sharded in any ZeRO class."""
    plans = [spread(Layout(dp_replicate=2), precision="fp64"), spread(Layout(dp_replicate=2), precision="fp32")]
    plans += [spread(Layout(dp_shard=2), precision="fp64", zero=zero) for zero in (1, 2, 3)]
    for proof in run_kept(compared, 2, plans)[0]:
        assert proof.equal, proof.first_difference
    (proof,) = run_kept(compared, 4, [spread(Layout(dp_replicate=2, dp_shard=2), precision="fp64")])[0]
    assert proof.equal, proof.first_difference


def held(plan: Plan) -> tuple[float, float, list[float]]:
    """Return the share of the teacher's and of the student's parameters that a rank holds, and two steps' losses."""
    stats, built = run_steps(task(), plan, 2)
    shares = []
    for part in (built.model.teacher, built.model.student):
        parameters = list(part.parameters())
        shares.append(sum(local_of(p).numel() for p in parameters) / sum(p.numel() for p in parameters))
    return shares[0], shares[1], [step.loss for step in stats]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_holds_its_part_of_a_spread_teacher_and_all_of_a_copied_student(precision: str) -> None:
    ((_, _, alone),) = run_kept(held, 1, plan_of(Layout(), precision=precision))
    for plan, teacher, student in (
        (spread(Layout(dp_replicate=2), precision=precision), 0.5, 1.0),
        (plan_of(Layout(dp_replicate=2), precision=precision), 1.0, 1.0),
        (spread(Layout(dp_shard=2), precision=precision, zero=1), 0.5, 0.5),
    ):
        for taught, trained, losses in run_kept(held, 2, plan):
            assert taught == pytest.approx(teacher, abs=0.03) and trained == pytest.approx(student, abs=0.03)
            assert losses == pytest.approx(alone, rel=1e-5 if precision == "fp32" else 3e-2)


def agreed(plan: Plan, odd: str) -> None:
    """Train two steps, move one value of one rank's part of a parameter, and check what ranks must hold alike."""
    world = join_world("cpu", threads=1)
    stats, built = run_steps(task(), plan, 2, world)
    if odd and world.rank == 1:
        with torch.no_grad():
            local_of(built.model.get_parameter(odd)).view(-1)[0] += 0.5
    check_agreement(built.model, {"the loss": stats[-1].loss}, 2, world, plan.layout)


@pytest.mark.parametrize("layout", [Layout(dp_replicate=2), Layout(dp_replicate=2, dp_shard=2)], ids=str)
def test_parts_of_a_spread_teacher_are_no_copies(layout: Layout) -> None:
    """The first run with a spread teacher was stopped after its first step: its parts were compared as copies."""
    assert run_kept(agreed, layout.devices, spread(layout), "") == [None] * layout.devices


def test_copies_beside_a_spread_teacher_are_compared_as_before() -> None:
    with pytest.raises(VerificationFailed, match=r"no longer agree on student\.norm"):
        run_ranks(agreed, 2, spread(Layout(dp_replicate=2)), "student.norm.weight")

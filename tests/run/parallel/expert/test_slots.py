"""Slots for rows of experts: the numbers of the exact exchange, no wait of the host, and steps that are made again."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_kept
from host_waits import HostWaits
from test_own_experts import Net, task_of
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of, world_here
from torch import nn

from paceline.errors import ConfigError
from paceline.run.assemble import Assembled, _slots, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.training import Training
from paceline.run.parallel.expert.slots import DECIDED, ExpertSlots
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.proof.records import CheckProof
from paceline.spec.run import RunSpec
from paceline.spec.task import ModelSpec, Task
from paceline.supervise.told.brief import Brief
from paceline.task.models.layers import products
from paceline.task.objective import next_token
from paceline.task.turns import Turn
from paceline.units import Amount
from paceline.verify.compare.layout import compare

EP2 = Layout(dp_shard=2, ep=2)
EXPERTS = ModelSpec("moe-2m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=24, vocab=VOCAB, experts=8, top_k=2)
BIASED = dataclasses.replace(EXPERTS, balance="bias")
FEW = 2  # slots of a layer that is to have too few


class Noisy(Net):
    """Own experts, random numbers and a buffer that every pass moves: what a step that is made again has twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.passes: torch.Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        if self.training:
            self.passes += 1
        x = self.dropout(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def of_plan(**changes: Any) -> Plan:
    """Return a plan of two ranks of experts, with two micro-batches of unequal rows."""
    return plan_of(EP2, micro_batch=4, **changes)


def numbers(built: Assembled, task: Task, plan: Plan, steps: int, few_before: int = 0) -> list[Any]:
    """Return loss, norm, routing and slots of each step; layers have too few slots before one of the steps."""
    world = built.stepper.world
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    found: list[Any] = []
    for step in range(1, steps + 1):
        slots = built.stepper.slots
        if slots is not None and step == few_before:
            shorten(slots)
        stats = built.stepper.step(stream.at((step - 1) * plan.batch_samples), 1e-2)
        found.append((stats.loss, stats.grad_norm, stats.weight, stats.router))
    return found


def shorten(slots: ExpertSlots) -> None:
    """Leave every layer too few slots."""
    state: Any = slots.state()
    slots.load({**state, "slots": dict.fromkeys(state["slots"], FEW)})


def both_ways(cases: list[tuple[Task, Plan, int]]) -> list[Any]:
    """Return of each task what steps with slots do, what the exact exchange does, and whether weights are the same."""
    world, found = world_here(), []
    for task, plan, few_before in cases:
        with_slots = assemble(task, plan, world, task.data, SEQ_LEN)
        exact_plan = dataclasses.replace(plan, expert_slots=0.0)
        exactly = assemble(task, exact_plan, world, task.data, SEQ_LEN)
        assert exactly.stepper.slots is None
        told = numbers(with_slots, task, plan, 3, few_before), numbers(exactly, task, exact_plan, 3)
        pairs = zip(with_slots.model.state_dict().values(), exactly.model.state_dict().values(), strict=True)
        same = all(torch.equal(local(one), local(other)) for one, other in pairs)
        slots = with_slots.stepper.slots
        assert slots is not None
        found.append((*told, same, slots.take(), slots.state()))
    return found


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_slots_give_the_bits_of_the_exact_exchange_and_short_steps_are_made_again() -> None:
    own, biased = task_of(Noisy), decoder_task(model=BIASED)
    cases = [(biased, of_plan(expert_slots=1.0, recompute="full"), 3), (own, of_plan(expert_slots=1.5), 2)]
    for rank in run_kept(both_ways, 2, cases):
        for (_, plan, few_before), (with_slots, exactly, same, decided, state) in zip(cases, rank, strict=True):
            assert with_slots == exactly and same, str(plan)
            assert [one.what for one in decided] == [DECIDED] * len(decided)
            first, *more = [(one.evidence["step"], one.evidence["made_again"]) for one in decided]
            assert first == (1, False) and decided[0].before is None
            again = [step for step, made_again in more if made_again]
            assert few_before in again
            (known,) = [one for one in decided if one.evidence["step"] == few_before]
            assert set(known.evidence["before"].values()) == {FEW} and min(known.evidence["slots"].values()) > FEW
            assert known.before.startswith(f"{FEW} slots for each rank in ")
            known_last = {name: count for one in decided for name, count in one.evidence["slots"].items()}
            assert state["slots"] == known_last and min(known_last.values()) > FEW


def run_of(folder: str, until: int, few_before: int = 0) -> dict[str, int]:
    """Train up to a step, in a run that saves each one; return the slots that this rank began with."""
    task = decoder_task(model=EXPERTS, stop=Amount(6, "steps"))
    run = RunSpec(checkpoint_every=Amount(1, "steps"), keep_last=2)
    brief = Brief(of_plan(expert_slots=1.5), 6, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan,
                  PlannedRecord())  # fmt: skip
    training = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, world_here(), Path(folder))
    slots = training._stepper.slots
    assert slots is not None
    known: Any = slots.state()["slots"]
    for batch in training:
        if batch.step == few_before:
            shorten(slots)
        if training.step(batch).step == until:
            break
    return dict(known)


def test_a_run_records_steps_that_it_makes_again_and_resumes_with_its_slots(tmp_path: Path) -> None:
    assert run_kept(run_of, 2, str(tmp_path), 2, 2) == [{}] * 2

    def decided() -> list[dict[str, Any]]:
        return [one for one in read_journal(tmp_path) if one["kind"] == "decision" and one["what"] == DECIDED]

    first, second, *_ = before = decided()
    assert (first["from"], first["evidence"]["step"], first["evidence"]["made_again"]) == (None, 1, False)
    assert (second["evidence"]["step"], second["evidence"]["made_again"]) == (2, True)
    changed = second["evidence"]
    assert set(changed["before"].values()) == {FEW} and changed["slots"].keys() == first["evidence"]["slots"].keys()
    known = {**changed["slots"], **before[-1]["evidence"]["slots"]}
    assert run_kept(run_of, 2, str(tmp_path), 3) == [known] * 2
    assert decided()[len(before) :] == [], "a start that knows its slots exchanges no step exactly"


def waits(task: Task, plan: Plan) -> list[list[str]]:
    """Return where the host would wait in steps by slots, in grouped products that spoil what stands for no row."""
    world, grouped = world_here(), F.grouped_mm
    padded: list[int] = []

    def spoiling(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        behind = torch.arange(len(rows), device=rows.device) >= offs[-1:]
        padded.append(len(rows))
        return grouped(rows, weights, offs=offs).masked_fill(behind.unsqueeze(1), torch.nan)

    before = products.has_grouped_products
    products.has_grouped_products, F.grouped_mm = lambda *_: True, spoiling  # type: ignore[assignment]
    try:
        built = assemble(task, plan, world, task.data, SEQ_LEN)
        stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
        found = []
        for step in range(12):  # the first passes of shards are compared between ranks
            batch = stream.at(step * plan.batch_samples)
            with HostWaits() as seen:
                stats = built.stepper.step(batch, 1e-3)
            found.append([f"{stats.loss}", *seen.seen])
        assert padded
        return found[-3:]
    finally:
        products.has_grouped_products, F.grouped_mm = before, grouped


def test_the_host_waits_once_a_step_with_slots_and_rows_of_nothing_are_not_read() -> None:
    plan = of_plan(expert_slots=3.0, recompute="full")
    (first, _) = run_kept(waits, 2, decoder_task(model=EXPERTS), plan)
    losses = [float(loss) for loss, *_ in first]
    assert all(0 < loss < 100 for loss in losses), "finite, whatever products leave behind the rows"
    assert [seen for _, *seen in first] == [["torch.Tensor.tolist"]] * 3


def proofs(cases: list[tuple[Task, Plan]]) -> list[CheckProof]:
    """Compare each task and plan with one device, in this world: two of three steps are exchanged by slots."""
    world = world_here()
    return [compare(task, plan, world, task.data, SEQ_LEN, 3) for task, plan in cases]


@pytest.mark.deep
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_slots_with_every_axis_equal_one_device_in_fp64(recompute: str) -> None:
    layouts = [Layout(dp_shard=2, pp=2, ep=2), Layout(dp_shard=4, ep=2), Layout(dp_shard=2, tp=2, ep=2),
               Layout(dp_replicate=2, dp_shard=2, ep=2), Layout(cp=2, dp_shard=2, ep=4)]  # fmt: skip
    plans = [plan_of(one, micro_batch=2, precision="fp64", recompute=recompute, expert_slots=1.25) for one in layouts]
    cases = [(decoder_task(model=BIASED), plan) for plan in plans]
    for (_, plan), found in zip(cases, run_kept(proofs, 4, cases)[0], strict=True):
        assert found.equal, (str(plan), found.first_difference)


def test_fewer_slots_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="every step made again"):
        PlanSpec(expert_slots=0.5)
    assert "expert slots x 1.5" in str(of_plan(expert_slots=1.5))


def test_several_objectives_are_refused() -> None:
    world, turns = World(0, 2, 0, torch.device("cpu")), [Turn(name, next_token, ()) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"expert_slots with task\.turns"):
        _slots(Net(), of_plan(expert_slots=1.5), world, turns)
    assert _slots(Net(), of_plan(), world, turns) is None, "rows travel exactly"

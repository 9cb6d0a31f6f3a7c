"""The proof of copies that are not summed exactly: equal to copies taken in turn, and a mistake is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.run.process.world import join_world
from paceline.run.replicas.bucket_sums import RoundedSums
from paceline.run.replicas.outer import OuterSteps
from paceline.spec.layout import Layout
from paceline.spec.load import parse_spec
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, Proof
from paceline.spec.sync import Sync
from paceline.verify.compare.copies import compare_copies
from paceline.verify.process.start import verify_text
from paceline.verify.twin.proof_parts import BRIEF, WHOLE, Subject, jobs_of
from paceline.verify.twin.task import twin_plan

OUTER, ROUNDED = Sync("outer", every=2, lr=0.7, momentum=0.9), Sync(wire="bf16")


def no_momentum(self: OuterSteps, parameter: Any, change: torch.Tensor) -> None:
    """Move shared weights by the mean change alone."""
    self._shared[parameter].sub_(change, alpha=self._sync.lr)
    parameter.detach().copy_(self._shared[parameter])


STARTED = RoundedSums.start
TWO = Layout(dp_replicate=2)


def no_feedback(self: RoundedSums, number: int, flat: torch.Tensor, group: Any) -> Any:
    """Forget what was left out before."""
    self._left[number].zero_()
    return STARTED(self, number, flat, group)


def proof(sync: Sync, mistake: bool, layout: Layout = TWO) -> CheckProof:
    """Return the record of two copies, in whose way of meeting there may be a mistake."""
    if mistake:  # in a process of its own
        OuterSteps._move = no_momentum
        RoundedSums.start = no_feedback
    task = decoder_task()
    plan = plan_of(layout, precision="fp64", sync=sync, bucket_bytes=2048)
    return compare_copies(task, plan, join_world("cpu", threads=1), task.data, SEQ_LEN, 5)


@pytest.mark.parametrize("sync", [OUTER, ROUNDED], ids=str)
def test_copies_equal_those_that_one_device_takes_in_turn(sync: Sync) -> None:
    for record in run_ranks(proof, 2, sync, False):
        assert record.equal and record.first_difference is None
        assert 0 < record.differences["weights"] < 1e-10, "compared, and not with itself"


@pytest.mark.parametrize(("sync", "named"), [(OUTER, "weights"), (ROUNDED, "grad_norm")], ids=str)
def test_a_mistake_in_how_copies_meet_is_named(sync: Sync, named: str) -> None:
    """Shared weights go wrong where copies meet; what a sum has left out is missing in the next step's gradients."""
    for record in run_ranks(proof, 2, sync, True):
        first = record.first_difference
        assert first is not None and not record.equal
        assert (first.quantity, first.step) == (named, 2)


def split(cases: list[tuple[Sync, Layout]]) -> list[CheckProof]:
    return [proof(sync, False, layout) for sync, layout in cases]


def test_copies_that_are_split_over_other_axes_meet_alike() -> None:
    axes = [(OUTER, Layout(dp_replicate=2, tp=2)), (OUTER, Layout(dp_replicate=2, pp=2))]
    axes += [(sync, Layout(dp_replicate=2, cp=2)) for sync in (OUTER, ROUNDED)]
    for records in run_ranks(split, 4, axes):
        for (sync, layout), record in zip(axes, records, strict=True):
            assert record.equal and record.first_difference is None, (str(sync), str(layout))
            assert 0 < record.differences["weights"] < 1e-10


def test_each_axis_that_splits_copies_has_a_twin_of_the_sync() -> None:
    layout = Layout(dp_replicate=4, dp_shard=2, tp=4, pp=2)
    plan = Plan(layout, accumulation=2, batch_samples=32, sync=Sync("outer", every=50))
    jobs = [job for job in jobs_of(Subject(parse_spec(""), plan, 300, ("fp32",)), BRIEF) if job.check == "copies"]
    twins = ["dp_replicate=3 dp_shard=2", "dp_replicate=3 tp=2", "dp_replicate=3 pp=2"]
    assert [str(job.plan.layout) for job in jobs] == twins


def test_only_one_part_of_the_proof_keeps_the_sync_and_the_text_says_what_it_proves() -> None:
    plan = Plan(Layout(dp_replicate=4, dp_shard=4), accumulation=2, batch_samples=32, sync=Sync("outer", every=50))
    for scope in (BRIEF, WHOLE):
        jobs = jobs_of(Subject(parse_spec(""), plan, 300, ("fp32",)), scope)
        by_copies = [job for job in jobs if job.check == "copies"]
        assert [job.plan.sync for job in by_copies] == [Sync("outer", every=2)]
        assert str(by_copies[0].plan.layout) == "dp_replicate=3 dp_shard=2"
        assert all(job.plan.sync.is_plain for job in jobs if job.check != "copies")
    assert twin_plan(plan, "fp32").sync.is_plain
    sizes = {"loss": 0.0, "grad_norm": 0.0, "weights": 0.0}
    proof = Proof("dp_replicate=2", True, "equal", 1.0, 3, "dp_replicate=2", differences=sizes, sync=str(plan.sync))
    assert "another algorithm, equal to copies that one device takes in turn" in verify_text(proof)
    assert "another algorithm" not in verify_text(dataclasses.replace(proof, sync=""))

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
from paceline.verify.twin.parts import BRIEF, WHOLE, Subject, jobs_of
from paceline.verify.twin.task import twin_plan

OUTER, ROUNDED = Sync("outer", every=2, lr=0.7, momentum=0.9), Sync(wire="bf16")


def no_momentum(self: OuterSteps, parameter: Any, change: torch.Tensor) -> None:
    """Move shared weights by the mean change alone."""
    self._shared[parameter].sub_(change, alpha=self._sync.lr)
    parameter.detach().copy_(self._shared[parameter])


STARTED = RoundedSums.start


def no_feedback(self: RoundedSums, number: int, flat: torch.Tensor, group: Any) -> Any:
    """Forget what was left out before."""
    self._left[number].zero_()
    return STARTED(self, number, flat, group)


def proof(sync: Sync, mistake: bool) -> CheckProof:
    """Return the record of two copies, in whose way of meeting there may be a mistake."""
    if mistake:  # in a process of its own
        OuterSteps._move = no_momentum
        RoundedSums.start = no_feedback
    task = decoder_task()
    plan = plan_of(Layout(dp_replicate=2), precision="fp64", sync=sync, bucket_bytes=2048)
    return compare_copies(task, plan, join_world("cpu", threads=1), task.data, SEQ_LEN, 5)


@pytest.mark.parametrize("sync", [OUTER, ROUNDED], ids=str)
def test_copies_equal_those_that_one_device_takes_in_turn(sync: Sync) -> None:
    for record in run_ranks(proof, 2, sync, False):
        assert record.equal and record.first_difference is None
        assert 0 < record.differences["weights"] < 1e-10, "compared, and not with itself"


@pytest.mark.parametrize("sync", [OUTER, ROUNDED], ids=str)
def test_a_mistake_in_how_copies_meet_is_named(sync: Sync) -> None:
    for record in run_ranks(proof, 2, sync, True):
        first = record.first_difference
        assert first is not None and not record.equal
        assert (first.quantity, first.step) == ("weights", 2)


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

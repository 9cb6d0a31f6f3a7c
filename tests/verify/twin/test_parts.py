"""The parts of a proof: what each is run on, and where."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from tests_shared import VOCAB, PaddedText

from paceline.run.loop.loader import split_rows
from paceline.spec.layout import Layout, rows_of
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.steps.update import ScheduleSpec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.models.layers.attention import CausalAttention, scaled_attention
from paceline.verify.process.group import Job
from paceline.verify.reference.plain_attention import plain_attention
from paceline.verify.twin.fold import FoldedSource, MaskedSource, RareSource, edges_of, for_twin
from paceline.verify.twin.proof_parts import BRIEF, SWEEP, WHOLE, Subject, jobs_of
from paceline.verify.twin.task import LARGEST_LENGTH

SPEC = Spec(task=Task(model=ModelSpec("llama-1m"), data=DataSpec(seq_len=100_000), schedule=ScheduleSpec("constant")))


def jobs(layout: Layout, scope: str, spec: Spec = SPEC) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in jobs_of(Subject(spec, Plan(layout), 257), scope):
        found.setdefault(job.part, []).append(job)
    return found


def test_what_runs_where() -> None:
    layout = Layout(dp_shard=2)
    assert "uneven rows" in jobs(layout, BRIEF) and "whole batch" not in jobs(layout, BRIEF)
    assert "uneven rows" in jobs(layout, SWEEP) and "whole batch" not in jobs(layout, SWEEP)
    assert not {"even rows", "stand-in rows"} & {*jobs(layout, BRIEF), *jobs(layout, SWEEP)}
    whole = jobs(layout, WHOLE)
    assert {"uneven rows", "even rows", "stand-in rows", "one layer at the real length", "whole batch"} <= set(whole)
    assert [job.plan.precision for job in whole["uneven rows"]] == ["fp32", "fp64"]
    own = dataclasses.replace(SPEC, task=dataclasses.replace(SPEC.task, objective="mine:loss"))
    assert all("whole batch" in jobs(layout, scope, own) for scope in (BRIEF, WHOLE, SWEEP)), (
        "what is one's own is asked whether it is a sum"
    )


def test_a_plan_in_bf16_has_its_precision_proven_before_it_trains() -> None:
    layout = Layout(dp_shard=4, tp=2, pp=2)
    plans = {precision: Plan(layout, precision=precision) for precision in ("fp32", "bf16", "fp16")}
    brief = {precision: jobs_of(Subject(SPEC, plan, 257), BRIEF) for precision, plan in plans.items()}
    low = {name: [job for job in found if job.part == "low precision"] for name, found in brief.items()}
    assert not low["fp32"]
    for precision in ("bf16", "fp16"):
        assert [str(job.plan.layout) for job in low[precision]] == ["dp_shard=2", "tp=2", "pp=2"]
        assert all(job.plan.precision == precision and job.check == "low, brief" for job in low[precision])


def test_every_rank_has_three_micro_batches_and_some_are_uneven() -> None:
    whole = jobs(Layout(dp_shard=2), WHOLE)
    for part, sizes in (("uneven rows", {1, 2}), ("even rows", {2}), ("stand-in rows", {0, 1})):
        plan = whole[part][0].plan
        found = set()
        for rank in range(2):
            parts = split_rows(rows_of(plan.batch_samples, 2, rank), plan.accumulation)
            assert len(parts) == 3
            found |= set(map(len, parts))
        assert found == sizes


def test_twins_vary_what_would_hide_a_mistake() -> None:
    whole = jobs(Layout(dp_shard=2), WHOLE)
    uneven, even = (whole[part][0] for part in ("uneven rows", "even rows"))
    assert uneven.masked and not even.masked
    assert uneven.spec.task.optimizer.eps == 1e-4 and even.spec.task.optimizer.eps == 1e-8
    assert uneven.spec.task.schedule.kind == "linear" and even.spec.task.schedule.kind == "constant"
    long = whole["one layer at the real length"][0]
    assert long.spec.task.data.seq_len == LARGEST_LENGTH and long.spec.task.model.layers == 1 and long.steps == 1


def test_a_sequence_does_not_divide_into_two_chunks_for_each_rank() -> None:
    for layout in (Layout(cp=2), Layout(cp=4), Layout(dp_shard=2, cp=2)):
        for job in jobs_of(Subject(SPEC, Plan(layout), 257), WHOLE):
            if job.plan.layout.cp > 1:
                assert job.spec.task.data.seq_len % (2 * job.plan.layout.cp)
    split = jobs(Layout(cp=2, tp=2), WHOLE)["uneven rows"][0]
    assert split.spec.task.data.seq_len % 4 == 0, "tensor ranks need even parts"


def test_every_row_of_masked_text_weighs_differently() -> None:
    ids = np.arange(40)
    whole, masked = PaddedText().read(ids), MaskedSource(PaddedText()).read(ids)
    counted = (masked["labels"] != -100).sum(1)
    assert len(counted.unique()) > 5 and (counted <= (whole["labels"] != -100).sum(1)).all()
    kept = masked["labels"] != -100
    assert torch.equal(masked["labels"][kept], whole["labels"][kept])
    again = MaskedSource(PaddedText()).read(ids[7:9])
    assert torch.equal(again["labels"], masked["labels"][7:9]), "which labels count depends on the sample alone"
    source = PaddedText()
    assert for_twin(source, Task(data=source), masked=True) is source, "one's own data are what they are"


def test_a_twin_gathers_rows_as_the_source_it_changes_does() -> None:
    class Gathers(PaddedText):
        gathers_rows = True

        def gather(self, ids: Any) -> Any:
            return self.read(ids)

        def batch(self, gathered: Any, first: int, last: int) -> Any:
            return {name: rows[first:last].clone() for name, rows in gathered.items()}

    ids = np.arange(3, 12)
    changed = RareSource(MaskedSource(FoldedSource(Gathers(), 5)), 5)
    assert changed.gathers_rows and not MaskedSource(PaddedText()).gathers_rows
    rows, gathered = changed.read(ids), changed.gather(ids)
    for first, last in ((0, 2), (4, 9)):
        some, alone = changed.batch(gathered, first, last), changed.read(ids[first:last])
        for name in rows:
            assert torch.equal(some[name], rows[name][first:last]) and torch.equal(some[name], alone[name])


def test_plain_attention_is_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.rand(2, 1, 300, 300, generator=generator) < 0.5
    mask[..., 0] = True
    for seen in (None, mask):
        assert torch.allclose(plain_attention(q, k, v, seen), scaled_attention(q, k, v, seen), rtol=0, atol=1e-12)
    assert CausalAttention.over_ranks is None


def test_ids_beside_the_cuts_of_a_vocabulary_are_many_and_documents_short() -> None:
    ids, vocab = np.arange(9), 257
    edges = edges_of(vocab, vocab)
    assert {0, 128, 129, 85, 86, 171, 172, 256} <= set(edges) and len(edges) < 20

    class Packed(PaddedText):
        def read(self, ids: Any, positions: Any = None) -> Any:
            batch = super().read(ids, positions)
            return {**batch, "documents": (batch["labels"] >= 0).long()}

    whole, rare = Packed().read(ids), RareSource(Packed(), VOCAB).read(ids)
    edges = edges_of(VOCAB, VOCAB)
    for name in ("tokens", "labels"):
        changed = rare[name] != whole[name]
        assert changed.any() and set(rare[name][changed].tolist()) <= set(edges)
        assert {edge for edge in edges if (rare[name] == edge).any()} == set(edges), f"all are among the {name}"
        assert int(rare[name].max()) < VOCAB
    assert torch.equal(rare["labels"] >= 0, whole["labels"] >= 0), "as many labels count"
    assert torch.equal(rare["documents"] == 0, whole["documents"] == 0), "what fills a row is no document"
    found = [len(row[row > 0].unique()) for row in rare["documents"]]
    assert max(found) >= 2
    again = RareSource(Packed(), VOCAB).read(ids[3:5])
    assert torch.equal(again["tokens"], rare["tokens"][3:5]) and torch.equal(again["documents"], rare["documents"][3:5])

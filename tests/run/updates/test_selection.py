"""Selection by loss while training: exact in expectation, the same on every layout and after a fault."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from programs import Rows, Stack, cross_entropy
from runs import as_json, in_process, paceline, records_of, steps_of, write_spec
from tests_shared import SEQ_LEN, VOCAB, Dropout, decoder_task, device_here, plan_of, world_here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.updates import selection as selecting
from paceline.run.updates.selection import BatchSelection, CandidateBatches
from paceline.spec.layout import Layout
from paceline.spec.load import Spec, check
from paceline.spec.steps.selection import SelectionSpec
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import ModelSpec, Task
from paceline.task.data.order.chosen import ONE, of_mask
from paceline.task.models.layers.loss import LabelsByRow
from paceline.task.objective import _summed_cross_entropy, classification

EXPERTS: dict[str, Any] = {
    "hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": VOCAB, "experts": 8, "top_k": 2
}  # fmt: skip
COUNT, CANDIDATES = 2, 3  # trained on, and read for each
PLAIN_SGD = OptimizerSpec(name="sgd", beta1=0.0, weight_decay=0.0, clip_norm=0.0)


def rows_apart(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses = torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
    return losses, torch.ones(len(losses))


def own_objective(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses, items = rows_apart(model, batch)
    return losses.sum(), items.sum()


own_objective.by_row = rows_apart


class Pairs(Rows):
    """Rows as pairs, which the objective `classification` takes."""

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> Any:
        rows = super().read(ids)
        return rows["x"], rows["labels"]


TASKS = {
    "decoder": decoder_task(),  # its head computes the loss
    "dropout": decoder_task(model=Dropout, objective="next_token"),  # logits, and random numbers of each sample
    "classes": decoder_task(model=Stack, data=Pairs(), objective=classification),
    "own": decoder_task(model=Stack, data=Rows(), objective=own_objective),
    "experts": decoder_task(model=ModelSpec("moe-2m", **EXPERTS, balance_weight=0.5)),  # whose balance is in the loss
    "biased": decoder_task(model=ModelSpec("moe-2m", **EXPERTS, balance="bias")),
}
OTHER_LOSS = ("dropout", "experts")  # candidates are scored without dropout, and without the balance of experts


def made(task: Task, folder: Path, samples: int, **selection: Any) -> tuple[Any, BatchStream, BatchSelection | None]:
    """Return a step of a task in fp64 on one device, what reads its batches, and what chooses among them."""
    torch.manual_seed(7)
    task = dataclasses.replace(task, optimizer=PLAIN_SGD, selection=SelectionSpec(**selection))
    plan, world = plan_of(Layout(), batch=samples, micro_batch=2, precision="fp64"), world_here()
    items = SEQ_LEN if task.data.unit == "tokens" else 1
    stepper = assemble(task, plan, world, task.data, items).stepper
    if not task.selection.selects:
        return stepper, BatchStream(task.data, task.seed, plan, 0, world.device), None
    stream = BatchStream(task.data, task.seed, plan, 0, world.device, CandidateBatches(task.selection, samples))
    return stepper, stream, BatchSelection(task, stream, stepper, folder)


def gradient_of(stepper: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the gradient of a step that changes no weight, flat, and its loss."""
    seen: list[torch.Tensor] = []

    def look(correction: float) -> None:
        gradients = (p.grad for p in stepper.model.parameters() if p.grad is not None)
        seen.append(torch.cat([gradient.flatten() * correction for gradient in gradients]))

    stepper.observe = look
    stats = stepper.step(batch, 0.0)
    return seen[0], stats.loss


@pytest.mark.parametrize("name", [name for name in TASKS if name != "biased"])  # whose biases move with every draw
def test_the_expected_gradient_over_all_draws_is_that_of_all_candidates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draw that there is, with its probability, through the step itself; samples weigh differently."""
    whole, every, _ = made(TASKS[name], tmp_path, COUNT * CANDIDATES)
    expected, loss = gradient_of(whole, every.at(0, 1))
    stepper, stream, selection = made(TASKS[name], tmp_path, COUNT, by="loss", candidates=CANDIDATES)
    assert selection is not None
    batch, units = stream.at(0, 1), list[np.ndarray]()
    assert batch.samples == COUNT * CANDIDATES
    chances = selecting.chosen.chances
    monkeypatch.setattr(selecting.chosen, "chances", lambda *given: units.append(chances(*given)) or units[-1])
    selection.choose(batch)
    ends = sorted({0, *(int(end) % ONE for end in np.cumsum(units[0])), ONE})
    mean, mean_loss, seen = torch.zeros_like(expected), 0.0, set()
    for first, after in itertools.pairwise(ends):
        monkeypatch.setattr(selecting.chosen, "start_of", lambda *_, first=first: first)
        drawn, estimate = gradient_of(stepper, selection.choose(batch))
        mean, mean_loss = mean + (after - first) / ONE * drawn, mean_loss + (after - first) / ONE * estimate
        record = selection.take()
        assert record is not None
        assert name in OTHER_LOSS or record.loss == pytest.approx(loss, rel=1e-12)
        assert (drawn - expected).norm() > 1e-3 * expected.norm(), "a draw by itself is another gradient"
        seen.add(record.chosen)
    assert len(seen) > 2
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12 * float(expected.norm()))
    assert mean_loss == pytest.approx(loss, rel=1e-12)


def test_the_largest_losses_are_trained_on_unweighted(tmp_path: Path) -> None:
    stepper, stream, selection = made(TASKS["own"], tmp_path, COUNT, by="largest", candidates=CANDIDATES)
    assert selection is not None
    batch = stream.at(0, 1)
    losses = torch.cat([rows_apart(stepper.model.eval(), micro_of(batch, at))[0] for at in range(3)])
    stats = stepper.step(selection.choose(batch), 0.0)
    record = selection.take()
    assert record is not None and record.spread is None
    assert of_mask(record.chosen, 6).tolist() == sorted(losses.argsort(descending=True)[:COUNT].tolist())
    assert stats.loss == pytest.approx(float(losses.detach().topk(COUNT).values.mean()), rel=1e-12)
    assert stats.weight == COUNT and stats.position_after == 6


def micro_of(batch: Any, at: int) -> Any:
    return {name: value.double() if value.is_floating_point() else value
            for name, value in batch.micro_batches[at].data.items()}  # fmt: skip


def test_what_an_earlier_start_chose_is_chosen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {(1, 0, 6): "30", (2, 6, 6): "c0"}  # the third and fourth; the first two
    monkeypatch.setattr(selecting, "chosen_before", lambda folder, fingerprint: told)
    _, stream, selection = made(TASKS["decoder"], tmp_path, COUNT, by="loss", candidates=CANDIDATES)
    assert selection is not None
    for step, expected in ((1, [2, 3]), (2, [0, 1])):
        batch = selection.choose(stream.at(6 * (step - 1), step))
        assert np.concatenate([micro.places for micro in batch.micro_batches]).tolist() == [
            6 * (step - 1) + place for place in expected
        ]
        record = selection.take()
        assert record is not None and record.repeated


Told = tuple[str, float, float, float]


def shared_step(layout: Layout, folder: Path, name: str = "decoder") -> tuple[Told, float]:
    """Return what a step of 3 among 9 chooses and computes, and how far logits that are spread are from whole ones."""
    task = dataclasses.replace(
        TASKS[name], optimizer=PLAIN_SGD, selection=SelectionSpec(by="loss", candidates=CANDIDATES)
    )
    rows = 1 if layout.devices > 2 else 2  # so that a pipeline has micro-batches enough
    plan, world = plan_of(layout, batch=3, micro_batch=rows, precision="fp64"), world_here()
    stepper = assemble(task, plan, world, task.data, SEQ_LEN).stepper
    samples = CandidateBatches(task.selection, 3)
    stream = BatchStream(task.data, task.seed, plan, layout.data_rank(world.rank), world.device, samples)
    selection = BatchSelection(task, stream, stepper, folder)
    stats = stepper.step(selection.choose(stream.at(0, 1)), 0.0)
    record = selection.take()
    assert record is not None
    apart = spread_logits_apart() if layout == Layout(tp=2) else 0.0
    return (record.chosen, record.loss, stats.loss, stats.grad_norm), apart


def spread_logits_apart() -> float:
    """Return how far losses by row and their weighted gradients are where the vocabulary is spread over two ranks."""
    generator = torch.Generator().manual_seed(3)
    device = device_here()
    logits = torch.randn(4, 5, 6, generator=generator, dtype=torch.float64).to(device)
    labels = torch.randint(0, 6, (4, 5), generator=generator).to(device)
    labels[1, 2:], weights = -100, torch.tensor([0.5, 2.0, 1.0, 0.0], dtype=torch.float64, device=device)
    own = logits.chunk(2, dim=-1)[torch.distributed.get_rank()].clone().requires_grad_()
    whole = logits.clone().requires_grad_()
    spread = DTensor.from_local(own, init_device_mesh(device.type, (2,)), [Shard(2)])
    apart = 0.0
    for given in (None, weights):
        losses = [_summed_cross_entropy(each, LabelsByRow(labels, given)) for each in (whole, spread)]
        assert torch.equal(losses[0][1], losses[1][1])
        apart = max(apart, float((losses[0][0] - losses[1][0]).abs().max()))
    for loss, _ in losses:
        loss.backward()
    part = whole.grad.chunk(2, dim=-1)[torch.distributed.get_rank()]
    return max(apart, float((part - own.grad).abs().max()))


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(cp=2), *(pytest.param(each, marks=pytest.mark.deep)
                                   for each in (Layout(tp=2, cp=2), Layout(tp=2, dp_shard=2), Layout(cp=3)))],
    ids=str,
)  # fmt: skip
def test_ranks_that_share_samples_score_and_weigh_them_as_one_device(layout: Layout, tmp_path: Path) -> None:
    (chosen, *numbers), _ = shared_step(Layout(), tmp_path)
    for (mine, *found), apart in run_ranks(shared_step, layout.devices, layout, tmp_path):
        assert mine == chosen
        assert found == pytest.approx(numbers, rel=1e-12)
        assert apart < 1e-14


@pytest.mark.parametrize(("layout", "name"), [
    (Layout(pp=2), "experts"), (Layout(dp_shard=2, ep=2), "experts"),
    *(pytest.param(layout, name, marks=pytest.mark.deep) for layout, name in (
        (Layout(pp=2), "decoder"), (Layout(pp=2), "biased"), (Layout(dp_shard=2, ep=2), "biased"),
        (Layout(pp=2, dp_shard=2), "experts"), (Layout(pp=2, tp=2), "experts"), (Layout(tp=2), "experts"),
        (Layout(cp=2), "experts"), (Layout(pp=2, cp=2), "decoder"), (Layout(pp=2, dp_shard=2, ep=2), "biased"),
        (Layout(pp=3), "biased"))),
], ids=str)  # fmt: skip
def test_stages_of_a_pipeline_and_ranks_of_experts_choose_and_weigh_as_one_device(
    layout: Layout, name: str, tmp_path: Path
) -> None:
    (chosen, *numbers), _ = shared_step(Layout(), tmp_path, name)
    for (mine, *found), _ in run_ranks(shared_step, layout.devices, layout, tmp_path, name):
        assert mine == chosen
        assert found == pytest.approx(numbers, rel=1e-12)


def test_an_objective_without_rows_and_one_whose_rows_are_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="by_row"):
        made(dataclasses.replace(TASKS["own"], objective=cross_entropy), tmp_path, COUNT, by="loss")

    def doubled(model: Any, batch: Any) -> Any:
        return cross_entropy(model, batch)

    doubled.by_row = lambda model, batch: (2 * rows_apart(model, batch)[0], rows_apart(model, batch)[1])
    _, stream, selection = made(dataclasses.replace(TASKS["own"], objective=doubled), tmp_path, COUNT, by="loss")
    assert selection is not None
    with pytest.raises(ConfigError, match="add up to"):
        selection.choose(stream.at(0, 1))


@pytest.mark.parametrize(
    "other",
    [{"batch_rows": "by_length"}, {"growth": {"by": "noise", "largest": "64 samples"}},
     {"turns": ({"name": "one", "objective": "next_token", "match": ("*",)},)}],
)  # fmt: skip
def test_what_a_selection_does_not_go_with_is_refused_before_anything_starts(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"task\.selection"):
        check(Spec(task=Task(selection={"by": "loss"}, **other)))


SELECTED = '\n[task.selection]\nby = "loss"\ncandidates = 2\n'


def test_a_run_chooses_alike_on_any_ranks_and_again_after_a_rank_is_killed(tmp_path: Path) -> None:
    """One device against two shards with another micro-batch, of which one is killed in step 6: step 5 comes again.

    Training waits for the checkpoint after step 4: one that is still being written at the kill would be lost.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    alone, shards = (
        write_spec(tmp_path, folder, devices, plan, steps=7, precision="fp64")
        for folder, devices, plan in ((one, 1, "micro_batch = 14"), (two, 2, "dp_shard = 2\nmicro_batch = 3"))
    )
    fault = '\n[run.checkpoints]\nasynchronous = "off"\n\n[[run.faults.each]]\nkind = "kill"\nrank = 1\nstep = 6\n'
    for path, more in ((alone, ""), (shards, fault)):
        path.write_text(path.read_text() + SELECTED + more)
    assert in_process("train", alone).returncode == 0
    assert paceline("train", shards).returncode == 0
    expected, found = (records_of(folder, "selection") for folder in (one, two))
    assert [record["step"] for record in expected] == list(range(1, 8))
    assert [record["step"] for record in found if record.get("repeated")] == [5]
    by_step = {record["step"]: record for record in expected}
    for record in found:
        mine = by_step[record["step"]]
        assert (record["chosen"], record["digest"]) == (mine["chosen"], mine["digest"])
        assert record["loss"] == pytest.approx(mine["loss"], rel=1e-9)
        assert len(of_mask(record["chosen"], 28)) == 14 and record["candidates"] == 28
    steps = list(zip(steps_of(one), steps_of(two), strict=True))
    for mine, his in steps:
        assert his["loss"] == pytest.approx(mine["loss"], rel=1e-9) and his["sample_ids"] == mine["sample_ids"]
        assert mine["weight"] == 14 * 16, "what is counted is what was trained on"
        assert mine["position_after"] - mine["position_before"] == 28 == len(mine["sample_ids"])
    read = [sample for mine, _ in steps for sample in mine["sample_ids"]]
    assert len(read) == len(set(read)) == 7 * 28, "every sample is a candidate once"


def test_scoring_is_priced_on_all_axes(tmp_path: Path) -> None:
    found = {}
    for name, more in (("plain", ""), ("selected", SELECTED.replace("candidates = 2", "candidates = 6"))):
        path = write_spec(tmp_path, tmp_path / name, 2)
        path.write_text(path.read_text() + more)
        ended = in_process("plan", path, "--json")
        assert ended.returncode == 0, ended.stderr
        found[name] = as_json(ended.stdout)
    terms = {name: {term["name"]: term["value"] for term in plan["forecast"]["time"]} for name, plan in found.items()}
    assert "scoring of candidates" not in terms["plain"] and terms["selected"]["scoring of candidates"] > 0
    forward = terms["selected"]["products, forward"]
    assert terms["selected"]["scoring of candidates"] > 6 * forward
    assert any("scores 84 samples and trains on 14" in remark for remark in found["selected"]["remarks"])
    for axis in ("tp", "pp"):
        shared = in_process("plan", path, "--set", f"plan.{axis}=2", "--set", "plan.micro_batch=1", "--json")
        (term,) = (one for one in as_json(shared.stdout)["forecast"]["time"] if "scoring" in one["name"])
        assert "of their communication" in term["formula"], axis

"""Context parallel: ranks that share sequences compute the numbers of one device, in every composition."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from distributed import run_kept, run_ranks
from packed_kernel import let_a_cpu_have, one_by_one
from rounding import MEAN_LOSS_BF16, assert_curves_close
from tests_shared import VOCAB, PaddedText, decoder_task, run_steps, world_here
from tests_shared import coarse_plan as plan_of
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.checkpoint import load_checkpoint, materialise_optimizer_state, save_checkpoint, training_state
from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.step import StepStats
from paceline.run.parallel.context import exchange, sequence_attention, zigzag
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import ModelSpec, Task
from paceline.task.data.rows.packed import SaysStarts
from paceline.task.models.layers import packed
from paceline.task.models.layers.attention import CausalAttention
from paceline.task.objective import next_token
from paceline.task.profile.traced import profile_module
from paceline.verify.compare.layout import compare

STEPS = 2


class Text(PaddedText):
    """Rows of `seq` tokens, of which some labels are masked; optionally of several documents each."""

    def __init__(self, seq: int, packed: bool = False) -> None:
        self.seq = self.items_per_sample = seq
        self.packed = packed

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return rows that depend on their ids alone."""
        rows = [np.random.default_rng(int(i)) for i in ids]
        walks = np.stack([np.cumsum(row.integers(0, 3, self.seq + 1)) % VOCAB for row in rows])
        labels = torch.from_numpy(walks[:, 1:].copy())
        for row, generator in zip(labels, rows, strict=True):
            row[: int(generator.integers(0, self.seq))] = -100
        batch = {"tokens": torch.from_numpy(walks[:, :-1].copy()), "labels": labels}
        if self.packed:
            ends = np.stack([row.random(self.seq) < 0.2 for row in rows])
            batch["documents"] = torch.from_numpy(np.cumsum(ends, axis=1))
        return batch


LAYERS = 2
SMALL = ModelSpec("llama-1m", hidden=32, layers=LAYERS, heads=4, kv_heads=2, ffn=40, vocab=VOCAB)


def text_task(seq: int = 16, packed: bool = False, **changes: Any) -> Task:
    return decoder_task(**{"data": Text(seq, packed), "model": SMALL, **changes})


def numbers(task: Task, plan: Plan) -> tuple[list[tuple], dict[str, torch.Tensor], float]:
    """Return (loss, norm, weight) of each step, the full weights after them, and the loss on held-out rows."""
    stats, built = run_steps(task, plan, STEPS)
    weights = {}
    for name, parameter in built.model.named_parameters():
        whole = parameter.detach()
        weights[name] = whole.full_tensor() if isinstance(whole, DTensor) else whole
    loss = evaluate(built.stepper, task.data, 5, plan.layout.data_rank(world_here().rank)).loss
    return [(s.loss, s.grad_norm, s.weight) for s in stats], weights, loss


def all_numbers(cases: list[tuple[Task, Plan]]) -> list[tuple]:
    return [numbers(task, plan) for task, plan in cases]


def assert_equal(ours: tuple, one_device: tuple, relative: float = 1e-10) -> None:
    for step, expected in zip(ours[0], one_device[0], strict=True):
        assert step == pytest.approx(expected, rel=relative)
    assert ours[1].keys() == one_device[1].keys()
    for name, weight in ours[1].items():
        torch.testing.assert_close(weight, one_device[1][name], rtol=relative, atol=relative, msg=name)
    assert ours[2] == pytest.approx(one_device[2], rel=relative)


def assert_layouts_equal(cases: list[tuple[Task, Plan]]) -> None:
    """Assert that each case, all of one number of ranks, equals the same task and plan on one device."""
    ranks = run_kept(all_numbers, cases[0][1].layout.devices, cases)
    for index, (task, plan) in enumerate(cases):
        for rank in ranks:
            assert_equal(rank[index], on_one_device(task, plan))


ONE_DEVICE: dict[str, tuple] = {}


def on_one_device(task: Task, plan: Plan) -> tuple:
    """Return what one device computes of a task in micro-batches of a plan's size, computed once."""
    alone = fp64(Layout(), batch=plan.batch_samples, micro_batch=plan.micro_batch)
    key = repr((task.data.seq, task.data.packed, task.model, alone))
    if key not in ONE_DEVICE:
        (ONE_DEVICE[key],) = run_kept(numbers, 1, task, alone)
    return ONE_DEVICE[key]


def fp64(layout: Layout, batch: int = 7, **changes: Any) -> Plan:
    """Return a plan of three micro-batches, or two on ranks that share the rows, which are uneven."""
    return plan_of(layout, batch, precision="fp64", **changes)


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_two_ranks_share_sequences(method: str) -> None:
    assert_layouts_equal(
        [
            (text_task(), fp64(Layout(cp=2), cp_method=method)),
            (text_task(), fp64(Layout(cp=2), cp_method=method, zero=2, micro_batch=7)),
            (text_task(), fp64(Layout(cp=2), cp_method=method, recompute="full")),
            (text_task(13), fp64(Layout(cp=2), cp_method=method)),  # filled up to 16
        ]
    )


@pytest.mark.deep
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_two_ranks_share_sequences_in_other_ways(method: str) -> None:
    untied = dataclasses.replace(SMALL, kv_heads=4, tied=False)
    assert_layouts_equal(
        [
            (text_task(), fp64(Layout(cp=2), cp_method=method, zero=1)),
            (text_task(), fp64(Layout(cp=2), cp_method=method, recompute="selective")),
            (text_task(3), fp64(Layout(cp=2), cp_method=method)),
            (text_task(model=untied), fp64(Layout(cp=2), cp_method=method)),
        ]
    )


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(each, marks=pytest.mark.deep) for each in (Layout(cp=4), Layout(cp=2, dp_replicate=2))),
        Layout(cp=2, dp_shard=2),
        Layout(cp=3),
    ],
    ids=str,
)
def test_compositions(layout: Layout) -> None:
    assert_layouts_equal(
        [
            (text_task(24), fp64(layout)),
            (text_task(24), fp64(layout, cp_method="ring", zero=2)),
            (text_task(19), fp64(layout, recompute="selective", cp_method="ring")),
            (text_task(19, packed=True), fp64(layout, recompute="full")),
            (text_task(5), fp64(layout, batch=3)),  # ranks without a row, and some with padding alone
        ]
    )


def test_packed_documents() -> None:
    assert_layouts_equal(
        [
            (text_task(packed=True), fp64(Layout(cp=2))),
            (text_task(13, packed=True), fp64(Layout(cp=2), recompute="selective")),
        ]
    )


def by_kernel(cases: list[tuple[Task, Plan]]) -> tuple[list[tuple], int]:
    """Return the numbers of each case with documents one by one for a kernel, and how often it was called."""
    calls: list[int] = []

    def kernel(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(q))
        return one_by_one(q, *rest)

    def no_mask(*given: Any) -> torch.Tensor:
        raise AssertionError("a mask was made")

    with pytest.MonkeyPatch.context() as patch:
        let_a_cpu_have(patch, kernel)
        patch.setattr(zigzag, "takes_packed", lambda device: True)
        for module in (zigzag, packed):
            patch.setattr(module, "document_mask", no_mask)
        return all_numbers(cases), len(calls)


def test_packed_documents_need_no_mask_where_there_is_a_kernel() -> None:
    """The whole way of a GPU's ranks on CPUs: documents begin on the host, and no mask of a sequence is ever made."""
    plans = [fp64(Layout(cp=2)), fp64(Layout(cp=2), recompute="selective"), fp64(Layout(cp=2), batch=3)]
    tasks = [text_task(seq, packed=True) for seq in (16, 13, 9)]
    told = [dataclasses.replace(task, data=cast(Any, SaysStarts(task.data))) for task in tasks]
    ranks = run_ranks(by_kernel, 2, list(zip(told, plans, strict=True)))
    for number, (task, plan) in enumerate(zip(tasks, plans, strict=True)):
        for found, calls in ranks:
            assert calls > 0
            assert_equal(found[number], on_one_device(task, plan))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_low_precision_follows_one_device_and_keeps_fp32_weights(precision: str, method: str) -> None:
    plan = plan_of(Layout(cp=2), precision=precision, cp_method=method)
    ranks = run_kept(numbers, 2, text_task(), plan)
    (one_device,) = run_kept(numbers, 1, text_task(), plan_of(Layout(), precision=precision))
    assert all(weight.dtype == torch.float32 for weight in ranks[0][1].values())
    assert_curves_close(ranks[0][0], one_device[0], 2.5 * MEAN_LOSS_BF16)  # the norm of the gradient is no mean


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def one_step(task: Task, plan: Plan, folder: str, step: int) -> tuple[float, float]:
    """Load the checkpoint of the step before, if there is one, make a step, save; return loss and norm."""
    world = world_here()
    built = assemble(task, plan, world, task.data, task.data.items_per_sample)
    materialise_optimizer_state(built.optimizer)
    if step > 1:
        load_checkpoint(Path(folder) / f"step-{step - 1:08d}", training_state(built.model, built.optimizer))
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    stats = built.stepper.step(stream.at((step - 1) * plan.batch_samples), task.optimizer.lr)
    save_checkpoint(Path(folder), step, training_state(built.model, built.optimizer), {}, keep_last=9)
    return stats.loss, stats.grad_norm


def stats_of(task: Task, plan: Plan, steps: int) -> list[StepStats]:
    return run_steps(task, plan, steps)[0]


def test_checkpoints_move_between_layouts(tmp_path: Path) -> None:
    chain = [Layout(cp=2), Layout(cp=2, dp_shard=2), Layout(), Layout(cp=4), Layout(dp_replicate=2, cp=2)]
    (stats,) = run_kept(stats_of, 1, text_task(), fp64(Layout()), len(chain))
    for step, layout in enumerate(chain, start=1):
        made = run_ranks(one_step, layout.devices, text_task(), fp64(layout), str(tmp_path), step)
        expected = stats[step - 1]
        assert made[0] == pytest.approx((expected.loss, expected.grad_norm), rel=1e-10), layout


# ---- recompute -----------------------------------------------------------------------------------------------------


def times_attended(recompute: str) -> int:
    """Return how often a step with one micro-batch brings keys together on this rank."""
    made = []

    class Counted(sequence_attention.METHODS["gather"]):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any) -> None:
            made.append(1)
            super().__init__(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sequence_attention.METHODS, "gather", Counted)
        run_steps(text_task(), fp64(Layout(cp=2), micro_batch=13, recompute=recompute), 1)
    return len(made)


def test_selective_recompute_keeps_attention_and_full_does_it_again() -> None:
    # Each layer attends once forward and once backward.
    assert run_kept(times_attended, 2, "none")[0] == 2 * LAYERS
    assert run_kept(times_attended, 2, "selective")[0] == 2 * LAYERS
    assert run_kept(times_attended, 2, "full")[0] == 3 * LAYERS


# ---- a user's own model --------------------------------------------------------------------------------------------


class OwnModel(nn.Module):
    """A user's model that says where its tokens stand and attends through CausalAttention."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        self.layers = nn.ModuleList(OwnLayer(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        x = self.embed(tokens) + self.place(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class OwnLayer(nn.Module):
    """Attention of two heads, added to the stream."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv, self.attend, self.drop = nn.Linear(width, 3 * width), CausalAttention(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the stream [rows, seq, width]."""
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return x + self.drop(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Closed(OwnModel):
    """The same without a word about positions."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return logits [rows, seq, vocab]."""
        return super().forward(tokens)


def sum_of_tokens(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what next_token does; nothing says that it may be given parts of sequences."""
    return next_token(model, batch)


def test_a_users_model_shares_sequences_by_the_rule() -> None:
    task = text_task(13, packed=True, model=OwnModel)
    assert_layouts_equal([(task, fp64(Layout(cp=2))), (text_task(model=OwnModel), fp64(Layout(cp=2)))])


def test_the_axis_is_closed_by_name_without_the_rule() -> None:
    example = text_task().data.read(np.arange(2))
    assert "cp" not in (profile_module(OwnModel(), example, next_token).closed_axes or {})
    for model, objective in ((Closed(), next_token), (OwnModel(), sum_of_tokens)):
        because = (profile_module(model, example, objective).closed_axes or {})["cp"]
        assert "CausalAttention" in because and "sums_over_tokens" in because
    for changes in ({"model": Closed}, {"model": OwnModel, "objective": sum_of_tokens}):
        with pytest.raises(ConfigError, match=r"cp = 2 with the (model Closed|objective sum_of_tokens)"):
            run_ranks(numbers, 2, text_task(**changes), fp64(Layout(cp=2)))


# ---- dropout -------------------------------------------------------------------------------------------------------


def masks(dropout: float, step: int) -> list[bool]:
    """Return which of this rank's features of the first row's first tokens dropout leaves."""
    task, world = text_task(model=OwnModel(dropout=dropout)), world_here()
    plan = fp64(Layout(cp=2))
    built = assemble(task, plan, world, task.data, 16)
    seen: list[torch.Tensor] = []
    built.model.layers[0].drop.register_forward_hook(lambda module, inputs, output: seen.append(output == 0))
    stream = BatchStream(task.data, task.seed, plan, 0, world.device)
    built.stepper.step(stream.at(step * plan.batch_samples), 1e-3)
    return seen[0].flatten().tolist()


def test_dropout_differs_between_the_parts_of_a_sequence_and_repeats() -> None:
    first, again, later = (run_kept(masks, 2, 0.5, step) for step in (0, 0, 1))
    assert first == again, "a restart draws the same masks"
    assert first[0] != first[1] and first != later
    assert 0.3 < sum(first[0]) / len(first[0]) < 0.7


# ---- planted mistakes ----------------------------------------------------------------------------------------------


def planted(mistake: str) -> CheckProof:
    """Return the proof of a cp layout with one of the field's mistakes in it."""
    from paceline.run.parallel.context import part as context
    from paceline.run.parallel.context import zigzag

    take = zigzag.SequencePart.__call__

    def wrong(self: zigzag.SequencePart, batch: Any) -> Any:
        part = take(self, batch)
        if mistake == "positions restart in each part":
            places = torch.arange(part["tokens"].shape[1], device=part["tokens"].device)
            part["positions"] = places.expand_as(part["tokens"])
        elif mistake == "labels of a part end at its own border":
            part["labels"] = torch.cat((part["labels"][:, :-1], torch.full_like(part["labels"][:, :1], -100)), dim=1)
        elif mistake == "parts in the order of ranks":
            return take(dataclasses.replace(self, rank=self.ranks - 1 - self.rank), batch)
        return part

    if mistake == "loss times the degree":
        sound = next_token

        def scaled(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            loss, weight = sound(model, batch)
            return loss * 2, weight

        scaled.sums_over_tokens = True  # type: ignore[attr-defined]
        import paceline.run.assemble as assembling

        turns_of = assembling.turns_of
        assembling.turns_of = lambda *given: tuple(dataclasses.replace(t, objective=scaled) for t in turns_of(*given))
    elif mistake == "attention stays on the rank":
        context.shared_attention = lambda group, method: CausalAttention().forward
    else:
        zigzag.SequencePart.__call__ = wrong  # type: ignore[method-assign]
    task = text_task()
    return compare(task, fp64(Layout(cp=2)), world_here(), task.data, 16, 1)


@pytest.mark.parametrize(
    ("mistake", "quantity"),
    [
        ("positions restart in each part", "loss"),
        ("labels of a part end at its own border", "weight"),
        ("parts in the order of ranks", "loss"),
        ("loss times the degree", "loss"),
        ("attention stays on the rank", "loss"),
    ],
)
def test_verify_catches(mistake: str, quantity: str) -> None:
    result = run_ranks(planted, 2, mistake)[0]
    assert not result.equal
    assert result.first_difference.quantity == quantity


@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (0, 5)])
def test_a_ring_takes_from_the_rank_before_and_no_other(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    """Gloo takes whatever comes with the tag, so that ranks over gloo do not show whom a receive names."""
    asked: list[tuple[Any, int]] = []
    monkeypatch.setattr(exchange.dist, "P2POp", lambda call, tensor, group, tag, group_peer: (call, group_peer))
    monkeypatch.setattr(exchange.dist, "batch_isend_irecv", lambda calls: asked.extend(calls) or [])
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    exchange._Passed(torch.zeros(1), group, 0)
    after, before = (rank + 1 if rank + 1 < ranks else 0), (rank - 1 if rank else ranks - 1)
    assert asked == [(exchange.dist.isend, after), (exchange.dist.irecv, before)]

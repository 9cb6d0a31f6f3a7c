"""A user's own mixture of experts: stacked weights spread over ranks by one rule, a list of modules sharded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distributed import run_kept, run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, world_here
from tests_shared import coarse_plan as plan_of
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.objective import next_token
from paceline.task.profile.traced import profile_module
from paceline.task.rules import Rules
from paceline.verify.compare.layout import compare

EXPERTS, WIDTH, HIDDEN = 4, 12, 8


class Stacked(nn.Module):
    """Experts of one hidden layer with biases: called with rows sorted by expert and how many each gets."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the result of each row."""
        parts = rows.split(counts.tolist())
        weights = zip(parts, self.up, self.bias, self.down, strict=True)
        return torch.cat([F.linear(F.gelu(F.linear(part, up, bias)), down) for part, up, bias, down in weights])


class Listed(nn.Module):
    """The same as modules of their own. Every expert is called, with no rows too, so that all have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN)) for _ in range(EXPERTS)
        )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the result of each row."""
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.each, parts, strict=True)])


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS), kind()

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus what each token's best expert makes of it."""
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        results = self.experts(tokens[order], torch.bincount(chosen, minlength=EXPERTS))
        return x + (results[order.argsort()] * weight.unsqueeze(1)).view_as(x)


class Net(nn.Module):
    """A user's network of two such blocks."""

    paceline_rules = Rules({"layers.*.experts": "expert"}, first=("embed",), blocks="layers", last=("head",))
    kind: type[nn.Module] = Stacked

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(self.kind) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ListedNet(Net):
    kind = Listed


def task_of(model: type[Net]) -> Task:
    return decoder_task(model=model, objective="next_token", optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))


def proofs(cases: list[tuple[type[Net], Plan]]) -> list[CheckProof]:
    world = world_here()
    return [compare(task_of(m), plan, world, decoder_task().data, SEQ_LEN, 2) for m, plan in cases]


def test_own_experts_equal_one_device_in_fp64() -> None:
    ep = Layout(dp_shard=2, ep=2)
    cases = [(Net, plan_of(ep, precision="fp64", recompute=mode)) for mode in ("none", "selective", "full")]
    others = [Layout(dp_shard=2), Layout(dp_replicate=2), Layout(pp=2)]
    cases += [(model, plan_of(layout, precision="fp64")) for layout in others for model in (Net, ListedNet)]
    for (model, plan), found in zip(cases, run_kept(proofs, 2, cases)[0], strict=True):
        assert found.equal, (model, str(plan), found.first_difference)


def test_several_ranks_share_own_experts() -> None:
    layouts = [Layout(dp_shard=4, ep=2), Layout(dp_replicate=2, dp_shard=2, ep=2), Layout(dp_shard=2, pp=2, ep=2)]
    cases = [(Net, plan_of(layout, precision="fp64")) for layout in layouts]
    for (_, plan), found in zip(cases, run_kept(proofs, 4, cases)[0], strict=True):
        assert found.equal, (str(plan), found.first_difference)


def test_the_profile_knows_own_experts_or_says_why_not() -> None:
    batch = decoder_task().data.read(torch.arange(3).numpy())
    profile = profile_module(Net(), batch, next_token)
    assert (profile.experts, profile.expert_widths) == (EXPERTS, (WIDTH,)), "the width that all weights have"
    assert profile.expert_parameters == 2 * EXPERTS * (2 * WIDTH * HIDDEN + WIDTH)
    assert profile.blocks[0].routed_elements == SEQ_LEN * HIDDEN
    assert profile.closed_axes is not None
    assert "ep" not in profile.closed_axes and "experts' weights" in profile.closed_axes["tp"]
    listed = profile_module(ListedNet(), batch, next_token)
    assert listed.closed_axes is not None and "stack their weights" in listed.closed_axes["ep"]


def spread(model: type[Net], plan: Plan) -> None:
    assemble(task_of(model), plan, world_here(), decoder_task().data, SEQ_LEN)


@pytest.mark.parametrize(
    ("model", "layout", "because"),
    [(ListedNet, Layout(dp_shard=2, ep=2), "stack their weights"), (Net, Layout(tp=2), "built-in experts alone")],
    ids=["listed", "tp"],
)
def test_what_cannot_be_split_is_refused(model: type[Net], layout: Layout, because: str) -> None:
    with pytest.raises(ConfigError, match=because):
        run_ranks(spread, 2, model, plan_of(layout))

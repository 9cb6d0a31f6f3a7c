"""Under bf16 and fp16 an objective gets the model's outputs in fp32: losses are not rounded to three digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tests_shared import world_here
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.run.parallel.apply import apply_plan
from paceline.run.process.world import build_mesh
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"logits": self.last(x), "hidden": (x, 3)}


def mean_squares(plan: Plan, mesh: Any = None) -> tuple[set[torch.dtype], float, float]:
    """Return the dtypes of the outputs, a loss of them, and the norm of the gradients that this rank holds."""
    model = Net()
    gradients = apply_plan(model, list(model.blocks), plan, mesh)
    x = torch.linspace(-1, 1, 40).view(5, 8)
    gradients.zero()
    gradients.before_micro_batch(last=True)
    out = model(x)
    loss = ((out["logits"] - 0.3) ** 2).sum()
    loss.backward()
    gradients.finish()
    assert out["hidden"][1] == 3
    norm = sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    return {out["logits"].dtype, out["hidden"][0].dtype}, float(loss.detach()), norm


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_outputs_are_fp32_and_losses_have_their_digits(precision: str) -> None:
    dtypes, loss, norm = mean_squares(Plan(precision=precision))
    _, exact, exact_norm = mean_squares(Plan(precision="fp32"))
    assert dtypes == {torch.float32}
    assert loss != float(torch.tensor(loss).to(torch.bfloat16)), "a loss in bf16 would be one of its numbers"
    assert loss == pytest.approx(exact, rel=2e-2) and norm == pytest.approx(exact_norm, rel=5e-2)


@dataclass(frozen=True, slots=True)
class Told:
    """What a stranger's model may return: no container that torch knows."""

    logits: torch.Tensor
    more: Any


class Records(Net):
    def forward(self, x: torch.Tensor) -> Any:
        found = super().forward(x)
        return Told(found["logits"], [torch.distributions.Normal(found["logits"], 1.0), SimpleNamespace(x=x.sum())])


def test_outputs_within_records_are_fp32_too() -> None:
    model = Records()
    apply_plan(model, list(model.blocks), Plan(precision="bf16"), None)
    out = model(torch.ones(5, 8))
    normal, space = out.more
    assert isinstance(out, Told) and isinstance(normal, torch.distributions.Normal)
    assert {out.logits.dtype, normal.loc.dtype, normal.log_prob(torch.zeros(5, 3)).dtype} == {torch.float32}
    assert space.x.dtype == torch.float32


@dataclass
class Chained:
    logits: torch.Tensor
    around: object = None


def test_a_record_that_holds_itself_is_one_afterwards_too() -> None:
    """It ended in a RecursionError."""

    class Chaining(nn.Linear):
        def forward(self, x: torch.Tensor) -> Chained:
            first, second = Chained(super().forward(x)), SimpleNamespace()
            first.around, second.back, second.more = second, first, [first]
            return first

    model = Chaining(8, 3)
    apply_plan(model, [], Plan(precision="bf16"), None)
    record = model(torch.ones(5, 8))
    assert record.logits.dtype == torch.float32
    assert record.around.back is record and record.around.more[0] is record


class Nested(nn.Linear):
    """A layer that calls another one, and multiplies what it gives by a weight of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.weight


class Coder(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nested = Nested()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize(
    "called",
    [
        lambda model, x: model.last(model.encode(x)),
        lambda model, x: model.encode(x),
        lambda model, x: model.blocks[1](x),
        lambda model, x: model.last(x),
        lambda model, x: model.nested(x),
    ],
)
def test_other_methods_layers_and_blocks_give_an_objective_fp32(called: Callable[[Coder, torch.Tensor], Any]) -> None:
    x, found = torch.linspace(-1, 1, 40).view(5, 8), {}
    for precision in ("fp32", "bf16"):
        model = Coder()
        apply_plan(model, list(model.blocks), Plan(precision=precision), None)
        out = called(model, x)
        loss = ((out - 0.3) ** 2).sum()
        loss.backward()
        assert out.dtype == loss.dtype == torch.float32
        found[precision] = out.detach()
        inside = model(x)["logits"]  # a forward of the model's own is as before
        assert inside.dtype == torch.float32
    assert not torch.equal(found["bf16"], found["fp32"]), "it was computed in bf16"
    torch.testing.assert_close(found["bf16"], found["fp32"], rtol=2e-2, atol=2e-2)


class Again(Coder):
    """A model that makes what it computes again in the backward pass, by a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.sigmoid(self.nested(torch.tanh(self.first(self.encode(x))))))


def _gradients(called: Callable[[Again, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    model = Again()
    apply_plan(model, list(model.blocks), Plan(precision="bf16"), None)
    x = torch.linspace(-1, 1, 40).view(5, 8).requires_grad_()
    ((called(model, x) - 0.3) ** 2).sum().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("by_model", [True, False])
def test_what_is_made_again_is_what_it_was(reentrant: bool, by_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and blocks are called outside of the model's forward then, and give it bf16 as they did within."""
    own = Again.forward
    if by_model:
        plain = _gradients(lambda model, x: model(x))
        monkeypatch.setattr(Again, "forward", lambda self, x: checkpoint(own, self, x, use_reentrant=reentrant))
        again = _gradients(lambda model, x: model(x))
    else:  # the objective's own, of parts that give it fp32
        plain = _gradients(own)
        again = _gradients(lambda model, x: checkpoint(own, model, x, use_reentrant=reentrant))
    assert len(plain) == len(again) > 8
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_a_block_that_could_not_begin_changes_nothing_of_later_calls() -> None:
    """As when memory runs out while a block's weights are gathered, and the micro-batch is halved."""
    model, x = Coder(), torch.ones(5, 8)
    block = model.blocks[0]
    fails = block.register_forward_pre_hook(_fail)
    apply_plan(model, list(model.blocks), Plan(precision="bf16"), None)
    with pytest.raises(RuntimeError, match="as asked"):
        model.encode(x)
    fails.remove()
    assert model.encode(x).dtype == model.last(x).dtype == torch.float32


def _fail(*_: object) -> None:
    raise RuntimeError("as asked")


def _of_ranks(layout: Layout) -> tuple[set[torch.dtype], float, float]:
    return mean_squares(Plan(layout, precision="bf16", batch_samples=10), build_mesh(layout, world_here()))


def test_shards_give_the_same_outputs() -> None:
    alone = mean_squares(Plan(precision="bf16"))
    for dtypes, loss, _ in run_ranks(_of_ranks, 2, Layout(dp_shard=2)):
        assert dtypes == {torch.float32} and loss == alone[1]

"""Sixty correct set-ups that rounding makes hard to tell from wrong ones: none of them may be called unequal."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tests_shared import VOCAB, Dropout, decoder_task, plan_of
from torch import nn

from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.steps.update import GroupSpec, OptimizerSpec
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.build import build_model

EQUAL, EITHER = ("equal",), ("equal", "ill-conditioned")
ADAMW, SGD = {"name": "adamw", "eps": 1e-4}, {"name": "sgd", "weight_decay": 0.01}


@dataclass(frozen=True)
class SetUp:
    """A correct set-up; `because` says why fp32 may be unable to tell, and is empty where it must."""

    name: str
    task: Task
    plan: Plan
    because: str = ""
    cheap: bool = False  # one of the few that are not deep

    @property
    def verdicts(self) -> tuple[str, ...]:
        """What may be said of it."""
        return EITHER if self.because else EQUAL


@dataclass(frozen=True)
class Text:
    """Token rows; `kind` says which labels are ignored, or that all of them are token 0."""

    length: int = 16
    kind: str = "some ignored"
    samples: int = 1000
    unit: str = "tokens"
    vocab: int = VOCAB
    fingerprint: str = field(default="text", init=False)

    @property
    def items_per_sample(self) -> int:
        """How many tokens a row has."""
        return self.length

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return rows that depend on their ids alone."""
        rows = [self._row(int(i)) for i in ids]
        return {"tokens": torch.stack([r[0] for r in rows]), "labels": torch.stack([r[1] for r in rows])}

    def _row(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = np.random.default_rng(index)
        walk = np.cumsum(generator.integers(0, 3, self.length + 1)) % VOCAB
        tokens, labels = torch.from_numpy(walk[:-1].copy()), torch.from_numpy(walk[1:].copy())
        if self.kind == "some ignored":
            labels[: int(generator.integers(0, max(1, self.length - 1)))] = -100
        if self.kind == "rows ignored" and index % 3:
            labels[:] = -100
        if self.kind == "token 0":
            labels[:] = 0
        return tokens, labels


class Net(nn.Module):
    """Embedding, self-attention whose keys have a bias (its gradient is zero by construction), norm and head."""

    def __init__(self, width: int = 11, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(_Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width + 1), nn.GELU(), nn.Linear(2 * width + 1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.softmax(self.q(x) @ self.k(x).mT / x.shape[-1] ** 0.5, -1) @ self.v(x)
        return x + self.mlp(x)


@torch.no_grad()
def net(scale: float = 1.0, *, head: str = "", frozen: str = "") -> nn.Module:
    """Return a Net with weights times `scale`; its head may be "zero" or "sure" of token 0, and parts frozen."""
    model = Net()
    for parameter in model.parameters():
        parameter.mul_(scale)
    if head == "zero":
        model.head.weight.zero_()
    if head:
        model.head.bias.zero_()
    if head == "sure":
        model.head.bias[0] = 18.0
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    return model


@torch.no_grad()
def scaled_decoder(scale: float, length: int = 16, **sizes: Any) -> nn.Module:
    """Return a decoder with matrices times `scale`."""
    model = build_model(decoder(**sizes), VOCAB, length, 0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(scale)
    return model


def decoder(name: str = "llama-1m", **sizes: Any) -> ModelSpec:
    """Return a decoder of odd sizes."""
    shape = {"hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 28, "vocab": VOCAB, "tied": False}
    return ModelSpec(name, **{**shape, **sizes})


def moe(**sizes: Any) -> ModelSpec:
    """Return a mixture of experts."""
    return decoder("moe-2m", **{"ffn": 16, "experts": 4, "top_k": 2, "tied": None, **sizes})


def task(model: Any, text: Text | None = None, lr: float = 3e-3, seed: int = 0, **optimizer: Any) -> Task:
    """Return a task of that model on that text."""
    spec = OptimizerSpec(lr=lr, **{**ADAMW, **optimizer})
    objective = "auto" if isinstance(model, ModelSpec) else "next_token"
    return decoder_task(model=model, data=text or Text(), optimizer=spec, objective=objective, seed=seed)


def _plan(batch: int = 7, micro_batch: int = 2, **changes: Any) -> Plan:
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    layout = Layout(**{axis: changes.pop(axis) for axis in axes if axis in changes})
    return plan_of(layout, batch, micro_batch, **{"precision": "fp32", **changes})


def _sizes_and_worlds() -> Iterator[SetUp]:
    for ranks in (2, 3, 4, 5):
        yield SetUp(f"odd sizes, {ranks} copies", task(net), _plan(batch=11, dp_replicate=ranks), cheap=ranks == 3)
    for zero, ranks in ((1, 3), (2, 5), (3, 3)):
        yield SetUp(f"decoder, ZeRO {zero} over {ranks}", task(decoder()), _plan(batch=11, dp_shard=ranks, zero=zero))
    yield SetUp("decoder, whole gradients over 3", task(decoder()), _plan(batch=11, dp_shard=3, whole_gradients=True))
    yield SetUp("decoder, three stages", task(decoder(layers=4)), _plan(pp=3))
    yield SetUp("decoder, five stages", task(decoder(layers=6)), _plan(pp=5, batch=10))
    yield SetUp("decoder, ring of three", task(decoder()), _plan(cp=3, cp_method="ring"), cheap=True)
    yield SetUp("decoder, tensor and shards", task(decoder()), _plan(tp=2, dp_shard=2))
    yield SetUp("decoder, stages and copies", task(decoder(layers=3)), _plan(pp=2, dp_replicate=2))
    yield SetUp("one row for three ranks", task(net), _plan(batch=4, micro_batch=1, dp_shard=3))


def _structures() -> Iterator[SetUp]:
    yield SetUp("tied, copies", task(decoder(tied=True)), _plan(dp_replicate=3))
    yield SetUp("tied, stages", task(decoder(tied=True, layers=3)), _plan(pp=2))
    yield SetUp("tied, tensor", task(decoder(tied=True)), _plan(tp=2))
    yield SetUp("tied, dropout, shards", task(Dropout), _plan(dp_shard=3))
    flips = "a token near a tie may go to another expert"
    yield SetUp("experts, copies", task(moe()), _plan(dp_replicate=3), flips)
    yield SetUp("experts, expert axis", task(moe()), _plan(dp_shard=2, ep=2), flips)
    yield SetUp("experts, four shards", task(moe()), _plan(dp_shard=4, ep=2), flips)
    yield SetUp("experts, tensor", task(moe()), _plan(tp=2), flips)
    yield SetUp("experts, stages", task(moe(layers=3)), _plan(pp=2), flips)
    frozen = functools.partial(net, frozen="layers.0")
    yield SetUp("frozen block, shards", task(frozen), _plan(dp_shard=3), cheap=True)
    yield SetUp("frozen embedding, copies", task(functools.partial(net, frozen="embed")), _plan(dp_replicate=2))


def _lengths_and_labels() -> Iterator[SetUp]:
    one = Text(length=1, kind="none")
    yield SetUp("one token, copies", task(net, one), _plan(dp_replicate=2))
    yield SetUp("one token, shards", task(decoder(), one), _plan(dp_shard=3))
    long, tiny = Text(length=4096), decoder(hidden=8, heads=2, kv_heads=1, ffn=8, layers=1)
    yield SetUp("4,096 tokens, copies", task(tiny, long), _plan(batch=3, micro_batch=1, dp_replicate=2))
    yield SetUp("4,096 tokens, shared", task(tiny, long), _plan(batch=2, micro_batch=1, cp=2))
    ignored = Text(kind="rows ignored")
    yield SetUp("whole rows ignored, copies", task(net, ignored), _plan(batch=11, dp_replicate=3), cheap=True)
    yield SetUp("whole rows ignored, stages", task(decoder(), ignored), _plan(batch=11, pp=2))
    sure, small = functools.partial(net, head="sure"), "the loss is the difference of nearly equal numbers"
    yield SetUp("loss near zero, copies", task(sure, Text(kind="token 0")), _plan(dp_replicate=2), small, cheap=True)
    yield SetUp("loss near zero, shards, sgd", task(sure, Text(kind="token 0"), **SGD), _plan(dp_shard=3), small)
    zero = functools.partial(net, head="zero")
    yield SetUp("head of zeros, copies", task(zero), _plan(dp_replicate=2))
    yield SetUp("head of zeros, shards, sgd", task(zero, **SGD), _plan(dp_shard=3))


def _scales() -> Iterator[SetUp]:
    saturated = "saturated attention magnifies what rounds"
    for scale in (1e-6, 1e-3, 30.0, 1e3):
        because = saturated if scale > 1 else "gradients are smaller than what rounds" if scale < 1e-3 else ""
        made = functools.partial(net, scale)
        yield SetUp(f"weights times {scale:g}, copies", task(made), _plan(dp_replicate=2), because, cheap=scale == 1e3)
        lr = 1e-4 if scale > 1 else 0.1  # what training could begin with
        yield SetUp(f"weights times {scale:g}, shards, sgd", task(made, lr=lr, **SGD), _plan(dp_shard=3), because)
        made = functools.partial(scaled_decoder, scale)
        yield SetUp(f"weights times {scale:g}, tensor", task(made), _plan(tp=2), because)


def _optimizers() -> Iterator[SetUp]:
    far = "a step as large as the weights leaves a function that magnifies what rounds"
    for lr in (1e-9, 1.0, 10.0):
        because = far if lr >= 1 else ""
        yield SetUp(f"adamw, lr {lr:g}, copies", task(net, lr=lr), _plan(dp_replicate=2), because, cheap=lr == 10)
        yield SetUp(f"sgd, lr {lr:g}, shards", task(decoder(), lr=lr, **SGD), _plan(dp_shard=3), because)
    small = "Adam divides gradients as small as what rounds by their own size"
    for eps in (1e-12, 1e-8, 1.0):
        because = small if eps < 1e-4 else ""
        yield SetUp(f"eps {eps:g}, copies", task(net, eps=eps), _plan(dp_replicate=2), because, cheap=eps == 1e-12)
        yield SetUp(f"eps {eps:g}, stages", task(decoder(), eps=eps), _plan(pp=2), because)


def _low() -> Iterator[SetUp]:
    for precision in ("bf16", "fp16"):
        yield SetUp(f"{precision}, copies", task(decoder()), _plan(dp_replicate=3, precision=precision))
        yield SetUp(f"{precision}, shards, sgd", task(decoder(), **SGD), _plan(dp_shard=3, precision=precision))
        yield SetUp(f"{precision}, tensor", task(decoder()), _plan(tp=2, precision=precision))
    yield SetUp("bf16, stages, tied", task(decoder(tied=True, layers=3)), _plan(pp=2, precision="bf16"))


def _meetings() -> Iterator[SetUp]:
    """Two options that seldom meet."""
    yield SetUp("seven rows and one, copies", task(decoder()), _plan(8, 8, dp_replicate=2, rows=(7, 1)))
    yield SetUp("fewer tokens than chunks", task(decoder(), Text(length=5, kind="none")), _plan(cp=4))
    every = "all experts are tied for a token"
    yield SetUp("every expert chosen", task(moe(top_k=4, balance_weight=0.3)), _plan(dp_shard=2, ep=2), every)
    yield SetUp("layer rates, tied, stages", task(decoder(tied=True, layers=3), layer_decay=0.5), _plan(pp=2))
    still = (GroupSpec(match=("*norm*",), lr_scale=0.0), GroupSpec(match=("*proj*",), weight_decay=3.0))
    yield SetUp("lion, a group that stands still", task(decoder(), name="lion", eps=1e-8, groups=still),
                _plan(dp_shard=3))  # fmt: skip
    yield SetUp("all is clipped away", task(decoder(), clip_norm=1e-9), _plan(dp_shard=2, tp=2))
    adapted = dataclasses.replace(task(decoder(layers=3)), adapter=AdapterSpec("dora", rank=1))
    yield SetUp("DoRA of rank one, stages", adapted, _plan(pp=2))
    noisy = dataclasses.replace(task(decoder(), Text(length=7)), embedding_noise=5.0)
    yield SetUp("noise, an odd shared length", noisy, _plan(cp=2, dp_replicate=2))
    virtual = {"schedule": "interleaved", "virtual_stages": 2, "recompute": "full"}
    yield SetUp("interleaved, all is recomputed", task(moe(layers=5)), _plan(8, pp=2, **virtual),
                "a token near a tie may go to another expert")  # fmt: skip
    yield SetUp("all rests on the host", task(decoder()), _plan(dp_shard=2, recompute="full", offload="all"))
    yield SetUp("no memory, eps as large as gradients", task(net, eps=1.0, beta1=0.0, beta2=0.5),
                _plan(dp_replicate=2, zero=1))  # fmt: skip


def set_ups() -> list[SetUp]:
    """Return all of them."""
    kinds = (_sizes_and_worlds, _structures, _lengths_and_labels, _scales, _optimizers, _low, _meetings)
    return [made for kind in kinds for made in kind()]

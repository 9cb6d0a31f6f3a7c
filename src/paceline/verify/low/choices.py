"""Choices of experts: what a layout chooses is looked at, and one device is handed the same choices.

Near a tie rounding decides which experts a token goes to, and what follows are other numbers without a bound. So one
device goes where the layout went, and says by how much its own scores would have had it go elsewhere: rounding moves
scores too, by an amount that is measured like that of all other numbers. What is better by more is a wrong choice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import RankPart
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.task.declared import is_routed
from paceline.task.models.moe import MoE
from paceline.verify.low.wire import bits_of_values
from paceline.verify.rounding.conditioning import MARGIN

Choices = dict[str, dict[int, Tensor]]  # by block and position of the sample: int64 [seq, top_k]
Scores = dict[str, dict[int, Tensor]]  # the same: [seq, experts], of which the best are chosen
TensorPair = tuple[Tensor, Tensor]  # places in the sequence [tokens], and what tokens there chose [tokens, top_k]
BEST_OF = (torch.topk, torch.Tensor.topk)


def routed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that choose experts and hold them, by name: ours, and transformers'."""
    modules = dict(model.named_modules())
    theirs = {name.rpartition(".")[0] for name, module in modules.items() if is_routed(module)}
    return {name: module for name, module in modules.items() if isinstance(module, MoE) or name in theirs}


def _experts_of(block: Any) -> int:
    """Return the number of experts that a block chooses from."""
    if isinstance(block, MoE):
        return int(block.gate.weight.shape[0])
    return next(int(experts.num_experts) for experts in block.children() if is_routed(experts))


# ---- in a layout -------------------------------------------------------------------------------------------------


class ChoicesSeen:
    """Looks at the choices of a rank, by the samples that its micro-batches have."""

    def __init__(self, model: nn.Module, randomness: SampleRandomness, layout: Layout, rank: int) -> None:
        place = layout.coordinates(rank)
        self._part = RankPart(place["cp"], layout.cp, place["tp"], layout.tp)
        self._randomness = randomness
        self.parts: dict[tuple[str, int], TensorPair] = {}
        self.length = 0  # of a whole sample, in tokens
        for name, block in routed_blocks(model).items():
            if isinstance(block, MoE):
                block.gate.register_forward_hook(functools.partial(self._of_ours, name))
            for experts in filter(is_routed, block.children()):
                experts.register_forward_pre_hook(functools.partial(self._of_theirs, name), with_kwargs=True)

    def _of_ours(self, name: str, router: nn.Module, args: object, output: Any) -> None:
        self._keep(name, output[2])

    def _of_theirs(self, name: str, experts: nn.Module, args: Any, kwargs: Any) -> None:
        given = (*args, *kwargs.values())  # hidden states, indices of the chosen, and their weights
        self._keep(name, next(tensor for tensor in given if not tensor.is_floating_point()))

    def _keep(self, name: str, chosen: Tensor) -> None:
        """Keep choices [rows, tokens, top_k], or [rows x tokens, top_k], of a forward pass; recompute is none."""
        rows = self._randomness.rows
        if rows is None or rows.length is None or not self._randomness.is_forward:
            return
        self.length = rows.length
        by_row = chosen.detach().view(len(rows), -1, chosen.shape[-1])
        places = self._part.along(by_row.shape[1], rows.length, tokens=True)
        if places is not None:
            self.parts |= {
                (name, position): (places, mine.clone())
                for position, mine in zip(rows.positions.tolist(), by_row, strict=True)
            }


def score_bits(model: nn.Module) -> dict[str, int]:
    """Return the bits of the scores of our own routers, by block; forward passes from now on fill it.

    They are the most that those of a pass have: a first look at a pipeline's stages scores nothing but zeros.
    """
    bits: dict[str, int] = {}

    def look(name: str, router: nn.Module, args: object, output: Any) -> None:
        bits[name] = max(bits.get(name, 0), bits_of_values(output[0]))

    for name, block in routed_blocks(model).items():
        if isinstance(block, MoE):
            block.gate.register_forward_hook(functools.partial(look, name))
    return bits


def disagreeing(everyone: Sequence[Mapping[Any, TensorPair]], layout: Layout) -> list[int]:
    """Return the ranks that chose other experts for the same tokens than the first rank of their `tp` group."""
    places = [{**layout.coordinates(rank), "tp": 0} for rank in range(len(everyone))]
    firsts = [everyone[places.index(place)] for place in places]
    return [rank for rank, (mine, first) in enumerate(zip(everyone, firsts, strict=True)) if not _same(mine, first)]


def joined(everyone: Sequence[Mapping[Any, TensorPair]], plan: Plan, length: int, first: int) -> Choices | None:
    """Return the choices of a step of samples of `length` tokens by all ranks, None where any lack.

    The step's samples stand from position `first` on. A rank's own rows alone count: one without rows runs a row that
    stands in.
    """
    found: Choices = {}
    for rank, parts in enumerate(everyone):
        own = plan.rows_of(plan.layout.data_rank(rank))
        for (name, position), (places, chosen) in parts.items():
            if position - first in own:
                whole = found.setdefault(name, {}).setdefault(position, chosen.new_full((length, chosen.shape[1]), -1))
                real = places < length  # those after it fill up a sequence that ranks share
                whole[places[real]] = chosen[real]
    complete = all(
        len(rows) == plan.batch_samples and all(int(row.min()) >= 0 for row in rows.values()) for rows in found.values()
    )
    return found if found and complete else None


def _same(mine: Mapping[object, TensorPair], first: Mapping[object, TensorPair]) -> bool:
    return mine.keys() == first.keys() and all(
        torch.equal(chosen, first[key][1]) and torch.equal(places, first[key][0])
        for key, (places, chosen) in mine.items()
    )


# ---- on one device -----------------------------------------------------------------------------------------------


class HandedChoices(TorchFunctionMode):
    """Within it, the blocks of a model choose what they are told to; the scores that they had are kept.

    A block chooses by the best `top_k` of its experts' scores for each token.
    """

    def __init__(self, model: nn.Module, choices: Choices) -> None:
        super().__init__()
        self.scores: Scores = {name: {} for name in choices}
        self._choices, self._inside = choices, list[str]()
        self._positions: list[int] = []
        self._again = False
        blocks = routed_blocks(model)
        self._experts = {name: _experts_of(block) for name, block in blocks.items()}
        for name, block in blocks.items():
            block.register_forward_pre_hook(functools.partial(self._enter, name))
            block.register_forward_hook(self._leave, always_call=True)

    @contextlib.contextmanager
    def chosen_for(self, positions: Iterable[int]) -> Iterator[None]:
        """Choose for the samples of a micro-batch while its forward pass runs."""
        self._positions = [int(position) for position in positions]
        with self:
            yield

    def is_complete(self) -> bool:
        """Return whether every block has asked for its choices, once for each sample; there are other ways."""
        return not self._again and all(self.scores[name].keys() == rows.keys() for name, rows in self._choices.items())

    def _enter(self, name: str, *_: object) -> None:
        self._inside.append(name)

    def _leave(self, *_: object) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> object:
        """Choose as told where a block asks for the best of its experts."""
        best = func(*args, **(kwargs or {}))
        if func not in BEST_OF or not self._inside:
            return best
        name, scores = self._inside[-1], args[0]
        given = torch.stack([self._choices[name][at] for at in self._positions])  # [rows, seq, top_k]
        if scores.numel() != given[..., 0].numel() * self._experts[name] or best[1].numel() != given.numel():
            return best  # of something else, such as groups of experts
        self._again |= not self.scores[name].keys().isdisjoint(self._positions)
        by_row = scores.detach().clone().view(*given.shape[:2], -1)
        self.scores[name] |= dict(zip(self._positions, by_row, strict=True))
        told = given.view_as(best[1])
        return torch.return_types.topk((scores.gather(-1, told), told))


@dataclass(frozen=True)
class Misrouted:
    """How the choices of a block stand to the scores of one device."""

    block: str
    tokens: int  # that went to experts with scores lower than rounding explains
    of: int
    near: int  # that rounding explains


def misrouted(choices: Choices, scores: Scores, moved: Sequence[Scores]) -> list[Misrouted]:
    """Return for every block how many tokens one device would have sent elsewhere.

    `moved` are the scores from weights that are moved by a unit in the last place. What the best expert that was left
    is better by than the worst that was chosen may be MARGIN times what that difference moves by: for this token or, as
    that of a single one is known from few draws, for the block's tokens by the root of the mean square.
    """
    found = []
    for name, rows in choices.items():
        chosen = torch.cat([rows[at] for at in rows])
        base, *others = (torch.cat([each[name][at] for at in rows]).double() for each in (scores, *moved))
        if chosen.shape[1] == base.shape[1]:
            continue  # all of them
        left = base.scatter(1, chosen, -torch.inf).argmax(1, keepdim=True)
        worst = chosen.gather(1, base.gather(1, chosen).argmin(1, keepdim=True))
        better = (base.gather(1, left) - base.gather(1, worst)).squeeze(1)  # [tokens]
        squares = [((o.gather(1, left) - o.gather(1, worst)).squeeze(1) - better).square() for o in others]
        own = torch.stack(squares).nan_to_num(0, 0, 0).mean(0)  # a score may be minus infinity, for what is left out
        bound = MARGIN * own.clamp(min=float(own.mean())).sqrt()
        wrong = int((better > bound).sum())
        found.append(Misrouted(name, wrong, len(better), int((better > 0).sum()) - wrong))
    return found

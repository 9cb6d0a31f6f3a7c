"""Slots for the rows that go to other ranks' experts: with slots the host waits for no exchange.

An all-to-all is told on the host how many rows go where, and how many do is known once the device has routed them. With
slots a rank sends every other one the same number of rows, of which some stand for none, and the counts go along on the
device. How many slots a layer has follows from what its routers have sent so far, times the plan's margin.

No row is lost. The first step of a start is exchanged exactly and tells how many rows there are. Where a later step has
more rows for a rank than slots, the sums over all ranks that decide on the update say so: what the passes have made is
dropped, the step is made again exactly, and the layer has more slots from then on. Example: of 4,096 rows to 4 ranks
1,300 go to the busiest one. With a margin of 1.5 there are 1,950 slots for each rank: 7,800 rows travel, and a step is
made again where 1,951 rows or more go to one rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.run.parallel.expert.all_to_all import AllToAll, exchange_rows
from paceline.run.process.world import World
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.plan import Plan

SLOTS = "paceline_slots"  # attribute of a module whose rows are exchanged by slots
DECIDED = "expert_slots"  # what a decision in the journal is on


class Exchange(Protocol):
    """Brings rows to the ranks of their experts, and the results back."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, object]:
        """Return (rows for this rank's experts sorted by expert, counts of them, what `combine` needs)."""

    def combine(self, results: Tensor, ticket: Any) -> Tensor:
        """Return the results of the rows that this rank sent, in the order in which it sent them."""


@dataclass
class LayerSlots:
    """How many slots a layer has for each rank, and how many rows its router has sent."""

    count: int = 0  # 0: nobody knows yet how many are wanted
    are_used: bool = False  # now
    is_counting: bool = False  # now: in the passes of a step
    seen: list[Tensor] = field(default_factory=list)  # of each pass of a step: the most rows to one rank, int64

    def saw(self, to_each: Tensor) -> None:
        """Take count of the rows that go to each rank, [ranks]. Nobody waits for the device.

        Passes without gradients, such as a pipeline's first look at its stages, are none of a step's.
        """
        if self.is_counting and torch.is_grad_enabled():
            self.seen.append(to_each.max())  # no more: a block that is computed again must do the same twice

    @property
    def most(self) -> Tensor:
        """The most rows that went to one rank in the passes of a step; there were some."""
        return torch.stack(self.seen).max()


@dataclass(frozen=True)
class SlottedExchange:
    """Exchanges rows by slots in the passes of steps once slots are known, and exactly otherwise."""

    group: dist.ProcessGroup
    slots: LayerSlots
    # Whether experts leave rows alone that lie behind those that they count; others are told that these are the last
    # expert's, so that counts add up to the rows.
    takes_padding: bool

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, object]:
        """Return (rows for this rank's experts sorted by expert, counts of them, what `combine` needs).

        `rows` [tokens, hidden] are sorted by expert, `counts` [experts] int64 says how many each expert gets. What
        returns by slots is [ranks x slots, hidden], with zeros behind the rows that were sent.
        """
        sent = counts.view(self.group.size(), -1)  # [ranks, experts of each]
        to_each = sent.sum(dim=1)
        self.slots.saw(to_each)
        if not (self.slots.are_used and self.slots.count and torch.is_grad_enabled()):
            return AllToAll(self.group).dispatch(rows, counts)
        arriving = torch.empty_like(sent)  # [ranks that send, experts of this rank]
        dist.all_to_all_single(arriving, sent.contiguous(), group=self.group)
        width, places = self.slots.count, _places(to_each, len(rows), self.slots.count)
        sizes = [width] * self.group.size()
        buffer = rows.new_zeros((sum(sizes), *rows.shape[1:])).index_copy(0, places, rows)
        received = exchange_rows(buffer, sizes, sizes, self.group)
        # They come sorted by sender first, each sender's padding last; products need them sorted by expert first.
        ends = arriving.cumsum(dim=1).clamp(max=width)
        numbers = torch.arange(width, device=rows.device).expand(len(sizes), width).contiguous()
        order = torch.searchsorted(ends, numbers, right=True).flatten().argsort(stable=True)
        own = ends.diff(dim=1, prepend=ends.new_zeros((len(sizes), 1))).sum(dim=0)
        if not self.takes_padding:
            own = torch.cat([own[:-1], (len(received) - own[:-1].sum()).reshape(1)])
        return received[order], own, _BySlots(order.argsort(), places, sizes)

    def combine(self, results: Tensor, ticket: Any) -> Tensor:
        """Return the results of the rows that this rank sent, in the order in which it sent them."""
        if not isinstance(ticket, _BySlots):
            return AllToAll(self.group).combine(results, ticket)
        return exchange_rows(results[ticket.order], ticket.sizes, ticket.sizes, self.group)[ticket.places]


@dataclass(frozen=True)
class _BySlots:
    order: Tensor  # of the results, back to how rows came
    places: Tensor  # of the rows that were sent, in the buffer
    sizes: list[int]


def _places(to_each: Tensor, rows: int, width: int) -> Tensor:
    """Return where each of so many rows, sorted by rank, lies in a buffer of `width` slots for each rank, int64 [rows].

    A row that finds no slot is put over another one: the step is made again.
    """
    ends = to_each.cumsum(dim=0)
    numbers = torch.arange(rows, device=to_each.device)
    rank = torch.searchsorted(ends, numbers, right=True)
    return rank * width + (numbers - (ends - to_each)[rank]).clamp(max=width - 1)


class ExpertSlots:
    """The slots of all layers of a rank. Every rank of the world has one, and calls it alike."""

    def __init__(self, layers: Mapping[str, LayerSlots], plan: Plan, world: World) -> None:
        """`layers` are those of this rank, by the names of their experts in the whole model."""
        self._layers, self._margin, self._world = layers, plan.expert_slots, world
        self._plan = {"layout": dataclasses.asdict(plan.layout), "micro_batch": plan.micro_batch}
        self._known: dict[str, int] = {}  # slots by name, of all ranks' layers
        self._are_exact = False  # whether the last passes were
        self._was_short = False  # whether a step is being made again
        self._decisions: list[DecisionRecord] = []

    @contextmanager
    def during_passes(self, again: bool = False) -> Iterator[None]:
        """Within it the passes of a step run: by slots where they are known and the step is not made `again`."""
        self._are_exact, self._was_short = again or not self._known, again
        for layer in self._layers.values():
            layer.are_used, layer.is_counting, layer.seen = not self._are_exact, True, []
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.are_used = layer.is_counting = False

    def short(self) -> Tensor | float:
        """Return how many of this rank's layers had more rows for a rank than slots in the last passes."""
        used = [layer for layer in self._layers.values() if layer.seen and layer.count and not self._are_exact]
        return torch.stack([layer.most > layer.count for layer in used]).sum() if used else 0.0

    def settle(self, step: int) -> None:
        """Give layers slots for what the exact passes of a step have sent. Every rank calls it after its passes."""
        if not self._are_exact:
            return
        counted = {name: layer.most for name, layer in self._layers.items() if layer.seen}
        own = dict(zip(counted, torch.stack([*counted.values()]).tolist() if counted else [], strict=True))
        names = self._world.union(own)  # stages of a pipeline have layers of their own
        everywhere = self._world.maximum([float(own.get(name, 0)) for name in names])
        most = {name: int(rows) for name, rows in zip(names, everywhere, strict=True)}
        wanted = {name: max(1, self._known.get(name, 0), math.ceil(self._margin * rows)) for name, rows in most.items()}
        grown = {name: count for name, count in wanted.items() if count != self._known.get(name)}
        if grown or self._was_short:  # on a GPU routers may choose otherwise the second time, and fit
            self._decide(step, grown or wanted, most)
        self._take({**self._known, **wanted})
        self._are_exact = False

    def take(self) -> list[DecisionRecord]:
        """Return the decisions since the last call."""
        taken, self._decisions = self._decisions, []
        return taken

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps: the slots, and of what plan they are."""
        return {**self._plan, "slots": dict(self._known)}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on with a checkpoint's slots where the plan sends as many rows as that one's; else begin anew."""
        same = state is not None and {name: state.get(name) for name in self._plan} == self._plan
        self._take(dict(state["slots"]) if state is not None and same else {})

    def _take(self, known: dict[str, int]) -> None:
        self._known = known
        for name, layer in self._layers.items():
            layer.count = known.get(name, 0)

    def _decide(self, step: int, grown: Mapping[str, int], most: Mapping[str, int]) -> None:
        name = max(grown, key=lambda each: grown[each] - self._known.get(each, 0))
        how = "had more rows than slots and was made again exactly" if self._was_short else "was exchanged exactly"
        because = (
            f"step {step} {how}: {name} sent {most[name]:,} rows to one rank, and has {grown[name]:,} slots for each "
            f"by plan.expert_slots = {self._margin:g}"
        )
        known = {each: self._known[each] for each in grown if each in self._known}
        rows = {each: most[each] for each in grown}
        evidence = {"step": step, "made_again": self._was_short, "rows": rows, "before": known, "slots": dict(grown)}
        self._decisions.append(DecisionRecord(DECIDED, _told(known) or None, _told(grown), because, evidence))


def _told(slots: Mapping[str, int]) -> str:
    """Return slots of layers in words; empty for none. Example: "185 to 203 slots for each rank in 2 layers"."""
    if not slots:
        return ""
    least, most = min(slots.values()), max(slots.values())
    counts = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{counts} slots for each rank in {len(slots)} layer{'s' if len(slots) > 1 else ''}"


def slots_of(model: nn.Module, plan: Plan, world: World) -> ExpertSlots | None:
    """Return the slots of a model whose experts were spread by slots, None where rows are exchanged exactly."""
    if not plan.expert_slots or plan.layout.ep == 1:
        return None
    layers = {name: getattr(module, SLOTS) for name, module in model.named_modules() if hasattr(module, SLOTS)}
    return ExpertSlots(layers, plan, world)

"""Whether all ranks call the sharded units of a model in the same order: a rank that does not would get other weights.

FSDP2 gathers a unit's weights from all ranks when the unit is called, and reduces its gradients when its backward pass
is over. If ranks call different blocks, for what their samples hold, each takes what the others send for its own:
silently where sizes are equal, with an abort or a hang where they are not.

A pass is a sequence of events: forward of a unit, backward of a unit, the end. What may follow the events so far is
learnt: an unknown step is compared between the ranks before weights are gathered, and again in the next passes, until
it has been the same `CONFIRMATIONS` times; where a pass has ever gone on in two ways it is compared always. All that
have seen the same know the same, so ranks agree on when to compare without a word. A rank that leaves a path which the
others trust asks them before it goes on, and stops the run if they do not answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._pytree import tree_leaves

from paceline.errors import NeedsWholeWeights
from paceline.task.models.layers.batch_norm import is_recomputed

CONFIRMATIONS = 8  # passes in which a step is compared before it is trusted
PATIENCE_SECONDS = 60.0  # for an answer of ranks that are in the same pass
MOST_PATHS = 100_000  # known beginnings of a pass; beyond, unknown ones are compared and not kept
END = "the end of the pass"
WHOLE = (
    "an attribute `needs_whole_weights = True` on the model, which gathers all weights before each pass and keeps them "
    "to its end; or dp_replicate"
)


@dataclass
class Calls:
    """The events of this rank's passes, compared with those of the ranks of `groups`."""

    names: Sequence[str]  # of the units
    groups: Sequence[dist.ProcessGroup]
    device: torch.device
    patience_seconds: ClassVar[float] = PATIENCE_SECONDS
    _path: int = 0  # a hash of the events so far
    _open: bool = False
    _in_objective: bool = False
    _thread: int = 0  # in which the objective runs
    _count: int = 0  # events since the start
    _runs: list[int] = field(default_factory=list)  # by group: tells this object's keys in the store from others'
    _known: dict[int, dict[int, int]] = field(default_factory=dict)  # path -> event -> times it was compared

    def watch(self, units: Sequence[nn.Module]) -> None:
        """Note every call of the units from now on, before FSDP2 sees it; they are sharded already."""
        for number, unit in enumerate(units):
            unit.register_forward_pre_hook(self._before(number), prepend=True)
            unit.register_forward_hook(self._after(number), prepend=True)

    def begin(self, turn: int = 0) -> None:
        """Begin a pass of an objective; the last one is over."""
        self._end()
        # A pass with gradients and one without may differ, and so may those of several objectives.
        self._path, self._open = hash(("pass", torch.is_grad_enabled(), turn)), True

    @contextlib.contextmanager
    def in_objective(self) -> Iterator[None]:
        """Within it an objective runs: a backward pass there that is to be differentiated raises NeedsWholeWeights."""
        self._in_objective, self._thread = True, threading.get_ident()
        try:
            yield
        finally:
            self._in_objective = False

    def _before(self, number: int) -> Any:
        def called(*_: object) -> None:
            if self._in_objective and threading.get_ident() != self._thread and not is_recomputed():
                raise NeedsWholeWeights(
                    f"'{self.names[number] or 'the model'}' is called in a thread of the program's own",
                    "under dp_shard the ranks gather a unit's weights together when it is called, in one order, and"
                    " threads have none",
                    WHOLE,
                )
            self._note(2 * number)

        return called

    def _after(self, number: int) -> Any:
        def returned(module: nn.Module, args: object, output: object) -> None:
            noted: list[bool] = []

            def backward(grad: torch.Tensor) -> None:
                if self._in_objective and torch.is_grad_enabled():  # with create_graph: the loss leads here again
                    raise let_go()
                if not noted:
                    noted.append(True)
                    # Before FSDP2's own call at the end, which reduces what no backward pass has reached.
                    Variable._execution_engine.queue_callback(self._end)
                    self._note(2 * number + 1)

            if torch.is_grad_enabled():
                for leaf in tree_leaves(output):
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        leaf.register_hook(backward)

        return returned

    def _end(self) -> None:
        if self._open:
            self._note(2 * len(self.names))
            self._open = False

    def _note(self, event: int) -> None:
        """Take one event into the path, after comparing it where it is not yet trusted."""
        if not self._open:
            return
        self._count += 1
        known = self._known.get(self._path, {})
        if len(known) == 1 and max(known.values()) >= CONFIRMATIONS:
            if event not in known:
                self._ask(event, next(iter(known)))
                known[event] = 1
        else:
            self._compare(event)
            if known or len(self._known) < MOST_PATHS:
                known[event] = known.get(event, 0) + 1
                self._known[self._path] = known
        self._path = hash((self._path, event))

    def _compare(self, event: int) -> None:
        """Raise NeedsWholeWeights on every rank where the others do something else."""
        runs = []
        for group in self.groups:
            extremes = torch.tensor([event, -event, time.time_ns()], device=self.device)
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
            largest, smallest, clock = extremes.tolist()
            if largest != -smallest:
                events: list[int] = [0] * group.size()
                dist.all_gather_object(events, event, group=group)
                self._check(events, group)
            runs.append(clock)
        self._runs = self._runs or runs

    def _ask(self, event: int, trusted: int) -> None:
        """Tell the ranks of another event than the one that all trusted, and wait for them to say the same."""
        store = _get_default_store()
        for group, run in zip(self.groups, self._runs, strict=True):
            key = f"paceline/calls/{run}/{group.group_name}/{self._count}"
            keys = [f"{key}/{rank}" for rank in dist.get_process_group_ranks(group)]
            store.set(keys[dist.get_rank(group)], str(event))
            try:
                store.wait(keys, timedelta(seconds=self.patience_seconds))
            except RuntimeError as silence:  # the others go on as before, and wait for this rank in another collective
                raise self._error(dist.get_rank(), event, "the other ranks", trusted) from silence
            self._check([int(store.get(each)) for each in keys], group)

    def _check(self, events: Sequence[int], group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        for rank, event in zip(ranks, events, strict=True):
            if event != events[0]:
                raise self._error(ranks[0], events[0], f"rank {rank}", event)

    def _error(self, rank: int, event: int, others: str, theirs: int) -> NeedsWholeWeights:
        return NeedsWholeWeights(
            f"ranks call different parts of the model: rank {rank} comes to {self._told(event)}, "
            f"{others} to {self._told(theirs)}",
            "under dp_shard the ranks gather a unit's weights together when it is called, and here the data decide",
            WHOLE,
        ).naming_ranks()

    def _told(self, event: int) -> str:
        if event == 2 * len(self.names):
            return END
        return f"the {'backward' if event % 2 else 'forward'} pass of '{self.names[event // 2] or 'the model'}'"


def let_go(told: str = "") -> NeedsWholeWeights:
    """Return the error of a loss whose backward pass leads through weights that are no longer there."""
    return NeedsWholeWeights(
        "the loss leads back through weights that are let go of by then",
        "under dp_shard a block's weights are whole for one pass back, which begins at the tensors that the block has "
        "given: a gradient that the objective takes itself (torch.autograd.grad with create_graph) leads through them "
        "twice; and torch does not find tensors in a class of the program's own, which is no list, tuple, dictionary "
        f"or dataclass, nor a view (x[0], x.view(...)) that is changed in place{told}",
        WHOLE,
    )

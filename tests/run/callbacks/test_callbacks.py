"""Callbacks: what they may be and decide, and that ranks which do not agree are told apart in place of waiting."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import world_here
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from paceline.errors import ConfigError
from paceline.run.callbacks.callbacks import Callbacks, moment_of
from paceline.run.callbacks.fence import FencedCollectives, collective_told
from paceline.run.callbacks.moment import CallbackMoment
from paceline.run.callbacks.written import WrittenState
from paceline.run.process.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


def moment(world: World, step: int = 3) -> CallbackMoment:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return moment_of(world, step, 10, 30, SimpleNamespace(model=model, optimizer=optimizer))


class Counts:
    """Stops after some steps, and keeps its count."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, moment: CallbackMoment) -> dict[str, Any] | None:
        self.count += 1
        return {"stop": "enough", "log": {"count": self.count}} if self.count > 1 else None

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def load(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_hooks_decide_and_states_come_back() -> None:
    callbacks = Callbacks((Counts,))
    assert callbacks.has("after_step") and not callbacks.has("on_save")
    assert callbacks.at("after_step", moment(ALONE)).stop is None
    other = Callbacks((Counts(),))
    other.load(callbacks.state())
    found = other.at("after_step", moment(ALONE))
    assert found.stop == ("Counts", "enough") and found.logs == [("Counts", {"count": 2.0})]


def hooked(**hooks: Callable[[Any], Any]) -> Any:
    return type("Hooked", (), {name: staticmethod(function) for name, function in hooks.items()})


@pytest.mark.parametrize(
    ("given", "hook", "match"),
    [
        (hooked(after_stap=lambda moment: None), "", "after_step"),
        (hooked(), "", "no hook"),
        ((Counts, Counts), "", "two callbacks"),
        (hooked(after_step=lambda moment: None, state=lambda: 1), "", r"one of state\(\) and load\(\)"),
        (hooked(after_step=lambda moment: True), "after_step", "returned a bool"),
        (hooked(after_step=lambda moment: {"stopp": "x"}), "after_step", "stop"),
        (hooked(after_step=lambda moment: {"lr": 1.0}), "after_step", "before_step"),
        (hooked(after_step=lambda moment: {"stop": True}), "after_step", "the reason"),
        (hooked(before_step=lambda moment: {"lr": -1.0}), "before_step", "no rate"),
        (hooked(before_step=lambda moment: {"log": 3.0}), "before_step", "numbers by name"),
        ("no.such:thing", "", "no module 'no'"),
    ],
)
def test_what_no_callback_can_be_or_decide_is_refused(given: Any, hook: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        callbacks = Callbacks(given if isinstance(given, tuple) else (given,))
        callbacks.at(hook, moment(ALONE))


def agrees(moment: CallbackMoment) -> dict[str, Any]:
    """Use collectives on every rank, torch's own among them."""
    whole = torch.ones(3)
    dist.all_reduce(whole)
    (total,) = moment.sum([moment.rank])
    assert moment.gather(moment.rank) == list(range(moment.ranks))
    return {"log": {"total": total, "whole": float(whole.sum())}}


def stops_alone(moment: CallbackMoment) -> dict[str, Any] | None:
    return {"stop": "I have seen enough"} if moment.rank == 1 else None


def reduces_alone(moment: CallbackMoment) -> None:
    if moment.rank == 0:
        dist.all_reduce(torch.ones(2, dtype=torch.float64))  # as large as what ranks say at a meeting


def reduces_otherwise(moment: CallbackMoment) -> None:
    dist.all_reduce(torch.ones(3)) if moment.rank else dist.barrier()


def differs_in_the_last_bit(moment: CallbackMoment) -> dict[str, Any]:
    return {"log": {"x": 0.1 + 0.2 if moment.rank else 0.3}}


def of_other_shapes(moment: CallbackMoment) -> None:
    dist.all_reduce(torch.ones(3 + moment.rank))


def writes_alike(moment: CallbackMoment) -> None:
    for weight in moment.model.parameters():
        weight.data.clamp_(-0.1, 0.1)
    with torch.no_grad():
        torch._foreach_mul_(list(moment.model.parameters()), 0.5)
    moment.optimizer.param_groups[0]["weight_decay"] = 0.1
    (torch.ones(2) * moment.rank).mul_(moment.rank)  # of its own, whatever it is


def writes_alone(moment: CallbackMoment) -> None:
    if moment.rank == 2:
        moment.model.weight.data[0] = 0.0  # type: ignore[index]


def writes_through_a_list(moment: CallbackMoment) -> None:
    with torch.no_grad():
        torch._foreach_mul_([moment.model.bias], 0.5 + 0.1 * (moment.rank == 0))  # type: ignore[list-item]


def writes_a_buffer(moment: CallbackMoment) -> None:
    if moment.rank:
        torch.add(torch.ones(2), 1.0, out=moment.model.seen)  # type: ignore[call-overload]


def sets_a_decay(moment: CallbackMoment) -> None:
    moment.optimizer.param_groups[0]["weight_decay"] = 0.1 * moment.rank


def freezes_alone(moment: CallbackMoment) -> None:
    moment.model.requires_grad_(moment.rank != 1)


WRONG = (stops_alone, reduces_alone, reduces_otherwise, differs_in_the_last_bit, of_other_shapes, writes_alone,
         writes_through_a_list, writes_a_buffer, sets_a_decay, freezes_alone)  # fmt: skip


def on_ranks() -> tuple[Any, list[str]]:
    world = world_here()
    found = Callbacks((agrees, writes_alike)).at("after_step", moment(world)).logs
    told = []
    for function in WRONG:
        try:
            Callbacks((function,)).at("after_step", moment(world))
        except ConfigError as error:
            told.append(f"{error.what} because {error.because}")
    return found, told


def test_ranks_that_do_not_agree_are_told_on_all_of_them_and_none_waits() -> None:
    for found, told in run_ranks(on_ranks, 3):
        assert found == [("agrees", {"total": 3.0, "whole": 9.0})]
        assert len(told) == len(WRONG), told
        assert all("do not agree" in each and "after_step at step 3" in each for each in told)
        assert "rank 1: " in told[0] and "I have seen enough" in told[0] and "ranks 0, 2" in told[0]
        assert "rank 0: reduces_alone" in told[1] and "allreduce" in told[1] and "nothing was decided" in told[1]
        assert "barrier" in told[2] and "ranks 1, 2" in told[2]
        assert "0.30000000000000004" in told[3]
        assert "rank 2: " in told[4] and "float32 [5]" in told[4]
        assert "ranks 0, 1" in told[5] and "writes nothing" in told[5] and "of weight" in told[5]
        assert "_foreach_mul_(0.6) of bias" in told[6] and "ranks 1, 2" in told[6]
        assert "rank 0: " in told[7] and "of seen" in told[7]
        assert "'weight_decay': 0.2" in told[8]
        assert "rank 1: " in told[9] and "requires_grad" in told[9]


def written_by(model: nn.Module, hook: Callable[[], object], optimizer: torch.optim.Optimizer | None = None) -> str:
    """Return what a hook of one of two ranks is said to have written."""
    state = WrittenState(model)
    state.begin(optimizer)
    with FencedCollectives(World(0, 2, 0, torch.device("cpu")), "here", state):
        hook()
    return state.told()


NO_MEMORY = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "on its way": lambda: AsyncCollectiveTensor(torch.ones(3)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("made", NO_MEMORY.values(), ids=NO_MEMORY.keys())
def test_tensors_that_lie_in_no_one_place_are_no_part_of_a_model_and_end_no_run(
    made: Callable[[], torch.Tensor],
) -> None:
    """A model with a sparse buffer, such as a graph's, and a hook that writes anything: it ended in torch's error."""
    model, tensor = nn.Linear(2, 2), made()
    assert written_by(model, lambda: tensor.mul_(2.0)) == ""
    model.register_buffer("graph", made())
    assert "of weight" in written_by(model, lambda: model.weight.data.mul_(2.0))


@pytest.mark.parametrize(("name", "has_shapes"), [("allreduce_", True), ("broadcast_", True), ("reduce_", True),
                                                 ("reduce_scatter_", False), ("allgather_", False)])  # fmt: skip
def test_ranks_bring_tensors_of_one_shape_to_those_collectives_that_ask_for_it(name: str, has_shapes: bool) -> None:
    """A part of a sum may be larger on one rank; that was told as ranks which do not agree."""
    told = collective_told(getattr(torch.ops.c10d, name).default, ([torch.ones(3)],))
    assert told == f"c10d::{name}" + (" of float32 [3]" if has_shapes else "")


def test_a_group_that_a_hook_gives_to_the_optimizer_or_takes_from_it_is_told() -> None:
    """Layers that are unfrozen on the way come as a group of their own; every rank does it, and it is no error."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    told = written_by(model, lambda: optimizer.add_param_group({"params": [model.bias], "lr": 0.2}), optimizer)
    assert "the optimizer's group 1 is {" in told and "'lr': 0.2" in told
    assert "the optimizer's group 1 is no more" in written_by(model, lambda: optimizer.param_groups.pop(), optimizer)


def writes_its_part(moment: CallbackMoment) -> None:
    """Halve every weight, which each rank of a sharded or piped model does with what it holds."""
    with torch.no_grad():
        for weight in moment.model.parameters():
            weight.mul_(0.5)


def writes_one_part(moment: CallbackMoment) -> None:
    if moment.rank == 0:
        next(iter(moment.model.parameters())).to_local().data.zero_()  # type: ignore[operator]


def of_parts() -> list[str]:
    """Return what is told of writes to a model in shards, one weight with an empty part, and to one in stages."""
    from torch.distributed.fsdp import fully_shard

    world = world_here()
    sharded = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    stages = nn.Sequential(nn.Linear(2, 2 + world.rank), *[nn.Linear(2, 2)] * world.rank)  # each rank has its own
    told = []
    for model, function in ((sharded, writes_its_part), (sharded, writes_one_part), (stages, writes_its_part)):
        at = moment_of(world, 3, 10, 30, SimpleNamespace(model=model, optimizer=None))
        try:
            Callbacks((function,)).at("after_step", at)
            told.append("")
        except ConfigError as error:
            told.append(error.because)
    return told


def test_parts_of_a_model_are_written_by_all_who_hold_such_a_part() -> None:
    for alike, alone, stages in run_ranks(of_parts, 2):
        assert alike == "" and stages == ""
        assert "rank 1: after_step at step 3: writes nothing" in alone and "zero_() of 0.weight" in alone

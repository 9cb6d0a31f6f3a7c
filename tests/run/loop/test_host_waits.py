"""How often the host waits for the device in a step: once, whatever the model, but for what is named here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks
from host_waits import HostWaits
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of, world_here
from torch import nn

from paceline.run.assemble import assemble
from paceline.run.loop.clock import PhaseClock
from paceline.run.loop.loader import BatchStream
from paceline.run.numerics.host_numbers import NumbersOnTheWay, one_vector
from paceline.run.numerics.invariants import held_by
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec, Task
from paceline.task.models.layers.products import by_expert

THE_ONE = "torch.Tensor.tolist"  # of the step's vector
EXPERTS = ModelSpec("moe-2m", hidden=32, layers=3, heads=4, kv_heads=2, ffn=40, vocab=VOCAB, balance="bias")


class Unused(nn.Module):
    """A network with a parameter that gets no gradient; it draws nothing, which would take numbers of the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB, bias=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        return self.head(self.embed(tokens))


def test_what_waits_is_seen() -> None:
    x = torch.tensor([1, 0, 2], requires_grad=False)
    with HostWaits() as waits:
        float(x[0]), x.tolist(), x.nonzero(), x.bincount(), x[x > 0], torch.arange(3).repeat_interleave(x)
        if x.sum():
            x.cpu()
    assert len(waits.seen) == 8
    with HostWaits() as waits:
        torch.arange(3).repeat_interleave(x, output_size=3), x.cumsum(0), x.sort(), x.where(x > 0, 0)
    assert waits.seen == []


def waits_of(task: Task, plan: Plan) -> list[list[str]]:
    """Return where the host would wait in each of three steps, and in a comparison of the ranks."""
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    found = []
    unwatched = 9 if world.size > 1 else 1  # steps: the first passes of shards are compared between ranks
    for step in range(unwatched + 3):
        batch = stream.at(step * plan.batch_samples)
        if step < unwatched:
            built.stepper.step(batch, 1e-3)
            continue
        with HostWaits() as waits:
            built.stepper.step(batch, 1e-3)
        found.append(waits.seen)
    with HostWaits() as waits:
        held_by(built.model, {"the loss": 1.0})
    return [*found, waits.seen]


CASES: list[tuple[dict[str, Any], Plan, int]] = [
    ({}, plan_of(Layout()), 0),
    ({}, plan_of(Layout(), precision="bf16", recompute="selective"), 0),
    # In fp32 experts have no grouped product, and their products are told on the host how many rows each gets: in each
    # of three layers, for each of seven micro-batches. In bf16 on CUDA the grouped kernel is told by the device.
    ({"model": EXPERTS}, plan_of(Layout()), 3 * 7),
]


@pytest.mark.parametrize(("changes", "plan", "products"), CASES, ids=["dense", "bf16", "experts"])
def test_one_device_waits_once_a_step(changes: dict[str, Any], plan: Plan, products: int) -> None:
    *steps, compared = waits_of(decoder_task(**changes), plan)
    assert steps == [[THE_ONE] * (1 + products)] * 3
    assert compared == [THE_ONE], "all parameters together"


def test_ranks_wait_once_a_step_and_once_for_each_exchange_of_experts() -> None:
    shards, experts = plan_of(Layout(dp_shard=2)), plan_of(Layout(dp_shard=2, ep=2), micro_batch=7)
    unused = decoder_task(model=Unused, objective="next_token")
    partly = [(unused, plan_of(Layout(dp_replicate=2), bucket_bytes=64)), (unused, shards)]
    for rank in run_ranks(every, 2, [(decoder_task(), shards), (decoder_task(model=EXPERTS), experts), *partly]):
        (*dense, _), (*routed, _), (*of_copies, _), (*of_shards, _) = rank
        assert dense == [[THE_ONE]] * 3
        # An all-to-all is told on the host how many rows go where, once a layer; in fp32 products are told too.
        assert routed == [[THE_ONE] * (1 + 2 * 3)] * 3
        # A parameter that no rank reaches was asked for in the first step.
        assert of_copies == of_shards == [[THE_ONE]] * 3


def every(cases: list[tuple[Task, Plan]]) -> list[list[list[str]]]:
    return [waits_of(task, plan) for task, plan in cases]


def test_the_vector_holds_what_it_was_given() -> None:
    given = [torch.tensor(2.5), torch.tensor(7), 3, True, torch.tensor([[4.0]], dtype=torch.bfloat16), 2.0**60]
    more = torch.tensor([0.1, 0.2], dtype=torch.float64)
    with HostWaits() as waits:
        vector = one_vector(given, more, torch.device("cpu"))
    assert waits.seen == []
    assert NumbersOnTheWay(vector).arrived() == [2.5, 7.0, 3.0, 1.0, 4.0, 2.0**60, 0.1, 0.2]


def test_choices_are_sorted_and_counted_as_by_bincount() -> None:
    for experts, choices in ((5, [3, 0, 3, 4, 0, 3]), (3, [1, 1]), (4, []), (1, [0, 0, 0])):
        chosen = torch.tensor(choices, dtype=torch.long).view(-1, 1)
        order, counts = by_expert(chosen, experts)
        assert order.tolist() == chosen.flatten().argsort(stable=True).tolist()
        assert counts.tolist() == chosen.flatten().bincount(minlength=experts).tolist()
        assert counts.dtype == torch.int64


class Event:
    """A CUDA event of a device that a test moves on; `seconds` is where the device is when it passes the event."""

    clock: float = 0.0  # where the device has got to
    made: float = 0.0  # how much work it has been given

    def __init__(self, enable_timing: bool = False) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = Event.made

    def query(self) -> bool:
        return Event.clock >= self.seconds

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "the device has not passed both events"
        return 1e3 * (other.seconds - self.seconds)


def test_what_the_device_is_still_at_is_told_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, told = PhaseClock(torch.device("cuda", 0)), []
    for _ in range(3):
        Event.made += 10.0  # the device waits for data
        clock.begin()
        for phase, seconds in (("forward_backward", 4.0), ("reduce", 1.0), ("optimizer", 2.0)):
            Event.made += seconds
            clock.mark(phase)
            Event.clock = Event.made if phase == "reduce" else Event.clock  # the host waits there alone
        told.append(clock.take_seconds())
    rest = {"forward_backward": 4.0, "reduce": 1.0}
    assert told == [{**rest, "optimizer": 0.0}, {**rest, "optimizer": 2.0}, {**rest, "optimizer": 2.0}]
    assert clock.waiting_seconds("reduce") is None

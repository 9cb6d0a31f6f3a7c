"""What no price may break, on random models, machines, plans and programs: more of a thing costs more, or no less.

Where the host's launching is what a step waits for, laws about the device say nothing, so those draws are passed over.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import pytest

from paceline.cluster.resolve import resolve_cluster
from paceline.cluster.vary import with_link, with_memory_rate, with_product_rate
from paceline.plan.cost import pricing
from paceline.plan.cost.components import only
from paceline.plan.cost.memory.usable import needed
from paceline.plan.cost.programs.known import PROGRAMS
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.software import PACELINE, Software
from paceline.spec.cluster import Cluster, ClusterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile
from paceline.task.profile.transformer import ExpertSizes, TransformerShape

DRAWS = 24
SAME = 1 + 1e-9
HOST_SHARE = 0.02
SOFTWARE = (PACELINE, *{one.name: one for one in PROGRAMS.values()}.values())
DEVICES = ("a100-80", "h100-sxm", "b200", "gb200", "l4", "mi300x", "tpu-v5p")
SHAPE = TransformerShape(
    name="x", layers=16, hidden=2048, ffn=8192, heads=16, kv_heads=16, head_dim=128, vocab=32000, seq_len=2048,
    positions="rotary", tied=False,
)  # fmt: skip


@cache
def profile_of(shape: TransformerShape) -> ModelProfile:
    return shape.profile()


@cache
def machine(device: str, devices: int) -> Cluster:
    return resolve_cluster(ClusterSpec(device=device, devices=devices))[0]


class Price(NamedTuple):
    """Seconds of a step and bytes of a device; of the seconds, those that wait for the host and those of casts."""

    seconds: float
    held_bytes: float
    host_seconds: float
    cast_seconds: float


@dataclass(frozen=True)
class Draw:
    """A model, a machine, a plan and the program that carries it out."""

    shape: TransformerShape
    device: str
    plan: Plan
    software: Software
    change: Callable[[Cluster], Cluster] | None = None

    @cached_property
    def price(self) -> Price:
        """What it is forecast to take."""
        cluster = machine(self.device, self.plan.layout.devices)
        cluster = self.change(cluster) if self.change else cluster
        samples = self.plan.batch_samples
        sheet = PricedTask(profile_of(self.shape), cluster, samples, 1, software=self.software).sheet(self.plan)
        time = pricing.time_components(sheet)
        of_kinds = {kind: float(sum(column.values[0] for column in only(time, kind))) for kind in ("host", "casts")}
        held = float(needed(sheet, pricing.held_components(sheet))[0])
        return Price(float(pricing.total(time)[0]), held, of_kinds["host"], of_kinds["casts"])

    def planned(self, **changes: object) -> Draw:
        return replace(self, plan=replace(self.plan, **changes))  # type: ignore[arg-type]

    def spread(self, **degrees: int) -> Draw:
        return self.planned(layout=replace(self.plan.layout, **degrees))

    @property
    def is_busy(self) -> bool:
        """Whether devices and links, not the host, say how long a step is."""
        return self.price.host_seconds < HOST_SHARE * self.price.seconds


def draw(random_of: random.Random) -> Draw:
    pick = random_of.choice
    hidden = pick([1024, 4096, 8192])
    shape = replace(
        SHAPE, layers=pick([16, 32]), hidden=hidden, ffn=4 * hidden, heads=hidden // 128, gated=pick([True, False]),
        kv_heads=hidden // pick([128, 512]), seq_len=pick([2048, 8192, 32768]), flash=pick([True, True, False]),
    )  # fmt: skip
    shard, cp = pick([1, 2, 8]), pick([1, 1, 2])
    layout = Layout(dp_replicate=pick([1, 2]), dp_shard=shard, cp=cp, tp=pick([1, 2, 4]), pp=pick([1, 1, 2, 4]))
    if pick([True, False, False]):
        shape = replace(shape, experts=ExpertSizes(8, 2, 2 * hidden))
        layout = replace(layout, ep=math.gcd(8, shard * cp))
    micro, rounds = pick([1, 2]), pick([4, 8])
    plan = Plan(
        layout=layout, zero=pick([1, 2, 3]), micro_batch=micro, accumulation=rounds, recompute=pick(["none", "full"]),
        batch_samples=micro * rounds * layout.data_degree, precision="bf16",
        stages=(shape.layers // layout.pp,) * layout.pp if layout.pp > 1 else (),
    )  # fmt: skip
    return Draw(shape, pick(DEVICES), plan, pick(SOFTWARE))


@pytest.fixture(scope="module")
def draws() -> list[Draw]:
    found = random.Random(20261123)
    return [draw(found) for _ in range(DRAWS)]


def check(draws: list[Draw], wrong: Callable[[Draw], Iterator[str]]) -> None:
    problems = [f"{each}: {problem}" for each in draws for problem in wrong(each)]
    assert not problems, "\n".join(problems[:5])


def test_half_of_the_draws_and_more_say_something(draws: list[Draw]) -> None:
    assert sum(each.is_busy for each in draws) > DRAWS / 2
    assert all(math.isfinite(value) for each in draws for value in each.price)


def test_a_faster_machine_is_never_slower(draws: list[Draw]) -> None:
    def wrong(each: Draw) -> Iterator[str]:
        before = each.price.seconds
        changes = [
            lambda cluster: with_link(cluster, 0, 2.0),
            lambda cluster: with_link(cluster, len(cluster.links) - 1, 2.0),
        ]
        if each.is_busy:
            changes += [lambda cluster: with_memory_rate(cluster, 2.0), lambda cluster: with_product_rate(cluster, 2.0)]
        for place, change in enumerate(changes):
            after = replace(each, change=change).price.seconds
            if after > before * SAME:
                yield f"{before} s, {after} s with change {place}"

    check(draws, wrong)


def test_computing_again_takes_time_and_spares_memory(draws: list[Draw]) -> None:
    def wrong(each: Draw) -> Iterator[str]:
        none, some, full = (each.planned(recompute=mode).price for mode in ("none", "selective", "full"))
        if none.held_bytes < some.held_bytes / SAME or (
            each.plan.layout.pp == 1 and some.held_bytes < full.held_bytes / SAME
        ):
            yield f"memory {none.held_bytes}, {some.held_bytes}, {full.held_bytes}"
        if not each.software.flushes and none.seconds > some.seconds * SAME:
            yield f"seconds {none.seconds}, {some.seconds}"
        if (
            not each.software.flushes
            and some.host_seconds <= HOST_SHARE * some.seconds
            and some.seconds > full.seconds * SAME
        ):
            yield f"seconds {some.seconds}, {full.seconds}"

    check(draws, wrong)


def test_the_more_is_sharded_the_less_is_held(draws: list[Draw]) -> None:
    def wrong(each: Draw) -> Iterator[str]:
        held = [each.planned(zero=zero).price.held_bytes for zero in (1, 2, 3)]
        if held[0] < held[1] / SAME or held[1] < held[2] / 1.03:  # class 3 holds units that were gathered beside shards
            yield f"ZeRO {held}"
        before = each.price.held_bytes
        spreads = {axis: each.spread(**{axis: 2 * getattr(each.plan.layout, axis)}) for axis in ("tp", "cp")}
        wider = each.spread(dp_shard=2 * each.plan.layout.dp_shard)
        spreads["dp_shard"] = wider.planned(batch_samples=2 * each.plan.batch_samples)
        for axis, other in spreads.items():
            if other.price.held_bytes > before * SAME:
                yield f"{axis}: {before} B, {other.price.held_bytes} B on twice the devices"

    check(draws, wrong)


def test_more_work_is_never_less_time_or_less_memory(draws: list[Draw]) -> None:
    def wrong(each: Draw) -> Iterator[str]:
        before = each.price
        plan = each.plan
        doubled = {"accumulation": 2 * plan.accumulation, "batch_samples": 2 * plan.batch_samples}
        larger = {"micro_batch": 2 * plan.micro_batch, "batch_samples": 2 * plan.batch_samples}
        more = {
            "layers": replace(
                each.planned(stages=tuple(2 * count for count in plan.stages)),
                shape=replace(each.shape, layers=2 * each.shape.layers),
            ),
            "sequence": replace(each, shape=replace(each.shape, seq_len=2 * each.shape.seq_len)),
            "accumulation": each.planned(**doubled),
            "micro-batch": each.planned(**larger),
        }
        for name, other in more.items():
            after = other.price
            if after.seconds < before.seconds / SAME or after.held_bytes < before.held_bytes / SAME:
                yield f"{name}: {before}, {after}"
        if more["accumulation"].price.seconds > 2 * before.seconds * SAME:
            yield "twice the micro-batches take more than twice the time"

    check(draws, wrong)


def test_fp8_is_never_slower_than_bf16_by_more_than_its_casts(draws: list[Draw]) -> None:
    def wrong(each: Draw) -> Iterator[str]:
        if each.device not in ("h100-sxm", "b200", "gb200", "mi300x"):
            return
        wide, low = each.price, each.planned(precision="fp8").price
        if each.plan.layout.pp == 1 and low.seconds - low.cast_seconds > wide.seconds * SAME:
            yield f"{wide} in bf16, {low} in fp8"

    check(draws, wrong)

"""Ring formulas and what each class of sharding communicates, by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_examples import axis_terms, cluster, network_terms, opened, plan, profile

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.network import DataSeconds, data_seconds, network_components
from paceline.plan.cost.time.ring import Rings
from paceline.plan.cost.time.ring import ring as rings
from paceline.spec.cluster import Cluster, ClusterSpec, Figure, GroupRates, Link
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan

CONSTANTS = read_constants()


def ring(where: Cluster, size: int, stride: int) -> Rings:
    return rings(where, CONSTANTS, np.array([size]), np.array([stride]))


def traffic(context: PricedTask, chosen: Plan) -> DataSeconds:
    return data_seconds(context.sheet(chosen))


@given(st.integers(2, 64))
def test_ring_moves_and_hops(size):
    group = ring(cluster(size), size, 1)
    share = (size - 1) / size
    assert group.seconds("all_gather", 1e9, 3) == pytest.approx(share * 1e9 / 1e9 + 3 * (size - 1) * 1e-4)
    assert group.seconds("all_reduce", 1e9, 1) == pytest.approx(2 * share + (size - 1) * 1e-4), "measured whole"
    published = Link("node", Figure(1e-4, "published"), Figure(1e9, "published"))
    twice = ring(cluster(size, "cuda", links=(published, published)), size, 1)
    once = twice.seconds("all_gather", 0.0, 1) - twice.start_seconds
    assert twice.seconds("all_reduce", 0.0, 1) == pytest.approx(2 * once + twice.start_seconds)
    assert ring(cluster(size), 1, 1).seconds("all_reduce", 1e9, 1) == 0


def test_measured_rates_of_each_collective_are_used():
    link = Link("process", Figure(0.0, "measured"), Figure(1e9, "measured"), {"reduce_scatter": 5e8})
    group = ring(cluster(2, links=(link,)), 2, 1)
    assert group.seconds("reduce_scatter", 1e9, 1) == pytest.approx(1.0)
    assert group.seconds("all_gather", 1e9, 1) == pytest.approx(0.5)


def test_classes_of_sharding_by_hand():
    context = PricedTask(profile(4), cluster(4), 64, 1)
    layout = Layout(dp_shard=4)
    rounds, share, copy = 4, 3 / 4, 2 / 1e10
    parameters, root, hop = 5e6, 1e6, 3e-4  # three hops of a pass

    def seconds(gathered, launches):
        return share * gathered * 4 / 1e9 + launches * hop + gathered * 4 * copy

    third = traffic(context, plan(layout, 4, zero=3))
    assert third.gather_seconds == pytest.approx(seconds(rounds * (2 * (parameters - root) + root), rounds * 9))
    assert third.reduce_seconds == pytest.approx(seconds(rounds * parameters, rounds * 5))
    second = traffic(context, plan(layout, 4, zero=2))
    assert second.gather_seconds == pytest.approx(seconds(parameters, 5))
    assert second.reduce_seconds == pytest.approx(third.reduce_seconds)
    first = traffic(context, plan(layout, 4, zero=1))
    assert first.gather_seconds == pytest.approx(second.gather_seconds)
    assert first.reduce_seconds == pytest.approx(seconds(parameters, 5))
    whole = traffic(context, plan(layout, 4, zero=3, whole_gradients=True))
    assert whole.gather_seconds == pytest.approx(third.gather_seconds), "weights go as in ZeRO-3"
    assert whole.reduce_seconds == pytest.approx(first.reduce_seconds), "gradients as in ZeRO-1"


def test_copies_of_shards_reduce_the_shard_once_a_step():
    context = PricedTask(profile(4), cluster(4), 64, 1)
    sharded = traffic(context, plan(Layout(dp_shard=2), 8, zero=1))
    hybrid = traffic(context, plan(Layout(dp_replicate=2, dp_shard=2), 8, zero=1))
    all_reduce = 2 * 0.5 * (5e6 / 2 * 4) / 1e9 + 5 * 1e-4
    assert hybrid.reduce_seconds - sharded.reduce_seconds == pytest.approx(all_reduce)


def test_nothing_is_hidden_on_cpus_and_much_on_accelerators():
    chosen = plan(Layout(dp_shard=4), 4)
    on_cpu = network_terms(PricedTask(profile(4), cluster(4), 64, 1), chosen, 1e3)
    on_gpu = network_terms(PricedTask(profile(4), cluster(4, "cuda"), 64, 1), chosen, 1e3)
    for exposed, whole in zip(on_gpu, on_cpu, strict=True):
        assert exposed.value == pytest.approx(whole.value / 5)  # the first or last of five units
    assert "not overlapped" in on_cpu[0].formula and "overlaps" in on_gpu[0].formula
    busy = network_terms(PricedTask(profile(4), cluster(4, "cuda"), 64, 1), chosen, 0.0)
    assert [term.value for term in busy] == pytest.approx([term.value for term in on_cpu])
    assert network_terms(PricedTask(profile(4), cluster(1), 64, 1), plan(Layout(), 4), 1.0) == ()


def test_a_pass_hides_what_it_waits_for_alone():
    context = PricedTask(profile(4, attention_flops=0.0), cluster(4, "cuda"), 64, 1)
    # All else goes over everything in three passes that are alike: a forward, twice as much backward. Of five units one
    # shows. The root's weights stay: nine gathers of a fifth.
    for zero, ahead, back in ((1, 5, 0), (3, 5, 4)):
        chosen = plan(Layout(dp_shard=4), 16, zero=zero)
        moved = traffic(context, chosen)
        gather, reduce = float(moved.gather_seconds[0]), float(moved.reduce_seconds[0])
        first, rest = gather * ahead / (ahead + back), gather * back / (ahead + back)
        forward = 0.4 * first
        shown = network_terms(context, chosen, 3 * forward / CONSTANTS.overlap)
        assert shown[1].value == pytest.approx(0.2 * reduce + 0.8 * reduce - min(0.8 * reduce, 2 * forward))
        left = 2 * forward - min(0.8 * reduce, 2 * forward)
        assert shown[0].value == pytest.approx(first - forward + rest - min(0.8 * rest, left)), zero


def test_gathers_inside_of_nodes_do_not_wait_for_copies_between_them():
    near, far = (Link(level, Figure(0.0, "measured"), Figure(rate, "measured"))
                 for level, rate in (("node", 1e9), ("network", 1e8)))  # fmt: skip
    shown = {}
    for nodes in (1, 2):
        where = cluster(4, "cuda", devices_per_node=4 // nodes, links=(near, far))
        context, chosen = PricedTask(profile(4), where, 64, 1), plan(Layout(dp_replicate=2, dp_shard=2), 16)
        gather = float(traffic(context, chosen).gather_seconds[0])
        shown[nodes] = network_terms(context, chosen, 3 * gather / CONSTANTS.overlap)[0].value
        assert traffic(context, chosen).apart_seconds[0] == pytest.approx(
            0 if nodes == 1 else 2 * 0.5 * 2.5e6 * 4 / 1e8
        )
    # Copies of 10 MB at 0.1 GB/s take 0.1 s, more than the backward pass: they leave it to gathers on other links.
    assert shown == {1: pytest.approx(gather / 5), 2: pytest.approx(gather / 5)}


def test_groups_across_nodes_share_their_adapters():
    published, _ = resolve_cluster(ClusterSpec("h100-sxm", devices=16))
    whole = ring(published, 16, 1)  # eight members a node bring eight adapters
    assert whole.nodes == 2
    assert whole.bytes_per_second["all_reduce"] == pytest.approx(8 * 50e9 * CONSTANTS.network_link_share)
    strided = ring(published, 2, 8)  # one member a node
    assert strided.bytes_per_second["all_reduce"] == pytest.approx(50e9 * CONSTANTS.network_link_share)
    inside = ring(published, 8, 1)
    assert inside.nodes == 1 and inside.bytes_per_second["all_reduce"] == pytest.approx(
        450e9 * CONSTANTS.node_link_share
    )
    more, _ = resolve_cluster(ClusterSpec("h100-sxm", devices=64))
    slow, fast = ring(more, 64, 1), ring(published, 16, 1)
    assert slow.bytes_per_second["all_reduce"] == pytest.approx(fast.bytes_per_second["all_reduce"])
    # What goes around a ring leaves each of eight nodes once; a tree of eight nodes is three high.
    around = 55 * CONSTANTS.node_hop_seconds + 8 * CONSTANTS.network_hop_seconds
    assert slow.pass_latency_seconds == pytest.approx(around)
    tree = 7 * CONSTANTS.node_hop_seconds + 3 * CONSTANTS.network_hop_seconds
    assert slow.tree_latency_seconds == pytest.approx(tree)
    assert slow.seconds("all_reduce", np.zeros(1), 1) == pytest.approx(2 * tree + CONSTANTS.collective_seconds)
    assert ring(published, 1, 1).seconds("all_reduce", 1, 1) == 0


def test_smaller_groups_have_the_rates_that_were_measured_of_them():
    figure = Figure(1e9, "measured")
    pairs = GroupRates(2, 1e-5, {"all_reduce": 4e9})
    link = Link("process", Figure(1e-4, "measured"), figure, {"all_reduce": 1e9}, (pairs,))
    here = cluster(8, links=(link,))
    found = rings(here, CONSTANTS, np.array([2, 4, 8]), np.ones(3, dtype=np.int64))
    assert found.bytes_per_second["all_reduce"] == pytest.approx([4e9, 2e9, 1e9])  # straight in logarithms
    hops = found.pass_latency_seconds / np.array([1, 3, 7])
    assert hops == pytest.approx([1e-5, 1e-5 * 10**0.5, 1e-4])
    assert found.bytes_per_second["all_gather"] == pytest.approx([1e9] * 3)  # not measured of pairs
    plain = rings(cluster(8), CONSTANTS, np.array([2, 8]), np.ones(2, dtype=np.int64))
    assert plain.bytes_per_second["all_reduce"] == pytest.approx([1e9] * 2)


PROBED = Link("process", Figure(1e-4, "measured"), Figure(1e9, "measured"), unit_seconds=5e-3, move_seconds=8e-4,
              work_seconds=4e-3)  # fmt: skip


@pytest.mark.parametrize(("zero", "reduced"), [(1, 1), (2, 4), (3, 4)])
def test_what_a_sharded_unit_costs_beyond_its_collectives_follows_the_reductions(zero, reduced):
    """Four micro-batches, five units (four blocks and the root) of 5 ms."""
    chosen = plan(Layout(dp_shard=4), 4, zero=zero)
    terms = {term.name: term for term in network_terms(PricedTask(profile(4), cluster(4, links=(PROBED,)), 64, 1),
                                                       chosen, 1.0)}  # fmt: skip
    upkeep = terms["upkeep of shards"]
    assert upkeep.value == pytest.approx(reduced * 5 * 5e-3) and upkeep.source == "measured"
    short = network_terms(PricedTask(profile(4), cluster(4, links=(PROBED,)), 64, 1), chosen, 4 * 5 * 2e-3)
    halves = next(term for term in short if term.name == "upkeep of shards")
    assert halves.value == pytest.approx(upkeep.value / 2), "units that compute for 2 ms, where the probe's did for 4"
    sheet = PricedTask(profile(4), cluster(4, links=(PROBED,)), 64, 1).sheet(chosen)
    started = network_components(sheet, np.array([1.0]), np.array([4 * 5 * 2e-3]))
    (same,) = [column.values[0] for column in started if column.name == "upkeep of shards"]
    assert same == pytest.approx(halves.value), "most of a second that starts operators holds up no products"
    unprobed = network_terms(PricedTask(profile(4), cluster(4), 64, 1), chosen, 1.0)
    assert "upkeep of shards" not in {term.name for term in unprobed}
    copies = network_terms(PricedTask(profile(4), cluster(4, links=(PROBED,)), 64, 1), plan(Layout(4), 4), 1.0)
    assert "upkeep of shards" not in {term.name for term in copies}


def test_units_that_gather_anew_are_kept_up_in_every_micro_batch_whoever_reduces():
    sheet = PricedTask(profile(4), cluster(4, links=(PROBED,)), 64, 1).sheet(
        plan(Layout(dp_shard=4), 4, zero=3, whole_gradients=True)
    )
    found = network_components(sheet, np.array([1.0]))
    (upkeep,) = [column.values[0] for column in found if column.name == "upkeep of shards"]
    assert upkeep == pytest.approx(4 * 5 * 5e-3)


@pytest.mark.parametrize(("zero", "milliseconds"), [(1, 5 * (4 + 3 * 0.5)), (2, 4 * 5 * 4), (3, 4 * 5 * 4)])
def test_a_unit_costs_something_however_little_it_computes(zero, milliseconds):
    """Five units that compute for 2 of the probe's 4 ms lie between 3 ms and 5; where gradients are kept, 0.5 ms."""
    link = dataclasses.replace(PROBED, least_unit_seconds=3e-3, kept_unit_seconds=0.5e-3)
    sheet = PricedTask(profile(4), cluster(4, links=(link,)), 64, 1).sheet(plan(Layout(dp_shard=4), 4, zero=zero))
    found = network_components(sheet, np.array([1.0]), np.array([4 * 5 * 2e-3]))
    (upkeep,) = [column.values[0] for column in found if column.name == "upkeep of shards"]
    assert upkeep == pytest.approx(milliseconds * 1e-3)


def test_collectives_between_layers_cost_more_than_they_take_by_themselves():
    """Of a forward pass four in each of four blocks and one in the embedding, as many in backward: 34 x 0.8 ms."""
    context = PricedTask(opened(profile(4)), cluster(2, links=(PROBED,)), 64, 1)
    plain = PricedTask(opened(profile(4)), cluster(2), 64, 1)
    for layout, calls in ((Layout(tp=2), 34), (Layout(dp_shard=2), 0)):
        more = sum(term.value for term in axis_terms(context, plan(layout, 64 // layout.data_degree)))
        less = sum(term.value for term in axis_terms(plain, plan(layout, 64 // layout.data_degree)))
        assert more - less == pytest.approx(calls * 8e-4)

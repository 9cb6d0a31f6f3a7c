"""Slots, nodes, racks and rails; what groups cross, against every group taken apart."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.resolve import resolve_cluster
from paceline.cluster.topology import LEVELS, Topology, span, topology_of
from paceline.spec.cluster import ClusterSpec


def every_group(topology, axes):
    """Return all groups of a mesh as sets of slots, found by joining slots one step along an axis apart."""
    groups = {slot: {slot} for slot in range(topology.devices)}
    for degree, stride in axes:
        for slot in range(topology.devices):
            if slot // stride % degree != degree - 1 and groups[slot] is not groups[slot + stride]:
                joined = groups[slot] | groups[slot + stride]
                for member in joined:
                    groups[member] = joined
    return {frozenset(group) for group in groups.values()}


def test_slots_count_node_by_node():
    topology = Topology(32, 8, rails=4, nodes_per_rack=2)
    assert (topology.nodes, topology.racks) == (4, 2)
    assert [topology.node(slot) for slot in (0, 7, 8, 31)] == [0, 0, 1, 3]
    assert [topology.rail(slot) for slot in (0, 1, 2, 7, 8, 9)] == [0, 0, 1, 3, 0, 0]
    assert [topology.level(0, slot) for slot in (0, 7, 15, 16)] == ["device", "node", "rack", "network"]
    assert Topology(32, 8).level(0, 15) == "network" and Topology(32, 8).racks == 0


meshes = st.tuples(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=4),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.integers(0, 2),
)


@given(meshes, st.data())
def test_spans_are_those_of_the_worst_group(mesh, data):
    degrees, per_node, nodes_per_rack = mesh
    devices = math.prod(degrees)
    per_node = math.gcd(devices, per_node)
    topology = Topology(devices, per_node, rails=min(2, per_node), nodes_per_rack=nodes_per_rack)
    strides = [math.prod(degrees[index + 1 :]) for index in range(len(degrees))]
    several = [axis for axis in zip(degrees, strides, strict=True) if axis[0] > 1]
    if not several:
        return
    axes = data.draw(st.lists(st.sampled_from(several), min_size=1, max_size=2, unique=True))
    groups, found = every_group(topology, axes), span(topology, axes)
    nodes = [[topology.node(slot) for slot in sorted(group)] for group in groups]
    assert found.nodes == max(len(set(group)) for group in nodes)
    assert found.members == max(group.count(node) for group in nodes for node in group)
    assert found.leaving == max(sum(a != b for a, b in itertools.pairwise([*group, group[0]])) for group in nodes)
    assert found.on_rail == all(len({topology.rail(slot) for slot in group}) == 1 for group in groups)
    levels = [topology.level(a, b) for group in groups for a in group for b in group]
    assert found.level == max(levels, key=LEVELS.index)
    racks = max(len({topology.rack(slot) for slot in group}) for group in groups)
    assert found.racks == (racks if nodes_per_rack else 0)


def test_a_catalog_cluster_has_its_nodes_rails_and_stated_racks():
    cluster, _ = resolve_cluster(ClusterSpec("h100-sxm", 64, nodes_per_rack=4))
    assert topology_of(cluster) == Topology(64, 8, rails=8, nodes_per_rack=4)


@pytest.mark.parametrize(("stride", "on_rail"), [(8, True), (4, False), (16, True)])
def test_groups_of_the_same_device_in_every_node_stay_on_a_rail(stride, on_rail):
    assert span(Topology(64, 8, rails=8), [(4, stride)]).on_rail is on_rail
    assert not span(Topology(64, 8), [(4, stride)]).on_rail  # rails unknown

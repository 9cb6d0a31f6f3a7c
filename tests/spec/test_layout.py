"""The mesh arithmetic, over all small layouts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.spec.layout import MESH_ORDER, Layout, accumulation_for, holds_shards, layouts_over, rows_of

degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees, degrees)
def test_coordinates_number_every_rank_once(pp, replicate, shard, cp, tp):
    layout = Layout(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.devices)]
    assert places == sorted(places) and len(set(places)) == layout.devices
    assert tuple(layout.coordinates(0)) == MESH_ORDER


@given(degrees, degrees)
def test_data_ranks_are_the_product_of_the_data_axes(replicate, shard):
    layout = Layout(dp_replicate=replicate, dp_shard=shard)
    assert [layout.data_rank(rank) for rank in range(layout.devices)] == list(range(layout.data_degree))


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 50))
def test_rows_cover_the_batch_once_and_accumulation_covers_the_largest_part(batch, degree, micro_batch):
    parts = [rows_of(batch, degree, rank) for rank in range(degree)]
    assert [row for part in parts for row in part] == list(range(batch))
    largest = max(map(len, parts))
    assert largest - min(map(len, parts)) <= 1
    accumulation = accumulation_for(batch, degree, micro_batch)
    assert (accumulation - 1) * micro_batch < largest <= accumulation * micro_batch


@given(st.integers(1, 96))
def test_layouts_over_axes_are_all_distinct_and_of_the_right_size(devices):
    any_degree = range(1, devices + 1)
    layouts = list(layouts_over(devices, {"dp_replicate": any_degree, "dp_shard": any_degree}))
    assert len(set(layouts)) == len(layouts) == sum(devices % n == 0 for n in range(1, devices + 1))
    assert all(layout.devices == devices for layout in layouts)


@given(degrees, degrees, degrees, degrees, degrees)
def test_one_rule_says_for_one_layout_and_for_many_whether_weights_are_sharded(replicate, shard, cp, tp, pp):
    layout = Layout(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=shard)
    state, splits_model = shard * cp > 1, max(tp, pp, shard) > 1
    assert layout.is_sharded == (state or (splits_model and replicate > 1))
    columns = {name: np.array([degree]) for name, degree in {**layout.mesh_shape, "ep": layout.ep}.items()}
    assert holds_shards(columns).tolist() == [layout.is_sharded]


def test_experts_must_divide_the_shards():
    with pytest.raises(ConfigError, match="ep must divide"):
        Layout(dp_shard=2, ep=3)
    with pytest.raises(ConfigError, match="whole number"):
        Layout(dp_shard=0)

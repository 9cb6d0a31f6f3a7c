"""Placement: traffic by hand and against the cost model's own volumes, the busiest axis on the nearest links."""

import dataclasses
import json
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from plan_examples import cluster, measured, opened, plan, profile

from paceline.cluster.resolve import resolve_cluster
from paceline.plan.cost.pricing import forecast_plan
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.placement.draw import placement_svg
from paceline.plan.placement.in_words import placement_lines
from paceline.plan.placement.place import best_order, place, placement_from_dict
from paceline.plan.placement.traffic import AxisTraffic, axis_traffic
from paceline.spec.cluster import ClusterSpec, Link
from paceline.spec.layout import MESH_ORDER, Layout
from paceline.spec.plan import Plan
from paceline.task.models.sizes import NAMED_SIZES, nominal_vocab
from paceline.task.profile.decoder import profile_decoder

SEQUENCE = 2048


def llama():
    size = NAMED_SIZES["llama-8b"]
    return profile_decoder(dataclasses.replace(size, vocab=nominal_vocab(size)), SEQUENCE)


def h100(devices, **options):
    return resolve_cluster(ClusterSpec("h100-sxm", devices, **options))[0]


def shaped(**degrees):
    options = {name: degrees.pop(name) for name in ("zero", "recompute", "accumulation") if name in degrees}
    return Plan(Layout(**degrees), micro_batch=1, batch_samples=64, precision="bf16", **options)


def sent(model, chosen, optimizer="adamw"):
    where = PricedTask(model, h100(chosen.layout.devices), chosen.batch_samples, 1, optimizer)
    return {one.axis: one.bytes_per_step for one in axis_traffic(where, chosen)}


def test_data_axes_by_hand():
    model = llama()
    weights = model.parameters
    assert sent(model, shaped(dp_shard=8, zero=1, accumulation=4))["dp_shard"] == pytest.approx(
        weights * 7 / 8 * (2 + 4)
    )
    assert sent(model, shaped(dp_shard=8, zero=2, accumulation=4))["dp_shard"] == pytest.approx(
        weights * 7 / 8 * (2 + 16)
    )
    root = weights - sum(block.parameters for block in model.blocks if block.recomputable)  # stays gathered
    assert sent(model, shaped(dp_shard=8, zero=3, accumulation=4))["dp_shard"] == pytest.approx(
        weights * 7 / 8 * (16 + 16) - root * 7 / 8 * 4 * 2
    )
    # Muon gathers weight, gradient and momentum of every parameter, in fp32
    muon = sent(model, shaped(dp_shard=8, zero=1), "muon")["dp_shard"]
    assert muon == pytest.approx(weights * 7 / 8 * (2 + 4 + 3 * 4))
    both = sent(model, shaped(dp_shard=8, dp_replicate=4, zero=1))
    assert both["dp_replicate"] == pytest.approx(2 * 3 / 4 * weights / 8 * 4)


def test_model_axes_by_hand():
    model, hidden, layers = llama(), 4096, 32
    stream = 64 * SEQUENCE * hidden * 2  # bytes of the whole batch's stream in bf16
    # four collectives a layer and pass, the embedding's and the head's (Korthikanti et al. 2022, figure 5)
    loss = 2 * 7 / 8 * 3 * 4 * 64 * SEQUENCE  # all-reduces of three fp32 numbers a token
    assert sent(model, shaped(tp=8))["tp"] == pytest.approx(2 * (4 * layers + 2) * stream * 7 / 8 + loss)
    again = 3 * layers  # recompute repeats the layers but for the last sum, and neither embedding nor head
    full = sent(model, shaped(tp=8, recompute="full"))["tp"]
    assert full == pytest.approx((2 * (4 * layers + 2) + again) * stream * 7 / 8 + loss)
    assert sent(model, shaped(pp=4, accumulation=64))["pp"] == pytest.approx(2 * stream)
    keys = 64 * SEQUENCE * 2 * 8 * 128 * 2 * layers  # keys and values of 8 heads of 128
    # gathered in the forward pass and in the backward pass, their gradients summed in fp32
    assert sent(model, shaped(cp=4))["cp"] == pytest.approx((2 + 2) * keys * 3 / 4)


def test_no_axis_sends_on_one_device():
    assert axis_traffic(PricedTask(profile(), h100(1), 1, 1), plan(Layout(), 1)) == ()
    assert placement_lines(place(profile(), h100(1), plan(Layout(), 1), 1.0))[0].endswith("nothing is sent")


@pytest.mark.parametrize(("degrees", "axis", "term"), [
    ({"tp": 2}, "tp", "tensor communication"), ({"cp": 2}, "cp", "context communication"),
    ({"dp_shard": 2, "ep": 2}, "ep", "expert all-to-all"), ({"dp_replicate": 2}, "dp_replicate", "gradient reduction"),
])  # fmt: skip
def test_placement_counts_the_bytes_that_the_price_counts(degrees, axis, term):
    model = opened(profile(4, kv_elements=1e4, routed_elements=1e5, experts=4, expert_parameters=5e5))
    link = Link("process", measured(0.0), measured(1e9))
    where, chosen = cluster(2, links=(link,)), plan(Layout(**degrees), recompute="full")
    seconds = {one.name: one.value for one in forecast_plan(model, where, chosen, batch_samples=64, steps=1).time}[term]
    volumes = {one.axis: one.bytes_per_step for one in axis_traffic(PricedTask(model, where, 64, 1), chosen)}
    assert volumes[axis] > 0 and volumes[axis] == pytest.approx(seconds * 1e9)


def test_the_busiest_axis_stands_innermost():
    layout = Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=2)
    volumes = {"tp": 1.0, "dp_shard": 5.0, "pp": 9.0, "dp_replicate": 7.0}
    order = best_order(layout, tuple(AxisTraffic(axis, value, "") for axis, value in volumes.items()))
    # dp_shard's bytes count for cp too: they share a copy's state together
    assert order == ("tp", "dp_shard", "cp", "dp_replicate", "pp")
    assert best_order(layout, ()) == ("dp_replicate", "pp", "dp_shard", "cp", "tp")


def test_tensor_parallel_stays_inside_nodes_and_data_parallel_on_rails():
    found = place(llama(), h100(64), shaped(dp_shard=8, tp=8), 2.0)
    assert [axis.axis for axis in found.axes] == ["tp", "dp_shard"] and found.better == ()
    tensor, data = found.axes
    assert tensor.span.nodes == 1 and tensor.leaving_bytes_per_second == 0
    assert data.span.nodes == 8 and data.span.members == 1 and data.span.on_rail
    assert data.leaving_bytes_per_second == data.bytes_per_second > 0
    assert tensor.bytes_per_second == pytest.approx(sent(llama(), shaped(dp_shard=8, tp=8))["tp"] / 2.0)


def test_an_order_that_keeps_more_inside_the_nodes_is_named():
    # weights gathered for each of 16 micro-batches outweigh what two tensor ranks exchange
    chosen = shaped(dp_shard=8, tp=2, zero=3, accumulation=16)
    found, volumes = place(llama(), h100(16), chosen, 1.0), sent(llama(), chosen)
    assert volumes["dp_shard"] > 10 * volumes["tp"]
    # today: tensor pairs side by side, and shards over two nodes, where 2 of the ring's 8 hops leave a node
    assert found.leaving_bytes_per_second == pytest.approx(volumes["dp_shard"] * 2 / 8)
    # better: shards inside a node, tensor pairs across
    assert found.better[-1] == "dp_shard" and found.better_leaving == pytest.approx(volumes["tp"])
    assert any("not started in that order" in line for line in placement_lines(found))
    apart = place(llama(), h100(64), shaped(dp_replicate=64), 1.0)
    assert apart.axes[0].leaving_bytes_per_second == pytest.approx(apart.axes[0].bytes_per_second / 8)


def test_ranks_keep_their_coordinates():
    found = place(llama(), h100(64), shaped(dp_replicate=2, dp_shard=2, cp=2, tp=4, pp=2), 1.0)
    assert found.order == MESH_ORDER
    for rank in range(64):
        assert found.coordinates(rank) == found.layout.coordinates(rank)
    assert [list(found.ranks(node)) for node in (0, 7)] == [list(range(8)), list(range(56, 64))]


def test_the_record_makes_the_same_placement_again():
    found = place(llama(), h100(64, nodes_per_rack=2), shaped(dp_shard=8, tp=8), 2.0)
    again = placement_from_dict(
        json.loads(json.dumps(dataclasses.asdict(dataclasses.replace(found, better_leaving=0.0))))
    )
    assert again == dataclasses.replace(found, better_leaving=0.0)
    for wrong in ({}, {"axes": 3}, {"axes": [], "topology": {}, "layout": {"tp": 0}, "order": [], "better": []}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            placement_from_dict(wrong)


def test_the_picture_shows_nodes_ranks_and_axes():
    found = place(llama(), h100(64, nodes_per_rack=2), shaped(dp_shard=4, tp=8, pp=2, accumulation=8), 2.0)
    picture = placement_svg(found)
    root = ElementTree.fromstring(picture)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "node 0, rack 0" in words and "node 7, rack 3" in words and "63" in words and "1·3·7" in words
    assert "tp=8: inside a node" in words
    assert len([word for word in words if word and word.isdigit()]) == 64
    inside = placement_svg(found, alone=False)
    assert "xmlns" not in inside and ElementTree.fromstring(inside).tag == "svg"
    large = placement_svg(place(llama(), h100(4096), shaped(dp_shard=512, tp=8), 2.0))
    assert len(large) < 30_000 and "8 of 512 nodes" in large


def test_the_picture_in_the_guide_is_today_s():
    docs = Path(__file__).parents[3] / "docs"
    drawn = runpy.run_path(str(docs / "scripts" / "draw_placement.py"))["placement_picture"]()
    on_disk = (docs / "images" / "placement.svg").read_text(encoding="utf-8")
    assert on_disk == drawn, "run: python docs/scripts/draw_placement.py"


def test_the_words_fit_100_columns_and_name_what_matters():
    layout = {"dp_replicate": 2, "dp_shard": 8, "cp": 2, "tp": 8, "pp": 2}
    found = place(llama(), h100(512, nodes_per_rack=4), shaped(**layout, accumulation=8), 2.0)
    lines = placement_lines(found)
    assert max(map(len, lines)) <= 100
    assert lines[0] == "placement: 64 nodes of 8 devices, 8 rails, 16 racks"
    assert "ranks count pp, dp_replicate, dp_shard, cp, tp" in lines[1]
    assert any("tp=8: inside a node" in line for line in lines) and any("60 more nodes" in line for line in lines)
    unknown = placement_lines(place(llama(), h100(16), shaped(dp_shard=16), float("nan")))
    assert any("unknown" in line for line in unknown)

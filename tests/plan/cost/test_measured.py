"""Measured seconds of the task's own blocks take the place of the model's."""

import dataclasses
import json

import pytest
from plan_examples import cluster, opened, plan, profile

from paceline.cli.main import main
from paceline.plan.cost.intervals import PROBED_ERROR, TIME_ERROR, probed_error
from paceline.plan.cost.pricing import price, step_seconds
from paceline.plan.cost.rates import Rates
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.learn.observation import device_key, machine_key
from paceline.plan.learn.task_measurement import (
    TaskMeasurement,
    forget_measurements,
    measured_profile,
    measured_shapes,
    read_measurements,
    with_blocks,
    write_measurement,
)
from paceline.plan.planned import plan_task
from paceline.spec.layout import Layout
from paceline.spec.load import load_spec
from paceline.spec.optimizers import optimizer_key
from paceline.spec.profile import Fill
from paceline.task.profile.plain import task_key

MODEL = opened(profile(4))
COMPUTED = ("products, forward", "products, backward", "attention", "memory-bound operators", "operator launches")


def measurement(here, precision="fp32", **changes):
    fields = {
        "date": "2026-01-01T00:00:00+00:00",
        "machine": machine_key(here),
        "task": task_key(MODEL, "adamw"),
        "name": "round",
        "precision": precision,
        "micro_batch": 4,
        "devices": here.devices_per_node,
        "threads": here.device.threads,
        "block_seconds": (0.7,),
        "rest_seconds": 0.06,
        "update_seconds": 0.05,
        "update_parameters": MODEL.parameters,
        "blocks": 4,
        "repeats": 10,
        "spread": 0.1,
    }
    return TaskMeasurement(**{**fields, **changes})


def priced(here, chosen, precision="fp32", **changes):
    known = {precision: measurement(here, precision, **changes)}
    return price(PricedTask(MODEL, here, 64, 1, measured=known), chosen)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_of_the_measured_micro_batch_takes_what_was_measured(kind, precision):
    here = cluster(1, kind, host="node-1")
    chosen = plan(Layout(), micro_batch=4, batch=4, precision=precision)
    forecast = priced(here, chosen, precision)
    terms = {term.name: term for term in forecast.time}
    computed = sum(terms[name].value for name in COMPUTED)
    casts = 0.0 if precision == "fp32" else terms["casts and gradient sums"].value
    assert computed + casts == pytest.approx(4 * 0.7 + 0.06, rel=1e-12)
    assert terms["optimizer"].value == pytest.approx(0.05, rel=1e-12)
    assert all(terms[name].source == "measured" for name in COMPUTED)
    assert all("measured here at micro-batch 4" in terms[name].formula for name in COMPUTED[:4])


def test_other_layouts_keep_the_ratio_and_other_precisions_are_untouched():
    here = cluster(2, host="node-1")
    chosen = plan(Layout(tp=2), micro_batch=8, batch=64)
    known, unknown = priced(here, chosen), price(PricedTask(MODEL, here, 64, 1), chosen)
    rows = [{term.name: term.value for term in forecast.time} for forecast in (known, unknown)]
    assert rows[0]["tensor communication"] == pytest.approx(rows[1]["tensor communication"], rel=1e-12)
    assert rows[0]["products, forward"] > 1.5 * rows[1]["products, forward"]
    other = dataclasses.replace(chosen, precision="bf16")
    assert priced(here, other).step_seconds == price(PricedTask(MODEL, here, 64, 1), other).step_seconds


def test_factors_beyond_reason_are_cut_off():
    here, chosen = cluster(1, host="node-1"), plan(Layout(), micro_batch=4, batch=4)
    seconds = [priced(here, chosen, block_seconds=(value,)).step_seconds.value for value in (1e3, 1e6)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)


@pytest.mark.parametrize("full", [0.3, 0.9])
def test_what_was_measured_is_held_against_rows_as_full_as_they_were(full):
    """A pass of rows that are half as long takes about half as long: that is no machine of twice the speed."""
    here, chosen = cluster(1, host="node-1"), plan(Layout(), micro_batch=4, batch=4)
    counted = Fill(4, tokens=0.6, pairs=0.4, passes=1.0)
    uneven = dataclasses.replace(MODEL, fills=(counted,))
    found = measurement(here, tokens=full, pairs=full**2, block_seconds=(0.7,))
    factors = PricedTask(uneven, here, 64, 1, measured={"fp32": found}).factors("fp32")
    as_full = dataclasses.replace(MODEL, fills=(Fill(4, full, full**2, 1.0),))
    formula = PricedTask(as_full, here, 64, 1).sheet(chosen).formula_seconds[0] * 4
    (at,) = (number for number, each in enumerate(PricedTask(uneven, here, 64, 1).shapes.blocks) if each.recomputable)
    assert factors[at] == pytest.approx(0.7 / formula[at], rel=1e-12)
    assert measured_profile(MODEL, found) is MODEL, "where all rows are alike"


def test_a_memory_budget_spares_the_blocks_that_were_measured_to_be_slow():
    here = cluster(1, host="node-1")
    fast, slow = MODEL.blocks[1], dataclasses.replace(MODEL.blocks[1], transient_elements=2e5)
    model = dataclasses.replace(MODEL, blocks=(MODEL.blocks[0], fast, slow, fast, slow))
    known = measurement(here, task=task_key(model, "adamw"), block_seconds=(0.5, 1.0))
    asked = plan(Layout(), micro_batch=4, recompute="budget", recompute_budget=0.6)
    modes = PricedTask(model, here, 64, 1, measured={"fp32": known}).with_blocks(asked).recompute_blocks
    assert modes == ("selective", "none", "selective", "selective")
    assert PricedTask(model, here, 64, 1).with_blocks(asked).recompute_blocks == ("none", *3 * ("selective",))


def test_searches_price_plans_as_each_by_itself():
    here = cluster(2, host="node-1")
    context = PricedTask(MODEL, here, 64, 1, measured={"fp32": measurement(here)})
    plans = [plan(layout, micro_batch=m) for layout in (Layout(dp_shard=2), Layout(tp=2)) for m in (1, 4)]
    together = step_seconds(context, context.sheet(*plans).columns)[0]
    assert together == pytest.approx([price(context, one).step_seconds.value for one in plans], rel=1e-12)


def test_shapes_and_short_chains():
    odd = dataclasses.replace(MODEL.blocks[1], name="odd", operators=99)
    mixed = dataclasses.replace(MODEL, blocks=(*MODEL.blocks, odd))
    assert [shape.operators for shape in measured_shapes(mixed)] == [30, 99]
    assert [block.name for block in with_blocks(mixed, 2).blocks] == ["embedding", "layers.0", "layers.1"]


def test_measurements_are_kept_by_task_precision_and_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, key = cluster(2, host="node-1"), task_key(MODEL, "adamw")
    path = write_measurement(measurement(here))
    write_measurement(measurement(here, "bf16"))
    write_measurement(measurement(here, rest_seconds=0.05))
    assert read_measurements(key, here) == {
        "fp32": measurement(here, rest_seconds=0.05),
        "bf16": measurement(here, "bf16"),
    }
    assert read_measurements("another", here) == {} == read_measurements(key, cluster(1, host="node-1"))
    path.write_text("{}")
    assert list(read_measurements(key, here)) == ["bf16"]
    assert forget_measurements(machine_key(here)) == 2 and read_measurements(key, here) == {}


def test_what_one_node_measured_is_in_the_forecast_of_a_catalog_cluster_of_64(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("A line of text, some forty bytes long.\n" * 20_000)
    words = ["task.model=llama-8b", f"task.data.source={text}", "task.data.tokenizer=bytes", "task.data.seq_len=2048"]
    words += ["cluster.device=h100-sxm", "cluster.devices=64", "task.global_batch=128 samples", "task.stop=10 steps"]
    words += ["plan.dp_shard=64", "plan.tp=1", "plan.pp=1", "plan.cp=1", "plan.micro_batch=1", "plan.recompute=none"]
    command = ["plan", "--json", *(part for word in words for part in ("--set", word))]

    def planned():
        assert main(command) == 0
        found = json.loads(capsys.readouterr().out)
        return {term["name"]: term for term in found["forecast"]["time"]}

    before = planned()
    spec = load_spec(None, words)
    answer = plan_task(spec)
    here, key = answer.cluster, task_key(answer.profile, optimizer_key(spec.task.optimizer))
    shapes = measured_shapes(answer.profile)
    assert len(shapes) == 1 and not read_measurements(key, here)
    machine = f"node-7-{device_key(here)}"
    slow = measurement(here, "bf16", machine=machine, task=key, micro_batch=1, block_seconds=(0.1,), rest_seconds=0.02)
    write_measurement(slow)
    write_measurement(dataclasses.replace(slow, devices=4, block_seconds=(9.0,)))  # another kind of node
    write_measurement(dataclasses.replace(slow, machine="node-8-cuda-00000000", block_seconds=(9.0,)))  # another device
    after = planned()
    layers, batch = answer.profile.repeated_blocks, answer.batch_samples // 64
    computed = sum(after[name]["value"] for name in COMPUTED[:4]) + after["casts and gradient sums"]["value"]
    assert computed == pytest.approx(batch * (layers * 0.1 + 0.02), rel=0.05)
    assert "measured on node-7" in after["attention"]["formula"]
    assert before["attention"]["value"] < after["attention"]["value"]
    main([*command, "--set", "cluster.learn=false"])
    assert "node-7" not in capsys.readouterr().out


def test_no_gpu_is_known_better_than_before_any_grid_has_run_on_one() -> None:
    """What grids missed is known of CPUs; of a probed GPU it is 20 % at least, whatever its steps are made of."""

    def widths(kind: str) -> list[float]:
        rates = Rates(dataclasses.replace(cluster(4, kind).device, matmul_source="measured"), "fp32")
        return [probed_error(part, "measured", rates) for part in ("products", "collectives")]

    assert widths("cpu") == [PROBED_ERROR["computing"], PROBED_ERROR["communicating"]]
    assert widths("cuda") == [TIME_ERROR["measured"], PROBED_ERROR["communicating"]]
    assert PROBED_ERROR["computing"] < TIME_ERROR["measured"] < PROBED_ERROR["communicating"]

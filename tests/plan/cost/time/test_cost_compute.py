"""Time terms against sums done by hand, on a device with round numbers."""

import dataclasses
import math

import numpy as np
import pytest
from plan_examples import cluster, compute_terms, optimizer_seconds, plan, profile

from paceline.plan.cost.rates import Rates, interpolate
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.compute import matrix_peak
from paceline.spec.cluster import CalibrationStep
from paceline.spec.layout import Layout


def terms_of(context, chosen):
    return {term.name: term for term in compute_terms(context, chosen)}


def test_forward_backward_attention_and_moving_by_hand():
    context = PricedTask(profile(4), cluster(2), batch_samples=64, steps=1)
    terms = terms_of(context, plan(Layout(dp_replicate=2), 8))
    # 32 samples a device x 4 layers x 2e9 FLOPs / 1e11 FLOP/s
    assert terms["products, forward"].value == pytest.approx(32 * 4 * 2e9 / 1e11)
    assert terms["products, backward"].value == pytest.approx(2 * 32 * 4 * 2e9 / 1e11)
    assert terms["attention"].value == pytest.approx(32 * 4 * 1e8 * 3.5 / 5e10)
    assert terms["memory-bound operators"].value == pytest.approx(32 * 5 * 1e6 * 4 * 3 / 1e10)
    assert terms["operator launches"].value == pytest.approx(4 * 3 * 5 * 30 * 1e-6)
    # fp32 gradients of 5e6 parameters are added (read, read, write) in each of four micro-batches; nothing is cast
    assert terms["casts and gradient sums"].value == pytest.approx(4 * 5e6 * 12 / 1e10)


def test_a_backward_pass_in_two_parts_starts_more():
    """Eight grids had zero-bubble 3 to 21 % short, the more micro-batches the more, and it was chosen for 1F1B."""
    context = PricedTask(profile(4), cluster(2), batch_samples=64, steps=1)

    def launches(schedule: str):
        return terms_of(context, plan(Layout(pp=2), 8, stages=(2, 2), schedule=schedule))["operator launches"]

    # 8 micro-batches through two layers and the head, of 30 operators each: forward 1, backward 2, and splitting 2.5
    assert launches("1f1b").value == pytest.approx(8 * 3 * 3 * 30 * 1e-6)
    assert launches("zero-bubble").value == pytest.approx(8 * 5.5 * 3 * 30 * 1e-6)
    assert "8 micro-batches x (5.5 x 90 + 0) operators" in launches("zero-bubble").formula


def test_recompute_repeats_the_blocks_only():
    context = PricedTask(profile(4), cluster(1), 8, 1)
    full = terms_of(context, plan(Layout(), 8, 8, recompute="full"))["recompute"].value
    assert full == pytest.approx(8 * 4 * (2e9 / 1e11 + 1e8 / 5e10 + 1e6 * 4 / 1e10))
    selective = terms_of(context, plan(Layout(), 8, 8, recompute="selective"))["recompute"].value
    assert selective == pytest.approx(8 * 4 * 1e6 * 4 / 1e10)


def test_optimizer_moves_seven_values_and_clips_three_per_local_parameter():
    context = PricedTask(profile(4), cluster(4), 64, 1)
    seconds = optimizer_seconds(context, plan(Layout(dp_replicate=2, dp_shard=2), 8))
    assert seconds == pytest.approx(5e6 / 2 * 4 * (7 + 3) / 1e10)


def test_calibration_turns_the_sum_of_parts_into_the_measured_step():
    parts = 3 * 1e10 / 1e11 + 3.5 * 1e9 / 5e10 + 3 * 1e8 * 4 / 1e10 + 3 * 100 * 1e-6
    step = CalibrationStep("fp32", 512, 256, 1.5 * parts + 28e6 / 1e10, 0.1, 1_000_000, 1e10, 1e9, 1e8, 100)
    base = cluster(1)
    device = dataclasses.replace(base.device, calibration=(step,))
    assert Rates(device, "fp32").factor == pytest.approx(1.5)
    assert Rates(device, "bf16").factor == pytest.approx(1.5)  # a precision without its own takes fp32's
    plain = terms_of(PricedTask(profile(), base, 8, 1), plan(Layout(), 8, 8))
    scaled = terms_of(PricedTask(profile(), dataclasses.replace(base, device=device), 8, 1), plan(Layout(), 8, 8))
    for name in ("products, forward", "attention", "memory-bound operators", "operator launches"):
        assert scaled[name].value == pytest.approx(1.5 * plain[name].value)
    assert "1.50 (measured calibration step)" in scaled["attention"].formula


def test_narrow_heads_take_longer_for_each_flop_by_hand():
    """A score costs its softmax whatever its head's width: heads of 64 were measured at 50 GFLOP/s, of 32 at 40.

    Each score of a head of 64 is 7 x 64 FLOPs (forward and backward), 8.96 ns; of 32, 5.6 ns: so 2.24 ns of softmax
    and 0.105 ns for each unit of width. Heads of 16 take 3.92 ns, 28.6 GFLOP/s; of 128, 15.7 ns, 57.1 GFLOP/s.
    """
    device = dataclasses.replace(
        cluster(1).device, attention_flops={"fp32": ((128, 5e10), (1024, 8e10))},
        attention_narrow_flops={"fp32": ((128, 4e10), (1024, 4e10))}, head_widths=(64, 32),
    )  # fmt: skip
    rates = Rates(device, "fp32")
    assert [rates.attention_rate(128, width) for width in (64, 32)] == pytest.approx([5e10, 4e10])
    softmax, each = 2 * 5.6e-9 - 8.96e-9, (8.96e-9 - 5.6e-9) / 32
    for width in (16, 24, 128):
        assert rates.attention_rate(128, width) == pytest.approx(7 * width / (softmax + each * width)), width
    assert rates.attention_rate(1024, 32) == pytest.approx(4e10), "twice as long at that length"
    assert rates.attention_rate(1024, 4096) == pytest.approx(2 * 8e10), "no head is more than twice as fast"
    assert rates.attention_rate(128) == pytest.approx(5e10), "of heads that nobody knows, those that were measured"
    plain = dataclasses.replace(device, attention_narrow_flops={})
    assert Rates(plain, "fp32").attention_rate(128, 16) == pytest.approx(5e10)


def test_a_decoders_own_heads_are_priced_and_a_calibration_step_is_held_against_its_own():
    device = dataclasses.replace(
        cluster(1).device, attention_narrow_flops={"fp32": ((128, 2.5e10),)}, head_widths=(64, 32)
    )
    narrow = profile(4, heads=4, attention_flops=2.0 * 256**2 * 4 * 32)
    wide = profile(4, heads=2, attention_flops=2.0 * 256**2 * 2 * 64)
    took = [
        compute_terms(PricedTask(shape, dataclasses.replace(cluster(1), device=device), 64, 1), plan(Layout(), 8))
        for shape in (narrow, wide)
    ]
    attention = [next(term.value for term in terms if term.name == "attention") for terms in took]
    assert attention[0] == pytest.approx(2 * attention[1])
    step = CalibrationStep("fp32", 512, 128, 1.0, 0.1, 0, 0.0, 1e9, 0.0, 0, head_width=32)
    assert Rates(device, "fp32").ratio_of(step) == pytest.approx(1 / (3.5 * 1e9 / 2.5e10))


def test_an_accelerator_hides_launches_behind_its_work():
    slow_host = dataclasses.replace(cluster(1, "cuda").device.launch_seconds, value=1e-3)
    base = cluster(1, "cuda")
    tiny = profile(4, matmul_flops=1e3, attention_flops=0.0, moved_elements=1.0)
    assert terms_of(PricedTask(profile(4), base, 64, 1), plan(Layout(), 64))["operator launches"].value == 0
    hosted = dataclasses.replace(base, device=dataclasses.replace(base.device, launch_seconds=slow_host))
    launches = terms_of(PricedTask(tiny, hosted, 1, 1), plan(Layout(), 1, 1))["operator launches"].value
    assert launches == pytest.approx(3 * 150 * 1e-3, rel=0.01)


def test_interpolation_is_exact_at_points_and_monotone_between():
    points = ((64, 1e10), (256, 4e10), (1024, 5e10))
    assert interpolate(points, np.array([64, 256, 1024])) == pytest.approx([1e10, 4e10, 5e10])
    assert interpolate(points, np.array([128])) == pytest.approx(2e10)
    assert interpolate(points, np.array([8, 9999])) == pytest.approx([1e10, 5e10])
    assert np.isnan(interpolate((), np.array([64])))


def test_unknown_rates_stay_unknown():
    context = PricedTask(profile(), cluster(1), 8, 1)
    terms = terms_of(context, plan(Layout(), 8, 8, precision="fp16"))
    assert math.isnan(terms["products, forward"].value) and terms["products, forward"].source == "unknown"
    assert math.isnan(matrix_peak(context, "fp16")[0])
    assert matrix_peak(context, "bf16") == (4e11, "of measured matrix peak")

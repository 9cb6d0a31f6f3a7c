"""Pipelines: the passes that torch's schedules run, the bubbles that papers derive, and any stages by brute force."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan.feasible.stages import fill_pipeline
from paceline.plan.schedules.draw import timelines_svg
from paceline.plan.schedules.orders import Pass, pipeline_orders
from paceline.plan.schedules.timeline import StageTimes, Timeline, pipeline_timeline
from paceline.plan.schedules.trace import pipeline_trace

EQUAL = StageTimes(1.0, 1.0, 1.0)
TORCH = {"interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble"}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


@pytest.mark.parametrize("schedule", TORCH)
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("virtual", [2, 3])
def test_interleaved_orders_are_torchs(schedule: str, devices: int, virtual: int) -> None:
    """Of every number of micro-batches up to 12 that the schedule takes."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for micro_batches in range(1, 13):
        if micro_batches % max(1, micro_batches // devices):
            continue  # neither takes them
        theirs = [
            [
                Pass(KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
                for action in row
                if action is not None and action.computation_type.name in KINDS
            ]
            for row in get_schedule_ops(TORCH[schedule], devices, micro_batches, virtual)
        ]
        assert pipeline_orders(schedule, devices, micro_batches, virtual) == theirs


@pytest.mark.parametrize(("schedule", "name"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [4, 5, 9])
def test_single_stage_orders_are_what_torch_executes(
    schedule: str, name: str, devices: int, micro_batches: int
) -> None:
    """Its step is run on a stage that only writes down what is asked of it.

    torch refuses 1F1B with fewer micro-batches than stages, and the planner never asks for it.
    """
    from torch.distributed.pipelining import schedules

    for rank in range(devices):
        done: list[Pass] = []
        stage = mock.MagicMock(stage_index=rank, num_stages=devices, group_size=devices, group_rank=rank)
        stage.is_first, stage.is_last, stage.has_backward = rank == 0, rank == devices - 1, True
        for kind in ("fwd", "bwd"):
            for way in ("recv", "send"):
                getattr(stage, f"get_{kind}_{way}_ops").return_value = []
        stage.forward_one_chunk.side_effect = lambda index, *_, **__: done.append(Pass("F", rank, index))  # noqa: B023
        stage.backward_one_chunk.side_effect = lambda index, *_, **__: done.append(Pass("B", rank, index))  # noqa: B023
        schedule_of: Any = getattr(schedules, name)
        made = schedule_of(stage, micro_batches, loss_fn=lambda *_: None)
        left_out = ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses")
        with mock.patch.multiple(made, **dict.fromkeys(left_out, mock.DEFAULT)):
            made._step_microbatches([()] * micro_batches, [{}] * micro_batches, [None] * micro_batches, [])
        assert pipeline_orders(schedule, devices, micro_batches)[rank] == done


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 2), (4, 4), (4, 8), (8, 16), (1, 5)])
def test_bubbles_are_those_of_the_papers(devices: int, micro_batches: int) -> None:
    """(p - 1) / m for GPipe and 1F1B, a v-th of it interleaved (Narayanan et al. 2021, section 2.2); of ZB-H1, with F,
    B and W equally long, a third (Qi et al. 2023, table 2)."""
    whole = (devices - 1) / micro_batches
    for schedule in ("gpipe", "1f1b"):
        timeline = pipeline_timeline(schedule, devices, micro_batches, [EQUAL] * devices)
        assert timeline.bubble == pytest.approx(whole)
        assert timeline.seconds == pytest.approx((micro_batches + devices - 1) * EQUAL.total)
    for virtual in (2, 3):
        shorter = [StageTimes(1 / virtual, 1 / virtual, 1 / virtual)] * (devices * virtual)
        timeline = pipeline_timeline("interleaved", devices, micro_batches, shorter)
        assert timeline.bubble == pytest.approx(whole / virtual)
    if micro_batches >= 2 * devices - 1:
        zero = pipeline_timeline("zero-bubble", devices, micro_batches, [EQUAL] * devices)
        assert zero.bubble == pytest.approx(whole / 3)


def test_devices_hold_as_many_activations_as_the_schedules_say() -> None:
    held = {}
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        timeline = pipeline_timeline(schedule, 4, 8, [EQUAL] * 4)
        held[schedule] = [timeline.in_flight(device) for device in range(4)]
    assert held == {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1], "zero-bubble": [4, 3, 2, 1]}


def test_one_slow_stage_sets_the_pace() -> None:
    """Under GPipe the forward half is the classic flow shop: all stages once, and the slowest m - 1 times more."""
    stages = [StageTimes(time, time, 0.0) for time in (1.0, 2.0, 5.0, 1.0)]
    assert pipeline_timeline("gpipe", 4, 6, stages).seconds == pytest.approx(2 * (9.0 + 5 * 5.0))


def test_sends_delay_what_follows_between_devices_alone() -> None:
    send = 0.25
    assert pipeline_timeline("gpipe", 3, 1, [EQUAL] * 3, send).seconds == pytest.approx(3 * 3 + 4 * send)
    assert pipeline_timeline("interleaved", 1, 1, [EQUAL] * 2, send).seconds == pytest.approx(6.0)


SCHEDULES = st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"])
CASES = st.tuples(SCHEDULES, st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))


@settings(max_examples=80, deadline=None)
@given(CASES, st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=12, max_size=12), st.integers(0, 3))
def test_any_stages_run_as_early_as_their_needs_allow(
    case: tuple[str, int, int, int], times: list[tuple[int, int, int]], send: int
) -> None:
    """Against repeated relaxation of every constraint until nothing moves: the longest path, found another way."""
    schedule, devices, asked, virtual = case
    virtual = 1 if schedule in ("gpipe", "1f1b") else virtual
    micro_batches = fill_pipeline(asked, devices, schedule)
    stages = [StageTimes(*map(float, row)) for row in times[: devices * virtual]]
    timeline = pipeline_timeline(schedule, devices, micro_batches, stages, send)
    found = {(done.kind, done.stage, done.micro): done.end for row in timeline.rows for done in row}
    assert found == pytest.approx(relaxed(timeline, stages, send if devices > 1 else 0))
    busiest = max(timeline.busy(device) for device in range(devices))
    assert timeline.seconds >= busiest
    assert busiest == pytest.approx(
        max(micro_batches * sum(stage.total for stage in stages[device::devices]) for device in range(devices))
    )


def relaxed(timeline: Timeline, stages: list[StageTimes], send: float) -> dict[tuple[str, int, int], float]:
    """Return the end of every pass, raised from zero until each constraint holds."""
    split = timeline.schedule == "zero-bubble"
    lasts = [
        {"F": stage.forward, "B": stage.backward + (0 if split else stage.weights), "W": stage.weights}
        for stage in stages
    ]
    orders = [[(done.kind, done.stage, done.micro) for done in row] for row in timeline.rows]
    after = {order[i]: order[i - 1] for order in orders for i in range(1, len(order))}
    ends = {key: 0.0 for order in orders for key in order}
    while True:
        before = dict(ends)
        for kind, stage, micro in ends:
            needs = [ends[after[kind, stage, micro]]] if (kind, stage, micro) in after else [0.0]
            if kind == "F" and stage:
                needs.append(ends["F", stage - 1, micro] + send)
            if kind == "B":
                needs.append(ends["F", stage, micro])
            if kind == "B" and stage < len(stages) - 1:
                needs.append(ends["B", stage + 1, micro] + send)
            if kind == "W":
                needs.append(ends["B", stage, micro])
            ends[kind, stage, micro] = max(needs) + lasts[stage][kind]
        if ends == before:
            return ends


def test_a_trace_has_an_event_for_every_pass_in_microseconds() -> None:
    timeline = pipeline_timeline("1f1b", 2, 3, [StageTimes(1e-3, 1e-3, 1e-3)] * 2)
    events = json.loads(pipeline_trace(timeline))["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    assert len(passes) == 2 * 2 * 3
    assert max(event["ts"] + event["dur"] for event in passes) == pytest.approx(timeline.seconds * 1e6)
    assert {event["tid"] for event in passes} == {0, 1}


def test_a_picture_is_sound_xml_with_a_box_for_every_pass() -> None:
    timeline = pipeline_timeline("zero-bubble", 4, 8, [EQUAL] * 4)
    root = ET.fromstring(timelines_svg([timeline]))
    assert len(root.findall(".//{*}rect/{*}title")) == 4 * 8 * 3


@pytest.mark.parametrize(
    ("schedule", "devices", "micro_batches", "stages"),
    [("fastest", 2, 2, 2), ("gpipe", 2, 2, 4), ("interleaved", 4, 9, 8), ("1f1b", 2, 2, 3), ("1f1b", 2, 2, 0)],
)
def test_what_no_schedule_can_run_is_refused(schedule: str, devices: int, micro_batches: int, stages: int) -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline_timeline(schedule, devices, micro_batches, [EQUAL] * stages)
    assert caught.value.because and caught.value.try_

"""What would change the choice, against complete searches on both sides of every switch."""

from __future__ import annotations

import dataclasses
import math

import pytest
from plan_examples import cluster, measured, plans_of
from tests_shared import VOCAB, PaddedText

from paceline.cluster.vary import varied_figures
from paceline.errors import DoesNotFit
from paceline.plan.cost.rates import Rates
from paceline.plan.explain.screen import screen_lines
from paceline.plan.planned import Planned, plan_task
from paceline.plan.risk.choice_switches import WIDEST, Switch
from paceline.plan.risk.sensitivity import PRECISE, calibrated_as
from paceline.plan.search.found import SearchResult
from paceline.plan.search.search import search
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.arguments import make_spec
from paceline.spec.cluster import CalibrationStep, Cluster, Link
from paceline.spec.load import Spec, load_spec
from paceline.spec.task import ModelSpec, Task
from paceline.units import Amount

TASK = ["task.model=llama-8b", "task.data.seq_len=8192", "task.global_batch=128 samples", "task.stop=100 steps"]
MACHINE = ["cluster.device=h100-sxm", "cluster.devices=16"]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Spec:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("A paceline is a line of riders who share the work. " * 20000)
    return load_spec(None, [*TASK, *MACHINE, f"task.data.source={path}"])


@pytest.fixture(scope="module")
def planned(spec: Spec) -> Planned:
    return plan_task(spec)


def searched(planned: Planned, where: Cluster, batch: int = 0) -> SearchResult:
    return search(
        planned.profile, where, planned.spec.plan, batch_samples=batch or planned.batch_samples, steps=planned.steps
    )


def behind(planned: Planned, where: Cluster) -> float:
    """Return how far the chosen plan is behind the best of a complete search elsewhere; infinity where it is not."""
    found = searched(planned, where)
    places = [place for place, chosen in enumerate(plans_of(found)) if chosen == planned.plan]
    return float(found.candidates.scores[places[0]] / found.candidates.scores.min()) if places else math.inf


def switches(planned: Planned, figure: str) -> list[Switch]:
    return [switch for switch in planned.sensitivity.switches if switch.figure == figure]


def test_every_figure_is_told_once_as_a_switch_or_as_steady(planned: Planned) -> None:
    found = planned.sensitivity
    names = {switch.figure for switch in found.switches}
    assert names & set(found.steady) == set()
    assert names | set(found.steady) == {
        "links in a node", "links between nodes", "memory bandwidth", "matrix products", "memory of a device",
        "devices", "global batch", "length of a sample",
    }  # fmt: skip
    assert names, "something changes the choice"


@pytest.mark.deep
def test_beyond_a_switch_of_a_rate_the_choice_is_another_and_before_it_is_not(planned: Planned) -> None:
    checked = 0
    for varied in varied_figures(planned.cluster, planned.plan.precision):
        for end in (WIDEST, 1 / WIDEST):
            found = [s for s in switches(planned, varied.name) if (s.factor > 1) == (end > 1)]
            if not found:
                assert behind(planned, varied.cluster(end)) <= TIE_RATIO * 1.01, varied.name
                continue
            (switch,) = found
            assert behind(planned, varied.cluster(switch.factor)) > TIE_RATIO
            inside = switch.factor / PRECISE if end > 1 else switch.factor * PRECISE
            assert behind(planned, varied.cluster(inside)) <= TIE_RATIO * 1.01
            assert switch.plan is not None and switch.plan != planned.plan
            checked += 1
    assert checked


def test_memory_switches_where_the_chosen_plan_no_longer_fits_or_another_begins_to(planned: Planned) -> None:
    device = planned.cluster.device
    for switch in switches(planned, "memory of a device"):
        for nudge, beyond in ((1.002, True), (0.998, False)):
            factor = switch.factor * (nudge if switch.factor > 1 else 1 / nudge)
            size = measured(device.memory_bytes.value * factor)
            where = dataclasses.replace(planned.cluster, device=dataclasses.replace(device, memory_bytes=size))
            try:
                assert (behind(planned, where) > TIE_RATIO) == beyond
            except DoesNotFit:
                assert beyond and switch.plan is None
    assert switches(planned, "memory of a device"), "with a quarter of the memory it never fits"


def test_another_batch_has_the_winner_of_a_search_of_its_own(planned: Planned) -> None:
    for switch in switches(planned, "global batch"):
        found = searched(planned, planned.cluster, int(planned.batch_samples * switch.factor))
        best = found.best.plan.layout
        assert switch.plan is not None
        mine = [getattr(switch.plan.layout, axis) for axis in ("tp", "pp", "cp", "ep")]
        assert mine == [getattr(best, axis) for axis in ("tp", "pp", "cp", "ep")] or switch.gain is None


def test_a_figure_is_varied_alone(planned: Planned) -> None:
    where = planned.cluster
    for varied in varied_figures(where, "bf16"):
        other = varied.cluster(2.0)
        assert other != where and varied.cluster(1.0) == where
        same = {
            "links in a node": other.links[0].bytes_per_second.value == 2 * where.links[0].bytes_per_second.value,
            "links between nodes": other.links[1].bytes_per_second.value == 2 * where.links[1].bytes_per_second.value,
            "memory bandwidth": other.device.memory_bytes_per_second.value
            == 2 * where.device.memory_bytes_per_second.value,
            "matrix products": other.device.matmul_flops["bf16"][0][1] == 2 * where.device.matmul_flops["bf16"][0][1],
        }
        assert [name for name, changed in same.items() if changed] == [varied.name]
    assert varied_figures(cluster(1), "fp32")[0].name == "memory bandwidth", "one device has no links"
    ranks = varied_figures(cluster(2), "fp32")[0]
    assert ranks.name == "links between ranks" and ranks.text(2.0) == "16 Gb/s"


def test_a_probes_steps_do_not_take_back_what_was_varied() -> None:
    step = CalibrationStep("fp32", 512, 128, 0.5, 0.05, 1_000_000, 2e9, 1e8, 1e6, 30)
    device = dataclasses.replace(cluster().device, calibration=(step,))
    here = cluster(2, links=(Link("process", measured(1e-4), measured(1e9), {"all_reduce": 2e9}),), device=device)
    before = Rates(device, "fp32").factor
    for varied in varied_figures(here, "fp32"):
        plain = varied.cluster(0.5)
        kept = calibrated_as(plain, device)
        assert Rates(kept.device, "fp32").factor == pytest.approx(before)
        if varied.name.startswith("links"):
            assert plain.links[0].collective_bytes_per_second == {"all_reduce": 1e9}
        else:
            assert Rates(plain.device, "fp32").factor < before * 0.999


def test_rows_of_a_programs_own_are_as_long_as_they_are() -> None:
    """`plan --explain` of a task in Python ended in a TypeError where its rows were an object of the program's."""
    task = Task(
        model=ModelSpec("llama-1m", vocab=VOCAB), data=PaddedText(), global_batch=Amount(8, "samples"),
        stop=Amount(10, "steps"),
    )  # fmt: skip
    planned = plan_task(make_spec(task, "auto", {"device": "h100-sxm", "devices": 1}))
    found = "\n".join(screen_lines(planned))
    assert "global batch" in found and "length of a sample" not in found

"""Preemption in the plan's expected run, held against the simulation of the same nodes being taken away."""

from __future__ import annotations

import pytest

import paceline
from paceline.plan.planned import plan_task
from paceline.plan.risk.expected import _returns_waited
from paceline.spec.load import load_spec

WORDS = [
    "task.model=llama-70b", "task.data.seq_len=4096", 'task.global_batch="4 Mi tokens"', 'task.stop="20000 steps"',
    'task.data.max_bytes="100 kB"', "cluster.device=h100-sxm", "cluster.devices=512",
    "cluster.reliability.mtbf_hours_per_device=50000",
]  # fmt: skip
OFTEN = [
    "cluster.reliability.preemption_hours_per_node=100", 'cluster.reliability.preemption_return="1 h"',
    "cluster.reliability.spare_nodes=3",
]  # fmt: skip


@pytest.mark.parametrize("notice", ["2 min", "1 s"], ids=["announced", "at once"])
def test_the_expected_run_with_preemption_is_that_of_the_simulation(notice: str) -> None:
    words = [*WORDS, *OFTEN, f'cluster.reliability.preemption_notice="{notice}"']
    planned = plan_task(load_spec(None, words))
    simulated = paceline.simulate(planned.spec, runs=10, policies=["spares"]).results[0].summary
    expected = planned.expected
    assert expected.goodput == pytest.approx(simulated.goodput.mean, abs=0.03), (expected.terms, simulated)
    without = plan_task(load_spec(None, WORDS)).expected
    assert without.goodput - expected.goodput > 0.03, "preemption is what is looked at here"
    assert expected.usd > without.usd and expected.interruptions > without.interruptions + 1
    assert sum(term.value for term in expected.terms) == pytest.approx(expected.wall_seconds.value)


def test_a_job_waits_for_as_many_nodes_as_spare_ones_do_not_replace() -> None:
    none, one, two = (0.4965853 * 0.7**n / d for n, d in ((0, 1), (1, 1), (2, 2)))  # Poisson of mean 0.7
    assert _returns_waited(0.7, 0) == pytest.approx(none + one * 1.5 + two * (1 + 1 / 2 + 1 / 3), abs=0.1)
    assert _returns_waited(1e-6, 0) == pytest.approx(1.0, abs=1e-5), "without a spare node each is waited for"
    assert _returns_waited(1e-6, 1) == pytest.approx(0.5e-6, rel=1e-3), "two are away then, the first is enough"
    assert _returns_waited(5.0, 40) == pytest.approx(0.0, abs=1e-12)
    assert _returns_waited(501.0, 20) == pytest.approx(_returns_waited(499.0, 20), rel=0.01)

"""What copies in other nodes' memory are forecast to take."""

from __future__ import annotations

import pytest

from paceline.plan.explain.explain import explain_lines
from paceline.plan.planned import plan_task
from paceline.spec.load import load_spec

CLUSTER = ["cluster.device=h100-sxm", "cluster.devices=16", "cluster.devices_per_node=8", "plan.dp_shard=16"]


def test_copies_are_priced_from_a_ranks_part_and_only_where_they_are_made() -> None:
    asked = [*CLUSTER, "run.nodes.count=2", "run.checkpoints.memory_every=4 steps"]
    planned = plan_task(load_spec(None, asked))
    kept, made, sent, waited = planned.forecast.copies
    part = sum(term.value for term in planned.forecast.memory if term.kind in ("weights", "optimizer"))
    assert kept.value == 2 * part and made.value == 7 * part
    link = planned.cluster.links[-1]
    rate = planned.spec.cluster.reliability.host_bytes_per_second_per_device
    assert sent.value == pytest.approx((link.latency_seconds.value + part / link.bytes_per_second.value) / 4)
    assert waited.clock == "other" and waited.value == pytest.approx(part / rate / 4)
    assert any("copies in the memory of other nodes" in line for line in explain_lines(planned))
    alone = plan_task(load_spec(None, [*CLUSTER, "run.checkpoints.memory_every=4 steps"]))
    assert alone.forecast.copies == ()

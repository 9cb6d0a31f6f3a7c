"""What torch cannot do is refused in the words of its heading in the guide, and held by a test that tries it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from plan_examples import cluster, opened, plans_of, profile

from paceline.plan.feasible import experts, tensor, torch_version
from paceline.plan.feasible.stages import split_backward_refusal
from paceline.plan.search.search import search
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import TensorLimits

INSTALLED = torch_version.installed_torch
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/guide/plan/layouts.md").read_text(encoding="utf-8")
ZERO_BUBBLE = Plan(layout=Layout(pp=2), schedule="zero-bubble")
PIPELINES = "tests/run/parallel/pipeline/test_pipeline.py"
SPLIT = f"{PIPELINES}::test_a_split_backward_pass_still_fails_where_the_planner_refuses_it"


def zero_bubble(**changes: object) -> str | None:
    return split_backward_refusal(dataclasses.replace(ZERO_BUBBLE, **changes))


def uneven_widths() -> str | None:
    limits = TensorLimits({}, (10,), (10,), False)
    return tensor.refusal(Layout(tp=2, dp_shard=4), dataclasses.replace(profile(), tensor_limits=limits))


def uneven_experts() -> str | None:
    return experts.refusal(Layout(dp_shard=8, ep=2), profile(experts=2, expert_widths=(10,)))


LIMITS = [
    ("zero-bubble with copies or shards", zero_bubble(layout=Layout(pp=2, dp_shard=2)), SPLIT),
    ("zero-bubble with copies or shards", zero_bubble(layout=Layout(pp=2, dp_replicate=2)), SPLIT),
    ("zero-bubble with copies or shards", zero_bubble(layout=Layout(pp=2, cp=2)), SPLIT),
    ("zero-bubble with selective recompute", zero_bubble(recompute="selective"), SPLIT),
    ("zero-bubble with compiled blocks", zero_bubble(compile=True), SPLIT),
    (
        "Uneven parts of a second dimension",
        uneven_widths(),
        "tests/run/parallel/test_tensor_parallel.py::test_torch_still_shards_uneven_columns_not_at_all",
    ),
    (
        "Uneven parts of a second dimension",
        uneven_experts(),
        "tests/run/parallel/expert/test_experts.py::test_torch_still_cannot_shard_a_later_dimension_unevenly",
    ),
]


def section(heading: str) -> str:
    """Return what stands under a heading of the guide, up to the next one."""
    found = re.search(rf"^### {re.escape(heading)}$(.*?)(?=^##|\Z)", PAGE, flags=re.M | re.S)
    assert found is not None, heading
    return found[1]


@pytest.mark.parametrize(("heading", "because", "holds"), LIMITS)
def test_the_guide_quotes_the_refusal_under_its_heading(heading: str, because: str | None, holds: str) -> None:
    assert because is not None
    quotes = re.findall(r"^> (.*)$", section(heading), flags=re.M)
    assert any(because.endswith(quote) for quote in quotes), because
    file, name = holds.split("::")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("version", "ep", "zero_bubble_needs"),
    [("2.11.0+cu130", "2.12", "2.13"), ("2.12.1", None, "2.13"), ("2.13.0+cpu", None, None), ("3.0.0a1", None, None)],
)
def test_what_an_older_torch_lacks(
    monkeypatch: pytest.MonkeyPatch, version: str, ep: str | None, zero_bubble_needs: str | None
) -> None:
    """Neither is searched, and each is refused with what it needs and what is there."""
    monkeypatch.setattr(torch_version.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch_version, "installed_torch", INSTALLED.__wrapped__)
    mixture = opened(profile(8, heads=8, kv_heads=4, experts=8, expert_parameters=800_000, routed_elements=1e5))
    because = experts.refusal(Layout(dp_shard=2, ep=2), mixture), zero_bubble()
    for found, needed in zip(because, (ep, zero_bubble_needs), strict=True):
        assert (found is None) == (needed is None)
        assert found is None or (f"needs torch {needed}, " in found and "and torch 2.1" in found)
    plans = plans_of(search(mixture, cluster(4), PlanSpec(), batch_samples=8, steps=10))
    assert {plan.layout.ep for plan in plans} == ({1} if ep else {1, 2, 4})
    assert ("zero-bubble" in {plan.schedule for plan in plans}) == (zero_bubble_needs is None)


def test_every_heading_is_a_limit() -> None:
    part = PAGE[PAGE.index("## What torch cannot do") :]
    part = part[: part.index("\n## ")] if "\n## " in part else part
    assert set(re.findall(r"^### (.*)$", part, flags=re.M)) == {heading for heading, _, _ in LIMITS}

"""A spec on groups of different devices, planned and told: `paceline plan` where `[cluster.groups]` stands."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.cluster.groups import Group, resolve_groups
from paceline.errors import ConfigError
from paceline.plan.placement.uneven import Uneven, Work, plan_uneven
from paceline.spec.amounts import batch_samples, total_steps
from paceline.spec.optimizers import optimizer_key
from paceline.spec.profile import ModelProfile
from paceline.task.data.facts import DataFacts, data_facts
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.spec.load import Spec

WIDTH = 100
NOT_YET = "ranks of a run read equal parts of a batch and stages are split by cost alone"


@dataclass(frozen=True)
class Grouped:
    """A task on groups of different devices: the ways to use them all, fastest first, and those that do not fit."""

    groups: tuple[Group, ...]
    profile: ModelProfile
    facts: DataFacts
    ways: tuple[Uneven, ...]
    refused: tuple[str, ...]
    batch_samples: int
    steps: int
    remarks: tuple[str, ...]


def refuse_groups(spec: Spec) -> None:
    """Raise ConfigError where a spec has groups: they are priced, and cannot be run yet."""
    if spec.cluster.groups:
        names = ", ".join(spec.cluster.groups)
        raise ConfigError(
            f"cluster.groups ({names}) cannot be trained on yet",
            NOT_YET,
            "`paceline plan` prices them; to train, the devices of one group in [cluster]",
        )


def plan_groups(spec: Spec, *, say: Callable[[str], None] | None = None) -> Grouped:
    """Return the ways of a spec's task on its groups. Raises DoesNotFit, and the errors of data and model."""
    from paceline.plan.session import profile_task

    task = spec.task
    groups = resolve_groups(spec.cluster)
    facts = data_facts(task.data, say)
    profile = profile_task(task, facts)
    batch = batch_samples(task, facts.items_per_sample)
    steps = total_steps(task, batch, facts.items_per_sample, facts.samples)
    ways, refused = plan_uneven(Work(profile, spec.plan, batch, steps, optimizer_key(task.optimizer)), groups)
    remarks = (*(remark for group in groups for remark in group.remarks), *facts.notes)
    return Grouped(groups, profile, facts, ways, refused, batch, steps, remarks)


def grouped_lines(found: Grouped, explain: bool = False) -> list[str]:
    """Return the best way in words, every way and remark where `explain` asks for it; at most 100 columns."""
    counts = " + ".join(f"{group.cluster.devices} x {group.cluster.device.name}" for group in found.groups)
    lines = _wrap("task     ", f"{found.profile.name} on {found.facts.description} · {found.steps:,} steps")
    lines += _wrap("cluster  ", f"{counts} (priced only: {NOT_YET})")
    for way in found.ways if explain else found.ways[:1]:
        lines += _way_lines(way)
    if not explain:
        others = [way.strategy for way in found.ways[1:]]
        return [*lines, *([f"other    {', '.join(others)}: --explain"] if others else [])]
    for because in found.refused:
        lines += _wrap("refused  ", because)
    for remark in found.remarks:
        lines += _wrap("note     ", remark)
    return lines


def _way_lines(way: Uneven) -> list[str]:
    from paceline.plan.explain.explain import bill_text

    step = way.step_seconds
    sure = f" ±{(step.high / step.value - 1):.0%}" if math.isfinite(step.value) else ""
    lines = _wrap("plan     ", f"{way.strategy}: {_seconds(step.value)}/step{sure} · {_seconds(way.run_seconds.value)}")
    for part in way.parts:
        share = f"{part.samples} samples" if way.strategy == "replicas" else f"{part.blocks} blocks"
        own = f"{_seconds(part.forecast.step_seconds.value)}, {format_bytes(part.forecast.peak_bytes.value)}/device"
        lines += _wrap(f"  {part.group:12} ", f"{share} · {part.plan} · {own}")
    lines += _wrap("  joining      ", f"{_seconds(way.joining_seconds)}: {way.joining_text}")
    for term in way.bill:
        lines += _wrap(f"  {term.name:12} ", bill_text(term))
    return lines


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "unknown time"


def _wrap(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False,
                         break_long_words=False) or [head.rstrip()]  # fmt: skip

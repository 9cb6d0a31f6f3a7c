"""Other sizes: whether the choice is the same with more or fewer devices, a larger batch, longer samples.

Each makes a space of plans of its own. They are doubled and halved, twice, with the chosen schedule of the pipeline and
micro-batches of powers of two; the choice stays the same while a plan with the chosen degrees of the model axes is
within a tie of the best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from paceline.cluster.resolve import resolve_cluster
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.choice import Choice, Prepared
from paceline.plan.prepare import prepare_task
from paceline.plan.risk.choice_switches import WIDEST, Switch
from paceline.plan.search.search import search
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.cluster import Cluster
from paceline.spec.layout import MODEL_AXES
from paceline.spec.optimizers import optimizer_key
from paceline.spec.plan import Plan
from paceline.spec.task import DataSpec
from paceline.task.profile.of_task import is_built_in

Other = tuple[Prepared, Cluster]


def searched_switches(planned: Choice) -> Iterator[tuple[str, list[Switch]]]:
    """Yield the number of devices, the batch and the length of samples, each with where it changes the choice."""
    batch, length = planned.batch_samples, planned.facts.items_per_sample
    if not planned.cluster.host:  # another number of devices of this machine was never measured
        devices = planned.cluster.devices
        yield "devices", _switches(planned, "devices", _with_devices, lambda f: f"{devices * f:,.0f} devices")
    yield "global batch", _switches(planned, "global batch", _with_batch, lambda f: f"{batch * f:,.0f} samples")
    # Rows of a program's own are as long as they are.
    if is_built_in(planned.spec.task, planned.facts) and isinstance(planned.spec.task.data, DataSpec):
        name = "length of a sample"
        yield name, _switches(planned, name, _with_length, lambda f: f"{length * f:,.0f} tokens")


def _switches(
    planned: Choice, name: str, other: Callable[[Choice, float], Other | None], text: Callable[[float], str]
) -> list[Switch]:
    """Return the first factor upwards and the first downwards at which the choice changes."""
    found = []
    for factors in ((2.0, WIDEST), (1 / 2, 1 / WIDEST)):
        for factor in factors:
            made = other(planned, factor)
            if made is None:
                break
            plan, gain = _best_there(planned, *made)
            if plan is None or gain is None or gain > 0:
                found.append(Switch(name, factor, text(factor), plan, gain, factor))
                break
    return found


def _best_there(planned: Choice, prepared: Prepared, cluster: Cluster) -> tuple[Plan | None, float | None]:
    """Return the best plan on a cluster, and how much less it takes than the best plan with the chosen degrees.

    0.2 stands for a fifth less, 0 for a tie. The plan is None where no plan fits, the gain where none with the chosen
    degrees does.
    """
    chosen = planned.plan
    spec = dataclasses.replace(planned.spec.plan, deadline=None, budget_usd=None)
    if chosen.layout.pp > 1 and spec.schedule == "auto":
        spec = dataclasses.replace(spec, schedule=chosen.schedule, virtual_stages=chosen.virtual_stages)
    try:
        found = search(
            prepared.profile,
            cluster,
            spec,
            batch_samples=prepared.batch_samples,
            steps=prepared.steps,
            optimizer=optimizer_key(prepared.spec.task.optimizer),
            coarse=True,
            scored=planned.spec.task.selection.scored,
            stages=planned.spec.run.stages_within(planned.steps),
        )
    except (DoesNotFit, ConfigError):  # ConfigError: stated degrees do not make that number of devices
        return None, None
    columns, scores = found.candidates.columns, found.candidates.scores
    same = np.all([getattr(columns, axis) == getattr(chosen.layout, axis) for axis in MODEL_AXES], axis=0)
    if not same.any():
        return found.best.plan, None
    ratio = float(np.min(scores[same]) / np.min(scores))
    return found.best.plan, 1 - 1 / ratio if ratio > TIE_RATIO else 0.0


def _whole(count: float) -> bool:
    return count >= 1 and count == int(count)


def _with_devices(planned: Choice, factor: float) -> Other | None:
    count = planned.cluster.devices * factor
    if not _whole(count):
        return None
    try:
        cluster, _ = resolve_cluster(dataclasses.replace(planned.spec.cluster, devices=int(count)))
    except ConfigError:  # not a whole number of nodes
        return None
    return planned.prepared, cluster


def _with_batch(planned: Choice, factor: float) -> Other | None:
    count = planned.batch_samples * factor
    if not _whole(count):
        return None
    return dataclasses.replace(planned.prepared, batch_samples=int(count)), planned.cluster


def _with_length(planned: Choice, factor: float) -> Other | None:
    length = planned.facts.items_per_sample * factor
    if not _whole(length):
        return None
    task = planned.spec.task
    task = dataclasses.replace(task, data=dataclasses.replace(task.data, seq_len=int(length)))
    try:
        return prepare_task(dataclasses.replace(planned.spec, task=task)), planned.cluster
    except ConfigError:  # the batch is no whole number of such samples
        return None

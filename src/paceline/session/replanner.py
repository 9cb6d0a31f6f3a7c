"""The plan of a run that goes on with another number of devices: the same task, planned and proven anew."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence

from paceline.cluster.groups import group_specs
from paceline.errors import ConfigError, DoesNotFit, PacelineError, VerificationFailed
from paceline.plan.planned import Planned, plan_task
from paceline.session.ready.brief_of_plan import make_brief
from paceline.session.ready.prove import Proven, prove
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import PlanSpec
from paceline.supervise.again.elastic import Replanned
from paceline.supervise.groups import Process, kill_group
from paceline.supervise.supervisor import starter
from paceline.supervise.told.brief import Brief
from paceline.units import format_durations, plural
from paceline.verify.process.group import cold_words

Say = Callable[[str], None]
LOWEST = 19  # nice
WITH_LAYOUT = (
    "zero",
    "gradients",
    "micro_batch",
    "rows",
    "stages",
    "virtual_stages",
)  # constraints that a layout's own follow from


class Replanner:
    """Plans a task for other numbers of devices than it began with, each once."""

    def __init__(self, spec: Spec, say: Say, devices_per_node: int = 0) -> None:
        """`devices_per_node` is 0 where all are on this machine."""
        self._spec, self._say, self._per_node = spec, say, devices_per_node
        self._proofs = ProofsAtHand()
        self._planned: dict[int, tuple[Planned, bool]] = {}
        self._made: dict[int, tuple[Planned, bool, Proven]] = {}
        self._refused: dict[int, PacelineError] = {}

    def __call__(self, devices: int, now: Brief, gives_way: bool = False) -> Replanned:
        """Return the plan for so many devices. It is proven first, as any plan before it trains.

        A proof that was made before is remembered; one that is made now delays the run by its seconds, since a run that
        recovers into wrong numbers would not have recovered. The processes of a proof that `gives_way` have the lowest
        priority. Raises DoesNotFit and VerificationFailed, and RunIsOver once this is closed.
        """
        self._proofs.check()
        if devices in self._refused:
            raise self._refused[devices]
        if devices not in self._made:
            try:
                planned, is_relaxed = self._planned.get(devices) or self.planned(devices, now.plan.precision)
                self._planned[devices] = planned, is_relaxed  # also for who asks while it is being proven
                proven = prove(planned, self._say, self._proofs.lowest if gives_way else self._proofs)
                self._made[devices] = planned, is_relaxed, proven
            except (ConfigError, DoesNotFit, VerificationFailed) as error:
                self._refused[devices] = error
                raise
        planned, is_relaxed, proven = self._made[devices]
        before, after = now.step_seconds, planned.forecast.step_seconds.value
        evidence = {
            "devices": devices,
            "plan": {"from": str(now.plan), "to": str(planned.plan)},  # a first rank that stays tells of no start
            "step_seconds": {"from": before, "to": after},
            "usd": planned.forecast.usd.value,
            "proof": proven.record.text if proven.record else "none",
        }
        takes, took = format_durations(after, before)
        because = f"for {plural(devices, 'device')}: a step takes {takes} by forecast, where it took {took}"
        because += "; the layout that the spec asks for needs another number" if is_relaxed else ""
        decision = DecisionRecord("replan", str(now.plan.layout), str(planned.plan.layout), because, evidence)
        # Of the world that follows, and no part of what its first rank says of its start.
        return Replanned(make_brief(planned, proven.record, proven.decisions), decision)

    def close(self) -> None:
        """End the proofs at hand, and make no more: the run is over, and whoever started it may go on."""
        self._proofs.close()

    def planned(self, devices: int, precision: str) -> tuple[Planned, bool]:
        """Return a plan for so many devices, and whether the spec's constraints on the layout were given up for it."""
        asked = dataclasses.replace(self._spec.plan, precision=precision)
        cluster = with_devices(self._spec.cluster, devices)
        if self._per_node:
            # Of machines that have lost some of their devices nobody says which: those left count as smaller ones.
            here = math.gcd(devices, self._per_node) if devices > self._per_node else devices
            cluster = dataclasses.replace(cluster, devices_per_node=here)
        spec = dataclasses.replace(self._spec, cluster=cluster, plan=asked)
        try:
            return plan_task(spec), False
        except (ConfigError, DoesNotFit):
            open_ones = (*(field.name for field in dataclasses.fields(Layout)), *WITH_LAYOUT)
            free = {name: getattr(PlanSpec(), name) for name in open_ones}
            return plan_task(dataclasses.replace(spec, plan=dataclasses.replace(asked, **free))), True


class RunIsOver(PacelineError):
    """A plan was asked for, or was in the making, when the run that it was for had ended."""


class ProofsAtHand:
    """Starts the processes of proofs, and ends those that run when nobody wants the proofs any more."""

    def __init__(self) -> None:
        self.lowest = GivesWay(self)
        self._running: list[Process] = []
        self._changing, self._is_over = threading.Lock(), False

    def check(self) -> None:
        """Raise RunIsOver where no proof is wanted any more."""
        if self._is_over:
            raise RunIsOver("no plan for another number of devices", "the run has ended", "nothing: none is needed")

    def is_ready(self) -> bool:
        """Return True: it needs nothing."""
        return True

    def start_apart(self, work: Sequence[str], environ: Mapping[str, str]) -> Process:
        """Start the process of a proof of these words, the first of which is the kind of work."""
        with self._changing:
            self.check()
            process = starter(cold_words(work[1:]), environ)({})
            self._running = [*(each for each in self._running if each.returncode is None), process]
        return process

    def close(self) -> None:
        """End what runs by force; who waits for it collects it."""
        with self._changing:
            self._is_over = True
        for process in self._running:
            with contextlib.suppress(OSError):  # it was collected just now
                if process.returncode is None:
                    kill_group(process)


class GivesWay:
    """Starts the process of a proof with the lowest priority, which those inherit that it forks."""

    def __init__(self, proofs: ProofsAtHand) -> None:
        self._proofs = proofs

    def is_ready(self) -> bool:
        """Return True: it needs nothing."""
        return True

    def start_apart(self, work: Sequence[str], environ: Mapping[str, str]) -> Process:
        """Start the process of a proof of these words, the first of which is the kind of work."""
        process = self._proofs.start_apart(work, environ)
        with contextlib.suppress(OSError):  # it has ended already, or the system allows no other priority
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST)
        return process


def with_devices(spec: ClusterSpec, devices: int) -> ClusterSpec:
    """Return a cluster of so many devices. Of groups nobody says which has lost some: those left count as the first."""
    kinds = list(group_specs(spec).values()) if spec.groups else [spec]
    if spec.groups and devices == sum(own.devices for own in kinds):
        return spec
    return dataclasses.replace(kinds[0], devices=devices, devices_per_node=0)

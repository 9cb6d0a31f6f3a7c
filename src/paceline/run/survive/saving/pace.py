"""The pace of a run's checkpoints: the cadence of each tier, as the spec says or as measured costs make it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from paceline.checkpoint.beside.stage import bytes_to_stage
from paceline.run.process.world import World
from paceline.run.record.recorder import Recorder, SilentRecorder
from paceline.run.survive.saving.failures_seen import FailuresSeen, failures_seen
from paceline.run.survive.saving.intervals import (
    Cadence,
    ChosenInterval,
    Measured,
    choose,
    is_worth_a_change,
    mtbf_seconds,
)
from paceline.run.survive.saving.tiers import MEMORY
from paceline.simulate.failures import rates_of
from paceline.spec.load import Spec


@dataclass(frozen=True)
class KnownPace:
    """What a world leaves to the next one, by tier: the step of the last checkpoint, and what was chosen and measured.

    Without it a run whose ranks are lost more often than a checkpoint is due would never come to save one.
    """

    last: Mapping[str, int] = field(default_factory=dict)
    every_steps: Mapping[str, int] = field(default_factory=dict)  # none before the first choice
    measured: Mapping[str, Measured] = field(default_factory=dict)


class SavingPace:
    """When checkpoints are due. Rank 0 measures and chooses, and all ranks take what it chose."""

    def __init__(
        self,
        spec: Spec,
        run_dir: Path,
        every_steps: Mapping[str, int | None],
        begun_step: int,
        known: KnownPace = KnownPace(),
    ) -> None:
        """`every_steps` are the spec's steps between checkpoints of each tier; an automatic choice stays below.

        `known` is what the world before has left, the same on all ranks.
        """
        self._run_dir, self._seen, self._has_seen = run_dir, FailuresSeen(), False
        self.adapts = spec.run.checkpoints.interval == "auto"
        self._reliability, self._longest = spec.cluster.reliability, every_steps
        self.cadences = {
            name: Cadence(every, self.adapts, min(begun_step, known.last.get(name, begun_step)))
            for name, every in every_steps.items()
        }
        self.is_chosen = bool(known.every_steps)
        for name, chosen in known.every_steps.items():
            if every_steps.get(name):
                self.cadences[name].every_steps = chosen
        self._measured = {name: each.as_known() for name, each in known.measured.items() if self.is_chosen}
        self._before: dict[str, int] = {}  # the checkpoint before the last, of each tier that has tried one
        self._since = time.perf_counter()

    @property
    def known(self) -> KnownPace:
        """What the world after this one goes by."""
        every = {name: each.every_steps for name, each in self.cadences.items() if self.is_chosen and each.every_steps}
        return KnownPace({name: each.last for name, each in self.cadences.items()}, every, self._measured)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Take note that a step has ended."""
        now = time.perf_counter()
        for measured in self._measured.values():
            measured.stepped(now - self._since)
        self._step_seconds, self._since = now - self._since, now

    def saves_ended(self) -> None:
        """Take note that training goes on after saves: the next step begins here."""
        self._since = time.perf_counter()

    def saved_at(self, step: int, tiers: Sequence[str]) -> None:
        """Take note that these tiers have a checkpoint of the step, or have failed to make one."""
        self._before = {name: self.cadences[name].last for name in tiers}
        for name in tiers:
            self.cadences[name].last = step

    def given_up(self, made: Collection[str]) -> None:
        """Take note that the save of this moment was given up, but for the tiers in which it was `made` by then."""
        for name, before in self._before.items():
            if name not in made:
                self.cadences[name].last = before

    def saved(self, tier: str, stall_seconds: float, write_seconds: float) -> None:
        """Take note of what a save to the tier took."""
        if tier in self._measured:
            self._measured[tier].saved(stall_seconds, write_seconds)

    # ---- what is chosen --------------------------------------------------------------------------------------------

    def assume(self, tensors: Mapping[str, torch.Tensor], world: World) -> None:
        """Begin with what the spec assumes of the machines' rates. Every rank calls it after its first step."""
        size = bytes_to_stage(tensors)
        total = world.sum([float(size)])[0]
        copy = size / self._reliability.host_bytes_per_second_per_device
        write = {MEMORY: copy}
        for name in self.cadences:
            seconds = write.get(name, total / self._reliability.storage_bytes_per_second_per_node)
            self._measured[name] = Measured(self._step_seconds, copy, seconds)

    def choose(self, world: World, record: Recorder | SilentRecorder) -> None:
        """Take the intervals that cost the least by now, where they differ enough. Every rank calls it."""
        if not self._has_seen and world.is_first:
            self._seen = failures_seen(self._run_dir)
        self._has_seen = True
        chosen: dict[str, ChosenInterval] = world.share(self._choices(world) if world.is_first else {})
        for name, choice in chosen.items():
            cadence = self.cadences[name]
            if not self.is_chosen or is_worth_a_change(cadence.every_steps, choice.every_steps):
                record.decided(
                    f"{name} checkpoints", cadence.every_steps, choice.every_steps, choice.because, choice.evidence
                )
                cadence.every_steps = choice.every_steps
        self.is_chosen = True

    def _choices(self, world: World) -> dict[str, ChosenInterval]:
        device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
        rates = rates_of(device, self._reliability)
        found = {}
        for name, longest in self._longest.items():
            if longest and self.cadences[name].every_steps:
                # What the memory keeps is lost with its machine alone.
                spared = name != MEMORY and bool(self.cadences[MEMORY].every_steps)
                assumed = mtbf_seconds(rates, world.size, spared)
                # The run's failures do not tell which of them would have taken the machine along.
                mtbf = assumed if spared else self._seen.mtbf_seconds(assumed, world.size)
                found[name] = choose(self._measured[name], mtbf, longest, 0 if spared else self._seen.failures)
        return found

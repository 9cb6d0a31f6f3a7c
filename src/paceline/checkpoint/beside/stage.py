"""Host memory for snapshots: what a save needs of the moment is copied there, and training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.checkpoint.snapshot import Part, Snapshot, fingerprinted, live_parts, plain_json


@dataclass
class Staged:
    """A snapshot that may still be on its way from a device.

    Training on a device waits for that in the device's own queue: for `device_seconds`, when they are known.
    """

    taken: Snapshot
    copied: list[tuple[Any, Any]] = field(default_factory=list)  # CUDA events around the copies of a device
    device_seconds: float = 0.0

    @property
    def step(self) -> int:
        """Return the step of the snapshot."""
        return self.taken.step

    def arrived(self) -> Snapshot:
        """Return the snapshot when all of it is in host memory, with its fingerprints. Any thread may call it."""
        for begun, ended in self.copied:
            ended.synchronize()
            self.device_seconds += begun.elapsed_time(ended) / 1e3
        self.copied.clear()
        return fingerprinted(self.taken)


class HostStage:
    """Host memory that holds one snapshot at a time: made by the first, used again by those of the same parts.

    Memory for what comes from a device is pinned. The copies run on a stream of their own, and what the device computes
    next waits for them: an update must not change what is being copied.
    """

    def __init__(self) -> None:
        self._held: dict[Part, torch.Tensor] = {}
        self._streams: dict[torch.device, Any] = {}

    @property
    def bytes(self) -> int:
        """Return the host memory that is held."""
        return sum(part.bytes for part in self._held)

    def take(self, step: int, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any]) -> Staged:
        """Return the state of this moment. The snapshot before it is gone with that.

        Raises StorageError for what a checkpoint cannot hold.
        """
        live = dict(live_parts(tensors))
        self._held = {part: self._room(part, local) for part, local in live.items()}
        with torch.no_grad():
            copied = self._copy(live)
        taken = Snapshot(step, dict(self._held), plain_json(extra))
        return Staged(taken, copied)

    def release(self) -> None:
        """Let go of the memory."""
        self._held = {}

    def _room(self, part: Part, local: torch.Tensor) -> torch.Tensor:
        held = self._held.get(part)
        pinned = local.device.type == "cuda"
        if held is not None and held.is_pinned() == pinned:
            return held
        return torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)

    def _copy(self, live: Mapping[Part, torch.Tensor]) -> list[tuple[Any, Any]]:
        """Copy all parts; return the events around those of each device."""
        on_devices: dict[torch.device, list[Part]] = {}
        for part, local in live.items():
            if local.device.type == "cuda":
                on_devices.setdefault(local.device, []).append(part)
            else:
                self._held[part].copy_(local)
        return [self._copy_from(device, {part: live[part] for part in parts}) for device, parts in on_devices.items()]

    def _copy_from(self, device: torch.device, live: Mapping[Part, torch.Tensor]) -> tuple[Any, Any]:
        if (stream := self._streams.get(device)) is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        training = torch.cuda.current_stream(device)
        stream.wait_stream(training)
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begun.record(stream)
            for part, local in live.items():
                self._held[part].copy_(local, non_blocking=True)
                local.record_stream(stream)
            ended.record(stream)
        training.wait_event(ended)
        return begun, ended


def bytes_to_stage(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the host memory that a snapshot of these tensors takes on this rank."""
    return sum(part.bytes for part, _ in live_parts(tensors))

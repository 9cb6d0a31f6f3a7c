"""The name of a run, drawn at its first start and held by its checkpoints: by it remote storage tells runs apart."""

from __future__ import annotations

import secrets

from paceline.run.process.world import World


class RunName:
    """A run's name, the same on all ranks: what a checkpoint has, or one that was drawn now."""

    def __init__(self, world: World) -> None:
        """Every rank calls it."""
        self._name: str = world.share(secrets.token_hex(8) if world.is_first else "")

    def state(self) -> str:
        """Return what a checkpoint holds of it."""
        return self._name

    def load(self, state: str | None) -> None:
        """Take the name that a checkpoint has; those of earlier releases have none."""
        self._name = state or self._name

"""The name of a run, drawn at the first start and held by checkpoints: remote storage tells runs apart by name."""

from __future__ import annotations

import secrets

from paceline.run.process.world import World


class RunName:
    """A run's name: what a checkpoint has, or one that was drawn now. A run without remote storage draws none."""

    def __init__(self, draws: bool) -> None:
        """Ask nobody: a rank that comes anew into a world makes one, and those that were in the world before do not."""
        self._draws = draws
        self._name: str | None = secrets.token_hex(8) if draws else None

    def agree(self, world: World) -> None:
        """Take the first rank's name. Every rank of a world calls it, when each has what a checkpoint holds."""
        if self._draws:
            self._name = world.share(self._name)

    def state(self) -> str | None:
        """Return what a checkpoint holds of it."""
        return self._name

    def load(self, state: str | None) -> None:
        """Take the name that a checkpoint has; those of earlier releases have none."""
        self._name = state or self._name

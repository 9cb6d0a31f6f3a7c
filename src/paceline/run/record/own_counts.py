"""Numbers that a model changes by itself in every step, such as a count of its own calls."""

from __future__ import annotations

from torch import nn

from paceline.task.models.beside import numbers_beside

LOOKS = 3  # a number that the first call alone sets, such as the longest sequence so far, is no count


class OwnCounts:
    """Looks at a model after the first steps of a process, and says once which numbers changed in each of them."""

    def __init__(self) -> None:
        self._seen: list[dict[str, object]] = []

    def after_step(self, model: nn.Module) -> list[str]:
        """Return what to say of the model after another step: nothing, or one remark."""
        if len(self._seen) == LOOKS:
            return []
        self._seen.append(numbers_beside(model))
        if len(self._seen) < LOOKS:
            return []
        names = [name for name in self._seen[0] if len({seen[name] for seen in self._seen if name in seen}) == LOOKS]
        return [_remark(names)] if names else []


def _remark(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"'{names[0]}' of the model{more}: changes in every step and is no buffer, so no checkpoint holds it, and it "
        "moves with each micro-batch: where the model reads it, other layouts and a run that goes on after a stop "
        "train other numbers. A buffer is saved; a `before_step` callback knows the step"
    )

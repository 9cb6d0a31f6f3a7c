"""Which entries of a batch an objective reads. An entry that is never read has no effect, and the user is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from paceline.task.objective import Objective, next_token

# Of the built-in decoder. Where documents begin is read on devices that have a kernel for it.
READ_BY_NEXT_TOKEN = ("tokens", "labels", "documents", "document_starts", "positions", "mask", "real")
AUX_LOSS = "router_aux_loss_coef"  # of a Hugging Face config


class Watched(dict[str, Any]):
    """A batch that notes in `reads` whose values are read. To ask whether a name is there is not to read it."""

    def __init__(self, batch: dict[str, Any], reads: set[str]) -> None:
        super().__init__(batch)
        self._reads = reads

    def __getitem__(self, name: str) -> Any:
        self._reads.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:  # without it `f(**batch)` and `dict(batch)` would go past __getitem__
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, or the default."""
        if name in self:
            self._reads.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        """Take the value of a name out of the batch, and return it or the default."""
        self._reads.add(name)
        return super().pop(name, *default)

    def items(self) -> Any:
        """Return all names and values: they count as read."""
        self._reads.update(self.keys())
        return super().items()

    def values(self) -> Any:
        """Return all values: they count as read."""
        self._reads.update(self.keys())
        return super().values()

    def __or__(self, other: Any) -> Any:
        return dict(self.items()) | other

    def copy(self) -> Watched:
        """Return a copy that notes in the same place."""
        return Watched(dict(super().items()), self._reads)


class Reading:
    """An objective that is watched: after it has run, `unread` says which entries of its batches it never read."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._reads: set[str] = set()
        self._names: dict[str, None] = {}

    def __call__(self, model: Any, batch: Any) -> Any:
        """Return what the objective returns for a batch; only one that is a plain dict can be watched."""
        if type(batch) is not dict:
            return self._objective(model, batch)
        self._names |= dict.fromkeys(batch)
        return self._objective(model, Watched(batch, self._reads))

    @property
    def unread(self) -> tuple[str, ...]:
        """The entries that were not read, in the order of the batch."""
        return tuple(name for name in self._names if name not in self._reads)


def tried_reading(objective: Objective, run: Callable[[Objective], Any]) -> tuple[Any, tuple[str, ...]]:
    """Return what `run(objective)` returns, and the entries that it did not read; none where it takes no such dict."""
    reading = Reading(objective)
    try:
        return run(reading), reading.unread
    except Exception:  # perhaps of the dict, which is of another class than the user's
        return run(objective), ()


def unread_remark(objective: Objective, unread: tuple[str, ...]) -> list[str]:
    """Return what is said of entries of a batch that an objective does not read."""
    if not unread:
        return []
    opens = (
        "labels of -100 leave tokens out of the loss, documents separate them, an attention_mask is handed to models "
        "of transformers, and an objective of your own hands on what it wants"
        if objective is next_token
        else "if they are to count, the objective reads them; else leave them out of the data"
    )
    name = getattr(objective, "__name__", type(objective).__name__)
    return [f"the batch's {', '.join(unread)}: not read by the objective {name}, and without effect; {opens}"]


def balance_remark(model: Any, objective: Objective) -> list[str]:
    """Return what is said of the balance loss of a Hugging Face config where next_token leaves it out."""
    weight = getattr(getattr(model, "config", None), AUX_LOSS, None)
    if not weight or objective is not next_token:
        return []
    return [
        f"the model's config has {AUX_LOSS} = {weight:g}, and the objective next_token does not add it: that of "
        "transformers multiplies two means over the micro-batch, and would depend on how the batch is cut; an "
        "objective of your own can add one for each row (paceline.task.models.layers.balance.sequence_balance)"
    ]

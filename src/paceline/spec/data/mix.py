"""Mixtures: which sources a training reads, how much of each, and how that changes along the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option


@dataclass(frozen=True)
class WeightChange(Declared, table="task.data.mix.changes"):
    """Another weight for one source of a mixture, from a place in the training on."""

    at: int = option(0, "samples of all sources together after which it holds", minimum=0)
    weight: float = option(0.0, "its weight from there on", minimum=0.0)


@dataclass(frozen=True)
class MixSpec(Declared, table="task.data.mix"):
    """One source of a mixture. What is left unset is as in task.data."""

    source: str = option("", "as task.data.source")
    name: str = option("", "a short name for the journal and the report; empty takes the source's")
    weight: float = option(1.0, "its part of the samples, against the weights of the other sources", minimum=0.0)
    changes: tuple[WeightChange, ...] = option((), "other weights from later places on, in order")
    most_epochs: float = option(0.0, "it is left out once it was read so often (0 has no end)", minimum=0.0)
    most_samples: int = option(0, "it is left out after so many samples (0 has no end)", minimum=0)
    include: tuple[str, ...] = option((), "file name patterns to read from a folder; empty takes task.data.include")
    text_field: str = option("", "the field or column that holds the text; empty takes task.data.text_field")
    arguments: dict[str, Any] = option(factory=dict, doc="keyword arguments for a user's data set factory")
    score_field: str = option("", "the number that scores select by; empty takes task.data.score_field")
    score_min: float | None = option(None, "the lowest score of a document that is read")
    score_max: float | None = option(None, "documents are read whose score is below this one")

    @property
    def label(self) -> str:
        """The name under which the journal keeps the source."""
        return self.name or self.source


def mix_of(values: Sequence[Mapping[str, Any]]) -> tuple[MixSpec, ...]:
    """Return the sources of a mixture that plain data hold, as `dataclasses.asdict` makes them."""
    return tuple(
        MixSpec(
            **{
                **each,
                "changes": tuple(WeightChange(**change) for change in each["changes"]),
                "include": tuple(each["include"]),
            }
        )
        for each in values
    )

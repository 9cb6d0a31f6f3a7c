"""Selection by a score: which documents are read, by a number that stands beside their text."""

from __future__ import annotations

import math

from paceline.errors import DamagedData
from paceline.spec.task import DataSpec
from paceline.task.data.sources.reading.nested import MISSING, value_of


def asks_scores(data: DataSpec) -> bool:
    """Return whether documents are selected by their scores."""
    return data.score_min is not None or data.score_max is not None


def is_wanted(record: object, data: DataSpec, where: str) -> bool:
    """Return whether a document's score lies from score_min on and below score_max, where they are asked for.

    Raises DamagedData, naming the place, for a document without a number there.
    """
    if not asks_scores(data):
        return True
    score = value_of(record, data.score_field) if isinstance(record, dict) else None
    score = None if score is MISSING else score
    if isinstance(score, bool) or not isinstance(score, int | float) or math.isnan(score):
        raise DamagedData(
            f"{where} has no number in '{data.score_field}'",
            f"score_min and score_max select documents by it, and it is {score!r}",
            "score_field = the field that holds the score, or give every document one",
        )
    low, high = data.score_min, data.score_max
    return (low is None or score >= low) and (high is None or score < high)


def no_score(column: str, path: str) -> DamagedData:
    """Return the error for a file that lacks the column of scores."""
    return DamagedData(
        f"{path} has no column '{column}'",
        "score_min and score_max select documents by it",
        "score_field = the column that holds the score",
    )


def refuse_scores(data: DataSpec, path: str) -> None:
    """Raise DamagedData where documents of a plain text are to be selected by a score."""
    if asks_scores(data):
        raise DamagedData(
            f"{path} holds no scores",
            "score_min and score_max select documents of JSONL and Parquet files",
            "write text and score as JSONL, or leave the scores out",
        )

"""What of a task's data contradicts itself, as far as the spec alone shows it."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.spec.data.mix import MixSpec
from paceline.spec.task import DataSpec


def check_data(data: object) -> None:
    """Raise ConfigError for a mixture that is none, and for scores between which no document lies."""
    if not isinstance(data, DataSpec):
        return
    _check_augment(data)
    for part in data.parts():
        if part.score_min is not None and part.score_max is not None and part.score_min >= part.score_max:
            raise ConfigError(
                f"no score lies between {part.score_min:g} and {part.score_max:g}",
                "documents are read from score_min on and below score_max",
                "a score_max above score_min",
            )
    if not data.mix:
        return
    if data.tokenizer == "bpe":
        raise ConfigError(
            "task.data.tokenizer = 'bpe' with a mixture",
            "each source would get a vocabulary of its own",
            "a tokenizer.json for all of them, or 'bytes'",
        )
    names = [each.label for each in data.mix]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two sources of the mixture are called '{twice[0]}'", "the journal keeps them by name", "give each a name"
        )
    for each in data.mix:
        _check_part(each)
    if not any(each.weight for each in data.mix):
        raise ConfigError("the mixture begins with nothing", "every weight is 0", "a weight above 0")


def _check_augment(data: DataSpec) -> None:
    side = data.augment.crop_from
    if side and side < data.image_size:
        raise ConfigError(
            f"task.data.augment.crop_from is {side} pixels, and image_size {data.image_size}",
            "crops would be scaled up from a smaller square than is trained on",
            f"crop_from = {data.image_size} or more, or 0",
        )
    if data.augment.crop_stretch > 1 and data.augment.crop_share == 1:
        raise ConfigError(
            "task.data.augment.crop_stretch with crops of the whole square",
            "the square has no other shape",
            "a crop_share below 1",
        )


def _check_part(part: MixSpec) -> None:
    if not part.source:
        raise ConfigError("a part of the mixture has no source", "it says what to read", 'source = "folder"')
    places = [change.at for change in part.changes]
    if places != sorted(set(places)):
        raise ConfigError(
            f"the changes of '{part.label}' are not in order", f"they are at {', '.join(map(str, places))} samples",
            "one change for each place, in order",
        )  # fmt: skip

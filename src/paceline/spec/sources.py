"""How `task.data.source` says of which kind the data are: by a scheme before a colon, or by what is found there."""

from __future__ import annotations

from paceline.spec.import_paths import is_import_path

# A module of one of these names cannot be named as the data's: give it another name.
SCHEMES = {
    "text": "documents: text, JSONL, Parquet or Arrow, in a file or a folder",
    "hf": "a data set of Hugging Face: its name on the hub, or a folder that `save_to_disk` wrote",
    "shards": "a folder of token shards, as `paceline data prepare` writes it",
    "megatron": "the prefix of Megatron's PREFIX.bin and PREFIX.idx",
    "images": "a folder of images, one folder for each class, or tar files of them",
}


def scheme_of(source: str) -> tuple[str, str]:
    """Return the scheme that a source names, "" where it names none, and the rest of it."""
    scheme, colon, rest = source.partition(":")
    if colon and scheme in SCHEMES and not rest.startswith("//"):
        return scheme, rest
    return "", source


def names_object(source: str) -> bool:
    """Return whether a source is `package.module:object`, a data set of the user's."""
    return not scheme_of(source)[0] and is_import_path(source)

"""Thousands of seeded damages of a checkpoint: each is refused by name or changes nothing, and none runs code.

Half of them are bytes: bits flipped, files cut, grown, lost, or put in each other's place. The other half knows the
format: a value of a JSON file is replaced and all digests are made right again, as a program with a mistake would.
"""

from __future__ import annotations

import codecs
import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import check_equal, laid_out, save_sample, write_document, write_listed
from distributed import run_ranks

from paceline.checkpoint import load_latest, manifest, read_manifest, save_checkpoint
from paceline.checkpoint.files import pieces
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.checkpoint.readers import fill
from paceline.checkpoint.tiers.unchanged import Unchanged
from paceline.errors import ConfigError, StorageError

BLOCK = 1000
# Blocks of damages: 10,000 of files with plain digests, and more of such with digests of pieces.
DEEP = {"files": range(4), "lists": range(4, 7), "linked": range(7, 10), "pieces": range(10, 12)}
VALUES = (None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 1.5, "", "x", "../../etc/passwd", "shard-00000-of-00002.json",
          "float32", "int8", [], [0], [[0]], {}, {"dtype": "float32"})  # fmt: skip
CODE = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "exec", "marshal.loads")


def _places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document, its own excepted."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def _changed(document: Any, draw: random.Random) -> Any:
    """Return the document with one value replaced, removed, or put under another key."""
    document = copy.deepcopy(document)
    *above, key = draw.choice(list(_places(document)))
    holder = document
    for step in above:
        holder = holder[step]
    kind = draw.randrange(4)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder[key], int) and not isinstance(holder[key], bool):
        holder[key] += draw.choice((-1, 1, 2, 8))
    elif kind == 2 and isinstance(holder, dict):
        holder[draw.choice((*holder, "x"))] = holder.pop(key)
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    return document


class Damages:
    """A checkpoint that is damaged in one way after the other, and whole in between."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.whole = {file.name: file.read_bytes() for file in path.iterdir()}
        self.lists = {  # each list of files, as above 64 ranks, and of lists, as above 1,024, and what it lists
            name: json.loads(self.whole[name]) for name in sorted(self.whole) if name.startswith(("files-", "lists-"))
        }

    def make(self, draw: random.Random) -> str:
        """Damage the checkpoint and return how."""
        if draw.random() < 0.5:
            return self._document(draw)
        name = draw.choice(sorted(self.whole))
        content = bytearray(self.whole[name])
        kind = draw.choice(("flip", "cut", "grow", "lose", "swap", "zero", "again"))
        at = draw.randrange(len(content))
        if kind == "flip":
            content[at] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del content[at:]
        elif kind == "grow":
            content[at:at] = draw.randbytes(draw.randrange(1, 40))
        elif kind == "zero":
            content[at : at + 64] = bytes(len(content[at : at + 64]))
        elif kind == "swap":
            content = bytearray(self.whole[draw.choice(sorted(self.whole))])
        (self.path / name).write_bytes(content)
        if kind == "lose":
            (self.path / name).unlink()
        if kind == "again" or draw.random() < 0.3:
            self._sign(name)
        return f"{kind} {name} at {at}"

    def mend(self) -> None:
        """Put back what was there."""
        for name, content in self.whole.items():
            (self.path / name).write_bytes(content)

    def _document(self, draw: random.Random) -> str:
        name = draw.choice([name for name in sorted(self.whole) if name.endswith(".json")])
        document = json.loads(self.whole[name])
        if name == MANIFEST_NAME:
            document["body"] = _changed(document["body"], draw)
            write_document(self.path, document["version"], document["body"])
        else:
            (self.path / name).write_bytes(json.dumps(_changed(document, draw)).encode())
            self._sign(name)
        return f"another value in {name}"

    def _sign(self, name: str) -> None:
        """Make the digests of a file right again: where a list has it, that of the list as well."""
        if name == MANIFEST_NAME or not (self.path / name).exists():
            return
        whole = json.loads(self.whole[MANIFEST_NAME])
        for list_name, listed in copy.deepcopy(self.lists).items():
            if name in listed:
                write_listed(self.path, listed, name, (self.path / name).read_bytes())
                name = list_name
                (self.path / name).write_bytes(json.dumps(listed).encode())
        write_listed(self.path, whole["body"]["files"], name, (self.path / name).read_bytes())
        write_document(self.path, whole["version"], whole["body"])


def _fuzzed(root: str, seed: int, count: int, in_place: bool) -> Counter[str]:
    """Load the checkpoint after each of `count` damages; return how often it was refused, and how often not.

    Values are read straight into place with `in_place`, and else out of mapped files, as those for a device are.
    """
    fill.host_bytes = fill.host_bytes if in_place else lambda tensor: None
    (path,) = Path(root).iterdir()
    damages, found, ran = Damages(path), Counter[str](), []
    target = laid_out("plain", blank=True)
    load_latest(Path(root), target)  # whatever is imported late is there now
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        codecs.lookup(encoding)  # which json tries for bytes that look like it
    watching = [True]
    sys.addaudithook(lambda event, given: ran.append((event, given)) if watching[0] and event in CODE else None)
    for number in range(seed, seed + count):
        draw = random.Random(number)
        how = damages.make(draw)
        for tensor in target.values():
            tensor.zero_()
        try:
            loaded = load_latest(Path(root), target)
        except (StorageError, ConfigError) as error:
            assert error.because and error.try_, (number, how)
            left = [name for name, tensor in target.items() if tensor.nan_to_num(0.0).any()]
            assert not left, (number, how, left)
            found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"damage {number} ({how}): {type(error).__name__}: {error}") from error
        else:
            assert loaded is not None, (number, how)
            try:
                check_equal(target, "plain")
            except AssertionError as error:
                raise AssertionError(f"damage {number} ({how}) was loaded with other values") from error
            found["restored"] += 1
        assert not ran, (number, how, ran)
        damages.mend()
    watching[0] = False
    return found


def _saved(root: str, kind: str) -> None:
    """Save as `kind` says: plainly, with lists of files as more than 64 ranks have them, or with linked files.

    Or with digests of pieces, as files above 4 MiB have.
    """
    if kind == "linked":
        state, known = laid_out("shard"), Unchanged()
        for step in range(1, 4):
            save_checkpoint(Path(root), step, state, {"step": step}, keep_last=1, unchanged=known)
            state["fp32"] += 1 if step < 2 else -1 if step < 3 else 0
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "INLINE_RANKS", 2 if kind == "lists" else 64)
        patch.setattr(manifest, "MOST_IN_A_LIST", 2)  # of five ranks two lists and one, and above them one and one
        patch.setattr(pieces, "PIECE_BYTES", manifest.PIECES.start if kind == "pieces" else pieces.PIECE_BYTES)
        save_sample(Path(root), 1, "shard")


def _fuzz(root: Path, kind: str, seed: int, count: int) -> None:
    run_ranks(_saved, 5 if kind == "lists" else 2, str(root), kind)
    names = [path.name for path in root.glob("step-*/*")]
    assert all(any(name.startswith(of) for name in names) == (kind == "lists") for of in ("files-", "lists-"))
    assert any("unchanged" in name for name in names) == (kind == "linked")
    (path,) = root.iterdir()
    assert any(entry.piece_bytes for entry in read_manifest(path).files.values()) == (kind == "pieces")
    in_place = seed // BLOCK % 2 == 1 if seed else kind in ("pieces", "linked")
    (found,) = run_ranks(_fuzzed, 1, str(root), seed, count, in_place, timeout_seconds=600)
    assert found["refused"] > count / 2 and found["restored"] > count / 100, found
    print(f"{kind}: {found['refused']} of {count} damages refused, {found['restored']} restored exactly")


@pytest.mark.parametrize(("kind", "count"), [("files", 200), ("lists", 100), ("linked", 100), ("pieces", 100)])
def test_five_hundred_damages_are_refused_or_change_nothing(tmp_path: Path, kind: str, count: int) -> None:
    _fuzz(tmp_path, kind, 0, count)


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "block"), [(kind, block) for kind, blocks in DEEP.items() for block in blocks])
def test_ten_thousand_damages_are_refused_or_change_nothing(tmp_path: Path, kind: str, block: int) -> None:
    _fuzz(tmp_path, kind, block * BLOCK, BLOCK)

"""Parts of the state in the nodes' memory: as they were kept, or refused by name, whatever became of their files."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Snapshot
from paceline.checkpoint.snapshot import take_snapshot
from paceline.errors import StorageError
from paceline.run.survive.saving import pieces
from paceline.run.survive.saving.pieces import HEAD, from_bytes, to_bytes

VALUES = (None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 1.5, "", "x", "../../etc/passwd", "float32", "int8",
          "load", "__class__", [], [0], [[0]], {}, {"dtype": "float32"})  # fmt: skip
SHA256 = 0  # the place of the kind of digest that any Python can make
CODE = ("pickle.find_class", "os.system", "os.exec", "subprocess.Popen", "exec", "marshal.loads")


def taken() -> Snapshot:
    tensors = {
        "model.a": torch.arange(12, dtype=torch.float32).reshape(3, 4), "model.b": torch.ones(5, dtype=torch.bfloat16),
        "model.c": torch.tensor(3, dtype=torch.int64), "optim.a.none": torch.empty(0, 4),
    }  # fmt: skip
    return take_snapshot(7, tensors, {"progress": {"step": 7, "position": 91}})


def changed(told: Any, draw: random.Random) -> None:
    """Replace, remove or rename one value somewhere in a document."""
    places: list[tuple[Any, Any]] = []

    def walk(holder: Any) -> None:
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], dict | list):
                walk(holder[key])

    walk(told)
    holder, key = draw.choice(places)
    kind = draw.randrange(3)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice((*holder, "x"))] = holder.pop(key)
    else:
        holder[key] = draw.choice(VALUES)


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """Return the bytes with a damage: of any bits, or of what they say with the digest made right again."""
    if draw.random() < 0.5:
        length = HEAD.unpack_from(whole)[0]
        told = json.loads(whole[HEAD.size : HEAD.size + length])
        changed(told, draw)
        text = json.dumps(told).encode()
        rest = text + whole[HEAD.size + length :]
        return HEAD.pack(len(text), SHA256, hashlib.sha256(rest).digest()) + rest
    content, at = bytearray(whole), draw.randrange(len(whole))
    kind = draw.choice(("flip", "cut", "grow", "zero", "signed flip", "length"))
    if "flip" in kind:
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "grow":
        content[at:at] = draw.randbytes(draw.randrange(1, 40))
    elif kind == "zero":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    if kind == "length" or (kind == "signed flip" and at >= HEAD.size):
        length = draw.choice((0, 1, 2**40, 2**63)) if kind == "length" else HEAD.unpack_from(content)[0]
        content[: HEAD.size] = HEAD.pack(length, SHA256, hashlib.sha256(content[HEAD.size :]).digest())
    return bytes(content)


def fuzz(path: Path, seed: int, count: int) -> Counter[str]:
    before, ran = taken(), []
    whole = bytes(to_bytes(before).numpy())
    by_place = {(part.name, part.box, part.dtype, part.shape): value for part, value in before.values.items()}
    found, watching = Counter[str](), [True]
    sys.addaudithook(lambda event, given: ran.append((event, given)) if watching[0] and event in CODE else None)
    for number in range(seed, seed + count):
        path.write_bytes(damaged(whole, random.Random(number)))
        try:
            read = from_bytes(path)
        except StorageError as error:
            assert error.because and str(path) in error.what, number
            found["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"damage {number}: {type(error).__name__}: {error}") from error
        else:
            for part, value in read.values.items():  # of another name or shape it is none that a load looks for
                known = by_place.get((part.name, part.box, part.dtype, part.shape))
                empty = known is not None and value.numel() == known.numel() == 0
                assert known is None or empty or torch.equal(value, known), number
            found["restored" if len(read.values) == len(by_place) else "refused"] += 1
        assert not ran, (number, ran)
    watching[0] = False
    return found


@pytest.mark.parametrize("kind", ["sha256", "blake3"])
def test_pieces_come_back_as_they_were_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Whoever reads them may have another best digest than who wrote them."""
    monkeypatch.setattr(pieces, "best_kind", lambda: kind)
    (tmp_path / "piece").write_bytes(bytes(to_bytes(taken()).numpy()))
    read = from_bytes(tmp_path / "piece")
    assert read.step == 7 and read.extra == taken().extra
    assert all(torch.equal(value, read.values[part]) for part, value in taken().values.items())


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.deep)])
def test_damages_of_pieces_are_refused_or_change_nothing(tmp_path: Path, count: int) -> None:
    found = fuzz(tmp_path / "piece", 0, count)
    assert found["refused"] > 0.9 * count, found
    print(f"pieces: {found['refused']} of {count} damages refused, {found['restored']} without effect")

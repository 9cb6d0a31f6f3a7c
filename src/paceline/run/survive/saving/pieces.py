"""A rank's part of the state as bytes: a header with the length, plain data as JSON, then the values one by one.

These bytes live for minutes, in the memory of ranks of one run. Safetensors, in which checkpoints are written, keeps no
digest of them, has no complex128, and makes a second copy of the state to save to bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from paceline.checkpoint import Snapshot
from paceline.checkpoint.files.digests import KINDS, best_kind, new_digest
from paceline.checkpoint.fingerprint import PlaceWeights
from paceline.checkpoint.snapshot import Part
from paceline.checkpoint.untrusted import Refused
from paceline.errors import StorageError
from paceline.run.survive.saving.checked import ToldPart, check_values, checked

# The length of what follows as JSON, which of KINDS the digest is, and the digest of all that follows.
HEAD = struct.Struct("<QB32s")


def name_of(step: int, rank: int, world: int) -> str:
    """Return the name of the file of a rank's part, in a world of so many ranks."""
    return f"step-{step:08d}.rank-{rank}.of-{world}"


def to_bytes(taken: Snapshot) -> torch.Tensor:
    """Return a snapshot as bytes."""
    parts = [{**asdict(part), "held": list(value.shape)} for part, value in taken.values.items()]
    told = json.dumps({"step": taken.step, "extra": taken.extra, "parts": parts}).encode()
    content = torch.empty(
        HEAD.size + len(told) + sum(value.nbytes for value in taken.values.values()), dtype=torch.uint8
    )
    at = HEAD.size + len(told)
    content[HEAD.size : at] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    for value in taken.values.values():
        content[at : at + value.nbytes] = value.detach().contiguous().view(-1).view(torch.uint8)
        at += value.nbytes
    kind = best_kind()
    head = HEAD.pack(len(told), KINDS.index(kind), _digest(kind, content[HEAD.size :].numpy().data))
    content[: HEAD.size] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return content


def from_bytes(path: Path) -> Snapshot:
    """Return the snapshot of a file. Raises StorageError where a single bit of it is another, or it cannot be true."""
    try:
        content = path.read_bytes()
        length, kind, digest = HEAD.unpack_from(content)
        if kind >= len(KINDS) or _digest(KINDS[kind], memoryview(content)[HEAD.size :]) != digest:
            raise StorageError(f"{path} is damaged", "its bytes are not those that were written")
        at = HEAD.size + length
        if at > len(content):
            raise Refused(f"it says {length} bytes of JSON")
        step, parts, extra = checked(json.loads(content[HEAD.size : at]), len(content) - at)
        return Snapshot(step, _values(parts, content, at), extra)
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise StorageError(f"{path} cannot be read", str(error)) from error


def _digest(kind: str, content: memoryview) -> bytes:
    digest = new_digest(kind)
    digest.update(content)
    return digest.digest()


def _values(parts: Sequence[ToldPart], content: bytes, at: int) -> dict[Part, torch.Tensor]:
    """Return the values that begin at a place of the content. Raises Refused."""
    values, weights = {}, PlaceWeights()
    for told in parts:
        value = torch.empty(told.held, dtype=getattr(torch, told.part.dtype))
        if value.nbytes:
            raw = torch.frombuffer(bytearray(content[at : at + value.nbytes]), dtype=torch.uint8)
            value.view(-1).view(torch.uint8).copy_(raw)
        check_values(told, value, weights)
        values[told.part] = value
        at += value.nbytes
    return values

"""Tensors of many kinds laid out over ranks, for the checkpoint tests. Values depend on the name alone."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests_shared import device_here
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from paceline.checkpoint import CheckpointInfo, load_checkpoint, read_index, read_manifest, save_checkpoint
from paceline.checkpoint.manifest import MANIFEST_NAME, TABLE_NAME

# name -> (shape, dtype, dimension to shard); rows that do not divide, fewer rows than ranks, no elements at all
KINDS = {
    "fp32": ((8, 6), torch.float32, 0),
    "rows7": ((7, 3), torch.float32, 0),
    "rows1": ((1, 5), torch.float32, 0),
    "columns": ((4, 7), torch.float32, 1),
    "bf16": ((6, 4), torch.bfloat16, 0),
    "fp16": ((9,), torch.float16, 0),
    "fp64": ((5, 2, 3), torch.float64, 1),
    "int64": ((10,), torch.int64, 0),
    "uint8": ((13,), torch.uint8, 0),
    "bool": ((11,), torch.bool, 0),
    "empty": ((0, 4), torch.float32, 0),
    "scalar": ((), torch.float32, None),
    "whole": ((3, 5), torch.float32, None),
}


def full(name: str) -> torch.Tensor:
    """Return the whole tensor of that name."""
    shape, dtype, _ = KINDS[name]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 256, shape, generator=generator).sub(100).to(dtype)


def laid_out(layout: str, *, blank: bool = False) -> dict[str, torch.Tensor]:
    """Return all of KINDS as this rank holds them; `blank` fills them with zeros.

    Layouts: "plain" (every rank holds all), "shard" (1-D), "hsdp" (2 replicas of shards), "grid" (shards of shards).
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    shape = {"plain": (world,), "shard": (world,), "hsdp": (2, world // 2), "grid": (2, world // 2)}[layout]
    device = device_here()
    mesh = init_device_mesh(device.type, shape) if layout != "plain" else None
    state = {}
    for name, (_, _, dimension) in KINDS.items():
        tensor = (torch.zeros_like(full(name)) if blank else full(name)).to(device)
        if mesh is not None and dimension is not None:
            last = Shard(dimension)
            first = {"hsdp": Replicate(), "grid": Shard((dimension + 1) % tensor.dim())}.get(layout)
            # src_data_rank=None: every rank cuts its own part; gloo cannot send every dtype
            tensor = distribute_tensor(tensor, mesh, [first, last] if first else [last], src_data_rank=None)
        state[name] = tensor
    return state


def check_equal(state: dict[str, torch.Tensor], layout: str) -> None:
    """Assert that every tensor has exactly the bits it should, on this rank."""
    for name, expected in laid_out(layout).items():
        got = state[name]
        if isinstance(got, DTensor):
            got, expected = got.to_local(), expected.to_local()
        assert torch.equal(got, expected), (name, got, expected)


def save_sample(root: Path, step: int, layout: str = "plain", keep_last: int = 9) -> CheckpointInfo:
    """Save all of KINDS in a layout."""
    return save_checkpoint(root, step, laid_out(layout), {"step": step, "layout": layout}, keep_last=keep_last)


def load_sample(path: Path, layout: str = "plain") -> dict:
    """Load into blank tensors of a layout, check every bit and return `extra`."""
    state = laid_out(layout, blank=True)
    extra = load_checkpoint(path, state)
    check_equal(state, layout)
    return extra


def write_document(path: Path, version: int, body: Any) -> None:
    """Write a manifest whose digest is right, whatever its body says."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    document = {"format": "paceline-checkpoint", "version": version, "sha256": digest, "body": body}
    (path / MANIFEST_NAME).write_text(json.dumps(document))


def write_listed(path: Path, files: Any, name: str, content: bytes) -> None:
    """Write a file of a checkpoint, and its length and digest where `files` lists it."""
    (path / name).write_bytes(content)
    if isinstance(files, dict) and name in files:
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def as_version_1(path: Path) -> None:
    """Turn a checkpoint into what releases wrote before the index had parts: all chunks in `tensors.json`."""
    manifest = read_manifest(path)
    tensors = {
        name: {"dtype": entry.dtype, "shape": entry.shape, "fingerprint": entry.fingerprint,
               "chunks": [chunk._asdict() for chunk in entry.chunks]}
        for name, entry in read_index(path, manifest).items()
    }  # fmt: skip
    body = json.loads((path / MANIFEST_NAME).read_text())["body"]
    for name in [name for name in body["files"] if name.startswith("shard-") and name.endswith(".json")]:
        (path / name).unlink()
        del body["files"][name]
    for entry in tensors.values():
        if not entry["fingerprint"]:
            del entry["fingerprint"]
    write_listed(path, body["files"], TABLE_NAME, json.dumps(tensors).encode())
    write_document(path, 1, body)

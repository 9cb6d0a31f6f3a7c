"""Names and views that a file cannot hold as they are: refused before older checkpoints go, or stored exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import load_checkpoint, save_checkpoint
from paceline.errors import StorageError


@pytest.mark.parametrize("name", ["__metadata__", "\udc80"])
def test_a_name_that_safetensors_does_not_read_costs_no_older_checkpoint(tmp_path: Path, name: str) -> None:
    """Every byte was written and read back, the checkpoint was published, and no load could open it."""
    first = save_checkpoint(tmp_path, 1, {"ok": torch.ones(3)}, {}, keep_last=1).path
    with pytest.raises(StorageError, match="cannot be read by safetensors"):
        save_checkpoint(tmp_path, 2, {name: torch.ones(3)}, {}, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    load_checkpoint(first, {"ok": torch.zeros(3)})


@pytest.mark.parametrize("name", ["", "\x00", '"', "x" * 300, "x/../../y", "x[0:1]", "\u2028", "É", "É"])
def test_any_other_name_is_stored(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, 1, {name: torch.arange(3.0), "beside": torch.zeros(2)}, {}, keep_last=1).path
    values = {name: torch.zeros(3), "beside": torch.ones(2)}
    load_checkpoint(path, values)
    assert values[name].tolist() == [0, 1, 2]


NUMBERS = torch.tensor([1 + 2j, 3 - 4j])
ALL_16_BITS = torch.arange(-(2**15), 2**15).to(torch.int16)
BITS_OF_32 = torch.tensor([0x7FC00001, 0x7F800001, -1, 0, -(2**31), 1, 0x7F800000], dtype=torch.int32)
VALUES = {
    "NaN with its bits, -0, denormals": BITS_OF_32.view(torch.float32),
    "every bf16": ALL_16_BITS.view(torch.bfloat16),
    "every fp16": ALL_16_BITS.view(torch.float16),
    "every fp8 e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn),
    "every fp8 e5m2": torch.arange(256).to(torch.uint8).view(torch.float8_e5m2),
    "a conjugate": torch.conj(NUMBERS),
    "a negated view": torch.conj(NUMBERS).imag,
    "a negated complex view": torch._neg_view(NUMBERS),
    "one value for all": torch.ones(1).expand(5),
    "every second column": torch.arange(20.0).view(4, 5)[:, 1::2],
    "no dimension": torch.tensor(-0.0),
    "no element": torch.empty(3, 0, 2),
}


@pytest.mark.parametrize("kind", VALUES)
def test_every_bit_comes_back_whatever_the_view(tmp_path: Path, kind: str) -> None:
    tensor = VALUES[kind]
    path = save_checkpoint(tmp_path, 1, {"x": tensor}, {}, keep_last=1).path
    back = {"x": torch.zeros(tensor.shape, dtype=tensor.dtype)}
    load_checkpoint(path, back)
    pair = [torch.view_as_real(one) if one.is_complex() else one
            for one in (tensor.resolve_conj().resolve_neg().contiguous(), back["x"])]  # fmt: skip
    assert torch.equal(*[one.reshape(-1).view(torch.uint8) for one in pair])


def test_a_link_to_a_checkpoint_goes_and_what_it_names_stays(tmp_path: Path) -> None:
    """Somebody moved a checkpoint to another disk and left a link: every later save told that it stays."""
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    path = save_checkpoint(root, 1, {"x": torch.ones(2)}, {}, keep_last=3).path
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    load_checkpoint(path, {"x": torch.zeros(2)})
    info = save_checkpoint(root, 2, {"x": torch.ones(2)}, {}, keep_last=1)
    assert (info.removed, info.kept) == ((path.name,), ())
    assert [found.name for found in root.iterdir()] == [info.path.name]
    load_checkpoint(elsewhere, {"x": torch.zeros(2)})

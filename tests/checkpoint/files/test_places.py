"""Where tensors lie in a shard: what is read there is what the format's own library reads, and nothing is trusted."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline.checkpoint import load_checkpoint, save_checkpoint
from paceline.checkpoint.files import copies
from paceline.checkpoint.files.places import OpenShards, PlaceInFile, places_in
from paceline.checkpoint.readers import fill
from paceline.errors import StorageError

NAME = "shard.safetensors"
TENSORS = {
    "matrix": torch.arange(35, dtype=torch.float32).view(5, 7), "cube": torch.arange(60).view(3, 4, 5),
    "scalar": torch.tensor(7.5), "empty": torch.zeros(0, 3), "bits": torch.arange(9, dtype=torch.uint8),
}  # fmt: skip


def test_rows_of_a_tensor_lie_where_they_are_said_to(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / NAME)
    content = (tmp_path / NAME).read_bytes()
    with OpenShards(tmp_path) as opened:
        for name, tensor in TENSORS.items():
            found = opened.find(NAME, name)
            assert found is not None and found[1].shape == tuple(tensor.shape)
            spans = [[(at, length) for at in range(size + 1) for length in range(size - at + 1)]
                     for size in tensor.shape]  # fmt: skip
            for part in itertools.product(*spans):
                offsets, lengths = [at for at, _ in part], [length for _, length in part]
                lies = found[1].rows(offsets, lengths)
                values = tensor[tuple(slice(at, at + length) for at, length in part)]
                if lies is None:
                    assert tuple(lengths[1:]) != tuple(tensor.shape[1:])
                elif values.numel():
                    assert content[slice(*lies)] == values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert opened.find(NAME, "of no such name") is None


@settings(max_examples=200, deadline=None)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "__metadata__"]),
        st.fixed_dictionaries(
            {"dtype": st.sampled_from(["F32", "none", 3]),
             "shape": st.lists(st.integers(-2, 9), max_size=3) | st.just("x") | st.just([2**70]),
             "data_offsets": st.lists(st.integers(-2, 60), min_size=1, max_size=3) | st.none()}
        ) | st.integers() | st.none() | st.lists(st.integers()),
    ) | st.integers() | st.none(),
    claimed=st.integers(-1, 2**64 - 1) | st.none(),
)  # fmt: skip
def test_a_header_that_lies_leads_nowhere_outside_of_its_file(
    tmp_path_factory: pytest.TempPathFactory, header: object, claimed: int | None
) -> None:
    text = json.dumps(header).encode()
    path = tmp_path_factory.mktemp("lies") / NAME
    path.write_bytes(max(0, len(text) if claimed is None else claimed).to_bytes(8, "little") + text + bytes(48))
    with path.open("rb") as file:
        for place in places_in(file).values():
            assert isinstance(place, PlaceInFile)
            assert 8 <= place.begin <= place.end <= path.stat().st_size and min(place.shape, default=0) >= 0


def loaded_in_rows(root: str) -> bool:
    """Load a checkpoint of whole tensors into shards, of which every part is read from its file, however small."""
    from checkpoint_samples import check_equal, laid_out

    copies.FEW_BYTES = 1
    state = laid_out("shard", blank=True)
    load_checkpoint(Path(root), state)
    check_equal(state, "shard")
    return True


def test_parts_of_any_layout_are_read_into_place(tmp_path: Path) -> None:
    from checkpoint_samples import laid_out

    path = save_checkpoint(tmp_path, 1, laid_out("plain"), {}, keep_last=1).path
    assert run_ranks(loaded_in_rows, 2, str(path)) == [True, True]


@pytest.mark.parametrize(("few", "told"), [(1, "the file ends at byte"), (2**62, "cannot read 'values' from")])
def test_a_file_that_is_cut_after_it_was_hashed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int, told: str
) -> None:
    """As it may be for a part that comes later, since it does not lie in memory as it does in the file."""
    values = {"values": torch.arange(2**18, dtype=torch.float32)}
    path = save_checkpoint(tmp_path, 1, values, {}, keep_last=1).path
    verify = fill.verify_files

    def cut(*given: object) -> None:
        verify(*given)  # type: ignore[arg-type]
        with (path / "shard-00000-of-00001.safetensors").open("r+b") as file:
            file.truncate(2**19)

    monkeypatch.setattr(fill, "verify_files", cut)
    monkeypatch.setattr(fill, "host_bytes", lambda tensor: None)
    monkeypatch.setattr(copies, "FEW_BYTES", few)
    target = torch.zeros(2**18)
    with pytest.raises(StorageError, match=told):
        load_checkpoint(path, {"values": target})
    assert target.isnan().all(), "nothing of it stays"


def test_a_file_that_ends_while_it_is_read_is_an_error_and_no_short_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(bytes(100))
    ends = pytest.raises(OSError, match="the file ends at byte 100")
    with (tmp_path / NAME).open("rb") as file, ends, copies.Copies() as under_way:
        assert under_way.begin_reading(torch.zeros(40), file.fileno(), 20, 180)

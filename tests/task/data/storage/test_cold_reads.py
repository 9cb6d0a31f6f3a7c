"""What a cold epoch of remote shards fetches, in the order of two levels: bytes are counted, no time is measured."""

from __future__ import annotations

import itertools
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from paceline.run.loop.loader import BatchStream
from paceline.spec.plan import Plan
from paceline.spec.task import DataSpec
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards.folder import ShardIndex, write_index
from paceline.task.data.sources.shards.layout import ShardWriter
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.data.storage.bytes import Storage

SEQ_LEN, BLOCK, WINDOW, ROWS, VOCAB = 512, 1024, 4, 16, 32768  # a block is 1 MiB, as short as the default makes them
MOST = 1.05  # times the shards' bytes; the aim is 1.1
WINDOW_BYTES = WINDOW * BLOCK * SEQ_LEN * 2
ONE_SHARD, THREE_SHARDS = (10_000_514,), (3_000_011, 4_100_003, 2_900_500)  # no block of samples ends where these do


def write_shards(folder: Path, sizes: tuple[int, ...]) -> int:
    """Write shards of so many tokens of random documents to `folder`; return the bytes of all shards."""
    random, written = np.random.default_rng(5), []
    for number, tokens in enumerate(sizes):
        with ShardWriter(folder / f"{number}.shard", 2, VOCAB - 1) as shard:
            cuts = [*range(0, tokens, 50_000), tokens]
            shard.add([random.integers(0, VOCAB - 1, stop - start - 1) for start, stop in itertools.pairwise(cuts)])
        written.append(shard.result())
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    write_index(folder, ShardIndex("bytes", VOCAB, VOCAB - 1, {"train": tuple(written), "validation": ()}, {}))
    return sum(shard.bytes for shard in written)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of every request of the memory file system."""
    counted: list[int] = []
    cat_file = MemoryFileSystem.cat_file

    def counting(self: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None) -> bytes:
        found: bytes = cat_file(self, path, start=start, end=end)
        counted.append(len(found))
        return found

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counting)
    return counted


def read_an_epoch(url: str, **options: object) -> None:
    """Read each sample of an epoch once. The last steps are read by their ids: they begin nothing of the next epoch."""
    data = DataSpec(url, seq_len=SEQ_LEN, validation_fraction=0.0, shuffle="windowed", shuffle_block=BLOCK,
                    shuffle_window=WINDOW, **options)  # type: ignore[arg-type]  # fmt: skip
    source = open_sources(data, 7)[0]
    stream = BatchStream(source, 7, Plan(micro_batch=ROWS, batch_samples=ROWS), 0, torch.device("cpu"))
    ahead = source.samples - (source.steps_ahead + 1) * ROWS
    seen = [stream.at(position).micro_batches[0].ids for position in range(0, ahead, ROWS)]
    seen.append(ids_at(source, 7, np.arange(len(seen) * ROWS, source.samples)))
    source.read(seen[-1])
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(source.samples))


@pytest.mark.parametrize("windows", [2, 100])
@pytest.mark.parametrize("sizes", [ONE_SHARD, THREE_SHARDS], ids=["one shard", "three shards"])
def test_a_cold_epoch_fetches_little_more_than_the_shards(
    tmp_path: Path, fetched: list[int], windows: int, sizes: tuple[int, ...]
) -> None:
    """A cache of two windows is what the order of two levels promises to need."""
    (tmp_path / "shards").mkdir()
    size = write_shards(tmp_path / "shards", sizes)
    memory, url = fsspec.filesystem("memory"), f"cold-{windows}-{len(sizes)}"
    for path in (tmp_path / "shards").iterdir():
        memory.pipe(f"/{url}/{path.name}", path.read_bytes())
    read_an_epoch(
        f"memory://cold-{windows}-{len(sizes)}", cache_dir=str(tmp_path / "cache"), cache_limit=windows * WINDOW_BYTES
    )
    assert size <= sum(fetched) <= MOST * size, f"{sum(fetched) / size:.3f} times the bytes of the shards"
    assert max(fetched) <= 4 * 2**20 and len(fetched) < size / 2**16, "neighbours come by one request"


def test_all_files_together_keep_to_the_limit_of_the_cache(tmp_path: Path) -> None:
    """A piece that is mapped takes room on the disk, removed or not."""
    memory, size, limit = fsspec.filesystem("memory"), 2**20, 2**19
    content = np.random.default_rng(1).bytes(size)
    storage = Storage(tmp_path, limit)
    for name in "abc":
        memory.pipe(f"/kept/{name}", content)
    files = [storage.open(f"memory://kept/{name}") for name in "abc"]
    assert all(file.read(0, size).tobytes() == content for file in files)
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(tmp_path) in line:
            first, last = line.split()[0].split("-")
            mapped += int(last, 16) - int(first, 16)
    assert 0 < mapped <= 1.1 * limit, f"{mapped:,} bytes are mapped"


def test_what_will_be_read_stays(tmp_path: Path, fetched: list[int]) -> None:
    fsspec.filesystem("memory").pipe("/stays/a", bytes(2**19))
    file = Storage(tmp_path, 3 * 2**17 + 200).open("memory://stays/a", head_bytes=64)
    assert (file.read(0, 64).size, fetched[-1:]) == (64, [64]), "what lies before the samples is a piece of its own"
    for piece in (0, 1, 2):
        file.read(64 + piece * 2**17, 64 + piece * 2**17 + 10)
    asked = len(fetched)
    file.expect(np.array([[64, 100]]))
    file.read(2**19 - 10, 2**19)
    assert len(fetched) == asked + 1
    file.read(64, 64 + 2**17)
    assert len(fetched) == asked + 1, "it was to be read, and another one went"
    file.read(64 + 2**17, 64 + 2**17 + 10)
    assert len(fetched) == asked + 2

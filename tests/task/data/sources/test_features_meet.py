"""Two features at once that each have tests of their own: rows are those of plain local data, whatever the ranks.

Remote shards in the order of two levels, whose cache is damaged between two starts; image tars with augmentation whose
squares are kept on disk; deduplicated shards in a mixture whose weights change, across the end of an epoch.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from tests_shared import plan_of

from paceline.run.loop.loader import BatchStream
from paceline.spec.data.augment import AugmentSpec
from paceline.spec.data.mix import MixSpec, WeightChange
from paceline.spec.layout import Layout
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources

CPU, SEED, BATCH = torch.device("cpu"), 3, 12


def rows_of(source: Any, ranks: int, micro_batch: int, positions: range) -> dict[str, torch.Tensor]:
    """Return what so many ranks read of global batches at these positions, in the order of their rows."""
    found: dict[str, list[torch.Tensor]] = {}
    plan = plan_of(Layout(dp_replicate=ranks), batch=BATCH, micro_batch=micro_batch)
    streams = [BatchStream(source, SEED, plan, rank, CPU) for rank in range(ranks)]
    for position in positions:
        for stream in streams:
            for micro in stream.at(position).micro_batches:
                for name, rows in micro.data.items() if micro.counts else ():
                    found.setdefault(name, []).append(rows)
    return {name: torch.cat(parts) for name, parts in found.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], rows) for name, rows in other.items())


def documents(path: Path, count: int, begin: int = 0) -> Path:
    lines = [json.dumps({"text": f"document {begin + at % (count - 4)} " * (2 + at % 9)}) for at in range(count)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("rows", ["windows", "packed"])
def test_a_cache_that_is_damaged_between_two_starts_changes_no_row(tmp_path: Path, rows: str) -> None:
    """Killed after three batches on two ranks; bytes of every piece of the cache are flipped; gone on with by three."""
    near = DataSpec(
        str(documents(tmp_path / "text.jsonl", 600)), validation_fraction=0.0, cache_dir=str(tmp_path / "c")
    )
    prepare(near, tmp_path / "shards", part_bytes=20_000)
    memory, url = fsspec.filesystem("memory"), f"meet-{rows}"
    for path in (tmp_path / "shards").iterdir():
        memory.pipe(f"/{url}/{path.name}", path.read_bytes())
    more: dict[str, Any] = {"seq_len": 32, "rows": rows, "validation_fraction": 0.0, "shuffle": "windowed",
                            "shuffle_block": 16, "shuffle_window": 3}  # fmt: skip
    local, _ = open_sources(DataSpec(str(tmp_path / "shards"), cache_dir=str(tmp_path / "c"), **more), SEED)
    samples = local.samples
    first, later = range(0, 3 * BATCH, BATCH), range(3 * BATCH, samples + 5 * BATCH, BATCH)  # over the end of an epoch
    far = DataSpec(f"memory://{url}", cache_dir=str(tmp_path / "far"), **more)
    assert same(rows_of(open_sources(far, SEED)[0], 2, 4, first), rows_of(local, 1, BATCH, first))
    pieces = [path for path in (tmp_path / "far").rglob("*") if path.is_file() and path.stat().st_size > 200]
    assert pieces
    for path in pieces:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 64
        path.write_bytes(content)
    again, _ = open_sources(far, SEED)
    assert same(rows_of(again, 3, 1, later), rows_of(local, 1, BATCH, later))
    shutil.rmtree(tmp_path / "far")
    memory.rm(f"/{url}", recursive=True)


def tar_of_images(path: Path, count: int) -> Path:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(4)
    with tarfile.open(path, "w") as tar:
        for at in range(count):
            content = io.BytesIO()
            image.fromarray(random.integers(0, 255, (20, 26, 3), dtype=np.uint8)).save(content, "PNG")
            info = tarfile.TarInfo(f"{('cat', 'dog')[at % 2]}/{at:02d}.png")
            info.size = len(content.getvalue())
            tar.addfile(info, io.BytesIO(content.getvalue()))
    return path


@pytest.mark.parametrize("kept", [False, True])
def test_augmented_images_of_a_tar_are_the_same_on_any_ranks_kept_or_not(tmp_path: Path, kept: bool) -> None:
    path = tar_of_images(tmp_path / "images.tar", 21)

    def opened(cache: bool) -> Any:
        data = DataSpec(f"images:{path}", image_size=8, validation_fraction=0.0, cache_images=cache,
                        augment=AugmentSpec(crop_from=12, flip=True), cache_dir=str(tmp_path / "c"))  # fmt: skip
        return open_sources(data, SEED)[0]

    alone = rows_of(opened(False), 1, BATCH, range(0, 5 * BATCH, BATCH))
    assert len(alone["images"]) == 5 * BATCH
    before = rows_of(opened(kept), 3, 2, range(0, 2 * BATCH, BATCH))
    after = rows_of(opened(kept), 5, 1, range(2 * BATCH, 5 * BATCH, BATCH))
    assert same({name: torch.cat([before[name], after[name]]) for name in before}, alone)


def test_deduplicated_shards_in_a_changing_mixture_go_on_at_an_epochs_end(tmp_path: Path) -> None:
    """Stopped in every batch of two epochs of the smaller source, and gone on with by other ranks, opened anew."""
    for name, count in (("small", 40), ("large", 90)):
        text = documents(tmp_path / f"{name}.jsonl", count, begin=1000 * len(name))
        spec = DataSpec(str(text), validation_fraction=0.2, cache_dir=str(tmp_path / "c"))
        prepare(spec, tmp_path / name, dedup=True, part_bytes=2_000)
    changes = (WeightChange(40, 5.0),)
    mix = (
        MixSpec(str(tmp_path / "small"), "small", weight=1.0, changes=changes),
        MixSpec(str(tmp_path / "large"), "large"),
    )

    def opened() -> Any:
        data = DataSpec("", mix=mix, seq_len=16, cross_documents=False, cache_dir=str(tmp_path / "c"))
        return open_sources(data, SEED)[0]

    whole = opened()
    positions = range(0, 4 * whole.sources[0].samples, BATCH)
    alone = rows_of(whole, 1, BATCH, positions)
    parts = [
        rows_of(opened(), 1 + at % 4, 1 + at % 3, range(position, position + 1))
        for at, position in enumerate(positions)
    ]
    assert same({name: torch.cat([part[name] for part in parts]) for name in alone}, alone)
    assert whole.given(SEED, positions[-1])["small"]["epochs"] > 1

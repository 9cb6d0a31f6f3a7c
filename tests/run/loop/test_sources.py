"""One rank of a node lists and tokenises the documents; the others map what it wrote, and hear what went wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from paceline.errors import DataError
from paceline.run.loop.sources import open_together
from paceline.run.process.world import World
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources
from paceline.task.data.sources import cache

LINE = '{"text": "one and one is two, and two and two is four"}\n'


def opened(source: str, cache_dir: str, local_rank: int) -> tuple[int, str, int]:
    """Return how often this rank listed the files, the fingerprint of the data, and the first token of a sample."""
    rank = dist.get_rank()
    world = World(rank, dist.get_world_size(), local_rank, torch.device("cpu"))
    listed, list_files = [0], cache.list_files

    def counted(data: DataSpec) -> Any:
        listed[0] += 1
        return list_files(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "list_files", counted)
        data = DataSpec(source, tokenizer="bytes", seq_len=8, cache_dir=cache_dir, validation_fraction=0.0)
        try:
            train, _ = open_together(data, 0, world)
        except DataError as error:
            return listed[0], error.what, -1
    return listed[0], train.fingerprint, int(train.read(np.array([3]))["tokens"][0, 0])


def own_set(data: torch.Tensor) -> tuple[int, str, int]:
    """Return how many samples of a data set of one's own are opened, or what is wrong with it."""
    rank = dist.get_rank()
    try:
        train, _ = open_together(data, 0, World(rank, dist.get_world_size(), rank, torch.device("cpu")))
    except DataError as error:
        return 0, f"{error.what}: {error.because}", -1
    return train.samples, "", 0


def everywhere(folder: str) -> list[tuple[int, str, int]]:
    """Open the data of a folder in turn: on one node, on two with a cache each, and where they are broken."""
    root, rank = Path(folder), dist.get_rank()
    own = root / f"of-{rank}.jsonl"
    own.write_text(LINE * (20 + rank))
    return [
        opened(str(root / "good.jsonl"), str(root / "shared"), rank),
        opened(str(root / "good.jsonl"), str(root / "shared"), 0),
        opened(str(root / "good.jsonl"), str(root / f"cache-{rank}"), 0),
        opened(str(root / "good.jsonl"), str(root / f"other-{rank}"), rank),
        opened(str(own), str(root / f"cache-{rank}"), 0),
        opened(str(root / "bad.jsonl"), str(root / "shared"), rank),
        opened(str(root / f"shards-{rank}"), str(root / "shared"), rank),
        *(own_set(torch.arange(8.0 + longer * rank) + rank) for longer in (0, 1)),
    ]


def test_one_rank_of_a_node_reads_the_documents(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(LINE * 30)
    (tmp_path / "bad.jsonl").write_text(LINE * 3 + "{\n")
    for rank, words in enumerate(("two", "six")):
        (tmp_path / f"{rank}.jsonl").write_text(LINE.replace("two", words) * 20)
        prepare(DataSpec(str(tmp_path / f"{rank}.jsonl"), validation_fraction=0.0), tmp_path / f"shards-{rank}")
    zero, one = run_ranks(everywhere, 2, str(tmp_path))
    data = DataSpec(str(tmp_path / "good.jsonl"), tokenizer="bytes", seq_len=8, cache_dir=str(tmp_path / "alone"),
                    validation_fraction=0.0)  # fmt: skip
    alone, _ = open_sources(data, 0)
    same = (alone.fingerprint, int(alone.read(np.array([3]))["tokens"][0, 0]))
    assert (zero[0], one[0]) == ((1, *same), (0, *same)), "one node"
    assert (zero[1], one[1]) == ((1, *same), (0, *same)), "two nodes that share a cache"
    assert (zero[2], one[2]) == ((1, *same), (1, *same)), "two nodes with a cache each"
    assert zero[3][1:] == one[3][1:] and "rank 1 does not find the tokenised documents" in zero[3][1]
    assert zero[4][1:] == one[4][1:] and "rank 1 finds other documents" in zero[4][1]
    assert zero[5][1:] == one[5][1:] and "line 4" in zero[5][1] and one[5][0] == 0, "the words of rank 0"
    assert zero[6][1:] == one[6][1:] and "rank 1 finds other data" in zero[6][1], "as many samples, others"
    assert zero[7] == one[7] == (8, "", 0), "of one's own what they hold is not asked for"
    assert zero[8] == one[8] and "rank 1 finds other data" in zero[8][1] and "9 samples" in zero[8][1]

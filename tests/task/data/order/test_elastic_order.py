"""Any schedule of devices, micro-batches, kills and resumes reads what an undisturbed run reads, in its order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_shared import plan_of

from paceline.run.loop.loader import BatchStream
from paceline.spec.data.mix import MixSpec, WeightChange
from paceline.spec.layout import Layout
from paceline.spec.task import DataSpec
from paceline.task.data.protocol import Source
from paceline.task.data.source import open_sources

CPU = torch.device("cpu")
BATCH = 13  # of which no number of ranks makes equal parts
SEED = 7
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"rows": "packed", "cross_documents": False},
    "windowed": {"shuffle": "windowed", "shuffle_block": 5, "shuffle_window": 3},
    "packed and windowed": {"rows": "packed", "shuffle": "windowed", "shuffle_block": 4, "shuffle_window": 2},
    "mixed": {
        "rows": "packed",
        "mix": (MixSpec("a.jsonl", weight=3.0, changes=(WeightChange(64, 1.0),)), MixSpec("b.jsonl", most_epochs=9.0)),
    },
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """One source of each kind, of a few dozen samples."""
    folder = tmp_path_factory.mktemp("elastic")
    for name, documents in (("a", 30), ("b", 11)):
        lines = [f'{{"text": "{name}{number} {"word " * (number % 9)}"}}' for number in range(documents)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    found = {}
    for kind, options in KINDS.items():
        mix = tuple(replace(each, source=str(folder / each.source)) for each in options.get("mix", ()))
        data = DataSpec(str(folder / "a.jsonl"), seq_len=24, validation_fraction=0.0, cache_dir=str(folder / "cache"))
        found[kind] = open_sources(replace(data, **{**options, "mix": mix}), SEED)[0]
    return found


def read_by_all(source: Source, world: int, micro_batch: int, position: int) -> tuple[list[int], list[torch.Tensor]]:
    """Return the ids and rows of a global batch as the ranks of a world read them, in order of position."""
    plan = plan_of(Layout(dp_replicate=world), BATCH, micro_batch)
    ids, rows = list[int](), list[torch.Tensor]()
    for rank in range(world):
        for micro in BatchStream(source, SEED, plan, rank, CPU).at(position).micro_batches:
            if micro.counts:
                assert micro.position == position + len(ids)
                ids += micro.ids.tolist()
                rows += [micro.data["tokens"]]
    return ids, rows


segments = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=8
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(schedule=segments)
def test_every_global_batch_is_that_of_the_undisturbed_run(
    kind: str, sources: dict[str, Source], schedule: list[tuple[int, int, int, bool]]
) -> None:
    """A segment is (devices, micro-batch, steps, whether it is killed, so that its last step was not saved)."""
    source = sources[kind]
    saved, trained = 0, dict[int, list[int]]()
    for world, micro_batch, steps, killed in schedule:
        position = saved
        for step in range(steps):
            ids, rows = read_by_all(source, world, micro_batch, position)
            undisturbed, whole = read_by_all(source, 1, BATCH, position)
            assert ids == undisturbed and torch.equal(torch.cat(rows), torch.cat(whole))
            trained[position] = ids
            position += BATCH
            if not (killed and step == steps - 1):
                saved = position
    kept = [sample for position in sorted(trained) if position < saved for sample in trained[position]]
    assert len(kept) == saved


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixed"])
def test_three_epochs_hold_each_sample_three_times(kind: str, sources: dict[str, Source]) -> None:
    source = sources[kind]
    seen, position = list[int](), 0
    while len(seen) < 3 * source.samples:
        seen += read_by_all(source, 1 + position % 12, 1 + position % 3, position)[0]
        position += BATCH
    for epoch in range(3):
        ids = seen[epoch * source.samples : (epoch + 1) * source.samples]
        assert sorted(ids) == list(range(source.samples))

"""Tables in a mixture: rows of each source as they are by themselves, filled up to the longest of any."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests_shared import decoder_task, plan_of

from paceline.errors import ConfigError, DataError
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.sources import open_sets
from paceline.run.process.world import World
from paceline.spec.data.mix import MixSpec
from paceline.spec.layout import Layout
from paceline.spec.task import DataSpec
from paceline.spec.watch.evaluate import EvaluateSpec, HeldOutSetSpec
from paceline.task.data.facts import data_facts
from paceline.task.data.order.budget import TokenBudget
from paceline.task.data.order.of_source import ids_at
from paceline.task.data.rows.mixed import MixedSource
from paceline.task.data.source import open_sources

SEED, ROWS = 3, 40
CPU = torch.device("cpu")


def write(folder: Path, kind: str) -> tuple[MixSpec, ...]:
    """Write a table of short rows and one of long ones; return both as parts of a mixture."""
    for name, words in (("short", 2), ("long", 12)):
        rows = [
            {"prompt": f"{name} {row}", "completion": "word " * (words + row % 5)} if kind == "prompts"
            else {"text": f"{name} " * (words + row % 5), "label": "good" if row % 2 else "bad"}
            for row in range(ROWS)
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tuple(MixSpec(f"table:{folder}/{name}.jsonl", name) for name in ("short", "long"))


def opened(folder: Path, kind: str, **options: Any) -> MixedSource:
    mix = options.pop("mix", None) or write(folder, kind)
    data = DataSpec("", mix=mix, rows="padded", validation_fraction=0.0, cache_dir=str(folder), seq_len=128, **options)
    source = open_sources(data, SEED)[0]
    assert isinstance(source, MixedSource)
    return source


@pytest.mark.parametrize("kind", ["prompts", "labels"])
@pytest.mark.parametrize("shuffle", ["global", "bucketed"])
def test_rows_are_those_of_their_tables_whatever_is_beside_them(kind: str, shuffle: str, tmp_path: Path) -> None:
    source = opened(tmp_path, kind, shuffle=shuffle, shuffle_bucket=8)
    for whole, multiple in ((source, 8), (pickle.loads(pickle.dumps(source)).tight(), 1)):
        for rank in range(2):
            stream = BatchStream(whole, SEED, plan_of(Layout(dp_replicate=2), batch=7, micro_batch=3), rank, CPU)
            stream.source = whole  # a CPU fills rows up no further than it must
            for micro in (each for step in range(6) for each in stream.at(7 * step).micro_batches if each.counts):
                width, longest = micro.data["tokens"].shape[1], int(source.lengths[micro.ids].max())
                assert width == min(128, longest + -longest % multiple)
                for row, sample in enumerate(micro.ids.tolist()):
                    own = whole.sources[sample // ROWS].read(np.array([sample % ROWS]))
                    for name, values in own.items():
                        known = values[0] if values.dim() == 1 else values[0, : source.lengths[sample]]
                        assert torch.equal(micro.data[name][row] if values.dim() == 1 else
                                           micro.data[name][row, : len(known)], known)  # fmt: skip
                    if kind == "prompts":
                        assert (micro.data["labels"][row, source.lengths[sample] :] == -100).all()


def test_a_mixture_says_its_longest_row_and_batches_of_tokens_come_to_its_end(tmp_path: Path) -> None:
    mix = tuple(MixSpec(each.source, each.name, most_samples=30) for each in write(tmp_path, "prompts"))
    source = opened(tmp_path, "prompts", mix=mix)
    data = DataSpec("", mix=mix, rows="padded", validation_fraction=0.0, cache_dir=str(tmp_path), seq_len=128)
    assert data_facts(data, None).longest == source.longest == source.lengths.max() > 64
    sizes, position, counts = TokenBudget(source, SEED, 500, source.longest), 0, []
    while position < 60:
        samples = sizes.at(0, position)
        lengths = source.lengths[ids_at(source, SEED, np.arange(position, position + samples))]
        assert lengths.sum() <= 500 and sizes.at_once(position, samples, 2) == 2 * source.longest // lengths.max()
        counts.append(samples)
        position += samples
    assert position == 60 and len(counts) > 3, "the last batch has what is left"
    stream = BatchStream(source, SEED, plan_of(Layout(), batch=6), 0, CPU, sizes)
    assert stream.at(60 - counts[-1], 1).samples == counts[-1]
    with pytest.raises(DataError, match="the mixture ends after 60 samples"):
        stream.at(60, 2)


def test_a_table_that_is_read_as_text_is_told_how_tables_are_named(tmp_path: Path) -> None:
    mix = tuple(MixSpec(each.source.removeprefix("table:"), each.name) for each in write(tmp_path, "prompts"))
    with pytest.raises(DataError, match="has no field 'text'") as raised:
        open_sources(DataSpec("", mix=mix, cache_dir=str(tmp_path), validation_fraction=0.0), SEED)
    assert 'source = "table:..."' in raised.value.try_ and "completion, prompt" in raised.value.try_


def test_tables_of_other_classes_make_no_mixture_and_no_set_of_held_out_data(tmp_path: Path) -> None:
    """Label 0 would be a class of one table and another class of the other."""
    mix = write(tmp_path, "labels")
    source = opened(tmp_path, "labels", mix=mix)
    assert tuple(source.classes or ()) == ("bad", "good")
    other = tmp_path / "long.jsonl"
    other.write_text(other.read_text().replace('"good"', '"average"'))
    with pytest.raises(DataError, match="'long' and 'short' do not make one mixture") as raised:
        opened(tmp_path, "labels", mix=mix)
    assert "classes average, bad and bad, good" in raised.value.because
    alone = World(0, 1, 0, CPU)
    task = decoder_task(data=DataSpec(mix[0].source, rows="padded", cache_dir=str(tmp_path)),
                        evaluate=EvaluateSpec(sets=(HeldOutSetSpec("other", mix[1].source),)))  # fmt: skip
    with pytest.raises(ConfigError, match=r"evaluate\.sets 'other' are not like") as refused:
        open_sets(task, alone, source)
    assert "classes average, bad and bad, good" in refused.value.because

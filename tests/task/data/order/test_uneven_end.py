"""Data that end within a global batch, where some ranks would still find their rows: all ranks stop before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import environment, paceline, records_of
from tests_shared import plan_of

from paceline.errors import ConfigError, DataError
from paceline.plan.prepare import prepare_task
from paceline.run.loop.loader import BatchStream
from paceline.spec.data.mix import MixSpec
from paceline.spec.layout import Layout
from paceline.spec.load import Spec, load_spec
from paceline.spec.run import RunSpec
from paceline.spec.steps.growth import BatchChange, GrowthSpec
from paceline.spec.survive.health import HealthSpec
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.data.order.mixture import MixShare, MixtureOrder
from paceline.task.data.order.of_source import GlobalOrder
from paceline.task.data.read_ahead import ReadAhead
from paceline.task.data.rows.mixed import MixedSource
from paceline.units import Amount

MOST = 50  # samples of each of the two parts


class Numbers:
    """Samples that are their own numbers."""

    samples, items_per_sample, unit, vocab, reads_in_threads = 1000, 1, "samples", None, True

    def __init__(self, name: str) -> None:
        self.fingerprint = name

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        return {"number": torch.from_numpy(np.asarray(ids))}


def ending() -> MixedSource:
    parts = [Numbers("a"), Numbers("b")]
    order = MixtureOrder([MixShare(1000, 1.0, most=MOST)] * 2, [GlobalOrder(1000)] * 2)
    return MixedSource(parts, ["a", "b"], order)  # type: ignore[list-item, unused-ignore]


class OfSize:
    """Batches of one size that the plan does not know, as of a run whose batch has grown."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def at(self, step: int, position: int) -> int:
        return self.samples

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        return micro_batch


@pytest.mark.parametrize("ranks", [2, 5, 7, 11])
@pytest.mark.parametrize("grown", [0, 23])
@pytest.mark.parametrize("ahead", [False, True])
def test_either_all_ranks_read_a_batch_or_none_does(ranks: int, grown: int, ahead: bool) -> None:
    """Each rank goes on for as long as it finds a batch, as a run does: they all stop after the same one."""
    batch, stopped = grown or 22, []
    for rank in range(ranks):
        plan = plan_of(Layout(dp_replicate=ranks), 22, 2)
        stream = BatchStream(ending(), 3, plan, rank, torch.device("cpu"), OfSize(grown) if grown else None)
        reader = ReadAhead(stream.on_host, lambda: None, begin_reads=stream.gathered) if ahead else None
        step = 0
        with pytest.raises(DataError, match="the mixture ends after 100 samples"):
            while True:
                if reader is not None:
                    reader.begin((step + 1) * batch, step + 2)
                (stream.on_host if reader is None else reader.take)(step * batch, step + 1)
                step += 1
        stopped.append(step)
        if reader is not None:
            reader.close()
    assert stopped == [2 * MOST // batch] * ranks


def corpus(folder: Path) -> tuple[MixSpec, MixSpec]:
    """Write two parts, and return them with a limit each."""
    for name in "ab":
        lines = [f'{{"text": "{name} {number} {"word " * 20}"}}' for number in range(30)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    first, second = (MixSpec(str(folder / f"{name}.jsonl"), name=name, most_samples=MOST) for name in "ab")
    return first, second


@pytest.mark.parametrize("changes", [(), (BatchChange(Amount(3, "steps"), Amount(20, "samples")),)])
def test_an_end_that_is_known_is_refused_before_step_0_and_what_is_advised_fits(
    tmp_path: Path, changes: tuple[BatchChange, ...]
) -> None:
    data = DataSpec(seq_len=16, validation_fraction=0.0, cache_dir=str(tmp_path / "cache"), mix=corpus(tmp_path))
    growth = GrowthSpec("schedule", changes=changes) if changes else GrowthSpec()
    model = ModelSpec(name="llama-1m", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32)

    def prepared(steps: int, **health: Any) -> int:
        task = Task(model=model, data=data, growth=growth, global_batch=Amount(14, "samples"),
                    stop=Amount(steps, "steps"))  # fmt: skip
        return prepare_task(Spec(task=task, run=RunSpec(health=HealthSpec(**health)))).steps

    fits = 3 + (2 * MOST - 3 * 14) // 20 if changes else 2 * MOST // 14
    with pytest.raises(ConfigError, match="the mixture ends after 100 samples") as refused:
        prepared(40)
    assert f'"{fits} steps"' in refused.value.try_
    assert prepared(fits) == fits
    with pytest.raises(ConfigError, match="the mixture ends"):
        prepared(fits + 1)
    with pytest.raises(ConfigError, match="takes 98 and up to 14 more" if not changes else "up to 20 more") as refused:
        prepared(fits, on_spike="rollback", most_skips=1)  # what is passed over is missing at the end
    advised = int(refused.value.try_.partition('"')[2].partition(" ")[0])
    assert prepared(advised, on_spike="rollback", most_skips=1) == advised == fits - 1
    assert prepared(fits, on_spike="skip", most_skips=1) == fits


GROWN = """
[task]
model = {{ name = "llama-1m", layers = 1, hidden = 32, heads = 2, kv_heads = 1, ffn = 32 }}
global_batch = "4 samples"
stop = "20 steps"
[task.data]
seq_len = 16
validation_fraction = 0.0
cache_dir = "{folder}/cache"
mix = [{{ source = "{folder}/a.jsonl", most_samples = 50 }}, {{ source = "{folder}/b.jsonl", most_samples = 50 }}]
[task.growth]
by = "noise"
learning_rate = "sqrt"
largest = "16 samples"
measure_every = 1
measurements = 2
noise_ratio = 1e-9
[cluster]
device = "cpu"
devices = 2
probe = false
[plan]
dp_replicate = 2
precision = "fp32"
[run]
dir = "{folder}/run"
verify = false
"""


def test_real_ranks_whose_batch_has_grown_end_together_where_the_data_do(tmp_path: Path) -> None:
    """88 samples are trained on, of 100: of the next 16 the first rank would find all of its own, the other none."""
    corpus(tmp_path)
    path = tmp_path / "grown.toml"
    path.write_text(GROWN.format(folder=tmp_path))
    assert load_spec(path).task.growth.by == "noise"
    ended = paceline("train", path, env=environment())
    told = ended.stdout + ended.stderr
    assert ended.returncode == 5, told
    assert "error: the mixture ends after 100 samples" in told
    last = records_of(tmp_path / "run", "step")[-1]
    assert last["position_after"] - last["position_before"] == 16
    assert 2 * MOST - 16 < last["position_after"] <= 2 * MOST

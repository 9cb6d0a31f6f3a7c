"""Whole runs on token shards: the numbers of the text they were made from, and what damage does to a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from runs import in_process, paceline, records_of, steps_of, write_corpus, write_spec

from paceline.run.loop.loader import held_out_ids
from paceline.spec.load import load_spec
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards.layout import BLOCK_BYTES
from paceline.task.data.storage.notices import left_out_of


def shards_of(folder: Path) -> Path:
    corpus = write_corpus(folder)
    spec = DataSpec(str(corpus), validation_fraction=0.2, cache_dir=str(folder / "cache"))
    prepare(spec, folder / "shards", part_bytes=20_000)
    return folder / "shards"


def damage(shards: Path) -> Path:
    """Damage one token in the middle of the first shard, and return the shard."""
    path = shards / "train-000000.shard"
    content = bytearray(path.read_bytes())
    content[64 + 9_000] ^= 1
    path.write_bytes(content)
    return path


def damage_all(shards: Path, split: str) -> None:
    """Damage every checked piece of a split's shards."""
    for path in shards.glob(f"{split}-*.shard"):
        content = bytearray(path.read_bytes())
        tokens = int.from_bytes(content[16:24], "little")
        for at in range(64, 64 + 2 * tokens, BLOCK_BYTES):
            content[at] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_of_damaged_samples_alone_ends_with_the_damage(tmp_path: Path, devices: int) -> None:
    """It ended with exit code 6 and the advice to look at the labels."""
    shards = shards_of(tmp_path)
    damage_all(shards, "train")
    spec = write_spec(tmp_path, tmp_path / "run", steps=2)
    options = (f"task.data.source={shards}", "task.data.on_bad=skip", "run.evaluate_every=none")
    words = [word for option in (*options, f"cluster.devices={devices}") for word in ("--set", option)]
    done = (in_process if devices == 1 else paceline)("train", spec, *words)
    assert done.returncode == 5, done.stderr
    batch = load_plan_batch(tmp_path / "run")
    assert f"step 1 has no item to learn from: {batch} of its {batch} samples are damaged and left out" in done.stderr
    assert f"{shards}/train-" in done.stderr and "is damaged" in done.stderr
    (ended,) = records_of(tmp_path / "run", "run_ended")
    assert ended["error"]["error"] == "DataError" and "masked" not in done.stderr


def test_a_proof_that_reads_damaged_samples_alone_names_the_damage(tmp_path: Path) -> None:
    shards = shards_of(tmp_path)
    damage_all(shards, "train")
    spec = write_spec(tmp_path, tmp_path / "run", devices=2)
    options = (f"task.data.source={shards}", "task.data.on_bad=skip", "plan.dp_shard=2")
    done = paceline("verify", spec, *(word for option in options for word in ("--set", option)))
    assert done.returncode == 5, done.stderr
    assert "are damaged and left out" in done.stderr and f"{shards}/train-" in done.stderr


def load_plan_batch(run_dir: Path) -> int:
    """Return the samples of a run's global batch."""
    (started,) = records_of(run_dir, "run_started")
    return int(started["plan"]["batch_samples"])


def test_damaged_held_out_samples_are_counted_in_every_evaluation_on_any_ranks(tmp_path: Path) -> None:
    """They were left out in silence. Where none is left, the evaluation names them."""
    shards = shards_of(tmp_path)
    held_out = next(iter(sorted(shards.glob("validation-*.shard"))))
    content = bytearray(held_out.read_bytes())
    spec = write_spec(tmp_path, tmp_path / "run", steps=4, precision="fp64")
    given = (f"task.data.source={shards}", "task.data.on_bad=skip", "run.evaluate_every=2 steps")
    content[64 + 5] ^= 1
    held_out.write_bytes(content)
    counted = []
    for name, devices, train in (("one", 1, in_process), ("two", 2, paceline)):
        options = (*given, f"cluster.devices={devices}", f"run.dir={tmp_path / name}")
        done = train("train", spec, *(word for option in options for word in ("--set", option)))
        assert done.returncode == 0, done.stderr
        faults = [each for each in records_of(tmp_path / name, "fault") if "held-out" in each["what"]]
        assert all(str(held_out) in each["because"] for each in faults)
        assert len(faults) == len(records_of(tmp_path / name, "evaluation")) > 0
        counted.append([each["what"] for each in faults])
    assert counted[0] == counted[1]
    settings = load_spec(spec, list(given))
    _, source = open_sources(settings.task.data, settings.task.seed)
    assert source is not None
    ids = held_out_ids(source, settings.run.evaluate_samples)
    source.read(ids)
    times = left_out_of(source, ids).total()
    assert counted[0][0] == "a held-out sample was left out" + (f", {times:,} times" if times > 1 else "")
    damage_all(shards, "validation")
    options = (*given, f"run.dir={tmp_path / 'none'}")
    done = in_process("train", spec, *(word for option in options for word in ("--set", option)))
    assert done.returncode == 5 and "are damaged and left out" in done.stderr and "masked" not in done.stderr


def test_a_run_on_shards_takes_the_steps_of_the_run_on_their_text(tmp_path: Path) -> None:
    shards = shards_of(tmp_path)
    plain, sharded = (write_spec(tmp_path, tmp_path / name, steps=4) for name in ("text", "sharded"))
    assert in_process("train", plain).returncode == 0
    done = in_process("train", sharded, "--set", f"task.data.source={shards}")
    assert done.returncode == 0, done.stderr
    assert [step["loss"] for step in steps_of(tmp_path / "sharded")] == [
        step["loss"] for step in steps_of(tmp_path / "text")
    ]
    (started,) = records_of(tmp_path / "sharded", "run_started")
    card = json.loads((shards / "shards.json").read_text())["card"]
    assert started["facts"]["card"] == card and card["documents"] == 40


def test_damage_ends_a_run_with_5_or_is_left_out_the_same_on_all_layouts(tmp_path: Path) -> None:
    shards = shards_of(tmp_path)
    shard = damage(shards)
    spec = write_spec(tmp_path, tmp_path / "run", steps=6, precision="fp64")
    stopped = paceline("train", spec, "--set", "cluster.devices=2", "--set", f"task.data.source={shards}")
    assert stopped.returncode == 5, stopped.stderr
    assert f"{shard} is damaged" in stopped.stderr and "its bytes 64 to" in stopped.stderr
    skip = ["--set", f"task.data.source={shards}", "--set", "task.data.on_bad=skip"]
    losses = []
    for name, devices, train in (("one", 1, in_process), ("two", 2, paceline)):
        done = train("train", spec, *skip, "--set", f"cluster.devices={devices}", "--set", f"run.dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
        faults = records_of(tmp_path / name, "fault")
        assert any("a sample was left out" in each["what"] and str(shard) in each["because"] for each in faults)
        losses.append([step["loss"] for step in steps_of(tmp_path / name)])
        assert "a sample was left out" in done.stdout
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)


def test_samples_that_are_left_out_are_counted_once_each_time_that_they_are_trained_on(tmp_path: Path) -> None:
    """Not where they are read: 32 steps ahead, past the last step, and by a rank that has no row and takes another's.

    On one rank, on three with four rows, and stopped and gone on with by another number of ranks.
    """
    shards = shards_of(tmp_path)
    damage(shards)
    spec = write_spec(tmp_path, tmp_path / "run", steps=9, precision="fp64")
    plan = ['task.global_batch="4 samples"', "plan.micro_batch=1"]
    skip = [f"task.data.source={shards}", "task.data.on_bad=skip", *plan]
    data = DataSpec(str(shards), seq_len=load_spec(spec).task.data.seq_len, on_bad="skip")

    def trained(name: str, *parts: tuple[int, int]) -> tuple[int, int]:
        for devices, steps in parts:
            own = [f"run.dir={tmp_path / name}", f"cluster.devices={devices}", f'task.stop="{steps} steps"']
            done = paceline("train", spec, *(word for option in (*skip, *own) for word in ("--set", option)))
            assert done.returncode == 0, done.stderr
        faults = [each["what"] for each in records_of(tmp_path / name, "fault") if "was left out" in each["what"]]
        counted = sum(int(found[1]) if (found := re.search(r"(\d+) times", what)) else 1 for what in faults)
        source, _ = open_sources(data, 0)
        read = [sample for step in steps_of(tmp_path / name) for sample in step["sample_ids"]]
        for sample in set(read):
            source.read(np.array([sample]))
        return counted, left_out_of(source, np.array(read)).total()

    found = [trained("one", (1, 9)), trained("three", (3, 9)), trained("gone on", (3, 5), (1, 9))]
    assert len(set(found)) == 1 and found[0][0] == found[0][1] > 0, found

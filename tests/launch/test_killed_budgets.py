"""A run is killed whole, by SIGKILL, and started again by the same command: its last weights are the undisturbed ones.

Of batches that follow from the lengths of rows: of one table, of a mixture of two whose rows are filled up; and packed.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from runs import is_running, paceline, ranks_of, records_of, start, steps_of, wait_for_step, wait_until

from paceline.checkpoint import find_latest, full_tensors, read_manifest

STEPS, KILLED_AFTER = 60, 7
SPEC = """
[task]
name = "budget"
model = {{ name = "llama-1m", hidden = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
optimizer = {{ lr = 3e-3 }}
{batch}
stop = "{steps} steps"

[task.data]
seq_len = 64
validation_fraction = 0
cache_dir = "{folder}/cache"
{data}

[cluster]
device = "cpu"
devices = {devices}
probe = false

[plan]
precision = "fp32"
micro_batch = 2

[run]
dir = "{folder}/{name}"
deterministic = true
verify = false
evaluate_every = "none"
checkpoint_every = "3 steps"
record_samples = true
"""
BUDGET = 'batch_rows = "by_length"\nglobal_batch = "300 tokens"'
KINDS = {
    "table": (BUDGET, 'source = "{folder}/short.jsonl"\nrows = "padded"\nshuffle = "bucketed"\nshuffle_bucket = 8'),
    "mixture": (
        BUDGET,
        'source = ""\nrows = "padded"\nshuffle = "bucketed"\nshuffle_bucket = 8\nmix = [\n'
        '  {{ source = "table:{folder}/short.jsonl", name = "short", weight = 2.0 }},\n'
        '  {{ source = "table:{folder}/long.jsonl", name = "long", weight = 1.0 }},\n]',
    ),
    "packed": (
        'global_batch = "6 samples"',
        'source = "{folder}/short.jsonl"\nrows = "packed"\ncross_documents = false',
    ),
}


def spec_of(folder: Path, kind: str, name: str, devices: int) -> Path:
    """Write two tables, and the spec of a task on one of them or on both; return the spec's path."""
    for table, words in (("short", 1), ("long", 5)):
        rows = [{"prompt": f"{table} {at}", "completion": "word " * (words + at * 7 % 5)} for at in range(70)]
        (folder / f"{table}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    batch, data = KINDS[kind]
    given = {"folder": folder, "steps": STEPS, "devices": devices, "name": name}
    path = folder / f"{name}.toml"
    path.write_text(SPEC.format(batch=batch, data=data.format(folder=folder), **given))
    return path


def last_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's newest checkpoint."""
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None and newest.name.startswith(f"step-{STEPS:08d}")
    return dict(full_tensors(newest, ""))


DEEP = [pytest.param("mixture", 1, marks=pytest.mark.deep), pytest.param("packed", 2, marks=pytest.mark.deep)]


@pytest.mark.parametrize(("kind", "devices"), [("table", 2), *DEEP])
def test_killed_and_started_again_a_run_ends_with_the_same_bits(tmp_path: Path, kind: str, devices: int) -> None:
    whole = paceline("train", spec_of(tmp_path, kind, "whole", devices), timeout=200)
    assert whole.returncode == 0, whole.stderr
    spec, run_dir = spec_of(tmp_path, kind, "killed", devices), tmp_path / "killed"
    process = start("train", spec)
    wait_for_step(run_dir, KILLED_AFTER, process)
    ranks = ranks_of(process.pid) or {0: process.pid}
    for pid in (process.pid, *ranks.values()):  # the supervisor first: nobody goes on by itself
        os.kill(pid, signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(is_running, ranks.values())))
    assert not records_of(run_dir, "run_ended"), "killed in the midst of it"
    again = paceline("train", spec, timeout=200)
    assert again.returncode == 0, again.stderr
    first, second = records_of(run_dir, "run_started")
    assert first["step"] == 0 < second["step"] < STEPS and second["resumed_from"]
    undisturbed, resumed = last_weights(tmp_path / "whole"), last_weights(run_dir)
    assert undisturbed.keys() == resumed.keys() and len(undisturbed) > 20
    assert all(torch.equal(resumed[name], value) for name, value in undisturbed.items())
    newest = find_latest(run_dir / "checkpoints")
    extra = read_manifest(newest).extra if newest else {}
    of_data = [extra["data_fingerprint"], extra["progress"], extra["spec"]["task"]["seed"]]
    assert len(json.dumps(of_data)) < 300, "all that says which samples come next"
    told = [[(step["loss"], step["sample_ids"]) for step in steps_of(tmp_path / name)] for name in ("whole", "killed")]
    assert told[0] == told[1] and len(told[0]) == STEPS
    sizes = {len(ids) for _, ids in told[0]}
    assert (len(sizes) > 2) == (kind != "packed"), "rows follow from their lengths"

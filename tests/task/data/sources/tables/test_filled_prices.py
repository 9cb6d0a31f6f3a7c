"""Batches of rows that are filled up are priced by the tokens that a table's rows come to, not as rows of `seq_len`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import in_process, records_of
from tests_shared import SEQ_LEN, Dropout, PaddedText, decoder_task

from paceline.plan.cost.pricing import price
from paceline.plan.learn.task_measurement import measured_plan
from paceline.plan.planned import Planned, plan_task
from paceline.plan.prepare import prepare_task
from paceline.run.loop.loader import BatchStream
from paceline.session.measure_device import one_pass
from paceline.spec.arguments import make_spec
from paceline.spec.load import load_spec
from paceline.task.data.order.budget import budget_of
from paceline.task.data.order.lengths import BATCHES, STRETCHES, filled, multiple_of
from paceline.task.data.protocol import filled_for
from paceline.task.data.source import open_sources
from paceline.task.profile.of_task import profile_task
from paceline.units import Amount

SPEC = """
[task]
name = "answers"
model = {{ name = "llama-1m", hidden = 32, layers = 2, heads = 4, kv_heads = 2, ffn = 48 }}
global_batch = "2000 tokens"
batch_rows = "{rows}"
stop = "{steps} steps"

[task.data]
source = "{folder}/answers.jsonl"
seq_len = 512
rows = "padded"
shuffle = "{order}"
shuffle_bucket = 8
validation_fraction = 0
cache_dir = "{folder}/cache"

[cluster]
device = "cpu"
devices = {devices}
probe = false

[plan]
precision = "{precision}"
micro_batch = {micro_batch}

[run]
dir = "{folder}/run"
verify = false
evaluate_every = "none"
"""


def spec_of(folder: Path, **options: object) -> Path:
    """Write a table of answers of 30 to 230 bytes and a spec of a task on it, and return the spec's path."""
    lengths = np.random.default_rng(3).integers(2, 42, 300)
    rows = [json.dumps({"prompt": f"Question {at:03d}", "completion": "word " * n}) for at, n in enumerate(lengths)]
    (folder / "answers.jsonl").write_text("\n".join(rows))
    given = {"order": "bucketed", "rows": "by_length", "steps": 30, "devices": 1, "precision": "fp32",
             "micro_batch": 2, **options}  # fmt: skip
    (folder / "spec.toml").write_text(SPEC.format(folder=folder, **given))
    return folder / "spec.toml"


def counted(planned: Planned, steps: int) -> tuple[float, float, float, int]:
    """Return the tokens, pairs of tokens and passes of a step that the fullest rank really reads, and the largest
    micro-batch of all."""
    task, plan = planned.spec.task, planned.plan
    source, _ = open_sources(task.data, task.seed)
    source = filled_for(source, "cpu", 1, "bf16")
    sizes = budget_of(source, task.seed, 2000) if task.batch_rows == "by_length" else None
    ranks = range(plan.layout.data_degree)
    streams = [BatchStream(source, task.seed, plan, rank, torch.device("cpu"), sizes) for rank in ranks]
    position, found, largest = 0, np.zeros(3), 0
    for step in range(1, steps + 1):
        batches = [stream.at(position, step) for stream in streams]
        position += batches[0].samples
        shapes = np.array([[each.data["tokens"].shape for each in batch.micro_batches] for batch in batches])
        counts = np.array([[each.counts for each in batch.micro_batches] for batch in batches])
        tokens = np.where(counts, shapes.prod(2), 0)  # a stand-in for a rank of few rows is none of them
        pairs = tokens * shapes[:, :, 1]
        found += tokens.sum(1).max(), pairs.sum(1).max(), counts.shape[1]
        largest = max(largest, int(tokens.max()))
    return *(found / steps).tolist(), largest


def check_price(planned: Planned) -> None:
    """Assert that a step is priced by what its fullest rank reads, counted over 90 real steps."""
    profile, (tokens, pairs, passes, most) = planned.profile, counted(planned, 90)
    sheet = planned.search.candidates.context.sheet(planned.plan)
    priced = float(profile.tokens_per_sample * sheet.columns.device_samples[0])
    assert sheet.fill("tokens")[0] * priced == pytest.approx(tokens, rel=0.06)
    assert sheet.fill("pairs")[0] * priced * profile.tokens_per_sample == pytest.approx(pairs, rel=0.08)
    assert sheet.passes_made[0] == pytest.approx(passes, rel=0.06)
    assert profile.tokens_per_sample < planned.facts.items_per_sample == 512
    assert most <= planned.plan.micro_batch * profile.tokens_per_sample, "memory is that of the largest there is"
    assert STRETCHES * BATCHES > 90, "as many are looked at, elsewhere"


@pytest.mark.parametrize("order", ["global", "bucketed"])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_a_step_is_priced_by_the_tokens_that_come(tmp_path: Path, order: str, micro_batch: int) -> None:
    """Counted over three epochs of real batches; with rows of `seq_len` a step would be priced at 1,536 to 3,600."""
    check_price(plan_task(load_spec(spec_of(tmp_path, order=order, micro_batch=micro_batch))))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 1), (2, 4), (3, 1), (4, 2), (6, 1), (8, 1)])
def test_a_step_is_priced_by_what_the_fullest_of_several_ranks_reads(
    tmp_path: Path, ranks: int, micro_batch: int
) -> None:
    """As if one rank had the whole batch, 8 ranks made a seventh of the passes that they make."""
    spec = load_spec(spec_of(tmp_path, devices=ranks, micro_batch=micro_batch), [f"plan.dp_replicate={ranks}"])
    check_price(plan_task(spec))


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 8), (3, 2), (4, 2)])
def test_a_fixed_number_of_rows_is_priced_by_what_comes_too(tmp_path: Path, ranks: int, micro_batch: int) -> None:
    """They were all priced as rows of `seq_len`, some four times their tokens."""
    given = {"rows": "fixed", "order": "global", "devices": ranks, "micro_batch": micro_batch}
    spec = load_spec(spec_of(tmp_path, **given), [f"plan.dp_replicate={ranks}", 'task.global_batch="16 samples"'])
    planned = plan_task(spec)
    check_price(planned)
    step = planned.forecast
    full = planned.search.candidates.context.sheet(planned.plan).fill_of_batch("tokens")[0]
    tokens = 16 * planned.profile.tokens_per_sample * full
    assert step.tokens_per_second * step.step_seconds.value == pytest.approx(tokens)


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize("rows", ["by_length", "fixed"])
def test_what_is_measured_is_what_a_run_passes_at_once(tmp_path: Path, rows: str, micro_batch: int) -> None:
    """A budget of tokens was measured on the plan's micro-batch of samples as they come: on 0.3 to 1.6 times the tokens
    that its seconds were held against."""
    given = {"rows": rows, "order": "bucketed", "micro_batch": micro_batch, "precision": "bf16"}
    asked = ['task.global_batch="9 samples"'] if rows == "fixed" else []
    planned = plan_task(load_spec(spec_of(tmp_path, **given), asked))
    task, chosen = planned.spec.task, measured_plan(planned.plan)
    source, _ = open_sources(task.data, task.seed)
    batch, tokens, pairs = one_pass(task, chosen, source, torch.device("cpu"))
    (micro,) = batch.micro_batches
    shape, longest = micro.data["tokens"].shape, planned.profile.tokens_per_sample
    assert tokens == pytest.approx(shape[0] * shape[1] / (micro_batch * longest))
    assert pairs == pytest.approx(shape[0] * shape[1] ** 2 / (micro_batch * longest**2))
    sizes = budget_of(source, task.seed, 2000) if rows == "by_length" else None
    stream, position, passed = BatchStream(source, task.seed, chosen, 0, torch.device("cpu")), 0, []
    for _ in range(BATCHES):
        count = micro_batch if sizes is None else sizes.at(1, position)
        at_once = micro_batch if sizes is None else min(count, sizes.at_once(position, count, micro_batch))
        passed.append(stream.at(position, 1, at_once, at_once).micro_batches[0].data["tokens"].numel())
        position += count
    assert min(passed) < shape.numel() < max(passed) and sum(each < shape.numel() for each in passed) <= BATCHES // 2
    assert sum(each > shape.numel() for each in passed) < BATCHES // 2 + 1


def test_seconds_and_bytes_follow(tmp_path: Path) -> None:
    """Against the same rows with each taken for one of `seq_len` tokens: less time, less memory, the same steps."""
    short = plan_task(load_spec(spec_of(tmp_path)))
    context = short.search.candidates.context
    full = context.sheet(short.plan)
    assert short.forecast.model_flops_per_step == pytest.approx(
        3 * short.batch_samples * sum(
            full.fill("tokens")[0] * block.matmul_flops + full.fill("pairs")[0] * block.attention_flops
            for block in short.profile.blocks
        )
    )  # fmt: skip
    text = (tmp_path / "spec.toml").read_text().replace('by_length"', 'fixed"').replace('"2000 tokens"', '"8 samples"')
    (tmp_path / "fixed.toml").write_text(text)
    fixed = plan_task(load_spec(tmp_path / "fixed.toml"))
    profile = profile_task(fixed.spec.task, fixed.facts)
    assert fixed.batch_samples == short.batch_samples and not profile.fills and profile.tokens_per_sample == 512
    longest = price(dataclasses.replace(context, profile=profile), short.plan)
    share = short.profile.tokens_per_sample / 512
    products = {term.name: term.value for term in short.forecast.time}, {t.name: t.value for t in longest.time}
    ratio = products[0]["products, forward"] / products[1]["products, forward"]
    assert ratio == pytest.approx(share * full.fill("tokens")[0], rel=0.15)  # rates differ with the rows a little
    assert short.forecast.peak_bytes.value < longest.peak_bytes.value
    assert fixed.forecast.peak_bytes.value == pytest.approx(short.forecast.peak_bytes.value), "of the longest there is"


@pytest.mark.parametrize("micro_batch", [1, 3, 5])
def test_rows_that_are_filled_up_take_no_more_than_was_planned(tmp_path: Path, micro_batch: int) -> None:
    """Rows of a few tokens are filled up to eight: as many as the tokens alone allow would take twice the room."""
    rows = [json.dumps({"prompt": "a", "completion": "b" * (1 + 22 * (at % 9 == 0))}) for at in range(90)]
    spec = spec_of(tmp_path, micro_batch=micro_batch, order="bucketed", precision="bf16")
    (tmp_path / "answers.jsonl").write_text("\n".join(rows))
    planned = plan_task(load_spec(spec))
    source, _ = open_sources(planned.spec.task.data, planned.spec.task.seed)
    multiple, lengths = multiple_of(source), np.asarray(source.lengths)
    assert multiple == 8 and filled(int(lengths.min()), 8, 512) > 1.2 * lengths.min(), "filled up by more than a bit"
    *_, most = counted(planned, 40)
    assert most <= planned.plan.micro_batch * planned.profile.tokens_per_sample


class Own(PaddedText):
    """A data set of the user's own that says lengths, and whose samples are no tokens."""

    samples, unit, items_per_sample, fingerprint = 50, "samples", 1, "own lengths"
    lengths = np.random.default_rng(1).integers(8, SEQ_LEN + 1, 50)


def test_samples_of_ones_own_are_planned_by_their_lengths_too() -> None:
    """A sample that counts as one item was planned as one token: 400 samples of 400 tokens, one at a time."""
    task = decoder_task(data=Own(), global_batch=Amount(400, "tokens"), batch_rows="by_length", objective="next_token")
    task = dataclasses.replace(task, model=Dropout)
    prepared = prepare_task(make_spec(task))
    longest = int(Own.lengths.max())
    assert prepared.batch_samples == 400 // longest and prepared.profile.fills
    assert budget_of(Own(), 0, 400).at_once(0, 10, 2) >= 2


def test_a_run_keeps_how_full_its_batches_are(tmp_path: Path) -> None:
    """What the journal keeps of the profile says how full batches are; the run comes to its end."""
    done = in_process("train", spec_of(tmp_path, steps=2))
    assert done.returncode == 0, done.stderr
    (started,) = records_of(tmp_path / "run", "run_started")
    assert started["profile"]["fills"] and started["profile"]["tokens_per_sample"] < 512

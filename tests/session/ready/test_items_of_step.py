"""A step's rate is that of all tokens it computes, as the forecast counts them, whatever its loss counts or weighs."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest

from paceline.plan.planned import plan_task
from paceline.run.record.status import StatusLine
from paceline.session.ready.brief_of_plan import make_brief
from paceline.spec.journal.kinds import StepRecord
from paceline.spec.load import parse_spec
from paceline.supervise.told.brief import Brief, brief_from_json

SPEC = """
[task]
model = {{ name = "llama-1m", layers = 1 }}
data = {{ source = "{source}", seq_len = 64, max_bytes = "200 kB", cache_dir = "{cache}"{rows} }}
global_batch = "8 samples"
stop = "10 steps"
{more}
[cluster]
device = "cpu"
devices = 1
probe = false
[run]
dir = "{cache}/run"
"""


def brief_of(folder: Path, source: str, more: str = "", rows: str = "", batch: str = "8 samples") -> Brief:
    text = SPEC.format(source=source, cache=folder, more=more, rows=rows).replace("8 samples", batch)
    return brief_from_json(make_brief(plan_task(parse_spec(text))).to_json())


def conversations(folder: Path, longest: int = 1) -> str:
    """Write conversations of which the answers are a small part, of up to `longest` words; return their path."""
    path = folder / "chats.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"{at} and a question that is long"},
                          {"role": "assistant", "content": "yes " * (longest if at % 20 == 0 else 1)}]}
            for at in range(200)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def line_of(brief: Brief, record: StepRecord) -> str:
    stream = io.StringIO()
    StatusLine(brief, 1, stream=stream).write(record)
    return stream.getvalue()


def test_of_conversations_all_tokens_count_and_not_those_alone_that_are_learnt(tmp_path: Path) -> None:
    brief = brief_of(tmp_path, conversations(tmp_path))
    assert 8 * 40 < brief.items_of_step(8, weight=32.0) <= 8 * 64
    rate = brief.items_of_step(8, 32.0) / 0.1
    record = StepRecord(1, 0, 8, 2.0, 32.0, 1.0, 1e-3, {"total": 0.1}, rate, 0)
    assert f"{rate / 1000:.3g} k tok/s" in line_of(brief, record)


def test_of_text_the_tokens_of_a_step_are_those_that_its_loss_counts(tmp_path: Path) -> None:
    assert brief_of(tmp_path, "stdlib").items_of_step(8, weight=math.nan) == pytest.approx(8 * 64)


def test_candidates_that_are_scored_and_left_out_are_not_counted(tmp_path: Path) -> None:
    brief = brief_of(tmp_path, "stdlib", 'selection = { by = "loss", candidates = 4 }')
    assert brief.items_of_step(4 * 8, weight=math.nan) == pytest.approx(8 * 64)


def test_without_a_forecast_what_the_loss_counts_is_told(tmp_path: Path) -> None:
    brief = dataclasses.replace(brief_of(tmp_path, "stdlib"), items_of_sample=math.nan)
    assert brief.items_of_step(8, weight=17.0) == 17.0


def test_batches_cut_by_tokens_compute_about_as_many_whatever_their_rows(tmp_path: Path) -> None:
    """A plan counts them as rows of the longest, of which it has a fifth of the rows that a step takes."""
    source, rows = conversations(tmp_path, longest=4), ', rows = "padded", shuffle = "bucketed", shuffle_bucket = 8'
    brief = brief_of(tmp_path, source, 'batch_rows = "by_length"', rows, "512 tokens")
    assert 256 < brief.items_of_step(8, weight=32.0) <= 512
    assert brief.items_of_step(20, weight=80.0) == brief.items_of_step(8, weight=32.0)

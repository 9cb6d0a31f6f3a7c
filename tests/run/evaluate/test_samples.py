"""Texts that a model writes are those of one device on every axis, greedy and drawn, and of a plain loop."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.evaluate.samples import SampleWriter, sample_writer
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.watch.samples import SamplesSpec
from paceline.task.objective import classification, next_token

PROMPTS, TOKENS, STEP, SEED = ((5, 6, 7), (40,)), 6, 4, 7
LAYOUTS = [Layout(dp_replicate=4), Layout(dp_shard=2, tp=2), Layout(dp_shard=2, cp=2), Layout(dp_shard=2, pp=2)]
CPU = torch.device("cpu")


class Numbers:
    """Token ids as text."""

    name, vocab, end_of_document, identity = "numbers", VOCAB, VOCAB, ""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def writer(temperature: float) -> SampleWriter:
    spec = SamplesSpec(prompts=("a", "b"), tokens=TOKENS, temperature=temperature)
    return SampleWriter(spec, Numbers(), PROMPTS, SEQ_LEN, SEED)  # type: ignore[arg-type]


def written(layout: Layout, world: World) -> list[list[str]]:
    task = decoder_task()
    built = assemble(task, plan_of(layout, precision="fp64"), world, task.data, SEQ_LEN)
    return [writer(temperature).write(built.stepper, STEP) for temperature in (0.0, 1.0)]


def everywhere() -> list[list[list[str]]]:
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), CPU)
    return [written(layout, world) for layout in LAYOUTS]


def plainly(temperature: float) -> list[str]:
    """Continue the prompts one by one, without padding, with a model of one device."""
    task = decoder_task()
    model = assemble(task, plan_of(Layout(), precision="fp64"), World(0, 1, 0, CPU), task.data, SEQ_LEN).model.eval()
    texts = []
    for row, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]))[0, -1].double()
            named = hashlib.blake2b(f"{SEED} {STEP} {row} {len(tokens)}".encode(), digest_size=6).digest()
            draw = int.from_bytes(named, "big") / 2**48
            whole = torch.softmax(logits, 0).cumsum(0)
            tokens.append(int((whole < draw * whole[-1]).sum()) if temperature else int(logits.argmax()))
        texts.append(Numbers().decode(tokens[len(prompt) :]))
    return texts


def test_every_axis_writes_what_one_device_writes() -> None:
    expected = [plainly(0.0), plainly(1.0)]
    assert expected[0] != expected[1]
    assert written(Layout(), World(0, 1, 0, CPU)) == expected
    for found in run_ranks(everywhere, 4):
        assert found == [expected] * len(LAYOUTS)


def test_what_cannot_be_continued_is_refused() -> None:
    asked = SamplesSpec(prompts=("a",))
    assert sample_writer(SamplesSpec(), SimpleNamespace(), next_token, 1) is None
    with pytest.raises(ConfigError, match="nothing continues them"):
        sample_writer(asked, SimpleNamespace(), next_token, 1)
    with pytest.raises(ConfigError, match="nothing continues them"):
        sample_writer(asked, SimpleNamespace(), classification, 1)
    with pytest.raises(ConfigError, match="empty"):
        SamplesSpec(prompts=("",))

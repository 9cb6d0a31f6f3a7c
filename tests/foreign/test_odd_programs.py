"""Programs and families beside the table: none of them trains otherwise than on one device without a word.

Programs with parts of torch that few use are held against a plain loop; of families with state spaces, recurrences,
dropout and noise of routers every axis that is offered is proven. Families whose blocks are compiled compute what one
device does without a compiler, and `paceline.fit` trains programs as a plain loop does, or refuses them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from foreign_catalogue import HF_MODELS, MORE_FAMILIES, NEWEST_PROGRAMS, ODD_PROGRAMS, OWN_MODELS, Foreign
from foreign_held import BATCH, every_axis, look, spec_of, task_of
from plain_loop import trained
from runs import steps_of
from tests_shared import plan_of
from vectors import needs_vectors
from write_foreign import verdict

import paceline
from paceline.errors import PacelineError
from paceline.report.summary import Summary
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout
from paceline.spec.proof.records import CheckProof
from paceline.task.data.source import open_sources
from paceline.task.profile import traced
from paceline.task.profile.apart import trace_here
from paceline.task.profile.tracing import Counts
from paceline.verify.compare.layout import compare

# What a row comes to, where that is not "same": the proof says "not equal"; it draws numbers of its own, the same as
# on one device; an error that says what to do; a refusal before it trains.
VERDICTS = {
    **dict.fromkeys(("spectral norm by hooks", "curriculum", "remembers", "in turn", "by rows"), "told"),
    **dict.fromkeys(("counts evaluations", "expert choice"), "told"),
    **dict.fromkeys(("thawing", "reversible", "gradient meter"), "failed"),
    **dict.fromkeys(("REINFORCE", "by frequency", "mean in the backward pass", "annealing"), "told"),
    **dict.fromkeys(("dropout computed again", "numpy noise", "Python's chance"), "random"),
    **dict.fromkeys(("numpy's choice", "Python's order", "random weights", "RReLU"), "random"),
    **dict.fromkeys(("compiled part", "penalty for each row", "one penalty"), "failed"),
    **dict.fromkeys(("first batch", "adaptive softmax", "sparse codes"), "failed"),
    **dict.fromkeys(("dropout in evaluations", "Gumbel choice"), "random"),
    **dict.fromkeys(("survival", "Dice", "a mean of z-losses"), "told"),
    "scripted blocks": "refused",
    "jacobian in forward": "failed",  # under dp_shard, in words: it leads back through a block's weights twice
    "traced graph": "failed",  # under dp_shard, in words: a graph uses weights of blocks without calling these
    **dict.fromkeys(("sparse buffer", "late head", "extra state"), "refused"),
}


@pytest.mark.deep
@pytest.mark.parametrize("row", [*ODD_PROGRAMS, *NEWEST_PROGRAMS], ids=lambda row: row.name)
def test_an_odd_program_trains_as_in_a_plain_loop_or_is_told(row: Foreign) -> None:
    record = look(row, whole=False)
    assert verdict(record) == VERDICTS.get(row.name, "same"), record


OPEN = {  # beside dp_replicate and dp_shard, which all have
    **dict.fromkeys(("Jamba", "Jamba with dropout", "GraniteMoeHybrid", "NemotronH"), ("ep",)),
    **dict.fromkeys(("Qwen3Next", "MiniMax"), ("pp", "ep")),
    **dict.fromkeys(("Phimoe", "Phimoe with noise"), ("cp", "ep")),
    **dict.fromkeys(("Llama with dropout", "Phi with dropout", "GPTNeoX with dropout"), ("tp", "pp")),
    "Mixtral with noise": ("cp", "pp", "ep"),
}
# Its experts draw masks for as many tokens as chance sends them: no sample has these numbers, and no axis is offered.
CLOSED = ("Switch",)


def params() -> list[object]:
    marks = {True: (), False: (pytest.mark.deep,)}
    return [pytest.param(row, id=row.name, marks=marks[row.slice]) for row in MORE_FAMILIES]


@pytest.mark.parametrize("row", params())
def test_every_axis_that_is_offered_is_proven_equal_or_refused_in_words(row: Foreign) -> None:
    opened, proofs = every_axis(row)
    assert opened == ([] if row.name in CLOSED else ["dp_replicate", "dp_shard", *OPEN.get(row.name, ())])
    assert len(proofs) == len(opened)
    for layout, proof in proofs.items():
        assert proof.get("equal"), (layout, proof)


# ---- traces ----------------------------------------------------------------------------------------------------------

TRACED = ("U-Net", "LSTM", "VAE", "experts in a list", "SyncBatchNorm", "nn.TransformerEncoder")  # others are deep


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.name in TRACED else (pytest.mark.deep,))
        for row in (*OWN_MODELS, *ODD_PROGRAMS, *NEWEST_PROGRAMS)
    ],
)
def test_a_trace_with_values_counts_what_one_on_fake_tensors_does(
    row: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it ends, and fake tensors tell: no forecast depends on where shapes were looked at."""
    follow, counted = traced.trace, []

    def both(*given: Any, where: str, **how: Any) -> list[Counts]:
        found = follow(*given, where=where, **how)
        if where == "small":
            counted.append([plain(counts) for counts in (found, follow(*given, where="fake", **how))])
        return found

    def plain(counts: list[Counts]) -> list[Counts]:
        return [dataclasses.replace(each, storages=[]) for each in counts]

    monkeypatch.setattr(traced, "trace", both)
    try:
        trace_here(task_of(row))
    except PacelineError:  # as it is refused wherever it is traced
        assert row.name not in TRACED
    assert all(small == fake for small, fake in counted)
    assert counted or row.name not in TRACED[:2]


# ---- compiled blocks -------------------------------------------------------------------------------------------------

ROWS = {row.name: row for row in (*HF_MODELS, *MORE_FAMILIES, *OWN_MODELS, *ODD_PROGRAMS, *NEWEST_PROGRAMS)}
# Of each kind of block one: what the compiler makes of others is alike.
FAMILIES = (
    "Llama", "Qwen2", "Gemma2", "Phi", "GPTNeoX", "Falcon", "GPT2", "Bloom", "Mixtral", "Qwen3Moe", "DeepseekV3",
    "GptOss", "Mamba", "Mamba2", "Rwkv", "RecurrentGemma", "Qwen3Next", "Lfm2", "T5", "BERT", "ViT", "ConvNeXt",
    "Whisper", "GPT2 with dropout", "BERT with dropout",
)  # fmt: skip


def compiled(row: Foreign, layout: Layout, changes: dict[str, Any]) -> CheckProof:
    """Return how the compiled blocks of a family stand to one device, whose blocks are not."""
    torch._dynamo.reset()
    task = task_of(row)
    source = open_sources(task.data, task.seed)[0]
    plan = plan_of(layout, 7, 2, **{"precision": "fp64", "compile": True, **changes})
    return compare(task, plan, join_world("cpu", threads=1), source, source.items_per_sample, 2)


@needs_vectors
@pytest.mark.deep
@pytest.mark.parametrize("name", FAMILIES)
def test_a_compiled_family_equals_one_device(name: str) -> None:
    found = compiled(ROWS[name], Layout(), {})
    assert found.equal, found.first_difference


@needs_vectors
@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("Llama", Layout(dp_shard=2), {"recompute": "full"}),
        pytest.param("Qwen2", Layout(tp=2), {}, marks=pytest.mark.deep),
        pytest.param("T5", Layout(dp_shard=2), {"recompute": "selective"}, marks=pytest.mark.deep),
        pytest.param("Mixtral", Layout(dp_shard=2, ep=2), {}, marks=pytest.mark.deep),
        pytest.param("BERT with dropout", Layout(dp_replicate=2), {}, marks=pytest.mark.deep),
    ],
)
def test_a_compiled_layout_of_a_family_equals_one_device(name: str, layout: Layout, changes: dict[str, Any]) -> None:
    found = run_ranks(compiled, layout.devices, ROWS[name], layout, changes, timeout_seconds=200)[0]
    assert found.equal, found.first_difference


# ---- `paceline.fit` --------------------------------------------------------------------------------------------------

STEPS = 8


@pytest.fixture
def ranks_import_these(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [path for path in sys.path if Path(path).is_relative_to(Path(__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")]))


def fitted(row: Foreign, folder: Path) -> Summary:
    """Return the report of a run of two ranks."""
    spec = spec_of(row, {"dp_replicate": 2})
    task = dataclasses.replace(spec.task, stop=f"{STEPS} steps")
    return paceline.fit(dataclasses.replace(spec, task=task, run=dataclasses.replace(spec.run, dir=str(folder))))


@pytest.mark.parametrize("name", [
    "GAN", *(pytest.param(name, marks=pytest.mark.deep) for name in (
        "gradient penalty", "slow copy", "distillation", "SyncBatchNorm", "mixture of depths", "outcome")),
])  # fmt: skip
def test_a_program_is_fitted_as_a_plain_loop_trains_it(name: str, tmp_path: Path, ranks_import_these: None) -> None:
    row = ROWS[name]
    summary = fitted(row, tmp_path / "run")
    assert summary.status == "complete" and summary.verification is not None
    plain = trained(row.model, row.arguments, row.data, row.objective, BATCH, STEPS, row.turns)["losses"]
    for step, record in enumerate(steps_of(tmp_path / "run")):
        told = list(record["turns"].values()) if row.turns else [record]
        mine = plain[step * len(told) : (step + 1) * len(told)]
        assert [one["loss"] for one in told] == pytest.approx(mine, rel=2e-4), step + 1


@pytest.mark.parametrize(("name", "said"), [
    ("survival", "not a sum over rows"),
    pytest.param("contrastive (InfoNCE)", "not a sum over rows", marks=pytest.mark.deep),
    pytest.param("a mean of z-losses", "not a sum over rows", marks=pytest.mark.deep),
])  # fmt: skip
def test_a_program_whose_rows_see_each_other_is_not_trained(
    name: str, said: str, tmp_path: Path, ranks_import_these: None
) -> None:
    with pytest.raises(PacelineError, match=said):
        fitted(ROWS[name], tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoints/*"))

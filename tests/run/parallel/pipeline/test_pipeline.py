"""A pipeline computes the numbers of one device: every schedule, alone and with the data axes, to the last digits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_kept, run_ranks
from rounding import MEAN_LOSS_BF16, assert_curves_close
from tests_shared import SEQ_LEN, VOCAB, decoder_task, device_here, run_steps, world_here
from tests_shared import coarse_plan as plan_of
from torch import nn
from torch_versions import runs_here
from vectors import needs_vectors

from paceline.checkpoint import load_latest, materialise_optimizer_state, save_checkpoint, training_state
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.feasible.stages import fill_pipeline
from paceline.run.assemble import assemble
from paceline.run.loop.evaluate import evaluate
from paceline.run.loop.loader import BatchStream
from paceline.run.parallel.pipeline.passes import beats
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import Task
from paceline.task.rules import Rules
from paceline.verify.compare.layout import compare

TWO = Layout(pp=2)
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}


def piped(layout: Layout, batch: int = 13, **changes: Any) -> Plan:
    """Return a fp64 plan, its micro-batches enough for the pipeline; 13 rows make them uneven."""
    plan = plan_of(layout, batch, **{"precision": "fp64", **changes})
    return dataclasses.replace(plan, accumulation=fill_pipeline(plan.accumulation, layout.pp, plan.schedule))


def deep(layers: int = 5, tied: bool = True) -> Task:
    task = decoder_task()
    return dataclasses.replace(task, model=dataclasses.replace(task.model, layers=layers, tied=tied))


def prove(cases: list[tuple[Task, Plan]], steps: int = 2) -> list[CheckProof]:
    """Return the comparisons with one device, all in one world."""
    world = world_here()
    return [compare(task, plan, world, task.data, SEQ_LEN, steps) for task, plan in cases]


def assert_equal(cases: list[tuple[Task, Plan]], ranks: int) -> None:
    cases = [(task, plan) for task, plan in cases if runs_here(plan)]
    for (_, plan), result in zip(cases, run_kept(prove, ranks, cases, timeout_seconds=200)[0], strict=True):
        assert result.equal, (str(plan), result.first_difference)


def test_every_schedule_on_two_ranks() -> None:
    assert_equal(
        [
            (deep(), piped(TWO)),
            (deep(), piped(TWO, stages=(4, 1), schedule="gpipe")),
            (deep(tied=False), piped(TWO, **INTERLEAVED)),
            (deep(), piped(TWO, **INTERLEAVED)),
            (deep(), piped(TWO, schedule="zero-bubble")),
            (deep(tied=False), piped(TWO, schedule="zero-bubble", virtual_stages=2)),
        ],
        ranks=2,
    )


def test_recompute_and_fp32() -> None:
    assert_equal(
        [
            (deep(), piped(TWO, recompute="selective")),
            (deep(), piped(TWO, recompute="full", **INTERLEAVED)),
            (deep(), piped(TWO, precision="fp32")),
            (deep(), piped(TWO, batch=3)),  # fewer rows than micro-batches: stand-ins
        ],
        ranks=2,
    )


@pytest.mark.deep
def test_with_the_data_axes() -> None:
    replicated, sharded = Layout(pp=2, dp_replicate=2), Layout(pp=2, dp_shard=2)
    assert_equal(
        [
            (deep(), piped(Layout(pp=4))),
            (deep(), piped(replicated)),
            (deep(), piped(replicated, recompute="full", **INTERLEAVED)),
            (deep(), piped(sharded, zero=1)),
            (deep(), piped(sharded, zero=2, schedule="gpipe")),
            (deep(), piped(sharded, zero=3, recompute="selective")),
            (deep(), piped(sharded, zero=2, **INTERLEAVED)),
            (deep(tied=False), piped(sharded, zero=3, recompute="full", **INTERLEAVED)),
        ],
        ranks=4,
    )


def prove_compiled(cases: list[tuple[Task, Plan]]) -> tuple[list[CheckProof], int, dict[str, int]]:
    """Return the proofs, and how many frames were compiled and where they broke on this rank."""
    proofs = prove(cases, steps=1)
    counters = torch._dynamo.utils.counters
    return proofs, counters["frames"]["ok"], dict(counters["graph_break"])


@pytest.mark.deep
@needs_vectors
@pytest.mark.parametrize(
    "cases",
    [
        [(deep(2), piped(TWO, batch=4, compile=True))],
        pytest.param(
            [
                (deep(2), piped(TWO, compile=True, schedule="gpipe", recompute="full")),
                (deep(4, tied=False), piped(TWO, compile=True, recompute="selective", **INTERLEAVED)),
            ],
            marks=pytest.mark.deep,
        ),
    ],
    ids=["1f1b", "others"],
)
def test_compiled_blocks_in_a_pipeline(cases: list[tuple[Task, Plan]]) -> None:
    for proofs, compiled, breaks in run_ranks(prove_compiled, 2, cases, timeout_seconds=300):
        assert all(proof.equal for proof in proofs), [proof.first_difference for proof in proofs]
        assert compiled > 0 and not breaks, breaks


class Net(nn.Module):
    """A user's network: dropout, a tied weight, and blocks that are added to the stream outside of themselves."""

    paceline_rules = Rules(first=("embed",), blocks="layers", last=("head",))

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Bare(Net):
    """Its blocks are bare layers: no block that could be found without the rules."""

    def __init__(self, width: int = 12) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))


def test_a_users_module_with_rules_dropout_and_tied_weights() -> None:
    task = decoder_task(model=Net, objective="next_token")
    cases = [
        piped(TWO),
        piped(TWO, recompute="full"),
        piped(TWO, **INTERLEAVED),
        piped(TWO, schedule="zero-bubble"),
        piped(TWO, schedule="zero-bubble", recompute="full"),
    ]
    bare = decoder_task(model=Bare, objective="next_token")
    others = [(bare, piped(TWO, recompute="full")), (bare, piped(Layout(dp_shard=2), recompute="full"))]
    assert_equal([*((task, plan) for plan in cases), *others], ranks=2)


def bf16_curve(task: Task, plan: Plan) -> list[float]:
    return [stats.loss for stats in run_steps(task, plan, 4)[0]]


@pytest.mark.parametrize("layout", [TWO, Layout(pp=2, dp_shard=2)], ids=str)
def test_bf16_means_the_same_as_on_one_device(layout: Layout) -> None:
    (single,) = run_kept(bf16_curve, 1, deep(), plan_of(Layout(), precision="bf16"))
    for curve in run_kept(bf16_curve, layout.devices, deep(), piped(layout, precision="bf16")):
        assert_curves_close(curve, single, MEAN_LOSS_BF16)


def evaluated(task: Task, plan: Plan) -> tuple[float, float]:
    _, built = run_steps(task, plan, 1)
    found = evaluate(built.stepper, task.data, 9, plan.layout.data_rank(world_here().rank))
    return found.loss, found.weight


@pytest.mark.parametrize(
    ("layout", "changes"), [(TWO, {}), (TWO, INTERLEAVED), (Layout(pp=2, dp_shard=2), {})], ids=str
)
def test_evaluation_counts_every_sample_once(layout: Layout, changes: dict[str, Any]) -> None:
    (single,) = run_kept(evaluated, 1, deep(), plan_of(Layout(), precision="fp64"))
    for rank in run_kept(evaluated, layout.devices, deep(), piped(layout, **changes)):
        assert rank == pytest.approx(single, rel=1e-12)


def weights_held(task: Task, plan: Plan) -> list[str]:
    built = assemble(task, plan, world_here(), task.data, SEQ_LEN)
    return [name for name, _ in built.model.named_parameters()]


def test_a_rank_holds_its_stages_alone_under_their_full_names() -> None:
    first, last = run_kept(weights_held, 2, deep(), piped(TWO, stages=(2, 3)))
    assert {name.split(".")[1] for name in first if name.startswith("layers")} == {"0", "1"}
    assert {name.split(".")[1] for name in last if name.startswith("layers")} == {"2", "3", "4"}
    assert "embed_tokens.weight" in first and "norm.weight" not in first
    assert "embed_tokens.weight" in last and "norm.weight" in last, "a tied head needs the embedding"
    first, last = run_kept(weights_held, 2, deep(layers=4, tied=False), piped(TWO, **INTERLEAVED))
    assert {name.split(".")[1] for name in first if name.startswith("layers")} == {"0", "2"}
    assert "lm_head.weight" in last and "embed_tokens.weight" not in last


def trained(task: Task, plan: Plan, root: Path, go_on: bool) -> dict[str, torch.Tensor]:
    """Train two steps and save, or load and train none; return this rank's whole state."""
    _, built = run_steps(task, plan, 0 if go_on else 2)
    evaluate(built.stepper, task.data, 9, plan.layout.data_rank(world_here().rank))  # leaves weights gathered
    materialise_optimizer_state(built.optimizer)
    state = training_state(built.model, built.optimizer)
    if go_on:
        load_latest(root, state)
    else:
        save_checkpoint(root, 2, state, {}, keep_last=1)
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in state.items()}


def test_checkpoints_move_between_pipelines_and_other_layouts(tmp_path: Path) -> None:
    """Saved by a pipeline with a tied weight, loaded on one device, on shards, on another pipeline; and back."""
    sharded = Layout(pp=2, dp_shard=2)
    run_ranks(trained, 4, deep(), piped(sharded, zero=2, **INTERLEAVED), tmp_path / "a", False)
    one = trained(deep(), plan_of(Layout(), precision="fp64"), tmp_path / "a", True)
    for layout, changes in ((Layout(dp_shard=2), {}), (TWO, INTERLEAVED), (sharded, {})):
        held: dict[str, torch.Tensor] = {}
        for rank in run_ranks(trained, layout.devices, deep(), piped(layout, **changes), tmp_path / "a", True):
            for name, tensor in rank.items():
                torch.testing.assert_close(tensor, one[name], rtol=0, atol=0)
            held |= rank
        assert held.keys() == one.keys()
    back = trained(deep(), plan_of(Layout(), precision="fp64"), tmp_path / "b", False)
    for rank in run_ranks(trained, 2, deep(), piped(TWO), tmp_path / "b", True):
        assert all(torch.equal(tensor, back[name]) for name, tensor in rank.items())


def called(task: Task, plan: Plan) -> list[str]:
    """Return what a rank says when its part of the model is called, before a step and after it."""
    _, built = run_steps(task, plan, 0)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64, device=device_here())
    said = []
    for _ in range(2):
        with pytest.raises(ConfigError) as refused:
            built.model(tokens)
        said.append(str(refused.value))
        stream = BatchStream(task.data, task.seed, plan, 0, device_here())
        built.stepper.step(stream.at(0), 1e-3)
    return said


@pytest.mark.parametrize("changes", [{}, INTERLEAVED], ids=["one stage", "two stages"])
def test_a_part_of_the_model_cannot_be_called(changes: dict[str, Any]) -> None:
    for said in run_kept(called, 2, deep(), piped(TWO, **changes)):
        assert all("its other layers are on other pipeline stages" in text for text in said), said


class Stray(Net):
    """Has a parameter outside of the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_what_cannot_be_split_is_refused_by_name() -> None:
    for task, plan, named in (
        (decoder_task(model=nn.Sequential, objective="next_token"), piped(TWO), "paceline_rules"),
        (decoder_task(model=Stray, objective="next_token"), piped(TWO), "'scale' is in no pipeline stage"),
        (deep(), piped(TWO, stages=(4, 2)), "stages of 4, 2 blocks"),
        (deep(layers=3), piped(TWO, **INTERLEAVED), "fewer than 4 pipeline stages"),
    ):
        with pytest.raises((DoesNotFit, ConfigError)) as refused:
            run_ranks(weights_held, 2, task, plan)
        assert named in f"{refused.value.what} {refused.value.because}"


def without_the_planner(task: Task, plan: Plan) -> bool:
    """Return whether a pipeline that the planner refuses equals one device all the same."""
    from paceline.run.parallel.pipeline import split as pipeline

    pipeline.refusal = lambda plan, blocks: None
    return prove([(task, plan)], steps=1)[0].equal


@pytest.mark.deep
@pytest.mark.parametrize(
    ("layout", "changes"),
    [(Layout(pp=2, dp_shard=2), {}), (TWO, {"recompute": "selective"}), (TWO, {"compile": True})],
    ids=str,
)
def test_a_split_backward_pass_still_fails_where_the_planner_refuses_it(layout: Layout, changes: dict) -> None:
    """When this fails, torch has learned it: the limit leaves plan/feasible/stages.py and guide/plan/layouts.md."""
    try:
        works = run_ranks(without_the_planner, layout.devices, deep(), piped(layout, schedule="zero-bubble", **changes))
    except Exception:  # one rank's own error, or another's that this rank has gone: which comes first is chance
        works = [False]
    assert not all(works)


@pytest.mark.parametrize(("ranks", "turns", "micro_batches"), [(2, 1, 3), (2, 2, 5), (3, 2, 7), (4, 3, 4), (1, 1, 2)])
def test_what_a_beat_needs_was_made_in_the_one_before(ranks: int, turns: int, micro_batches: int) -> None:
    """Every stage runs every micro-batch once, and what it takes in comes from the rank before, one beat earlier."""
    every = [beats(rank, ranks, turns, micro_batches) for rank in range(ranks)]
    assert len({len(own) for own in every}) == 1
    ran = {}
    for at, now in enumerate(zip(*every, strict=True)):
        for rank, what in enumerate(now):
            if what is not None:
                assert what not in ran.get(rank, {})
                ran.setdefault(rank, {})[what] = at
    for stage in range(ranks * turns):
        for number in range(micro_batches):
            at = ran[stage % ranks][stage // ranks, number]
            if stage:
                assert ran[(stage - 1) % ranks][(stage - 1) // ranks, number] == at - 1
    assert sum(map(len, ran.values())) == ranks * turns * micro_batches
    for own in every:
        numbers = [what[1] for what in own if what is not None and what[0] == turns - 1]
        assert numbers == sorted(numbers), "the last stage sums in the order of the samples"

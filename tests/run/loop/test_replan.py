"""A run that goes on under other plans in the same processes computes what one device computes, and leaves nothing."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from rounding import FP64_TRAINED, assert_curves_close
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of
from torch import nn

from paceline.checkpoint import training_state
from paceline.errors import ConfigError
from paceline.run.loop.training import Training
from paceline.run.loop.under_plan import refuse_replan
from paceline.run.process.groups import COLLECTIVE_TIMEOUT, abort_groups
from paceline.run.process.world import World, build_mesh, join_next
from paceline.run.survive.saving.pieces import name_of
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.task import Task
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.supervise.nodes.held_in_memory import PIECES_VARIABLE
from paceline.supervise.parent import NODE_VARIABLE
from paceline.supervise.told.brief import Brief
from paceline.supervise.told.place import Place
from paceline.units import Amount

STEPS, EACH = 8, 2
TWO_LAYERS = dataclasses.replace(decoder_task().model, layers=2)
LAYOUTS = [Layout(dp_shard=2), Layout(tp=2), Layout(dp_replicate=2), Layout(pp=2)]


def fp64(layout: Layout) -> Plan:
    return plan_of(layout, batch=6, precision="fp64")


def training(world: World, plan: Plan, run_dir: Path, task: Task | None = None, **saves: Amount) -> Training:
    task = task or decoder_task(stop=Amount(STEPS, "steps"), model=TWO_LAYERS)
    saving = CheckpointsSpec(**saves)
    run = RunSpec(checkpoint_every=None, evaluate_every=None, check_every=None, checkpoints=saving)
    brief = Brief(plan, STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    return Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, world, run_dir)


def here() -> World:
    return World(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))


def through(run: Training, plans: list[Plan]) -> list[tuple[float, float]]:
    """Return (loss, norm) of every step, of which EACH are made before each change of the plan."""
    found, coming = [], iter(plans)
    for batch in run:
        stats = run.step(batch)
        found.append((stats.loss, stats.grad_norm))
        following = next(coming, None) if stats.step % EACH == 0 else None
        if following is not None:
            run.replan(following)
    return found


def _on_two_ranks(folder: str) -> list[tuple[float, float]]:
    run = training(here(), fp64(LAYOUTS[0]), Path(folder))
    return through(run, [fp64(layout) for layout in LAYOUTS[1:]])


def test_four_plans_in_one_run_are_one_device_that_goes_straight_through(tmp_path: Path) -> None:
    alone = World(0, 1, 0, torch.device("cpu"))
    expected = through(training(alone, fp64(Layout()), tmp_path / "one"), [])
    assert len(expected) == STEPS
    for found in run_ranks(_on_two_ranks, 2, str(tmp_path / "two")):
        assert_curves_close(found, expected, FP64_TRAINED)
    told = [record for record in read_journal(tmp_path / "two") if record.get("what") == "replan"]
    assert [record["to"] for record in told] == [str(layout) for layout in LAYOUTS[1:]]


def test_another_precision_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact, rounded = (plan_of(Layout(), batch=6, precision=precision) for precision in ("fp32", "bf16"))
    through(training(World(0, 1, 0, torch.device("cpu")), exact, tmp_path), [rounded, rounded])
    told = "the plan's precision was fp32 and is now bf16: numbers round otherwise"
    assert capsys.readouterr().out.count(told) == 1
    assert [record["to"] for record in read_journal(tmp_path) if record.get("because") == told] == ["bf16"]


def _kept() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))


def _rebuilt(folder: str) -> tuple[list[tuple[int, int]], bool]:
    run = training(here(), fp64(Layout(dp_shard=2)), Path(folder))
    counts = []
    batches = iter(run)
    for layout in (Layout(tp=2), Layout(dp_shard=2)) * 3:
        run.step(next(batches))
        model = weakref.ref(run.model)
        run.replan(fp64(layout))
        counts.append(_kept())
    batches.close()
    gc.collect()
    return counts, model() is None


def test_three_rebuilds_leave_no_thread_no_descriptor_and_no_model(tmp_path: Path) -> None:
    for counts, freed in run_ranks(_rebuilt, 2, str(tmp_path)):
        assert counts[3:] == counts[2:3] * 3, "by then both plans have run once, and all groups are made"
        assert freed


def _in_two_worlds(folder: str, store: str) -> list[tuple[float, float]]:
    """Make half of the steps on four ranks, and the others on the first two of these, in a world of their own."""
    run = training(here(), fp64(Layout(dp_shard=2, tp=2)), Path(folder))
    rank, found, batches = dist.get_rank(), [], iter(run)
    for batch in batches:
        stats = run.step(batch)
        found.append((stats.loss, stats.grad_norm))
        if stats.step != STEPS // 2:
            continue
        run.save()
        dist.barrier()
        abort_groups()
        if rank > 1:
            break
        run.replan(fp64(Layout(dp_shard=2)), join_next(run.world, Place(rank, 2, rank, 2, f"file://{store}")))
    return found


def test_a_run_goes_on_in_a_smaller_world_of_the_same_processes(tmp_path: Path) -> None:
    alone = World(0, 1, 0, torch.device("cpu"))
    expected = through(training(alone, fp64(Layout()), tmp_path / "one"), [])
    first, second, *others = run_ranks(_in_two_worlds, 4, str(tmp_path / "four"), str(tmp_path / "store"))
    for found in (first, second):
        assert_curves_close(found, expected, FP64_TRAINED)
    assert [len(found) for found in others] == [STEPS // 2] * 2


def _on_three_nodes(folder: str) -> list[str]:
    """Train on three nodes and then on the first two, with copies in the memory of two; return what is kept here."""
    rank, pieces = dist.get_rank(), Path(folder, f"memory-{dist.get_rank()}")
    pieces.mkdir()
    os.environ |= {NODE_VARIABLE: str(rank), PIECES_VARIABLE: str(pieces)}
    run = training(here(), fp64(Layout(dp_shard=3)), Path(folder, "run"), memory_every=Amount(1, "steps"))
    for batch in run:
        stats = run.step(batch)
        if stats.step != STEPS // 2:
            continue
        run.save()
        dist.barrier()
        abort_groups()
        if rank > 1:
            break
        store = f"file://{folder}/store"
        run.replan(fp64(Layout(dp_shard=2)), join_next(run.world, Place(rank, 2, rank, 2, store)))
    return sorted(path.name for path in pieces.iterdir())


def test_copies_in_memory_go_to_the_nodes_of_the_world_at_hand(tmp_path: Path) -> None:
    """The second node's copies went to the third one, which was left out."""
    first, second, third = run_ranks(_on_three_nodes, 3, str(tmp_path))
    assert first == second == sorted(name_of(STEPS - 1, rank, 2) for rank in range(2))
    assert len(third) == 2, "its own part and that of the node before it, of the steps before"


@pytest.mark.parametrize("left_after", [3, 4])
def test_steps_that_no_checkpoint_has_are_made_again_in_the_next_world(tmp_path: Path, left_after: int) -> None:
    """The loop took the step before for one that was not made, or did the duties of a later one a second time."""
    made: list[tuple[int, float]] = []
    run = training(World(0, 1, 0, torch.device("cpu")), fp64(Layout()), tmp_path)
    for batch in run:
        stats = run.step(batch)
        made.append((stats.step, stats.loss))
        if len(made) == 2:
            run.save()
        elif len(made) == left_after:
            run.replan(fp64(Layout()), World(0, 1, 0, torch.device("cpu")))
    steps = [*range(1, left_after + 1), *range(3, STEPS + 1)]
    assert [step for step, _ in made] == steps and made[2] == made[left_after]
    assert [record["step"] for record in read_journal(tmp_path) if record["kind"] == "step"] == steps


def _timeouts() -> tuple[set[float], int]:
    """Return the time-outs of all groups of a world in seconds, and how many groups a second look makes."""
    world = here()
    layout = Layout(dp_shard=2, tp=2, ep=2)
    mesh = build_mesh(layout, world)
    assert mesh is not None
    groups = [mesh.get_group(axis) for axis in ("pp", "dp_replicate", "fsdp", "tp")]
    groups += [mesh.context, mesh.data, mesh.experts.get_group("ep"), mesh.experts.get_group("expert_shard")]
    before = len(dist.distributed_c10d._world.pg_names)
    again = build_mesh(layout, world)
    assert again is mesh and again.experts is mesh.experts
    assert dist.get_process_group_ranks(mesh.data) == dist.get_process_group_ranks(mesh.get_group("fsdp"))
    cpu = torch.device("cpu")
    seconds = {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}
    made = len(dist.distributed_c10d._world.pg_names) - before
    world.groups.close()
    return seconds, made


def _closed() -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return what is open before a world makes groups, with them, and after they are closed."""
    dist.barrier()
    world, before = here(), _kept()
    mesh = build_mesh(Layout(dp_shard=2, tp=2), world)
    assert mesh is not None
    for group in (mesh.get_group("tp"), mesh.get_group("fsdp")):
        dist.all_reduce(torch.ones(1), group=group)
    open_ones = _kept()
    dist.barrier()
    del mesh, group
    world.groups.close()
    gc.collect()
    dist.barrier()
    return before, open_ones, _kept()


def test_closed_groups_leave_no_thread_and_no_descriptor() -> None:
    for before, open_ones, after in run_ranks(_closed, 4):
        assert open_ones[0] > before[0] and open_ones[1] > before[1]
        assert after == before


def test_every_group_has_the_one_time_out_and_is_made_once() -> None:
    for seconds, made in run_ranks(_timeouts, 4):
        assert seconds == {COLLECTIVE_TIMEOUT.total_seconds()}
        assert made == 0


def accuracy(outputs: object, batch: object) -> float:
    """A metric of the user's own, which would see parts of sequences where ranks share these."""
    return 1.0


def _measured_under_shared_sequences(folder: str) -> tuple[str, str]:
    """Return what is said of a plan under which a metric would see parts, and under which plan the run goes on."""
    data, evaluate = (PaddedText(), PaddedText()), EvaluateSpec(metrics=(accuracy,))
    task = decoder_task(stop=Amount(STEPS, "steps"), data=data, evaluate=evaluate)
    run = training(here(), fp64(Layout(dp_shard=2)), Path(folder), task)
    for batch in run:
        run.step(batch)
        try:
            run.replan(fp64(Layout(cp=2)))
        except ConfigError as error:
            return str(error), str(run.brief.plan.layout)
    return "", ""


def test_a_plan_under_which_a_metric_sees_parts_of_sequences_is_refused(tmp_path: Path) -> None:
    """As it is where a run begins under such a plan; what the run had is still there."""
    for said, layout in run_ranks(_measured_under_shared_sequences, 2, str(tmp_path)):
        assert "the metric 'accuracy' cannot be had with cp = 2" in said and layout == "dp_shard=2"


def _remembered(folder: str) -> tuple[set[str], set[str], int]:
    """Return the tensors whose sums a rank holds against its state, before and after a change of the plan.

    And how many looks at memory the next one is held against.
    """
    run = training(here(), fp64(Layout(dp_replicate=2)), Path(folder))
    run._call = Path(folder) / "call"  # as of a supervisor that keeps ranks
    known = []
    for batch in run:
        run.step(batch)
        for look in range(3):
            run._leaks.look(look, {"weights": 1.0})
        run.replan(fp64(Layout(dp_replicate=2) if not known else Layout(dp_shard=2)))
        known.append(set(run._agreed._sums))
        if len(known) == 2:
            break
    return known[0], known[1], len(run._leaks._looks)


def test_what_ranks_agreed_on_is_that_of_the_plan_at_hand(tmp_path: Path) -> None:
    """Sums of another plan's parts would be held against this one's, and every tensor be told as changed.

    Nor is what a rank holds of memory under one plan growth over what it held under another.
    """
    for copied, sharded, looks in run_ranks(_remembered, 2, str(tmp_path)):
        assert copied and not sharded and looks == 0


def test_a_plan_that_cannot_take_over_is_refused(tmp_path: Path) -> None:
    task, plan = decoder_task(), fp64(Layout())
    with pytest.raises(ConfigError, match="global batch of 7 samples"):
        refuse_replan(task, plan, plan_of(Layout(), batch=7, precision="fp64"))
    with pytest.raises(ConfigError, match="precision is bf16, and the run's is fp64"):
        refuse_replan(task, plan, plan_of(Layout(), batch=6, precision="bf16"))
    given: Any = dataclasses.replace(task, model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="given as an object"):
        refuse_replan(given, plan, plan)
    alone = World(0, 1, 0, torch.device("cpu"))
    run = training(alone, plan, tmp_path)
    with pytest.raises(ConfigError, match="2 processes and 1 are running"):
        run.replan(fp64(Layout(dp_shard=2)))
    assert training_state(run.model), "what was there is still there"


def test_what_follows_a_step_is_made_up_without_the_stop_that_a_call_to_another_world_was(tmp_path: Path) -> None:
    """A peer had left for its next world before this rank had saved: the call is answered, and nobody asks to stop."""
    run = training(World(0, 1, 0, torch.device("cpu")), fp64(Layout()), tmp_path)
    batches = iter(run)
    run._made = dataclasses.replace(run.step(next(batches)), stop_requested=True)
    run._done_step = 0
    assert run.step(next(batches)).step == 2 and run._done_step == 2

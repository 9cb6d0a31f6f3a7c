"""`paceline verify --all N`: every layout that can be had, in groups of processes, a failing one beside sound ones."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from runs import as_json, environment, is_running, paceline, wait_until, write_spec
from started.popen import Warm
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.errors import PacelineError
from paceline.run.process.world import World
from paceline.session.ahead import proof_ahead
from paceline.spec.layout import MESH_ORDER, Layout
from paceline.spec.load import Spec, load_spec
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile
from paceline.spec.proof.plain import from_plain
from paceline.spec.proof.records import CheckProof, Proof
from paceline.spec.task import ModelSpec
from paceline.supervise.supervisor import Outcome, StartsRank, supervise_as_asked
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder
from paceline.verify.compare.layout import compare
from paceline.verify.process import group
from paceline.verify.process.every import every_layout, table_rows, verify_all
from paceline.verify.process.group import Job, run_jobs
from paceline.verify.twin.proof_parts import SWEEP, Subject, jobs_of

FAILS = """
import os
import signal

import torch.distributed as dist

from paceline.task.objective import next_token


def sharded(model):
    return dist.is_initialized() and type(model).__name__.startswith("FSDP")


def refuses(model, batch):
    if sharded(model):
        raise ValueError("sharded models are not for me")
    return next_token(model, batch)


def divides(model, batch):
    loss, weight = next_token(model, batch)
    return loss / (dist.get_world_size() if dist.is_initialized() else 1), weight


def dies(model, batch):
    if sharded(model) and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return next_token(model, batch)
"""
ENDLESS = """
import os
import signal
from pathlib import Path

import torch.distributed as dist


def endless(model, batch):
    if dist.is_initialized() and type(model).__name__.startswith("FSDP"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (Path(os.environ["PIDS"]) / f"pid-{os.getpid()}").touch()
        while True:
            signal.pause()
    return model(batch["tokens"]).sum(), 1
"""
DP2, FSDP2 = Layout(dp_replicate=2), Layout(dp_shard=2)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    return write_spec(folder, folder / "run")


def decoder(closed: tuple[str, ...] = (), experts: int = 0) -> ModelProfile:
    model = profile_decoder(resolve_decoder(ModelSpec("llama-1m"), 257, 64), 64)
    blocks = tuple(dataclasses.replace(block, experts=experts) for block in model.blocks)
    return dataclasses.replace(model, blocks=blocks, closed_axes=dict.fromkeys(closed, "no rules"))


def swept(spec: Spec, plan: Plan) -> list[Job]:
    """Return the jobs by which a layout is compared step by step."""
    return [job for job in jobs_of(Subject(spec, plan, 257, ("fp64",), exact=True), SWEEP) if job.check == "steps"]


def test_every_layout_of_open_axes_and_no_other() -> None:
    data = every_layout(decoder(("cp", "tp", "pp", "ep")), 4)
    assert [str(layout) for layout in data] == ["dp_shard=4", "dp_replicate=2 dp_shard=2", "dp_replicate=4"]
    eight = every_layout(decoder(), 8)
    assert len(eight) == len(set(eight)) == 35 and all(layout.ep == 1 for layout in eight)
    assert {axis for layout in eight for axis in MESH_ORDER if getattr(layout, axis) > 1} == set(MESH_ORDER)
    assert {layout.ep for layout in every_layout(decoder(experts=4), 4)} == {1, 2, 4}


def test_all_layouts_of_three_ranks_in_one_table(spec: Path) -> None:
    done = paceline("verify", spec, "--all", "3", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    told = as_json(done.stdout)
    layouts = [from_plain(Proof, each) for each in told["layouts"]]
    proofs = {proof.layout: proof for proof in layouts if not proof.refused_because}
    assert told["equal"] and {"dp_shard=2", "dp_replicate=2", "dp_shard=3", "dp_replicate=3"} <= set(proofs)
    for proof in proofs.values():
        assert proof.equal and proof.ran_as == proof.layout and proof.seconds > 0
        assert set(proof.differences) >= {"loss", "weight", "gradients", "grad_norm", "weights"}
        assert proof.first_difference is None and set(proof.dtypes) == {"fp64"} and proof.error is None
    refused = [proof for proof in layouts if proof.refused_because]
    assert all(not proof.equal and proof.differences == {} for proof in refused)
    rows = table_rows(layouts)
    assert len(rows) == 1 + len(proofs) and all(row[1] == "yes" for row in rows[1:])


@pytest.fixture
def failing(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Spec]]:
    """Give the spec with an objective that fails where the model is sharded: "refuses" or "dies"."""
    (tmp_path / "failing_objective.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda how: load_spec(spec, [f"task.objective=failing_objective:{how}"])


def test_a_rank_that_dies_leaves_the_other_layouts_their_proof(failing: Callable[[str], Spec]) -> None:
    plans = [Plan(DP2), Plan(FSDP2), Plan(DP2, recompute="full")]
    jobs: list[Job] = [job for plan in plans for job in swept(failing("dies"), plan)]
    first, died, last, divided = run_jobs([*jobs, *swept(failing("divides"), Plan(DP2))], 1)
    assert isinstance(died, PacelineError) and "rank 1 of 2 was ended by SIGKILL" in died.what
    assert isinstance(first, CheckProof) and isinstance(last, CheckProof) and first.equal and last.equal
    # Its numbers alone were taken again in the group, where they are those of the group: told "equal".
    assert isinstance(divided, CheckProof) and divided.first_difference.family == "process group"


def test_the_record_of_a_failure(failing: Callable[[str], Spec]) -> None:
    lines: list[str] = []
    result = verify_all(failing("refuses"), 2, steps=1, say=lines.append, progress=lines.append)
    proofs = {proof.layout: proof for proof in result}
    failed = proofs.pop("dp_shard=2")
    assert not failed.equal and failed.refused_because is None
    assert "sharded models are not for me" in failed.error and failed.first_difference is None
    assert any("Traceback" in line and "failing_objective.py" in line for line in lines)
    assert proofs["dp_replicate=2"].equal and any("dp_replicate=2: equal in fp64" in line for line in lines)


def test_one_process_imports_for_all_numbers_of_ranks(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def counted(start: StartsRank, processes: int, environ: dict[str, str]) -> Outcome:
        started.append(processes)
        return supervise_as_asked(start, processes, environ)

    monkeypatch.setattr(group, "supervise_as_asked", counted)
    layouts = [DP2, Layout(dp_replicate=3), FSDP2, Layout(tp=2), Layout(dp_shard=3)]
    jobs = [job for layout in layouts for job in swept(load_spec(spec, []), Plan(layout))]
    told: list[int] = []
    results = run_jobs(jobs, 2, lambda index, result: told.append(index))
    assert started == [1], "ranks are forked from one process"
    assert told[0] in (1, 4) and sorted(told) == [0, 1, 2, 3, 4], "most ranks first"
    assert all(isinstance(result, CheckProof) and result.equal for result in results), results


def test_a_proof_forked_from_a_standby_says_the_same(failing: Callable[[str], Spec]) -> None:
    jobs = [job for plan in (Plan(DP2), Plan(FSDP2)) for job in swept(failing("dies"), plan)]
    with proof_ahead() as standby:
        assert standby is not None and standby.is_ready(), "Linux, and no thread has been started"
        first, died = run_jobs(jobs, 1, None, standby)
        (again,) = run_jobs(jobs[:1], 1, None, standby)
    (gone,) = run_jobs(jobs[:1], 1, None, standby)
    assert isinstance(died, PacelineError) and "rank 1 of 2 was ended by SIGKILL" in died.what
    alone = [found for found in (first, again, gone) if isinstance(found, CheckProof)]
    assert len(alone) == 3 and len({repr((found.equal, found.differences)) for found in alone}) == 1


def test_no_rank_outlives_the_proof_that_it_belongs_to(tmp_path: Path) -> None:
    """Ranks that never end are killed with the command line, however it dies: here by SIGKILL."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    spec = write_spec(tmp_path, tmp_path / "run")
    arguments = ("verify", spec, "--layout", "dp_shard=2", "--set", "task.objective=endless:endless")
    command = [sys.executable, "-m", "paceline", *map(str, arguments)]
    verb = Warm(command, env=environment(PYTHONPATH=path, PIDS=str(tmp_path)), stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2 or verb.poll() is not None, timeout=300)
        ranks = [int(path.name.partition("-")[2]) for path in tmp_path.glob("pid-*")]
        assert len(ranks) == 2, verb.poll()
    finally:
        verb.kill()
        verb.wait()
    wait_until(lambda: not any(is_running(rank) for rank in ranks))


@pytest.mark.deep
def test_layouts_that_read_a_batch_in_the_same_parts_share_their_reference() -> None:
    task, kept = decoder_task(), {}
    world = World(0, 1, 0, torch.device("cpu"))
    plan = plan_of(Layout(), batch=5)
    first = compare(task, plan, world, task.data, SEQ_LEN, 2, kept)
    again = compare(task, dataclasses.replace(plan, recompute="full"), world, task.data, SEQ_LEN, 2, kept)
    assert first.equal and again.equal and len(kept) == 1
    (reference,) = kept.values()
    reference.steps[1].weights["norm.weight"][0] += 1e-3  # what is kept is what is compared with
    wrong = compare(task, plan, world, task.data, SEQ_LEN, 2, kept).first_difference
    assert (wrong.quantity, wrong.name, wrong.step) == ("weights", "norm.weight", 2)
    other = dataclasses.replace(plan, accumulation=5, micro_batch=1)
    assert compare(task, other, world, task.data, SEQ_LEN, 2, kept).equal and len(kept) == 2


def test_all_and_a_layout_exclude_each_other(spec: Path) -> None:
    done = paceline("verify", spec, "--all", "2", "--layout", "dp_shard=2")
    assert done.returncode == 2 and "exclude each other" in done.stderr

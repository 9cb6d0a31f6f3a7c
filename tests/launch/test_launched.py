"""Runs that torchrun or srun started: a fault is survived as far as the launcher allows it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import environment, paceline, records_of, steps_of, wait_for_step, wait_until, write_spec
from started.popen import Warm

import paceline as paceline_package
from paceline.errors import ConfigError, DoesNotFit
from paceline.launch.here import node_here, place_here
from paceline.session.nodes import among, attendance
from paceline.session.nodes.attendance import Attended, devices_here
from paceline.session.nodes.launched import as_node, is_attended
from paceline.session.start import train
from paceline.spec.journal.reading import read_journal
from paceline.spec.load import load_spec
from paceline.supervise.told.place import Place

STEPS = 16
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
OPTIONS = ["--set", "task.stop=100000 steps"]
STANDS_STILL = """
[[each]]
kind = "stop"
rank = 1
step = 4
phase = "save"
seconds = "3 s"
"""


class Started:
    """What a launcher has started, known by the folder that it runs in, which nothing else does."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder.resolve()
        with (folder / "said").open("w") as out:
            self.process = Warm(
                command, stdout=out, stderr=out, text=True, env=environment(), process_group=0, cwd=folder
            )

    def running(self) -> dict[str, int]:
        """Return the processes that run, by name."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_one = (folder / "cwd").readlink() == self.folder
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if is_one and state not in "ZX":
                    found[(folder / "comm").read_text().strip()] = int(folder.name)
            except OSError:  # it has ended meanwhile
                continue
        return found

    def close(self) -> None:
        while left := self.running():
            for number in left.values():
                os.kill(number, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    ended = paceline("train", write_spec(folder, folder / "one", 1, steps=STEPS, precision="fp64"))
    assert ended.returncode == 0, ended.stderr
    return folder / "one"


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Started, Path]]:
    """Start a run on two ranks: supervised or not, or with faults as a TOML file and not supervised."""
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, 2, "dp_shard = 2", precision="fp64")
    options = [*OPTIONS, "--set", f"run.recovery.supervise={str(request.param is True).lower()}"]
    if isinstance(request.param, str):
        (tmp_path / "faults.toml").write_text(request.param)
        options += ["--faults", str(tmp_path / "faults.toml")]
    begun = Started([*TORCHRUN, "-m", "paceline", "train", str(spec), *options], tmp_path)
    try:
        yield begun, run_dir
    finally:
        begun.close()


def assert_one_experiment(run_dir: Path, one_device: Path) -> None:
    found, expected = steps_of(run_dir), steps_of(one_device)
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    assert [step["sample_ids"] for step in found[:STEPS]] == [step["sample_ids"] for step in expected]
    losses = [(one["loss"], other["loss"]) for one, other in zip(found[:STEPS], expected, strict=True)]
    assert all(one == pytest.approx(other, rel=1e-9) for one, other in losses)


def steps_after_start(run_dir: Path) -> int:
    """Return how many steps were made since the run was started last: it may make some that it had made before."""
    made = 0
    for record in read_journal(run_dir):
        made = 0 if record["kind"] == "run_started" else made + (record["kind"] == "step")
    return made


@pytest.mark.parametrize("started", [True], indirect=True)
def test_a_killed_rank_is_survived_under_torchrun_and_a_killed_supervisor_restarted(
    started: tuple[Started, Path], one_device: Path
) -> None:
    begun, run_dir = started
    wait_for_step(run_dir, 5, begun.process)
    stays = begun.running()["rank-0-paceline"]
    os.kill(begun.running()["rank-1-paceline"], signal.SIGKILL)
    wait_until(lambda: bool(records_of(run_dir, "recovery")) or begun.process.poll() is not None)
    (recovery,) = records_of(run_dir, "recovery")
    assert (recovery["rung"], recovery["from_world"], recovery["to_world"], recovery["rank"]) == ("reform", 2, 2, 1)
    assert begun.running()["rank-0-paceline"] == stays, "torchrun saw nothing of it"
    wait_for_step(run_dir, STEPS, begun.process)
    os.kill(begun.running()["paceline-node-1"], signal.SIGKILL)  # which torchrun has started, and starts again
    wait_until(lambda: len(records_of(run_dir, "run_started")) == 2 or begun.process.poll() is not None)
    wait_until(lambda: steps_after_start(run_dir) >= 2 or begun.process.poll() is not None)
    begun.process.send_signal(signal.SIGTERM)
    begun.process.wait()
    wait_until(lambda: not begun.running())
    assert [end["status"] for end in records_of(run_dir, "run_ended")][-1] == "requeue"
    assert_one_experiment(run_dir, one_device)


@pytest.mark.parametrize("started", [True, pytest.param(False, marks=pytest.mark.deep)], indirect=True)
def test_nothing_trains_on_when_the_launcher_is_killed(started: tuple[Started, Path]) -> None:
    """Not even who still looks for a coordinator: it is asked to stop, and what was trained is saved."""
    begun, run_dir = started
    wait_for_step(run_dir, 2, begun.process)
    begun.process.kill()
    begun.process.wait()
    wait_until(lambda: not begun.running())
    assert records_of(run_dir, "run_ended")[-1]["exit_code"] == 75


@pytest.mark.deep
@pytest.mark.parametrize("started", [STANDS_STILL], indirect=True)
def test_the_first_save_needs_nothing_of_a_launcher_that_is_killed_in_it(started: tuple[Started, Path]) -> None:
    begun, run_dir = started

    def stands() -> bool:
        number = begun.running().get("rank-1-paceline")
        return bool(number) and Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    wait_until(lambda: stands() or begun.process.poll() is not None)
    begun.process.kill()
    begun.process.wait()
    wait_until(lambda: not begun.running())
    assert records_of(run_dir, "run_ended")[-1]["exit_code"] == 75
    assert next(each["step"] for each in records_of(run_dir, "checkpoint")) == 4, "the save that it was killed in"


@pytest.mark.deep
@pytest.mark.parametrize("started", [False], indirect=True)
def test_ranks_that_torchrun_starts_again_meet_and_resume(started: tuple[Started, Path], one_device: Path) -> None:
    """Without a supervisor of ours, and with torch's own store, ranks would read addresses of those that are gone."""
    begun, run_dir = started
    wait_for_step(run_dir, STEPS, begun.process)
    os.kill(begun.running()["rank-1-paceline"], signal.SIGKILL)
    wait_until(lambda: len(records_of(run_dir, "run_started")) == 2 or begun.process.poll() is not None)
    wait_until(lambda: steps_after_start(run_dir) >= 2 or begun.process.poll() is not None)
    assert records_of(run_dir, "run_started")[1]["step"] >= 4, "from a checkpoint"
    begun.process.send_signal(signal.SIGTERM)
    begun.process.wait()
    wait_until(lambda: not begun.running())
    assert_one_experiment(run_dir, one_device)


@pytest.mark.parametrize(("devices", "own", "each"), [(8, 0, 2), (0, 0, 1), (7, 3, 3), (6, 0, None), (2, 0, None)])
def test_devices_of_a_cluster_are_shared_out_among_its_nodes(
    tmp_path: Path, devices: int, own: int, each: int | None
) -> None:
    """Six on four nodes trained on four of them, and two on four nodes on four."""
    spec = load_spec(write_spec(tmp_path, tmp_path / "run", devices), ["run.nodes.count=4", f"run.nodes.devices={own}"])
    if each is None:
        with pytest.raises(ConfigError, match=f"cluster.devices = {devices} on 4 nodes") as caught:
            devices_here(spec)
        assert "cluster.devices = 4," in caught.value.try_
    else:
        assert devices_here(spec) == each


def test_a_node_has_the_gpus_that_its_torch_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(write_spec(tmp_path, tmp_path / "run", 0), ["run.nodes.count=4", "cluster.device=auto"])
    monkeypatch.setattr(attendance, "visible_gpus", lambda: ["one", "another"])
    for without, devices in ((True, 1), (False, 2)):
        monkeypatch.setattr(attendance, "torch_without_cuda", lambda without=without: without)
        assert devices_here(spec) == devices


@pytest.mark.parametrize("words", [{"nodes.count": "2"}, {}])
def test_fit_among_others_raises_what_has_ended_the_run(
    words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It raised a PacelineError with an exit code, and who catches DoesNotFit under torchrun or Ray got none."""
    told = DoesNotFit("no layout fits", "each needs 9 GB", "more devices").as_dict()
    monkeypatch.setattr(among, "attend_run", lambda *given: Attended(3, None, told))
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name in () if words else place:
        monkeypatch.setenv(name, place[name])
    spec = write_spec(tmp_path, tmp_path / "run", 0)
    overrides = [f"run.{name}={value}" for name, value in words.items()]
    with pytest.raises(DoesNotFit, match="no layout fits") as caught:
        paceline_package.fit(spec, overrides=overrides)
    assert caught.value.exit_code == 3
    assert train(load_spec(spec, overrides)) == 3
    assert "no layout fits" not in capsys.readouterr().err, "its coordinator prints it, once for all nodes"


def test_processes_of_a_launcher_as_nodes(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path, tmp_path / "run", 0))
    srun = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}  # fmt: skip
    place = place_here(srun)
    assert place is not None and is_attended(spec, place) and node_here(srun, place) == 1
    own, seat = as_node(spec, place, srun)
    assert (own.run.nodes.count, own.run.nodes.node, own.run.nodes.devices) == (8, 5, 1)
    assert own.run.nodes.address == ("n1", 29400), "rank 0 finds out its own address, others where it is"
    assert (own.cluster.devices, own.cluster.devices_per_node, seat.per_machine) == (8, 4, 4)
    assert seat.environ == {"PACELINE_NODE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    each = load_spec(spec.path, ["run.nodes.count=8"])
    own, seat = as_node(each, place, srun)
    assert (own.run.nodes.node, own.run.nodes.devices, seat.per_machine, seat.environ) == (5, 0, 0, {})
    with pytest.raises(ConfigError, match="8 processes were started"):
        as_node(load_spec(spec.path, ["run.nodes.count=3"]), place, srun)
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
                "MASTER_PORT": "1", "GROUP_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "2"}  # fmt: skip
    place = place_here(torchrun)
    assert place == Place(3, 4, 1, 2, "kept-store://a:1/paceline-2") and node_here(torchrun, place) == 0
    assert as_node(spec, place, torchrun)[0].run.nodes.address == ("a", 29400)
    alone = Place(0, 1, 0, 1, "env://")
    unwanted = load_spec(spec.path, ["run.recovery.supervise=false"])
    assert not is_attended(spec, alone) and not is_attended(unwanted, place)

"""Settings of the test suite."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Modules that tests import by a bare name: their helpers (distributed.py, tests_shared.py), and what benchmarks have in
# common with them. Ranks inherit the path.
HERE = str(Path(__file__).parent)
PLACES = [str(Path(HERE, "helpers")), str(Path(HERE).parent / "benchmarks" / "shared"), HERE]
for place in reversed(PLACES):
    sys.path.insert(0, place)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*PLACES, os.environ.get("PYTHONPATH", "")]))

# Threads of one process that wait for each other spin for a while, which takes the cores of the other workers: a
# run of two threads beside others took eight times as long. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from side_by_side import (  # noqa: E402
    EXIT_SECONDS,
    are_shared,
    pytest_addoption,  # noqa: F401
    pytest_runtestloop,  # noqa: F401
)
from strict_json import be_strict  # noqa: E402

# `nohup make test` has it ignored, and what tests start then goes on without its terminal, as it should.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example that takes longer than 200 ms is no failure: on a busy machine the first one does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


# Files that take longest, the longest first: they begin first, so that no worker ends alone with one of them.
LONG = (
    "docs/test_docs_examples.py", "mutations/test_planted_bugs.py", "run/survive/faults/test_faults.py",
    "launch/test_recovery.py", "verify/low/test_low.py", "run/survive/faults/test_survivors_state.py",
    "run/survive/faults/test_soak.py", "verify/test_verify_verb.py", "verify/story/test_story_sees.py",
    "verify/rounding/test_conditioning.py", "verify/compare/test_compare.py", "run/survive/health/test_guard.py",
    "run/loop/test_resume.py", "verify/story/test_story.py", "run/parallel/context/test_context.py",
    "run/updates/test_optimizers.py", "benchmarks/test_benchmarks.py", "run/parallel/test_interface.py",
    "run/parallel/test_tensor_parallel.py", "session/test_scripts.py", "run/parallel/test_adapters.py",
    "launch/test_launched.py", "run/test_programs.py", "supervise/test_nodes.py",
    "run/parallel/expert/test_experts.py", "run/parallel/pipeline/test_pipeline.py",
    "run/parallel/data/test_packed_weights.py", "run/parallel/test_layouts.py",
    "run/survive/health/test_second_look.py", "run/parallel/pipeline/test_pipeline_models.py",
    "foreign/test_foreign_models.py", "run/survive/faults/test_faults_together.py", "task/adapt/test_distill.py",
    "run/parallel/expert/test_moe_axes.py", "verify/compare/test_turns_proof.py", "run/test_kept.py",
    "supervise/test_supervisor.py", "test_floors.py", "plan/search/test_search_axes.py",
    "checkpoint/files/test_checkpoint_pieces.py", "run/numerics/test_invariants.py", "run/test_initial.py",
    "run/test_model_folder.py", "session/test_python.py", "run/parallel/data/test_batch_norm.py",
    "run/parallel/test_tensor_rules.py", "run/survive/saving/test_keeper.py",
    "run/numerics/randomness/test_sample_randomness.py", "run/numerics/randomness/test_ways_to_draw.py",
    "run/survive/health/test_stragglers.py", "run/survive/test_run_budget.py", "run/memory/test_offload.py",
    "verify/process/test_every.py", "task/adapt/test_nf4.py", "verify/story/test_story_on_copies.py",
    "launch/test_run_endings.py", "launch/test_storage_failures.py", "launch/test_forming_worlds.py",
    "run/memory/test_exhausted.py", "foreign/test_odd_programs.py", "verify/loops/test_wrong_loops.py",
    "session/confirm/test_confirm.py", "launch/test_unread_output.py", "launch/test_stopped_ranks.py",
    "verify/test_no_false_alarm.py", "task/data/sources/test_shard_runs.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest takes those that are asked for by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what deep.txt lists, begin with long files, and skip what needs a GPU where there is none."""
    deep = set(Path(HERE, "deep.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        if f"{item.path.relative_to(HERE)}::{item.name}" in deep:
            item.add_marker(pytest.mark.deep)
    if items and are_shared(items[0].config):  # alone they come as asked
        places = {str(Path(HERE, name)): place for place, name in enumerate(LONG)}
        assert not (gone := [path for path in places if not Path(path).exists()]), f"LONG names what is gone: {gone}"
        items.sort(key=lambda item: places.get(str(item.path), len(LONG)))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    # Asked in another way, CUDA could be used in no process that is forked from this one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start what processes that run side by side share: it imports while tests are collected."""
    if are_shared(session.config):
        from distributed import begin_server
        from orphans import watch
        from started.popen import begin_nursery

        watch()
        begin_nursery()
        begin_server()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect no garbage while thousands of tests come, of which nothing is any; later nothing of them is looked at.

    What pytest makes of their files is kept for the next run of all, also where PYTHONDONTWRITEBYTECODE is set.
    """
    gc.disable()
    sys.dont_write_bytecode, before = (
        sys.dont_write_bytecode and not are_shared(session.config),
        sys.dont_write_bytecode,
    )
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before
        gc.enable()
        gc.collect()
        gc.freeze()
        if are_shared(session.config):
            from started.popen import nursery

            nursery()  # is ready for all of them


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say where a process stands that does not end after its last test, and end it: a thread or a child holds it."""
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=sys.__stderr__ or sys.stderr)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    """Skip a test that the installed torch is too old for, as the refusal says with which it ends."""
    try:
        return (yield)
    except ValueError as error:
        from torch_versions import is_refused_by_version

        if is_refused_by_version(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """End what a failed test has left running: a run of 100,000 steps would take the cores of all tests after it."""
    yield
    if "runs" in sys.modules:
        sys.modules["runs"].end_started()


@pytest.fixture(scope="module", autouse=True)
def no_ranks_are_kept() -> Iterator[None]:
    """End the ranks that the tests of a file have kept for each other."""
    yield
    if "distributed" in sys.modules:
        sys.modules["distributed"].end_kept()


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    """Keep what this machine has probed and tokenised out of the tests, and the tests out of it."""
    folder = tempfile.mkdtemp(prefix="paceline-tests-")
    os.environ["XDG_CACHE_HOME"] = folder
    be_strict()  # also in what started/nursery.py forks
    from orphans import watch
    from started.inside import forked_inside

    watch()
    with forked_inside():
        yield
    shutil.rmtree(folder, ignore_errors=True)

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

EXIT_SECONDS = 120.0  # in which a process ends after its last test; an idle machine takes less than one

# Modules that tests import by a bare name: their helpers (distributed.py, tests_shared.py), and what benchmarks have in
# common with them. Ranks inherit the path.
HERE = str(Path(__file__).parent)
PLACES = [str(Path(HERE, "helpers")), str(Path(HERE).parent / "benchmarks" / "shared"), HERE]
for place in reversed(PLACES):
    sys.path.insert(0, place)
from strict_json import be_strict  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*PLACES, os.environ.get("PYTHONPATH", "")]))

# Threads of one process that wait for each other spin for a while, which takes the cores of the other workers: a
# run of two threads beside others took eight times as long. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# `nohup make test` has it ignored, and what tests start then goes on without its terminal, as it should.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example that takes longer than 200 ms is no failure: on a busy machine the first one does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


# Files that take longest, the longest first: they begin first, so that no worker ends alone with one of them.
LONG = (
    "docs/test_docs_examples.py", "mutations/test_planted_bugs.py", "verify/story/test_story_sees.py",
    "session/test_scripts.py", "launch/test_launched.py", "run/numerics/test_no_values.py",
    "run/survive/faults/test_faults.py", "run/parallel/context/test_context.py", "verify/rounding/test_conditioning.py",
    "verify/story/test_story.py", "verify/low/test_low.py", "session/confirm/test_confirm_grown.py",
    "run/survive/faults/test_survivors_state.py", "task/data/sources/test_shard_runs.py",
    "benchmarks/test_benchmarks.py", "launch/test_recovery.py", "run/parallel/test_layouts.py",
    "run/updates/test_optimizers.py", "run/survive/faults/test_soak.py", "verify/test_verify_verb.py",
    "run/survive/faults/test_soak_of_worlds.py",
    "run/loop/test_resume.py", "launch/test_unread_output.py", "run/survive/health/test_second_look.py",
    "supervise/test_nodes.py", "run/parallel/expert/test_experts.py", "run/parallel/test_adapters.py",
    "run/test_wire_volumes.py", "run/survive/saving/test_keeper.py", "session/test_python.py",
    "run/parallel/pipeline/test_pipeline.py", "run/survive/faults/test_faults_together.py",
    "run/parallel/pipeline/test_pipeline_models.py", "run/parallel/test_tensor_parallel.py", "run/loop/test_replan.py",
    "run/loop/test_host_waits.py", "run/test_programs.py", "run/parallel/test_interface.py",
    "verify/test_no_false_alarm.py", "run/survive/health/test_guard.py", "run/loop/test_step.py",
    "verify/compare/test_compare.py", "task/data/rows/test_any_data.py", "run/memory/test_offload.py",
    "supervise/test_supervisor.py", "foreign/test_odd_programs.py", "cluster/here/test_waiting.py",
    "launch/test_storage_failures.py", "run/numerics/randomness/test_sample_randomness.py",
    "task/data/sources/test_sequence_pairs.py", "launch/test_run_endings.py",
    "task/data/sources/tables/test_filled_prices.py", "verify/compare/test_turns_proof.py",
    "verify/loops/test_loops_rounding.py", "simulate/test_simulate_verb.py", "task/data/test_any_schedule.py",
    "test_floors.py", "task/data/test_rows_together.py", "run/numerics/test_invariants.py",
    "task/data/storage/test_cold_reads.py", "run/parallel/data/test_packed_weights.py",
    "run/survive/faults/test_decided_and_lost.py", "run/parallel/data/test_batch_norm.py", "task/adapt/test_distill.py",
    "run/survive/test_replay.py", "session/verbs/test_evaluating.py", "plan/explain/test_screen.py",
    "plan/test_planned.py", "verify/process/test_every.py", "run/numerics/randomness/test_compiled_draws.py",
    "run/parallel/test_given.py", "run/survive/faults/test_notices_after_faults.py", "run/loop/test_rows.py",
    "run/survive/test_listener.py", "run/survive/test_run_budget.py", "verdict/test_verdict.py",
    "run/loop/test_turns.py", "run/survive/health/test_less_work.py", "verify/loops/test_wrong_loops.py",
    "task/models/test_chunked_head.py", "run/test_kept.py", "run/parallel/expert/test_moe_axes.py",
    "run/record/test_clock_set_meanwhile.py", "run/survive/saving/test_memory_tier.py",
    "plan/explain/test_compare_clusters.py", "run/parallel/expert/test_own_experts.py",
    "verify/loops/test_right_loops.py", "run/test_initial.py", "run/memory/test_exhausted.py", "backtest/test_fit.py",
    "plan/search/test_search.py", "session/test_prompt.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest takes those that are asked for by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what deep.txt lists, begin with long files, and skip what needs a GPU where there is none."""
    deep = set(Path(HERE, "deep.txt").read_text(encoding="utf-8").splitlines())
    for item in items:
        if f"{item.path.relative_to(HERE)}::{item.name}" in deep:
            item.add_marker(pytest.mark.deep)
    if items and hasattr(items[0].config, "workerinput"):  # of several that share the files; alone they come as asked
        places = {str(Path(HERE, name)): place for place, name in enumerate(LONG)}
        assert not (gone := [path for path in places if not Path(path).exists()]), f"LONG names what is gone: {gone}"
        items.sort(key=lambda item: places.get(str(item.path), len(LONG)))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while thousands of tests come, of which nothing is any; later nothing of them is looked at."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


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

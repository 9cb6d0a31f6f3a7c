"""Settings of the test suite."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

EXIT_SECONDS = 120.0  # in which a process ends after its last test; an idle machine takes less than one

# Helpers of the tests (distributed.py, tests_shared.py) are modules beside this file; ranks inherit the path.
HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
from strict_json import be_strict  # noqa: E402

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))

# Threads of one process that wait for each other spin for a while, which takes the cores of the other workers: a
# run of two threads beside others took eight times as long. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# An example that takes longer than 200 ms is no failure: on a busy machine the first one does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


# Files that take longest, the longest first: they begin first, so that no worker ends alone with one of them.
LONG = (
    "mutations/test_planted_bugs.py", "session/test_scripts.py", "launch/test_recovery.py",
    "docs/test_docs_examples.py", "run/loop/test_resume.py", "run/parallel/test_interface.py",
    "run/process/test_interrupts.py", "benchmarks/test_benchmarks.py", "session/test_python.py",
    "launch/test_run_endings.py", "verify/test_verify_verb.py", "supervise/test_nodes.py",
    "launch/test_storage_failures.py", "verify/test_every.py", "run/survive/test_soak.py", "launch/test_one_run.py",
    "session/test_prove.py", "run/parallel/test_tensor_parallel.py", "run/updates/test_optimizers.py",
    "run/parallel/test_layouts.py", "run/parallel/test_context.py", "verify/test_low.py",
    "run/survive/test_second_look.py", "run/survive/test_faults.py", "run/parallel/test_moe_axes.py",
    "run/parallel/test_tensor_rules.py", "run/parallel/test_pipeline.py", "run/test_programs.py",
    "cli/test_export.py", "verify/test_conditioning.py", "launch/test_launched.py", "run/test_kept.py",
    "foreign/test_foreign_models.py", "supervise/test_supervisor.py", "launch/test_learnt_runs.py",
    "run/parallel/test_experts.py", "run/survive/test_guard.py", "session/test_ill_conditioned_run.py",
    "run/parallel/test_pipeline_models.py", "run/survive/test_less_work.py", "plan/explain/test_alternatives.py",
    "task/data/sources/test_shard_runs.py", "verify/test_turns_proof.py", "run/memory/test_memory_resume.py",
    "verify/test_compare.py", "run/memory/test_memory_start.py",
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
    from started.inside import forked_inside
    from started.orphans import watch

    watch()
    with forked_inside():
        yield
    shutil.rmtree(folder, ignore_errors=True)

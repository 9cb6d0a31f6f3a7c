"""Settings of the test suite."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Helpers of the tests (distributed.py, tests_shared.py) are modules beside this file; ranks inherit the path.
HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device here"))


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    """Keep what this machine has probed and tokenised out of the tests, and the tests out of it."""
    folder = tempfile.mkdtemp(prefix="paceline-tests-")
    os.environ["XDG_CACHE_HOME"] = folder
    yield
    shutil.rmtree(folder, ignore_errors=True)

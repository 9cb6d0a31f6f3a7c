"""What a probe says a rank holds before any tensor is what a process holds that has imported what ranks do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cluster.here.imported import OWN_BYTES

HELD = """
from importlib import import_module
from paceline.cluster.here.imported import TORCH_OF_A_RANK
from paceline.run.memory.spent import process_bytes
from paceline.session.standby import PROOF, prepare

def held():
    status = process_bytes()
    return status["VmRSS"] - status["RssFile"]

for name in ("torch", *TORCH_OF_A_RANK):
    import_module(name)
before = held()
prepare(PROOF)
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells elsewhere in other words what a process holds")
def test_what_our_own_modules_add_is_what_a_probe_counts_for_them() -> None:
    added = int(subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True).stdout)
    assert OWN_BYTES / 2 < added < 2 * OWN_BYTES

"""Settings of the test suite."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Helpers of the tests (distributed.py, tests_shared.py) are modules beside this file; ranks inherit the path.
HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH", "")]))

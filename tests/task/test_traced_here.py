"""Who trains a model in its own process has it traced there: a process for that would import torch for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from runs import environment

SCRIPT = """
import sys
from paceline.errors import ConfigError
from paceline.session import start
from paceline.spec.load import load_spec

def plan(spec, say, standby=None):
    print("torch" in sys.modules)
    raise ConfigError("enough", "it is known", "nothing")

start.plan_here = plan
for model, devices in (("llama-1m", 1), ("my_model:net", 2), ("my_model:net", 1)):
    changes = [f"task.model={model}", f"cluster.devices={devices}", "cluster.device=cpu", "run.dir=run"]
    try:
        start.train(load_spec(None, changes), say=lambda line: None)
    except ConfigError as error:
        assert error.what == "enough", error
"""


def test_torch_is_there_before_the_plan_where_a_model_is_traced_and_trained_here(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "False", "True"], done.stderr

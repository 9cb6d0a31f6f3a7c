"""Whether the run's directory holds a run of the same task: asked before anything is proven, started or written there.

The ranks hold the checkpoint that they load against the task once more. By then processes have been started, and what
fails is on record in the journal of a run that has nothing to do with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec, spec_to_dict
from paceline.spec.run_files import checkpoints_folder
from paceline.spec.survive.contract import check_contract


def check_same_task(spec: Spec) -> None:
    """Raise ConfigError where the newest checkpoint of the run's directory is of a task that a resume refuses.

    `spec` is settled. Manifests that cannot be read are left to who loads them.
    """
    run_dir = run_directory(spec)
    then = _newest_spec(run_dir)
    if then is not None:
        check_contract(then, spec_to_dict(spec), run_dir)


def _newest_spec(run_dir: Path) -> Mapping[str, Any] | None:
    """Return the spec that the newest checkpoint was saved under; without torch, which loading would import.

    Folders of other names are none that ranks would load: what is half saved, or was put there by hand.
    """
    found: list[tuple[int, Mapping[str, Any]]] = []
    for path in checkpoints_folder(run_dir).glob("step-[0-9]*/manifest.json"):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))["body"]
            found.append((int(body["sequence"]), dict(body["extra"]["spec"])))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max(found, key=lambda each: each[0])[1] if found else None

"""What wrote a checkpoint: the versions of packages and the user's own modules. A resume by others is told of."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paceline.task.own_code import modules_named
from paceline.version import __version__


def versions_here() -> dict[str, str]:
    """Return the versions of what computes here, by name; of transformers where it is used."""
    found = {"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version(),
             "numpy": np.__version__}  # fmt: skip
    used = sys.modules.get("transformers")
    return {**found, "transformers": str(used.__version__)} if used is not None else found


def written_by(task: object) -> dict[str, object]:
    """Return what a checkpoint says of its writer: versions, and a digest of each module that the task names."""
    return {"versions": versions_here(), "code": modules_named([task])}


def other_writer(extra: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what is to be told where another version, or another module of the user's, wrote a checkpoint.

    `now` is `written_by` of this start. An earlier release wrote less of it.
    """
    versions, code = (
        [(name, was, now[what][name]) for name, was in extra.get(what, {}).items() if now[what].get(name, was) != was]
        for what in ("versions", "code")
    )
    told = [f"{name} was {was} and is now {version}" for name, was, version in versions]
    return told + [f"the code of the module {name} has changed, which the task names" for name, _, _ in code]

"""Silences: rules of a run that nobody is to be woken by until a moment. `paceline alerts silence` writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

FILE = "silences.json"
ALL = "*"


def read_silences(run_dir: Path) -> dict[str, float]:
    """Return until when each rule is silenced, `*` for all; nothing where none is, or the file cannot be read."""
    try:
        found = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
        return {str(rule): float(until) for rule, until in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def silence(run_dir: Path, rule: str, until: float) -> dict[str, float]:
    """Silence a rule, or `*`, until a moment (seconds since the epoch), and return all silences. Raises OSError."""
    known = {**read_silences(run_dir), rule: until}
    temporary = run_dir / f".{FILE}-{os.getpid()}"
    temporary.write_text(json.dumps(known), encoding="utf-8")
    temporary.replace(run_dir / FILE)
    return known


def is_silenced(silences: Mapping[str, float], rule: str, now: float) -> bool:
    """Return whether a rule is silenced at a moment."""
    return now < max(silences.get(rule, 0.0), silences.get(ALL, 0.0))

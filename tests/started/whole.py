"""What processes of tests import sooner or later is imported once, by the process that they are forked from.

A command imports some 500 modules of ours, and a rank those that its test names. Commands that need no torch must not
have it: what forks them takes the rooms alone that import none, which tests/test_floors.py holds them to.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

TORCH_FREE = ("paceline.cli", "paceline.plan", "paceline.cluster", "paceline.supervise", "paceline.report",
              "paceline.history", "paceline.verdict", "paceline.account", "paceline.observe", "paceline.session.start",
              "paceline.session.verbs")  # fmt: skip
LEFT_OUT = ("paceline.__main__", "paceline.observe.dash.")  # runs, and needs an extra


def import_rooms(*rooms: str) -> None:
    """Import all modules of these rooms."""
    for room in rooms:
        places = getattr(importlib.import_module(room), "__path__", [])
        for found in pkgutil.walk_packages(places, f"{room}."):
            if not found.name.startswith(LEFT_OUT):
                with contextlib.suppress(ImportError):  # of a package that is not installed
                    importlib.import_module(found.name)

"""Where a program draws random numbers: its own code, from the call outwards to the module's forward pass it is in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

Site = tuple[tuple[CodeType, int], ...]  # where a program draws: code and place in it, from the inside out

DEPTH = 8
OWN_PLACE = "drawing_place"  # an attribute of a module: one number for all places of its forward pass, see below
_SILENT = ("torch.nn.modules.dropout",)  # modules that are their caller's tool: where they are called says more
_SKIPPED = ("torch.nn.modules.module", "contextlib")
CHECKPOINT = "torch.utils.checkpoint"
_OURS = (
    "paceline.run.numerics.randomness.",
    "paceline.task.entries_read",
    "paceline.verify.rounding.",
    "paceline.verify.reached.",
)  # between a program and its caller, and not always there
_ENDS = (CHECKPOINT, "paceline.run.", "paceline.verify.")  # callers of a program, in two ways or more


def site_of_caller(module_of: Callable[[object], object] = lambda found: None) -> Site:
    """Return where the program draws: its frames up to the module's forward pass that it is in.

    That module, or None where the program draws outside of any in what it runs again, goes to `module_of`. Modules of
    one class that draw tensors of different widths are told apart by an attribute of theirs, `drawing_place`: a rank's
    part of a wide tensor may be as wide as another one.
    """
    frame: Any = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    between = False  # whether something of ours stands between this frame and the one inside it
    while frame is not None and len(found) < DEPTH:
        name = frame.f_globals.get("__name__", "")
        ours = name.startswith(_OURS)
        if name.startswith(_ENDS) and not ours:
            if name == CHECKPOINT:
                module_of(None)
            break
        if between and found and found[-1] == (frame.f_code, frame.f_lasti):
            between = False  # a function of torch's that was called again, as every mode within another does
        elif ours:
            between = True
        elif (not name.startswith("torch") or name.startswith("torch.nn.")) and name not in _SKIPPED:
            between = False
            found.append((frame.f_code, frame.f_lasti))
            if frame.f_code.co_name == "forward" and isinstance(owner := frame.f_locals.get("self"), nn.Module):
                module_of(owner)
                if (place := getattr(owner, OWN_PLACE, None)) is not None:
                    found[-1] = (frame.f_code, int(place))
                if name not in _SILENT:
                    break
        frame = frame.f_back
    return tuple(found)


def where(site: Site) -> str:
    """Return a site in words: the program's own line, if there is one."""
    own = [(code, at) for code, at in site if "/torch/nn/" not in code.co_filename] or list(site)
    if not own:
        return "the program"
    code, at = own[0]
    line = next((n for begin, end, n in code.co_lines() if begin <= at < end and n), code.co_firstlineno)
    return f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{line})"

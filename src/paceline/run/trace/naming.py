"""A trace in Paceline's words: phases of a step, and collectives with the ranks that they are over.

A trace of torch's profiler is JSON in the format of Chrome's tracing, which Perfetto reads. What is renamed keeps its
old name in the event's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.spec.watch.traced import PREFIX

# Phases of a step, as points of a run name them (run/survive/points.py).
PHASES = {
    "data": "wait for the batch", "loop": "body of the loop", "forward": "forward and backward passes",
    "reduce": "gradient reduction", "update": "optimizer", "check": "between steps", "evaluate": "evaluation",
    "save": "checkpoint", "ended": "end",
}  # fmt: skip
COLLECTIVES = (
    ("all-reduce", re.compile(r"all_?reduce", re.I)),
    ("all-gather", re.compile(r"all_?gather", re.I)),
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all-to-all", re.compile(r"all_?to_?all", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
    ("send", re.compile(r"\bi?send|sendrecv", re.I)),
    ("receive", re.compile(r"recv", re.I)),
    ("scatter", re.compile(r"scatter", re.I)),
    ("gather", re.compile(r"gather", re.I)),
)
COMMUNICATES = re.compile(r"^(?:gloo:|nccl:|c10d::)|nccl(?:Dev)?Kernel", re.I)
_MESH = re.compile(r"mesh_(\w+)")


def collective_of(name: str) -> str:
    """Return which collective an event is, "" for one that is none."""
    if not COMMUNICATES.search(name):
        return ""
    return next((word for word, pattern in COLLECTIVES if pattern.search(name)), "collective")


def named(event: Mapping[str, Any]) -> dict[str, object]:
    """Return an event of a trace with its name in Paceline's words, where it is a collective."""
    word = collective_of(str(event.get("name", "")))
    if not word:
        return dict(event)
    told = dict(event.get("args") or {})
    axis = _MESH.search(str(told.get("Process Group Description", "")))
    name = f"{PREFIX}{word}{f' over {axis[1]}' if axis else ''}"
    return {**event, "name": name, "args": {**told, "torch": event["name"]}}

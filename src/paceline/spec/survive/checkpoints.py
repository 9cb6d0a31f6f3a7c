"""CheckpointsSpec: the `[run.checkpoints]` table of a spec. How checkpoints are written and kept."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.units import Amount


@dataclass(frozen=True)
class CheckpointsSpec(Declared, table="run.checkpoints"):
    """How a run saves: beside training or while it waits, and for how long it goes on without."""

    asynchronous: str = option(
        "auto",
        "write checkpoints beside training, which then waits only for a copy to host memory"
        " (auto: where that has room for the copy)",
        choices=("auto", "on", "off"),
    )
    interval: str = option(
        "fixed",
        "auto: as often as costs the least, from measured costs and the cluster's failure rate; checkpoint_every and"
        " memory_every are then the longest intervals",
        choices=("fixed", "auto"),
    )
    memory_every: Amount | None = option(
        None,
        "steps, samples or tokens between copies in the memory of the machine, which a killed process does not take"
        " along",
        quantity="amount",
        units=("steps", "samples", "tokens"),
    )
    keep_for: float | None = option(
        None,
        "how long the run.keep_last newest stay on disk; the newest always does",
        quantity="duration",
        above=0.0,
    )
    keep_best: int = option(
        0,
        "how many more stay on disk for the best task.evaluate.metric (the least held-out loss), of those saved after"
        " an evaluation",
        minimum=0,
    )
    save_best: bool = option(False, "also save after each evaluation that is the best so far")
    remote: str = option("", "a URL of fsspec, such as s3://bucket/run, to which checkpoints are copied as well")
    remote_every: Amount | None = option(
        None,
        "steps, samples or tokens between checkpoints that are copied to `remote`; unset means every one on disk",
        quantity="amount",
        units=("steps", "samples", "tokens"),
    )
    remote_keep: int = option(3, "how many checkpoints are kept in `remote`", minimum=1)
    hanging_after: float = option(
        600.0,
        "a save that takes longer counts as hanging: training goes on without it, and the process ends without it; one"
        " that training waits for does where nothing of it is written or read for so long",
        quantity="duration",
        above=0.0,
    )
    most_failures: int = option(
        5,
        "saves in a row that may fail before the run stops with exit code 75 (74 where it has no checkpoint)",
        minimum=1,
    )

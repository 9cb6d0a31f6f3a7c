"""FaultPlan: the `[run.faults]` table of a spec. Faults that are made on purpose, as declared data.

A file for `paceline train --faults` holds the same table: a seed, and `[[each]]` for every fault.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.build import build, document_layer, mapping_layer
from paceline.config.declared import Declared
from paceline.config.document import read_document
from paceline.config.fields import option
from paceline.config.shape import table_of
from paceline.config.values import kind_of, literal
from paceline.errors import ConfigError

# What each kind does, and the phase in which it strikes where the plan names none.
KINDS = {
    "kill": ("SIGKILL: the process is gone at once", "forward"),
    "stop": ("SIGSTOP for `seconds` (0: for ever): the process stands still and answers nobody", "forward"),
    "signal": ("`signal` is delivered, as a scheduler would", "data"),
    "slow": ("the rank's passes take `factor` times as long, for `steps` steps", "reduce"),
    "delay": ("the rank comes to the reduction `seconds` late", "reduce"),
    "error": ("an exception that nobody expects", "forward"),
    "oom": ("the device's memory is exhausted: torch.OutOfMemoryError", "forward"),
    "nan": ("NaN in `target`", "backward"),
    "flip": ("one bit of `target` is flipped", "backward"),
    "disk_full": ("the next file of a checkpoint cannot be written: no space is left", "save"),
    "read_only": ("the next file of a checkpoint cannot be written: the file system is read-only", "save"),
    "slow_disk": ("the next file of a checkpoint takes `seconds` longer to be written", "save"),
    "journal_full": ("for `steps` steps no file can grow beyond the journal's size, the journal included", "data"),
    "corrupt": ("one bit of the newest published checkpoint is flipped", "data"),
    "truncate": ("a file of the newest published checkpoint loses its second half", "data"),
    "descriptors": ("no further file can be opened for `seconds`", "data"),
    "cut": ("the rank's node is cut off: what it sends is lost, for `seconds` (0: for ever)", "forward"),
    "slow_network": ("what the rank's node sends goes at `bandwidth`, for `seconds` (0: for ever)", "forward"),
}
FAULT_PHASES = ("rendezvous", "load", "data", "forward", "backward", "reduce", "update", "save")
OF_A_FILE = ("disk_full", "read_only", "slow_disk")  # strike as a file of a checkpoint is opened
SUPERVISED = ("kill", "stop", "signal")  # those that can be aimed at the supervisor


@dataclass(frozen=True)
class FaultSpec(Declared, table="run.faults.each"):
    """One fault that is made on purpose: what, on which rank, where, and how often."""

    kind: str = option("kill", "what happens", choices=tuple(KINDS))
    rank: int = option(-1, "the rank that it strikes; -1 draws one by the seed", minimum=-1)
    everywhere: bool = option(False, "strike every rank, and not one")
    step: int = option(0, "the step in which it strikes; 0 draws steps with `rate`", minimum=0)
    rate: float = option(0.0, "how likely it strikes in any one step, drawn by the seed", minimum=0.0, maximum=1.0)
    phase: str = option("", "where in the step it strikes; empty for the usual place of its kind",
                        choices=("", *FAULT_PHASES))  # fmt: skip
    times: int = option(1, "how often it strikes at most, over all starts of the run; 0 for no limit", minimum=0)
    again: bool = option(False, "strike again in the same step after a restart, as a bug does and an accident does not")
    seconds: float = option(
        0.0,
        "how long it lasts (stop, delay, slow_disk, descriptors, cut, slow_network)",
        quantity="duration",
        minimum=0.0,
    )
    towards: tuple[str, ...] = option(
        (), "addresses of other nodes: what is sent to these alone is lost (cut), as between two groups of nodes"
    )
    bandwidth: int = option(1_000_000, "bytes per second that a slow network takes", quantity="bytes", minimum=1000)
    factor: float = option(3.0, "how many times as long a slow rank takes", minimum=1.0)
    steps: int = option(1, "for how many steps it lasts (slow, journal_full)", minimum=1)
    target: str = option("gradient", "what gets a NaN or a flipped bit", choices=("gradient", "weight", "optimizer"))
    bit: int = option(-1, "which bit of a number is flipped, from the lowest; -1 draws one by the seed", minimum=-1)
    signal: str = option("SIGTERM", "the signal of kind `signal`", choices=("SIGTERM", "SIGUSR1", "SIGINT"))
    whom: str = option("rank", "who is struck by kill, stop and signal: a rank, the process that supervises it, or the "
                       "coordinator of several nodes, where that runs on the rank's node",
                       choices=("rank", "supervisor", "coordinator"))  # fmt: skip

    @property
    def place(self) -> str:
        """The phase in which the fault strikes."""
        return self.phase or KINDS[self.kind][1]


@dataclass(frozen=True)
class FaultPlan(Declared, table="run.faults"):
    """Faults that a run is to live through, to rehearse them. Without any, nothing of this exists in a run."""

    seed: int = option(0, "seed of what is drawn: ranks, steps, bits", minimum=0)
    each: tuple[FaultSpec, ...] = option((), "the faults, as tables")


def read_faults(given: object) -> FaultPlan:
    """Return the fault plan of a TOML file (its path), of plain data as the file has it, or a plan as it is.

    Raises ConfigError for what is none, and for a fault that would never strike.
    """
    shape = table_of(FaultPlan, "faults")
    if isinstance(given, FaultPlan):
        plan = given
    elif isinstance(given, str | Path):
        plan, _ = build(shape, document_layer(shape, read_document(given)))
    elif not isinstance(given, Mapping | list | tuple):
        raise ConfigError(f"faults = {literal(given)} cannot be used", f"it is {kind_of(given)}",
                          'a TOML file, or [{"kind": "kill", "step": 5}]')  # fmt: skip
    else:
        values = {"each": given} if isinstance(given, list | tuple) else given
        plan, _ = build(shape, mapping_layer(shape, values, lambda key: "faults"))
    check_faults(plan)
    return plan


def check_faults(plan: FaultPlan) -> None:
    """Raise ConfigError for the first fault of a plan that can never strike as it is written."""
    for number, fault in enumerate(plan.each, 1):
        where = f"fault {number} ({fault.kind})"
        needs_step = fault.place not in ("rendezvous", "load")
        if needs_step and not fault.step and not fault.rate:
            raise ConfigError(f"{where} would never strike", "it has neither a step nor a rate", "step = 5")
        if fault.whom != "rank" and fault.kind not in SUPERVISED:
            raise ConfigError(
                f"{where} is aimed at the {fault.whom}", f"only {', '.join(SUPERVISED)} can be", 'whom = "rank"'
            )
        if fault.kind in ("slow", "delay") and fault.place != KINDS[fault.kind][1]:
            raise ConfigError(
                f"{where} strikes in {fault.place}", f"its place is {KINDS[fault.kind][1]}", "leave out `phase`"
            )
        if fault.kind in OF_A_FILE and fault.place != "save":
            raise ConfigError(f"{where} strikes in {fault.place}", "its place is a save", "leave out `phase`")
        if fault.towards:
            _check_towards(fault, where)
        if fault.kind in ("delay", "descriptors", "slow_disk") and not fault.seconds:
            raise ConfigError(f"{where} lasts no time", "its seconds are 0", 'seconds = "2 s"')


def _check_towards(fault: FaultSpec, where: str) -> None:
    if fault.kind != "cut":
        raise ConfigError(f"{where} has addresses in `towards`", "only a cut is towards some nodes", "leave it out")
    for address in fault.towards:
        try:
            ipaddress.ip_address(address)
        except ValueError as error:
            raise ConfigError(f"{where} towards {literal(address)}", str(error), 'towards = ["10.0.0.3"]') from error

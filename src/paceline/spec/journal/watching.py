"""The kinds of record of what is watched while a run trains: nodes, the health of training, and alerts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from paceline.spec.journal.record import Ids, Numbers, Record, Table, Tables, Told, Words


@dataclass(frozen=True)
class NodeSample(Record):
    """What one node and the processes and devices of its ranks did since the sample before."""

    KIND: ClassVar[str] = "node"

    step: Annotated[int | None, Told("steps done")]
    node: Annotated[str, Told("the node's name")]
    seconds: Annotated[
        float | None, Told("the time that it covers, up to `time`: samples of a start follow each other", "s")
    ]
    ranks: Annotated[Ids | None, Told("the ranks of this node")]
    signals: Annotated[
        Table,
        Told(
            "each with `min`, `median` and `max` over the node's ranks and the `rank` of the highest:"
            " `cpu_cores` (cores that the process used), `resident_bytes`; of GPUs `celsius`, `watts`, `joules` (of"
            " these seconds), `utilisation`, `memory_bytes`, `memory_share`, `clock_hz`, `clock_share` (of the highest"
            " clock), `throttled` (1 where heat or a fault cuts the clock) and `power_capped` (1 where the limit of"
            " power does)"
        ),
    ]
    host: Annotated[
        Numbers,
        Told(
            "of the node: `cpu_share` (of all cores), `memory_bytes`, `memory_available_bytes`,"
            " `received_bytes_per_second`, `sent_bytes_per_second`, `read_bytes_per_second`,"
            " `written_bytes_per_second` (network without loopback, whole disks), `celsius` (the hottest zone),"
            " `throttled`, and the energy of these seconds: `cpu_joules` (packages and memory, by RAPL) and"
            " `device_joules` (all GPUs of the node's ranks, each once)"
        ),
    ]
    absent: Annotated[Table, Told("by name what could not be read, and why; nothing absent is a zero")]
    flagged: Annotated[Words, Told("what stands out, such as `rank 3 throttled`")]
    detail: Annotated[
        Table | None,
        Told("by rank its own numbers: of those that stand out, of all with `run.observe.detail`", if_any=True),
    ] = None
    devices: Annotated[
        Words | None,
        Told("the UUIDs of the GPUs of its ranks, each once: nodes that name the same one share it", if_any=True),
    ] = None


def device_line(signals: Table) -> str:
    """Return how hot the hottest device is, the power of the one that takes most, and whether one is throttled.

    Empty where no device tells.
    """
    parts = []
    for name, unit in (("celsius", "°C"), ("watts", "W")):
        most = (signals.get(name) or {}).get("max")
        if isinstance(most, int | float):
            parts.append(f"{most:.0f} {unit}")
    if (signals.get("throttled") or {}).get("max"):
        parts.append(f"rank {signals['throttled'].get('rank')} throttled")
    return " ".join(parts)


@dataclass(frozen=True)
class HealthSample(Record):
    """How gradients, updates and activations of each block were in one step."""

    KIND: ClassVar[str] = "health"

    step: Annotated[int | None, Told("number of the step")]
    values: Annotated[
        Table,
        Told(
            "by block: `grad_norm` (before clipping), `weight_norm`, `update_ratio` (norm of the update over that of"
            " the weights before it), `activation_rms` and `activation_max` of what the block gives, `dead_share` (of"
            " the units behind its activation functions, those that gave nothing for any sample),"
            " `attention_max` (largest score without its sign, of the last 64 queries of each row and one head, another"
            " one in each measurement), `logit_max` of `output` (without its sign, of the last 4 tokens of each row)"
        ),
    ]
    absent: Annotated[Table, Told("by name what was not measured, and why")]
    told: Annotated[
        Tables,
        Told(
            "what stands out: each with `detector`, `block` (empty for the whole model), `value`, `threshold`,"
            " `evidence` and `advice`"
        ),
    ]
    seconds: Annotated[float | None, Told("what measuring took on rank 0's host", "s")]


@dataclass(frozen=True)
class AlertRecord(Record):
    """An alert that fires, or is over. In `RUN/journal/alerts-0001.jsonl`, a file for each watch over the run."""

    KIND: ClassVar[str] = "alert"

    rule: Annotated[str, Told("the rule, of those that `paceline alerts list` names")]
    severity: Annotated[str, Told("`info`, `warning` or `critical`")]
    state: Annotated[str, Told("`firing`, or `resolved`")]
    title: Annotated[str, Told("what is the matter, in one line")]
    evidence: Annotated[Table, Told("the numbers behind it")]
    advice: Annotated[str, Told("what to do about it")]
    step: Annotated[int | None, Told("the last step on record", if_any=True)] = None
    sent: Annotated[bool | None, Told("whether it was handed to the sinks: silenced ones are not", if_any=True)] = None

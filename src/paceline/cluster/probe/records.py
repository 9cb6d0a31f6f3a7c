"""What a probe asks of its ranks, what a rank finds, and the record that is kept: JSON, field by field."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class ProbeRequest(TypedDict):
    """What every rank measures, and how long it may take."""

    devices: int
    kind: str  # "cpu" or "cuda"
    threads: int  # of each rank
    seconds_budget: float
    fair_share: float  # of a core for each thread
    passes: int  # over everything that is measured


class Timed(TypedDict):
    """Seconds of one call, the relative spread of calls, and how many were timed."""

    seconds: float
    spread: float
    repeats: int
    drift: NotRequired[float]  # by how much the slower one of two passes took longer


class TimedRate(Timed):
    """A timed call that computes: FLOP/s at a width or a sequence length."""

    at: int
    flops: float


class TimedBytes(Timed):
    """A timed call that moves memory."""

    bytes_per_second: float


class TimedBlock(Timed):
    """A training step of some layers, with the counts that explain its seconds."""

    precision: str
    width: int
    head_width: NotRequired[int]
    sequence: int
    parameters: int
    matmul_flops: float
    attention_flops: float
    moved_elements: int
    operators: int


class PassTimes(TypedDict):
    """Forward and backward of a block for each operator: on a few tokens, and on all rows and half of them."""

    few_tokens: Timed
    all_and_half: tuple[Timed, Timed] | None  # None with one thread, which nothing wakes


class LaunchTimes(TypedDict):
    """The start of an operator: without autograd, and as a third of its forward and backward."""

    plain: Timed
    autograd: Timed
    passes: NotRequired[PassTimes]  # of a CPU: there the start is read off how a block's passes grow with its rows


class MemoryTimes(TypedDict):
    """What moves memory: a triad, operators of a chain, and rows that are picked."""

    triad: TimedBytes
    elementwise: TimedBytes
    picked: TimedBytes


class Latency(TypedDict):
    """Seconds that a collective adds to a step: an all-reduce of one number."""

    seconds: float
    refused: NotRequired[bool]  # whether what it seemed to add is impossible: the seconds are those in a row then


class TimedCollective(TypedDict):
    """Seconds that a collective over so many bytes adds to a step."""

    collective: str
    bytes: int
    seconds: float
    refused: NotRequired[bool]


class GroupTimes(TypedDict):
    """What collectives of one group take."""

    latency: Latency
    sizes: list[TimedCollective]


class CollectiveTimes(GroupTimes):
    """What collectives over all ranks take, and those of smaller groups by their size as text."""

    groups: dict[str, GroupTimes]


class StepTimes(TypedDict):
    """Seconds of a small model's forward and backward pass, and what the ranks tell each other meanwhile."""

    plain_seconds: float
    sharded_seconds: float  # each of its layers a unit of FSDP2, gathered in both passes
    moved_seconds: float  # a gather before and a reduce-scatter after every layer, and back
    work_seconds: float  # computing as before each collective that is timed
    few_plain_seconds: float  # the first two on a few tokens
    few_sharded_seconds: float
    few_kept_seconds: float  # of a pass on a few tokens that keeps its gradients and whole weights
    units: int
    unit_bytes: int
    moves: int
    move_bytes: int  # of the gathered rows


class ProbePass(TypedDict):
    """What one rank measured in one pass over all that is measured; `usable` are precisions worth timing."""

    launch: LaunchTimes
    collectives: CollectiveTimes | None
    steps: StepTimes | None
    matmul: dict[str, list[TimedRate]]
    attention: dict[str, list[TimedRate]]
    attention_narrow: dict[str, list[TimedRate]]
    usable: list[str]
    blocks: list[TimedBlock]
    optimizer: TimedBytes
    memory: MemoryTimes
    cpu_seconds: float  # of computing by itself
    wall_seconds: float


class RankProbe(TypedDict):
    """All that one rank measured. Rates of products and attention are by precision."""

    torch: str
    launch: LaunchTimes
    runtime_bytes: int
    collectives: CollectiveTimes | None  # None of a rank without peers
    steps: StepTimes | None  # the same, and of accelerators
    matmul: dict[str, list[TimedRate]]
    attention: dict[str, list[TimedRate]]
    attention_narrow: dict[str, list[TimedRate]]  # of heads of half the width
    head_widths: list[int]  # of both
    blocks: list[TimedBlock]
    optimizer: TimedBytes
    memory: MemoryTimes
    core_share: float
    refused: int  # collectives that took less beside computing than by themselves, however often they were timed
    device_name: NotRequired[str]
    device_memory_bytes: NotRequired[int]


class CollectiveRates(TypedDict):
    """Latency per ring hop and bytes per second of each collective, in the terms of ring algorithms."""

    all_reduce_latency_seconds: float
    hop_seconds: float
    bytes_per_second: dict[str, float]


class SubgroupRates(CollectiveRates):
    """The rates of groups of so many ranks."""

    size: int


class LinkRates(CollectiveRates):
    """The rates of collectives over all ranks, and of smaller groups."""

    groups: list[SubgroupRates]
    unit_seconds: NotRequired[float]  # that a sharded unit adds to a step beyond its collectives
    least_unit_seconds: NotRequired[float]  # the same of one that computes next to nothing
    kept_unit_seconds: NotRequired[float]  # that it adds to a micro-batch which keeps its gradients
    move_seconds: NotRequired[float]  # that a collective between layers adds beyond its own seconds
    work_seconds: NotRequired[float]  # of computing before each collective, when these were measured


class MeasuredMachine(TypedDict):
    """What all ranks' results come to: the slowest rank counts."""

    torch: str
    matmul: dict[str, list[list[float]]]  # points (width, FLOP/s) by precision
    attention: dict[str, list[list[float]]]  # points (sequence, FLOP/s) by precision
    attention_narrow: NotRequired[dict[str, list[list[float]]]]  # the same of narrower heads
    head_widths: NotRequired[list[int]]  # of both
    memory: dict[str, float]  # bytes per second
    launch_seconds: float
    launch_plain_seconds: float
    optimizer_bytes_per_second: float
    runtime_bytes: int
    calibration: list[TimedBlock]
    core_share: float
    refused: NotRequired[int]  # collectives whose time could not be told from computing
    relative_spread: float
    link: NotRequired[LinkRates]
    device_name: NotRequired[str]
    device_memory_bytes: NotRequired[int]


class ProbeRecord(MeasuredMachine):
    """A probe as it is kept in the user's cache."""

    schema: int
    busy: NotRequired[list[str]]  # what was in the way when it began; empty: nothing
    date: str
    host: str
    processor: str
    kind: str
    devices: int
    threads: int
    seconds: float

"""The tables that forecasts are tested against, as typed rows: measured steps, and four kinds of smaller measurements.

A column that is not named here is ignored and reported. An empty cell means that the source does not say.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a row stands, and what in it could not be read (empty: nothing)."""

    file: str = ""
    line: int = 0
    problem: str = ""


@dataclass(frozen=True)
class StepRow(Origin):
    """One measured training step: model, machine, layout, and what was measured."""

    source: str = ""
    source_ref: str = ""
    program: str = ""  # the software that ran, such as megatron-lm or torchtitan
    model: str = ""
    arch: str = ""  # gpt, llama, moe, bert, t5
    n_params: float | None = None
    layers: int | None = None
    hidden: int | None = None
    ffn_hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None  # where it is not hidden / heads
    vocab: int | None = None
    seq_len: int | None = None
    experts: int | None = None
    topk: int | None = None
    accelerator: str = ""
    n_devices: int | None = None
    devices_per_node: int | None = None
    intra_bw: str = ""
    inter_bw: str = ""
    precision: str = ""
    tp: int | None = None
    sp: int | None = None  # sequence parallel beside tp: 0 or 1
    pp: int | None = None
    pp_schedule: str = ""
    vpp: int | None = None  # pipeline stages per device
    cp: int | None = None
    ep: int | None = None
    dp: int | None = None
    zero_stage: str = ""
    micro_batch: int | None = None
    global_batch: int | None = None
    grad_accum: int | None = None
    recompute: str = ""
    attention_kernel: str = ""
    compile: int | None = None
    measured_step_s: float | None = None
    measured_tflops_per_device: float | None = None
    measured_mfu: float | None = None
    measured_tokens_per_s_per_device: float | None = None
    measured_memory_gib: float | None = None
    memory_kind: str = ""  # allocated, reserved or device: what the figure of memory counts
    status: str = "ok"
    derived: str = ""
    tflops_convention: str = ""
    notes: str = ""


@dataclass(frozen=True)
class CollectiveRow(Origin):
    """One measured collective: bytes, group, and its time or bus bandwidth."""

    source: str = ""
    source_ref: str = ""
    collective: str = ""
    message_bytes: float | None = None
    nodes: int | None = None
    devices_per_node: int | None = None
    group_size: int | None = None
    accelerator: str = ""
    network: str = ""
    busbw_gb_s: float | None = None
    time_us: float | None = None
    notes: str = ""


@dataclass(frozen=True)
class PowerRow(Origin):
    """The power that a node drew while it trained."""

    source: str = ""
    source_ref: str = ""
    benchmark: str = ""
    system: str = ""
    accelerator: str = ""
    nodes_measured: int | None = None
    devices_per_node: int | None = None
    measurement_type: str = ""  # AC or DC: on which side of the node's power supply
    node_power_mean_w: float | None = None
    node_power_steady_w: float | None = None
    node_steady_w_per_device: float | None = None


@dataclass(frozen=True)
class LayerRow(Origin):
    """What one layer's forward and backward pass took."""

    source_ref: str = ""
    model: str = ""
    hidden: int | None = None
    heads: int | None = None
    tp: int | None = None
    micro_batch: int | None = None
    seq_len: int | None = None
    accelerator: str = ""
    experiment: str = ""
    sp: int | None = None
    recompute: str = ""
    forward_ms: float | None = None
    backward_ms: float | None = None
    combined_ms: float | None = None


@dataclass(frozen=True)
class WholeRunRow(Origin):
    """What a whole published run took in device-hours and energy."""

    model: str = ""
    params: float | None = None
    tokens: float | None = None
    arch: str = ""
    accelerator: str = ""
    n_devices: int | None = None
    device_hours: float | None = None
    hours_kind: str = ""
    reported_mfu: float | None = None
    energy_mwh: float | None = None
    avg_power_w_per_device: float | None = None
    pue: float | None = None
    primary_source: str = ""
    notes: str = ""


AnyRow = StepRow | CollectiveRow | PowerRow | LayerRow | WholeRunRow

# Kind of table -> (its rows, columns that only it has, by which it is known).
KINDS: dict[str, tuple[type[AnyRow], tuple[str, ...]]] = {
    "steps": (StepRow, ("model", "accelerator", "n_devices", "seq_len")),
    "collectives": (CollectiveRow, ("collective", "busbw_gb_s")),
    "power": (PowerRow, ("node_steady_w_per_device",)),
    "layers": (LayerRow, ("combined_ms", "hidden")),
    "runs": (WholeRunRow, ("device_hours", "energy_mwh")),
}

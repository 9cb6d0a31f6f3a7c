"""What a device sends along every axis of the mesh in a step, from the model's profile and the plan.

Rings: an all-gather or a reduce-scatter over n devices sends (n - 1) / n of the buffer from each, an all-reduce twice
that; an all-to-all (n - 1) / n of what is routed; a pipeline stage its stream on, and its gradient back. The volumes
are those of `paceline.plan.cost`, which turns them into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.cost.rates import BYTES
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

# Collectives over tp in one forward pass, by kind of block (Korthikanti et al. 2022, arXiv:2205.05198, figure 5).
TENSOR_COLLECTIVES = {"embedding": 1, "decoder": 4, "experts": 4, "module": 4, "head": 1, "norm": 0}
AXES = ("tp", "cp", "ep", "dp_shard", "pp", "dp_replicate")


@dataclass(frozen=True)
class AxisTraffic:
    """Bytes that one device sends along an axis in a step, and how they come about."""

    axis: str
    bytes_per_step: float
    text: str


def axis_traffic(profile: ModelProfile, plan: Plan) -> tuple[AxisTraffic, ...]:
    """Return the traffic of the axes that span several devices, in the order of AXES.

    `dp_shard` stands for all devices that share one copy's state, those of `cp` included.
    """
    degrees = {axis: getattr(plan.layout, axis) for axis in AXES}
    degrees["dp_shard"] = plan.layout.state_degree
    formulas = {
        "tp": _tensor,
        "cp": _context,
        "ep": _expert,
        "dp_shard": _shard,
        "pp": _stages,
        "dp_replicate": _copies,
    }
    return tuple(AxisTraffic(axis, *formulas[axis](profile, plan)) for axis in AXES if degrees[axis] > 1)


def _samples(plan: Plan) -> int:
    return -(-plan.batch_samples // plan.layout.data_degree)


def _stream(profile: ModelProfile, plan: Plan) -> float:
    """Return the bytes between two blocks of a device's samples of a step, whole over tp."""
    widest = max((block.input_elements for block in profile.blocks), default=0.0)
    return _samples(plan) * widest / plan.layout.cp * BYTES[plan.precision]


def _tensor(profile: ModelProfile, plan: Plan) -> tuple[float, str]:
    size = plan.layout.tp
    once = sum(TENSOR_COLLECTIVES[block.kind] for block in profile.blocks) / plan.layout.pp
    passes = 2 + plan.recompute_share("selective", "full")
    stream = _stream(profile, plan)
    text = f"{passes * once:,.4g} gathers and reduce-scatters of {stream:.3g} B of stream"
    return passes * once * stream * (size - 1) / size, text


def _context(profile: ModelProfile, plan: Plan) -> tuple[float, str]:
    size = plan.layout.cp
    kept = sum(block.kv_elements for block in profile.blocks) / plan.layout.pp / plan.layout.tp
    moved = _samples(plan) * kept * BYTES[plan.precision]
    passes = 2 + plan.recompute_share("selective", "full")
    return passes * moved * (size - 1) / size, f"{passes:.3g} x {moved:.3g} B of keys, values and their gradients"


def _expert(profile: ModelProfile, plan: Plan) -> tuple[float, str]:
    size = plan.layout.ep
    routed = sum(block.routed_elements for block in profile.blocks) / plan.layout.pp / plan.layout.cp
    moved = _samples(plan) * routed * BYTES[plan.precision]
    passes = 4 + 2 * plan.recompute_share("full")
    return passes * moved * (size - 1) / size, f"{passes:.3g} all-to-alls of {moved:.3g} B of routed tokens"


def _parameters(profile: ModelProfile, plan: Plan) -> tuple[float, float]:
    """Return a device's parameters, those of routed experts apart, before they are sharded."""
    experts = profile.expert_parameters / plan.layout.ep
    return (profile.parameters - profile.expert_parameters) / plan.layout.tp / plan.layout.pp, experts / (
        plan.layout.tp * plan.layout.pp
    )


def _shard(profile: ModelProfile, plan: Plan) -> tuple[float, str]:
    size = plan.layout.state_degree
    dense, experts = _parameters(profile, plan)
    same = size // plan.layout.ep  # devices that share one part of the experts
    held = dense * (size - 1) / size + experts * (same - 1) / same
    gathers = 2 * plan.accumulation if plan.zero == 3 else 1
    reduces = plan.accumulation if plan.zero >= 2 else 1
    state = max(4, BYTES[plan.precision])
    text = f"{gathers} gathers ({BYTES[plan.precision]} B) and {reduces} reduce-scatters ({state} B) of the weights"
    return held * (gathers * BYTES[plan.precision] + reduces * state), text


def _stages(profile: ModelProfile, plan: Plan) -> tuple[float, str]:
    sent = 2 * plan.virtual_stages * _stream(profile, plan) / plan.layout.tp
    return sent, f"{plan.accumulation} micro-batches there and back, {plan.virtual_stages} stages a device"


def _copies(profile: ModelProfile, plan: Plan) -> tuple[float, str]:
    size, state = plan.layout.dp_replicate, max(4, BYTES[plan.precision])
    held = sum(_parameters(profile, plan)) / plan.layout.state_degree * state
    return 2 * (size - 1) / size * held, f"an all-reduce of {held:.3g} B of gradients"

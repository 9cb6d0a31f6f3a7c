"""What cannot be had, by name: one function per known limit. Imports no torch.

A function takes a plan and the model's profile and returns why the plan cannot run, or None. The search asks those of
`LAYOUT_REFUSALS` about each degree of each axis alone and then about whole layouts, and those of `PLAN_REFUSALS` about
whole plans, before it prices any. A limit that belongs to torch is held by a test that fails when torch learns it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.plan.feasible import experts, tensor
from paceline.plan.feasible.stages import fill_refusal, split_backward_refusal, stage_refusal
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

Limit = Callable[[Plan, ModelProfile], str | None]


def closed_axis(plan: Plan, profile: ModelProfile) -> str | None:
    """Return why an axis is closed to the model, where the plan uses it."""
    closed = profile.closed_axes or {}
    used = (axis for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep") if getattr(plan.layout, axis) > 1)
    return next((closed[axis] for axis in used if axis in closed), None)


def attention_heads(plan: Plan, profile: ModelProfile) -> str | None:
    """Tensor ranks share whole heads, of queries and of keys and values alike."""
    tp = 1 if profile.tensor_limits else plan.layout.tp  # where there are limits, they count heads too
    for count, what in ((_common(profile, "heads"), "heads"), (_common(profile, "kv_heads"), "key/value heads")):
        if tp > 1 and count % tp:
            return f"{count} {what} cannot be shared by tp = {tp}: it must divide {count}"
    return None


def tensor_parts(plan: Plan, profile: ModelProfile) -> str | None:
    """Tensor ranks each have a part of every split layer, and of the sequence between the layers."""
    return tensor.refusal(plan.layout, profile)


def expert_parts(plan: Plan, profile: ModelProfile) -> str | None:
    """Devices of an expert group share whole experts, and those of one expert even parts of its width."""
    return experts.refusal(plan.layout, profile)


def pipeline_stages(plan: Plan, profile: ModelProfile) -> str | None:
    """Every stage has a block, and only the interleaved schedules run several stages on a device."""
    return stage_refusal(plan, profile.repeated_blocks)


def pipeline_micro_batches(plan: Plan, profile: ModelProfile) -> str | None:
    """A pipeline needs a micro-batch per device, and interleaved ones take them in rounds of equal size."""
    return fill_refusal(plan)


def split_backward(plan: Plan, profile: ModelProfile) -> str | None:
    """Schedules that split the backward pass leave some other options out."""
    return split_backward_refusal(plan)


def watched_activations(plan: Plan, profile: ModelProfile) -> str | None:
    """What a block keeps is let go of, or moved, by watching what autograd keeps."""
    because = (profile.closed_axes or {}).get("recompute")
    if because is None or (plan.recompute == "none" and not plan.offloads_activations):
        return None
    what = f"recompute = {plan.recompute}" if plan.recompute != "none" else f"offload = {plan.offload}"
    return f"{what}: {because}"


def offloaded_activations(plan: Plan, profile: ModelProfile) -> str | None:
    """Activations move to the host block by block, and only those that autograd itself keeps."""
    if not plan.offloads_activations:
        return None
    if not profile.repeated_blocks:
        return f"offload = {plan.offload} moves what repeated blocks keep, and none were found in this model"
    if plan.recompute == "selective":
        return (
            f"offload = {plan.offload} cannot move what selective recompute keeps: torch holds it past autograd's hooks"
        )
    return None


def offloaded_optimizer(plan: Plan, profile: ModelProfile) -> str | None:
    """The optimizer's state rests on the host for those whose update takes it back in buckets."""
    return (profile.closed_axes or {}).get("offload") if plan.offloads_optimizer else None


def copies_in_step(plan: Plan, profile: ModelProfile) -> str | None:
    """Copies that are not summed exactly in every step are known without experts and fp16; bf16 wires on fewer axes."""
    if plan.sync.is_plain:
        return None
    what = f"plan.sync with {plan.sync}"
    if plan.sync.wire != "full" and plan.layout.tp > 1:
        return (
            f"{what} cannot be had with tp: of a weight that tensor ranks hold whole each would leave out something "
            "else, and the checkpoint of a copy keeps one of it"
        )
    if plan.sync.wire != "full" and plan.layout.pp > 1:
        return (
            f"{what} cannot be had with pp: stages add up gradients of their own, and both ends of the pipeline would "
            "round their halves of a weight that they share"
        )
    if plan.layout.ep > 1:
        return f"{what} is not proven with ep: ranks that hold an expert are those of all copies"
    if any(block.experts for block in profile.shapes):
        return f"{what} is not proven for experts: their load is balanced over all copies in every step"
    if plan.precision == "fp16":
        return f"{what} is not proven in fp16: copies would overflow apart, and go on with other loss scales"
    if plan.offloads_optimizer:
        return f"{what} is not proven with an optimizer that rests in host memory"
    return None


def spread_frozen(plan: Plan, profile: ModelProfile) -> str | None:
    """Frozen weights are spread over ranks that read different samples, where there are such."""
    if plan.frozen != "spread":
        return None
    if not profile.forward_only_parameters and not profile.packed_parameters:
        return (
            "frozen = spread needs a model that only goes forward (a teacher, the copy that preferences refer to), or "
            "frozen weights in four bits"
        )
    if max(plan.layout.tp, plan.layout.cp, plan.layout.pp, plan.layout.ep) > 1:
        return "frozen = spread is proven with dp_replicate and dp_shard alone"
    return None


def unequal_rows(plan: Plan, profile: ModelProfile) -> str | None:
    """Ranks read unequal parts of a batch where gradients are sums over all of them in every step."""
    if plan.rows and not plan.sync.is_plain:
        return f"plan.rows with {plan.sync}: copies that go on by themselves would count alike, whatever they read"
    return None


# Limits of the model, which hold for the layout alone, and of the whole plan. Add a limit here and nowhere else. Those
# of the whole plan are asked once for all layouts that agree in `pp`, in whether the data axes or `cp` are in use, and
# in whether `tp` is.
LAYOUT_REFUSALS: tuple[Limit, ...] = (closed_axis, attention_heads, tensor_parts, expert_parts)
PLAN_REFUSALS: tuple[Limit, ...] = (
    pipeline_stages,
    pipeline_micro_batches,
    split_backward,
    watched_activations,
    offloaded_activations,
    offloaded_optimizer,
    copies_in_step,
    spread_frozen,
    unequal_rows,
)


def layout_refusal(plan: Plan, profile: ModelProfile) -> str | None:
    """Return the first reason for which the plan's layout cannot be had, or None."""
    return next((because for limit in LAYOUT_REFUSALS if (because := limit(plan, profile))), None)


def plan_refusal(plan: Plan, profile: ModelProfile) -> str | None:
    """Return the first reason for which the plan cannot be had, its layout's degrees aside, or None."""
    return next((because for limit in PLAN_REFUSALS if (because := limit(plan, profile))), None)


def refusal(plan: Plan, profile: ModelProfile) -> str | None:
    """Return the first reason for which the plan cannot be had, or None."""
    return layout_refusal(plan, profile) or plan_refusal(plan, profile)


def _common(profile: ModelProfile, field: str) -> int:
    """Return the smallest count among the blocks that have one; 0 where none has, which everything divides."""
    return min((value for block in profile.shapes if (value := getattr(block, field))), default=0)

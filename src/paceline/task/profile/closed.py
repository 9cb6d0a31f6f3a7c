"""Why an axis of parallelism is closed to a model, and what would open it. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from paceline.spec.profile import TRY

SEQUENCE_RULE = (
    "ranks share sequences where the model says how its tokens meet (forward(tokens, positions=None, mask=None), and "
    "attention through paceline.task.models.layers.attention.CausalAttention) and the objective is a sum over tokens "
    "(next_token, or one of your own with an attribute sums_over_tokens = True)"
)

TOKEN_SUM_RULE = (
    "ranks share sequences where the objective is a sum over tokens (next_token, or one of your own with an attribute "
    "sums_over_tokens = True, which hands the model the batch's positions as position_ids)"
)

CLOSED_AXES = {
    "tp": "splitting a layer's matrices needs rules for this model: an attribute `paceline_rules` that names its"
    " column, row and vocabulary layers; dp_replicate and dp_shard need none",
    "pp": "splitting the chain of blocks into stages needs rules for this model: an attribute `paceline_rules` that "
    "names what comes before the blocks, their container and what comes after; dp_replicate and dp_shard need none",
    "cp": SEQUENCE_RULE,
    "ep": "the model has no experts to spread; the sizes moe-2m and mixtral-8x7b, among others, have, and a model of"
    " your own whose attribute `paceline_rules` names them: {'layers.*.experts': 'expert'}",
}

_BATCH_STATISTICS = "BatchNorm statistics would be computed over each {part}" + TRY + "GroupNorm"
_SYNCED_OPENS = ", or nn.SyncBatchNorm.convert_sync_batchnorm(model), whose statistics are the whole batch's"
BATCH_STATISTICS = {
    "dp_replicate": _BATCH_STATISTICS.format(part="device's part of the batch") + _SYNCED_OPENS,
    "dp_shard": _BATCH_STATISTICS.format(part="device's part of the batch") + _SYNCED_OPENS,
    "pp": _BATCH_STATISTICS.format(part="micro-batch of the pipeline"),
    "accumulation": _BATCH_STATISTICS.format(part="micro-batch"),  # not an axis, but closed all the same
}

_SYNCED = "SyncBatchNorm statistics are the whole batch's, and {part}" + TRY + "GroupNorm"
SYNCED_STATISTICS = {
    "pp": _SYNCED.format(part="a pipeline runs it in micro-batches"),
    "cp": _SYNCED.format(part="ranks that share a row each have a part"),
    "accumulation": _SYNCED.format(part="a micro-batch would see itself alone"),
}

# No axis either: blocks that are computed again, and activations on the host, are watched for what they keep.
UNWATCHED = {
    "recompute": "the forward pass uses transforms of torch.func (grad, vjp, jacrev), of which torch lets nobody watch"
    " what they keep: nothing is computed again nor moved to the host; torch.autograd.grad(..., create_graph=True) in"
    " their place opens it"
}

_STRAY = "{names} draws random numbers that belong to no sample, so that they would be others {part}; {opens}"
_OWN_FUNCTIONS = "torch's dropout, rand, randn, normal, bernoulli, multinomial and the like open it"


def stray_axes(operators: Collection[str]) -> dict[str, str]:
    """Return what is closed to a program whose random numbers by these operators belong to no sample."""
    names = ", ".join(sorted(operators))
    parts = dict.fromkeys(("dp_replicate", "dp_shard", "pp", "cp", "tp"), "on every layout")
    parts["accumulation"] = "for every size of the micro-batch"
    return {axis: _STRAY.format(names=names, part=part, opens=_OWN_FUNCTIONS) for axis, part in parts.items() if names}


_HOOKED = (
    "a hook on the gradient of {name} would be lost: ranks hold parts of the weight, in parameters of their own;"
    " dp_replicate keeps it, and an autograd function in the forward pass works on every axis"
)
_SUMMED = (
    "a hook of {name} runs when its gradient is added up (register_post_accumulate_grad_hook), which would be {part};"
    " register_hook, where it does the same to each part of a sum, or an autograd function in the forward pass opens it"
)
_RENORMED = (
    "{name} shortens rows of its weight in place as they are looked up (max_norm), which {part}; without max_norm, and"
    " with the rows shortened after they are looked up, every axis is open"
)


def hooked_axes(name: str) -> dict[str, str]:
    """Return what is closed to a model of which a parameter has a hook on its gradient."""
    return dict.fromkeys(("dp_shard", "cp", "tp"), _HOOKED.format(name=name))


def summed_axes(name: str) -> dict[str, str]:
    """Return what is closed to a model of which a parameter has a hook that runs once its gradient is added up."""
    copies = _SUMMED.format(name=name, part="before the gradients of copies are")
    often = _SUMMED.format(name=name, part="once for every micro-batch")
    return {**hooked_axes(name), "dp_replicate": copies, "pp": often, "accumulation": often}


def renormed_axes(name: str) -> dict[str, str]:
    """Return what is closed to a model with an embedding that changes its weight in the forward pass."""
    lost = dict.fromkeys(("dp_shard", "cp", "tp"), _RENORMED.format(name=name, part="ranks' parts would not keep"))
    return {"dp_replicate": _RENORMED.format(name=name, part="copies would do by other tokens each"), **lost}


_COUPLED = 'the rows of a batch see each other (coupled = "batch"), and {part}; {opens}'
_GATHERS = "an objective that takes `gather_rows` opens dp_replicate and dp_shard"
_NOTHING_OPENS = "only the whole batch in one piece is the loss that was asked for"


def coupled_axes(gathers: bool) -> dict[str, str]:
    """Return what is closed to a loss that needs the whole batch; `gathers` where it brings rows together itself."""
    device = {"part": "a device would see its own part alone", "opens": _GATHERS}
    micro = {"part": "a micro-batch would see itself alone", "opens": _NOTHING_OPENS}
    closed = {"pp": micro, "accumulation": micro, "cp": {**micro, "part": "ranks that share a row each have a part"}}
    if not gathers:
        closed |= {"dp_replicate": device, "dp_shard": device}
    return {axis: _COUPLED.format(**parts) for axis, parts in closed.items()}


def closed_axes(*opened: str) -> dict[str, str]:
    """Return axis -> why it is closed, for a model whose rules open the given axes."""
    return {axis: because for axis, because in CLOSED_AXES.items() if axis not in opened}

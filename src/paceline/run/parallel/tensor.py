"""The tensor axis: layers whose matrices are spread over ranks, as a model's rules say.

| style      | weight           | input              | output                                          |
|------------|------------------|--------------------|-------------------------------------------------|
| column     | rows spread      | whole              | features spread                                 |
| row        | columns spread   | features spread    | summed                                          |
| split_row  | columns spread   | whole              | summed                                          |
| fused      | whole            | whole              | features of each part spread                    |
| partial    | columns spread   | features spread    | a part of a sum                                 |
| vocabulary | rows spread      | tokens, or whole   | summed (embedding), spread logits (head)        |
| gathered   | rows spread      | whole              | whole                                           |
| sequence   | whole            | split by sequence  | split by sequence                               |
| summed     | whole            | whole, or spread   | a part of a sum, or spread in the same way      |
| expert     | widths spread    | tokens, whole      | a part of a sum                                 |
| replicated | whole            | whole              | whole                                           |

An adapter's thin matrices follow the weight: the one beside the features that are spread is spread with them, the other
one is whole and its gradients are summed.

Where the rules have a `sequence` module, the activation between layers is split along the sequence: what is summed is
reduce-scattered, and what must be whole is gathered once for all layers that read it. Otherwise it is whole.

A weight that is spread becomes a DTensor on the tensor axis, so that sharding, checkpoints and the gradient norm know
which part of the weight a rank holds. Every other parameter stays whole. Where a whole parameter sees only a part of
the activations, its gradients are summed over the axis once a step. A bias is whole: a `column` layer uses the rank's
part of the bias, a `row` layer adds the bias after the sum. A fused weight is whole, since a rank's rows of a fused
weight are not one piece and checkpoints need one piece: the products are shared by the ranks, the memory is not.

A mixture of experts gathers the sequence once, for the router and the experts. Every rank routes the whole sequence
alike and computes a part of the width of every expert, so that ranks have equal work however unequally tokens choose
experts. (If each rank routed its own part of the sequence, each rank would need every expert whole.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.run.parallel.adapted import ADAPTED, adapted_fused, spread_adapter
from paceline.run.parallel.gradients import Gradients
from paceline.run.parallel.region import Region, own_bias
from paceline.task.adapt.linear import AdaptedLinear
from paceline.task.models.held import is_spread, local_of
from paceline.task.models.layers.absent import Absent
from paceline.task.models.layers.collectives import join, part, share
from paceline.task.models.layers.styles import misfit
from paceline.task.models.layers.vocabulary import as_spread_logits, first_row, local_weight, partial_embedding
from paceline.task.models.moe import Experts, MoE
from paceline.task.rules import SPREAD, Rules

COVERS_CHILDREN = ("replicated", "expert")
ROWS = ("row", "split_row")


def split_layers(model: nn.Module, rules: Rules, mesh: DeviceMesh, stage: bool = False) -> list[str]:
    """Spread the layers of a model, or of a pipeline stage of one, over the one axis of `mesh` in place, by its rules.

    The weights of all ranks must be equal, or still without storage. Returns the names of the whole parameters whose
    gradients must be summed over the axis. Raises ConfigError for rules that do not fit the model, or an uneven shape.
    """
    modules = dict(model.named_modules())
    if not stage:  # it may lack a kind of layer; the whole model has been checked before it was cut
        rules.check(modules)
    region = Region(mesh.get_group(), rules.splits_sequence)
    spread: dict[nn.Parameter, nn.Parameter] = {}  # a tied one is spread once
    summed: set[str] = set()
    for name, module in modules.items():
        if isinstance(module, Absent):
            continue  # another pipeline stage has it
        style = rules.style_of(name)
        if style in SPREAD:
            _check_layer(name, module, style, stage=stage)
            _spread_weight(name, module, SPREAD[style], mesh, spread)
            summed |= _pass_spread(name, module, style, region, mesh)
        elif style == "fused":
            _check_layer(name, module, style, rules.parts_of(name))
            fused = adapted_fused if isinstance(module, AdaptedLinear) else _fused
            module.forward = functools.partial(fused, module, region, _fused_rows(name, rules.parts_of(name), region))
            summed |= {f"{name}.{own}" for own, _ in module.named_parameters()}
        elif style == "expert":
            _spread_experts(name, module, mesh)
        elif style in ("sequence", "summed"):
            summed |= {f"{name}.{own}" if name else own for own, _ in module.named_parameters()}
        elif style == "replicated" and region.splits_sequence:
            module.forward = functools.partial(_on_the_whole, module.forward, region)
        if isinstance(module, MoE):
            module.region = region
    _check_ties(model, spread)
    if region.splits_sequence:
        _check_complete(modules, rules)
    return [name for name, _ in model.named_parameters() if name in summed]


# ---- the layers ----------------------------------------------------------------------------------------------------


def _pass_spread(name: str, module: nn.Module, style: str, region: Region, mesh: DeviceMesh) -> set[str]:
    """Give a layer whose weight is spread the forward pass of its style; return the parameters to be summed."""
    summed: set[str] = set()
    if isinstance(module, AdaptedLinear):
        summed |= spread_adapter(name, module, SPREAD[style], functools.partial(_own_part, mesh=mesh))
    if getattr(module, "bias", None) is not None and (style not in ROWS or region.splits_sequence):
        summed.add(f"{name}.bias")
    if "forward" not in vars(module):  # a pipeline stage may hold a module for its weight alone
        module.forward = functools.partial(FORWARD[style, type(module).forward], module, region)
    return summed


def _column(layer: nn.Linear, region: Region, x: Tensor) -> Tensor:
    return F.linear(region.enter(x), local_weight(layer.weight), own_bias(layer, region))


def _row(layer: nn.Linear, region: Region, x: Tensor) -> Tensor:
    out = region.leave(F.linear(x, local_weight(layer.weight)))
    return out if layer.bias is None else out + layer.bias


def _split_row(layer: nn.Linear, region: Region, x: Tensor) -> Tensor:
    weight = local_weight(layer.weight)
    own = share(x, region.group).narrow(-1, first_row(x.shape[-1], region.group), weight.shape[1])
    out = region.leave(F.linear(own, weight))
    return out if layer.bias is None else out + layer.bias


def _fused(layer: nn.Linear, region: Region, rows: list[slice], x: Tensor) -> Tensor:
    weight = torch.cat([layer.weight[part] for part in rows])
    return F.linear(
        region.enter(x), weight, None if layer.bias is None else torch.cat([layer.bias[part] for part in rows])
    )


def _fused_rows(name: str, parts: tuple[int, ...], region: Region) -> list[slice]:
    """Return this rank's rows of each part of a fused layer."""
    ranks, rows, first = region.group.size(), [], 0
    for count in parts:
        own = -(-count // ranks)
        if own * (ranks - 1) >= count:
            raise ConfigError(f"'{name}' over tp = {ranks}", f"a part of {count} features gives some ranks none")
        start = own * region.group.rank()
        rows.append(slice(first + start, first + min(count, start + own)))
        first += count
    return rows


def _partial(layer: nn.Linear, region: Region, x: Tensor) -> Tensor:
    return F.linear(x, local_weight(layer.weight))


def _gathered(layer: nn.Linear, region: Region, x: Tensor) -> Tensor:
    out = F.linear(region.enter(x), local_weight(layer.weight), own_bias(layer, region))
    # As one device has it in memory: sums over it (a norm's, in fp32) then come in the same order.
    return join(out.transpose(-1, -2), region.group).transpose(-1, -2).contiguous()


def _head(layer: nn.Linear, region: Region, x: Tensor) -> Tensor:
    assert is_spread(layer.weight)
    logits = F.linear(region.enter(x), local_weight(layer.weight), own_bias(layer, region))
    return as_spread_logits(logits, layer.weight.shape[0], layer.weight)


def _embedding(layer: nn.Embedding, region: Region, tokens: Tensor) -> Tensor:
    first = first_row(layer.weight.shape[0], region.group)
    return region.leave(partial_embedding(tokens, local_weight(layer.weight), first, layer.padding_idx))


def _on_the_whole(forward: Callable[..., Any], region: Region, x: Tensor, *args: Any, **kwargs: Any) -> object:
    """Run a module on the whole of a split activation and return this rank's part of what it returns first."""
    out = forward(join(x, region.group), *args, **kwargs)
    if isinstance(out, tuple):
        return (part(out[0], region.group), *out[1:])
    return part(out, region.group)


FORWARD: dict[tuple[str, object], Callable[..., Tensor]] = {
    ("column", nn.Linear.forward): _column,
    ("row", nn.Linear.forward): _row,
    ("split_row", nn.Linear.forward): _split_row,
    ("partial", nn.Linear.forward): _partial,
    ("gathered", nn.Linear.forward): _gathered,
    ("vocabulary", nn.Linear.forward): _head,
    ("vocabulary", nn.Embedding.forward): _embedding,
    **ADAPTED,
}


# ---- weights and checks --------------------------------------------------------------------------------------------


def _check_layer(name: str, module: nn.Module, style: str, parts: tuple[int, ...] = (), stage: bool = False) -> None:
    if stage and "forward" in vars(module):
        return  # it stands for its weight alone; the whole model has been checked before it was cut
    because = misfit(module, style, parts)
    if because:
        raise ConfigError(
            f"rule '{style}' for '{name}', a {type(module).__name__}", because, "another style, or no rule for it"
        )


def _spread_weight(
    name: str, module: nn.Module, dim: int, mesh: DeviceMesh, spread: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Put this rank's part of a layer's weight in its place, as a DTensor; `spread` holds what replaced what."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    if weight not in spread:
        spread[weight] = _own_part(name, weight, dim, mesh)
    module.weight = spread[weight]
    if not is_spread(module.weight) or not module.weight.placements[0].is_shard(dim):
        raise ConfigError(
            f"rule for '{name}'", "its weight is tied to one that is split the other way", "one style for both"
        )


def _spread_experts(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Put this rank's part of the width of every expert in the place of the stacked weights."""
    if not isinstance(module, Experts):
        raise ConfigError(
            f"rule 'expert' for '{name}', a {type(module).__name__}, under tp = {mesh.size()}",
            "which dimensions of its weights are an expert's width is known of the built-in experts alone",
            "ep, dp_shard or dp_replicate, which need no such rule",
        )  # fmt: skip
    for key, weight in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, _own_part(f"{name}.{key}", weight, module.WIDTH_DIM, mesh))


def _own_part(name: str, weight: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    """Return this rank's part of a whole weight along `dim`, as a DTensor."""
    parts = weight.detach().chunk(mesh.size(), dim)
    if len(parts) < mesh.size():
        raise ConfigError(
            f"'{name}' over tp = {mesh.size()}", f"{weight.shape[dim]} features give some ranks none",
            f"tp = {len(parts)} at most, or no rule for it",
        )  # fmt: skip
    own = parts[mesh.get_local_rank()]
    if own.untyped_storage().nbytes() >= weight.nbytes:  # not a stand-in's, which takes no memory
        own = own.clone(memory_format=torch.contiguous_format)
    from torch.distributed.tensor import DTensor, Shard  # never on one device

    stride = weight.contiguous().stride()
    local = DTensor.from_local(own, mesh, [Shard(dim)], run_check=False, shape=weight.shape, stride=stride)
    return nn.Parameter(local, requires_grad=weight.requires_grad)


def _check_ties(model: nn.Module, spread: dict[nn.Parameter, nn.Parameter]) -> None:
    """Raise ConfigError where a weight that was spread is still held whole by a module without a rule."""
    left = [name for name, p in model.named_parameters(remove_duplicate=False) if p in spread]
    if left:
        raise ConfigError(
            f"'{left[0]}' is tied to a weight that is spread over tp",
            "it has no rule, and so would drift away from it",
            "the same rule for both modules",
        )


def _check_complete(modules: dict[str, nn.Module], rules: Rules) -> None:
    """Raise ConfigError for a module with parameters that the rules do not speak of, where the sequence is split."""
    for name, module in modules.items():
        parts = name.split(".")
        above = [".".join(parts[:count]) for count in range(1, len(parts))]
        covered = any(rules.style_of(outer) in COVERS_CHILDREN for outer in above) or rules.style_of(name)
        if next(module.parameters(recurse=False), None) is not None and not covered:
            raise ConfigError(
                f"no rule for '{name or 'the model itself'}', which has parameters",
                "the sequence is split over tp: their gradients are parts of a sum or whole, and only a rule can tell",
                "a rule 'sequence' or 'replicated' for it",
            )  # fmt: skip


# ---- gradients -----------------------------------------------------------------------------------------------------


@dataclass
class SummedGradients:
    """Gradients that come together as `inner` says, and then are summed over the tensor axis where they are parts."""

    inner: Gradients
    model: nn.Module
    names: list[str]
    group: dist.ProcessGroup
    _parameters: list[nn.Parameter] = field(default_factory=list)

    def zero(self) -> None:
        """Forget the last step's gradients."""
        self.inner.zero()

    def before_micro_batch(self, last: bool) -> None:
        """Prepare the coming backward pass."""
        self.inner.before_micro_batch(last)

    def finish(self) -> None:
        """Return once the sums are complete: one all-reduce per dtype."""
        self.inner.finish()
        self._place()
        if not self._parameters:  # not before: building without storage and sharding make others
            parameters = dict(self.model.named_parameters())
            self._parameters = [parameters[name] for name in self.names]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                local = local_of(parameter.grad)
                by_dtype.setdefault(local.dtype, []).append(local)
        for gradients in by_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in gradients])
            dist.all_reduce(flat, group=self.group)
            totals = flat.split([grad.numel() for grad in gradients])
            for grad, total in zip(gradients, totals, strict=True):
                grad.copy_(total.view(grad.shape))

    def _place(self) -> None:
        """Give each gradient the shards of its parameter: torch 2.11 makes those of uneven shards whole."""
        for parameter in self.model.parameters():
            grad = parameter.grad
            if is_spread(grad) and is_spread(parameter) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)

    def unreached(self) -> int:
        """Return how many parameters this rank's backward passes did not reach."""
        return self.inner.unreached()

    def settle(self) -> None:
        """Take the gradients from parameters that no rank reached."""
        self.inner.settle()

"""Precision: one meaning of bf16 and fp16 for every layout.

Weights, gradients and optimizer state are fp32. For forward and backward, each unit of the model (a repeated
block, or all the rest) sees its weights and floating-point inputs cast to the compute dtype. FSDP2 does that when it
gathers a unit's weights (MixedPrecisionPolicy); `cast_unit` does the same where nothing is gathered, so that a
layout never changes what is computed. Whoever calls the model gets its outputs in fp32. Gradients arrive in the compute
dtype and are summed in fp32 in both cases.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

from paceline.run.numerics.nested import each_leaf
from paceline.task.declared import is_routed
from paceline.task.models.layers.batch_norm import is_recomputed

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
MASTER_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "fp64": torch.float64}


COMPLEX_DTYPES = {torch.float32: torch.complex64, torch.float64: torch.complex128}  # of the same width in each part
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as a number, to see its bits


def cast_floats(tree: object, dtype: torch.dtype) -> Any:
    """Return the same nested arguments with floating-point tensors in `dtype`, complex ones in parts of that width.

    There is no complex type of bf16 parts: complex tensors stay as they are under bf16 and fp16. What a packed sequence
    or a dictionary of the program's own class holds is cast too.
    """
    return _each_tensor(tree, lambda tensor: _cast(tensor, dtype))


def _each_tensor(tree: object, made: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested arguments with what is made of each tensor in its place.

    torch takes a packed sequence, and a dictionary of a class that it does not know, for a leaf.
    """

    def of_leaf(leaf: Any) -> object:
        if isinstance(leaf, torch.Tensor):
            return made(leaf)
        if isinstance(leaf, PackedSequence):
            return PackedSequence(made(leaf.data), *leaf[1:])
        if isinstance(leaf, dict):
            return refilled(leaf, {key: _each_tensor(value, made) for key, value in leaf.items()})
        return leaf

    return each_leaf(of_leaf, tree)


def refilled(container: dict[Any, Any], entries: Mapping[Any, object]) -> dict[Any, Any]:
    """Return a copy of a dictionary, of its class, with these values under its keys."""
    own = copy.copy(container)
    for key, value in entries.items():
        own[key] = value
    return own


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with its parameters and buffers in `dtype`, changed in place; complex ones stay complex.

    `model.to(dtype)` would drop the imaginary part. In fp64 transformers' experts are computed one after the other, as
    they are written: torch's grouped products, which transformers would choose, know no fp64.
    """
    if dtype == torch.float64:
        for module in filter(is_routed, model.modules()):
            module.config._experts_implementation = "eager"  # type: ignore[union-attr]
    return model._apply(lambda tensor: _cast(tensor, dtype))


def lost_in_cast(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return the names of parameters and buffers of which `cast_model` rounds the values."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [
        name
        for name, tensor in held.items()
        if (tensor.is_floating_point() or tensor.is_complex())  # of a complex one, the bits of each part
        and torch.finfo(tensor.dtype).bits > torch.finfo(dtype).bits
    ]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    if tensor.is_complex():
        return tensor.to(COMPLEX_DTYPES.get(dtype, tensor.dtype))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def cast_unit(
    unit: nn.Module,
    dtype: torch.dtype,
    inner_units: set[nn.Module],
    only: Sequence[nn.Parameter] | None = None,
    inputs: bool = False,
) -> None:
    """Make `unit.forward` run with its own weights in `dtype`; weights inside `inner_units` are left to those.

    `only` names the weights to cast, where others are cast when they are gathered; with `inputs` a unit without any of
    them has its inputs cast all the same.

    The cast is part of the autograd graph, so gradients reach the fp32 weights. It happens inside `forward`, so that
    activation checkpointing around it casts again when it recomputes. Inputs are the unit's own, see `_inputs_of_unit`.
    Weights of torch's own batch normalisation stay beside its running statistics, see `_normalises_batches`.
    """
    chosen = None if only is None else {id(parameter) for parameter in only}
    owners = [
        module
        for module in _modules_outside(unit, inner_units)
        if any(p is not None and _is_cast(p, chosen) for p in module._parameters.values())
        and not _normalises_batches(module)
    ]
    _hand_on_in(dtype, _modules_outside(unit, inner_units))
    if only is not None and not owners and not inputs:
        return
    forward = unit.forward

    def forward_in_compute_dtype(*args: Any, **kwargs: Any) -> object:
        args, kwargs = _inputs_of_unit((args, kwargs), dtype)
        originals: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        casts: dict[int, torch.Tensor] = {}  # a tied weight is cast once
        try:
            for owner in owners:
                table: dict[str, Any] = owner._parameters
                for name, parameter in table.items():
                    if parameter is not None and _is_cast(parameter, chosen):
                        originals.append((table, name, parameter))
            for table, name, parameter in originals:
                cast = casts.get(id(parameter))
                if cast is None:
                    cast = casts[id(parameter)] = parameter.to(dtype)
                table[name] = cast
            return forward(*args, **kwargs)
        finally:
            for table, name, parameter in originals:
                table[name] = parameter

    unit.forward = forward_in_compute_dtype


def _normalises_batches(module: nn.Module) -> bool:
    """Return whether a module is torch's own batch normalisation, whose kernels take inputs in bf16 or fp16 with
    weights and running statistics in fp32, and on a CPU with nothing else. In training mode it runs on one device
    alone."""
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)


def _hand_on_in(dtype: torch.dtype, modules: Iterable[nn.Module]) -> None:
    """Have batch normalisations of the user's hand on `dtype`: what they compute themselves is in that of weights."""
    for module in modules:
        is_own = _normalises_batches(module) and type(module).forward is not _BatchNorm.forward
        if is_own and "forward" not in vars(module):  # a layer is asked once alone, and may be called from outside
            module.forward = functools.partial(_handed_on, module.forward, dtype)


def _handed_on(forward: Callable[..., object], dtype: torch.dtype, *args: Any, **kwargs: Any) -> object:
    return each_leaf(
        lambda leaf: _cast(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf, forward(*args, **kwargs)
    )


def _inputs_of_unit(tree: object, dtype: torch.dtype) -> Any:
    """Return a unit's inputs in `dtype`, each by a node of the graph that is the unit's.

    Their gradients are then summed within the unit first, as FSDP2 has it, whose hook of the backward pass is such a
    node. Where several units read one tensor, as the blocks of a decoder do what the encoder gives, sums in bf16 would
    be rounded in another order. Those in a dataclass are a unit's inputs too, as FSDP2 has it.
    """

    records: dict[int, object] = {}

    def own(leaf: object) -> object:
        if leaf is None:
            return None
        if type(leaf) is torch.Tensor:
            return of_unit(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return _each_field(leaf, functools.partial(each_leaf, own), records)
        return _each_tensor(leaf, of_unit)

    def of_unit(tensor: torch.Tensor) -> torch.Tensor:
        cast = _cast(tensor, dtype)
        return torch.ops.aten.alias.default(cast) if cast is tensor and cast.requires_grad else cast

    return each_leaf(own, tree)


def widen_outputs(model: nn.Module, compute: torch.dtype, master: torch.dtype) -> None:
    """Give whoever calls the model its outputs in the `master` dtype: an objective's sums are then not rounded to it.

    A loss that is computed of outputs in bf16 has three digits, whoever wrote the objective. Where both are one dtype
    there is nothing to do.
    """
    if compute != master:
        model.register_forward_hook(lambda module, inputs, outputs: _widened(outputs, compute, master))


def _widened(tree: object, compute: torch.dtype, master: torch.dtype, met: dict[int, object] | None = None) -> object:
    """Return the same nested outputs with tensors of the compute dtype in `master`, those within records too.

    `met` is that of `_each_field`.
    """
    records = {} if met is None else met

    def of_caller(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(master) if tensor.dtype == compute else tensor

    def widen(leaf: object) -> object:
        if type(leaf) is torch.Tensor:
            return of_caller(leaf)
        if leaf is None or isinstance(leaf, type):
            return leaf
        if is_dataclass(leaf) or isinstance(leaf, SimpleNamespace | Distribution):
            return _each_field(leaf, lambda value: _widened(value, compute, master, records), records)
        return _each_tensor(leaf, of_caller)

    return each_leaf(widen, tree)


def _each_field(record: Any, made: Callable[[object], object], met: dict[int, object]) -> object:
    """Return a copy of a record with what is made of every field that it has.

    `met` are the records that are being copied, and their copies: one that holds itself is met again.
    """
    if id(record) in met:
        return met[id(record)]
    names = [each.name for each in fields(record)] if is_dataclass(record) else list(vars(record))
    met[id(record)] = own = copy.copy(record)
    for name in names:
        if hasattr(record, name):
            object.__setattr__(own, name, made(getattr(record, name)))
    return own


def cast_outside(
    model: nn.Module,
    dtype: torch.dtype,
    master: torch.dtype,
    inner_units: set[nn.Module],
    only: Sequence[nn.Parameter] | None = None,
) -> None:
    """Make layers that lie in no unit but the model compute in `dtype` where the model's `forward` is not running.

    An objective may call a layer, a block or another method than `forward`. Each layer is then a unit of its own: it
    sees its weights and inputs in `dtype`. Who calls a layer or a block so gets outputs in `master`, as from the model.
    `only` is as in `cast_unit`.
    """
    calls = _Calls(dtype, master)
    model.register_forward_pre_hook(calls.model_begins, prepend=True)
    model.register_forward_hook(calls.model_ends, always_call=True)
    layers = [module for module in _modules_outside(model, inner_units) if module is not model and module._parameters]
    _hand_on_in(dtype, layers)
    for layer in layers:
        inside = layer.forward
        cast_unit(layer, dtype, set(layer.modules()) - {layer}, only, inputs=True)
        layer.forward = functools.partial(calls.of_layer, layer, inside, layer.forward)
    for block in inner_units:
        block.register_forward_pre_hook(calls.block_begins)
        block.register_forward_hook(calls.block_ends, always_call=True)


class _Calls:
    """Calls of a model's layers and blocks: whether its `forward` makes them, and how deep, since one calls another.

    What a model makes again in a backward pass, by a checkpoint of its own, comes as it came in the forward pass.
    """

    def __init__(self, compute: torch.dtype, master: torch.dtype) -> None:
        self._compute, self._master = compute, master
        self._is_in_model, self._depth = False, 0
        self._asked: set[nn.Module] = set()  # layers and blocks that somebody else than the model has called

    def model_begins(self, *_: object) -> None:
        self._is_in_model = True

    def model_ends(self, *_: object) -> None:
        self._is_in_model = False

    def of_layer(self, layer: nn.Module, inside: Any, outside: Any, *args: Any, **kwargs: Any) -> object:
        """Return what a layer gives by its forward inside of the model's, or else by the one outside."""
        if self._is_in_model:
            return inside(*args, **kwargs)
        self._depth += 1
        try:
            outputs = outside(*args, **kwargs)
        finally:
            self._depth -= 1
        return self._for_caller(layer, outputs)

    def block_begins(self, *_: object) -> None:
        self._depth += 1

    def block_ends(self, block: nn.Module, inputs: object, outputs: object) -> object:
        """Return what a block has given to who called it."""
        self._depth = max(0, self._depth - 1)  # a hook that failed before ours has begun nothing
        return self._for_caller(block, outputs)

    def _for_caller(self, module: nn.Module, outputs: object) -> object:
        if self._is_in_model or self._depth:
            return outputs
        if not is_recomputed():
            self._asked.add(module)
        elif module not in self._asked:
            return outputs
        return _widened(outputs, self._compute, self._master)


def _is_cast(parameter: nn.Parameter, chosen: set[int] | None) -> bool:
    return parameter.is_floating_point() and (chosen is None or id(parameter) in chosen)


def cast_reads(
    unit: nn.Module, dtype: torch.dtype, inner_units: set[nn.Module], only: Sequence[nn.Parameter] | None = None
) -> None:
    """Do what `cast_unit` does in a way that torch.compile can follow inside activation checkpointing.

    Each module gets a subclass of its class in which reading a weight gives it in `dtype`, as a part of the graph; the
    weights themselves stay where they are. A weight that two modules of the unit share is cast twice.
    """
    chosen = None if only is None else {id(parameter) for parameter in only}
    for module in _modules_outside(unit, inner_units):
        names = tuple(name for name, p in module._parameters.items() if p is not None and _is_cast(p, chosen))
        if names:
            kind: object = type(module)
            module.__class__ = _reading_in(kind, names, dtype)
    forward = unit.forward

    def forward_in_compute_dtype(*args: Any, **kwargs: Any) -> object:
        args, kwargs = _inputs_of_unit((args, kwargs), dtype)
        return forward(*args, **kwargs)

    unit.forward = forward_in_compute_dtype


@functools.cache
def _reading_in(kind: Any, names: tuple[str, ...], dtype: torch.dtype) -> type[nn.Module]:
    """Return a subclass of a module class whose parameters `names` read as casts; the same one for like modules."""

    def reader(name: str) -> property:
        return property(lambda self: self._parameters[name].to(dtype))

    return type(kind.__name__, (kind,), {name: reader(name) for name in names})


def _modules_outside(root: nn.Module, inner_units: set[nn.Module]) -> list[nn.Module]:
    """Return `root` and its descendants, without those at or below any of `inner_units`."""
    found = [root]
    for child in root.children():
        if child not in inner_units:
            found += _modules_outside(child, inner_units)
    return found


@dataclass
class LossScaler:
    """A dynamic loss scale for fp16: halved when gradients overflow, doubled after `patience` clean steps.

    The scale is a power of two, so that it is exact. Every rank sees the same global gradient norm and so makes
    the same decision; the state belongs to the checkpoint.
    """

    scale: float = 2.0**16
    clean_steps: int = 0
    patience: int = 2000
    smallest: float = 2.0**-14

    def update(self, overflowed: bool) -> None:
        """Adapt the scale after a step."""
        if overflowed:
            self.scale, self.clean_steps = max(self.scale / 2, self.smallest), 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.patience:
            self.scale, self.clean_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "clean_steps": self.clean_steps}

    def load(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint's state."""
        self.scale, self.clean_steps = float(state["scale"]), int(state["clean_steps"])


def scaler_for(precision: str) -> LossScaler | None:
    """Return a loss scaler for fp16; the other precisions have fp32's exponent range and need none."""
    return LossScaler() if precision == "fp16" else None

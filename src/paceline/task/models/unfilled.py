"""Models of users and of transformers without memory for weights, and small models of the same kind that compute.

A factory is called as ever, but each parameter becomes one on the meta device when its module gets it, so that one
weight exists at a time. Buffers are made as the factory makes them.
"""

from __future__ import annotations

import contextlib
import math
import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from paceline.errors import ConfigError
from paceline.spec.adapt.adapter import FULL, Adaptation
from paceline.task.adapt.trained import adapt
from paceline.task.models.beside import NO_VALUES, values_beside
from paceline.task.models.blocks import find_blocks
from paceline.task.models.build import start_training
from paceline.task.models.copied import copied
from paceline.task.models.factory import Factory, Model, call_factory, factory_of, gives_weights
from paceline.task.models.layers.batch_norm import adopt_synced

MATRIX_STRIDE = 64  # elements from one expert's matrix of a stand-in to the next: whole cache lines in every format
DRAWN = "drawn"  # stands for the digest of an attribute that another seed makes another
VECTOR_STD = 0.02  # of a stand-in's biases, and of the weights of its norms


@dataclass(frozen=True)
class Unfilled:
    """A model whose parameters are on the meta device, what it is, or why there is none, in words."""

    model: nn.Module | None = None
    because: str = ""


def build_unfilled(given: Model, seed: int, adaptation: Adaptation = FULL) -> Unfilled:
    """Return what the factory of a task's model builds, without memory for its parameters.

    There is none of a module that is there already, of a factory that reads what it draws, of one that draws what is
    neither weight nor buffer, or of one whose buffers are drawn where no rank builds the model whole: what it draws is
    then another.
    """
    factory = factory_of(given)
    if factory is None:
        return Unfilled(because="it is given as a module, which is whole")
    drew: list[bool] = []

    def watched() -> nn.Module:
        before, others = torch.get_rng_state(), (random.getstate(), str(np.random.get_state()))
        built = factory.call()
        moved = others != (random.getstate(), str(np.random.get_state()))
        drew.append(moved or not torch.equal(before, torch.get_rng_state()))
        return built

    def called(seed: int) -> nn.Module:
        return start_training(adopt_synced(call_factory(Factory(watched, {}, factory.name), seed, "cpu")))

    try:
        with _parameters_on_meta() as replaced:
            model = called(seed)
        beside = values_beside(model)
        if drew[0]:
            with _parameters_on_meta():
                again = values_beside(called(seed + 1))
            beside = {name: value if again.get(name) == value else DRAWN for name, value in beside.items()}
    except ConfigError as error:
        return Unfilled(because=f"its factory needs the values of weights ({error.because})")
    held = list(model.parameters())
    if not all(parameter.is_meta for parameter in held):
        return Unfilled(because="its factory makes weights that are not registered as parameters of its modules")
    if any(buffer.is_meta for buffer in model.buffers()):
        return Unfilled(because="its factory computes buffers from weights")
    if lacking := _lacking(model):
        return Unfilled(because=f"the parametrisation '{lacking[0]}' computes buffers from weights")
    if replaced.shares or len({parameter.untyped_storage()._cdata for parameter in held}) < len(held):
        return Unfilled(because="some of its parameters are views of others")
    if chosen := [name for name, value in beside.items() if value in (DRAWN, NO_VALUES)]:
        made = "draws random numbers" if beside[chosen[0]] == DRAWN else "takes values of weights"
        return Unfilled(because=f"its factory {made} for '{chosen[0]}', which is neither weight nor buffer")
    if drew[0] and gives_weights(given) and not_kept(model):
        return Unfilled(because=f"its factory draws random numbers, perhaps for '{not_kept(model)[0]}'")
    return Unfilled(adapt(model, adaptation))


def _lacking(model: nn.Module) -> list[str]:
    """Return the names of parametrisations with a buffer that is none: torch leaves them unset without a word where the
    weight that they are made of has no values (torch/nn/utils/parametrize.py, `right_inverse`).
    """
    lists = [(name, each) for name, each in model.named_modules() if isinstance(each, ParametrizationList)]
    inside = [(f"{name}.{own}", part) for name, each in lists for own, part in each.named_modules() if own]
    return [name for name, part in inside if any(buffer is None for buffer in part._buffers.values())]


def not_kept(model: nn.Module) -> list[str]:
    """Return the names of the buffers that no file of weights holds."""
    kept = model.state_dict(keep_vars=True)
    return [name for name, _ in model.named_buffers() if name not in kept]


@dataclass
class _Replaced:
    """What stands for parameters that modules were given, as long as these exist: one may be given to several.

    `shares` says whether two of them were views of the same memory, which what stands for them is not.
    """

    known: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = field(default_factory=dict)
    stored: set[StorageWeakRef] = field(default_factory=set)  # none of which is used again for others meanwhile
    shares: bool = False

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        found = self.known.get(id(parameter))
        if found is None or found[0]() is not parameter:
            memory = StorageWeakRef(parameter.untyped_storage())
            self.shares |= memory in self.stored
            self.stored.add(memory)
            empty = torch.empty_like(parameter, device="meta")
            replaced = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            vars(replaced).update(vars(parameter))
            self.known[id(parameter)] = found = (weakref.ref(parameter), replaced)
        return found[1]


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[_Replaced]:
    replaced = _Replaced()
    handle = register_module_parameter_registration_hook(replaced)  # type: ignore[arg-type]
    try:
        yield replaced
    finally:
        handle.remove()


def stand_in(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of an unfilled model that computes: its weights are windows on a few random numbers.

    Element [i, j] of a matrix is number 3 i + j of its pool, so that no two rows are the same, rows are not columns,
    and a matrix takes the memory of a few rows; the matrices of experts, that of one of them. The same on every rank.
    """
    stands_in = copied(model)
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for module in stands_in.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made and id(parameter) not in {id(one) for one in made.values()}:
                made[id(parameter)] = _window(module, name, parameter, generator, device)
                vars(made[id(parameter)]).update(vars(parameter))
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():  # of weights in four bits
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
    return stands_in


def _window(
    module: nn.Module, name: str, parameter: nn.Parameter, generator: torch.Generator, device: torch.device
) -> nn.Parameter:
    """Return a window on random numbers of a scale at which activations keep theirs: terms of products then count."""
    shape = parameter.shape
    strides = [2 * (len(shape) - 1 - at) + 1 for at in range(len(shape))]
    if len(shape) == 3 and not isinstance(module, _ConvNd):  # grouped products take matrices of rows alone
        strides = [MATRIX_STRIDE, shape[2], 1]
    count = (
        1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if parameter.numel() else 0
    )
    pool = torch.randn(count, generator=generator, dtype=torch.float64)
    if len(shape) < 2:
        pool = pool * VECTOR_STD + (1.0 if name.endswith("weight") else 0.0)  # a norm's weights are about one
    elif not isinstance(module, nn.Embedding):
        into = math.prod(shape[1:]) if isinstance(module, _ConvNd) else shape[-1]
        pool /= math.sqrt(max(1, into))
    values = pool.to(parameter.dtype).to(device).as_strided(shape, strides)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def keep_few_gradients(model: nn.Module) -> None:
    """Have the smallest parameter of each repeated block, and of the rest, ask for a gradient, and no other."""
    blocks = [list(block.parameters()) for _, block in find_blocks(model)]
    inside = {id(parameter) for block in blocks for parameter in block}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    for parameters in (*blocks, rest):
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        smallest = min(trained, key=lambda parameter: math.prod(parameter.shape), default=None)
        for parameter in trained:
            parameter.requires_grad_(parameter is smallest)


def materialise(part: nn.Module, device: torch.device) -> None:
    """Give the parameters of a model, sharded or not, memory on a device; what has memory moves there. Ties stay."""
    named = list(part.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    ties = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    made: dict[int, Tensor] = {}

    def filled(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        return made[id(tensor)]

    part._apply(filled)
    now = dict(part.named_parameters(remove_duplicate=False))
    for name, canonical in ties.items():
        owner, _, own = name.rpartition(".")
        if name != canonical:
            part.get_submodule(owner)._parameters[own] = now[canonical]

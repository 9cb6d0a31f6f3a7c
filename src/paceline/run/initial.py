"""How a model comes by its initial weights, which no layout changes.

| model | until it is laid out | then |
|---|---|---|
| a named size | no memory | each rank draws, or reads, its own parts |
| a factory, where the plan spreads weights, with a file of weights | no memory | each rank reads its own parts |
| a factory, where the plan spreads weights | no memory | rank 0 builds it in host memory, and sends weight by weight |
| a factory otherwise, or a module | whole on every rank, as on rank 0 | |
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.run.parallel.data.uncut_parameters import stays_whole
from paceline.run.process.world import World
from paceline.spec.adapt.adapter import FULL, Adaptation
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec, Task
from paceline.task.adapt.fill import adapted_layers, fill_adapters
from paceline.task.adapt.noise import noises
from paceline.task.data.protocol import Source
from paceline.task.models.beside import arrays_beside, refuse_other_values
from paceline.task.models.build import build_model, fill_weights, load_weights
from paceline.task.models.factory import Model, factory_of, gives_weights
from paceline.task.models.init import fill
from paceline.task.models.sizes import is_named
from paceline.task.models.unfilled import build_unfilled, keep_few_gradients, materialise, stand_in
from paceline.task.plain_names import named_parameters


@dataclass
class WholeModel:
    """A model with its weights, the same on every rank. `remarks` say what is to be said of how it was built."""

    model: nn.Module
    remarks: list[str] = field(default_factory=list)

    def to_look_at(self) -> nn.Module:
        """Return what computes as the model does."""
        return self.model

    def fill(self, model: nn.Module, parts: list[nn.Module]) -> None:
        """Give the model its weights once it is laid out; `parts` are its pipeline stages, or the model."""


@dataclass
class DrawnModel(WholeModel):
    """A model of the built-in family, without memory for its weights until it is laid out."""

    spec: ModelSpec | None = None
    seed: int = 0
    device: torch.device | None = None
    read: bool = True

    def __post_init__(self) -> None:
        self._looked_at: nn.Module | None = None

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers: dropout of its adapters and noise on embeddings are all there is."""
        dropped = any(layer.spec.dropout > 0 for layer in adapted_layers(self.model).values())
        return dropped or any(True for _ in noises(self.model))

    def to_look_at(self) -> nn.Module:
        """Return the model, or where it draws one of its kind that computes, of weights that take next to no memory."""
        if not self.draws:
            return self.model
        if self._looked_at is None:
            assert self.device is not None
            self._looked_at = stand_in(self.model, self.device)
            for module in self._looked_at.modules():  # selection biases of routers
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = torch.zeros_like(buffer, device=self.device)
            keep_few_gradients(self._looked_at)
        return self._looked_at

    def fill(self, model: nn.Module, parts: list[nn.Module]) -> None:
        """Draw this rank's parts of the weights, or read them."""
        assert self.spec is not None and self.device is not None
        self._looked_at = None
        for part in parts:
            part.to_empty(device=self.device)
        if self.read:
            fill_weights(model, self.spec, self.seed)


@dataclass
class LateModel(WholeModel):
    """A factory's model, without memory for its weights until it is laid out."""

    given: Model | None = None
    seed: int = 0
    world: World | None = None
    adaptation: Adaptation = FULL
    read: bool = True

    def __post_init__(self) -> None:
        held = {**dict(named_parameters(self.model)), **dict(self.model.named_buffers())}
        self._kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
        first = {id(tensor): name for name, tensor in held.items()}
        every = self.model.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(tensor)] for name, tensor in every if id(tensor) in first}
        self._looked_at: nn.Module | None = None

    def to_look_at(self) -> nn.Module:
        """Return a model of the same kind with weights that take no memory to speak of."""
        assert self.world is not None
        if self._looked_at is None:
            self._looked_at = stand_in(self.model, self.world.device)
            keep_few_gradients(self._looked_at)
        return self._looked_at

    def fill(self, model: nn.Module, parts: list[nn.Module]) -> None:
        """Read this rank's parts of the weights, or have rank 0 send each and keep them."""
        assert self.world is not None
        self._looked_at = None
        gc.collect()  # what looks left in circles goes before weights come
        for part in parts:
            _settle_whole(part, self.world.device)
            materialise(part, self.world.device)
        if isinstance(self.given, ModelSpec) and self.given.starts_from:
            if self.read:
                dtypes = {name: dtype for name, (_, dtype) in self._kinds.items()}
                load_weights(model, self.given.starts_from, dtypes, self.given.fresh, self.seed)
                fill_adapters(model, self.seed)
        else:
            self._receive(model)

    @torch.no_grad()
    def _receive(self, model: nn.Module) -> None:
        assert self.world is not None and self.given is not None
        whole = _whole_state(self.given, self.seed, self.adaptation) if self.world.is_first else {}
        if self.world.is_first:
            _check_alike(self.given, {n: (tuple(t.shape), t.dtype) for n, t in whole.items()}, self._kinds)
        targets: dict[str, Tensor] = {self._names[name]: p for name, p in named_parameters(model, every=True)}
        targets |= dict(model.named_buffers())
        largest = max((math.prod(shape) * dtype.itemsize for shape, dtype in self._kinds.values()), default=0)
        room = torch.empty(largest, dtype=torch.uint8, device=self.world.device)  # what gloo still holds is no more
        for name, (shape, dtype) in self._kinds.items():
            value = room[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            if self.world.is_first:
                value.copy_(whole.pop(name))
            self.world.take_first(value)
            if name in targets:
                fill(targets[name], functools.partial(_part, value))


def start_model(
    task: Task, plan: Plan, world: World, source: Source, items_per_sample: int, read: bool = True
) -> WholeModel:
    """Return the task's model before a plan is applied, in as little memory as can be. Every rank calls it.

    Files of weights are not read where `read` is False, nor those of a named size drawn where nothing is made of them
    meanwhile: a checkpoint is loaded into what is built.
    """
    spec, vocab = task.model, source.vocab or 0
    if isinstance(spec, ModelSpec) and is_named(spec.name):
        model = build_model(spec, vocab, items_per_sample, task.seed, "meta", task.adaptation)
        needs_drawn = not spec.starts_from and (task.adaptation != FULL or not plan.sync.is_plain)
        return DrawnModel(model, [], spec, task.seed, world.device, read or needs_drawn)
    because = ""
    if world.size > 1 and _spreads_weights(plan):
        found = build_unfilled(spec, task.seed, task.adaptation)
        refused = world.maximum([float(found.model is None)])[0]
        if not refused:
            assert found.model is not None
            _check_order(found.model, world)
            found.model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(world.device))
            return LateModel(found.model, [], spec, task.seed, world, task.adaptation, read)
        because = found.because or "another rank could not build it otherwise"
    model = build_model(spec, vocab, items_per_sample, task.seed, "cpu", task.adaptation, read=read)
    _share_out(model, world)
    remark = f"the model is whole in the memory of every rank until the plan is applied: {because}"
    return WholeModel(model, [remark] if because and factory_of(spec) is not None else [])


def _spreads_weights(plan: Plan) -> bool:
    """Return whether a rank holds less than the whole model once the plan is applied."""
    if plan.frozen == "spread" and plan.layout.devices > 1:
        return True
    return plan.layout.is_sharded or max(plan.layout.tp, plan.layout.pp, plan.layout.ep) > 1


def _share_out(model: nn.Module, world: World) -> None:
    """Put a model on this rank's device with rank 0's initial weights.

    Raises ConfigError on all ranks where they have other weights, or hold other values beside them.
    """
    if world.size > 1:
        _check_order(model, world)
        held = arrays_beside(model)
        if world.one_of_alike(repr(sorted(held.items())).encode()) is None:
            refuse_other_values(world.gather(held))
    model.to(world.device)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            world.take_first(tensor)


def _check_order(model: nn.Module, world: World) -> None:
    """Raise ConfigError on all ranks where they have other weights, or in another order: they are sent in order."""
    own = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if world.one_of_alike("\0".join(own).encode()) is not None:
        return
    first, *others = world.gather(own)
    rank, theirs = next((rank, names) for rank, names in enumerate(others, 1) if names != first)
    pairs = enumerate(itertools.zip_longest(first, theirs, fillvalue="none"))
    at, (here, there) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    raise ConfigError(
        "ranks make the model in different ways",
        f"weight {at} of the model is '{here}' on rank 0 and '{there}' on rank {rank}: a set has another order in "
        "every process, and what asks for its rank is another model",
        "a list, or sorted(...), where the model is made",
    )


def _settle_whole(part: nn.Module, device: torch.device) -> None:
    """Give memory to the parameters that stay whole beside shards. They stay the objects that a layout has noted."""
    for parameter in part.parameters():
        if parameter.is_meta and stays_whole(parameter):
            filled = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            vars(filled).update(vars(parameter))
            torch.utils.swap_tensors(parameter, filled)


def _whole_state(given: Model, seed: int, adaptation: Adaptation) -> dict[str, Tensor]:
    """Return the weights and buffers that a factory makes, in host memory, by name."""
    assert not gives_weights(given)
    model = build_model(given, 0, 0, seed, adaptation=adaptation)
    return {**dict(named_parameters(model)), **dict(model.named_buffers())}


def _check_alike(given: Model, filled: Mapping[str, object], unfilled: Mapping[str, object]) -> None:
    """Raise ConfigError where a factory makes other weights or buffers with values than without; shapes and dtypes."""
    if filled == unfilled:
        return
    name = next(name for name in [*filled, *unfilled] if filled.get(name) != unfilled.get(name))
    factory = factory_of(given)
    there, without = (each.get(name, "not there") for each in (filled, unfilled))
    raise ConfigError(
        f"the factory '{factory.name if factory else type(given).__name__}' does not build the same model each time",
        f"'{name}' is {there} in one call and {without} in one without values of weights: it is drawn, or made of them",
        "a factory that decides nothing; or, from Python, task.model = the module itself, which is built whole",
    )


def _part(value: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return value[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]

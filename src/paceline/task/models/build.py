"""Builds the model that a task asks for: a named size, a user's factory, or a module as it is."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.spec.adapt.adapter import FULL, Adaptation
from paceline.spec.import_paths import load_object
from paceline.spec.task import ModelSpec
from paceline.task.adapt.fill import adapted_layers, fill_adapters
from paceline.task.adapt.linear import NAMES, AdaptedLinear, PackedLinear, is_packed
from paceline.task.adapt.trained import adapt
from paceline.task.models.copied import copied
from paceline.task.models.decoder import Decoder
from paceline.task.models.factory import Model, call_factory, factory_of
from paceline.task.models.huggingface.experts import StackedExperts, Stored
from paceline.task.models.huggingface.files import read_safetensors
from paceline.task.models.huggingface.loaded import as_in_memory, embeddings_of, may_ignore
from paceline.task.models.huggingface.names import EMBEDDINGS, HEAD, PREFIX, hf_name
from paceline.task.models.huggingface.transfer import WeightsFit, fit, lengthened
from paceline.task.models.huggingface.weights import check_hf_config
from paceline.task.models.init import (
    STD,
    Corner,
    DrawsNothing,
    PartMaker,
    drawn_part,
    fill,
    filled_tensors,
    initial_part,
    initialise,
    shape_of,
)
from paceline.task.models.layers.absent import Absent
from paceline.task.models.layers.batch_norm import WholeBatchNorm, adopt_synced, takes_batch_statistics
from paceline.task.models.moe import MoEDecoder
from paceline.task.models.shape import MoEConfig
from paceline.task.models.sizes import is_factory, resolve_decoder
from paceline.task.savable import refuse_state


def build_model(
    model: Model,
    data_vocab: int,
    seq_len: int,
    seed: int,
    device: str = "cpu",
    adaptation: Adaptation = FULL,
    *,
    read: bool = True,
) -> nn.Module:
    """Return the module that a task's `model` names, with its initial weights; on "meta" without any. It is training.

    A ModelSpec names a size of the built-in family or a factory by import path, called with `arguments`; a callable is
    called without any; an nn.Module is returned itself (on "meta", a copy). Factories run with the random numbers of
    torch, numpy and Python seeded by `seed`; the caller's are left alone. A named model built on "meta" gets its
    weights from `fill_weights` after `to_empty`. A factory's model gets those of a file, unless `read` is False: what
    is loaded into it is then to come from a checkpoint. `adaptation` says what of it is trained. Raises ConfigError
    for whatever in this is the user's to mend.
    """
    built = _built(model, data_vocab, seq_len, seed, device, read=read)
    refuse_state(built)
    if adaptation.is_full:
        return adapt(built, adaptation)
    has_adapters = any(isinstance(module, AdaptedLinear) for module in built.modules())  # it is given, and trained on
    adapt(built, adaptation)
    if device != "meta" and read and not has_adapters:
        fill_adapters(built, seed)
    return built


def _built(model: Model, data_vocab: int, seq_len: int, seed: int, device: str, *, read: bool) -> nn.Module:
    """Return the module that a task's `model` names, all of it as it trains without adapters."""
    if isinstance(model, nn.Module):
        return start_training(adopt_synced(model if device != "meta" else copied(model).to("meta")))
    if isinstance(model, ModelSpec) and not is_factory(model.name):
        return _named(model, data_vocab, seq_len, seed, device)
    factory = factory_of(model)
    if factory is None:
        return _built(_module_of(model), data_vocab, seq_len, seed, device, read=read)
    built = start_training(adopt_synced(call_factory(factory, seed, device)))
    if isinstance(model, ModelSpec) and model.starts_from:
        if device == "meta":
            check_names(built, model.starts_from, model.fresh)
        elif read:
            load_weights(built, model.starts_from, fresh=model.fresh, seed=seed)
    return built


def _named(model: ModelSpec, data_vocab: int, seq_len: int, seed: int, device: str) -> nn.Module:
    """Return a model of the built-in family."""
    config = resolve_decoder(model, data_vocab, seq_len)
    with torch.device("meta"), DrawsNothing():
        decoder = MoEDecoder(config) if isinstance(config, MoEConfig) else Decoder(config)
    if device == "meta":
        return decoder
    decoder.to_empty(device=device)
    fill_weights(decoder, model, seed)
    return decoder


def _module_of(model: Any) -> nn.Module:
    """Return the module that a spec names by import path."""
    module: nn.Module = load_object(model.name, "task.model.name")
    return module


def fill_weights(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Give a materialised model its initial weights: from `spec.weights`, or drawn for the built-in family.

    Parameters may be DTensors. No layout changes what any weight becomes.
    """
    if spec.starts_from:
        load_weights(model, spec.starts_from, fresh=spec.fresh, seed=seed)
    elif is_decoder(model):
        initialise(model, seed)  # type: ignore[arg-type]
    else:
        raise ConfigError(
            f"{type(model).__name__} has no rule for its initial weights", "only the built-in family is drawn by name",
            "build it on the CPU, where its factory fills the weights",
        )  # fmt: skip
    fill_adapters(model, seed)


def is_decoder(model: nn.Module) -> bool:
    """Return whether the model is the built-in decoder, sharded or not."""
    return isinstance(model, Decoder)


def load_weights(
    model: nn.Module,
    path: str,
    dtypes: Mapping[str, torch.dtype] | None = None,
    fresh: Collection[str] = (),
    seed: int = 0,
) -> None:
    """Fill a model's parameters and buffers from a safetensors file or folder, in Hugging Face's names.

    Of a sharded one each rank reads its own parts alone. Values are rounded to `dtypes` first, by name, where these are
    given. Parameters that match the patterns `fresh` are drawn by `seed`, such buffers stay as they were made, and rows
    of a longer vocabulary are the mean of those that there are. Raises ConfigError naming what is missing, unexpected,
    of another shape, or of another decoder's config.json.
    """
    targets, stored, fitted = check_names(model, path, fresh)
    if isinstance(model, MoEDecoder):
        for name, bias in model.named_buffers():  # of routers; they begin at zero where none are stored
            bias.zero_()
            targets |= {PREFIX + name: bias} if PREFIX + name in stored else {}
    for name, target in targets.items():
        part: PartMaker = functools.partial(stored.part, name)
        if name in fitted.fresh:
            if not isinstance(target, nn.Parameter | PackedLinear):
                continue  # running statistics of a new head, say, which begin as its class has them
            part = _drawn(model, name, shape_of(target), seed)
        elif name in (fitted.longer or ()):
            part = lengthened(stored, name)
        fill(target, _rounded(part, dtypes[name]) if dtypes is not None and name in dtypes else part)


def _drawn(model: nn.Module, name: str, shape: Corner, seed: int) -> PartMaker:
    """Return what draws a parameter that is not read, by its name and the seed, whatever the layout."""
    if isinstance(model, Decoder):
        own, layers = name.removeprefix(PREFIX), model.config.layers
        return lambda offsets, sizes: initial_part(own, shape, layers, seed, offsets, sizes)
    std = float(getattr(getattr(model, "config", None), "initializer_range", None) or STD)
    return lambda offsets, sizes: drawn_part(name, shape, std, seed, offsets, sizes)


def check_names(
    model: nn.Module, path: str, fresh: Collection[str] = ()
) -> tuple[dict[str, Tensor | PackedLinear], Stored, WeightsFit]:
    """Return a model's tensors by the names of files, those of the files, and how they fit. Reads headers alone.

    Raises as `load_weights`.
    """
    stored: Stored = read_safetensors(path)
    own = {f"{name}.{part}" for name in adapted_layers(model) for part in NAMES}  # adapters have their own files
    targets = {name: weight for name, weight in filled_tensors(model).items() if name not in own}
    aliases = {*_aliases(model)}
    if isinstance(model, Decoder):
        if Path(path).expanduser().is_dir():
            check_hf_config(model.config, path)
        if isinstance(model, MoEDecoder):
            stored = StackedExperts(stored)
            aliases |= {PREFIX + name for name, _ in model.named_buffers()}
        targets = {hf_name(name): target for name, target in targets.items()}
        embeddings: Collection[str] = EMBEDDINGS
    else:
        stored = as_in_memory(model, stored)
        persistent = model.state_dict(keep_vars=True)
        targets |= {
            name: buffer for name, buffer in model.named_buffers() if name in persistent and not is_packed(name)
        }
        embeddings = embeddings_of(model)
    aliases |= {*_of_other_stages(model, stored), *(name for name in stored if may_ignore(model, name))}
    whole = not any(isinstance(module, Absent) for module in model.modules())  # and no stage of a pipeline
    shapes = {name: shape_of(target) for name, target in targets.items()}
    return targets, stored, fit(shapes, stored, aliases, path, fresh, embeddings, whole)


def _rounded(part: PartMaker, dtype: torch.dtype) -> PartMaker:
    """Return what gives the same values in a dtype."""
    return lambda offsets, sizes: part(offsets, sizes).to(dtype)


def start_training(model: nn.Module) -> nn.Module:
    """Return the model in training mode, with the submodules that its user put into evaluation mode left in it.

    A whole model in evaluation mode was left so by loading, not frozen by its user: all of it trains.
    """
    frozen = [module for module in model.modules() if not module.training] if model.training else []
    model.train()  # a class may keep parts of it in evaluation mode by itself
    for module in frozen:
        module.training = False
    return model


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and every module back into its own after."""
    modes = modes_of(model)
    _with_shards(model)
    model.eval()
    try:
        yield
    finally:
        put_into(model, modes)


Modes = dict[nn.Module, bool]  # whether it is in training mode, of each module, parents before children


def modes_of(model: nn.Module) -> Modes:
    """Return the mode of every module of a model."""
    return {module: module.training for module in model.modules()}


def put_into(model: nn.Module, modes: Modes) -> None:
    """Put every module of a model into the mode that it had; where classes have a `train` of their own, by that.

    One may change weights there: adapters that are merged into a weight for evaluations are taken out again.
    """
    if _has_own_modes(model):
        _with_shards(model)
        for module, training in modes.items():
            if module is model or module.training is not training:
                module.train(training)
    for module, training in modes.items():
        module.training = training


def _has_own_modes(model: nn.Module) -> bool:
    """Return whether a class of the model says by itself what it is to be in training and in evaluation mode."""
    return any(type(module).train is not nn.Module.train for module in model.modules())


def _with_shards(model: nn.Module) -> None:
    """Let go of gathered weights where a `train` of the model's own may change any: the shards are what is kept."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported for a model that nobody has sharded
    if fsdp is None or not _has_own_modes(model):
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether the forward pass takes statistics over the micro-batch: BatchNorm in train mode, not Sync."""
    return any(takes_batch_statistics(m) and not isinstance(m, WholeBatchNorm) for m in model.modules())


def _aliases(model: nn.Module) -> Iterator[str]:
    """Yield names that a file may hold besides the parameters': those of tied weights and of other buffers."""
    if isinstance(model, Decoder):
        if model.config.tied:
            yield HEAD
    else:
        yield from model.state_dict(keep_vars=True)


def _of_other_stages(model: nn.Module, stored: Iterable[str]) -> Iterator[str]:
    """Yield the names in a file that belong to modules which only other pipeline stages have."""
    modules = dict(model.named_modules())
    absent = [f".{name}." for name, module in modules.items() if isinstance(module, Absent)]
    if isinstance(model, Decoder):
        held = {name.rpartition(".")[2] for name in modules if name.startswith("layers.") and name.count(".") == 1}
        others = (str(index) for index in range(model.config.layers) if str(index) not in held)
        absent += [f".layers.{index}." for index in others]
    yield from (name for name in stored if any(part in f".{name}" for part in absent))

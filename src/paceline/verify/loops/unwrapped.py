"""The module inside a loop's model, without wrappers, and the parameters by that module's names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from paceline.errors import ConfigError
from paceline.task.plain_names import plain_name

WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module")  # what DDP, torch.compile and FSDP1 call what they wrap
FSDP1 = "_fsdp_wrapped_module."  # within names: of blocks that are wrapped apart
WRAPPERS = (DataParallel, DistributedDataParallel)  # their subclasses too
LIBRARIES = ("torch", "accelerate", "deepspeed", "fairscale")
LANGUAGE = ("builtins", "abc", "typing")
LAYERS = "torch.nn.modules."  # torch's own containers wrap nothing, whatever their children are called


def inner_of(model: nn.Module) -> nn.Module:
    """Return the module that libraries have wrapped; a module of the user's own that has a `module` is no wrapper."""
    while (found := _wrapped_by(model)) is not None:
        model = found
    return model


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without what wrappers, of all or of some blocks, put into them."""
    return {clean(name): parameter for name, parameter in inner_of(model).named_parameters()}


def clean(name: str) -> str:
    """Return a parameter's name without what wrappers of blocks put into it."""
    return plain_name(name.replace(FSDP1, ""))


@contextlib.contextmanager
def not_called(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError where the model, or what it wraps, is called inside the block: a copy of it should be."""

    def refuse(module: nn.Module, given: object) -> NoReturn:
        raise ConfigError(
            "the objective calls the loop's own model",
            "one device computes on a copy, which the objective is given as its first argument",
            "objective(model, batch) that calls the model it is given",
        )

    handles = [each.register_forward_pre_hook(refuse) for each in {model, inner_of(model)}]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _wrapped_by(model: nn.Module) -> nn.Module | None:
    if not isinstance(model, WRAPPERS) and not _is_of_libraries(type(model)):
        return None
    found = [child for name, child in model.named_children() if name in WRAPPED]
    return found[0] if len(found) == 1 else None


def _is_of_libraries(kind: type) -> bool:
    """Return whether nothing of a class is the user's own: FSDP2 has a class of its own made of each that it shards."""
    bases = [base.__module__ for base in kind.__mro__ if base is not nn.Module]
    return all(where.partition(".")[0] in (*LIBRARIES, *LANGUAGE) and not where.startswith(LAYERS) for where in bases)

"""Names of a model's parameters and modules as the plain model has them, without what torch's wrappers put into names.

Checkpoints, patterns of groups and adapters are the same with and without `torch.compile` and recompute, so all of them
ask here.
"""

from __future__ import annotations

from torch import nn

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile, and of torch's checkpoint_wrapper


def plain_name(name: str) -> str:
    """Return the name of a parameter, a buffer or a module without what torch's wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module, every: bool = False) -> list[tuple[str, nn.Parameter]]:
    """Return a model's parameters with their plain names.

    A parameter that several modules hold comes once, or under `every` name that it has.
    """
    every_name = model.named_parameters(remove_duplicate=not every)
    return [(plain_name(name), parameter) for name, parameter in every_name]

"""The state of training as a flat dict of tensors by name, ready to be saved and loaded in place.

`model.NAME` holds parameters and persistent buffers, `optim.NAME.KEY` the optimizer's state for the parameter NAME.
The tensors are the live ones, so loading into them is all that restoring takes.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.task.plain_names import plain_name

MODEL = "model."
OPTIMIZER = "optim."


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Return the live tensors of a model and its optimizer by name; a tied parameter once, under its first name.

    An optimizer makes its state at the first step: call `materialise_optimizer_state` before loading into it.
    Raises ConfigError for state that is not a tensor, and for a parameter that the model does not hold.
    """
    names = _model_names(model)
    state = {MODEL + name: tensor for name, tensor in names.items()}
    if optimizer is None:
        return state
    name_of = {id(tensor): name for name, tensor in names.items()}
    for parameter, values in optimizer.state.items():
        if id(parameter) not in name_of:
            raise ConfigError(
                f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model does not",
                "it was built from another model, or before parameters were replaced by sharding",
                "build the optimizer after the model has its final parameters",
            )
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                state[f"{OPTIMIZER}{name_of[id(parameter)]}.{key}"] = value
            elif value is not None:  # torch writes None for a buffer it does without
                raise ConfigError(
                    f"{type(optimizer).__name__} cannot be saved",
                    f"its state '{key}' of '{name_of[id(parameter)]}' is a {type(value).__name__}, not a tensor",
                    "use an optimizer that keeps its state in tensors, such as AdamW or SGD",
                )
    return state


def materialise_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device | None = None) -> None:
    """Give every trained parameter the state it would have before its first update, where it has none yet.

    Zero moments, zero buffers, step 0: exactly what AdamW and Adam begin with; for SGD with momentum a zero buffer
    gives the same first update only if `dampening` is 0. Weights are not touched, and no step is taken. `device` is
    where moments and buffers are made, by default where the parameter is.
    An optimizer with a method `materialise` knows itself. Raises ConfigError for another kind that has no state yet.
    """
    own = getattr(optimizer, "materialise", None)
    if own is not None:
        assert device is None, "such an optimizer's state rests where the parameters are"
        own()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                fresh = _fresh_state(optimizer, group, parameter, device)
                if fresh:
                    optimizer.state[parameter] = fresh


def _model_names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by plain name, each tensor once."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    names: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        name = plain_name(name)
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"the model's state '{name}' cannot be saved",
                f"it is a {type(tensor).__name__} (from get_extra_state), not a tensor",
                "keep it in a buffer: register_buffer(name, tensor)",
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            names[name] = tensor
    return names


def _fresh_state(
    optimizer: torch.optim.Optimizer, group: dict[str, object], parameter: torch.Tensor, where: torch.device | None
) -> dict[str, torch.Tensor]:
    """Return what torch's own step() would create for the parameter (torch/optim/adam.py and sgd.py, `_init_group`)."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        on_device = bool(group["capturable"] or group["fused"])
        # torch/optim/optimizer.py, _get_scalar_dtype
        wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
        device = parameter.device if on_device else torch.device("cpu")
        state = {"step": torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)}
        moments = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
    elif isinstance(optimizer, torch.optim.SGD):
        state, moments = {}, (["momentum_buffer"] if group["momentum"] else [])
    else:
        raise ConfigError(
            f"the state of {type(optimizer).__name__} cannot be made ahead of its first step",
            "only that of AdamW, Adam and SGD is known",
            "take one step before loading, or use one of these",
        )
    for name in moments:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format, device=where)
    return state

"""What of a model's state ranks can share and checkpoints can keep, told before anything is planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.errors import ConfigError


def refuse_state(model: nn.Module) -> None:
    """Raise ConfigError for tensors that ranks cannot share, and for state that no checkpoint brings back.

    A checkpoint is loaded into a model's own tensors. What a state dict makes anew each time (`get_extra_state`, a hook
    that joins weights) would be written and never come back.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(
                f"'{name}' of the model has no shape yet",
                "a lazy module knows its shape when it is first called, and a plan is made before",
                "a module with its widths, or a factory that calls the model once before it returns it",
            )
        if tensor.layout != torch.strided:
            raise ConfigError(
                f"'{name}' of the model is a tensor of layout {tensor.layout}",
                "ranks share, and checkpoints keep, dense tensors alone",
                "its indices and its values as two buffers, of which the forward pass makes the matrix",
            )
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, value in _state_of(model).items():
        if id(value) not in held:
            what = "made anew for every state dict" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ConfigError(
                f"'{name}' of the model's state dict is no parameter or buffer of the model",
                f"it is {what} (by get_extra_state, or a hook of state_dict), and a checkpoint is loaded into tensors"
                " that the model holds",
                "register_buffer(name, tensor), which the model reads and changes in place",
            )


def _state_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict, with its own tensors; nothing where it needs values that "meta" has none of."""
    try:
        return model.state_dict(keep_vars=True)
    except (NotImplementedError, RuntimeError):
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise
        return {}

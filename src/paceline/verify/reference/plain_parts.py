"""What a model gets from a task, written plainly for references: adapters beside frozen weights, noise on embeddings.

Random numbers come from the same operators of torch on tensors of the same shapes, one call for each, so that a sample
draws what it draws in the run. All else is written from the formulas alone.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.task.adapt.linear import AdaptedLinear
from paceline.task.adapt.noise import HELD_AS, EmbeddingNoise


def add_plainly(model: nn.Module) -> None:
    """Have the model's adapters and its noise computed plainly, in place."""
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            module.forward = functools.partial(_adapted, module)  # type: ignore[method-assign]
        if isinstance(noise := getattr(module, HELD_AS, None), EmbeddingNoise):
            _replace(module, noise)


def _adapted(layer: AdaptedLinear, x: Tensor) -> Tensor:
    """Return W x + b and beside it r = scale * B^T A drop(x); of DoRA W x + m / |W + scale * B^T A| (W drop(x) + r)
    - W drop(x) + b. The scale is alpha over the rank, or over its root.
    """
    spec, weight = layer.spec, layer.weight.to(x.dtype)
    weight = weight if layer.inputs_dim == 1 else weight.T  # of transformers' Conv1D
    bias = 0.0 if layer.bias is None else layer.bias
    plain = x @ weight.T
    if not layer.is_on:
        return plain + bias
    thin_in, thin_out = layer.lora_A.to(x.dtype), layer.lora_B.to(x.dtype)  # [rank, in], [rank, out]
    scale = spec.alpha / (math.sqrt(spec.rank) if spec.kind == "rslora" else spec.rank)
    dropped = F.dropout(x, spec.dropout) if spec.dropout and layer.training else x
    added = scale * ((dropped @ thin_in.T) @ thin_out)
    if spec.kind != "dora":
        return plain + added + bias
    assert layer.lora_magnitude_vector is not None
    norms = torch.linalg.vector_norm((weight + scale * thin_out.T @ thin_in).detach(), dim=1)
    base = dropped @ weight.T
    return plain + layer.lora_magnitude_vector / norms * (base + added) - base + bias


def _replace(embedding: nn.Module, noise: EmbeddingNoise) -> None:
    """Put a plain hook in the place of the noise's own."""
    (own,) = (key for key, hook in embedding._forward_hooks.items() if hook is noise)
    del embedding._forward_hooks[own]

    def plainly(module: nn.Module, args: tuple[object, ...], out: Tensor) -> Tensor:
        """Return x + e * alpha / sqrt(seq * hidden), e even over -1..1, in training alone."""
        if not (module.training and noise.is_on):
            return out
        seq, hidden = out.shape[-2:]
        even = 2 * torch.rand_like(out, dtype=torch.promote_types(out.dtype, torch.float32)) - 1
        return (out + even * noise.alpha / math.sqrt(seq * hidden)).to(out.dtype)

    embedding.register_forward_hook(plainly)

"""Which layers a style of the tensor axis fits: layers whose forward pass is known, so that ranks can share work."""

from __future__ import annotations

from torch import nn

from paceline.task.adapt.linear import AdaptedLinear


def misfit(module: nn.Module, style: str, parts: tuple[int, ...] = ()) -> str:
    """Return why a style that splits weights is not for this module; empty where it is.

    A subclass of nn.Linear, or of nn.Embedding for 'vocabulary', fits as long as its forward pass is that of its base:
    one that does more (scales, adds low-rank matrices, dequantises) would silently lose it, since a split layer
    computes the product alone. `parts` are the rows of a fused layer.
    """
    linear = isinstance(module, nn.Linear)
    if not linear and not (style == "vocabulary" and isinstance(module, nn.Embedding)):
        return f"the style is for an nn.Linear{' or nn.Embedding' if style == 'vocabulary' else ''}"
    base = nn.Linear if linear else nn.Embedding
    if isinstance(module, AdaptedLinear) and style == "vocabulary":
        return "it has an adapter, and the loss over parts of a vocabulary reads its weight alone"
    known = base.forward, AdaptedLinear.forward
    if type(module).forward not in known or "forward" in vars(module):
        return f"its forward pass is not that of nn.{base.__name__}, and a part of it would be the plain product's"
    weight = module._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        return "its weight is computed from others (a parametrisation), and only a plain parameter can be split"
    if style == "partial" and module.bias is not None:
        return "every rank would add its bias to a part of a sum; bias = False, or the style 'row'"
    if style == "fused" and sum(parts) != weight.shape[0]:
        return f"its parts {parts} have {sum(parts)} rows, its weight {weight.shape[0]}"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        return "it renormalises, counts tokens or has sparse gradients, over all its rows"
    return ""

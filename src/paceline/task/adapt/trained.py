"""Which layers of a model get an adapter, and which parameters are trained: one mechanism, `requires_grad`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import ConfigError, suggestion
from paceline.spec.adapt.adapter import NF4, Adaptation, AdapterSpec
from paceline.task.adapt.linear import AdaptedLinear, TurnedLinear, adapted, is_adapter, is_turned
from paceline.task.adapt.noise import add_noise
from paceline.task.models.blocks import find_blocks
from paceline.task.rules import Rules

# Their forward pass reads the weights of the layers inside and does not call these: an adapter would be without effect.
READS_WEIGHTS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


def adapt(model: nn.Module, adaptation: Adaptation) -> nn.Module:
    """Return the model with its adapters, which have no values yet, its noise, and what is not trained frozen.

    The model is changed in place; one that has these adapters already is left as it is. Raises ConfigError for patterns
    that name nothing, and for layers that cannot have an adapter.
    """
    if adaptation.noise:
        add_noise(model, adaptation.noise)
    if adaptation.is_full:
        return model
    spec = adaptation.adapter
    held = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    model.requires_grad_(False)
    if not spec.is_none and not held:
        for layer in target_layers(model, spec).values():
            adapted(layer, spec)
    elif any(module.spec != spec for module in held):
        raise ConfigError("the model has other adapters already", "an earlier run gave it these", "a fresh model")
    chosen = trained_names(model, adaptation.train)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in chosen or is_adapter(name):
            parameter.requires_grad_(True)
    return model


def trained_names(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the names of the parameters that patterns name. Raises ConfigError for a pattern that names none."""
    return named([name for name, _ in model.named_parameters(remove_duplicate=False)], patterns)


def named(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """Return those of some names of parameters that patterns name, of modules or of parameters; raises as above."""
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fits(pattern, name) or fits(f"{pattern}.*", name)}
        if not matched:
            raise ConfigError(
                f"task.train: '{pattern}' names no parameter of the model",
                f"it has {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
                suggestion(pattern, names),
            )
        found |= matched
    return found


def fits(pattern: str, name: str) -> bool:
    """Return whether a name, or its last part where the pattern has no dot, fits a pattern."""
    return fnmatchcase(name if "." in pattern or "*" in pattern else name.rpartition(".")[2], pattern)


def target_layers(model: nn.Module, spec: AdapterSpec) -> dict[str, nn.Module]:
    """Return the layers that get an adapter, by name. Raises ConfigError where there is none, or one cannot have it."""
    modules = dict(model.named_modules())
    linear = {name: layer for name, layer in modules.items() if isinstance(layer, nn.Linear) or is_turned(layer)}
    reasons = {name: why_not(model, modules, name, layer, spec) for name, layer in linear.items()}
    closed = {name: because for name, because in reasons.items() if because}
    if not spec.targets:
        inside = _places(model)
        found = {name: layer for name, layer in linear.items() if name.startswith(inside) and name not in closed}
        if not found:
            because = next(iter(closed.values()), "it holds no nn.Linear")
            raise ConfigError(
                f"task.adapter.kind = '{spec.kind}': {type(model).__name__} has no layer for it", because,
                "task.adapter.targets names linear layers, or task.train the parameters to train without adapters",
            )  # fmt: skip
        return found
    chosen: dict[str, nn.Module] = {}
    for pattern in spec.targets:
        matched = [name for name in linear if fits(pattern, name)]
        if not matched:
            raise _nothing(pattern, modules, linear)
        chosen |= {name: linear[name] for name in matched}
    wrong = next((name for name in chosen if name in closed), None)
    if wrong is not None:
        raise ConfigError(
            f"task.adapter.targets: '{wrong}' cannot have an adapter", closed[wrong],
            f"other targets; task.train = ['{wrong}.*'] trains the layer itself",
        )  # fmt: skip
    return chosen


def turned_layers(model: nn.Module) -> list[str]:
    """Return the last parts of the names of adapted layers whose frozen weights lie as [in, out]."""
    named = model.named_modules()
    return sorted({name.rpartition(".")[2] for name, module in named if isinstance(module, TurnedLinear)})


def _places(model: nn.Module) -> tuple[str, ...]:
    """Return how names of layers inside the model's blocks begin, such as "layers."; "" for a model without blocks."""
    rules = getattr(model, "paceline_rules", None)
    if isinstance(rules, Rules) and rules.blocks:
        return (f"{rules.blocks}.",)
    return tuple(f"{name}." for name, _ in find_blocks(model)) or ("",)


def why_not(model: nn.Module, modules: dict[str, nn.Module], name: str, layer: nn.Module, spec: AdapterSpec) -> str:
    """Return why a linear layer cannot have an adapter, "" where it can."""
    parts = name.split(".")
    above = (modules[".".join(parts[:count])] for count in range(len(parts)))
    if any(isinstance(module, READS_WEIGHTS) for module in above):
        return "a module of torch around it reads its weight without calling it: the adapter would be without effect"
    if (type(layer) is not nn.Linear and not is_turned(layer)) or "forward" in vars(layer):
        return f"it is a {type(layer).__name__} with a forward pass of its own, and nn.Linear alone is known"
    if is_turned(layer) and spec.base_dtype == NF4:
        return "it is transformers' Conv1D, whose weight lies as [in, out], and four bits are for nn.Linear alone"
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if layer is head or (name == "lm_head" and hasattr(model, "paceline_rules")):
        return "the loss reads the head's weight in pieces without calling it: the adapter would be without effect"
    if sum(module is not layer and _holds(module, layer.weight) for module in modules.values()):
        return "its weight is another module's too (a tied weight), which an adapter here would not change"
    if not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return "its weight is computed from others (a parametrisation)"
    return ""


def _holds(module: nn.Module, weight: object) -> bool:
    return any(parameter is weight for parameter in module._parameters.values())


def _nothing(pattern: str, modules: Iterable[str], linear: Iterable[str]) -> ConfigError:
    others = [name for name in modules if fits(pattern, name)]
    because = f"'{others[0]}' is no nn.Linear" if others else "no layer of the model has such a name"
    names = {name.rpartition(".")[2]: "" for name in linear} | dict.fromkeys(linear, "")
    return ConfigError(
        f"task.adapter.targets: '{pattern}' names no linear layer", because, suggestion(pattern, list(names))
    )

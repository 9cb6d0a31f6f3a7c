"""The rules that a model declares: its own `paceline_rules`, the rules that a Hugging Face model ships, or both.

A user's module says them in a class or instance attribute, in a dozen lines:

    class Net(nn.Module):
        paceline_rules = Rules(
            tensor={"embed": "vocabulary", "layers.*.up": "column", "layers.*.down": "row"},
        )
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.spec.profile import TensorLimits
from paceline.task.rules import SPREAD, Rules, matches

ATTRIBUTE = "paceline_rules"

# transformers' styles (ALL_PARALLEL_STYLES) that are ours under another name.
HF_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_gather_output": "gathered",
    "colwise_rep": "gathered",  # its name before version 5
    "rowwise_split_input": "split_row",
    "replicated_with_grad_allreduce": "summed",
}


def declared_rules(model: object) -> Rules | None:
    """Return the rules that a module declares, None where it declares none. Raises ConfigError for other things."""
    rules = getattr(model, ATTRIBUTE, None)
    if rules is None:
        return hf_rules(model)
    if not isinstance(rules, Rules):
        raise ConfigError(
            f"{type(model).__name__}.{ATTRIBUTE} is of type {type(rules).__name__}", "it must be Rules",
            "from paceline.task.rules import Rules",
        )  # fmt: skip
    if not rules.add_to_plan:
        return rules
    shipped = hf_rules(model, known=rules)
    if shipped is None:
        raise ConfigError(
            f"{type(model).__name__}.{ATTRIBUTE} adds to a plan, and the model ships none",
            "its config has no base_model_tp_plan",
            "Rules without add_to_plan, which name all of its layers",
        )
    return rules.added_to(shipped)


def tensor_axis(model: Any) -> tuple[TensorLimits | None, str]:
    """Return what a degree of the tensor axis must respect, or (None, why the model's own rules do not open it)."""
    rules = declared_rules(model)
    if rules is None or not rules.tensor or "tp" in rules.closed:
        return None, rules.closed.get("tp", "") if rules else ""
    from paceline.task.models.layers.styles import misfit

    modules = dict(model.named_modules())
    rules.check(modules)
    if "expert" in rules.tensor.values():
        return None, "which dimensions of its experts' weights are their width is known of the built-in families alone"
    counts, widths = dict(rules.counts), set()
    dimensions: set[int] = set()
    for name, module in modules.items():
        style = rules.style_of(name)
        if style in SPREAD or style == "fused":
            because = misfit(module, style, rules.parts_of(name))
            if because:
                return None, f"rule '{style}' for '{name}', a {type(module).__name__}: {because}"
        if style == "fused":
            dimensions.update(rules.parts_of(name))
        if style not in SPREAD:
            continue
        dimensions.add(module.weight.shape[SPREAD[style]])
        if SPREAD[style] == 0:
            widths.add(module.weight.shape[1])
        if style == "gathered":
            counts[f"features of {name}"] = module.weight.shape[0]
    limits = TensorLimits(counts, tuple(sorted(dimensions)), tuple(sorted(widths)), rules.splits_sequence)
    return limits, ""


def expert_axis(model: Any) -> tuple[dict[str, Any], str]:
    """Return the modules with the experts of a layer, by name, or ({}, why they cannot be spread over ranks).

    A module with the rule 'expert' is called with rows [tokens, ...] sorted by expert and int64 counts [experts] of
    them, returns a result for each row, and holds all its weights stacked: [experts, ...]. transformers' modules with
    stacked experts are called in their own way and need no rule.
    """
    rules = declared_rules(model)
    modules = dict(model.named_modules())
    found = {
        name: module
        for name, module in modules.items()
        if is_routed(module) or (rules is not None and rules.style_of(name) == "expert")
    }
    listed = [name for name, module in modules.items() if _is_list_of_experts(name, module)]
    if listed and not found:
        return {}, f"'{listed[0]}' holds experts as modules of their own: stack their weights as [experts, ...]"
    for name, module in found.items():
        weights = dict(module.named_parameters(recurse=False))
        counts = {weight.shape[0] for weight in weights.values() if weight.dim() > 1}
        if len(weights) < len(list(module.parameters())) or any(weight.dim() < 2 for weight in weights.values()):
            return {}, f"'{name}' holds experts as modules of their own: stack their weights as [experts, ...]"
        if len(counts) != 1:
            return {}, f"the weights of '{name}' are not stacked by expert: the first dimension of all counts experts"
    return found, ""


def is_routed(module: object) -> bool:
    """Return whether a module holds experts in the way of transformers: what `use_experts_implementation` marks."""
    return all(hasattr(module, name) for name in ("num_experts", "is_concatenated", "has_gate"))


def _is_list_of_experts(name: str, module: object) -> bool:
    return name.rpartition(".")[2] == "experts" and type(module).__name__ == "ModuleList"


def hf_rules(model: Any, known: Rules | None = None) -> Rules | None:
    """Return the rules in a Hugging Face causal model's own plans, None for a model without any.

    What `known` speaks of may be of any style. Read are `config.base_model_tp_plan`, the class's `_tp_plan` and
    `config.base_model_pp_plan`. The embedding and the head are split by vocabulary, which those plans leave whole.
    `closed` names what in them is not known here.
    """
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        return None
    prefix = getattr(model, "base_model_prefix", "")
    inner = hasattr(model, prefix) and bool(prefix)
    theirs = {f"{prefix}.{pattern}" if inner else pattern: style for pattern, style in plan.items()}
    theirs |= getattr(type(model), "_tp_plan", None) or {}
    names = [name for name, _ in model.named_modules()]
    theirs = {pattern: style for pattern, style in theirs.items() if any(matches(pattern, name) for name in names)}
    if known is not None:
        theirs = {pattern: style for pattern, style in theirs.items() if pattern not in known.tensor}
    unknown = sorted({style for style in theirs.values() if style not in HF_STYLES})
    if unknown:
        because = f"its own plan uses {', '.join(map(repr, unknown))}, which Paceline does not know"
        return Rules(closed={"tp": because})
    tensor = {pattern: HF_STYLES[style] for pattern, style in theirs.items()}
    ends = [_name_of(model, end) for end in _ends(model)]
    spread = _spread_by_vocabulary(model)
    tensor = {pattern: style for pattern, style in tensor.items() if pattern not in ends}
    tensor |= {_name_of(model, end): "vocabulary" for end in spread}
    config = model.config
    counts = {"heads": config.num_attention_heads, "kv_heads": getattr(config, "num_key_value_heads", None)}
    return Rules(tensor, **_chain(model, prefix, inner), counts={n: c for n, c in counts.items() if c})


def _ends(model: object) -> list[Any]:
    """Return the embedding and the head, as far as the model has them."""
    asked = ("get_input_embeddings", "get_output_embeddings")
    return [end for end in (getattr(model, ask, lambda: None)() for ask in asked) if end is not None]


def _spread_by_vocabulary(model: Any) -> list[object]:
    """Return those of embedding and head that can be spread: plain layers; of tied ones both or neither."""
    ends = _ends(model)
    plain = [end for end in ends if type(end).forward.__module__.startswith("torch.nn.modules")]
    tied = len(ends) == 2 and ends[0].weight is ends[1].weight
    return [] if tied and len(plain) < 2 else plain


def _chain(model: Any, prefix: str, inner: bool) -> dict[str, Any]:
    """Return the chain of blocks in the pipeline plan: what comes before the one list, the list, and what after."""
    plan = getattr(model.config, "base_model_pp_plan", None) or {}
    base = getattr(model, prefix) if inner else model
    parts = [name for name in plan if hasattr(base, name)]
    lists = [name for name in parts if type(getattr(base, name)).__name__ == "ModuleList"]
    if len(lists) != 1:
        return {}
    at = parts.index(lists[0])
    named = [f"{prefix}.{name}" if inner else name for name in parts]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    last = [*named[at + 1 :], *([_name_of(model, head)] if head is not None else [])]
    return {"first": tuple(named[:at]), "blocks": named[at], "last": tuple(last)}


def _name_of(model: Any, module: object) -> str:
    return next(name for name, found in model.named_modules() if found is module)

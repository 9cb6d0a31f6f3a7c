"""Update rules: the optimizers that a task may name, what they take and hold, and whether they need whole matrices.

The one table that keys on names of optimizers. Imports no torch: the planner reads it.

| scope | an update of one element depends on | under sharding |
|---|---|---|
| element | that element's own history | every rank updates its shard |
| parameter | its whole parameter: Newton-Schulz, row and column statistics | gathered for the update, then cut again |
| model | other parameters | refused where any parameter is spread over ranks |
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config.plain import object_path
from paceline.errors import ConfigError, MissingExtra, suggestion
from paceline.spec.import_paths import is_import_path, load_object
from paceline.spec.steps.update import OptimizerSpec

Takes = Mapping[str, str | tuple[str, ...]]  # argument -> option, or a tuple of options
ADAM: Takes = {"betas": ("beta1", "beta2"), "eps": "eps", "weight_decay": "weight_decay"}
ASSUMED_STATE_VALUES = 2.0  # of a rule that nothing is known of: as Adam has


@dataclass(frozen=True)
class Rule:
    """An update rule by its name in a spec."""

    path: str  # where its class is
    scope: str  # "element" or "parameter"
    state_values: float  # per parameter of a matrix, in the weights' dtype
    source: str
    takes: Takes = field(default_factory=lambda: {"weight_decay": "weight_decay"})
    more_values: Mapping[str, float] = field(default_factory=dict)  # further state of an argument that is set
    matrices_only: bool = False  # parameters of other dimensions go to AdamW
    rounds_inside: bool = False  # computes in fewer digits than the weights have, whatever those are
    # Of a rule that needs whole parameters: values that it gathers of each, in the weights' dtype. Its weight, its
    # gradient, and of its state what has the parameter's shape.
    gathered_values: float = 0
    extra: str = ""  # the optional dependency that its package is


RULES: dict[str, Rule] = {
    "adamw": Rule("torch.optim:AdamW", "element", 2, "Loshchilov & Hutter 2019", ADAM, {"amsgrad": 1}),
    "sgd": Rule("torch.optim:SGD", "element", 1, "Sutskever et al. 2013", {"momentum": "beta1",
                "weight_decay": "weight_decay"}),
    "adam": Rule("torch.optim:Adam", "element", 2, "Kingma & Ba 2015", ADAM, {"amsgrad": 1}),
    "nadam": Rule("torch.optim:NAdam", "element", 2, "Dozat 2016", ADAM),
    "radam": Rule("torch.optim:RAdam", "element", 2, "Liu et al. 2020", ADAM),
    "adamax": Rule("torch.optim:Adamax", "element", 2, "Kingma & Ba 2015, section 7.1", ADAM),
    "adagrad": Rule("torch.optim:Adagrad", "element", 1, "Duchi et al. 2011"),
    "adadelta": Rule("torch.optim:Adadelta", "element", 2, "Zeiler 2012"),
    "rmsprop": Rule("torch.optim:RMSprop", "element", 1, "Hinton 2012, lecture 6e",
                    more_values={"momentum": 1, "centered": 1}),
    "lion": Rule("paceline.task.optimizer.lion:Lion", "element", 1, "Chen et al. 2023, algorithm 2",
                 {"betas": ("beta1", "beta2"), "weight_decay": "weight_decay"}),
    # Row and column means: (rows + columns) / (rows x columns) of a value, next to nothing for a matrix.
    "adafactor": Rule("torch.optim:Adafactor", "parameter", 0, "Shazeer & Stern 2018", gathered_values=2),
    "muon": Rule("torch.optim:Muon", "parameter", 1, "Jordan 2024; Liu et al. 2025", matrices_only=True,
                 rounds_inside=True, gathered_values=3),
    # Two states of a byte a value, and a scale of four bytes for each block of 256 values of a whole parameter.
    "adamw8bit": Rule("bitsandbytes.optim:AdamW8bit", "parameter", 2 * (1 + 4 / 256) / 4,
                      "Dettmers et al. 2022, arXiv:2110.02861", ADAM, rounds_inside=True, gathered_values=2 + 2 / 4,
                      extra="8bit"),
}  # fmt: skip
# torch's kernels of these take sharded tensors as they are.
UNWRAPPED = ("adamw", "adam", "sgd")
NOT_OFFLOADED = "the state of AdamW, Adam and SGD alone can rest in host memory, as one optimizer of all parameters"
COMPANION = "adamw"  # trains what a rule for matrices alone leaves
# Those of torch that a task cannot have, and why.
WITHOUT = {
    "LBFGS": "it evaluates the loss again and again within an update",
    "SparseAdam": "it takes sparse gradients, which cannot be summed over ranks here",
}
# Packages none of whose optimizers a task can have, and why.
FOREIGN_STATES = {
    "torchao": "its 8-bit states have blocks of each rank's own part of a parameter, and parts that do not divide into "
    "blocks keep 32 bits: every layout would train other numbers, and none could read the checkpoint of another"
}
OWN_OPTIONS = ("beta1", "beta2", "eps")  # of some rules; the others take theirs in `arguments`


@dataclass(frozen=True)
class Use:
    """An optimizer as a task uses it for some of its parameters. `arguments` are those of every parameter group."""

    name: str  # as in the spec
    factory: Any
    scope: str  # "" where it is not known and must be tried
    matrices_only: bool
    takes_decay: bool
    arguments: Mapping[str, Any]


def rule_of(name: object) -> Rule | None:
    """Return the rule of a name, None for an import path or a callable. Raises ConfigError for other names."""
    if not isinstance(name, str) or is_import_path(name):
        return None
    if name not in RULES:
        raise ConfigError(
            f"there is no optimizer '{name}'",
            "one of your own is named by its import path, package.module:factory",
            suggestion(name, RULES),
        )
    return RULES[name]


def names_of(spec: OptimizerSpec) -> list[object]:
    """Return the optimizers that a spec uses: its own, those of its groups, and the companion of one for matrices."""
    found = [spec.name, *(group.name for group in spec.groups if group.name)]
    if any(rule is not None and rule.matrices_only for rule in map(rule_of, found)):
        found.append(COMPANION)
    return list(dict.fromkeys(found))


def optimizer_key(spec: OptimizerSpec) -> str:
    """Return what a spec's optimizers are known by in prices and records: "adamw", or "muon+adamw".

    Arguments by which an optimizer keeps more state follow its name: "adamw(amsgrad)".
    """
    return "+".join(
        f"{name}({','.join(more)})" if (more := _more_state(spec, name)) else name if isinstance(name, str) else
        object_path(name)
        for name in names_of(spec)
    )  # fmt: skip


def _more_state(spec: OptimizerSpec, name: object) -> list[str]:
    rule = rule_of(name)
    given = [spec.arguments, *(group.arguments for group in spec.groups if not group.name)] if name == spec.name else []
    given += [group.arguments for group in spec.groups if group.name == name]
    return [argument for argument in (rule.more_values if rule else ()) if any(each.get(argument) for each in given)]


def _of_key(key: str) -> list[tuple[Rule | None, list[str]]]:
    """Return the rule of each optimizer of an `optimizer_key`, and the arguments by which it keeps more state."""
    named = [each.removesuffix(")").partition("(") for each in key.split("+")]
    return [(RULES.get(name), more.split(",") if more else []) for name, _, more in named]


def state_values(key: str) -> float:
    """Return the optimizer's state values per parameter by `optimizer_key`, of several optimizers the most."""
    return max(rule.state_values + sum(rule.more_values[argument] for argument in more) if rule else
               ASSUMED_STATE_VALUES for rule, more in _of_key(key))  # fmt: skip


def gathered_values(key: str) -> float:
    """Return the values per parameter that optimizers gather for an update where parameters are sharded: the most."""
    return max(rule.gathered_values if rule else 0.0 for rule, _ in _of_key(key))


def is_unwrapped(key: str) -> bool:
    """Return whether torch's own kernels make the update, by `optimizer_key`, on sharded tensors as they are."""
    return key.partition("(")[0] in UNWRAPPED


def missing_extra(name: object) -> MissingExtra | None:
    """Return the error for an optimizer whose package is an optional dependency and is not installed."""
    rule = rule_of(name)
    if rule is None or not rule.extra:
        return None
    package = rule.path.partition(".")[0]
    found = importlib.util.find_spec(package)
    return None if found else MissingExtra(package, rule.extra, f"the optimizer '{name}'")


def rounds_inside(spec: OptimizerSpec) -> bool:
    """Return whether an optimizer of the spec computes its update in fewer digits than weights have."""
    return any(rule is not None and rule.rounds_inside for rule in map(rule_of, names_of(spec)))


def needs_no_wrapping(names: Collection[object]) -> bool:
    """Return whether one optimizer of torch over a model's own tensors, sharded or not, does for these optimizers."""
    return len(names) == 1 and all(name in UNWRAPPED for name in names)


def use_of(spec: OptimizerSpec, name: Any, arguments: Mapping[str, object]) -> Use:
    """Return the optimizer of a name with a spec's options and further arguments. Imports what the name points to.

    Raises ConfigError where it cannot be imported or called, or does not take an argument.
    """
    rule = rule_of(name)
    if absent := missing_extra(name):
        raise absent
    if because := FOREIGN_STATES.get(name.partition(":")[0].partition(".")[0] if isinstance(name, str) else ""):
        raise ConfigError(f"task.optimizer.name = '{name}' cannot train here", because, "the optimizer 'adamw8bit'")
    factory = load_object(rule.path if rule else name, "task.optimizer.name") if isinstance(name, str) else name
    label = name if isinstance(name, str) else object_path(name)
    if getattr(factory, "__module__", "").startswith("torch.optim") and factory.__name__ in WITHOUT:
        raise ConfigError(
            f"task.optimizer.name = '{label}' cannot train here", WITHOUT[factory.__name__], "another optimizer"
        )
    if not callable(factory):
        raise ConfigError(
            f"task.optimizer.name = '{label}' is of type {type(factory).__name__}", "it cannot be called",
            "a class or function factory(parameter_groups, lr=..., **arguments) that returns a torch.optim.Optimizer",
        )  # fmt: skip
    given = {argument: _value(spec, option) for argument, option in rule.takes.items()} if rule else {}
    given.pop("weight_decay", None)  # groups have their own
    accepted = _parameters(factory)
    for argument in arguments:
        if accepted is not None and argument not in accepted:
            raise ConfigError(
                f"optimizer '{label}' takes no argument '{argument}'", "task.optimizer.arguments names it",
                suggestion(argument, sorted(accepted - {"params", "lr"})),
            )  # fmt: skip
    return Use(
        name=label,
        factory=factory,
        scope=rule.scope if rule else _declared_scope(factory),
        matrices_only=rule is not None and rule.matrices_only,
        takes_decay="weight_decay" in rule.takes if rule else accepted is None or "weight_decay" in accepted,
        arguments={**given, **{key: _tuple(value) for key, value in arguments.items()}},
    )


def check_options(spec: OptimizerSpec, where: str = "task.optimizer") -> None:
    """Raise ConfigError for an unknown name, and for an option that none of the spec's optimizers would read.

    MissingExtra is one: for an optimizer of a package that is not installed.
    """
    read: set[str] = set()
    for name in names_of(spec):
        rule = rule_of(name)
        if absent := missing_extra(name):
            raise absent
        for option in rule.takes.values() if rule else ():
            read |= {option} if isinstance(option, str) else set(option)
    defaults = {option.name: option.default for option in dataclasses.fields(OptimizerSpec)}
    for option in OWN_OPTIONS:
        if option not in read and getattr(spec, option) != defaults[option]:
            raise ConfigError(
                f"{where}.{option} = {getattr(spec, option)} is not read by '{optimizer_key(spec)}'",
                "an option without effect is a mistake",
                f"{where}.arguments holds what an optimizer takes under its own names",
            )


def _value(spec: OptimizerSpec, option: str | tuple[str, ...]) -> object:
    return getattr(spec, option) if isinstance(option, str) else tuple(getattr(spec, part) for part in option)


def _tuple(value: object) -> object:
    """Return lists, as files have them, as the tuples that optimizers expect."""
    return tuple(map(_tuple, value)) if isinstance(value, list | tuple) else value


def _parameters(factory: Any) -> set[str] | None:
    """Return the names of a factory's arguments, None where it takes any or tells none."""
    try:
        found = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in found.values()):
        return None
    return set(found)


def _declared_scope(factory: object) -> str:
    """Return the scope that a factory declares in an attribute `paceline_scope`, or "" """
    scope = getattr(factory, "paceline_scope", "")
    if scope not in ("", "element", "parameter", "model"):
        raise ConfigError(
            f"{object_path(factory)}.paceline_scope = {scope!r} is not a scope", "it says what an update depends on",
            suggestion(str(scope), ["element", "parameter", "model"]),
        )  # fmt: skip
    return scope

"""Parameter groups: which optimizer, learning rate and weight decay each parameter of a model gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from paceline.errors import ConfigError, suggestion
from paceline.spec.optimizers import COMPANION, Use, rule_of, use_of
from paceline.spec.task import GroupSpec, OptimizerSpec


class Matching(Protocol):
    """What takes parameters by patterns of their names."""

    @property
    def match(self) -> tuple[str, ...]:
        """The patterns."""


@dataclass(frozen=True)
class Treatment:
    """How some parameters are trained. Two of equal `number` and `decays` are one parameter group."""

    number: int  # of the group in the spec; -1 for the parameters that no group names
    use: Use
    lr_scale: float
    weight_decay: float | None  # None: the optimizer knows no weight decay


@dataclass
class Treatments:
    """Tells how each parameter is trained: by the first group that matches one of its names, else by the spec."""

    spec: OptimizerSpec

    def __post_init__(self) -> None:
        self._uses: dict[tuple[Any, str], Use] = {}  # one optimizer for all groups that ask for the same

    def of(self, names: Iterable[str], dimensions: int) -> Treatment:
        """Return the treatment of a parameter with these names (several where it is tied) and dimensions."""
        number = group_of(self.spec.groups, names)
        group = self.spec.groups[number] if number >= 0 else GroupSpec()
        use = self._use(group, dimensions)
        decay: float | None = self.spec.weight_decay if dimensions >= 2 else 0.0
        if group.weight_decay is not None:
            decay = group.weight_decay
            if not use.takes_decay:
                raise ConfigError(
                    f"task.optimizer.groups: weight_decay = {decay} for {', '.join(group.match)}",
                    f"the optimizer '{use.name}' takes no weight_decay", "leave it out, or another optimizer",
                )  # fmt: skip
        return Treatment(number, use, group.lr_scale, decay if use.takes_decay else None)

    def _use(self, group: GroupSpec, dimensions: int) -> Use:
        name = group.name or self.spec.name
        rule = rule_of(name)
        own: Mapping[str, Any] = {} if group.name and group.name != self.spec.name else self.spec.arguments
        arguments = {**own, **group.arguments}
        if rule is not None and rule.matrices_only and dimensions != 2:
            name, arguments = COMPANION, {}
        key = (name, repr(sorted(arguments.items())))
        if key not in self._uses:
            self._uses[key] = use_of(self.spec, name, arguments)
        return self._uses[key]


def group_of(groups: Sequence[Matching], names: Iterable[str]) -> int:
    """Return the number of the first group with a pattern that fits one of a parameter's names, -1 where none does."""
    named = list(names)
    return next((number for number, group in enumerate(groups) if fits(group.match, named)), -1)


def fits(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Return whether one of the patterns fits one of the names; `*` stands for any text, dots included."""
    named = list(names)
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in named)


def check_patterns(patterns: Sequence[str], names: Iterable[str], where: str) -> None:
    """Raise ConfigError for a pattern that fits no name: a misspelt one must not train nothing in silence."""
    known = list(names)
    if not patterns:
        raise ConfigError(f"{where} names no parameter", "it has no pattern", f'{where} = ["*.bias"]')
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(
                f"{where}: '{pattern}' matches no parameter",
                "a group without parameters is a mistake; `*` stands for any text",
                suggestion(pattern, [*known, *{f"*.{name.rpartition('.')[2]}" for name in known}]),
            )


def check_groups(spec: OptimizerSpec, names: Iterable[str], where: str = "task.optimizer") -> None:
    """Raise ConfigError for a group that takes no parameter of a model with these names, saying why."""
    known = list(names)
    for number, group in enumerate(spec.groups):
        at = f"{where}.groups.{number + 1}.match"
        check_patterns(group.match, known, at)
        taken = [name for name in known if fits(group.match, [name])]
        if all(group_of(spec.groups, [name]) < number for name in taken):
            raise ConfigError(
                f"{at}: all {len(taken)} parameters it matches belong to groups before it",
                "a parameter belongs to the first group that matches it", "put the narrower group first",
            )  # fmt: skip

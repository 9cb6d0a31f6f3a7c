"""Parameter groups: which optimizer, learning rate and weight decay each parameter of a model gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Protocol

from paceline.errors import ConfigError, suggestion
from paceline.spec.optimizers import COMPANION, Use, rule_of, use_of
from paceline.spec.steps.update import GroupSpec, OptimizerSpec

if TYPE_CHECKING:
    from paceline.spec.journal.kinds import DecisionRecord


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
    lr_scale: float  # of the group, and of the parameter's place among the blocks
    weight_decay: float | None  # None: the optimizer knows no weight decay


@dataclass
class Treatments:
    """Tells how each parameter is trained: by the first group that matches one of its names, else by the spec."""

    spec: OptimizerSpec
    scales: Mapping[str, float] = field(default_factory=dict)  # of the learning rate, by a parameter's names

    def __post_init__(self) -> None:
        self._uses: dict[tuple[object, str], Use] = {}  # one optimizer for all groups that ask for the same

    def of(self, names: Iterable[str], dimensions: int) -> Treatment:
        """Return the treatment of a parameter with these names (several where it is tied) and dimensions."""
        names = list(names)
        number = group_of(self.spec.groups, names)
        scale = next((self.scales[name] for name in names if name in self.scales), 1.0)
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
        return Treatment(number, use, group.lr_scale * scale, decay if use.takes_decay else None)

    def _use(self, group: GroupSpec, dimensions: int) -> Use:
        name = group.name or self.spec.name
        rule = rule_of(name)
        own: Mapping[str, object] = {} if group.name and group.name != self.spec.name else self.spec.arguments
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


def frozen_groups(groups: Sequence[GroupSpec], step: int) -> frozenset[int]:
    """Return the numbers of the groups that stay as they are in a 1-based step."""
    until = [group.frozen_until.value if group.frozen_until else 0 for group in groups]
    after = [group.frozen_after.value if group.frozen_after else step for group in groups]
    return frozenset(at for at in range(len(groups)) if step <= until[at] or step > after[at])


def freezing(spec: OptimizerSpec, step: int) -> list[DecisionRecord]:
    """Return the decisions on groups of which this step is the first that trains them, or leaves them as they are."""
    if not spec.groups:  # asked in every step
        return []
    from paceline.spec.journal.kinds import DecisionRecord  # forty kinds of records, of which a plan needs none

    before, here = (frozen_groups(spec.groups, at) for at in (step - 1, step))
    changed = sorted(before ^ here) if step > 1 else sorted(here)
    said = {True: "as they are", False: "trained"}
    return [
        DecisionRecord("freezing", said[at in before] if step > 1 else None, said[at in here],
                       f"task.optimizer.groups has {', '.join(spec.groups[at].match)} so from step {step} on", None)
        for at in changed
    ]  # fmt: skip


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

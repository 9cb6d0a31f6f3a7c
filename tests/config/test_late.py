"""Classes whose methods are written when they are first called, against the standard library's own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from paceline.config.late import dataclass

Decorate = Callable[..., Any]


def classes(decorate: Decorate) -> dict[str, Any]:
    """Return classes of every shape, made with a decorator."""

    @decorate(frozen=True)
    class Base:
        KIND: ClassVar[str] = "base"
        first: int
        second: str = "two"

    @decorate(frozen=True)
    class Derived(Base):
        KIND: ClassVar[str] = "derived"
        listed: list[int] = dataclasses.field(default_factory=list)
        second: str = "other"
        unseen: float = dataclasses.field(default=0.5, compare=False, repr=False)
        by_name: int = dataclasses.field(default=3, kw_only=True)

    @decorate
    class Open:
        value: Any
        made: dict[str, int] = dataclasses.field(default_factory=dict, init=False)
        fixed: int = dataclasses.field(default=4, init=False)

        def __post_init__(self) -> None:
            self.made["seen"] = 1

    @decorate(frozen=True)
    class Own:
        value: float = 0.0

        def __repr__(self) -> str:
            return "own"

        def __hash__(self) -> int:
            return 7

    @decorate(frozen=True)
    class Empty:
        """Nothing."""

    @decorate(frozen=True)
    class Equal:
        value: int = 1

        def __eq__(self, other: object) -> bool:
            return True

    return {each.__name__: each for each in (Base, Derived, Open, Own, Empty, Equal)}


OURS, THEIRS = classes(dataclass), classes(dataclasses.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Base", (1,), {}), ("Base", (1, "x"), {}), ("Base", (), {}), ("Base", (1, "x", 2), {}), ("Base", (1,), {"no": 1}),
    ("Derived", (1,), {}), ("Derived", (1, "x", [2], 0.1), {"by_name": 9}), ("Derived", (1, "x", [2], 0.1, 9), {}),
    ("Open", ([1],), {}), ("Open", (), {}), ("Open", (1,), {"fixed": 2}), ("Own", (float("nan"),), {}),
    ("Empty", (), {}), ("Equal", (2,), {}),
]  # fmt: skip


def told(work: Callable[[], Any]) -> Any:
    """Return what work gives, an error as its kind and words."""
    try:
        return work()
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("name", "given", "named"), CALLS)
def test_a_class_is_as_the_standard_librarys(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    def seen(kind: Any) -> list[Any]:
        one, other = told(lambda: kind(*given, **named)), told(lambda: kind(*given, **named))
        if isinstance(one, tuple):
            return [one]
        found = [repr(one), one == other, one == 3, told(lambda: hash(one) == hash(other)), told(lambda: hash(one)),
                 dataclasses.asdict(one), told(lambda: dataclasses.replace(one, **named) == one),
                 [(each.name, each.init, each.repr, each.kw_only) for each in dataclasses.fields(kind)],
                 kind.__match_args__, copy.deepcopy(one) == one, vars(one)]  # fmt: skip
        for attribute in ("first", "second", "value", "unknown"):
            found += [
                told(lambda attribute=attribute: setattr(one, attribute, 5)),  # type: ignore[misc]
                told(lambda attribute=attribute: delattr(one, attribute)),
            ]  # type: ignore[misc]
        return found

    assert seen(OURS[name]) == seen(THEIRS[name])


@dataclass(frozen=True)
class Travels:
    """A class that pickle finds."""

    number: int
    text: str = ""


def test_what_another_process_has_made_is_compared_shown_and_kept_frozen() -> None:
    """Pickle calls no `__init__`: the class's methods may be unwritten until then."""
    made = Travels.__new__(Travels)
    vars(made).update(number=1, text="a")
    packed = pickle.dumps(made)
    assert pickle.loads(packed) == made and len({made, pickle.loads(packed)}) == 1
    assert repr(made) == "Travels(number=1, text='a')"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'number'"):
        made.number = 2  # type: ignore[misc]


def test_classes_of_both_decorators_inherit_from_each_other() -> None:
    @dataclasses.dataclass(frozen=True)
    class Below(Travels):
        more: int = 1

    @dataclass(frozen=True)
    class Lowest(Below):
        last: int = 2

    assert repr(Lowest(1)).endswith("Lowest(number=1, text='', more=1, last=2)")
    assert Lowest(1) == Lowest(1) and Lowest(1) != Below(1) and hash(Below(1)) == hash((1, "", 1))
    with pytest.raises(TypeError, match="non-frozen"):
        dataclass(type("Open", (Travels,), {}))


def test_a_method_is_written_once_and_in_its_own_place() -> None:
    @dataclass(frozen=True)
    class Few:
        number: int

    unwritten = vars(Few)["__init__"]
    Few(1)
    written = vars(Few)["__init__"]
    Few(2)
    assert written is not unwritten and vars(Few)["__init__"] is written and written.__name__ == "__init__"
    assert vars(Few)["__eq__"].__name__ == "unwritten"  # nobody has compared two

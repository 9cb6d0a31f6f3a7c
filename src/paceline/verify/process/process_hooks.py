"""Hooks on all modules or optimizers of a process, in which a proof has the layout's and one device's.

An average of weights that such a hook keeps follows both in turn. A run has one model and one optimizer, where the hook
may be right. The proof cannot tell, and says what it sees.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from paceline.spec.proof.records import CheckProof

# By torch's names, of which none is public; one that a later version lacks has no hooks.
TABLES = {
    "torch.nn.modules.module": ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks",
                                "_global_backward_hooks"),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}  # fmt: skip
WHAT_OF = {"torch.nn.modules.module": "modules", "torch.optim.optimizer": "optimizers"}
NOT_THE_USERS = ("paceline.", "torch.")
SEES_BOTH = (
    "; or it is {hooks}, registered for all {what} of the process: a proof has two of them, the layout's and one"
    " device's, and such a hook sees both. On the model itself (register_forward_hook), or on the optimizer that the"
    " task makes (register_step_post_hook), it sees its own"
)
HookTable = dict[int, Callable[..., object]]
TakenHooks = list[tuple[HookTable, HookTable]]  # a table, and what was in it


def hooks_of_all() -> dict[str, list[str]]:
    """Return the names of the user's hooks that are registered for all modules, and for all optimizers."""
    found: dict[str, list[str]] = {}
    for what, table in _tables():
        names = [name for hook in table.values() if not (name := ".".join(_name_of(hook))).startswith(NOT_THE_USERS)]
        if names:
            found[what] = list(dict.fromkeys([*found.get(what, []), *names]))
    return found


def naming_hooks(result: CheckProof) -> CheckProof:
    """Return the result, whose likely cause names hooks on all of a process where it is not equal and there are any."""
    first, hooks = result.first_difference, hooks_of_all()
    if first is None or not hooks:
        return result
    more = "".join(SEES_BOTH.format(hooks=", ".join(names), what=what) for what, names in hooks.items())
    return dataclasses.replace(result, first_difference=dataclasses.replace(first, likely=f"{first.likely}{more}"))


def take_hooks_of(modules: Collection[str]) -> TakenHooks:
    """Take away the hooks that some modules have registered for all of the process, and return what was there.

    A module that is imported again registers its hooks again, and the old ones know objects that nobody has any more.
    """
    taken: TakenHooks = []
    for _, table in _tables():
        taken.append((table, dict(table)))
        for key, hook in taken[-1][1].items():
            if _name_of(hook)[0] in modules:
                del table[key]
    return taken


def put_back(taken: TakenHooks) -> None:
    """Have the tables hold what they held."""
    for table, held in taken:
        table.clear()
        table.update(held)


def _tables() -> Iterator[tuple[str, HookTable]]:
    for where, tables in TABLES.items():
        for table in tables:
            found: Any = getattr(sys.modules.get(where), table, None)
            if found is not None:
                yield WHAT_OF[where], found


def _name_of(hook: Callable[..., object]) -> tuple[str, str]:
    """Return the module and the name of a hook, or of its class."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    named: Any = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(named.__module__), str(named.__qualname__)

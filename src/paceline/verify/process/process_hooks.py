"""Hooks on all modules or optimizers of a process, in which a proof has the layout's and one device's.

An average of weights that such a hook keeps follows both in turn. A run has one model and one optimizer, where the hook
may be right. The proof cannot tell, and says what it sees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch.nn.modules.module as of_modules
import torch.optim.optimizer as of_optimizers

from paceline.spec.proof.records import CheckProof

# By torch's names, of which none is public; one that a later version lacks has no hooks.
TABLES = {
    of_modules: ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks",
                 "_global_backward_hooks"),
    of_optimizers: ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}  # fmt: skip
OURS = ("paceline.", "torch.")
SAID = (
    "; or it is {hooks}, registered for all {what} of the process: a proof has two of them, the layout's and one"
    " device's, and such a hook sees both. On the model itself (register_forward_hook), or on the optimizer that the"
    " task makes (register_step_post_hook), it sees its own"
)


def hooks_of_all() -> dict[str, list[str]]:
    """Return the names of the user's hooks that are registered for all modules, and for all optimizers."""
    found: dict[str, list[str]] = {}
    for where, tables in TABLES.items():
        hooks = [hook for table in tables for hook in getattr(where, table, {}).values()]
        names = [name for hook in hooks if not (name := _name_of(hook)).startswith(OURS)]
        if names:
            found["modules" if where is of_modules else "optimizers"] = list(dict.fromkeys(names))
    return found


def naming_hooks(result: CheckProof) -> CheckProof:
    """Return the result, whose likely cause names hooks on all of a process where it is not equal and there are any."""
    first, hooks = result.first_difference, hooks_of_all()
    if first is None or not hooks:
        return result
    more = "".join(SAID.format(hooks=", ".join(names), what=what) for what, names in hooks.items())
    return dataclasses.replace(result, first_difference=dataclasses.replace(first, likely=f"{first.likely}{more}"))


def _name_of(hook: Callable[..., object]) -> str:
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"

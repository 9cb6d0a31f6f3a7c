"""What tests leave out where the installed torch is older than what they need."""

from __future__ import annotations

from paceline.plan.feasible.torch_version import EXPERTS, HALVED_BACKWARD, installed_torch, is_older
from paceline.spec.plan import Plan


def runs_here(plan: Plan) -> bool:
    """Return whether the installed torch is new enough for a plan; tests of many plans leave out those it is not."""
    too_old = plan.layout.ep > 1 and is_older(EXPERTS)
    return not too_old and not (plan.schedule == "zero-bubble" and is_older(HALVED_BACKWARD))


def is_refused_by_version(error: BaseException) -> bool:
    """Return whether an error says that the installed torch is too old; conftest.py skips a test that it ends."""
    installed = installed_torch()
    return (
        installed is not None
        and is_older(HALVED_BACKWARD)
        and f"torch {'.'.join(map(str, installed))} is installed" in str(error)
    )

"""The verdict of a proof in words where rounding has a part in it: what is off, and how far one device moves itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EQUAL, ILL_CONDITIONED, UNEQUAL = "equal", "ill-conditioned", "unequal"


def explained_by_rounding(parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what rounding alone makes miss a tolerance, of the part that it hides most of; None where nothing does.

    It is the record of conditioning.py with the part, and what that ran as.
    """
    found = [part for part in parts if part.get("ill_conditioned")]
    found.sort(key=lambda part: not part["ill_conditioned"]["coarse"])
    if not found:
        return None
    return {**found[0]["ill_conditioned"], "part": found[0]["part"], "ran_as": found[0]["ran_as"]}


def verdict_of(wrong: Any, rounding: dict[str, Any] | None) -> str:
    """Return the verdict of a proof that was made, from its first difference and what rounding explains."""
    if wrong is not None:
        return UNEQUAL
    return ILL_CONDITIONED if rounding is not None and rounding["coarse"] else EQUAL


def rounding_text(rounding: dict[str, Any]) -> str:
    """Return what rounding explains in words, such as "in fp32 gradients of w at step 1 differ by 3e-03, ..."."""
    others = f" ({rounding['places'] - 1} more like it)" if rounding["places"] > 1 else ""
    text = (
        f"in {rounding['dtype']} {rounding['quantity']} of {rounding['name']} at step {rounding['step']} differs by"
        f" {rounding['relative']:.0e}{others}, and {rounding['moved']:.0e} on one device whose weights are moved by"
        f" a unit in the last place of {rounding['format']}"
    )
    if rounding["where"]:
        text = f"computes parts in {rounding['format']}, such as {rounding['where']}: {text}"
    return text

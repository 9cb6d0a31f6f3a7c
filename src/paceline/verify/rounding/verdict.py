"""The verdict of a proof in words where rounding has a part: what is off, and how far rounding moves one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.spec.proof.records import FirstDifference, LoopProof, PartProof, Rounding

EQUAL, ILL_CONDITIONED, UNEQUAL = "equal", "ill-conditioned", "unequal"
ADVICE = "the plan is right, fp32 too coarse: smaller first weights, a smaller learning rate or a larger eps help"


def explained_by_rounding(parts: Sequence[PartProof]) -> Rounding | None:
    """Return the quantity that misses a tolerance by rounding alone; None where none does.

    Where several parts of a proof have one, it is that of a part whose numbers are too coarse, if any has such.
    """
    found = [
        dataclasses.replace(part.ill_conditioned, part=part.part, ran_as=part.ran_as)
        for part in parts
        if part.ill_conditioned is not None
    ]
    return min(found, key=lambda rounding: not rounding.coarse, default=None)


def verdict_of(wrong: FirstDifference | None, rounding: Rounding | None) -> str:
    """Return the verdict of a proof that was made, from its first difference and what rounding explains."""
    if wrong is not None:
        return UNEQUAL
    return ILL_CONDITIONED if rounding is not None and rounding.coarse else EQUAL


def rounding_text(rounding: Rounding) -> str:
    """Return what rounding explains in words, such as "in fp32 gradients of w at step 1 differs by 3e-03, ..."."""
    others = f" ({rounding.places - 1} more)" if rounding.places > 1 else ""
    of = "" if rounding.name == rounding.quantity else f" of {rounding.name}"
    text = (
        f"in {rounding.dtype} {rounding.quantity}{of} at step {rounding.step} differs by"
        f" {rounding.relative:.0e}{others}, where rounding weights to {rounding.format} moves one device by"
        f" {rounding.moved:.0e}"
    )
    if rounding.chaos is not None:
        nothing = ", of which fp32 says nothing" if rounding.dtype == "fp32" else ""
        text += f"; from step {rounding.chaos} on the program is chaotic{nothing}"
    if rounding.where:
        text = f"computes parts in {rounding.format}, such as {rounding.where}: {text}"
    return text


def loop_text(result: LoopProof) -> str:
    """Return what is found of somebody's loop in a line: how equal it is, or what is off and what to do."""
    first, rounding = result.first_difference, result.ill_conditioned
    if first is not None:
        return (
            f"NOT equal to one device: {first.quantity} of {first.name} at step {first.step} on rank"
            f" {first.rank} differs by {first.relative:.1e} in {result.dtype} (ratio {first.ratio:.6g});"
            f" likely cause: {result.mistake or first.likely}"
        )
    compared = {name: far for name, far in result.differences.items() if far is not None}
    sizes = ", ".join(f"{name} {far:.0e}" if far else f"{name} 0" for name, far in compared.items())
    if rounding is None:
        return f"equal to one device: {sizes}"
    if result.equal is None:
        return f"ill-conditioned: {rounding_text(rounding)}. fp64 can tell: model.double() for the proof"
    return f"{result.verdict} to one device: {sizes}; {rounding_text(rounding)}"

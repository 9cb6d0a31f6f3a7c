"""Diagnosis: from what differs, the family of mistakes that it usually comes from.

The families are those in which distributed training has gone wrong silently before (docs/planted-bugs.md lists them,
with a planted example of each). A diagnosis is a guess and says so; the quantity and the tensor are facts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from paceline.spec.plan import Plan
from paceline.spec.proof.records import FirstDifference
from paceline.task.models.chain import chain_of
from paceline.verify.compare.difference import Difference, times

FOLLOWS = ("gradients", "grad_norm", "weights")  # what another loss changes with it; a whole run compares no gradients
BF16_ROUNDING = (2.0**-12, 2.0**-6)  # relative differences of a few values rounded to 8 bits of mantissa
SIDEWAYS = 0.25  # of a difference without a direction, the largest part that changes the size
ALIKE = 4.0  # times the smallest of a model's relative differences by rounding is the largest

MISSING = "batch not as asked"  # the family of rows that nobody reads
LISTED = 8  # tensors that a proof names; the rest is counted
BESIDE_THE_COMPARISON = ("of_routers", "kind", "is_reproducible")  # of a difference; the family says so
ANOTHER_LOSS = "same samples, same weights, another loss: the forward pass differs"


@dataclass(frozen=True)
class Traits:
    """What about the model makes some mistakes possible."""

    has_dropout: bool
    has_batch_statistics: bool
    vectors: frozenset[str]  # names of parameters of fewer than two dimensions
    tied: frozenset[str]  # names of parameters that are used under more than one name


@dataclass(frozen=True)
class Diagnosis:
    """The family of mistakes, and the likely one in a sentence."""

    family: str
    likely: str


NOT_REPRODUCIBLE = Diagnosis(
    "not reproducible",
    "one device gives other numbers when it computes the same once more, so that nothing can equal it: memory that"
    " nobody wrote is read (torch.empty, numpy.empty), a clock, what other calls leave behind, or random numbers that"
    " go on from call to call, as of dropout in a loop of one's own, or of a transform of the data that holds a"
    " generator",
)


def told(first: Difference, wrong: Iterable[Difference], diagnosis: Diagnosis) -> FirstDifference:
    """Return the first difference with the names of those that are wrong in the same quantity, and what it means."""
    names = [d.name for d in wrong if d.quantity == first.quantity]
    known = {name: value for name, value in vars(first).items() if name not in BESIDE_THE_COMPARISON}
    return FirstDifference(**known, tensors=tuple(names[:LISTED]), tensors_in_all=len(names), **vars(diagnosis))


def traits_of(model: nn.Module) -> Traits:
    """Return the traits of a model that is not laid out yet."""
    modules = list(model.modules())
    first_names = {name for name, _ in model.named_parameters()}
    every_name = model.named_parameters(remove_duplicate=False)
    shared = {id(parameter) for name, parameter in every_name if name not in first_names}
    ends = _on_two_stages(model)
    return Traits(
        has_dropout=any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules),
        has_batch_statistics=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules),
        vectors=frozenset(name for name, p in model.named_parameters() if p.dim() < 2),
        tied=frozenset(name for name, p in model.named_parameters() if id(p) in shared or name in ends),
    )


def _on_two_stages(model: nn.Module) -> set[str]:
    """Return the names of the parameters that the first and the last stage of a pipeline both need."""
    chain = chain_of(model)
    both = [name for name in chain.first if name in chain.last] if chain else []
    return {f"{name}.{own}" for name in both for own, _ in model.get_submodule(name).named_parameters()}


def diagnose(wrong: list[Difference], compared: int, plan: Plan, traits: Traits) -> Diagnosis:
    """Return the likely cause of the differences that are too large, which come in order of cause.

    `wrong` are those of the first step that has any; `compared` is how many gradients were compared in a step.
    """
    first = wrong[0]
    if not first.is_reproducible:
        return NOT_REPRODUCIBLE
    same = [difference for difference in wrong if difference.quantity == first.quantity]
    if first.quantity == "samples":
        return _samples(first)
    if first.quantity == "initial":
        return _initial(same)
    if first.quantity == "weight":
        return _weight(first, plan)
    if first.quantity == "router":
        return _router(first, plan)
    if first.quantity == "loss":
        return _loss(wrong, plan, traits)
    if first.quantity == "gradients":
        return _gradients(same, compared, plan, traits)
    if first.quantity == "grad_norm":
        return _norm(first, plan)
    if first.quantity == "weights":
        return _update(same, traits)
    if first.name.endswith("e_score_correction_bias"):
        return Diagnosis("router statistics", "a selection bias follows other loads than those of the global batch")
    return Diagnosis("batch-norm statistics", "a buffer depends on each rank's own part of the batch")


def _router(first: Difference, plan: Plan) -> Diagnosis:
    if abs(first.ratio - 1) < 1e-6:
        return Diagnosis("router statistics", "tokens go to other experts than on one device")
    causes = [_degree(first.ratio, plan), "each counted twice, as by recompute" if abs(first.ratio - 2) < 1e-3 else ""]
    by = ", or ".join(filter(None, causes))
    if not by:
        return Diagnosis("router statistics", "experts get other numbers of tokens than on one device")
    return Diagnosis("router statistics", f"{first.ratio:.4g} times as many tokens are counted: {by}")


def _samples(first: Difference) -> Diagnosis:
    if not first.copies_agree:
        return Diagnosis("sample order", "several ranks read the same samples")
    if first.ratio < 1:
        return Diagnosis(MISSING, f"{1 - first.ratio:.0%} of the global batch is never read: rows dropped")
    return Diagnosis("sample order", "other samples are read than belong to these positions")


def _initial(same: list[Difference]) -> Diagnosis:
    changed = [d for d in same if not math.isfinite(d.relative)]
    if changed:
        return Diagnosis("tied weights", f"{changed[0].name} is a weight of its own here, or is missing: was it tied?")
    if not all(d.copies_agree for d in same):
        return Diagnosis("initial weights", "ranks start from different weights: drawn from a seed of their own")
    return Diagnosis("initial weights", "the weights at the start depend on the layout")


def _weight(first: Difference, plan: Plan) -> Diagnosis:
    shared = plan.layout.cp * plan.layout.tp * plan.layout.pp > 1  # the same rows on several ranks
    if shared and (degree := _degree(first.ratio, plan)):
        return Diagnosis("loss normalisation", f"{first.ratio:.4g} times as many items are counted: {degree}")
    if first.ratio > 1:
        likely = f"{first.ratio:.4g} times as many items are counted: a padding mask is lost, or stand-in rows count"
        return Diagnosis("padding and label masks", likely)
    likely = (
        "fewer items are counted than the batch holds: labels are lost, or means are averaged as if of equal weight"
    )
    return Diagnosis("loss normalisation", likely)


def _loss(wrong: list[Difference], plan: Plan, traits: Traits) -> Diagnosis:
    first = wrong[0]
    if first.of_routers:
        likely = f"loads and loss are right, and what is told of routers is not: by a factor {first.ratio:.4g}"
        return Diagnosis("router statistics", likely)
    if not any(d.quantity in FOLLOWS for d in wrong):
        by = _degree(first.ratio, plan) or "the normalisation of the logged loss"
        return Diagnosis("reported loss", f"only the reported loss is off, by a factor {first.ratio:.4g}: {by}")
    if traits.has_dropout:
        likely = f"{ANOTHER_LOSS}, as by dropout masks that depend on the rank or on where a run starts"
        return Diagnosis("dropout", likely)
    if traits.has_batch_statistics:
        return Diagnosis(
            "batch-norm statistics", f"{ANOTHER_LOSS}, as by statistics of each rank's own part of the batch"
        )
    likely = f"{ANOTHER_LOSS}, as by labels or positions that are shifted"
    if plan.layout.tp > 1:
        return Diagnosis("forward pass", f"{likely}, or by parts that are not summed over tp")
    if plan.layout.cp > 1:
        return Diagnosis("forward pass", f"{likely}, or by keys of other ranks that are not seen")
    return Diagnosis("labels", likely)


def _gradients(same: list[Difference], compared: int, plan: Plan, traits: Traits) -> Diagnosis:
    first = same[0]
    ratios = [d.ratio for d in same]
    if all(d.is_scaled for d in same) and max(ratios) - min(ratios) < 1e-3 * abs(ratios[0]) and len(same) > 1:
        named = _degree(ratios[0], plan)
        likely = f"every gradient is {times(ratios[0])} the reference's" + (f": {named}" if named else "")
        return Diagnosis("gradient scale", likely)
    if not all(d.copies_agree for d in same):
        part = "some of the" if len(same) < compared else "the"
        return Diagnosis("gradients not summed", f"copies differ in {part} gradients, not reduced: {_names(same)}")
    if len(same) > compared // 2 and _looks_rounded(same):
        return Diagnosis("half-reduced precision", "differences have the size of bf16 rounding: gradients are rounded")
    if traits.tied and {d.name for d in same} <= traits.tied:
        return Diagnosis("tied weights", f"only {_names(same)} differs, which is used in two places")
    if traits.has_dropout:
        return Diagnosis(
            "dropout", "the loss is right and gradients are not: the backward pass draws other masks, or sums differ"
        )
    if first.step > 1:
        return Diagnosis("state between steps", "right in the first step: gradients of the last step are kept, or lost")
    likely = (
        "the loss is right and sums are not: parts are left out, counted twice, averaged as equals, or clipped before"
        " they are summed"
    )
    if plan.layout.tp > 1:
        likely += "; or not summed over tp"
    return Diagnosis("gradient normalisation", likely)


def _norm(first: Difference, plan: Plan) -> Diagnosis:
    if not first.copies_agree:
        return Diagnosis("gradient norm", "ranks clip by different norms: that of their own shard is not summed")
    squared = _degree(first.ratio**2, plan)
    named = f"its square is off by {squared}" if squared else "what several ranks hold is not counted once"
    digits = ".4g" if abs(first.ratio - 1) > 1e-3 else ".6f"
    return Diagnosis(
        "gradient norm", f"gradients are right, their norm is {first.ratio:{digits}} times the reference's: {named}"
    )


def _update(same: list[Difference], traits: Traits) -> Diagnosis:
    if not all(d.copies_agree for d in same):
        return Diagnosis("update", "copies drift apart: not every rank makes the same update")
    if all(d.name in traits.vectors for d in same):
        only = f"only {_names(same)}, of one dimension, {'differ' if len(same) > 1 else 'differs'}"
        return Diagnosis("optimizer groups", f"{only}: weight decay on norms or biases?" if _decayed(same) else only)
    return Diagnosis(
        "optimizer", "gradients and norm are right, weights are not: lr, betas, eps, decay or clipping differ"
    )


def _looks_rounded(same: list[Difference]) -> bool:
    """Return whether differences have the size of bf16 rounding and, as rounding, no direction.

    What is weighed wrongly changes the size of a gradient about as much as its values; rounding does so only where
    there are few of these.
    """
    small, large = BF16_ROUNDING
    sizes = [d.relative for d in same]
    sideways = sum(abs(d.ratio - 1) <= SIDEWAYS * d.relative for d in same)
    return small < min(sizes) and max(sizes) < min(large, ALIKE * min(sizes)) and 2 * sideways > len(same)


def _decayed(same: list[Difference]) -> bool:
    """Return whether vectors have all become smaller by one amount, as norms do that start at one and are decayed."""
    off = [d.reference - d.ours for d in same]
    return len(off) > 1 and min(off) > 0 and max(off) - min(off) <= 1e-2 * max(off)


def _degree(factor: float, plan: Plan) -> str:
    """Return which degree of the plan a factor is, or the inverse of; empty where it is none."""
    degrees = {**plan.layout.mesh_shape, "data": plan.layout.data_degree, "accumulation": plan.accumulation}
    for name, degree in degrees.items():
        if degree > 1 and any(abs(factor / by - 1) < 1e-3 for by in (degree, 1 / degree)):
            return f"the {name} degree {degree}" + (" inverted" if factor < 1 else "")
    return ""


def _names(same: Iterable[Difference], most: int = 3) -> str:
    names = [d.name for d in same]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

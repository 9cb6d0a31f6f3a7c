"""The proof: what is known of how a plan's numbers stand to one device's. Frozen data, declared once.

The checks make these records, `plain.py` writes and reads them, and docs/reference/proof.md tells the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from paceline.spec.journal.record import Numbers, Told, Words

# The checks that there are (verify/process/checks.py has what each does), as a proof's record names them.
CheckName: TypeAlias = Literal[
    "steps", "low", "low, brief", "plain attention", "copies", "story", "story on copies", "rates", "whole batch"
]


@dataclass(frozen=True)
class Deviation:
    """Where the numbers of a plan and of one device part."""

    quantity: Annotated[str, Told("what differs: `samples`, `loss`, `gradients`, `weights`, ...")]
    name: Annotated[str, Told("the tensor, or the number")]
    step: Annotated[int, Told("the step in which it shows, 0 before the first")]


@dataclass(frozen=True)
class FirstDifference(Deviation):
    """The first difference that is too large, in order of cause, with what it usually comes from."""

    rank: Annotated[int, Told("where it is farthest off")]
    relative: Annotated[float, Told("norm of the difference over the norm of the reference")]
    ratio: Annotated[float, Told("size over size of the reference: a degree of the layout means a wrong scale")]
    ours: Annotated[float, Told("the element that differs most")]
    reference: Annotated[float, Told("what it is on one device")]
    copies_agree: Annotated[bool, Told("whether ranks that hold copies of it hold the same numbers")]
    tensors: Annotated[Words, Told("all of that quantity and step that are too far off, the first few")]
    tensors_in_all: Annotated[int, Told("how many these are")]
    family: Annotated[str, Told("the family of mistakes that it looks like")]
    likely: Annotated[str, Told("the likely cause in words")]
    part: Annotated[str, Told("the part of the proof that found it")] = ""
    dtype: Annotated[str, Told("the precision in which it was found")] = ""
    ran_as: Annotated[str, Told("the layout of the twin that has it")] = ""
    resumed: Annotated[str, Told("of a whole run: after which resume, empty before the first")] = ""
    in_journal: Annotated[bool, Told("of a whole run: whether it is its journal that says otherwise")] = False


@dataclass(frozen=True)
class Rounding(Deviation):
    """The first difference that rounding alone explains: one device moves as far (verify/rounding/conditioning.py)."""

    dtype: Annotated[str, Told("the precision of the comparison")]
    relative: Annotated[float, Told("how far it is off")]
    tolerance: Annotated[float, Told("how far it may be where nothing explains it")]
    moved: Annotated[float, Told("how far one device moves whose weights are moved by a unit in the last place")]
    of_bound: Annotated[float, Told("the largest part that a difference has of what rounding explains")]
    chaos: Annotated[int | None, Told("the first step that is chaotic")]
    places: Annotated[int, Told("how many differences it explains")]
    format: Annotated[str, Told("the narrowest format that one device computes in")]
    where: Annotated[str, Told("the part of the model that does, empty where it is all of it")]
    coarse: Annotated[bool, Told("whether fp32's tolerances are missed too: then the program is ill-conditioned")]
    fp64: Annotated[Numbers | None, Told("the largest differences of the same comparison in fp64")] = None
    part: Annotated[str, Told("the part of the proof")] = ""
    ran_as: Annotated[str, Told("the layout of the twin")] = ""


@dataclass(frozen=True)
class CheckProof:
    """What one check finds of one plan (verify/process/checks.py)."""

    equal: Annotated[bool, Told("whether nothing is too far off")]
    dtype: Annotated[str, Told("the precision of the comparison")]
    steps: Annotated[int, Told("updates that were compared")]
    seconds: Annotated[float, Told("what it took", "s")]
    differences: Annotated[Numbers, Told("the largest of each quantity", "relative")]
    first_difference: Annotated[FirstDifference | None, Told("null, or what is wrong first")]
    ill_conditioned: Annotated[Rounding | None, Told("null, or what rounding explains")] = None
    left_out: Annotated[str, Told("why nothing was compared, or no numbers were; empty where all was")] = ""
    of_bound: Annotated[float | None, Told("in low precision: the largest part of what a difference may be")] = None
    not_tried: Annotated[Words, Told("thresholds of the user's code that numbers were on one side of alone")] = ()


@dataclass(frozen=True)
class PartProof:
    """One part of a proof: a check on one twin."""

    part: Annotated[str, Told("its name")]
    check: Annotated[str, Told("the check that it is")]
    ran_as: Annotated[str, Told("the layout of the twin")]
    dtype: Annotated[str, Told("the precision of the comparison")]
    equal: Annotated[bool, Told("whether nothing is too far off")]
    seconds: Annotated[float, Told("what it took", "s")]
    left_out: Annotated[str, Told("why nothing was compared, or no numbers were; empty where all was")]
    ill_conditioned: Annotated[Rounding | None, Told("null, or what rounding explains")]
    steps: Annotated[int, Told("updates that were compared")]
    not_tried: Annotated[Words, Told("thresholds of the user's code that numbers were on one side of alone")] = ()


@dataclass(frozen=True)
class Proof:
    """Whether one layout computes the numbers of one device."""

    layout: Annotated[str, Told("the layout that was asked for")]
    equal: Annotated[bool, Told("whether every part is equal")]
    verdict: Annotated[str | None, Told("`equal`, `ill-conditioned` or `unequal`; null where none was made")]
    seconds: Annotated[float, Told("what it took", "s")]
    steps: Annotated[int, Told("updates that were compared")]
    ran_as: Annotated[str | None, Told("the layouts of the twins, null where none ran")] = None
    parts: Annotated[tuple[PartProof, ...], Told("the parts, up to the first that is not equal")] = ()
    dtypes: Annotated[Mapping[str, Numbers], Told("by precision: the largest difference of each quantity")] = field(
        default_factory=dict
    )
    differences: Annotated[Numbers, Told("the largest of each quantity in fp32 and fp64", "relative")] = field(
        default_factory=dict
    )
    first_difference: Annotated[FirstDifference | None, Told("null, or what is wrong first")] = None
    sync: Annotated[str, Told("how copies are kept in step; empty where they are summed exactly in every step")] = ""
    ill_conditioned: Annotated[Rounding | None, Told("null, or what rounding explains")] = None
    refused_because: Annotated[str | None, Told("null, or why the layout cannot be had")] = None
    error: Annotated[str | None, Told("null, or the error that ended the proof, as when a rank died")] = None


@dataclass(frozen=True)
class LoopProof:
    """Whether somebody's own loop computes what one device does (verify/loops/adapter.py)."""

    equal: Annotated[bool | None, Told("null where it is ill-conditioned in fp32: fp64 can tell")]
    verdict: Annotated[str, Told("`equal`, `ill-conditioned` or `unequal`")]
    dtype: Annotated[str, Told("the precision of the loop's parameters")]
    steps: Annotated[int, Told("batches that it was given")]
    seconds: Annotated[float, Told("what it took", "s")]
    differences: Annotated[Mapping[str, float | None], Told("the largest of each quantity, null if not compared")]
    first_difference: Annotated[FirstDifference | None, Told("null, or what is wrong first")]
    ill_conditioned: Annotated[Rounding | None, Told("null, or what rounding explains")]
    mistake: Annotated[str | None, Told("what the loop does instead, where a known mistake explains it")]
    text: Annotated[str, Told("all of it in a line")] = ""


RECORDS = (Proof, PartProof, FirstDifference, Rounding, LoopProof)

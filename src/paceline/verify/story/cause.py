"""What a difference in a story usually comes from: the families of mistakes that only a whole run shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from paceline.spec.proof.records import FirstDifference
from paceline.verify.compare.diagnosis import MISSING, NOT_REPRODUCIBLE
from paceline.verify.story.evaluated import ITEMS, LOSS
from paceline.verify.story.plans import CHOSEN, Act
from paceline.verify.story.reference import NOISE_NUMBERS, journal_name

CHANGES = (
    "the model changes this weight while it is evaluated, and a checkpoint or an export that follows has it changed: it"
    " is to compute with a changed copy, or to change nothing (of transformers' RWKV: rescale_every = 0)"
)
STATE = ("weights", "buffers", "moments")
MEASURED_NOISE = set(map(journal_name, NOISE_NUMBERS))  # which nothing but the journal has


def caused(first: FirstDifference | None, act: Act, changed: Collection[str] = frozenset()) -> FirstDifference | None:
    """Return the first difference with its family and likely cause, where a whole run says more than a single step.

    `resumed` says after which resume it was found; it is empty for the start that writes the checkpoint. `changed` are
    the weights that evaluations change on one device too.
    """
    if first is None:
        return None
    family, likely = _cause(first, act) or (first.family, first.likely)
    if first.quantity == "weights" and first.name in changed:
        family, likely = "evaluation", CHANGES
    when = f"{act.resumed}: {likely}" if act.resumed else likely
    return dataclasses.replace(first, family=family, likely=when, resumed=act.resumed)


def _cause(first: FirstDifference, act: Act) -> tuple[str, str] | None:
    quantity, number = first.quantity, first.step
    if first.family == NOT_REPRODUCIBLE.family:
        return None
    if first.name in MEASURED_NOISE:
        return "growth", "the batch grows by a noise of gradients that is not what one device measures of them"
    if first.in_journal:
        return "record", "the journal does not say what the run did"
    if quantity == "evaluation":
        return "evaluation", _evaluation(first, act)
    if act.selects and first.name == CHOSEN:
        return "selection", "other candidates are trained on than those that their losses draw"
    if act.selects and quantity == "loss":
        return "selection", f"{first.likely}; or candidates are scored, or weighted, otherwise than by their losses"
    if quantity == "position":
        return "resume state", "the run does not go on at the sample and step that come next"
    if first.family == MISSING and len(set(act.sizes)) > 1:
        return "growth", f"a batch has {1 - first.ratio:.0%} fewer samples than task.growth says"
    if quantity == "lr":
        if act.resumed:
            return "learning rate", "the schedule is not the unbroken run's: it starts again, lags, or was lost"
        return "learning rate", "the schedule is not the task's: it starts at another step, or runs fast or slow"
    if act.resumed and number == act.saved and quantity in STATE:
        what = {"moments": "the optimizer's moments are"}.get(quantity, f"{quantity} are")
        return "checkpoint", f"{what} not those that were trained: they are saved or loaded wrongly, or not at all"
    if quantity == "moments":
        return "optimizer", "weights are right and what the optimizer keeps of them is not"
    if act.resumed and quantity == "samples":
        return "resume state", "other samples are read than come next"
    return None


def _evaluation(first: FirstDifference, act: Act) -> str:
    if first.name not in (LOSS, ITEMS):
        return f"the loss on held-out samples is right and their {first.name} is not: its sums are not all ranks'"
    what = "the loss on" if first.name == LOSS else "the number of items of"
    layout = act.plan.layout
    degrees = {"the number of ranks": act.world.size, "the data degree": layout.data_degree, **layout.mesh_shape}
    for name, degree in degrees.items():
        if degree > 1 and any(abs(first.ratio / by - 1) < 1e-3 for by in (degree, 1 / degree)):
            return f"{what} held-out samples is off by {name}, {degree}"
    is_not = "their mean" if first.name == LOSS else "theirs"
    kept = (
        "; or the model keeps what an evaluation before it has left, which no start finds again" if act.resumed else ""
    )
    return f"{what} held-out samples is not {is_not}: some are left out, counted twice, or averaged as equals{kept}"

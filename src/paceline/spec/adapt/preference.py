"""How pairs of a preferred and a rejected answer are learnt from: the options of the objective 'dpo'."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option

DPO = "dpo"
LOSSES = ("sigmoid", "ipo", "hinge")


@dataclass(frozen=True)
class PreferenceSpec(Declared, table="task.preference"):
    """The `[task.preference]` table, of the objective 'dpo' (Rafailov et al. 2023, arXiv:2305.18290)."""

    loss: str = option(
        "sigmoid",
        "the loss of a pair: 'sigmoid' (DPO), 'ipo' (a squared distance from 1 / (2 beta), of log-probabilities that"
        " are means over an answer's tokens; arXiv:2310.12036) or 'hinge' (arXiv:2305.10425)",
        choices=LOSSES,
    )
    beta: float = option(0.1, "how strongly a model is held to its reference: larger, closer", above=0.0)
    label_smoothing: float = option(
        0.0,
        "part of the pairs that are taken to be labelled the wrong way round (cDPO)",
        minimum=0.0,
        maximum=0.5,
    )

"""Programs with parts of torch that few use: none of them trains otherwise than in a plain loop without a word."""

from __future__ import annotations

import pytest
from foreign_catalogue import ODD_PROGRAMS, Foreign
from foreign_held import look
from write_foreign import verdict

# What a row comes to, where that is not "same": the proof says "not equal"; it draws numbers of its own, the same as
# on one device; an error that says what to do; a refusal before it trains.
VERDICTS = {
    **dict.fromkeys(("spectral norm by hooks", "curriculum", "remembers", "in turn", "by rows"), "told"),
    **dict.fromkeys(("counts evaluations", "expert choice"), "told"),
    **dict.fromkeys(("thawing", "reversible", "gradient meter"), "failed"),
    **dict.fromkeys(("REINFORCE", "by frequency", "mean in the backward pass", "annealing"), "told"),
    **dict.fromkeys(("dropout computed again", "numpy noise", "Python's chance"), "random"),
    **dict.fromkeys(("numpy's choice", "Python's order", "random weights", "RReLU"), "random"),
    **dict.fromkeys(("compiled part", "penalty for each row", "one penalty"), "failed"),
    **dict.fromkeys(("first batch", "adaptive softmax", "sparse codes"), "failed"),
    **dict.fromkeys(("sparse buffer", "inner steps", "late head", "extra state"), "refused"),
}


@pytest.mark.deep
@pytest.mark.parametrize("row", ODD_PROGRAMS, ids=lambda row: row.name)
def test_an_odd_program_trains_as_in_a_plain_loop_or_is_told(row: Foreign) -> None:
    record = look(row, whole=False)
    assert verdict(record) == VERDICTS.get(row.name, "same"), record

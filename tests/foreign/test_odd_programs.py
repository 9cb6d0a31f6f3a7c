"""Programs and families beside the table: none of them trains otherwise than on one device without a word.

Programs with parts of torch that few use are held against a plain loop; of families with state spaces, recurrences,
dropout and noise of routers every axis that is offered is proven.
"""

from __future__ import annotations

import pytest
from foreign_catalogue import MORE_FAMILIES, ODD_PROGRAMS, Foreign
from foreign_held import every_axis, look
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


OPEN = {  # beside dp_replicate and dp_shard, which all have
    **dict.fromkeys(("Jamba", "Jamba with dropout", "GraniteMoeHybrid", "NemotronH"), ("ep",)),
    **dict.fromkeys(("Qwen3Next", "MiniMax"), ("pp", "ep")),
    **dict.fromkeys(("Phimoe", "Phimoe with noise"), ("cp", "ep")),
    **dict.fromkeys(("Llama with dropout", "Phi with dropout", "GPTNeoX with dropout"), ("tp", "pp")),
    "Mixtral with noise": ("cp", "pp", "ep"),
}
# Its experts draw masks for as many tokens as chance sends them: no sample has these numbers, and no axis is offered.
CLOSED = ("Switch",)


def params() -> list[object]:
    marks = {True: (), False: (pytest.mark.deep,)}
    return [pytest.param(row, id=row.name, marks=marks[row.slice]) for row in MORE_FAMILIES]


@pytest.mark.parametrize("row", params())
def test_every_axis_that_is_offered_is_proven_equal_or_refused_in_words(row: Foreign) -> None:
    opened, proofs = every_axis(row)
    assert opened == ([] if row.name in CLOSED else ["dp_replicate", "dp_shard", *OPEN.get(row.name, ())])
    assert len(proofs) == len(opened)
    for layout, proof in proofs.items():
        assert proof.get("equal"), (layout, proof)

"""State spaces, recurrences, dropout and noise of routers: every axis that is offered to a family is proven equal."""

from __future__ import annotations

import pytest
from foreign_catalogue import MORE_FAMILIES, Foreign
from foreign_held import every_axis

OPEN = {  # beside dp_replicate and dp_shard, which all have
    **dict.fromkeys(("Jamba", "Jamba with dropout", "GraniteMoeHybrid", "NemotronH"), ("ep",)),
    **dict.fromkeys(("Qwen3Next", "MiniMax"), ("pp", "ep")),
    **dict.fromkeys(("Phimoe", "Phimoe with noise"), ("cp", "ep")),
    **dict.fromkeys(("Llama with dropout", "Phi with dropout", "GPTNeoX with dropout"), ("tp", "pp")),
    "Mixtral with noise": ("cp", "pp", "ep"),
}
# Its experts draw masks for as many tokens as chance sends them: no sample has these numbers.
REFUSED = {"Switch": "random numbers that belong to no sample"}


def params() -> list[object]:
    marks = {True: (), False: (pytest.mark.deep,)}
    return [pytest.param(row, id=row.name, marks=marks[row.slice]) for row in MORE_FAMILIES]


@pytest.mark.parametrize("row", params())
def test_every_axis_that_is_offered_is_proven_equal_or_refused_in_words(row: Foreign) -> None:
    opened, proofs = every_axis(row)
    assert opened == ["dp_replicate", "dp_shard", *OPEN.get(row.name, ())]
    assert len(proofs) == len(opened)
    for layout, proof in proofs.items():
        if row.name in REFUSED:
            assert REFUSED[row.name] in proof.get("failed", ""), (layout, proof)
        else:
            assert proof.get("equal"), (layout, proof)

"""The split into stages: as good as trying them all, and what published splits look like."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import block

from paceline.errors import ConfigError
from paceline.plan.feasible.split import split_by_cost, split_in_order
from paceline.spec.plan import counts_text, parse_stages
from paceline.spec.profile import ModelProfile
from paceline.spec.task import ModelSpec
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder


def chain(work: list[int], parameters: list[int], first: int = 0, last: int = 0) -> ModelProfile:
    """Return a chain of blocks with these FLOPs and parameters, between an embedding and a head."""
    blocks = [
        block(f"layers.{i}", matmul_flops=float(f), parameters=p, attention_flops=0.0)
        for i, (f, p) in enumerate(zip(work, parameters, strict=True))
    ]
    ends = [
        block(name, name, False, matmul_flops=float(flops), parameters=0, attention_flops=0.0)
        for name, flops in (("embedding", first), ("head", last))
    ]
    return ModelProfile("chain", (ends[0], *blocks, ends[1]), 8, "analytic")


def largest(costs: list[int], sizes: tuple[int, ...], first: int, last: int) -> int:
    bounds = [0, *itertools.accumulate(sizes)]
    sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise(bounds)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_split_is_better(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    work = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    parameters = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    first, last = data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12))
    stages = data.draw(st.integers(1, count))
    got = split_by_cost(chain(work, parameters, first, last), stages)
    assert len(got) == stages and sum(got) == count and min(got) >= 1
    cuts = itertools.combinations(range(1, count), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, count))) for cut in cuts]
    scores = [(largest(work, sizes, first, last), largest(parameters, sizes, 0, 0)) for sizes in every]
    assert (largest(work, got, first, last), largest(parameters, got, 0, 0)) == min(scores)


def test_too_few_blocks_have_no_split_and_equal_ones_an_even_one() -> None:
    assert split_by_cost(chain([1] * 3, [1] * 3), 4) == ()
    assert split_by_cost(chain([1] * 10, [1] * 10), 5) == (2, 2, 2, 2, 2)
    assert sorted(split_by_cost(chain([1] * 10, [1] * 10), 4)) == [2, 2, 3, 3]


def test_llama_405b_loses_a_layer_at_both_ends() -> None:
    # As its authors split it (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2): 126 layers, 16 stages.
    model = profile_decoder(resolve_decoder(ModelSpec("llama-405b"), 0, 8192), 8192)
    assert split_by_cost(model, 16) == (7, *[8] * 14, 7)


def test_stages_in_words_and_back() -> None:
    assert counts_text((7, 8, 8, 8, 7)) == "7+3x8+7" and parse_stages("7+3x8+7") == (7, 8, 8, 8, 7)
    assert parse_stages("") == () and parse_stages("3 + 2") == (3, 2)
    for wrong in ("3+two", "3,2", "2x", "-1", "0x3", "999999999999x1"):
        with pytest.raises(ConfigError, match="no split"):
            parse_stages(wrong)


@given(st.lists(st.integers(1, 40), max_size=12))
def test_what_a_suggested_command_says_is_read_back(sizes: list[int]) -> None:
    assert parse_stages(counts_text(tuple(sizes))) == tuple(sizes)


def test_stages_that_are_filled_in_order_are_nanotrons() -> None:
    # Llama 3 8B in millions of multiplications a token: a layer 4 x 4096^2 + 3 x 4096 x 14336, the head 4096 x 128256.
    # Over 8 stages of 1,039 each: five layers pass the first part (4 are 973), nine the second, 13 the third, 18 ...
    model = chain([243] * 32, [1] * 32, first=0, last=525)
    assert split_in_order(model, 8) == (5, 4, 4, 5, 4, 4, 4, 2), "the head counts as two layers, the embedding as none"
    even = chain([10] * 8, [1] * 8)
    assert split_in_order(even, 2) == (5, 3), "a part that is just full is not passed"
    assert split_in_order(chain([1] * 4, [1] * 4, last=12), 4) == (4, 0, 0, 0), "a head that is all of the cost"

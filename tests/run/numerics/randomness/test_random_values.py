"""Random words and what operators make of them: even, independent, and nowhere the same twice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.run.numerics.randomness.hashing import fill, owners_of, places_between
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.numerics.randomness.operators import RULES, integers
from paceline.run.numerics.randomness.shares import Pattern, RankPart, SampleRows, share_of
from paceline.run.parallel.context.zigzag import chunk_tokens
from paceline.task.profile.operators.drawing import BY_SAMPLE
from paceline.task.profile.traced import profile_module

pytestmark = pytest.mark.filterwarnings("ignore:.*whose owner is a guess")  # no program was looked at here
CPU = torch.device("cpu")
SIGMAS = 5.0  # seeds are fixed: what is this far off is a fault, not chance


def words(call: int, positions: list[int], *inner: int) -> Tensor:
    out = torch.empty(len(positions), math.prod(inner), dtype=torch.int32)
    fill(out, call, owners_of(np.array(positions)), None, 1, lambda chunk, word: chunk.copy_(word), inner)
    return out


def sigmas(counts: Tensor) -> float:
    """Return how many standard deviations a chi-square of counts is from that of even ones."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float(abs(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def bins(values: Tensor, bits: int) -> Tensor:
    """Return the upper bits of words as whole numbers."""
    return (values.flatten().long() >> (32 - bits)) + 2 ** (bits - 1)


def test_words_are_even_and_neighbours_independent() -> None:
    one = words(5, [0], 1 << 19)[0]
    assert sigmas(torch.bincount(bins(one, 10), minlength=1024).double()) < SIGMAS
    for apart in (1, 2, 3, 16, 64, 768, 4096, 65536):
        pairs = bins(one[:-apart], 6) * 64 + bins(one[apart:], 6)
        assert sigmas(torch.bincount(pairs, minlength=4096).double()) < SIGMAS, apart


def test_words_of_rows_and_columns_are_even_and_neighbours_independent() -> None:
    for inner in ((1024, 512), (8, 256, 256), (2, 4, 256, 256)):
        one = words(5, [0], *inner).view(-1, *inner[-2:])
        assert sigmas(torch.bincount(bins(one, 10), minlength=1024).double()) < SIGMAS
        assert len(one.unique()) > 0.9998 * one.numel(), "words meet by chance"
        for dim, apart in itertools.product(range(3), (1, 2, 4)):
            if (size := one.shape[dim] - apart) > 0:
                pairs = bins(one.narrow(dim, 0, size), 6) * 64 + bins(one.narrow(dim, apart, size), 6)
                assert sigmas(torch.bincount(pairs, minlength=4096).double()) < SIGMAS, (inner, dim, apart)


def test_samples_calls_and_steps_are_independent() -> None:
    by_sample = words(5, list(range(128)), 4096)
    by_call = torch.stack([words(call, [7], 4096)[0] for call in range(128)])
    for found in (by_sample, by_call):
        pairs = bins(found[:-1], 6) * 64 + bins(found[1:], 6)
        assert sigmas(torch.bincount(pairs, minlength=4096).double()) < SIGMAS


def test_a_long_sample_repeats_nothing() -> None:
    long = words(3, [11], 1 << 21)[0]
    assert len(torch.unique(long)) == len(long)
    # Words of two samples meet by chance, one in 2^32 pairs, and never in a row.
    other = words(3, [12], 1 << 21)[0]
    assert not torch.isin(long.long() * 2**32 + long.roll(1).long(), other.long() * 2**32 + other.roll(1).long()).any()


def drawn(function: object, positions: list[int], step: int = 1, seed: int = 7) -> Tensor:
    randomness = SampleRandomness(seed, CPU, Survey())
    with randomness.during(SampleRows(np.array(positions), step)):
        return function(len(positions))  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout_keeps_what_it_should(dtype: torch.dtype) -> None:
    found = drawn(lambda rows: F.dropout(torch.ones(rows, 1 << 17, dtype=dtype), 0.1), [0, 1, 2])
    kept = (found != 0).double().mean(1)
    assert ((kept - 0.9).abs() < SIGMAS * math.sqrt(0.09 / (1 << 17))).all()
    assert found[found != 0].unique().item() == pytest.approx(1 / 0.9, rel=torch.finfo(dtype).eps)
    double = drawn(lambda rows: F.dropout(torch.ones(rows, 1 << 17).double(), 0.1), [0, 1, 2])
    assert torch.equal(found != 0, double != 0), "a mask does not depend on the precision"


def test_plan_and_run_agree_on_what_belongs_to_samples() -> None:
    assert {name.partition(".")[0] for name in RULES} == BY_SAMPLE


def poisson_noise(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) * torch.poisson(torch.ones(len(batch), 1))).sum(), len(batch)


def dropped(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return F.dropout(model(batch), 0.3).sum(), len(batch)


def test_the_planner_names_what_belongs_to_no_sample() -> None:
    closed = profile_module(nn.Linear(3, 3), torch.ones(2, 3), poisson_noise, 1).closed_axes or {}
    assert all("poisson" in closed[axis] for axis in ("dp_replicate", "dp_shard", "pp", "accumulation"))
    closed = profile_module(nn.Linear(3, 3), torch.ones(2, 3), dropped, 1).closed_axes or {}
    assert "dp_shard" not in closed and "accumulation" not in closed


MOMENTS = {  # mean and standard deviation of what torch's operators give
    "uniform": (lambda rows: torch.rand(rows, 1 << 15), 0.5, math.sqrt(1 / 12)),
    "uniform, fp64": (lambda rows: torch.rand(rows, 1 << 15).double().uniform_(-1, 3), 1.0, 4 * math.sqrt(1 / 12)),
    "normal": (lambda rows: torch.randn(rows, 1 << 15), 0.0, 1.0),
    "normal, fp64": (lambda rows: torch.randn(rows, 1 << 15, dtype=torch.float64), 0.0, 1.0),
    "normal, bf16": (lambda rows: torch.randn(rows, 1 << 15, dtype=torch.bfloat16), 0.0, 1.0),
    "normal, scaled": (lambda rows: torch.normal(torch.full((rows, 1 << 15), 3.0), 2.0), 3.0, 2.0),
    "exponential": (lambda rows: torch.empty(rows, 1 << 15).exponential_(2.0), 0.5, 0.5),
    "integers": (lambda rows: torch.randint(2, 12, (rows, 1 << 15)).double(), 6.5, math.sqrt(99 / 12)),
    "geometric": (lambda rows: torch.empty(rows, 1 << 15).geometric_(0.25), 4.0, math.sqrt(12)),
    "choices": (lambda rows: torch.ones(rows, 4).multinomial(1 << 14, replacement=True).double(), 1.5, math.sqrt(1.25)),
    "Bernoulli": (lambda rows: torch.full((rows, 1 << 15), 0.3).bernoulli(), 0.3, math.sqrt(0.21)),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_are_those_of_torch(name: str) -> None:
    function, mean, deviation = MOMENTS[name]
    found = drawn(function, [3, 4, 5, 6]).double()
    error = deviation / math.sqrt(found.numel())
    assert abs(float(found.mean()) - mean) < SIGMAS * error
    assert float(found.std()) == pytest.approx(deviation, rel=0.02)
    correlation = torch.corrcoef(found)
    assert (correlation - torch.eye(4)).abs().max() < SIGMAS / math.sqrt(found.shape[1])


ONES = torch.ones(3, 4)
LIKE_TORCH = {  # every operator with its defaults, and with dtypes of its own
    "rand": lambda: torch.rand(3, 4),
    "rand, complex": lambda: torch.rand(3, 4, dtype=torch.complex64),
    "randn, complex": lambda: torch.randn(3, 4, dtype=torch.complex128),
    "randn_like, of a view": lambda: torch.randn_like(torch.ones(4, 3, dtype=torch.float64).T),
    "rand_like, double": lambda: torch.rand_like(ONES, dtype=torch.float64),
    "randint": lambda: torch.randint(5, (3, 4)),
    "randint, low": lambda: torch.randint(2, 5, (3, 4), dtype=torch.int32),
    "randint_like": lambda: torch.randint_like(ONES, 5),
    "randint_like, low": lambda: torch.randint_like(ONES, 2, 5, dtype=torch.int16),
    "randperm": lambda: torch.randperm(3),
    "randperm, int32": lambda: torch.randperm(3, dtype=torch.int32),
    "normal, sized": lambda: torch.normal(0.0, 1.0, (3, 4)),
    "normal, sized, double": lambda: torch.normal(0.0, 1.0, (3, 4), dtype=torch.float64),
    "normal, of means": lambda: torch.normal(ONES, 2.0),
    "normal, of deviations": lambda: torch.normal(1.0, ONES),
    "normal, of both": lambda: torch.normal(ONES.double(), ONES[:1].double()),
    "normal_": lambda: torch.empty(3, 4).normal_(),
    "normal_, complex": lambda: torch.empty(3, 4, dtype=torch.complex64).normal_(),
    "uniform_, half": lambda: torch.empty(3, 4, dtype=torch.bfloat16).uniform_(-1, 1),
    "log_normal_": lambda: torch.empty(3, 4).log_normal_(),
    "cauchy_": lambda: torch.empty(3, 4).cauchy_(),
    "exponential_": lambda: torch.empty(3, 4).exponential_(),
    "geometric_": lambda: torch.empty(3, 4, dtype=torch.int64).geometric_(0.5),
    "random_": lambda: torch.empty(3, 4, dtype=torch.uint8).random_(),
    "random_, bool": lambda: torch.empty(3, 4, dtype=torch.bool).random_(),
    "random_, to": lambda: torch.empty(3, 4).random_(7),
    "random_, from": lambda: torch.empty(3, 4, dtype=torch.int32).random_(3, 7),
    "bernoulli": lambda: torch.bernoulli(0.5 * ONES.double()),
    "bernoulli, p": lambda: torch.bernoulli(ONES, 0.5),
    "bernoulli_": lambda: torch.empty(3, 4, dtype=torch.bool).bernoulli_(0.5),
    "bernoulli_, of a tensor": lambda: torch.empty(3, 4).bernoulli_(0.5 * ONES),
    "multinomial": lambda: ONES.multinomial(2),
    "multinomial, replaced": lambda: ONES.bfloat16().multinomial(6, replacement=True),
    "dropout": lambda: F.dropout(ONES.half()),
    "dropout, of a view, in place": lambda: F.dropout(torch.ones(4, 3).T, inplace=True),
    "dropout1d": lambda: F.dropout1d(torch.ones(3, 4, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(ONES, training=True),
    "rrelu": lambda: F.rrelu(-ONES, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(ONES, hard=True),
}


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_operators_return_tensors_like_torchs(name: str) -> None:
    ours, theirs = drawn(lambda rows: LIKE_TORCH[name](), [3, 4, 5]), LIKE_TORCH[name]()
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    assert not ours.is_floating_point() or ours.isfinite().all()


def test_parts_of_complex_numbers_are_independent() -> None:
    found = drawn(lambda rows: torch.randn(rows, 1 << 15, dtype=torch.complex128), [3, 4])
    error = SIGMAS / math.sqrt(found.numel())
    assert float(found.abs().square().mean()) == pytest.approx(1.0, abs=2 * error)
    assert abs(float((found.real * found.imag).mean())) < error


def test_numbers_are_a_function_of_seed_step_sample_and_call() -> None:
    noise = lambda rows: torch.randn(rows, 9)  # noqa: E731
    whole = drawn(noise, [4, 5, 6])
    assert torch.equal(drawn(noise, [6, 4])[0], whole[2])
    assert not torch.equal(drawn(noise, [4, 5, 6], step=2), whole)
    assert not torch.equal(drawn(noise, [4, 5, 6], seed=8), whole)
    twice = drawn(lambda rows: torch.stack((torch.randn(rows, 9), torch.randn(rows, 9)), 1), [4, 5, 6])
    assert torch.equal(twice[:, 0], whole) and not torch.equal(twice[:, 1], whole)
    assert drawn(lambda rows: torch.rand(()), [4]) == drawn(lambda rows: torch.rand(()), [9, 8])


@pytest.mark.parametrize(
    ("short", "long"),
    [((5, 6), (8, 6)), ((6, 5), (6, 8)), ((4, 5, 5), (4, 8, 8)), ((2, 3, 5, 5), (2, 3, 8, 8)), ((4, 5, 6), (4, 9, 6))],
)
def test_a_sample_that_is_filled_up_further_draws_the_same_where_it_was(
    short: tuple[int, ...], long: tuple[int, ...]
) -> None:
    """Tokens first, features first as for sound, scores of attention by head, by group and head, values by head."""
    less, more = (drawn(lambda rows, shape=shape: torch.rand(rows, *shape), [4, 9]) for shape in (short, long))
    assert torch.equal(more[(slice(None), *(slice(size) for size in short))], less)
    assert len(more.unique()) == more.numel()


def test_long_rows_of_a_sample_share_no_numbers() -> None:
    """The end of a sound of 66 s, at 16 kHz, had the numbers that the second channel begins with."""
    length = 2**20 + 2**16
    first, second = words(5, [0], 2, length).view(2, length)
    assert int((first[2**20 :] == second[: 2**16]).sum()) < 10, "words meet by chance"
    rows, patterns = SampleRows(np.arange(1), 1, 7), (Pattern((2, 2, length), 2, 0, 7),)
    held = [share_of((1, 2, length // 2), rows, patterns, RankPart(0, 1, rank, 2)) for rank in range(2)]
    assert held[0] is not None and held[1] is not None and held[0].places is not None and held[1].places is not None
    halves = torch.cat([held[0].places.view(2, -1), held[1].places.view(2, -1)], 1)
    assert torch.equal(halves.flatten(), places_between(0, 2 * length, (2, length), CPU))


def test_generators_of_ones_own_and_evaluation_are_left_alone() -> None:
    own = drawn(lambda rows: torch.rand(3, generator=torch.Generator().manual_seed(1)), [0, 1, 2])
    assert torch.equal(own, torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(drawn(lambda rows: F.dropout(torch.ones(rows), 0.5, training=False), [0, 1]), torch.ones(2))
    bent = drawn(lambda rows: F.rrelu(torch.tensor([-1.0, 2.0]), 0.25, 0.5, training=False), [0, 1])
    assert torch.equal(bent, torch.tensor([-0.375, 2.0]))


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (3, 1), (2, 2)])
def test_parts_of_a_slice_are_those_of_the_whole(cp: int, tp: int) -> None:
    seq, width = 12, 8
    tokens = 2 * chunk_tokens(seq, cp)
    patterns = (Pattern((2, seq, width), 2, 0, seq),)
    rows, whole = SampleRows(np.arange(3), 1, seq), places_between(0, seq * width, (seq, width), CPU).tolist()
    assert len(set(whole)) == seq * width
    for local in ((tokens // tp, width), (tokens, width // tp)):
        held: list[int] = []
        for cp_rank in range(cp):
            for tp_rank in range(tp):
                share = share_of((3, *local), rows, patterns, RankPart(cp_rank, cp, tp_rank, tp))
                assert share is not None
                held += whole if share.places is None else share.places.tolist()
        copies = 1 if local != (seq, width) else cp * tp
        assert sorted(held) == sorted(whole * copies)


def test_shapes_that_look_alike_are_told_apart_by_what_was_seen() -> None:
    rows = SampleRows(np.arange(1), 1)
    per_sample, shared = Pattern((2,), 2, 0), Pattern((1,), 2, None)
    assert share_of((1,), rows, (per_sample,), RankPart()).dim == 0  # type: ignore[union-attr]
    assert share_of((1,), rows, (shared,), RankPart()).dim is None  # type: ignore[union-attr]
    assert share_of((1,), rows, (per_sample, shared), RankPart()) is None, "one of both, and nobody can tell which"


def test_whole_numbers_have_the_bits_of_both_words() -> None:
    upper, lower = ([0, 1, 2, 3, -1], [5, 5, 0, 7, -1])

    def drawn(out: Tensor, count: int, finish: Callable[..., None]) -> Tensor:
        assert count == 2
        finish(out, torch.tensor(upper, dtype=torch.int32), torch.tensor(lower, dtype=torch.int32))
        return out

    found = integers(drawn, torch.empty(5, dtype=torch.int64), 0, 2**62).tolist()
    assert found == [5, 2**31 + 5, 2**32, 3 * 2**31 + 7, 2**62 - 1]

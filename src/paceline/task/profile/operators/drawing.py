"""Which of torch's random operators can be drawn for each sample by itself, whatever the layout. Imports no torch."""

from __future__ import annotations

BY_SAMPLE = frozenset({
    "bernoulli", "bernoulli_", "native_dropout", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like",
    "random_", "randperm", "uniform_", "normal", "normal_", "log_normal_", "cauchy_", "exponential_", "geometric_",
    "multinomial", "rrelu_with_noise",
})  # fmt: skip
ATTENTION = "_scaled_dot_product"  # how names of attention's kernels begin: with dropout, its plain path draws


def belongs_to_samples(operator: str) -> bool:
    """Return whether the random numbers of an operator, by its name, can belong to samples."""
    return operator in BY_SAMPLE or operator.startswith(ATTENTION)

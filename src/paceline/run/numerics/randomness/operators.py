"""What torch's random operators return, made of words that belong to samples.

`RandomOperators` sees the operators below torch's functions, and so those inside of attention, recurrent layers and
distributions. What it has no rule for keeps its own random numbers and is told as a stray.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = Mapping[str, Any]


class DrawnWords(Protocol):
    """Makes random tensors: `finish(chunk, *words)` turns int32 words of as many lanes into values of a chunk."""

    def __call__(self, out: Tensor, lanes: int, finish: Callable[..., object]) -> Tensor:
        """Fill `out` and return it."""

    def stray(self, name: str, because: str) -> None:
        """Note an operator whose random numbers belong to no sample."""

    def calls(self, numbers: dict[str, float]) -> None:
        """Note with which numbers, by the names of its arguments, an operator is about to be called."""

    def draws_apart(self, generator: torch.Generator) -> None:
        """Note that a generator of the program's own is about to be drawn from."""

    def drew_apart(self, out: object) -> None:
        """Note what was drawn from it."""


# ---- values of words -----------------------------------------------------------------------------------------------


def keep(words: DrawnWords, out: Tensor, probability: float, scale: float = 1.0) -> Tensor:
    """Fill `out` with `scale` at this probability, and with 0 elsewhere: the same places for every dtype."""
    if probability >= 1 or probability <= 0:
        return out.fill_(scale if probability >= 1 else 0.0)
    bar = round(probability * 2**32) - 2**31  # words are spread evenly over -2^31 ... 2^31 - 1

    def finish(chunk: Tensor, word: Tensor) -> None:
        chunk.copy_(word < bar)
        if scale != 1.0:
            chunk.mul_(scale)

    return words(out, 1, finish)


def unit(words: DrawnWords, out: Tensor, ends: bool = True) -> Tensor:
    """Fill `out` evenly from [0, 1), in steps that its dtype has; without `ends` from (0, 1)."""
    shift = 0.0 if ends else 0.5
    if out.is_complex():
        unit(words, torch.view_as_real(out), ends)
        return out
    if out.dtype == torch.float64:  # 27 bits of one word and 26 of another

        def wide(chunk: Tensor, upper: Tensor, lower: Tensor) -> None:
            chunk.copy_(upper >> 5).add_(2.0**26).mul_(2.0**26).add_((lower >> 6) + 2**25 + shift).mul_(2.0**-53)

        return words(out, 2, wide)
    bits = {torch.float16: 11, torch.bfloat16: 8}.get(out.dtype, 24)

    def narrow(chunk: Tensor, word: Tensor) -> None:
        numbers = (word >> (32 - bits)).to(torch.float32).add_(2.0 ** (bits - 1) + shift)
        chunk.copy_(numbers.mul_(2.0**-bits))

    return words(out, 1, narrow)


def normal(words: DrawnWords, out: Tensor) -> Tensor:
    """Fill `out` with standard normal numbers (Box and Muller 1958, doi:10.1214/aoms/1177706645).

    Of complex ones both parts have half the variance, as torch's have.
    """
    if out.is_complex():
        normal(words, torch.view_as_real(out))
        return out.mul_(math.sqrt(0.5))
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32

    def finish(chunk: Tensor, radius: Tensor, angle: Tensor) -> None:
        lengths = radius.to(torch.float64).add_(2.0**31 + 0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_().to(dtype)
        chunk.copy_(lengths.mul_(angle.to(dtype).mul_(math.pi * 2.0**-31).cos_()))

    return words(out, 2, finish)


def integers(words: DrawnWords, out: Tensor, low: int, high: int) -> Tensor:
    """Fill `out` with whole numbers from `low` to before `high`."""

    def finish(chunk: Tensor, upper: Tensor, lower: Tensor) -> None:
        numbers = (upper.to(torch.int64) << 31) ^ (lower.to(torch.int64) & 0x7FFFFFFF)
        chunk.copy_((numbers & (2**62 - 1)).remainder_(high - low).add_(low))

    return words(out, 2, finish)


def _float_like(out: Tensor) -> Tensor:
    """Return a place for uniform numbers as fine as `out` allows."""
    return torch.empty_like(out, dtype=torch.float64 if out.dtype == torch.float64 else torch.float32)


# ---- operators -----------------------------------------------------------------------------------------------------


def _bernoulli(words: DrawnWords, out: Tensor, probability: Any) -> Tensor:
    if isinstance(probability, Tensor):
        return out.copy_(unit(words, _float_like(out)) < probability)
    return keep(words, out, float(probability))


def _native_dropout(words: DrawnWords, a: Arguments) -> tuple[Tensor, Tensor]:
    x, p = a["input"], a["p"]
    if a["train"] is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = keep(words, torch.empty_like(x, dtype=torch.bool, memory_format=torch.contiguous_format), 1 - p)
    return x * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def _rrelu(words: DrawnWords, a: Arguments) -> Tensor:
    x, lower, upper = a["self"], float(a["lower"]), float(a["upper"])
    if not a["training"]:
        return torch.where(x >= 0, x, x * ((lower + upper) / 2))
    slopes = unit(words, torch.empty_like(x)).mul_(upper - lower).add_(lower)
    a["noise"].copy_(torch.where(x >= 0, torch.ones_like(slopes), slopes))
    return x * a["noise"]


def _multinomial(words: DrawnWords, a: Arguments) -> Tensor:
    weights, count = a["self"].double(), a["num_samples"]
    if not a["replacement"]:  # the first of races with these rates (Efraimidis and Spirakis 2006)
        return (unit(words, torch.empty_like(weights), ends=False).log_() / weights).topk(count, dim=-1).indices
    reached = weights.cumsum(-1)
    at = unit(words, weights.new_empty(*weights.shape[:-1], count)) * reached[..., -1:]
    return torch.searchsorted(reached, at, right=True).clamp_(max=weights.shape[-1] - 1)


def _permutation(words: DrawnWords, a: Arguments) -> Tensor:
    order = integers(words, torch.empty(a["n"], dtype=torch.int64, device=a["device"]), 0, 2**62).argsort()
    return order.to(_kind(a).get("dtype", torch.int64))


def _normal(words: DrawnWords, a: Arguments) -> Tensor:
    mean, std = a["mean"], a["std"]
    if "size" in a:
        out = torch.empty(a["size"], **_kind(a))
    else:
        shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
        out = next(x for x in (mean, std) if isinstance(x, Tensor)).new_empty(shape)
    return normal(words, out).mul_(std).add_(mean)


_KINDS = ("dtype", "layout", "device", "pin_memory")


def _kind(a: Arguments) -> dict[str, Any]:
    found = {name: a.get(name) for name in _KINDS}
    # A schema says its default dtype by number; what the operator gives without one is known where it is made.
    return {name: value for name, value in found.items() if value is not None and not isinstance(value, int | bool)}


def _sized(fill: Callable[[DrawnWords, Tensor, Arguments], Tensor], default: torch.dtype | None = None) -> Any:
    def make(words: DrawnWords, a: Arguments) -> Tensor:
        return fill(words, torch.empty(a["size"], **({"dtype": default} if default else {}) | _kind(a)), a)

    return make


def _alike(fill: Callable[[DrawnWords, Tensor, Arguments], Tensor]) -> Any:
    def make(words: DrawnWords, a: Arguments) -> Tensor:
        return fill(words, torch.empty_like(a["self"], memory_format=torch.contiguous_format, **_kind(a)), a)

    return make


def _in_place(fill: Callable[[DrawnWords, Tensor, Arguments], Tensor]) -> Any:
    """Return a rule that fills its first argument. What is not stored row by row is made beside it and copied."""

    def make(words: DrawnWords, a: Arguments) -> Tensor:
        out = a["self"]
        if out.is_contiguous():
            return fill(words, out, a)
        return out.copy_(fill(words, torch.empty_like(out, memory_format=torch.contiguous_format), a))

    return make


def _log_of_unit(words: DrawnWords, out: Tensor) -> Tensor:
    return unit(words, _float_like(out), ends=False).log_()


def _between(words: DrawnWords, out: Tensor, a: Arguments) -> Tensor:
    return integers(words, out, a.get("low", 0), a["high"])


_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.int64: 62, torch.bool: 1}


def _random(words: DrawnWords, out: Tensor, a: Arguments) -> Tensor:
    low, high = a.get("from", 0), a.get("to")
    if high is None:  # all that the dtype tells apart
        high = 2 ** _BITS[out.dtype] if out.dtype in _BITS else torch.iinfo(out.dtype).max + 1
    return integers(words, out, low, high)


# By the full name of an operator, without its namespace.
RULES: dict[str, Callable[[DrawnWords, Arguments], object]] = {
    "bernoulli_.float": _in_place(lambda w, out, a: _bernoulli(w, out, a["p"])),
    "bernoulli_.Tensor": _in_place(lambda w, out, a: _bernoulli(w, out, a["p"])),
    "bernoulli.default": _alike(lambda w, out, a: _bernoulli(w, out, a["self"])),
    "bernoulli.p": _alike(lambda w, out, a: _bernoulli(w, out, a["p"])),
    "native_dropout.default": _native_dropout,
    "rrelu_with_noise.default": _rrelu,
    "rand.default": _sized(lambda w, out, a: unit(w, out)),
    "randn.default": _sized(lambda w, out, a: normal(w, out)),
    "randint.default": _sized(_between, torch.int64),
    "randint.low": _sized(_between, torch.int64),
    "randperm.default": _permutation,
    "rand_like.default": _alike(lambda w, out, a: unit(w, out)),
    "randn_like.default": _alike(lambda w, out, a: normal(w, out)),
    "randint_like.default": _alike(_between),
    "randint_like.low_dtype": _alike(_between),
    "uniform_.default": _in_place(lambda w, out, a: unit(w, out).mul_(a["to"] - a["from"]).add_(a["from"])),
    "normal_.default": _in_place(lambda w, out, a: normal(w, out).mul_(a["std"]).add_(a["mean"])),
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "normal.float_float": _normal,
    "exponential_.default": _in_place(lambda w, out, a: out.copy_(_log_of_unit(w, out).div_(-a["lambd"]))),
    "geometric_.default": _in_place(
        lambda w, out, a: out.copy_(_log_of_unit(w, out).div_(math.log1p(-a["p"])).ceil_())
    ),
    "log_normal_.default": _in_place(lambda w, out, a: normal(w, out).mul_(a["std"]).add_(a["mean"]).exp_()),
    "cauchy_.default": _in_place(
        lambda w, out, a: out.copy_(
            unit(w, _float_like(out), ends=False).sub_(0.5).mul_(math.pi).tan_().mul_(a["sigma"]).add_(a["median"])
        )
    ),
    "random_.default": _in_place(_random),
    "random_.to": _in_place(_random),
    "random_.from": _in_place(_random),
    "multinomial.default": _multinomial,
}  # fmt: skip


class RandomOperators(TorchDispatchMode):
    """Gives torch's random operators their values from words, within one call of a function."""

    def __init__(self, words: DrawnWords) -> None:
        super().__init__()
        self._words = words

    def __torch_dispatch__(self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        named = _named(func, args, kwargs)
        if named.get("generator") is not None:  # the program's own, and its own affair
            self._words.draws_apart(named["generator"])
            out = func(*args, **kwargs)
            self._words.drew_apart(out)
            return out
        name = f"{func.overloadpacket.__name__}.{func._overloadname}"
        if name in RULES:
            self._words.calls(_numbers(name, named))
            return RULES[name](self._words, named)
        if _draws(named):
            self._words.stray(func.overloadpacket.__name__, "it draws its random numbers by itself")
        return func(*args, **kwargs)


def _named(func: Any, args: Sequence[object], kwargs: Arguments) -> dict[str, Any]:
    """Return all arguments of an operator by name, those that were not given too."""
    slots = func._schema.arguments
    named = {slot.name: slot.default_value if slot.has_default_value() else None for slot in slots}
    named.update((slot.name, value) for slot, value in zip(slots, args, strict=False))
    return {**named, **kwargs}


def _numbers(name: str, named: Arguments) -> dict[str, float]:
    """Return the numbers among an operator's arguments, and of how many things it chooses one."""
    found = {at: value for at, value in named.items() if isinstance(value, int | float) and at not in _KINDS}
    return found | ({"categories": named["self"].shape[-1]} if name == "multinomial.default" else {})


def _draws(named: Arguments) -> bool:
    """Return whether an operator with a probability, or one for training alone, draws at all."""
    return not any(named.get(name) in (0, 0.0, False) for name in ("dropout_p", "dropout", "train", "training"))


@functools.cache
def drawing_functions() -> frozenset[object]:
    """Return torch's functions and methods that draw random numbers, or hold an operator that does."""
    names = {name.partition(".")[0] for name in RULES} | {
        "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_",
        "feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "gumbel_softmax",
        "rrelu", "rrelu_", "multi_head_attention_forward", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh",
        "rnn_relu", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet",
        "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
    }  # fmt: skip
    homes = (torch, torch.Tensor, torch.nn.functional, torch._C._nn, torch._C._VariableFunctions)
    found = {getattr(home, name) for home in homes for name in names if hasattr(home, name)}
    filling = [name for name in dir(torch.nn.init) if name.endswith("_") and not name.startswith("_")]
    return frozenset(found | {getattr(torch.nn.init, name) for name in filling})

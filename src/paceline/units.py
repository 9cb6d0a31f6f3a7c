"""Quantities with units: amounts of training ("300 steps"), bytes ("1.5 GiB"), durations ("2 h").

Decimal prefixes (k, M, G, T) are powers of 1,000; binary ones (Ki, Mi, Gi, Ti) powers of 1,024.
"""

from __future__ import annotations

import itertools
import math
import numbers
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError, suggestion

PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12,
            "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "second": 1.0, "seconds": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0,
           "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0, "day": 86400.0,
           "days": 86400.0}  # fmt: skip
SECONDS_PER_HOUR = SECONDS["h"]
MOST_IN_A_UNIT = 10_000  # of values that are compared in one unit
LARGEST_LOSS = 1e5  # that is written out
LEAST_USD = 1e-6  # that is written out
RATE_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))  # of rates and of data
COUNTED_IN_SECONDS = 600.0  # durations that are compared, the longest of which is shorter
AMOUNT_UNITS = ("steps", "samples", "tokens", "epochs")

_PARTS = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?)\s*([a-z]+)\s*")
_NUMBER = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(.*?)\s*$")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,_])")


@dataclass(frozen=True)
class Amount:
    """So much training: a `value` in one of the units steps, samples, tokens or epochs."""

    value: float
    unit: str

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, numbers.Real):
            raise ConfigError(f"Amount: {self.value!r} is no number", "it is so much of a unit", 'Amount(300, "steps")')
        if not math.isfinite(self.value) or self.value <= 0:
            raise ConfigError(f"Amount({self.value!r}, {self.unit!r}) cannot be", "it must be finite and above 0",
                              'Amount(300, "steps")')  # fmt: skip
        if self.unit not in AMOUNT_UNITS:
            raise ConfigError(f"Amount({self.value!r}, {self.unit!r}) cannot be",
                              f"its unit is one of {', '.join(AMOUNT_UNITS)}",
                              suggestion(str(self.unit), AMOUNT_UNITS))  # fmt: skip

    def __str__(self) -> str:
        number = f"{self.value:,.0f}" if self.value == int(self.value) else f"{self.value:g}"
        return f"{number} {self.unit}"


class Seconds(float):
    """Seconds that were read from a duration with a unit: what tells them from a bare number."""


def _split(text: str, kind: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match:
        raise ConfigError(f"'{text}' is not {kind}", "it does not start with a number", _EXAMPLES[kind])
    number = match.group(1)
    if "," in number and not _THOUSANDS.match(number):  # 1,5 h would be 15 h
        decimal = number.count(",") == 1 and "." not in number
        raise ConfigError(f"'{text}' is not {kind}", "a comma stands between thousands, a point before decimals",
                          f"'{text.strip().replace(',', '.')}'" if decimal else _EXAMPLES[kind])  # fmt: skip
    value = float(number.replace(",", "").replace("_", ""))
    if not math.isfinite(value):
        raise ConfigError(f"'{text}' is not {kind}", "the number is not finite", _EXAMPLES[kind])
    return value, match.group(2)


def _no_unit(written: str) -> str:
    """Return why a quantity cannot be read whose unit is missing, or none."""
    return f"there is no unit '{written}'" if written else "it has no unit"


_EXAMPLES = {
    "an amount": '"300 steps", "131072 tokens", "64 samples" or "1 epoch"',
    "a duration": '"90 s", "30 min", "2 h" or "1.5 d"',
    "a size": '"512 MiB", "24 GiB" or "80 GB"',
}


_COUNTED = ("tokens", "samples", "steps")  # what a number with a prefix may be of, the likeliest first

_OTHER_WORDS = {  # of other tools, for the units of an amount
    "iterations": "steps", "iters": "steps", "its": "steps", "updates": "steps", "batches": "steps",
    "examples": "samples", "rows": "samples", "sequences": "samples", "images": "samples",
}  # fmt: skip


def parse_amount(text: str, units: tuple[str, ...] = AMOUNT_UNITS) -> Amount:
    """Return the Amount that `text` names, such as "300 steps" or "128 Ki tokens".

    Raises ConfigError where the number or the unit is missing, or the unit is not among `units`.
    """
    value, rest = _split(text, "an amount")
    prefix, _, unit = rest.rpartition(" ")
    written, unit = unit, unit if unit.endswith("s") or not unit else unit + "s"
    if unit not in units:
        meant = _OTHER_WORDS.get(unit.lower(), "")
        near = suggestion(unit, units) if unit else f"add a unit, {suggestion('', units)}"
        if meant in units:
            near = f"did you mean '{meant}'?"
        if written in SECONDS:
            near = f'"100 {units[0]}"; by the clock there is run.time_limit = "{text}", which ends a run'
        if written in PREFIXES and written:  # "100B": of what?
            counted = f"{text.rstrip()[: -len(written)].strip()} {written}"
            near = " or ".join(f'"{counted} {each}"' for each in _COUNTED if each in units)
        raise ConfigError(f"'{text}' is not an amount in {', '.join(units)}", _no_unit(written), near)
    if prefix not in PREFIXES:
        raise ConfigError(f"'{text}' is not an amount", f"unknown prefix '{prefix}'", suggestion(prefix, PREFIXES))
    value *= PREFIXES[prefix]
    if not math.isfinite(value):
        raise ConfigError(f"'{text}' is not an amount", "the number is not finite", _EXAMPLES["an amount"])
    if value <= 0:
        raise ConfigError(f"'{text}' is not an amount", "it must be more than zero", _EXAMPLES["an amount"])
    return Amount(value, unit)


def parse_seconds(text: str) -> Seconds:
    """Return the seconds in a duration such as "2 h" or "90 s", or as durations are printed: "1h 30m"."""
    parts = [match.groups() for match in _PARTS.finditer(text)]
    if len(parts) > 1 and _PARTS.sub("", text) == "" and _falls([unit for _, unit in parts]):
        return Seconds(sum(parse_seconds(f"{number} {unit}") for number, unit in parts))
    value, unit = _split(text, "a duration")
    if unit not in SECONDS:
        raise ConfigError(f"'{text}' is not a duration", _no_unit(unit), _EXAMPLES["a duration"])
    seconds = value * SECONDS[unit]
    if not math.isfinite(seconds):
        raise ConfigError(f"'{text}' is not a duration", "the number is not finite", _EXAMPLES["a duration"])
    return Seconds(seconds)


def _falls(units: list[str]) -> bool:
    """Return whether each unit of time is known and shorter than the one before: hours, then minutes."""
    lengths = [SECONDS.get(unit, 0.0) for unit in units]
    return min(lengths) > 0 and all(after < before for before, after in itertools.pairwise(lengths))


def parse_bytes(text: str) -> int:
    """Return the bytes in a size such as "1.5 GiB" or "80 GB"."""
    value, unit = _split(text, "a size")
    prefix = unit[:-1] if unit.endswith("B") else None
    if prefix is None or prefix not in PREFIXES:
        raise ConfigError(f"'{text}' is not a size", _no_unit(unit), _EXAMPLES["a size"])
    count = value * PREFIXES[prefix]
    if not math.isfinite(count):
        raise ConfigError(f"'{text}' is not a size", "the number is not finite", _EXAMPLES["a size"])
    return int(count)


def format_bytes(count: float) -> str:
    """Return a size for people: "0.61 GiB"."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale * (0.1 if unit == "GiB" else 1):
            value = count / scale
            return f"{value:,.2f} {unit}" if value < 10 else f"{value:,.1f} {unit}"
    return f"{count:.0f} B"


def format_data(count: float) -> str:
    """Return how much data there is, in decimal units as files are listed: "650 kB", "12.3 GB", "3 B"."""
    shown = _prefixed(count, RATE_PREFIXES)
    return f"{shown}B" if " " in shown else f"{shown} B"


def format_seconds(seconds: float) -> str:
    """Return a duration for people: "61 µs", "1.92 s", "9m 40s", "3d 4h"."""
    if not math.isfinite(seconds):
        return "unknown"
    shown = _three_figures(seconds)
    if abs(shown) < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if abs(shown) < 1:
        return f"{seconds * 1e3:.3g} ms"
    if abs(shown) < 60:
        return f"{seconds:.3g} s"
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def format_sizes(*counts: float) -> tuple[str, ...]:
    """Return sizes that are compared, all in one unit: "174.1 GiB" and "75.1 GiB"."""
    unit, scale = _shared(counts, (("B", 1, 0.0), ("KiB", 2**10, 1.0), ("MiB", 2**20, 1.0), ("GiB", 2**30, 0.1),
                                   ("TiB", 2**40, 1)))  # fmt: skip
    if unit == "B":
        return tuple(f"{count:,.0f} B" if math.isfinite(count) else "unknown" for count in counts)
    return tuple(f"{_size(count / scale)} {unit}" if math.isfinite(count) else "unknown" for count in counts)


def format_durations(*seconds: float) -> tuple[str, ...]:
    """Return durations that are compared, in one unit up to ten minutes: "950 ms" and "1,200 ms"; then as alone."""
    longest = max((abs(each) for each in seconds if math.isfinite(each)), default=0.0)
    if longest >= COUNTED_IN_SECONDS:
        return tuple(format_seconds(each) for each in seconds)
    unit, scale = _shared(seconds, (("µs", 1e-6, 0.0), ("ms", 1e-3, 1.0), ("s", 1.0, 1.0)))
    return tuple(f"{_figures(each / scale)} {unit}" if math.isfinite(each) else "unknown" for each in seconds)


def format_carbon(*grams: float) -> tuple[str, ...]:
    """Return amounts of carbon that are compared, all in one unit: "2.25 kg CO2e" and "0.95 kg CO2e"."""
    unit, scale = _shared(grams, (("g", 1.0, 0.0), ("kg", 1e3, 1.0), ("t", 1e6, 1.0)))
    return tuple(f"{_figures(each / scale)} {unit} CO2e" if math.isfinite(each) else "unknown" for each in grams)


def format_energy(*kwh: float) -> tuple[str, ...]:
    """Return amounts of energy that are compared, all in one unit: "85.1 Wh" and "120 Wh"."""
    unit, scale = _shared(kwh, (("Wh", 1e-3, 0.0), ("kWh", 1.0, 0.1)))
    return tuple(f"{_figures(each / scale)} {unit}" if math.isfinite(each) else "unknown" for each in kwh)


def _shared(values: Sequence[float], scales: Sequence[tuple[str, float, float]]) -> tuple[str, float]:
    """Return the unit, and its scale, of values that are compared.

    `scales` are units, each with its scale and from how much of it on a value alone has it. Of the units that one of
    the values has alone, and those between, the smallest is taken in which the largest value is below 10,000.
    """
    known = [abs(value) for value in values if math.isfinite(value) and value]
    if not known:
        return scales[0][:2]
    first, last = (max(place for place, (_, scale, least) in enumerate(scales) if value >= scale * least)
                   for value in (min(known), max(known)))  # fmt: skip
    fitting = [each for each in scales[first:last] if _three_figures(max(known) / each[1]) < MOST_IN_A_UNIT]
    return (fitting or scales[last:])[0][:2]


def _size(value: float) -> str:
    if 0 < abs(value) < 0.095:
        return f"{value:.2g}"
    return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"


def _figures(value: float) -> str:
    """Return three figures, and whole numbers from a thousand on."""
    return f"{value:,.0f}" if abs(_three_figures(value)) >= 1000 else f"{value:.3g}"


def format_usd(usd: float) -> str:
    """Return money: "$1,204", "$3.52", "$0.50", "$0.01691"; "unknown" where it is not known."""
    if not math.isfinite(usd):
        return "unknown"
    if usd < 0:
        return f"-{format_usd(-usd)}"
    if usd == 0 or usd >= 0.995:
        return f"${usd:,.0f}" if usd >= 99.995 else f"${usd:,.2f}"
    if usd < LEAST_USD:
        return f"<${LEAST_USD:f}"
    figures = f"{usd:.{3 - math.floor(math.log10(usd))}f}".rstrip("0")
    whole, _, cents = figures.partition(".")
    return f"${whole}.{cents:0<2}"


def format_amount(value: float, unit: str = "") -> str:
    """Return a plain amount with its unit, in four figures, whole from a thousand on: "0.4475", "12,346 device-hours".

    "unknown" where it is not known.
    """
    if not math.isfinite(value):
        return "unknown"
    figures = f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"
    return f"{figures} {unit}".strip()


def format_loss(loss: float | None) -> str:
    """Return a loss: "2.3012", "1.3e+09" where it is beyond all losses, "no number" where it is none, "–" for None."""
    if loss is None:
        return "–"
    if not math.isfinite(loss):
        return "no number"
    return f"{loss:.4f}" if abs(loss) < LARGEST_LOSS else f"{loss:.2g}"


def plural(count: int, word: str) -> str:
    """Return a count of things: "1 step", "1,200 steps", "2 processes"."""
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('s') else 's'}"


def format_count(count: float) -> str:
    """Return a count for people with a decimal prefix: "67.2 k", "11.3 M", "405 B"."""
    return _prefixed(count, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)))


def format_rate(per_second: float, unit: str) -> str:
    """Return a rate for people with a decimal prefix: "121 GFLOP/s", "2.9 GB/s"."""
    shown = _prefixed(per_second, RATE_PREFIXES)
    return f"{shown}{unit}/s" if " " in shown else f"{shown} {unit}/s"


def _prefixed(value: float, prefixes: tuple[tuple[str, float], ...]) -> str:
    """Return three figures with the prefix that fits them as they are rounded: 999,900 is "1 M" and not "1e+03 k"."""
    if not math.isfinite(value):
        return f"{value:.3g}"
    shown = _three_figures(value)
    for prefix, scale in prefixes:
        if abs(shown) >= scale:
            figures = shown / scale
            return f"{figures:.3g} {prefix}" if abs(figures) < 1e3 else f"{figures:,.0f} {prefix}"
    return f"{value:.3g}"


def _three_figures(value: float) -> float:
    return float(f"{value:.3g}")

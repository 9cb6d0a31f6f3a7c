"""Batches are exact or refused; steps are rounded up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.spec.amounts import batch_samples, in_steps, total_steps
from paceline.spec.task import Task
from paceline.units import (
    Amount,
    format_count,
    format_data,
    format_rate,
    format_seconds,
    parse_amount,
    parse_bytes,
    parse_seconds,
)


def test_batch_in_tokens_and_samples() -> None:
    assert batch_samples(Task(global_batch=Amount(131072, "tokens")), 512) == 256
    assert batch_samples(Task(global_batch=Amount(48, "samples")), 512) == 48


@pytest.mark.parametrize(
    ("value", "unit", "offers"),
    [(1000, "tokens", ['"768 tokens"', '"1024 tokens"']), (100, "tokens", ['"256 tokens"']),
     (2.5, "samples", ['"2 samples"', '"3 samples"']), (3, "steps", ["tokens"]), (1, "epochs", ["samples"])],
)  # fmt: skip
def test_a_batch_is_never_rounded(value: float, unit: str, offers: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        batch_samples(Task(global_batch=Amount(value, unit)), 256)
    assert all(offer in caught.value.try_ for offer in offers)


@given(st.integers(1, 10**6), st.integers(1, 8192))
def test_the_values_offered_are_valid(tokens: int, seq_len: int) -> None:
    try:
        samples = batch_samples(Task(global_batch=Amount(tokens, "tokens")), seq_len)
    except ConfigError as error:
        for offer in error.try_.split(" or "):
            assert batch_samples(Task(global_batch=offer.strip('"')), seq_len) >= 1  # type: ignore[arg-type]
    else:
        assert samples * seq_len == tokens


@pytest.mark.parametrize(
    ("amount", "steps"),
    [(Amount(300, "steps"), 300), (Amount(64, "samples"), 4), (Amount(65, "samples"), 5), (Amount(1, "samples"), 1),
     (Amount(16 * 256, "tokens"), 1), (Amount(16 * 256 + 1, "tokens"), 2), (Amount(1, "epochs"), 63),
     (Amount(0.1, "epochs"), 7), (Amount(1.6, "epochs"), 100), (Amount(0.5, "steps"), 1)],
)  # fmt: skip
def test_steps_cover_the_amount(amount: Amount, steps: int) -> None:
    assert in_steps(amount, batch_samples=16, items_per_sample=256, dataset_samples=1000) == steps


def test_a_tenth_is_a_tenth() -> None:
    """0.1 as a binary fraction is a little more than a tenth; that must not cost a step."""
    assert in_steps(Amount(0.1, "epochs"), batch_samples=100, items_per_sample=1, dataset_samples=1000) == 1


def test_epochs_need_the_size_of_the_data() -> None:
    with pytest.raises(ConfigError, match="not known"):
        total_steps(Task(stop=Amount(1, "epochs")), 16, 256, 0)


def test_how_much_data_there_is_has_the_prefixes_of_files() -> None:
    """Not those of counts, whose "B" is a billion: 3 bytes are no "3B", and 5 GB no "5 BB"."""
    assert [format_data(count) for count in (3, 650_000, 5e9)] == ["3 B", "650 kB", "5 GB"]


def test_figures_have_the_prefix_that_fits_them_as_they_are_rounded() -> None:
    """A step of 999.6 ms was printed as "1e+03 ms"."""
    assert [format_seconds(each) for each in (0.9996, 59.97, 0.0009996, 3599.7, -5.0, -90.0)] == [
        "1 s", "1m 00s", "1 ms", "1h 00m", "-5 s", "-1m 30s",
    ]  # fmt: skip
    assert [format_count(each) for each in (999.6, 999_900, 1.5e15, 999.4)] == ["1 k", "1 M", "1,500 T", "999"]
    assert [format_rate(each, "B") for each in (999_900, 12.0, math.inf)] == ["1 MB/s", "12 B/s", "inf B/s"]
    for tenths in range(-60, 200):
        value = 9.996 * 10 ** (tenths / 10)
        assert not any("e+" in shown for shown in (format_seconds(value), format_count(value), format_rate(value, "B")))


@given(st.integers(60, 10**8))
def test_a_duration_is_read_as_it_is_printed(seconds: int) -> None:
    """ "1h 30m" was printed, and refused."""
    shown = format_seconds(seconds)
    step = {"s": 1, "m": 60, "h": 3600}[shown[-1]]
    assert abs(parse_seconds(shown) - seconds) < step
    assert parse_seconds(shown.replace(" ", "")) == parse_seconds(shown)


@pytest.mark.parametrize("text", ["1m 30h", "1h 30", "1h 30m!", "1h-30m", "1h 30 parsecs", "1h 1h", "1 2 h", ""])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["1,5 h", "0,1 h", "12,5 h 30 min", "1,00 h", "1,0000 h", ",5 h"])
def test_a_comma_before_decimals_is_no_comma_between_thousands(text: str) -> None:
    """1,5 h was 15 h, and 0,1 epochs a whole one."""
    for read, unit in ((parse_seconds, "h"), (parse_amount, "epochs"), (parse_bytes, "GiB")):
        with pytest.raises(ConfigError, match="is not a"):
            read(text.replace("h", unit))  # type: ignore[operator]
    assert parse_amount("1,234,567 tokens").value == 1234567 and parse_seconds("1,000.5 s") == 1000.5


def test_durations_of_several_units() -> None:
    assert parse_seconds("2 h 15 min") == 8100 and parse_seconds("1d12h") == 129_600 and parse_seconds("1.5h") == 5400

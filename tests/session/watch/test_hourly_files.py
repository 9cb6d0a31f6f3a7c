"""A run in the hours that a file of hourly carbon, or of tariffs, names: it stops at their end, and goes on later.

The hours are those of the local clock, so a time zone moves them: it puts the end of an hour at a full minute, and
a change of its summer time skips the rest of the hour after it.
"""

from __future__ import annotations

import datetime
import math
import signal
import time
from pathlib import Path

import pytest
from runs import ending, records_of, start, steps_of, wait_until, write_spec

from paceline.patience import programs_per_core

MINUTE, HOUR = 60, 3600


def zone_of(ends: int, skips: int) -> str:
    """Return a time zone in which it is 11:00 at the moment `ends`, and an hour is skipped at the moment `skips`."""
    passed = (11 * HOUR - ends) % (24 * HOUR)
    east = passed if passed <= 12 * HOUR else passed - 24 * HOUR
    local = datetime.datetime.fromtimestamp(skips + east, datetime.UTC)
    day = local.timetuple().tm_yday
    offset = f"{'-' if east >= 0 else '+'}{abs(east) // HOUR:02d}:{abs(east) % HOUR // MINUTE:02d}"
    julian = day - (1 if local.year % 4 == 0 and day > 59 else 0)
    return f"<S>{offset}<D>,J{julian}/{local.hour:02d}:{local.minute:02d},J{julian % 365 + 1}/03:00".replace(
        "<S>", "SSS").replace("<D>", "DDD")  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize(("window", "figure"), [("greenest", "carbon"), ("cheapest", "tariff")])
def test_a_run_stops_when_its_hour_ends_and_goes_on_in_the_next_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: str, figure: str
) -> None:
    """Even hours are the best: from 10:00 to 11:00 it trains, then not until 12:00, which comes a minute later."""
    hours = tmp_path / "hours.csv"
    hours.write_text("hour,figure\n" + "".join(f"{hour},{40 if hour % 2 == 0 else 400}\n" for hour in range(24)))
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, steps=1_000_000)
    ends = math.ceil((time.time() + 25 * max(1.0, programs_per_core())) / MINUTE) * MINUTE
    skips = ends + MINUTE
    options = (f"--set=run.when.window={window}", "--set=run.when.hours=12", f"--set=run.when.{figure}={hours}",
               "--set=run.record_samples=true", "--set=run.checkpoint_every=100000 steps")  # fmt: skip
    monkeypatch.setenv("TZ", zone_of(ends, skips))  # of the processes that start from here on
    process = start("train", spec, *options)
    wait_until(lambda: len(records_of(run_dir, "run_started")) == 2 or process.poll() is not None, 300)
    second = records_of(run_dir, "run_started")[-1]
    wait_until(lambda: records_of(run_dir, "step")[-1]["step"] >= second["step"] + 5 or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ending(process, 120)
    assert process.returncode == 75, stderr
    assert "waiting without devices" in stdout, stdout

    first = [each for each in records_of(run_dir, "step") if each["attempt"] == 1]
    assert ends - 1 < first[-1]["time"] < ends + 2 + 2 * first[-1]["seconds"]["total"], "it ends with its hour"
    assert second["time"] > skips and second["step"] == first[-1]["step"], "it goes on where it was, in the next one"
    (stop, _) = records_of(run_dir, "run_ended")
    assert (stop["status"], stop["goes_on"]) == ("requeue", skips)
    found = steps_of(run_dir)
    assert [each["step"] for each in found] == list(range(1, len(found) + 1))
    seen = [tuple(each["sample_ids"]) for each in found]
    whole = [sample for each in seen for sample in each]
    epoch = whole[: len(set(whole))]
    assert len(set(epoch)) == len(epoch), "each sample once, before any comes again"

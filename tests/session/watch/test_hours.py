"""A run in its hours: it waits for them, and is begun again in the next ones, unless a signal or the spec ends it."""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import STARTED, ending, environment, in_process, records_of, steps_of, wait_until, write_spec

from paceline.cluster.grid.window import window_of
from paceline.errors import Requeue
from paceline.run.survive import notice as notices
from paceline.run.survive.notice import Notices
from paceline.session import closing, start
from paceline.session.watch.hours import in_hours, refuse_outside
from paceline.spec.load import load_spec, parse_spec
from paceline.spec.run import RunSpec
from paceline.spec.watch.when import WhenSpec
from paceline.supervise.blame import Outcome


class Clock:
    """A clock that goes on while somebody rests, or works."""

    def __init__(self, hour: float) -> None:
        self.now = datetime.datetime(2026, 11, 23).timestamp() + hour * 3600
        self.asked: list[str] = []

    def __call__(self) -> float:
        return self.now

    def rest(self, seconds: float) -> None:
        self.now += 3600.0

    @property
    def hour(self) -> float:
        return (self.now - datetime.datetime(2026, 11, 23).timestamp()) / 3600


NIGHT = WhenSpec("18:00-06:00")


def test_a_run_of_two_nights_waits_for_each() -> None:
    clock, began = Clock(12), []

    def run() -> Outcome:
        began.append(clock.hour)
        clock.now += 12 * 3600 if len(began) == 1 else 3600
        return Outcome(Requeue.exit_code if len(began) == 1 else 0)

    said: list[str] = []
    assert in_hours(window_of(NIGHT), run, said.append, clock, clock.rest) == Outcome(0)
    assert began == [18.0, 42.0] and len(said) == 2 and "2026-11-23 18:00" in said[0]


def test_a_run_that_was_stopped_in_its_hours_has_ended() -> None:
    clock = Clock(20)
    assert in_hours(window_of(NIGHT), lambda: Outcome(75), print, clock, clock.rest).exit_code == 75
    failed = Outcome(6, {"what": "NaN"})
    assert in_hours(window_of(WhenSpec()), lambda: failed, print, clock, clock.rest) is failed


def test_a_spec_that_does_not_wait_ends_with_75(capsys: pytest.CaptureFixture[str]) -> None:
    closed = WhenSpec("18:00-06:00", outside="requeue")
    assert in_hours(window_of(closed), lambda: Outcome(0), print, Clock(12)).exit_code == 75
    assert "begin 2026-11-23 18:00" in capsys.readouterr().out


def test_a_signal_ends_the_wait() -> None:
    clock = Clock(12)

    def rest(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert in_hours(window_of(NIGHT), lambda: Outcome(0), print, clock, rest).exit_code == 75


@pytest.mark.parametrize(("at_end", "code"), [("stop", 0), ("requeue", 75)])
def test_a_budget_that_others_use_up_while_a_run_waits_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_end: str, code: int
) -> None:
    said: list[str] = []
    used = "the budget of $1 is used up"
    monkeypatch.setattr(start, "used_up", lambda run, run_dir: (used, run.budget))
    monkeypatch.setattr(start, "run_brief", lambda *told: pytest.fail("it was begun again"))
    monkeypatch.setattr(closing, "close_run", lambda *told: None)
    path = write_spec(tmp_path, tmp_path / "run")
    path.write_text(path.read_text() + f'[run.budget]\ndevice_hours = 1000.0\nat_end = "{at_end}"\n')
    assert start.train(load_spec(path), said.append) == code
    assert f"stop     {used}" in said


def closed_hours() -> str:
    """Return hours that begin two hours from now."""
    hour = datetime.datetime.now().hour
    return f"{(hour + 2) % 24:02d}:00-{(hour + 3) % 24:02d}:00"


def test_a_run_that_nobody_waits_for_is_refused_outside_of_its_hours(tmp_path: Path) -> None:
    with pytest.raises(Requeue):
        refuse_outside(WhenSpec(closed_hours()))
    refuse_outside(WhenSpec())
    run_dir = tmp_path / "run"
    path = write_spec(tmp_path, run_dir)
    hours = f"--set=run.when.window={closed_hours()}", "--set=run.when.outside=requeue"
    ended = in_process("train", path, *hours)
    assert ended.returncode == 75 and "the hours of run.when" in ended.stdout, ended
    assert not (run_dir / "journal").exists()


def test_the_step_after_the_hours_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = Notices(RunSpec(when={"window": "18:00-06:00"}))
    clock = Clock(20)
    monkeypatch.setattr(notices.time, "time", clock)
    looking.enter(0.0, True, None)
    assert looking.look() == ""
    clock.now += 10 * 3600 - 1
    assert looking.look() == ""
    clock.now += 1
    assert "18:00-06:00" in looking.look() and not looking.is_over
    assert looking.goes_on() == clock.now + 12 * 3600


def test_a_run_that_is_stopped_in_its_hours_does_not_say_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices.time, "time", Clock(20))
    for when in ({"window": "18:00-06:00"}, {}):
        looking = Notices(RunSpec(when=when))
        looking.enter(0.0, True, None)
        assert looking.goes_on() is None


@pytest.mark.deep
def test_a_run_in_the_greenest_hours_pauses_for_the_dirty_one_and_goes_on(tmp_path: Path) -> None:
    """For real, by an hourly file, in a zone whose clock is put forward: its dirty hour lasts for a minute."""
    closes = (time.time() // 60 + 2) * 60
    opens = closes + 60
    local = datetime.datetime.fromtimestamp(closes, datetime.UTC)
    west = local.hour * 60 + local.minute - 60  # so that it is 1:00 there when the dirty hour begins
    day = (local - datetime.timedelta(minutes=west)).timetuple().tm_yday - 1
    zone = f"AAA{_of_zone(west)}BBB{_of_zone(west - 59)},{day}/1:01,{(day + 180) % 365}/3"
    (tmp_path / "carbon.csv").write_text("".join(f"{hour},{900 if hour == 1 else 100}\n" for hour in range(24)))
    run_dir = tmp_path / "run"
    path = write_spec(tmp_path, run_dir, steps=100_000)
    hours = "--set=run.when.window=greenest", "--set=run.when.hours=23", "--set=run.budget.device_hours=1000"
    words = [sys.executable, "-m", "paceline", "train", str(path), f"--set=run.when.carbon={tmp_path / 'carbon.csv'}"]
    # A process of its own from the beginning: one that is forked has its zone already.
    process = subprocess.Popen([*words, *hours], env=environment(TZ=zone), text=True, stdout=subprocess.DEVNULL)
    STARTED.append(process)
    wait_until(lambda: bool(records_of(run_dir, "run_ended")), 300)
    (ended,) = records_of(run_dir, "run_ended")
    assert ended["status"] == "requeue" and ended["goes_on"] == opens and ended["time"] >= closes - 1
    wait_until(lambda: len(records_of(run_dir, "run_started")) == 2, 200)
    again = records_of(run_dir, "run_started")[1]
    assert again["time"] >= opens and again["step"] == ended["step"]
    process.send_signal(signal.SIGTERM)
    ending(process, 90)
    positions = [each["position_before"] for each in steps_of(run_dir)]
    assert positions == sorted(set(positions))


def _of_zone(west: int) -> str:
    return f"{'-' if west < 0 else ''}{abs(west) // 60}:{abs(west) % 60:02d}"


def test_hours_are_a_text_or_a_table_and_their_file_stands_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "hours.csv").write_text("".join(f"{hour},{hour}\n" for hour in range(24)))
    path = tmp_path / "spec.toml"
    path.write_text('[run.when]\nwindow = "cheapest"\nhours = 6\ntariff = "hours.csv"\n')
    window = window_of(load_spec(path).run.when)
    midnight = datetime.datetime.combine(datetime.date.today(), datetime.time()).timestamp()
    assert window.is_open(midnight + 5.5 * 3600) and not window.is_open(midnight + 6.5 * 3600)
    assert parse_spec('[run]\nwhen = "18:00-06:00"').run.when == NIGHT
    assert time.time() > midnight


def test_the_plan_says_what_waiting_saves(tmp_path: Path) -> None:
    (tmp_path / "hours.csv").write_text("".join(f"{hour},{0.1 if hour < 8 else 0.4}\n" for hour in range(24)))
    words = ["plan", "--set=task.model=llama-124m", "--set=cluster.device=h100-sxm", "--set=cluster.devices=8",
             "--set=task.data.seq_len=4096", "--set=task.data.max_bytes=100 kB", "--set=task.stop=3000 steps",
             '--set=task.global_batch=1 Mi tokens', "--set=run.when.window=cheapest",
             f"--set=run.when.tariff={tmp_path / 'hours.csv'}", "--set=run.when.carbon=400"]  # fmt: skip
    told = in_process(*words)
    assert told.returncode == 0, told.stderr
    assert "hours    cheapest: " in told.stdout and "waiting saves $" in told.stdout
    assert "0 kg CO2e (0%)" in told.stdout


def test_what_waiting_saves_is_there_for_machines(tmp_path: Path) -> None:
    path = write_spec(tmp_path, tmp_path / "run")
    always = json.loads(in_process("plan", path, "--json").stdout)
    assert "hours" in always and always["hours"] is None
    dear = datetime.datetime.now().hour
    prices = [0.30 if hour in (dear, (dear + 1) % 24) else 0.10 for hour in range(24)]
    (tmp_path / "tariff.csv").write_text("hour,value\n" + "".join(f"{h},{p}\n" for h, p in enumerate(prices)))
    hours = ("--set=run.when.window=cheapest", f"--set=run.when.tariff={tmp_path / 'tariff.csv'}")
    ended = in_process("plan", path, "--json", *hours)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    found = told["hours"]
    assert (found["window"], found["is_open"]) == ("cheapest", False) and found["ends"] > found["ends_at_once"]
    assert (found["usd_per_kwh"], found["usd_per_kwh_at_once"]) == pytest.approx((0.10, 0.30))
    assert found["usd_saved"] == pytest.approx(told["forecast"]["kwh"]["value"] * 0.20)
    assert found["carbon_kg_saved"] is None, "nothing says what the carbon is in which hour"

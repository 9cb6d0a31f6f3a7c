"""Figures of the grid in time, and the hours that a run trains in by them."""

from __future__ import annotations

import datetime
import http.server
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from paceline.cluster.grid.figures import FixedFigure, HourlyFigures, mean_of, read_figures
from paceline.cluster.grid.watttime import watttime_figures
from paceline.cluster.grid.window import RunWindow, window_of
from paceline.errors import ConfigError
from paceline.spec.watch.when import WhenSpec


def at(hour: float, day: int = 23) -> float:
    return datetime.datetime(2026, 11, day).timestamp() + hour * 3600


NIGHT = {hour: 0.1 if hour < 6 or hour >= 22 else 0.3 for hour in range(24)}


def hours_file(folder: Path, name: str = "hours.csv") -> str:
    path = folder / name
    if name.endswith(".toml"):
        path.write_text("[hours]\n" + "".join(f'"{hour}" = {value}\n' for hour, value in NIGHT.items()))
    else:
        path.write_text("# EUR tariff\nhour,usd\n" + "".join(f"{hour},{value}\n" for hour, value in NIGHT.items()))
    return str(path)


def test_a_number_is_the_same_at_every_hour() -> None:
    figures = read_figures("41", "run.when.carbon")
    assert figures.at(at(3)) == figures.at(at(15)) == 41 and mean_of(figures, at(1), at(9)) == 41


@pytest.mark.parametrize("name", ["hours.csv", "hours.toml"])
def test_hours_of_the_day_and_their_mean(tmp_path: Path, name: str) -> None:
    figures = read_figures(hours_file(tmp_path, name), "run.when.tariff")
    assert figures.at(at(5.9)) == 0.1 and figures.at(at(6)) == 0.3 and figures.at(at(5.9, day=28)) == 0.1
    assert mean_of(figures, at(5.5), at(6.5)) == pytest.approx(0.2)
    assert mean_of(figures, at(0), at(24)) == pytest.approx((8 * 0.1 + 16 * 0.3) / 24)


def test_single_hours_come_before_typical_ones(tmp_path: Path) -> None:
    path = tmp_path / "carbon.csv"
    rows = [(at(hour, day), value) for day, value in ((23, 100.0), (24, 300.0)) for hour in range(24)]
    path.write_text("".join(f"{datetime.datetime.fromtimestamp(when).isoformat()},{value}\n" for when, value in rows))
    figures = read_figures(str(path), "run.when.carbon")
    assert (figures.at(at(9, 23)), figures.at(at(9, 24)), figures.at(at(9, 27))) == (100.0, 300.0, 200.0)


def test_several_rows_of_an_hour_are_their_mean(tmp_path: Path) -> None:
    """Grids that publish half hours: the last row of an hour is not the hour."""
    path = tmp_path / "half-hours.csv"
    path.write_text("time,g\n2026-11-23T18:00,100\n2026-11-23T18:30,300\n2026-11-24T18:00,500\n7,1\n7:00,3\n")
    figures = read_figures(str(path), "run.when.carbon")
    assert (figures.at(at(18.2)), figures.at(at(18.9)), figures.at(at(7))) == (200.0, 200.0, 2.0)
    assert figures.at(at(18, day=26)) == 350.0, "each day counts once"


@pytest.mark.parametrize("text", ["0,-0.05\n1,0.1\n", "2026-11-23T00:00,n/a\n1,0.1\n", "0,nan\n1,1\n", "0\n1,1\n"])
def test_a_first_row_that_is_an_hour_is_no_header(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hours.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="row 1"):
        read_figures(str(path), "run.when.tariff")


@pytest.mark.parametrize("text", ["hour,usd\n7,cheap\n", "7,-1\n8,1\n9,-2\n", "", "25:00,1\n26:00,1\n"])
def test_files_without_hours_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hours.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="tariff"):
        read_figures(str(path), "run.when.tariff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_figures(str(tmp_path / "nothing.csv"), "run.when.tariff")


def test_hours_of_the_clock_pass_midnight() -> None:
    window = window_of(WhenSpec("18:00-06:00"))
    assert [window.is_open(at(hour)) for hour in (0, 5.99, 6, 12, 17.99, 18, 23)] == [
        True, True, False, False, False, True, True]  # fmt: skip
    assert window.changes(at(12)) == at(18) and window.changes(at(20)) == at(30)
    assert window_of(WhenSpec()).is_open(at(12)) and math.isinf(window_of(WhenSpec()).changes(at(12)))


def test_the_cheapest_hours_of_each_day(tmp_path: Path) -> None:
    window = window_of(WhenSpec("cheapest", hours=8, tariff=hours_file(tmp_path)))
    assert [hour for hour in range(24) if window.is_open(at(hour))] == [0, 1, 2, 3, 4, 5, 22, 23]
    assert window.changes(at(7)) == at(22) and window.changes(at(23)) == at(30)


def test_where_an_hour_is_unknown_no_hour_is_left_out() -> None:
    partly = HourlyFigures({}, dict.fromkeys(range(12), 1.0), "half a day")
    assert RunWindow(WhenSpec("greenest", carbon="x"), FixedFigure(1.0, ""), partly).is_open(at(18))


def test_what_waiting_saves_is_what_the_hours_say(tmp_path: Path) -> None:
    """12 hours from 8:00: at once 0.3 throughout; in the night from 22:00 on 8 hours, and 4 of the next."""
    window = window_of(WhenSpec("cheapest", hours=8, tariff=hours_file(tmp_path), carbon="400"))
    found = window.waiting(at(8), 12 * 3600)
    assert found.ends_at_once == at(20) and found.ends == at(24 + 22 + 4)
    assert found.tariff_at_once == pytest.approx(0.3) and found.tariff == pytest.approx(0.1)
    assert found.carbon == found.carbon_at_once == 400


def test_a_run_of_centuries_is_told_from_its_first_year() -> None:
    """A plan of a large model on a small machine took minutes for its hours, and failed beyond the calendar."""
    window, centuries = window_of(WhenSpec(window="18:00-06:00", tariff="0.1", carbon="100")), 4e11
    found = window.waiting(at(12), centuries)
    assert found.ends - at(12) == pytest.approx(2 * centuries, rel=0.01)
    assert (found.tariff, found.carbon_at_once) == (0.1, 100)


def test_hours_that_nothing_can_choose_are_refused() -> None:
    for wrong in ({"window": "cheapest"}, {"window": "greenest", "tariff": "1"}, {"window": "night"},
                  {"window": "06:00-06:00"}):  # fmt: skip
        with pytest.raises(ConfigError):
            WhenSpec(**wrong)


class _Service(http.server.BaseHTTPRequestHandler):
    taken: ClassVar[list[str]] = []  # of all services

    def do_GET(self) -> None:
        path, authorization = self.path, self.headers["Authorization"]
        self.taken.append(path)
        if path.startswith("/moved/"):
            self.send_response(int(path.split("/")[2]))
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/login")
            self.end_headers()
            return
        answer: dict[str, object] = {"token": "t"} if path == "/login" and authorization.startswith("Basic ") else {}
        if path.startswith("/v3/forecast?region=CAISO_NORTH") and authorization == "Bearer t":
            answer = {"data": [{"point_time": f"2026-11-23T{hour:02d}:{minute:02d}:00Z", "value": 100.0 * (hour + 1)}
                               for hour in range(24) for minute in (0, 30)]}  # fmt: skip
        self.send_response(200 if answer else 403)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def service() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_service_is_asked_with_an_account_and_told_without_its_secret(service: str) -> None:
    account = {"WATTTIME_USER": "me", "WATTTIME_PASSWORD": "pa55word-of-mine"}
    figures = watttime_figures("watttime:CAISO_NORTH", account, service)
    moment = datetime.datetime(2026, 11, 23, 7, 10, tzinfo=datetime.UTC).timestamp()
    assert figures.at(moment) == pytest.approx(800 * 0.45359237)
    with pytest.raises(ConfigError, match="WATTTIME_USER"):
        watttime_figures("watttime:CAISO_NORTH", {}, service)
    with pytest.raises(ConfigError, match="does not answer") as refused:
        watttime_figures("watttime:ELSEWHERE", account, service)
    assert "pa55word" not in str(refused.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_service_that_sends_on_gets_no_login_there(service: str, status: int) -> None:
    """urllib would send name and password along, to whatever host the answer names."""
    account = {"WATTTIME_USER": "me", "WATTTIME_PASSWORD": "pa55word-of-mine"}
    _Service.taken.clear()
    with pytest.raises(ConfigError, match=f"{status}, another address") as refused:
        watttime_figures("watttime:CAISO_NORTH", account, f"{service}/moved/{status}")
    assert _Service.taken == [f"/moved/{status}/login"] and "pa55word" not in str(refused.value)


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_the_hours_of_a_day_on_which_the_clock_is_changed_are_those_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, day: str
) -> None:
    """In Berlin the clock is put forward on the first of these days, from 2:00 to 3:00, and back on the other."""
    path = tmp_path / "carbon.csv"
    path.write_text("".join(f"{hour},{40 if hour % 2 == 0 else 400}\n" for hour in range(24)))
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        window = window_of(WhenSpec("greenest", hours=11, carbon=str(path)))
        noon = datetime.datetime.fromisoformat(f"{day}T12:30").timestamp()
        assert window.is_open(noon) and not window.is_open(noon + 3600) and window.is_open(noon + 2 * 3600)
    finally:
        monkeypatch.undo()
        time.tzset()

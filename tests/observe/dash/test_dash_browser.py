"""The page in a browser: it follows a run, complains of nothing, asks nobody else, and runs no word of a journal."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import report_journals as journals
from browser import browser
from served import served

from paceline.lock import take
from paceline.observe.live.run import RUNNING, LiveRun
from paceline.spec.watch.traced import requested_trace

EVIL = "<img src=x onerror=\"document.body.dataset.evil='1'\"><script>document.body.dataset.evil='1'</script>"
FIND = "((field) => {{ field.value = {}; field.dispatchEvent(new Event('input')) }})(document.getElementById('find'))"


def test_a_live_run_in_a_browser(tmp_path: Path) -> None:
    records = journals.resumed()
    journals.write(tmp_path / "runs" / "live", records[:40])
    journals.write(tmp_path / "runs" / "crashed", journals.failed())
    with served(tmp_path / "runs") as server, browser(tmp_path / "profile") as tab:
        began = time.monotonic()
        tab.open(f"{server.address.url}run/live")
        tab.wait("document.querySelector('#loss svg')")
        painted = time.monotonic() - began
        tab.wait("document.getElementById('link').textContent === 'live'")
        fault = {**records[0], "kind": "fault", "what": EVIL, "because": EVIL, "time": records[0]["time"] + 1}
        with (tmp_path / "runs/live/journal/0001.jsonl").open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in [*records[40:60], fault]))
        tab.wait("document.querySelector('#faults').textContent.includes('onerror')")
        tab.wait("!document.getElementById('faults').hidden")
        tab.ask("document.getElementById('pause').click()")
        assert tab.ask("document.getElementById('pause').getAttribute('aria-pressed')") == "true"
        tab.call("Emulation.setDeviceMetricsOverride", width=375, height=800, deviceScaleFactor=1, mobile=True)
        assert tab.ask("document.documentElement.scrollWidth") <= 375, "the page is wider than a phone"
        tab.open(f"{server.address.url}")
        tab.wait("document.querySelector('#runs a')")
        tab.ask("document.querySelectorAll('input').forEach((each) => each.click())")
        tab.click("form button")
        tab.wait("document.querySelector('h1')?.textContent.includes(' and ')")
        tab.open(f"{server.address.url}run/crashed")
        tab.wait("document.querySelector('#head .alert').textContent.includes('the loss of step 41')")
        for index in range(18):
            journals.write(tmp_path / "runs" / f"run-{index}", records[: 60 + index])
        names = "&".join(f"run={name}" for name in ("live", "crashed", *(f"run-{index}" for index in range(18))))
        tab.open(f"{server.address.url}compare?{names}")
        tab.wait("document.querySelectorAll('svg .end').length === 40")
        assert tab.ask("document.body.dataset.evil") is None
        assert tab.complaints == []
        assert {url for url in tab.asked if not url.startswith(server.address.url)} == set()
    print(f"first chart after {painted:.2f} s")


def test_odd_journals_fit_a_phone_and_complain_of_nothing(tmp_path: Path) -> None:
    """A name as long as a file may have, steps beyond all numbers, a clock in 1970, nothing at all."""
    records = journals.complete()[:40]
    odd = {
        "x" * 200: records,
        "beyond": [{**each, "step": 1e305 * each["step"]} if each["kind"] == "step" else each for each in records],
        "diverged": [{**each, "loss": 1e305} if each["kind"] == "step" else each for each in records],
        "in-1970": [{**each, "time": each["time"] % 86400} for each in records],
        "plan": [{**records[0], "plan_text": "y" * 2000}, *records[1:]],
    }
    for name, lines in odd.items():
        journals.write(tmp_path / "runs" / name, lines)
    (tmp_path / "runs" / "empty" / "journal").mkdir(parents=True)
    with served(tmp_path / "runs") as server, browser(tmp_path / "profile") as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=375, height=800, deviceScaleFactor=1, mobile=True)
        for path in ("", *(f"run/{name}" for name in (*odd, "empty"))):
            tab.open(f"{server.address.url}{path}")
            tab.wait("document.readyState === 'complete' && document.querySelector('#page')")
            assert tab.ask("document.documentElement.scrollWidth") <= 375, f"{path[:20]} is wider than a phone"
        assert tab.complaints == []


def test_of_many_runs_one_is_found_and_a_long_name_pushes_nothing_away(tmp_path: Path) -> None:
    records = journals.complete()[:30]
    diverged = [{**each, "loss": "nan"} if each["kind"] == "step" else each for each in records]
    names = ["x" * 200, "日本語-прогон", *(f"sweep-{number:03d}" for number in range(60))]
    for name in names:
        journals.write(tmp_path / "runs" / name, records)
    journals.write(tmp_path / "runs" / "diverged", diverged)
    with served(tmp_path / "runs") as server, browser(tmp_path / "profile") as tab:
        tab.call("Emulation.setDeviceMetricsOverride", width=1280, height=900, deviceScaleFactor=1, mobile=False)
        tab.open(server.address.url)
        tab.wait("document.getElementById('found').textContent === '63 of 63 runs'")
        row = "[...document.querySelectorAll('#runs tr')].find((each) => each.textContent.includes('diverged'))"
        assert "no number" in tab.ask(f"{row}.textContent")
        assert tab.ask(f"{row}.cells[8].getBoundingClientRect().right") <= 1280, "the last record is out of sight"
        assert tab.ask(f"{row}.getBoundingClientRect().height") < 50, "a row is more than a line"
        assert tab.ask("document.querySelector('.tools button').getBoundingClientRect().bottom") < 400
        for typed, left in (("SWEEP-00 silent", 10), ("прогон", 1), ("", 63)):
            tab.ask(FIND.format(json.dumps(typed)))
            shown = "[...document.querySelectorAll('#runs tbody tr')].filter((each) => each.offsetHeight > 0).length"
            assert tab.ask(shown) == left, typed
        tab.ask(FIND.format("'diverged'"))
        journals.write(tmp_path / "runs" / "another", records)
        tab.wait("document.getElementById('found').textContent === '1 of 64 runs'")
        assert tab.complaints == []


def test_a_browser_may_ask_for_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRun, "status", lambda run, now=None: RUNNING)
    run = journals.write(tmp_path / "live", journals.complete()[:60])
    lock = take(run)
    try:
        with served(run, actions=True) as server, browser(tmp_path / "profile") as tab:
            tab.open(f"{server.address.url}run/live")
            tab.wait("document.querySelector('#traces form button')")
            tab.ask("document.querySelector('#traces [name=steps]').value = '5'")
            tab.click("#traces form button")
            tab.wait("document.querySelector('#traces .note')?.textContent.includes('the next 5 steps')")
            assert tab.complaints == []
    finally:
        lock.release()
    asked = requested_trace(run)
    assert asked is not None and (asked.last, asked.by) == (5, "page")


def test_what_can_be_used_has_a_name_and_can_be_reached(tmp_path: Path) -> None:
    """Without a mouse and without eyes: names for what can be pressed, words for pictures, a way to the content."""
    run = journals.write(tmp_path / "live", journals.resumed())
    with served(run) as server, browser(tmp_path / "profile") as tab:
        tab.open(f"{server.address.url}run/live")
        tab.wait("document.querySelector('#loss svg')")
        unnamed = "[...document.querySelectorAll('svg')].filter((each) => !each.getAttribute('aria-label')).length"
        assert tab.ask(unnamed) == 0
        nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
        named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node}
        assert ("button", "pause") in named and ("link", "to the content") in named
        assert not [role for role, name in named if role in ("button", "link", "progressbar", "image") and not name]
        tab.ask("document.body.focus()")
        for key in ("Tab",):
            tab.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=9)
            tab.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=9)
        assert tab.ask("document.activeElement.className") == "skip"
        for scheme, dark in (("dark", True), ("light", False)):
            tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            colour = tab.ask("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, colour[4:-1].split(","))) < 200) == dark, colour

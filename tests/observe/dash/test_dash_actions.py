"""What the page may ask of a run, where it may: a trace. Without --actions it can only be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import report_journals as journals
from runs import wait_until
from served import served

from paceline.lock import take
from paceline.observe.dash import traced
from paceline.observe.live.run import RUNNING, LiveRun
from paceline.spec.watch.traced import requested_trace


def form_of(page: str) -> str:
    found = re.search(r'name="form" value="([^"]+)"', page)
    assert found is not None
    return found[1]


def test_the_button_asks_a_running_job_for_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRun, "status", lambda run, now=None: RUNNING)
    run = journals.write(tmp_path / "live", journals.complete()[:60])
    with served(run, actions=True) as server:
        form, own = form_of(server.get("/run/live").body), f"http://localhost:{server.port}"
        headers = {"host": f"localhost:{server.port}", "origin": own}
        wanted = f"form={form}&steps=4"
        refused = server.get("/run/live/trace", "POST", wanted, **headers)
        assert refused.status == 409 and "nothing trains there" in refused.body
        with_lock = take(run)
        try:
            assert server.get("/run/live/trace", "POST", "form=x&steps=4", **headers).status == 409
            assert server.get("/run/live/trace", "POST", f"form={form}&steps=400", **headers).status == 409
            assert server.get("/run/live/trace", "POST", "x" * (traced.MOST_BYTES + 1), **headers).status == 413
            assert server.get("/run/none/trace", "POST", wanted, **headers).status == 404
            assert server.get("/run/live/trace", "POST", wanted, **{**headers, "origin": "http://a.b"}).status == 405
            assert requested_trace(run) is None, "none of these has asked"
            answer = server.get("/run/live/trace", "POST", wanted, **headers)
            again = server.get("/run/live/trace", "POST", f"form={form}&steps=2", **headers)
            assert again.status == 409 and "a trace of the next steps is under way" in again.body
        finally:
            with_lock.release()
        assert answer.status == 303 and answer.headers["location"] == "/run/live#traces"
        asked = requested_trace(run)
        assert asked is not None and (asked.last, asked.first, asked.by) == (4, None, "page")
        # A part that was just drawn is not drawn again at once.
        wait_until(lambda: "a trace of the next 4 steps is asked for" in server.get("/run/live").body)


def test_without_actions_there_is_no_button_and_nothing_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveRun, "status", lambda run, now=None: RUNNING)
    run = journals.write(tmp_path / "live", journals.complete()[:60])
    with served(run) as server:
        assert "<form" not in server.get("/run/live").body
        host = f"localhost:{server.port}"
        asked = server.get("/run/live/trace", "POST", "form=&steps=3", host=host, origin=f"http://{host}")
        assert asked.status == 405

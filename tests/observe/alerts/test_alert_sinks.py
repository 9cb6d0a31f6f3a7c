"""Where alerts are sent: a webhook of this test's own, commands and files; slow, dead and secret ones."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from observe.alerts.alert_journals import BEGAN, Watched, started, steady, step
from runs import wait_until

from paceline.errors import ConfigError, MissingExtra, PacelineError
from paceline.observe.alerts import outbox as outboxes
from paceline.observe.alerts.message import AlertMessage
from paceline.observe.alerts.outbox import Outbox
from paceline.observe.alerts.silence import silence
from paceline.observe.alerts.sinks.make import NamedSink, make_sinks
from paceline.observe.alerts.sinks.webhook import body
from paceline.spec.journal.beside import read_beside
from paceline.spec.journal.watching import AlertRecord
from paceline.spec.watch.alerts import AlertSinkSpec, AlertsSpec

ALERT = AlertRecord("no_step", "critical", "firing", "no step for 5 min <@all>", {"limit_seconds": 30.0}, "look", 7)
MESSAGE = AlertMessage("asr-2", "runs/asr-2", (ALERT,))
SECRET = "a1b2c3d4e5f6"


class Hook(http.server.ThreadingHTTPServer):
    """A webhook that keeps what it was sent; it answers with `status`, and only when `answers` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.taken: list[tuple[str, dict[str, str], dict[str, object]]] = []
        self.status, self.answers = 200, threading.Event()
        self.elsewhere = ""  # where its answer sends who asks
        self.answers.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{SECRET}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.taken.append((self.path, dict(self.headers), json.loads(content or b"{}")))
        self.server.answers.wait()
        self.send_response(self.server.status)
        if self.server.elsewhere:
            self.send_header("Location", self.server.elsewhere)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()


def sinks_of(*tables: AlertSinkSpec, **environ: str) -> Outbox:
    return Outbox(make_sinks(AlertsSpec(sinks=tables), environ))


def test_a_webhook_gets_json_and_its_token(hook: Hook) -> None:
    sink = AlertSinkSpec("webhook", "$HOOK", token="env:TOKEN")
    outbox = sinks_of(sink, HOOK=hook.url, TOKEN="t0ken-of-mine")
    outbox.put(MESSAGE)
    outbox.close(30.0)
    ((path, headers, sent),) = hook.taken
    assert path == f"/{SECRET}" and headers["Authorization"] == "Bearer t0ken-of-mine"
    assert sent["run"] == "asr-2" and sent["alerts"][0]["rule"] == "no_step"  # type: ignore[index]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_webhook_that_sends_on_gets_no_message_there_and_no_token(hook: Hook, status: int) -> None:
    """urllib would send the token along, without the message, and take that for success."""
    with Hook() as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        hook.status, hook.elsewhere = status, other.url.replace("127.0.0.1", "localhost")
        sink = AlertSinkSpec("webhook", hook.url, token="$TOKEN")
        (made,) = make_sinks(AlertsSpec(sinks=(sink,)), {"TOKEN": "t0ken-of-mine"})
        with pytest.raises(PacelineError, match="takes no message") as refused:
            made.send(MESSAGE)
        assert str(status) in refused.value.because and other.taken == []
        other.shutdown()


def test_whatever_a_sink_raises_its_later_messages_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service's package may raise anything: the thread of the sink goes on, and no word holds a password."""
    monkeypatch.setattr(outboxes, "RETRY_SECONDS", ())
    taken: list[AlertMessage] = []

    def deliver(message: AlertMessage) -> None:
        taken.append(message)
        if len(taken) == 1:
            raise AttributeError("no route to https://me:pa55word-of-mine@host/x")

    said: list[str] = []
    sink = AlertSinkSpec("webhook", "http://host/")
    outbox = Outbox([NamedSink("webhook 1", sink, deliver)], said.append)
    for _ in range(2):
        outbox.put(MESSAGE)
    wait_until(lambda: len(taken) == 2)
    outbox.close(30.0)
    assert len(said) == 1 and "AttributeError" in said[0] and "pa55word" not in said[0]


def test_slack_and_discord_get_their_own_shapes_and_nobody_is_pinged() -> None:
    slack, discord = body("slack", MESSAGE), body("discord", MESSAGE)
    assert set(slack) == {"text"} and "&lt;@all&gt;" in slack["text"]
    assert discord["allowed_mentions"] == {"parse": []} and "[critical] no step" in discord["content"]
    long = AlertMessage("x", "y", (ALERT,) * 200)
    assert len(body("discord", long)["content"]) == 2000


def test_a_command_and_a_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    command = AlertSinkSpec("command", f'cat > {kept}; test "$PACELINE_ALERT"')
    outbox = sinks_of(command, AlertSinkSpec("file", str(tmp_path / "deep" / "alerts.jsonl")))
    outbox.put(MESSAGE)
    outbox.close(30.0)
    assert json.loads(kept.read_text())["alerts"][0]["title"] == ALERT.title
    (line,) = (tmp_path / "deep" / "alerts.jsonl").read_text().splitlines()
    assert json.loads(line)["severity"] == "critical" and json.loads(line)["run"] == "asr-2"


def test_what_a_sink_does_not_want_is_not_sent(tmp_path: Path) -> None:
    wanted = {"all": AlertSinkSpec("file", str(tmp_path / "all"), least="info"),
              "grave": AlertSinkSpec("file", str(tmp_path / "grave"), least="critical"),
              "disk": AlertSinkSpec("file", str(tmp_path / "disk"), rules=("disk",))}  # fmt: skip
    outbox = sinks_of(*wanted.values())
    outbox.put(AlertMessage("r", "d", (ALERT, AlertRecord("finished", "info", "firing", "done", {}, ""))))
    outbox.close(30.0)
    lines = {name: len((tmp_path / name).read_text().splitlines()) if (tmp_path / name).exists() else 0
             for name in wanted}  # fmt: skip
    assert lines == {"all": 2, "grave": 1, "disk": 0}


def test_a_sink_that_does_not_answer_holds_nobody_up(tmp_path: Path, hook: Hook) -> None:
    hook.answers.clear()
    outbox = sinks_of(AlertSinkSpec("webhook", hook.url, timeout="60 s"), AlertSinkSpec("file", str(tmp_path / "f")))
    for _ in range(outboxes.MOST_WAITING * 2):
        outbox.put(MESSAGE)
    wait_until(lambda: (tmp_path / "f").exists() and bool(hook.taken))
    outbox.close(0.1)
    assert len(hook.taken) == 1


def test_a_sink_that_fails_is_tried_again_and_told_without_its_secret(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outboxes, "RETRY_SECONDS", (0.01, 0.01))
    said: list[str] = []
    hook.status = 503
    sinks = make_sinks(AlertsSpec(sinks=(AlertSinkSpec("webhook", "$HOOK"),)), {"HOOK": hook.url})
    outbox = Outbox(sinks, said.append)
    outbox.put(MESSAGE)
    wait_until(lambda: len(hook.taken) == 3)
    hook.status = 200
    outbox.put(MESSAGE)
    wait_until(lambda: len(hook.taken) == 4 and not outbox.failures())
    outbox.close(30.0)
    assert said == ["alert    webhook 1 takes no message: it answers 503"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/" + SECRET, "ftp://" + SECRET, "http://[" + SECRET])
def test_no_error_of_a_sink_holds_its_secret(url: str) -> None:
    (sink,) = make_sinks(AlertsSpec(sinks=(AlertSinkSpec("slack", "$HOOK"),)), {"HOOK": url})
    with pytest.raises(Exception, match="takes no message") as failure:
        sink.send(MESSAGE)
    chain: BaseException | None = failure.value
    while chain is not None:
        assert SECRET not in str(chain)
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)


def test_secrets_do_not_stand_in_specs() -> None:
    for wrong in ({"kind": "slack", "to": "https://hooks.slack.com/services/x"}, {"kind": "webhook", "to": "http://x",
                  "token": "abc"}, {"kind": "apprise", "to": "mailto://u:p@x"}, {"kind": "command"},
                  {"kind": "file", "to": "x", "rules": ("no_stop",)}):  # fmt: skip
        with pytest.raises(ConfigError):
            AlertSinkSpec(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="HOOK"):
        make_sinks(AlertsSpec(sinks=(AlertSinkSpec("slack", "$HOOK"),)), {})


def test_apprise_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    (sink,) = make_sinks(AlertsSpec(sinks=(AlertSinkSpec("apprise", "$TO"),)), {"TO": "json://x"})
    with pytest.raises(Exception, match="takes no message"):
        sink.send(MESSAGE)
    from paceline.observe.alerts.sinks.services import need_apprise

    with pytest.raises(MissingExtra):
        need_apprise()


# ---- what is sent, and when ------------------------------------------------------------------------------------


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def flapping(tmp_path: Path, **options: object) -> tuple[Watched, Path, Outbox]:
    kept = tmp_path / "sent"
    spec = AlertsSpec(sinks=(AlertSinkSpec("file", str(kept)),), off=("no_step",), **options)  # type: ignore[arg-type]
    outbox = Outbox(make_sinks(spec, {}))
    watched = Watched(tmp_path, spec, outbox)
    watched.take(started(evaluate_every="none"), *(step(each, BEGAN + each / 2) for each in range(1, 20)))
    return watched, kept, outbox


def test_alerts_that_come_together_are_one_message_and_what_is_critical_does_not_wait(tmp_path: Path) -> None:
    watched, kept, outbox = flapping(tmp_path, group="20 s")
    watched.disk = (96.0, 100.0)
    watched.take(after=20.0)
    assert not kept.exists(), "it waits for others"
    (fired,) = watched.take(step(20, BEGAN + 21.0, float("nan")))
    outbox.close(30.0)
    assert fired.rule == "not_finite" and [each["rule"] for each in lines_of(kept)] == ["disk", "not_finite"]


def test_an_alert_that_comes_and_goes_is_sent_once_and_is_on_record_each_time(tmp_path: Path) -> None:
    watched, kept, outbox = flapping(tmp_path, group="0 s", again="10 min")
    for turn in range(6):
        watched.disk = (96.0 if turn % 2 == 0 else 50.0, 100.0)
        watched.take(after=20.0 + 6 * turn)
    watched.disk = (96.0, 100.0)
    watched.take(after=700.0)
    outbox.close(30.0)
    on_record = list(read_beside(tmp_path, AlertRecord))
    assert [each.state for each in on_record if each.rule == "disk"] == ["firing", "resolved"] * 3 + ["firing"]
    assert [each["state"] for each in lines_of(kept)].count("firing") == 2


def test_a_silenced_rule_and_quiet_hours_are_on_record_and_not_sent(tmp_path: Path) -> None:
    watched, kept, outbox = flapping(tmp_path, group="0 s", quiet="00:00-24:00")
    silence(tmp_path, "not_finite", BEGAN + 1000)
    watched.disk = (96.0, 100.0)
    watched.take(step(20, BEGAN + 21.0, float("nan")), after=1.0)
    outbox.close(30.0)
    on_record = {each.rule: each.sent for each in read_beside(tmp_path, AlertRecord)}
    assert on_record == {"disk": False, "not_finite": False} and not kept.exists()


def test_hours_that_are_none_are_refused() -> None:
    for wrong in ("22-07", "25:00-01:00", "night", "22:00-07:61"):
        with pytest.raises(ConfigError):
            AlertsSpec(quiet=wrong)


def test_a_watch_passes_earlier_starts_over_and_ends_what_they_left_firing(tmp_path: Path) -> None:
    first = Watched(tmp_path)
    first.take(*steady(20), step(21, BEGAN + 11.0, float("nan")))
    Watched(tmp_path).watch._end_earlier()
    last = list(read_beside(tmp_path, AlertRecord))[-1]
    assert (last.rule, last.state, last.sent) == ("not_finite", "resolved", False)

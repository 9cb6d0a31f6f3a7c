"""What clouds announce: servers that speak as their metadata services do, and what a run hears of them."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from runs import wait_until

from paceline.errors import ConfigError
from paceline.run.survive.clouds.announced import ATTEMPTS, Announced, NoticeUrl
from paceline.run.survive.notice import Notices
from paceline.spec.load import parse_spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.recovery import NOTICE_SERVICES, RecoverySpec

Answer = tuple[int, str]
Asked = Callable[[str, str, Any], Answer]  # method, path with its query, headers -> status and text


@contextmanager
def served(answer: Asked) -> Iterator[str]:
    """Give the address of a server that answers so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.command, self.path, self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:  # a connection that a test has cut
            pass

    with Quiet(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def at(address: str, cloud: str) -> NoticeUrl:
    """Return what asks a cloud's service that is served elsewhere."""
    return NoticeUrl(address + "/" + NOTICE_SERVICES[cloud].split("/", 3)[3], 10.0)


def test_amazon_is_asked_with_a_token_of_its_own() -> None:
    """Without one IMDSv2 answers 401, and the end of the machine came unheard."""
    says, tokens = [""], ["first"]

    def answer(method: str, path: str, headers: Any) -> Answer:
        if method == "PUT":
            given = path == "/latest/api/token" and headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            return (200, tokens[-1]) if given else (400, "")
        if headers.get("X-aws-ec2-metadata-token") != tokens[-1]:
            return 401, "Unauthorized"
        return (200, says[0]) if says[0] and path == "/latest/meta-data/spot/instance-action" else (404, "not found")

    with served(answer) as address:
        url = at(address, "aws")
        assert [url.ask() for _ in range(2 * ATTEMPTS)] == [Announced()] * (2 * ATTEMPTS), "404: nothing is announced"
        tokens.append("second")  # the first one's time is over
        url.ask()
        says[0] = '{"action": "terminate", "time": "2026-11-29T12:00:00Z"}'
        assert '"terminate"' in url.ask().notice


def test_amazons_first_version_gives_no_tokens_and_is_asked_all_the_same() -> None:
    with served(lambda method, path, headers: (403, "") if method == "PUT" else (200, "terminate")) as address:
        assert "terminate" in at(address, "aws").ask().notice


def test_google_says_false_until_the_machine_is_taken() -> None:
    """FALSE counted as a notice, and without its header the service answers 403."""
    says = ["FALSE"]

    def answer(method: str, path: str, headers: Any) -> Answer:
        known = path == "/computeMetadata/v1/instance/preempted" and headers.get("Metadata-Flavor") == "Google"
        return (200, says[0]) if known else (403, "")

    with served(answer) as address:
        url = at(address, "gcp")
        assert url.ask() == Announced()
        says[0] = "TRUE"
        assert url.ask().notice.endswith("TRUE")


def test_of_azures_events_those_count_that_end_this_machine() -> None:
    """The list is there when it is empty, and has the events of machines beside this one."""
    events: list[dict[str, Any]] = []

    def answer(method: str, path: str, headers: Any) -> Answer:
        if headers.get("Metadata") != "true":
            return 400, ""
        if path.startswith("/metadata/instance/compute/name"):
            return 200, "trainer-3"
        known = path == "/metadata/scheduledevents?api-version=2020-07-01"
        return (200, json.dumps({"DocumentIncarnation": 1, "Events": events})) if known else (404, "")

    def event(kind: str, *names: str) -> dict[str, Any]:
        return {"EventType": kind, "Resources": list(names), "NotBefore": "Sun, 29 Nov 2026 12:00:00 GMT"}

    with served(answer) as address:
        url = at(address, "azure")
        assert url.ask() == Announced()
        events += [event("Freeze", "trainer-3"), event("Preempt", "trainer-4")]
        assert url.ask() == Announced()
        events.append(event("Preempt", "trainer-4", "trainer-3"))
        assert url.ask().notice.endswith("Preempt, not before Sun, 29 Nov 2026 12:00:00 GMT")


@pytest.mark.parametrize("cloud", NOTICE_SERVICES)
def test_a_metadata_service_is_asked_past_the_proxy(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(method: str, path: str, headers: Any) -> Answer:
        asked.append(path)
        return 404, ""

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with served(answer) as address:
        assert at(address, cloud).ask() == Announced()
    assert asked


@pytest.mark.parametrize(("status", "because"), [(403, "403"), (0, "nobody answers")])
def test_a_service_that_refuses_is_told_once_and_goes_on_being_asked(
    status: int, because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was said of it, and the run would have trained to the last second without a checkpoint."""
    monkeypatch.setattr("paceline.run.survive.notice.URL_SECONDS", 0.02)
    answers, asked = [(status, "")], []

    def answer(method: str, path: str, headers: Any) -> Answer:
        asked.append(path)
        if not answers[0][0]:
            raise ConnectionAbortedError("as a test wants")
        return answers[0]

    with served(answer) as address:
        recovery = dataclasses.replace(RecoverySpec(), notice_url=f"{address}/notice")
        notices = Notices(dataclasses.replace(RunSpec(), recovery=recovery))
        notices.enter(1.0, True, None)
        told = []
        wait_until(lambda: told.extend(notices.take()) or told)
        seen = len(asked)
        wait_until(lambda: len(asked) > seen + 2 * ATTEMPTS)
        told += notices.take()
        assert notices.look() == "" and len(told) == 1
        assert because in told[0].because and address in told[0].because
        answers[0] = 200, "the end"
        wait_until(lambda: "the end" in notices.look())
        notices.close()


def test_the_first_rank_of_each_node_looks() -> None:
    """What a cloud tells a machine is of that machine alone: of other nodes nobody heard."""
    with served(lambda method, path, headers: (200, "the end")) as address:
        recovery = dataclasses.replace(RecoverySpec(), notice_url=address)
        run, said = dataclasses.replace(RunSpec(), recovery=recovery), {}
        for is_first_here in (True, False):
            notices = said[is_first_here] = Notices(run)
            notices.enter(1.0, False, None, is_first_here)
        wait_until(lambda: said[True].look())
        assert said[False].look() == ""
        for notices in said.values():
            notices.close()


def test_the_first_rank_of_a_world_looks_where_that_of_its_node_was_lost() -> None:
    """A survivor keeps its device's number: of 4 ranks 1 to 3 were left as 1, 2 and 0, and none was the first there."""
    with served(lambda method, path, headers: (200, "the end")) as address:
        run = dataclasses.replace(RunSpec(), recovery=dataclasses.replace(RecoverySpec(), notice_url=address))
        notices = Notices(run)
        notices.enter(1.0, False, None, False)
        notices.enter(1.0, True, None, False)  # the next world
        wait_until(lambda: notices.look())
        assert notices.look().endswith("the end")
        notices.close()


def test_a_notice_url_that_nobody_could_ask_is_refused() -> None:
    for name in (*NOTICE_SERVICES, "https://notices.example/mine"):
        assert parse_spec(f"[run.recovery]\nnotice_url = '{name}'").run.recovery.notice_url == name
    with pytest.raises(ConfigError, match='notice_url = "amazon" cannot be asked'):
        parse_spec("[run.recovery]\nnotice_url = 'amazon'")

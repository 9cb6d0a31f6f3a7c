"""The live page over HTTP: a run that goes on, all runs, and what is not to be had."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import report_journals as journals
from runs import ending, in_process, start
from served import served

from paceline.errors import ConfigError, MissingExtra
from paceline.observe.dash.serve import make_server
from paceline.observe.dash.watched import RunSet
from paceline.patience import Patience


def append(run_dir: Path, records: list[dict[str, Any]]) -> None:
    for record in records:
        with (run_dir / "journal" / f"{record['attempt']:04d}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def next_part(stream: http.client.HTTPResponse, name: str, words: str) -> str:
    """Return the next drawing of a part that has these words."""
    patience = Patience(30)
    while not patience.is_over:
        line = stream.readline()
        if line.startswith(b"data: "):
            told = json.loads(line[6:])
            if told["name"] == name and words in told["html"]:
                return str(told["html"])
    raise TimeoutError(words)


def test_a_run_that_goes_on_is_shown_as_it_goes(tmp_path: Path) -> None:
    records = journals.complete()
    run = journals.write(tmp_path / "live", records[:60])
    with served(run) as server:
        assert server.get("/").status == 303
        page = server.get("/run/live")
        assert page.status == 200 and 'data-events="/run/live/events"' in page.body
        assert "<script>" not in page.body and page.headers["content-type"].startswith("text/html")
        with server.events("/run/live/events") as stream:
            assert stream.getheader("content-type", "").startswith("text/event-stream")
            next_part(stream, "head", "of 300 steps done")
            append(run, records[60:])
            assert "complete" in next_part(stream, "head", "300 of 300 steps done")
            append(run, [{**records[0], "kind": "fault", "what": "the sky fell", "because": "x", "time": 1.0}])
            next_part(stream, "faults", "the sky fell")


def test_all_runs_of_a_folder_with_those_that_appear(tmp_path: Path) -> None:
    journals.write(tmp_path / "one", journals.one_step())
    with served(tmp_path) as server:
        assert 'href="/run/one"' in server.get("/").body
        with server.events("/events") as stream:
            next_part(stream, "runs", "one")
            journals.write(tmp_path / "two #2", journals.failed())
            assert 'href="/run/two%20%232"' in next_part(stream, "runs", "two")
        assert server.get("/run/two%20%232").status == 200
        compared = server.get("/compare?run=one&run=two%20%232")
        assert compared.status == 200 and "training loss" in compared.body
        assert server.get("/compare?run=one").status == 400


PATHS = (
    "/run/..", "/run/%2e%2e%2fsecret", "/run/..%2Fsecret/events", "/static/../app.py", "/static/..%2fapp.py",
    "/run/nothing", "/run//etc/passwd", "/etc/passwd", "/run/one/../../secret", "/compare?run=../secret&run=one",
)  # fmt: skip


def test_what_runs_cost_is_a_page_by_any_tag_and_no_word_of_one_is_code(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    records = journals.complete()
    records[0]["spec"].setdefault("run", {})["tags"] = {"team": evil, evil: "x"}
    journals.write(tmp_path / "a", records)
    with served(tmp_path) as server:
        assert 'href="/bill"' in server.get("/").body
        for by in ("", "?by=team", "?by=node", "?by=kind"):
            told = server.get(f"/bill{by}")
            assert told.status == 200 and "device-hours" in told.body and "<script>alert" not in told.body, by
        assert server.get("/bill?by=nothing").status == 400


def test_no_path_leads_out_of_the_runs(tmp_path: Path) -> None:
    journals.write(tmp_path / "runs" / "one", journals.one_step())
    journals.write(tmp_path / "secret", journals.complete())
    with served(tmp_path / "runs") as server:
        for path in PATHS:
            found = server.get(path)
            assert found.status in (400, 404) and "complete" not in found.body and "root:" not in found.body, path


def test_every_answer_forbids_what_is_not_of_the_page(tmp_path: Path) -> None:
    journals.write(tmp_path / "one", journals.one_step())
    with served(tmp_path) as server:
        for path in ("/", "/run/one", "/static/dash.js", "/static/style.css", "/nothing"):
            headers = server.get(path).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers
            assert "server" not in headers
        assert server.get("/", Host="evil.example").status == 421
        assert server.get("/", "POST").status == 405
        assert server.get("/run/one/events", "HEAD").body == ""
        assert server.get("/", X_Forwarded_For="10.0.0.1").status == 401
    with served(tmp_path, always=True) as server:
        assert server.get("/run/one").status == 401 and server.get("/run/one/events").status == 401
        entered = server.get(f"/run/one?token={server.address.token}")
        assert entered.status == 303 and entered.headers["location"] == "/run/one"
        cookie = entered.headers["set-cookie"].partition(";")[0]
        assert server.get("/run/one", Cookie=cookie).status == 200


def test_the_output_of_a_rank_is_shown_and_no_file_beside_it(tmp_path: Path) -> None:
    run = journals.write(tmp_path / "one", journals.one_step())
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text("first <b>words</b>\n")
    (run / "logs" / "rank-1.log").write_bytes(b"x" * 200_000 + b"\nlast \xff words\n")
    (tmp_path / "secret").write_text("not for all")
    (run / "logs" / "rank-2.log").symlink_to(tmp_path / "secret")
    with served(run) as server:
        assert "first &lt;b&gt;words&lt;/b&gt;" in server.get("/run/one").body
        body = server.get("/run/one?rank=1").body
        assert "last � words" in body and "x" * 70_000 not in body
        for word in ("2", "-1", "..%2f..%2fsecret", "9" * 40):
            found = server.get(f"/run/one?rank={word}")
            assert found.status == 200 and "not for all" not in found.body


def test_runs_of_one_name_get_names_of_their_own(tmp_path: Path) -> None:
    paths = [journals.write(tmp_path / folder / "run", journals.one_step()) for folder in ("a", "b")]
    assert RunSet(paths).scan() == {"run": paths[0], "run-2": paths[1]}


def test_what_cannot_be_served_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = in_process("dash", tmp_path / "nowhere", "--port", "0")
    assert told.returncode == 2 and "there is no such folder" in told.stderr
    assert in_process("dash", tmp_path, "--port", "99999").returncode == 2
    with served(tmp_path) as server, pytest.raises(ConfigError, match="cannot listen"):
        make_server([tmp_path], "127.0.0.1", server.port)
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with pytest.raises(MissingExtra, match="paceline dash needs"):
        make_server([tmp_path], "127.0.0.1", 0)


def test_it_is_served_until_it_is_interrupted(tmp_path: Path) -> None:
    """Ctrl-C is how it ends, and an open page does not keep it."""
    pytest.importorskip("uvicorn", reason="the extra `dash` is not installed")
    run = journals.write(tmp_path / "one", journals.one_step())
    process = start("dash", run, "--port", "0", "--json")
    assert process.stdout is not None
    told = ""
    while not told.endswith("}\n"):
        told += process.stdout.readline()
    found = json.loads(told)
    connection = http.client.HTTPConnection(found["url"].removeprefix("http://").rstrip("/"), timeout=60)
    connection.request("GET", "/run/one/events")
    next_part(connection.getresponse(), "head", "complete")
    process.send_signal(signal.SIGINT)
    _, errors = ending(process, 60)
    connection.close()
    assert process.returncode == 0 and errors == ""

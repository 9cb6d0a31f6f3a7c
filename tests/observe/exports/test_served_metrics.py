"""Metrics are kept where their address cannot be served: it is another node's, as after a takeover, or it is taken."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from observe.exports.test_exports import append, run_of, started, step_line
from runs import wait_until

from paceline.errors import ConfigError
from paceline.observe.exports import deliver as delivering
from paceline.observe.exports import openmetrics
from paceline.observe.exports.cursor import JournalCursor
from paceline.observe.exports.openmetrics import NAME, OpenMetricsSink
from paceline.observe.exports.process import deliver_until
from paceline.spec.watch.exports import ExportsSpec

OF_ANOTHER_NODE = "192.0.2.1"  # of the network for documentation: no machine has it


def test_the_node_that_takes_over_keeps_the_file_where_it_cannot_serve_the_address(tmp_path: Path) -> None:
    said: list[str] = []
    append(tmp_path, started(1), *map(step_line, range(1, 6)))
    run = run_of(tmp_path, openmetrics=f"{OF_ANOTHER_NODE}:9464")
    assert deliver_until(run, lambda: None, said.append, 30) == [], said
    assert "} 5\n" in (tmp_path / "exports" / NAME).read_text().partition("paceline_step{")[2][:40]
    (line,) = said
    assert f"{OF_ANOTHER_NODE}:9464 cannot be served" in line and "0.0.0.0" in line


def test_a_target_that_is_gone_with_its_node_is_named_no_more(tmp_path: Path) -> None:
    lost = OpenMetricsSink(run_of(tmp_path, openmetrics="127.0.0.1:0"), {})
    discovery = tmp_path / "exports" / "file_sd.json"
    try:
        named = discovery.read_text()
        assert json.loads(named)[0]["targets"][0].startswith("127.0.0.1:")
        OpenMetricsSink(run_of(tmp_path, openmetrics=f"{OF_ANOTHER_NODE}:9464"), {})
        assert json.loads(discovery.read_text()) == []
        discovery.write_text(named)
        OpenMetricsSink(run_of(tmp_path, openmetrics="file"), {})
        assert json.loads(discovery.read_text()) == []
    finally:
        discovery.write_text(named)
        lost.close()
    assert json.loads(discovery.read_text()) == []


def test_metrics_are_served_again_after_a_disk_that_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink that failed is closed: its own server would hold the address, with values of then."""
    monkeypatch.setattr(delivering, "LOOK_SECONDS", 0.005)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    append(tmp_path, started(1), step_line(1))
    (tmp_path / "exports" / NAME).mkdir(parents=True)  # the file cannot be replaced
    run, failed, over = run_of(tmp_path, openmetrics=f"127.0.0.1:{port}"), threading.Event(), threading.Event()

    def say(line: str) -> None:
        failed.set()

    work = threading.Thread(target=deliver_until, args=(run, over.wait, say, 30), daemon=True)
    work.start()
    try:
        assert failed.wait(30)
        (tmp_path / "exports" / NAME).rmdir()
        append(tmp_path, step_line(2))

        def newest() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                    return b'paceline_step{run="a \\"run\\""} 2\n' in answer.read()
            except OSError:
                return False

        wait_until(newest)
    finally:
        over.set()
        work.join(60)


def test_an_address_that_becomes_free_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmetrics, "TRY_SECONDS", 0.0)
    append(tmp_path, started(1), step_line(1))
    records = JournalCursor(tmp_path, "x").read()[0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sink = OpenMetricsSink(run_of(tmp_path, openmetrics=f"127.0.0.1:{port}"), {})
        sink.send(records[:1])
        assert not (tmp_path / "exports" / "file_sd.json").exists()
    try:
        sink.send(records[1:])
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert b"paceline_step" in answer.read()
    finally:
        sink.close()


@pytest.mark.parametrize(("address", "host"), [("0.0.0.0:0", None), ("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]"),
                                               (":0", "127.0.0.1")])  # fmt: skip
def test_prometheus_is_told_a_name_that_others_reach(tmp_path: Path, address: str, host: str | None) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        if "::" in address:
            pytest.skip("this machine has no IPv6")
    ExportsSpec(openmetrics=address).refuse_contradictions()
    sink = OpenMetricsSink(run_of(tmp_path, openmetrics=address), {})
    try:
        (told,) = json.loads((tmp_path / "exports" / "file_sd.json").read_text())
        assert told["targets"][0].rpartition(":")[0] == (host or socket.gethostname())
    finally:
        sink.close()


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="no address"):
        ExportsSpec(openmetrics="127.0.0.1:70000").refuse_contradictions()

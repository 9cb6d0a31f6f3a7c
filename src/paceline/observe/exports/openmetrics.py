"""OpenMetrics for Prometheus: the newest values as text, in a file and, where asked for, over HTTP.

The names have few labels: the run, and on some the cause, the phase or the kind. Nothing grows with steps or ranks.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.observe.exports.cursor import FOLDER
from paceline.observe.exports.sink import ExportedRun
from paceline.observe.exports.values import values_of
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    EvaluationRecord,
    FaultRecord,
    RecoveryRecord,
    RunEnded,
    RunStarted,
    StepRecord,
)
from paceline.spec.journal.record import Record
from paceline.spec.watch.exports import FILE

NAME, DISCOVERY = "metrics.prom", "file_sd.json"
TRY_SECONDS = 10.0  # between two tries to serve
TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Name -> kind, unit's suffix where there is one, and help. A counter's sample has `_total` behind its name.
FAMILIES = {
    "paceline_step": ("gauge", "Steps done."),
    "paceline_loss": ("gauge", "Loss of the newest step, or of the newest evaluation."),
    "paceline_step_seconds": ("gauge", "Seconds of the newest step, by phase."),
    "paceline_items_per_second": ("gauge", "Items (tokens or samples) per second of the newest step."),
    "paceline_peak_memory_bytes": ("gauge", "Most memory that rank 0 has used so far."),
    "paceline_forecast_step_seconds": ("gauge", "Seconds of a step by forecast."),
    "paceline_bound_ratio": ("gauge", "Part of a step that each cause decides."),
    "paceline_checkpoint_timestamp_seconds": ("gauge", "When the newest checkpoint was published."),
    "paceline_last_record_timestamp_seconds": ("gauge", "When the newest record was written."),
    "paceline_running": ("gauge", "1 while the run goes on, 0 when it has ended."),
    "paceline_exit_code": ("gauge", "Exit code of the newest start that has ended."),
    "paceline_faults": ("counter", "Faults so far."),
    "paceline_recoveries": ("counter", "Recoveries so far."),
    "paceline_starts": ("counter", "Starts so far."),
}
Samples = dict[str, dict[str, float]]  # name -> labels as text -> value


class OpenMetricsSink:
    """Keeps RUN/exports/metrics.prom at the newest values; serves them at HOST:PORT where that is asked for."""

    def __init__(self, run: ExportedRun, state: dict[str, object]) -> None:
        self._run = run
        self._server: ThreadingHTTPServer | None = None
        self._samples = _samples_of(state.get("samples"))
        self.folder = run.dir / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._name_target("")  # of a process that is gone, maybe with its node
        self._tried, self._is_told = -math.inf, run.exports.openmetrics == FILE
        self._keep_serving()

    def send(self, records: Sequence[Record]) -> None:
        """Take records into the newest values, and write them. They are served too as soon as the address can be."""
        for record in records:
            self._take(record)
        _replace(self.folder / NAME, self.text())
        self._keep_serving()

    def state(self) -> dict[str, object]:
        """Return the newest values."""
        return {"samples": self._samples}

    def close(self) -> None:
        """Serve no more. The file stays."""
        if self._server is not None:
            self._name_target("")
            self._server.shutdown()
            self._server.server_close()

    def text(self) -> str:
        """Return all values in the text format of OpenMetrics."""
        lines = []
        for name, (kind, help_text) in FAMILIES.items():
            samples = dict(self._samples.get(name, {}))
            if not samples:
                continue
            lines += [f"# TYPE {name} {kind}", f"# HELP {name} {help_text}"]
            suffix = "_total" if kind == "counter" else ""
            run = f'run="{escaped(self._run.name)}"'
            for labels, value in sorted(samples.items()):
                lines.append(f"{name}{suffix}{{{run}{',' if labels else ''}{labels}}} {value:.17g}")
        return "\n".join([*lines, "# EOF", ""])

    def _keep_serving(self) -> None:
        """Serve where that is asked for; an address that is taken, or another node's, is tried again and told once."""
        address = self._run.exports.openmetrics
        if address == FILE or self._server is not None or time.monotonic() - self._tried < TRY_SECONDS:
            return
        self._tried = time.monotonic()
        try:
            self._server = _serve(address, self.text)
        except OSError as error:
            if not self._is_told:
                self._run.say(
                    f"exports  {address} cannot be served on {socket.gethostname()}: {error.strerror or error}; "
                    f"{self.folder / NAME} is kept; try an address that every node has, such as 0.0.0.0:9464"
                )
            self._is_told = True
            return
        self._name_target(_target(*self._server.server_address[:2]))

    def _name_target(self, target: str) -> None:
        """Tell Prometheus where the run is served; nowhere for "", where an earlier target is on file."""
        path, labels = self.folder / DISCOVERY, {"run": self._run.name, "project": self._run.project}
        if target or path.exists():
            _replace(path, json.dumps([{"targets": [target], "labels": labels}] if target else []))

    def _take(self, record: Record) -> None:
        if record.time is not None:
            self._set("paceline_last_record_timestamp_seconds", record.time)
        if isinstance(record, StepRecord):
            self._set("paceline_step", record.step)
            self._set("paceline_loss", record.loss, 'of="training"')
            self._set("paceline_items_per_second", record.tokens_per_second)
            self._set("paceline_peak_memory_bytes", record.peak_bytes)
            for phase, seconds in record.seconds.items():
                self._set("paceline_step_seconds", seconds, f'phase="{escaped(phase)}"')
        elif isinstance(record, EvaluationRecord):
            self._set("paceline_loss", record.loss, 'of="held_out"')
        elif isinstance(record, CheckpointRecord):
            self._set("paceline_checkpoint_timestamp_seconds", record.time)
        elif isinstance(record, RunStarted):
            self._count("paceline_starts")
            for name in ("paceline_faults", "paceline_recoveries"):  # what appears as 1 has not increased
                self._samples.setdefault(name, {}).setdefault("", 0.0)
            self._set("paceline_running", 1.0)
            promised = record.forecast.get("step_seconds")
            self._set("paceline_forecast_step_seconds", promised.get("value") if isinstance(promised, dict) else None)
        elif isinstance(record, RunEnded):
            self._set("paceline_running", 0.0)
            self._set("paceline_exit_code", record.exit_code)
        elif isinstance(record, FaultRecord | RecoveryRecord):
            self._count("paceline_faults" if isinstance(record, FaultRecord) else "paceline_recoveries")
        for name, value in values_of(record).items():
            if name.startswith("bound/"):
                self._set("paceline_bound_ratio", value, f'cause="{escaped(name.removeprefix("bound/"))}"')

    def _set(self, name: str, value: float | None, labels: str = "") -> None:
        if isinstance(value, int | float):
            self._samples.setdefault(name, {})[labels] = float(value)

    def _count(self, name: str) -> None:
        self._samples.setdefault(name, {})[""] = self._samples.get(name, {}).get("", 0.0) + 1


def _samples_of(told: object) -> Samples:
    """Return the newest values that a process before has left; none where they are not such."""
    if not isinstance(told, Mapping):
        return {}
    return {str(name): {str(labels): float(value) for labels, value in each.items()} for name, each in told.items()}


def escaped(text: str) -> str:
    """Return a label's value as the text format wants it."""
    return re.sub(r'["\\\n]', lambda found: {'"': '\\"', "\\": "\\\\", "\n": "\\n"}[found[0]], text)


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _target(host: object, port: object) -> str:
    """Return where others find a server: one that listens at all addresses by the name of its machine."""
    name = str(host)
    if ipaddress.ip_address(name.partition("%")[0]).is_unspecified:
        name = socket.gethostname()
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


def _serve(address: str, text: Any) -> ThreadingHTTPServer:
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    kind = _Server6 if ":" in host else _Server

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode() if self.path.partition("?")[0] in ("/", "/metrics") else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing of each scrape."""

    server = kind((host, int(port)), Handler)
    threading.Thread(target=server.serve_forever, name="paceline-openmetrics", daemon=True).start()
    return server

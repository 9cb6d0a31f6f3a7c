"""The page's server for tests: in a thread of this process, on a free port."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.observe.dash.serve import DashAddress, make_server


@dataclass(frozen=True)
class Got:
    """What was answered."""

    status: int
    headers: Mapping[str, str]
    body: str


@dataclass(frozen=True)
class Served:
    """A server that runs, and where it is."""

    address: DashAddress
    port: int

    def get(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Got:
        """Ask for a path, as it is written; header names have _ for -."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            own = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, headers=own)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Got(answer.status, found, answer.read().decode())
        finally:
            connection.close()

    @contextlib.contextmanager
    def events(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """Listen to events until the block is left."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            yield connection.getresponse()
        finally:
            connection.close()


@contextlib.contextmanager
def served(*paths: Path, always: bool = False, actions: bool = False) -> Iterator[Served]:
    """Serve the page of runs until the block is left."""
    pytest.importorskip("starlette", reason="the extra `dash` is not installed")
    pytest.importorskip("uvicorn", reason="the extra `dash` is not installed")
    server, listening, address = make_server(list(paths), "127.0.0.1", 0, always, actions)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield Served(address, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listening.close()

"""Serves the page until it is interrupted, by uvicorn."""

from __future__ import annotations

import ipaddress
import platform
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, MissingExtra
from paceline.observe.dash.guard import DashGuard
from paceline.observe.dash.watched import RunSet

if TYPE_CHECKING:
    import uvicorn

ENDING_SECONDS = 2  # that open pages get to be told of the end


@dataclass(frozen=True)
class DashAddress:
    """Where the page is: the address for this machine's browser, and the one for others with the token."""

    url: str
    token: str
    is_open: bool  # whether other machines can ask

    @property
    def with_token(self) -> str:
        """The address that other machines need once; theirs remember it."""
        return f"{self.url}?token={self.token}"


def serve(
    paths: Sequence[Path],
    host: str,
    port: int,
    always: bool,
    tell: Callable[[DashAddress], None],
    actions: bool = False,
) -> None:
    """Serve the page of runs until SIGINT or SIGTERM; `tell` is called when it can be opened. Raises as make_server."""
    server, listening, address = make_server(paths, host, port, always, actions)
    tell(address)
    with listening:
        server.run(sockets=[listening])


def make_server(
    paths: Sequence[Path], host: str, port: int, always: bool = False, actions: bool = False
) -> tuple[uvicorn.Server, socket.socket, DashAddress]:
    """Return a server for the page of runs, the socket that it is to use, and where it is. Port 0 is any that is free.
    With `actions` its pages may ask running jobs for traces.

    Raises MissingExtra without Starlette or uvicorn, ConfigError for a path that is no folder, or an address that
    cannot be had.
    """
    try:
        import uvicorn

        from paceline.observe.dash.app import DashServer
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise MissingExtra(error.name or "starlette", "dash", "paceline dash") from error
    runs = RunSet(paths, secrets.token_urlsafe(16) if actions else "")
    listening = _listen(host, port)
    address = _address(host, listening)
    cookie = f"paceline-dash-{listening.getsockname()[1]}"
    guard = DashGuard(address.token, (host, platform.node()), cookie, always, actions)
    server: uvicorn.Server
    app = DashServer(runs, guard, lambda: server.should_exit).app()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, proxy_headers=False, server_header=False, lifespan="off",
        timeout_graceful_shutdown=ENDING_SECONDS,
    )  # fmt: skip
    server = uvicorn.Server(config)
    return server, listening, address


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, so that the page can be opened when its address is told."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(128)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}", str(error), "--port 0 takes one that is free"
        ) from error
    return listening


def _address(host: str, listening: socket.socket) -> DashAddress:
    own, port = listening.getsockname()[:2]
    address = ipaddress.ip_address(own.partition("%")[0])
    name = platform.node() if address.is_unspecified else host
    shown = f"[{name}]" if ":" in name else name
    return DashAddress(f"http://{shown}:{port}/", secrets.token_urlsafe(24), not address.is_loopback)

"""The page's server as an ASGI application: pages, their parts as server-sent events, own files. Needs Starlette."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.account.bill import make_bill
from paceline.errors import PacelineError
from paceline.observe.compare.page import compare_html
from paceline.observe.compare.runs import MOST_RUNS, compare_live
from paceline.observe.dash.bill_page import bill_body
from paceline.observe.dash.guard import HEADERS, DashGuard, PageAnswer, PageRequest
from paceline.observe.dash.page import STYLE, run_body, runs_body, runs_table, shell, words_page
from paceline.observe.dash.traced import MOST_BYTES, ask_by_form
from paceline.observe.dash.watched import RunSet, WatchedRun, digest_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

BEAT_SECONDS = 10.0  # without news: a comment is sent, which finds out who has left
RUNS_SECONDS = 1.0  # between two looks at all runs
MOST_STREAMS = 64
PageParts = Callable[[], Mapping[str, tuple[str, str]]]  # name -> (html, digest)


class DashServer:
    """Answers for a set of runs. `is_ending` tells streams that the server is about to stop."""

    def __init__(self, runs: RunSet, guard: DashGuard, is_ending: Callable[[], bool] = lambda: False) -> None:
        self.runs, self.guard, self._is_ending = runs, guard, is_ending
        self._streams = 0

    def app(self) -> ASGIApp:
        """Return the application, behind its guard."""
        routes = [
            Route("/", self.all_runs),
            Route("/events", self.all_events),
            Route("/run/{name}", self.one_run),
            Route("/run/{name}/events", self.run_events),
            Route("/run/{name}/trace", self.trace, methods=["POST"]),
            Route("/compare", self.compared),
            Route("/bill", self.bill),
            Route("/static/{name}", self.file),
        ]
        return GuardedApp(Starlette(routes=routes), self.guard)

    # ---- pages -----------------------------------------------------------------------------------------------------

    def all_runs(self, request: Request) -> Response:
        """Show all runs, or go to the only one."""
        found = self.runs.scan()
        if self.runs.is_one and len(found) == 1:
            return RedirectResponse(f"/run/{_quoted(next(iter(found)))}", 303)
        body = runs_body([str(path) for path in self.runs.paths], self._runs_table())
        return HTMLResponse(shell("Runs", body, events="/events", wide=True))

    def one_run(self, request: Request) -> Response:
        """Show a run."""
        run, rank = self._run(request), _rank(request)
        if run is None:
            return _none()
        parts = {name: part.html for name, part in run.look(rank).items()}
        events = f"/run/{_quoted(run.name)}/events" + (f"?rank={rank}" if rank is not None else "")
        title = f"{run.live.name} · {run.name}" if run.live.name != run.name else run.name
        return HTMLResponse(shell(title, run_body(title, parts), events, "" if self.runs.is_one else "/", wide=True))

    async def trace(self, request: Request) -> Response:
        """Ask a run for a trace, and show it again."""
        run, length = await asyncio.to_thread(self._run, request), request.headers.get("content-length", "")
        if run is None:
            return _none()
        if not length.isdigit() or int(length) > MOST_BYTES:
            return HTMLResponse(words_page(413, "that is no form of this page"), 413)
        body = (await request.body()).decode("utf-8", "replace")
        refused = await asyncio.to_thread(ask_by_form, run.live, body, self.runs.form)
        if refused:
            return HTMLResponse(words_page(409, refused), 409)
        await asyncio.to_thread(run.redraw, "traces")
        return RedirectResponse(f"/run/{_quoted(run.name)}#traces", 303)

    def compared(self, request: Request) -> Response:
        """Show runs beside each other."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_RUNS]
        runs = [run for name in names if (run := self.runs.run(name)) is not None]
        if len(runs) < 2:
            return HTMLResponse(words_page(400, "choose two runs or more to compare"), 400)
        try:
            body = compare_html(compare_live([(run.name, run.read) for run in runs]))
        except PacelineError as error:
            return HTMLResponse(words_page(400, str(error)), 400)
        return HTMLResponse(shell("Compared", body, up="/"))

    def bill(self, request: Request) -> Response:
        """Show what the runs have cost, at their own rates, added up by run or by what is asked for."""
        try:
            found = make_bill(list(self.runs.scan().values()), request.query_params.get("by") or "run")
        except PacelineError as error:
            return HTMLResponse(words_page(400, str(error)), 400)
        return HTMLResponse(shell("Bill", bill_body(found, links=True), up="/"))

    def file(self, request: Request) -> Response:
        """Return one of the page's own files."""
        found = FILES.get(request.path_params["name"])
        return _none() if found is None else Response(found[1], media_type=found[0])

    # ---- events ----------------------------------------------------------------------------------------------------

    async def run_events(self, request: Request) -> Response:
        """Send a run's parts when they change."""
        run, rank = await asyncio.to_thread(self._run, request), _rank(request)
        if run is None:
            return _none()

        def parts() -> Mapping[str, tuple[str, str]]:
            return {name: (part.html, part.digest) for name, part in run.look(rank).items()}

        return self._stream(request, parts, lambda: run.rest_seconds)

    async def all_events(self, request: Request) -> Response:
        """Send the table of all runs when it changes."""

        def parts() -> Mapping[str, tuple[str, str]]:
            html = self._runs_table()
            return {"runs": (html, digest_of(html))}

        return self._stream(request, parts, lambda: RUNS_SECONDS)

    def _stream(self, request: Request, parts: PageParts, rest: Callable[[], float]) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._streams >= MOST_STREAMS:
            return Response("too many pages are open", 503)
        return StreamingResponse(self._events(request, parts, rest), media_type="text/event-stream")

    async def _events(self, request: Request, parts: PageParts, rest: Callable[[], float]) -> AsyncIterator[str]:
        self._streams += 1
        sent: dict[str, str] = {}
        beat = time.monotonic()
        try:
            yield "retry: 1000\n\n"
            while not self._is_ending() and not await request.is_disconnected():
                found = await asyncio.to_thread(parts)
                for name, (html, digest) in found.items():
                    if sent.get(name) != digest:
                        sent[name], beat = digest, time.monotonic()
                        yield f"event: part\ndata: {json.dumps({'name': name, 'html': html})}\n\n"
                if time.monotonic() - beat > BEAT_SECONDS:
                    beat = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(rest())
        finally:
            self._streams -= 1

    def _run(self, request: Request) -> WatchedRun | None:
        return self.runs.run(request.path_params["name"])

    def _runs_table(self) -> str:
        glances = {}
        for name, run_dir in self.runs.scan().items():
            try:
                glances[name] = self.runs.glances.at(run_dir)
            except OSError:  # it was removed, or its disk has gone: it is there again when it can be read
                continue
        return runs_table(glances, time.time())


class GuardedApp:
    """An application behind a guard, whose every answer has the page's headers."""

    def __init__(self, app: ASGIApp, guard: DashGuard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """PageAnswer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        refused = self._guard.refuse(_asked(scope))

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        app: Any = self._app if refused is None else _refusal(refused)
        await app(scope, receive, send_with_headers)


def _asked(scope: Scope) -> PageRequest:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    peer = (scope.get("client") or ("", 0))[0]
    return PageRequest(scope["method"], scope["path"], scope.get("query_string", b"").decode("latin-1"), headers, peer)


def _refusal(answer: PageAnswer) -> Response:
    if answer.location:
        return Response(status_code=answer.status, headers={"location": answer.location, "set-cookie": answer.cookie})
    return HTMLResponse(words_page(answer.status, answer.words), answer.status)


def _none() -> Response:
    return HTMLResponse(words_page(404, "there is nothing of this name"), 404)


def _rank(request: Request) -> int | None:
    word = request.query_params.get("rank", "")
    return int(word) if word.isascii() and word.isdigit() and len(word) < 8 else None


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _own(name: str) -> bytes:
    return resources.files("paceline.observe.dash").joinpath("static", name).read_bytes()


FILES: dict[str, tuple[str, bytes]] = {
    "style.css": ("text/css", STYLE.encode()),
    "dash.js": ("text/javascript", _own("dash.js")),
    "icon.svg": ("image/svg+xml", _own("icon.svg")),
}

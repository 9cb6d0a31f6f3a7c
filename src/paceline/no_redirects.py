"""HTTP requests that follow no redirection: a server that is redirected to must not get the token of the first one."""

from __future__ import annotations

import urllib.error
import urllib.request


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirection."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Return nothing, so that the redirection is an answer like any other error."""


OPENER = urllib.request.build_opener(NoRedirects)


def ask_directly(request: urllib.request.Request, timeout_seconds: float) -> bytes:
    """Return what the address of a request answers. Raises HTTPError also where it names another address instead."""
    with OPENER.open(request, timeout=timeout_seconds) as answer:
        content: bytes = answer.read()
        return content


def status_text(error: urllib.error.HTTPError) -> str:
    """Return the status of an answer, and whether it names another address."""
    return f"{error.code}{', another address, which is not followed' if 300 <= error.code < 400 else ''}"

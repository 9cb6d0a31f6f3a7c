"""Sinks that are webhooks: any that takes JSON, Slack's and Discord's."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from paceline.errors import PacelineError
from paceline.no_redirects import ask_directly, status_text
from paceline.observe.alerts.message import AlertMessage

MOST_CHARACTERS = {"slack": 3000, "discord": 2000}  # of one message, as the services document
SCHEMES = ("http://", "https://")


def post(kind: str, url: str, token: str, message: AlertMessage, timeout_seconds: float) -> None:
    """Send a message to a webhook. Raises PacelineError where it does not answer in time, or not with success."""
    if not url.lower().startswith(SCHEMES):
        raise PacelineError("no address of a webhook", "it begins with neither http:// nor https://")
    headers = {"Content-Type": "application/json", "User-Agent": "paceline"}
    headers |= {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, json.dumps(body(kind, message)).encode(), headers, method="POST")
    try:
        ask_directly(request, timeout_seconds)
        return
    except urllib.error.HTTPError as error:
        because = f"it answers {status_text(error)}"
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        because = f"it does not answer: {type(reason).__name__}"
    raise PacelineError("a webhook takes no message", because)


def body(kind: str, message: AlertMessage) -> dict[str, object]:
    """Return what a webhook of a kind takes: the whole message, or its text where people read it."""
    if kind == "slack":
        text = message.as_text().replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": text[: MOST_CHARACTERS[kind]]}
    if kind == "discord":  # nobody is pinged by what a run is called
        return {"content": message.as_text()[: MOST_CHARACTERS[kind]], "allowed_mentions": {"parse": []}}
    return message.as_json()

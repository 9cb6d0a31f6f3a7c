"""Who may see the page: this machine without a word, any other with the token; and no page of another site.

A name in the `Host` header that is not this server's is refused, so that a site cannot have its own name lead here (DNS
rebinding). Nothing here changes a run: only GET and HEAD are answered, and where actions are allowed the form that asks
for a trace, if it is sent by a page of this very server.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")  # who asks is behind a proxy
ACTION = re.compile(r"/run/[^/]+/trace")
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class PageRequest:
    """What a request says of itself: header names are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    peer: str  # the address that it is from; empty where unknown


@dataclass(frozen=True)
class PageAnswer:
    """What a request gets instead of the page: an exit with words, or a redirection that leaves a cookie."""

    status: int
    words: str
    location: str = ""
    cookie: str = ""


@dataclass(frozen=True)
class DashGuard:
    """Decides on requests. `names` are further names of the host, `always` asks this machine for the token too."""

    token: str
    names: tuple[str, ...] = ()
    cookie: str = "paceline-dash"
    always: bool = False
    actions: bool = False

    def refuse(self, asked: PageRequest) -> PageAnswer | None:
        """Return what is answered in place of the page; None where the page may be shown."""
        if asked.method not in ("GET", "HEAD") and not self._is_action(asked):
            return PageAnswer(405, "this page can only be read")
        if not self._is_own_name(asked.headers.get("host", "")):
            return PageAnswer(421, "this is no name of this server: ask by its address, or start it with --host NAME")
        if not self._needs_token(asked):
            return None
        given = [value for key, value in parse_qsl(asked.query) if key == "token"]
        if any(map(self._is_token, given)):
            rest = urlencode([pair for pair in parse_qsl(asked.query) if pair[0] != "token"])
            path = "/" + asked.path.lstrip("/\\")  # two slashes would lead to another site
            cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
            return PageAnswer(303, "", path + (f"?{rest}" if rest else ""), cookie)
        bearer = asked.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(self._of_cookie(asked.headers.get("cookie", ""))):
            return None
        return PageAnswer(401, "the token is needed: open the address that `paceline dash` printed")

    def _is_action(self, asked: PageRequest) -> bool:
        """Return whether a request is a form that may be sent: by a page of the same scheme, name and port."""
        host, origin = asked.headers.get("host", ""), asked.headers.get("origin", "")
        is_form = asked.method == "POST" and ACTION.fullmatch(asked.path) is not None
        return self.actions and is_form and bool(host) and origin in (f"http://{host}", f"https://{host}")

    def _needs_token(self, asked: PageRequest) -> bool:
        if self.always or any(name in asked.headers for name in FORWARDED):
            return True
        try:
            address = ipaddress.ip_address(asked.peer)
        except ValueError:
            return True
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return not (mapped or address).is_loopback

    def _is_own_name(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() in ("localhost", *(each.lower() for each in self.names)):
            return True
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True

    def _is_token(self, given: str) -> bool:
        """Return whether a text is the token, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def _of_cookie(self, header: str) -> str:
        """Return the cookie's value, whatever form those have that others on this host have left, at any port."""
        pairs = (pair.partition("=") for pair in header.split(";"))
        return next((value.strip() for name, _, value in pairs if name.strip() == self.cookie), "")

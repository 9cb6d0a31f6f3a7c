"""Who may see the page, and from where."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.observe.dash.guard import DashGuard, PageRequest

TOKEN = "a-token-of-some-length"
GUARD = DashGuard(TOKEN, ("node-7",), cookie="own")


def status(
    peer: str = "127.0.0.1", query: str = "", method: str = "GET", guard: DashGuard = GUARD, **headers: str
) -> int:
    headers.setdefault("host", "localhost:8377")
    own = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = guard.refuse(PageRequest(method, "/run/a", query, own, peer))
    return 200 if answer is None else answer.status


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_this_machine_needs_no_token(peer: str) -> None:
    assert status(peer) == 200
    assert status(peer, guard=DashGuard(TOKEN, always=True)) == 401


@pytest.mark.parametrize("peer", ["10.0.0.4", "192.168.1.9", "fe80::1", "::ffff:10.0.0.4", "", "somewhere"])
def test_anywhere_else_needs_it(peer: str) -> None:
    assert status(peer) == 401
    assert status(peer, authorization=f"Bearer {TOKEN}") == 200
    assert status(peer, cookie=f"other=1; own={TOKEN}") == 200
    for wrong in (TOKEN[:-1], TOKEN + "x", "", "é"):
        assert status(peer, authorization=f"Bearer {wrong}") == 401
        assert status(peer, cookie=f"own={wrong}") == 401
        assert status(peer, query=f"token={wrong}") == 401


@pytest.mark.parametrize("other", ['a={"x":1}', "a=b c", "flag", "a", 'a="', "é=1", "a=1,2; $x=3", "own2=1"])
def test_cookies_of_others_on_this_host_are_in_nobodys_way(other: str) -> None:
    """A browser sends those of all ports; one that Python's parser does not take cost the token behind it."""
    for header in (f"{other}; own={TOKEN}", f"own={TOKEN}; {other}", f"{other};own={TOKEN}"):
        assert status("10.0.0.4", cookie=header) == 200
    assert status("10.0.0.4", cookie=f"{other}; x-own={TOKEN}; own=") == 401


@pytest.mark.parametrize("header", ["x_forwarded_for", "forwarded", "x_real_ip"])
def test_who_comes_through_a_proxy_is_not_of_this_machine(header: str) -> None:
    assert status(**{header: "127.0.0.1"}) == 401


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80", "10.1.1.1", "node-7:8377"])
def test_own_names_are_answered(host: str) -> None:
    assert status(host=host) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8377", "", "127.0.0.1.nip.io", "node-7.evil", "localhost:80:x"]
)
def test_other_names_are_not(host: str) -> None:
    """Else a site whose name leads here could read the page through its visitors."""
    assert status(host=host) == 421
    assert status(host=host, authorization=f"Bearer {TOKEN}") == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_nothing_can_be_changed(method: str) -> None:
    assert status(method=method) == 405


def test_the_token_of_an_address_becomes_a_cookie_and_leaves_it() -> None:
    asked = PageRequest("GET", "//evil.example/run", f"rank=3&token={TOKEN}", {"host": "localhost"}, "10.0.0.4")
    answer = GUARD.refuse(asked)
    assert answer is not None and answer.status == 303
    assert answer.location == "/evil.example/run?rank=3", "two slashes would lead to another site"
    assert TOKEN not in answer.location and answer.cookie.startswith(f"own={TOKEN}; HttpOnly; SameSite=Strict")


def test_each_try_is_compared_as_long_as_the_token_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a refusal takes must not tell how much of a guess is right."""
    tried: list[bytes] = []

    def compare(given: bytes, token: bytes) -> bool:
        tried.append(given)
        return given == token

    monkeypatch.setattr("paceline.observe.dash.guard.hmac.compare_digest", compare)
    assert status("10.0.0.4", query="token=guess", authorization="Bearer other", cookie="own=third") == 401
    assert tried == [b"guess", b"other", b"third"]


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_nothing_that_is_asked_makes_the_guard_fail(host: str, query: str, cookie: str, bearer: str) -> None:
    asked = PageRequest("GET", "/", query, {"host": host, "cookie": cookie, "authorization": bearer}, "10.0.0.4")
    answer = GUARD.refuse(asked)
    assert answer is not None and answer.status in (401, 421)


ACTS = DashGuard(TOKEN, ("node-7",), cookie="own", actions=True)


def asked_for_a_trace(guard: DashGuard, origin: str, path: str = "/run/a/trace", peer: str = "127.0.0.1") -> int:
    headers = {"host": "localhost:8377", **({"origin": origin} if origin else {})}
    answer = guard.refuse(PageRequest("POST", path, "", headers, peer))
    return 200 if answer is None else answer.status


def test_a_trace_is_asked_for_by_a_page_of_this_server_alone_and_where_that_is_allowed() -> None:
    own = "http://localhost:8377"
    assert asked_for_a_trace(ACTS, own) == 200
    assert asked_for_a_trace(GUARD, own) == 405, "the page is read-only unless asked"
    for other in ("", "null", "http://evil.example", "http://localhost:80", "http://localhost:8377.evil.example"):
        assert asked_for_a_trace(ACTS, other) == 405
    for path in ("/run/a", "/run/a/events", "/run/a/b/trace", "/", "/run//trace"):
        assert asked_for_a_trace(ACTS, own, path) == 405
    assert asked_for_a_trace(ACTS, own, peer="10.0.0.4") == 401, "the token is needed from elsewhere all the same"
    assert status(method="DELETE", guard=ACTS) == 405

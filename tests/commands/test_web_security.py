"""Who may enter the dashboard, and what a page of another site cannot do."""

from __future__ import annotations

import socket
import stat
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import httpx
import pytest
from dashboards import TOKEN, Dashboard, csrf_token, serving, sign_in

from briter_worker.web.server import HEADERS_S, MAX_CONNECTIONS_PER_ADDRESS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site


@pytest.fixture
def stranger(dashboard: Dashboard) -> Iterator[httpx.Client]:
    with dashboard.visitor() as client:
        yield client


def is_paused(site: Site) -> bool:
    return (site.queue / ".paused").exists()


# --- The token and the one-time link


def test_without_a_configured_token_the_printed_link_signs_in_once(site: Site) -> None:
    with serving(site, token="") as dashboard, dashboard.visitor() as second:
        assert dashboard.page.get("/").status_code == 303
        answer = dashboard.page.get(dashboard.link)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert dashboard.page.get("/").status_code == 200
        again = second.get(dashboard.link)
        assert again.status_code == 403
        assert "used before" in again.text
        assert second.get("/").status_code == 303


def test_a_generated_token_is_kept_where_only_the_operator_reads_it(site: Site) -> None:
    kept = site.worktree / ".git" / "briter" / "dashboard.token"
    with serving(site, token=""):
        token = kept.read_text().strip()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert len(token) >= 32
    with serving(site, token="") as second:
        headers = {"Authorization": f"Bearer {token}"}
        assert second.api.get("/api/status", headers=headers).status_code == 200, "it outlives a restart"


def test_nobody_sees_anything_without_the_token_on_loopback_too(
    dashboard: Dashboard, stranger: httpx.Client
) -> None:
    for path in ("/", "/failed", "/post?slug=x", "/nowhere"):
        answer = stranger.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/sign-in?next=")
    for path in ("/api/status", "/api/jobs", "/events", "/metrics", "/openapi.json"):
        answer = stranger.get(path)
        assert answer.status_code == 401, path
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["www-authenticate"].startswith("Bearer")
    described = dashboard.json("/openapi.json")["paths"]
    calls = [(method, path) for path, methods in described.items() for method in methods]
    assert len(calls) > 10
    for method, path in calls:
        answer = stranger.request(method, path.replace("{job_id}", "x"), headers={"Accept": "*/*"})
        assert answer.status_code == (200 if path in {"/healthz", "/readyz"} else 401), (method, path)
    assert stranger.post("/actions/pause", data={"for": ""}).status_code == 303
    assert dashboard.json("/api/status")["paused"] is None


def test_a_wrong_bearer_is_refused(dashboard: Dashboard, stranger: httpx.Client) -> None:
    for wrong in ("x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\u00fc"):
        headers = {b"Authorization": f"Bearer {wrong}".encode()}
        assert stranger.get("/api/status", headers=headers).status_code == 401
    for token in ("wrong", TOKEN):
        headers = {b"Authorization": f"Bearer {token}".encode()}
        assert stranger.get("/api/status", headers=headers).status_code == 429, "no guess is answered"
    assert dashboard.page.get("/").status_code == 200, "a session goes on"


def test_signing_in_opens_a_session_and_signing_out_ends_it(
    dashboard: Dashboard, stranger: httpx.Client
) -> None:
    answer = sign_in(stranger, TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/failed")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert "secure" not in cookie.replace("samesite", "")
    assert TOKEN not in answer.headers["set-cookie"]
    kept = stranger.cookies["briter_session"]
    csrf = csrf_token(stranger, "/failed")
    assert stranger.post("/sign-out", data={"csrf": csrf}).status_code == 303
    headers = {"Accept": "text/html", "Cookie": f"briter_session={kept}"}
    old = httpx.get(f"{dashboard.base}/", headers=headers)
    assert old.status_code == 303, "the session itself has ended, not only the cookie"


def test_signing_in_redirects_to_no_other_site(stranger: httpx.Client) -> None:
    for target in ("https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1"):
        assert sign_in(stranger, TOKEN, target).headers["location"] == "/", target
        stranger.cookies.clear()


def test_after_five_wrong_tokens_their_sender_has_to_wait(
    dashboard: Dashboard, stranger: httpx.Client
) -> None:
    for number in range(5):
        assert sign_in(stranger, f"wrong-{number}").status_code == 401
    refused = sign_in(stranger, TOKEN)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    assert dashboard.api.get("/api/status").status_code == 429


@pytest.mark.parametrize(("trusted", "secure"), [("", False), ("127.0.0.1", True), ("192.0.2.0/24", False)])
def test_only_a_trusted_proxy_is_believed_about_https(site: Site, trusted: str, *, secure: bool) -> None:
    with serving(site, BRITER_TRUSTED_PROXIES=trusted) as dashboard, dashboard.visitor() as visitor:
        visitor.headers.update({"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.7"})
        cookie = sign_in(visitor, TOKEN).headers["set-cookie"].lower()
    assert ("; secure" in cookie) is secure


def test_a_port_that_is_taken_is_reported_with_the_fix(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused = site.command("serve", "--port", str(other.getsockname()[1]))
    assert refused.returncode == 1
    assert "cannot listen on 127.0.0.1" in refused.stderr
    assert "choose another --port" in refused.stderr


# --- Forged requests


def test_a_change_needs_the_csrf_token_of_its_own_session(
    site: Site, dashboard: Dashboard, stranger: httpx.Client
) -> None:
    for token in ("", "0" * 64, csrf_token(stranger, "/sign-in")):
        answer = dashboard.page.post("/actions/pause", data={"csrf": token, "for": ""})
        assert answer.status_code == 403
        assert "load it again" in answer.text
    assert dashboard.page.post("/api/pause").status_code == 403
    assert not is_paused(site)
    assert dashboard.act("pause", **{"for": ""}).status_code == 303
    assert is_paused(site)


def test_a_page_of_another_site_can_change_nothing(site: Site, dashboard: Dashboard) -> None:
    form = {"csrf": dashboard.csrf(), "for": ""}
    origins = [
        {"Origin": each} for each in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[")
    ]
    for headers in (*origins, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}):
        assert dashboard.page.post("/actions/pause", data=form, headers=headers).status_code == 403, headers
        assert dashboard.page.get("/api/doctor", headers=headers).status_code == 403, "a link runs no checks"
    assert not is_paused(site)
    own = {"Origin": dashboard.base, "Sec-Fetch-Site": "same-origin"}
    assert dashboard.page.post("/actions/pause", data=form, headers=own).status_code == 303


def test_the_body_of_a_visitor_who_is_refused_is_not_read(dashboard: Dashboard) -> None:
    for path, status in (("/api/jobs", b"401"), ("/sign-in", b"413")):
        with socket.create_connection(("127.0.0.1", dashboard.port), timeout=20) as visitor:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n"
            visitor.sendall(head.encode() + bytes(20_000))  # and the rest never comes
            assert status in visitor.recv(1000).split(b"\r\n")[0]


def test_a_connection_whose_request_does_not_come_is_closed(dashboard: Dashboard) -> None:
    with socket.create_connection(("127.0.0.1", dashboard.port), timeout=HEADERS_S + 20) as visitor:
        visitor.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert visitor.recv(1000) == b""


@pytest.mark.parametrize("trusted", ["", "127.0.0.1"])
def test_one_address_does_not_hold_every_connection(site: Site, trusted: str) -> None:
    with ExitStack() as stack:
        dashboard = stack.enter_context(serving(site, BRITER_TRUSTED_PROXIES=trusted))

        def connect(source: str) -> socket.socket:
            there = ("127.0.0.1", dashboard.port)
            return stack.enter_context(socket.create_connection(there, 20, source_address=(source, 0)))

        for _ in range(MAX_CONNECTIONS_PER_ADDRESS):
            connect("127.0.0.1").send(b"GET")
        for source, answers in (("127.0.0.1", bool(trusted)), ("127.0.0.2", True)):
            with suppress(ConnectionError):
                last = connect(source)
                last.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (b"200" in last.recv(1000)) == answers, source


def test_a_deeply_nested_body_is_refused(dashboard: Dashboard) -> None:
    for depth in (900, 100_000):
        body = b"[" * depth + b"]" * depth
        headers = {"Content-Type": "application/json"}
        assert dashboard.api.post("/api/jobs", content=body, headers=headers).status_code in {400, 422}


# --- What is shown


def test_the_token_is_shown_nowhere(dashboard: Dashboard) -> None:
    page = dashboard.page.get("/site").text
    assert "BRITER_DASHBOARD_TOKEN" in page
    assert "set, not shown" in page
    for path in ("/site", "/", "/api/status", "/api/doctor", "/openapi.json"):
        assert TOKEN not in dashboard.page.get(path).text


def test_refusals_have_the_headers_of_pages(stranger: httpx.Client) -> None:
    for path in ("/api/status", "/nowhere", "/sign-in", "/static/nothing.js", "/static/../security.py"):
        answer = stranger.get(path)
        assert "default-src 'none'" in answer.headers["content-security-policy"], path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "class Guard" not in answer.text

"""Who may come in, and what another site's page cannot do."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from dashboards import TOKEN, Dashboard, serving, sign_in

from briter_worker.web.live import MOST_READERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site


@pytest.fixture
def open_to_all(site: Site) -> Iterator[Dashboard]:
    """On loopback, without a token."""
    with serving(site) as served:
        yield served


@pytest.fixture
def closed(site: Site) -> Iterator[Dashboard]:
    """With a token."""
    with serving(site, token=TOKEN) as served:
        yield served


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])  # noqa: S104 - it is refused
def test_it_does_not_listen_to_other_machines_without_a_token(site: Site, host: str) -> None:
    refused = site.command("serve", "--host", host)
    assert refused.returncode == 2
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert "Fix: set BRITER_DASHBOARD_TOKEN" in line


def test_a_short_token_is_refused_and_not_shown(site: Site) -> None:
    refused = site.command("serve", BRITER_DASHBOARD_TOKEN="too-short")  # noqa: S106 - no secret
    assert refused.returncode == 2
    assert "16 characters" in refused.stderr
    assert "too-short" not in refused.stderr


def test_with_a_token_it_listens_where_it_is_told(site: Site) -> None:
    with serving(site, "--host", "0.0.0.0", token=TOKEN) as dashboard:  # noqa: S104 - that is the question
        there = f"http://127.0.0.1:{dashboard.port}"
        assert httpx.get(f"{there}/api/status", headers={"Authorization": f"Bearer {TOKEN}"}).is_success
        assert httpx.get(f"{there}/healthz").is_success


def test_a_port_that_is_taken_is_one_line(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        refused = site.command("serve", "--port", str(other.getsockname()[1]))
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert "Fix:" in line


def test_many_readers_leave_files_for_the_queue(site: Site) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        with serving(site) as served:
            soft, hard = resource.prlimit(served.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft >= min(MOST_READERS + 100, hard)


def test_without_its_extra_it_says_what_to_install(site: Site) -> None:
    blind = "import sys; sys.modules['fastapi'] = None; sys.argv[1:] = ['serve']; "
    done = subprocess.run(
        [sys.executable, "-c", f"{blind} from briter_worker.__main__ import main; main()"],
        env=site.environment(),
        cwd=site.root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'briter-worker[web]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nobody_sees_anything_without_the_token(closed: Dashboard) -> None:
    for path in ("/", "/failed", "/post?slug=x", "/nowhere"):
        answer = closed.page.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/sign-in?next=")
    for path in ("/api/status", "/api/jobs", "/events", "/metrics", "/openapi.json", "/api/csrf"):
        answer = closed.page.get(path)
        assert answer.status_code == 401, path
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert closed.page.post("/api/retry-all").status_code == 401
    assert closed.page.post("/actions/pause", data={"for": ""}).status_code == 303
    assert closed.page.get("/healthz").status_code == 200
    assert closed.api.get("/api/status").json()["paused"] is None


def test_a_wrong_bearer_is_refused(closed: Dashboard) -> None:
    for wrong in ("x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\u00fc"):
        headers = {b"Authorization": f"Bearer {wrong}".encode()}
        assert closed.page.get("/api/status", headers=headers).status_code == 401
    assert closed.api.get("/api/status").status_code == 200, "who has the token is let in all the same"


def test_who_signs_in_gets_a_strict_session_and_signs_out_of_it(closed: Dashboard) -> None:
    answer = sign_in(closed, TOKEN)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/failed"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie.replace("samesite", "")
    assert TOKEN not in answer.headers["set-cookie"]
    assert closed.page.get("/").status_code == 200
    kept = closed.page.cookies["briter_session"]

    assert closed.page.post("/sign-out", data={"csrf": closed.csrf()}).status_code == 303

    assert closed.page.get("/").status_code == 303
    old = httpx.get(f"{closed.base}/", headers={"Accept": "text/html", "Cookie": f"briter_session={kept}"})
    assert old.status_code == 303, "the session itself has ended, not only the cookie"


def test_behind_https_the_cookie_is_secure(closed: Dashboard) -> None:
    csrf = closed.csrf("/sign-in")
    answer = closed.page.post(
        "/sign-in",
        data={"csrf": csrf, "token": TOKEN},
        headers={"X-Forwarded-Proto": "https", "X-Forwarded-For": "192.0.2.7"},
    )
    assert "; secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example", "/\\evil.example", "javascript:1"]
)
def test_signing_in_leads_nowhere_else(closed: Dashboard, target: str) -> None:
    csrf = closed.csrf("/sign-in")
    answer = closed.page.post("/sign-in", data={"csrf": csrf, "token": TOKEN, "next": target})
    assert answer.headers["location"] == "/"


def test_whoever_guesses_has_to_wait(closed: Dashboard) -> None:
    for number in range(5):
        assert sign_in(closed, f"wrong-{number}").status_code == 401
    refused = sign_in(closed, TOKEN)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    wrong = closed.page.get("/api/status", headers={"Authorization": "Bearer wrong"})
    assert wrong.status_code == 429
    assert closed.api.get("/api/status").status_code == 200


def test_a_change_needs_the_csrf_token_of_its_own_session(site: Site, closed: Dashboard) -> None:
    before = closed.csrf("/sign-in")
    sign_in(closed, TOKEN)
    for token in ("", "0" * 64, before):
        answer = closed.page.post("/actions/pause", data={"csrf": token, "for": ""})
        assert answer.status_code == 403
        assert "load it again" in answer.text
    assert closed.page.post("/api/pause").status_code == 403
    assert not (site.queue / ".paused").exists()
    good = closed.page.get("/api/csrf").json()["token"]
    assert closed.page.post("/api/pause", headers={"X-CSRF-Token": good}).status_code == 200
    assert (site.queue / ".paused").exists()


def test_without_a_token_too_a_change_needs_the_csrf_token(site: Site, open_to_all: Dashboard) -> None:
    assert open_to_all.page.post("/api/pause").status_code == 403
    assert open_to_all.page.post("/actions/pause", data={"for": ""}).status_code == 403
    assert not (site.queue / ".paused").exists()
    assert open_to_all.api.post("/api/pause").status_code == 200


def test_who_is_not_let_in_is_not_listened_to(closed: Dashboard) -> None:
    for path, status in (("/api/jobs", b"401"), ("/sign-in", b"413")):
        with socket.create_connection(("127.0.0.1", closed.port), timeout=20) as stranger:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n"
            stranger.sendall(head.encode() + bytes(20_000))  # and there it stops
            assert status in stranger.recv(1000).split(b"\r\n")[0]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_page_of_another_site_can_change_nothing(
    site: Site, open_to_all: Dashboard, headers: dict[str, str]
) -> None:
    refused = open_to_all.api.post("/api/pause", headers=headers)
    assert refused.status_code == 403
    assert not (site.queue / ".paused").exists()
    own = {"Origin": open_to_all.base, "Sec-Fetch-Site": "same-origin"}
    assert open_to_all.api.post("/api/pause", headers=own).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1", "192.0.2.1"]
)
def test_another_name_that_leads_here_is_not_answered(open_to_all: Dashboard, host: str) -> None:
    answer = open_to_all.page.get("/api/status", headers={"Host": host})
    assert answer.status_code in {400, 421}
    assert "jobs" not in answer.text
    for name in ("localhost", "localhost:1234", "127.0.0.1", "[::1]:80"):
        assert open_to_all.page.get("/api/status", headers={"Host": name}).status_code == 200


def test_without_a_token_nothing_that_a_proxy_forwards_is_answered(open_to_all: Dashboard) -> None:
    answer = open_to_all.page.get("/api/status", headers={"X-Forwarded-For": "192.0.2.7"})
    assert answer.status_code == 403
    assert "BRITER_DASHBOARD_TOKEN" in answer.json()["detail"]


def test_the_token_is_shown_nowhere(closed: Dashboard) -> None:
    sign_in(closed, TOKEN)
    page = closed.page.get("/site").text
    assert "BRITER_DASHBOARD_TOKEN" in page
    assert "set, not shown" in page
    for path in ("/site", "/", "/api/status", "/api/doctor", "/openapi.json"):
        assert TOKEN not in closed.page.get(path).text


def test_refusals_are_protected_like_pages(closed: Dashboard) -> None:
    for path in ("/api/status", "/nowhere", "/sign-in", "/static/nothing.js", "/static/../app.py"):
        answer = closed.page.get(path)
        assert "default-src 'none'" in answer.headers["content-security-policy"], path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "class Application" not in answer.text

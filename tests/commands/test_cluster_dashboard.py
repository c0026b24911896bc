"""The dashboard of a cluster: all sites on one page, and each site's own pages and API below it."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cluster_farm import AHEAD
from conformance import check_conformance
from dashboards import Dashboard, events, serving, sign_in
from postgres import count_rows, execute
from sites import Site, eventually

from briter_worker.cluster.sites import Site as Registered
from briter_worker.cluster.sites import add
from briter_worker.queues.postgres.payloads import submit
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from briter_worker.queues.postgres.database import Database

NODE = {"problem": None, "fix": "", "ahead": 0.0, "dryRun": False, "version": "x", "settings": "x"}
LATE = "2099-01-01T09:00:00.000Z"
NAMES = ("blog", "shop")
LONG = "content/" + f"{'a' * 200}/" * 11 + "a.md"


@pytest.fixture
def cluster(site: Site, database: Database, database_url: str) -> Site:
    site.env["BRITER_DATABASE_URL"] = database_url
    for name in NAMES:
        add(database, Registered(name, "https://example.org/r.git", "main", "local-mdx"), load_settings({}))
    return site


@pytest.fixture
def dashboard(cluster: Site) -> Iterator[Dashboard]:
    with serving(cluster) as dashboard:
        yield dashboard


def save(database: Database, site: str, slug: str, **keys: object) -> None:
    document = {"id": f"{site}-{slug}", "slug": slug, "paths": ["content/a.md"], **keys}
    with database.transaction() as connection:
        submit(connection, site, document, now=time.time())


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def row_of(dashboard: Dashboard, name: str, **query: str) -> dict[str, Any] | None:
    items = dashboard.json("/api/sites", **query)["items"]
    return next((each for each in items if each["name"] == name), None)


def test_all_sites_are_on_one_page_with_what_waits_and_what_failed(
    dashboard: Dashboard, database: Database
) -> None:
    save(database, "blog", "now")
    save(database, "blog", "later", scheduledFor=LATE)
    save(database, "shop", "broken", status="failed", failure="rejected", lastError="refused")
    eventually(lambda: (row_of(dashboard, "blog") or {"jobs": {}})["jobs"].get("pending") == 1)
    blog, shop = row_of(dashboard, "blog"), row_of(dashboard, "shop")
    assert blog is not None
    assert shop is not None
    jobs = dict.fromkeys(("retrying", "quiet", "tried", "claimed", "failed"), 0)
    jobs |= {"pending": 1, "scheduled": 1}
    assert blog["jobs"] == jobs
    assert blog["oldestWaitingSeconds"] >= 0
    assert (shop["jobs"]["failed"], shop["oldestWaitingSeconds"]) == (1, None)
    assert row_of(dashboard, "blog", show="trouble") is None
    assert row_of(dashboard, "shop", show="trouble") is not None
    assert row_of(dashboard, "shop", q="LOG") is None
    page = dashboard.page.get("/").text
    assert 'href="/sites/blog/"' in page
    assert 'href="/sites/shop/"' in page
    assert 'href="/sites/blog/"' not in dashboard.page.get("/?show=trouble").text
    assert "No node of the cluster is running" in page
    metrics = dashboard.page.get("/metrics").text
    assert 'briter_jobs{site="blog",state="scheduled"} 1.0' in metrics
    assert 'briter_dead_letters{site="shop"} 1.0' in metrics


def test_each_site_has_the_pages_and_sees_its_own_posts_only(
    dashboard: Dashboard, database: Database
) -> None:
    save(database, "blog", "mine", scheduledFor=LATE)
    save(database, "shop", "theirs", status="failed", failure="rejected", lastError="refused")
    for path in ("/", "/scheduled", "/failed", "/published", "/site", "/search?q=MINE", "/post?slug=mine"):
        answer = dashboard.page.get(f"/sites/blog{path}")
        assert answer.status_code == 200, path
        assert "theirs" not in answer.text, path
        # Every address on it leads back into the site, to what all share, or up.
        for href in _addresses(answer.text):
            assert href.startswith(("/sites/blog", "/static/", "#")) or href in {"/", "/sign-out"}, (
                path,
                href,
            )
    assert "mine" in dashboard.page.get("/sites/blog/scheduled").text
    assert "theirs" in dashboard.page.get("/sites/shop/failed").text
    assert dashboard.page.get("/sites/nowhere/").status_code == 404
    assert dashboard.api.get("/api/sites/nowhere/jobs").json()["status"] == 404
    assert dashboard.page.get("/sites/blog").headers["location"] == "/sites/blog/"
    described = dashboard.json("/openapi.json")["paths"]
    assert "NewUpload" in json.dumps(described["/api/sites/{site}/jobs"]["post"])
    assert "site" in [each["name"] for each in described["/api/sites/{site}/jobs"]["get"]["parameters"]]


def _addresses(page: str) -> list[str]:
    found = []
    for name in ("href", "action", "hx-get"):
        found += [part.split('"')[0] for part in page.split(f' {name}="')[1:]]
    return [each for each in found if not each.startswith("http")]


def test_a_site_is_controlled_from_its_pages_and_nodes_are_notified(
    dashboard: Dashboard, database: Database, woken: Callable[[], bool]
) -> None:
    save(database, "blog", "later", scheduledFor=LATE)
    save(database, "blog", "gone", scheduledFor=LATE)
    save(database, "shop", "broken", status="failed", failure="rejected", lastError="refused")
    csrf = dashboard.csrf("/sites/blog/site")
    done = dashboard.page.post(
        "/sites/blog/actions/publish-now",
        data={"csrf": csrf, "back": "/sites/blog/scheduled", "id": "blog-later"},
    )
    assert (done.status_code, done.headers["location"]) == (303, "/sites/blog/scheduled?told=publish-now")
    assert dashboard.json("/api/sites/blog/jobs", state="pending")["total"] == 1
    assert dashboard.api.post("/api/sites/shop/jobs/shop-broken/retry").json()["jobs"][0]["slug"] == "broken"
    for wanted in ("shop-broken", "%00"):
        assert dashboard.api.post(f"/api/sites/blog/jobs/{wanted}/retry").status_code == 404
    assert dashboard.api.post("/api/sites/blog/jobs/blog-gone/cancel").json()["jobs"][0]["cancelled"] is True
    eventually(lambda: dashboard.json("/api/sites/blog/history")["items"])
    (receipt,) = dashboard.json("/api/sites/blog/history")["items"]
    assert (receipt["slug"], receipt["outcome"]) == ("gone", "cancelled")
    assert dashboard.json("/api/sites/shop/history")["items"] == []
    assert dashboard.api.post("/api/sites/shop/pause", json={"reason": "stocktaking"}).status_code == 200
    eventually(lambda: row_of(dashboard, "shop", show="paused") is not None)
    assert woken()


def test_nobody_sees_a_site_without_the_token(cluster: Site) -> None:
    with serving(cluster, token="") as dashboard, serving(cluster, token="") as other:
        for path in ("/", "/sites/blog/", "/sites/blog/healthz", "/sites/blog/static/live.js"):
            answer = dashboard.page.get(path)
            assert (answer.status_code, answer.headers["location"].split("?")[0]) == (303, "/sign-in"), path
        for path in ("/api/sites", "/api/sites/blog/jobs", "/sites/blog/events", "/metrics"):
            assert httpx.get(dashboard.base + path).status_code == 401, path
        link = dashboard.link.removeprefix(dashboard.base)
        assert other.page.get(link).status_code == 403, "each dashboard has its own links"
        assert dashboard.page.get(dashboard.link).status_code == 303
        assert dashboard.page.get("/sites/blog/").status_code == 200


# --- Jobs over HTTP, with their files


def test_a_post_comes_over_http_with_its_files_and_is_published(site: Site, database_url: str) -> None:
    site.env["BRITER_DATABASE_URL"] = database_url
    assert site.command("site", "add", "blog", "--remote", str(site.remote)).returncode == 0
    with serving(site) as dashboard:
        body = {
            "slug": "hello",
            "message": "Say hello",
            "contents": {"content/posts/hello.md": encoded("# Hello\n"), "content/posts/welcome.md": None},
        }
        answer = dashboard.api.post("/api/sites/blog/jobs", json=body)
        assert answer.status_code == 201, answer.text
        made = answer.json()
        site.command("run", "--once", BRITER_WORKER_DRY_RUN="true")
        eventually(lambda: "Dry run." in dashboard.page.get("/sites/blog/").text)  # as the node says
        assert site.command("run", "--once").returncode == 0
        eventually(lambda: dashboard.json(f"/api/sites/blog/jobs/{made['id']}")["receipts"])
        receipt, tried = dashboard.json(f"/api/sites/blog/jobs/{made['id']}")["receipts"]
        assert (receipt["outcome"], receipt["dryRun"], tried["dryRun"]) == ("published", False, True)
        assert "Say hello" in dashboard.page.get("/sites/blog/search", params={"q": "HELLO say"}).text
        page = dashboard.page.get("/sites/blog/post?slug=hello").text
        assert "content/posts/welcome.md</code> deleted" in page
        assert "Show the differences" in page
        eventually(lambda: "Dry run." not in dashboard.page.get("/sites/blog/").text)
    assert site.git("show", "main:content/posts/hello.md", cwd=site.remote) == "# Hello"
    assert (
        site.git("ls-tree", "--name-only", "main", "content/posts/", cwd=site.remote)
        == "content/posts/hello.md"
    )


def test_requests_with_one_idempotency_key_are_one_job(dashboard: Dashboard) -> None:
    body = {
        "slug": "hello",
        "scheduledFor": LATE,
        "contents": {"content/a.md": encoded("a"), "content/b.md": ""},
    }
    answers = []

    def ask() -> None:
        with httpx.Client(base_url=dashboard.base, headers=dashboard.api.headers, timeout=30) as client:
            answers.append(client.post("/api/sites/blog/jobs", json=body, headers={"Idempotency-Key": "k"}))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [201] * 4
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sorted(answer.json()["replayed"] for answer in answers) == [False, True, True, True]
    key = {"Idempotency-Key": "k"}
    other = {**body, "contents": {"content/a.md": encoded("b")}}
    assert dashboard.api.post("/api/sites/blog/jobs", json=other, headers=key).status_code == 422
    assert dashboard.json("/api/sites/blog/jobs")["total"] == 1
    assert dashboard.api.post("/api/sites/shop/jobs", json=other, headers=key).json()["replayed"] is False
    newer = dashboard.api.post("/api/sites/blog/jobs", json=other).json()
    ask()
    assert answers[-1].json()["replayed"] is True, "a request that is sent again takes no newer save back"
    assert [job["id"] for job in dashboard.json("/api/sites/blog/jobs")["items"]] == [newer["id"]]


def test_an_address_that_postgres_cannot_take_is_no_page(dashboard: Dashboard) -> None:
    for path in ("jobs/a%00b", "history?slug=%00", "history?search=%00"):
        assert dashboard.api.get(f"/api/sites/blog/{path}").status_code == 404, path


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"contents": {"content/a.md": "no base64!"}}, "base64"),
        ({"contents": {}}, "not empty"),
        ({"contents": None}, "contents"),
        ({"contents": {"../etc/passwd": "YQ=="}}, "../etc/passwd"),
        ({"contents": {"secret/a.md": "YQ=="}}, "secret/a.md"),
        ({"contents": {"content/sub/": "YQ=="}}, "content/sub/ names a folder"),
        ({"paths": ["content/b.md"]}, "leave paths out"),
        ({"slug": ""}, "slug"),
        ({"scheduledFor": "soon"}, "soon"),
        ({"at": LATE}, "use scheduledFor"),
        ({"slug": "é" * 900}, "longer than 1000 bytes"),
        ({"contents": {f"content/{'a' * 2400}.md": "YQ=="}}, "more than 255 bytes"),
        ({"contents": {LONG: "YQ=="}}, "more than 2000 bytes"),
        ({"contents": {f"content/{'a/' * 900}é.md": "YQ=="}}, "content/a/a/a"),
        ({"contents": {"content/a\0.md": "YQ=="}}, "NUL"),
        ({"contents": {"content/\ud800.md": "YQ=="}}, "surrogate"),
        ({"extra": "\ud800"}, "surrogate"),
        ({"id": "mine"}, "id"),
        ({"author": {"name": "Ada"}}, "author"),
    ],
)
def test_what_cannot_be_published_is_refused_with_the_reason(
    dashboard: Dashboard, change: dict[str, Any], told: str
) -> None:
    body = {"slug": "hello", "contents": {"content/a.md": encoded("a")}, **change}
    headers = {"Content-Type": "application/json"}
    answer = dashboard.api.post("/api/sites/blog/jobs", content=json.dumps(body), headers=headers)
    assert answer.status_code == 422, answer.text
    assert told in answer.json()["detail"] + answer.json().get("fix", "")
    assert answer.headers["content-type"] == "application/problem+json"
    assert dashboard.json("/api/sites/blog/jobs")["total"] == 0


def test_a_request_that_is_refused_is_told_what_is_wrong_with_it(dashboard: Dashboard) -> None:
    job = {"slug": "hello", "contents": {"content/a.md": encoded("a")}}
    headers = {"Content-Type": "application/json"}
    for body, more, told in (
        (
            json.dumps(job),
            {"Idempotency-Key": ""},
            "header: idempotency-key must be a text that is not empty",
        ),
        (json.dumps({**job, "contents": {}}), {}, "body.contents: must be a JSON object that is not empty"),
        ("{", {}, "body: is no JSON: Expecting property name enclosed in double quotes, at character 1"),
    ):
        answer = dashboard.api.post("/api/sites/blog/jobs", content=body, headers=headers | more)
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith(told)


def test_the_api_of_a_cluster_keeps_to_its_description(dashboard: Dashboard, database: Database) -> None:
    save(database, "blog", "later", scheduledFor=LATE)
    save(database, "blog", "broken", status="failed", failure="rejected", lastError="refused")
    # Which paths and which base64 are accepted, the schema cannot describe.
    paths = check_conformance(dashboard, loose=["/api/sites/{site}/jobs"], site="blog", examples=3)
    assert len(paths) >= 14


def test_a_command_says_what_is_wrong_with_a_job_that_the_database_cannot_hold(
    cluster: Site, tmp_path: Path
) -> None:
    for path in ("content/a.md", LONG):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("A\n")
    for slug, path, said in (
        ("é" * 900, "content/a.md", "longer than 1000 bytes"),
        ("long", LONG, "more than 2000 bytes"),
    ):
        arguments = ("enqueue", slug, path, "--site", "blog", "--root", str(tmp_path))
        line = cluster.command(*arguments).error(2)
        assert said in line
        assert "report it" not in line


def test_a_host_whose_clock_is_two_hours_ahead_says_what_postgres_s_clock_says(
    cluster: Site, database: Database
) -> None:
    soon = datetime.fromtimestamp(database.read_clock() + 3600, UTC).isoformat()
    save(database, "blog", "later", scheduledFor=soon)
    save(database, "shop", "now")
    seen_at = database.read_clock() + 60
    execute(database, "INSERT INTO nodes VALUES ('one', %s, %s)", seen_at, json.dumps(NODE))
    ended = "UPDATE sites SET paused = jsonb_build_object('since', 1, 'until', %s::float8, 'reason', '')"
    execute(database, f"{ended} WHERE name = 'shop'", database.read_clock() + 3600)
    ahead = {**AHEAD, "PYTHONPATH": f"{AHEAD['PYTHONPATH']}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
    (waiting,) = cluster.command("list", "--site", "blog", "--json", **ahead).json()
    assert waiting["state"] == "scheduled"
    for command in ("status", "show later"):
        shown = cluster.command(*command.split(), "--site", "blog", "--json", **ahead).json()
        assert '"scheduled": 1' in json.dumps(shown) or shown["state"] == "scheduled", command
    status = cluster.command("status", "--site", "shop", "--json", **ahead).json()
    assert status["paused"] is not None, "the pause lasts another hour"
    assert status["oldestWaitingSeconds"] < 600
    listed = cluster.command("site", "list", "--json", **ahead).json()
    assert [each["paused"] for each in listed] == [False, True]
    with serving(cluster, **ahead) as dashboard:
        assert dashboard.json("/api/sites/blog/status")["jobs"]["scheduled"] == 1
        assert dashboard.json("/api/sites/shop/status")["paused"] is not None
        shop = row_of(dashboard, "shop")
        assert shop is not None
        assert shop["oldestWaitingSeconds"] < 600
        page = dashboard.page.get("/sites/shop/waiting").text
        assert "h ago" not in page
        waits = [line for line in dashboard.api.get("/metrics").text.splitlines() if "oldest_waiting" in line]
        assert all(float(line.split()[-1]) < 600 for line in waits if not line.startswith("#"))
        until = {"until": soon}
        assert dashboard.api.post("/api/sites/blog/pause", json=until).status_code == 200, (
            "an hour is to come"
        )


# --- Live stream


def test_readers_of_a_site_and_of_all_sites_get_its_events(dashboard: Dashboard, database: Database) -> None:
    with (
        dashboard.api.stream("GET", "/sites/blog/events") as one,
        dashboard.api.stream("GET", "/events") as whole,
    ):
        ours, all_of_them = events(one), events(whole)
        assert next(ours)[0] == "snapshot"
        assert next(all_of_them)[0] == "snapshot"
        save(database, "blog", "later", scheduledFor=LATE)
        for stream in (ours, all_of_them):
            assert next(data for name, _, data in stream if name == "status")["jobs"]["scheduled"] == 1
        dashboard.api.post("/api/sites/blog/jobs/blog-later/cancel")
        assert next(data for name, _, data in ours if name == "cancelled")["slug"] == "later"


def test_a_lost_database_is_reported_and_the_dashboard_recovers(
    cluster: Site,
    database: Database,
    postgres_server: Any,  # noqa: ANN401 - the fixture's own
) -> None:
    with serving(cluster) as dashboard:
        assert dashboard.page.get("/sites/blog/").status_code == 200
        postgres_server.stop()
        try:
            eventually(lambda: "cannot be read" in dashboard.page.get("/").text)
            eventually(lambda: dashboard.api.get("/readyz").status_code == 503)
            assert dashboard.page.get("/sites/shop/").status_code == 503
        finally:
            postgres_server.start()
        eventually(lambda: dashboard.api.get("/readyz").status_code == 200)
        save(database, "shop", "later", scheduledFor=LATE)
        eventually(lambda: "later" in dashboard.page.get("/sites/shop/scheduled").text)


def test_only_the_sites_that_were_asked_for_have_metrics_of_their_own(
    cluster: Site, database: Database
) -> None:
    for site in NAMES:
        save(database, site, "late", scheduledFor=LATE)
    with database.transaction() as connection:
        for site in NAMES:
            row = (site, "git-sync", "published", 2, 2, 3.0)
            connection.execute("INSERT INTO tallies VALUES (%s, %s, %s, %s, %s, %s)", row)
    counted = 'briter_processed_total{kind="git-sync",outcome="published"} 4.0'
    shop = 'briter_processed_total{kind="git-sync",outcome="published",site="shop"} 2.0'
    for asked, expected, absent in (
        ("", ['briter_jobs{site="blog",state="scheduled"} 1.0', counted], ['site=""']),
        ("shop", ['briter_jobs{site="",state="scheduled"} 1.0', shop], ['site="blog"']),
        ("*", [shop, 'briter_jobs{site="blog",state="scheduled"} 1.0'], ['site=""']),
    ):
        with serving(cluster, BRITER_METRICS_SITES=asked) as dashboard:
            text = dashboard.api.get("/metrics").text
        lines = [_sorted_labels(line) for line in text.splitlines()]
        assert [each for each in expected if each not in lines] == [], text
        assert [each for each in absent if each in text] == [], text


def _sorted_labels(line: str) -> str:
    name, brace, rest = line.partition("{")
    labels, end, value = rest.partition("}")
    return f"{name}{brace}{','.join(sorted(labels.split(',')))}{end}{value}" if brace else line


def test_an_api_token_opens_its_sites_for_its_kinds_of_request_until_it_is_revoked(
    cluster: Site, dashboard: Dashboard
) -> None:
    def call(name: str, method: str, path: str, **body: object) -> int:
        headers = {"Authorization": f"Bearer {made[name]}"}
        return httpx.request(method, dashboard.base + path, headers=headers, json=body or None).status_code

    def create(name: str, may: str) -> str:
        done = cluster.command("token", "create", name, "--site", "blog", "--may", may)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    made = {
        "cms": create("cms", "enqueue"),
        "reader": create("reader", "read"),
        "desk": create("desk", "act"),
    }
    job = {"slug": "hello", "contents": {"content/a.md": encoded("A\n")}, "scheduledFor": LATE}
    assert call("cms", "POST", "/api/sites/blog/jobs", **job) == 201
    allowed = {
        "cms": [("POST", "/api/sites/blog/jobs")],
        "reader": [("GET", "/api/sites/blog/jobs"), ("GET", "/api/sites/blog/jobs/hello")],
        "desk": [("POST", "/api/sites/blog/pause"), ("POST", "/api/sites/blog/resume")],
    }
    never = [
        *(
            ("GET", path)
            for path in ("/", "/api/sites", "/api/status", "/metrics", "/events", "/sites/blog/")
        ),
        *(("POST", path) for path in ("/api/sites/shop/jobs", "/sites/blog/actions/pause")),
        *(("GET", path) for path in ("/api/sites/shop/jobs", "/sites/shop/events", "/api/sites/%2e/jobs")),
        ("GET", "/api/sites/blog/doctor"),
    ]
    for name, token in made.items():
        for owner, requests in allowed.items():
            for method, path in requests:
                status = call(
                    name, method, path, **(job if path.endswith("/jobs") and method == "POST" else {})
                )
                assert (status == 403) == (owner != name), (name, method, path, status)
        assert {call(name, *each) for each in never} == {403}, name
        with dashboard.visitor() as visitor:
            assert sign_in(visitor, token).status_code == 401, "it is no way into the pages"
    shown = cluster.command("token", "list", "--json").json()
    assert [(row["name"], row["sites"], row["rights"]) for row in shown] == [
        ("cms", ["blog"], ["enqueue"]),
        ("desk", ["blog"], ["act"]),
        ("reader", ["blog"], ["read"]),
    ]
    assert not any(token in json.dumps(shown) for token in made.values())
    actions = cluster.command("history", "--site", "blog", "--actions", "--json").json()
    assert {(each["action"], each["by"]) for each in actions} == {
        ("pause", "token desk"),
        ("resume", "token desk"),
    }
    assert cluster.command("token", "revoke", "cms").returncode == 0
    assert call("cms", "POST", "/api/sites/blog/jobs", **job) == 401
    headers = {"Authorization": f"Bearer {made['reader']}"}
    with httpx.stream("GET", f"{dashboard.base}/sites/blog/events", headers=headers, timeout=20) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("retry")
        assert cluster.command("token", "revoke", "reader").returncode == 0
        assert [each for each in lines if "event: ping" in each] == [], "the stream ends with its token"
    assert cluster.command("site", "remove", "blog", "--discard").returncode == 0
    assert cluster.command("site", "add", "blog", "--remote", "https://example.org/b.git").returncode == 0
    assert call("desk", "POST", "/api/sites/blog/pause") == 403, "the new site may be somebody else's"


def test_a_site_that_is_added_again_sees_nothing_of_the_removed_one(
    cluster: Site, dashboard: Dashboard
) -> None:
    body = {"slug": "secret-plan", "contents": {"content/a.md": encoded("A")}, "scheduledFor": LATE}
    key = {"Idempotency-Key": "k"}

    def ask(path: str, token: str) -> Any:  # noqa: ANN401 - any JSON
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.get(f"{dashboard.base}/api/sites/shop/{path}", headers=headers, timeout=30)
        return answer.json() if answer.status_code == 200 else answer.status_code

    def read_stream(token: str) -> str:
        headers = {"Authorization": f"Bearer {token}", "Last-Event-ID": "1"}
        with httpx.stream("GET", f"{dashboard.base}/sites/shop/events", headers=headers, timeout=30) as each:
            return str(next(events(each)))

    def create_token() -> str:
        return cluster.command("token", "create", "tenant", "--site", "shop").stdout.strip()

    former = create_token()
    job = dashboard.api.post("/api/sites/shop/jobs", json=body, headers=key).json()["id"]
    assert dashboard.api.post(f"/api/sites/shop/jobs/{job}/cancel").status_code == 200
    assert [each["slug"] for each in ask("history", former)["items"]] == ["secret-plan"]
    assert "secret-plan" in dashboard.page.get("/sites/shop/search?q=secret").text
    assert "secret-plan" in read_stream(former)
    with dashboard.api.stream("GET", "/sites/shop/events") as operators:
        next(events(operators))  # keeps the feed of the former site alive
        assert cluster.command("site", "remove", "shop").returncode == 0
        again = ("site", "add", "shop", "--remote", "https://example.org/r.git", "--branch", "main")
        assert cluster.command(*again).returncode == 0
        assert cluster.command("token", "revoke", "tenant").returncode == 0
        tenant = create_token()
        for path in ("history", "history?slug=secret-plan", "history?search=secret", "queue", "status"):
            assert "secret-plan" not in json.dumps(ask(path, tenant)), path
        assert ask(f"jobs/{job}", tenant) == 404
        assert ask("jobs/secret-plan", tenant) == 404
        assert "secret-plan" not in read_stream(tenant)
        for path in ("/sites/shop/", "/sites/shop/published?show=all", "/sites/shop/search?q=plan"):
            assert "secret-plan" not in dashboard.page.get(path).text, path
        assert dashboard.page.get("/sites/shop/post?slug=secret-plan").status_code == 404
        for arguments in (("history",), ("history", "--actions")):
            assert cluster.command(*arguments, "--site", "shop", "--json").json() == []
        replayed = dashboard.api.post("/api/sites/shop/jobs", json=body, headers=key).json()
        assert (replayed["id"] == job, replayed["replayed"]) == (False, False)
    assert cluster.command("cancel", "secret-plan", "--site", "shop").returncode == 0
    assert len(ask("history", tenant)["items"]) == 1
    cancelled = 'briter_processed_total{kind="any",outcome="cancelled"} 2.0'
    assert cancelled in dashboard.api.get("/metrics").text, "no counter goes back"


def test_what_was_recorded_before_a_site_was_added_belongs_to_a_removed_one(database: Database) -> None:
    attempts = "INSERT INTO attempts (site, job_id, slug, began, ended, outcome) VALUES"
    moments = "INSERT INTO moments (site, at, event, data) VALUES"
    for statement in (
        "DROP TRIGGER sites_inserted ON sites",
        "DROP TRIGGER sites_added_again ON sites",
        "DROP FUNCTION identify_site",
        "ALTER TABLE sites DROP COLUMN identity",
        "DELETE FROM migrations WHERE name LIKE '%_identity'",
        "INSERT INTO sites (name, created_at, removed) VALUES ('shop', 100, false), ('gone', 100, true)",
        f"{attempts} ('shop', 'a', 'theirs', 90, 95, 'published')",
        f"{attempts} ('shop', 'b', 'ours', 105, 110, 'published')",
        f"{attempts} ('gone', 'c', 'gone', 90, 95, 'published')",
        f"{moments} ('shop', 95, 'published', '{{}}'), ('shop', 110, 'published', '{{}}')",
        "INSERT INTO conditions (site, failure, changed_at) VALUES ('shop', 'auth', 95)",
    ):
        execute(database, statement)
    assert "0007_identity" in database.upgrade()
    with database.connection() as connection:
        query = "SELECT s.name, a.slug FROM attempts a JOIN sites s ON s.identity = a.site ORDER BY 1, 2"
        assert connection.execute(query).fetchall() == [("gone", "gone"), ("shop", "ours")]
        assert connection.execute("SELECT at FROM moments WHERE site = 'shop'").fetchall() == [(110,)]
    assert count_rows(database, "attempts") == 3
    assert count_rows(database, "conditions") == 0


def test_a_token_for_no_site_or_of_a_taken_name_is_refused_with_the_fix(cluster: Site) -> None:
    for arguments, status, said in (
        (["../x", "--site", "blog"], 2, "is no name of a token"),
        (["a", "--site", "wiki"], 1, "there is no site 'wiki'"),
        (["a", "--site", "blog", "--may", "all"], 2, "accepted rights: enqueue, read, act"),
        (["a", "--site", "blog"], 0, ""),
        (["a", "--site", "blog"], 1, "there is a token 'a' already"),
    ):
        done = cluster.command("token", "create", *arguments)
        assert (done.returncode, said in done.stderr) == (status, True), done
    assert "there is no token 'b'" in cluster.command("token", "revoke", "b").stderr
    assert "there is no token" in cluster.command("token", "revoke", "\udcff").stderr
    assert "there is no site" in cluster.command("list", "--site", "\udcff").stderr

"""The API: the actions of the pages for programs, with idempotency keys and problem documents."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest
from conformance import check_conformance
from dashboards import Dashboard, events, serving
from sites import Site, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site


TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()
BODY = {"slug": "hello", "paths": ["content/posts/hello.md"]}


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert {"type", "title", "detail"} <= body.keys()
    assert "Traceback" not in answer.text
    return body


def test_the_queue_lists_scheduled_and_failed_jobs_as_briters_dashboard_expects(
    site: Site, dashboard: Dashboard
) -> None:
    later = (datetime.now(UTC) + timedelta(days=2)).isoformat()
    site.save("later", ["content/posts/a.md"], scheduledFor=later)
    site.save("sooner", ["content/posts/b.md"], scheduledFor=TOMORROW, mine={"kept": True})
    site.save("bad", ["../outside"])
    site.run_once()
    eventually(lambda: dashboard.json("/api/status")["jobs"]["failed"] == 1)

    queue = dashboard.json("/api/queue")

    assert [job["slug"] for job in queue["scheduled"]] == ["sooner", "later"]
    assert queue["scheduled"][0]["state"] == "scheduled"
    assert queue["scheduled"][0]["scheduledFor"] == TOMORROW
    assert queue["scheduled"][0]["mine"] == {"kept": True}
    (failed,) = queue["failed"]
    assert failed["slug"] == "bad"
    assert failed["lastError"]
    assert failed["failure"] == "nopaths"
    assert failed["fix"]
    assert (queue["scheduledTotal"], queue["failedTotal"]) == (2, 1)


def test_pages_of_jobs_have_each_job_once(site: Site, dashboard: Dashboard) -> None:
    for number in range(7):
        site.save(f"held-{number}", ["content/posts/a.md"], scheduledFor=TOMORROW)
    site.save("now", ["content/posts/b.md"])
    eventually(lambda: dashboard.json("/api/jobs")["total"] == 8)
    seen, offset = [], 0
    while offset is not None:
        page = dashboard.json("/api/jobs", offset=offset, limit=3)
        seen += [job["slug"] for job in page["items"]]
        offset = page["next"]
    assert len(seen) == len(set(seen)) == 8
    assert seen[0] == "now"
    assert dashboard.json("/api/jobs", state="pending")["total"] == 1
    assert dashboard.json("/api/jobs", slug="held-3")["total"] == 1


def test_a_job_enqueued_over_http_is_published(site: Site, dashboard: Dashboard) -> None:
    site.write_post("content/posts/hello.md", "# Hello\n")
    author = {"name": "Ada Lovelace", "email": "ada@example.org"}
    answer = dashboard.api.post(
        "/api/jobs",
        json={
            **BODY,
            "message": "Say hello",
            "author": author,
            "mine": [1],
            "paths": [*BODY["paths"], "../x"],
        },
    )
    assert answer.status_code == 201
    made = answer.json()
    assert made["slug"] == "hello"
    assert not made["replayed"]
    assert site.job("hello")["mine"] == [1]

    site.run_once()

    eventually(lambda: dashboard.json(f"/api/jobs/{made['id']}")["state"] == "published")
    job = dashboard.json(f"/api/jobs/{made['id']}")
    (receipt,) = job["receipts"]
    assert receipt["commit"] == site.remote_log()[0][0]
    assert site.git("log", "-1", "--format=%an <%ae>%n%s", "main", cwd=site.remote).splitlines() == [
        "Ada Lovelace <ada@example.org>",
        "Say hello",
    ]
    assert dashboard.json("/api/history")["items"][0]["jobId"] == made["id"]


def test_requests_with_one_idempotency_key_at_once_are_one_job(site: Site, dashboard: Dashboard) -> None:
    def ask(_: int) -> httpx.Response:
        return dashboard.api.post("/api/jobs", json=BODY, headers={"Idempotency-Key": "save-1"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(16)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum(not answer.json()["replayed"] for answer in answers) == 1
    assert len(site.jobs()) == 1


def test_an_idempotency_key_outlives_the_dashboard_and_the_job(site: Site) -> None:
    site.write_post("content/posts/hello.md", "# Hello\n")
    key = {"Idempotency-Key": "save-1"}
    with serving(site) as first:
        made = first.api.post("/api/jobs", json=BODY, headers=key).json()
    site.run_once()
    assert site.jobs() == []
    with serving(site) as second:
        again = second.api.post("/api/jobs", json=BODY, headers=key).json()
        assert again["id"] == made["id"]
        assert again["replayed"]
        assert site.jobs() == [], "it is not published twice"
        other = second.api.post("/api/jobs", json={**BODY, "slug": "other"}, headers=key)
        assert "Idempotency-Key" in problem(other, 422)["detail"]
        assert problem(other, 422)["fix"] == "use a new key for a new request"
        fresh = second.api.post("/api/jobs", json=BODY, headers={"Idempotency-Key": "save-2"}).json()
        assert fresh["id"] != made["id"]


def test_a_failed_job_is_retried_and_cancelled(site: Site, dashboard: Dashboard) -> None:
    site.save("bad", ["../outside"], id="an id/with?all#of it")
    site.run_once()
    path = "/api/jobs/" + quote("an id/with?all#of it", safe="")
    eventually(lambda: dashboard.json("/api/jobs", state="failed")["total"] == 1)
    assert dashboard.json(path)["failure"] == "nopaths"
    assert dashboard.api.post(f"{path}/retry").json() == {
        "jobs": [{"id": "an id/with?all#of it", "slug": "bad"}]
    }
    assert site.job("bad")["status"] == "pending"
    problem(dashboard.api.post(f"{path}/retry"), 409)
    assert dashboard.api.post(f"{path}/cancel").json()["jobs"][0]["cancelled"] is True
    assert site.jobs() == []
    problem(dashboard.api.post(f"{path}/cancel"), 404)
    assert dashboard.api.post("/api/retry-all").json() == {"jobs": []}


def test_a_pause_lasts_until_it_is_over(dashboard: Dashboard) -> None:
    made = dashboard.api.post("/api/pause", json={"until": TOMORROW, "reason": "printing"}).json()
    assert made["reason"] == "printing"
    assert dashboard.json("/api/status")["paused"] == made
    assert dashboard.api.post("/api/resume").json() == {"resumed": True}
    assert dashboard.api.post("/api/resume").json() == {"resumed": False}
    assert dashboard.api.post("/api/pause").json()["until"] is None
    problem(dashboard.api.post("/api/pause", json={"until": "2020-01-01"}), 409)
    problem(dashboard.api.post("/api/pause", json={"until": "soon"}), 422)


def test_errors_are_problem_documents(dashboard: Dashboard) -> None:
    problem(dashboard.api.get("/api/jobs/nobody"), 404)
    problem(dashboard.api.get("/api/nothing"), 404)
    problem(dashboard.api.delete("/api/queue"), 405)
    invalid = problem(dashboard.api.get("/api/jobs", params={"limit": 0}), 422)
    assert invalid["errors"][0]["where"] == "query.limit"
    problem(dashboard.api.post("/api/jobs", json={"slug": "x"}), 422)
    problem(dashboard.api.post("/api/jobs", json={**BODY, "slug": "a\x07b"}), 422)
    problem(dashboard.api.post("/api/jobs", json={**BODY, "scheduledFor": "tomorrow"}), 422)
    problem(dashboard.api.post("/api/jobs", json={**BODY, "id": "mine"}), 422)
    problem(dashboard.api.post("/api/jobs", content=b"{", headers={"Content-Type": "application/json"}), 422)
    problem(dashboard.api.post("/api/jobs", content=b"x" * (3 << 20)), 413)
    problem(dashboard.api.post("/api/jobs", content=iter([b"x" * (3 << 20)])), 413)  # of unknown length


def test_the_history_is_paged_and_filtered(site: Site, dashboard: Dashboard) -> None:
    for number in range(5):
        site.save(f"bad-{number}", ["../outside"])
    site.run_once()
    first = dashboard.json("/api/history", limit=3)
    second = dashboard.json("/api/history", limit=3, before=first["next"])
    assert len({each["id"] for each in first["items"] + second["items"]}) == 5
    assert second["next"] is None
    assert dashboard.json("/api/history", outcome="published")["items"] == []
    assert len(dashboard.json("/api/history", slug="bad-2")["items"]) == 1
    assert len(dashboard.json("/api/history", search="BAD-3")["items"]) == 1


def test_health_and_readiness_follow_the_queue_folder(site: Site, dashboard: Dashboard) -> None:
    assert dashboard.json("/healthz") == {"status": "ok"}
    assert dashboard.json("/readyz") == {"status": "ok"}
    assert dashboard.json("/api/doctor")["ok"] is True
    site.queue.rename(site.queue.with_name("elsewhere"))
    problem(dashboard.api.get("/readyz"), 503)
    assert dashboard.json("/healthz") == {"status": "ok"}


def test_the_api_keeps_to_its_description(site: Site) -> None:
    for number in range(3):
        site.save(f"held-{number}", ["content/posts/a.md"], scheduledFor=TOMORROW)
    site.save("bad", ["../outside"])
    site.run_once()
    with serving(site) as dashboard:
        # Unknown keys may be any JSON without NUL, which the schema cannot describe.
        paths = check_conformance(dashboard, loose=["/api/jobs"])
    assert {"/api/queue", "/api/jobs", "/api/jobs/{job_id}", "/healthz"} <= paths
    assert len(paths) >= 12


def test_a_key_that_is_no_key_of_a_job_is_refused_with_the_right_one(dashboard: Dashboard) -> None:
    refused = problem(dashboard.api.post("/api/jobs", json={**BODY, "at": TOMORROW}), 422)
    assert (refused["detail"], refused["fix"]) == ("at is not a key of a job", "use scheduledFor")


# The live stream: readers that connect again, leave, and see the dashboard end


def publish(site: Site, slug: str) -> None:
    site.save_post(slug, f"# {slug}\n")
    assert site.run_once().returncode == 0


def until(stream: Iterator[tuple[str, int | None, Any]], name: str) -> list[tuple[str, int | None, Any]]:
    """Return the events up to the first one of this name."""
    found = []
    for each in stream:
        found.append(each)
        if each[0] == name:
            return found
    raise AssertionError(found)


def test_a_reader_gets_a_snapshot_then_each_event_with_its_id(site: Site, dashboard: Dashboard) -> None:
    with dashboard.api.stream("GET", "/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        name, number, data = next(stream)
        assert (name, number) == ("snapshot", 0)
        assert data["jobs"]["pending"] == 0
        publish(site, "hello")
        seen = until(stream, "worker-stopped")
        site.save("later", ["content/posts/a.md"], scheduledFor="2099-01-01")
        status = next(data for name, _, data in stream if name == "status" and data["jobs"]["scheduled"])
    ids = [number for _, number, _ in seen if number is not None]
    assert ids == sorted(set(ids))
    told = {name: data for name, _, data in seen}
    assert told["published"]["slug"] == "hello"
    assert told["published"]["commit"] == site.remote_log()[0][0]
    assert status["jobs"]["scheduled"] == 1


def test_a_reader_that_reconnects_gets_what_it_missed_also_after_a_restart(site: Site) -> None:
    with serving(site) as first, first.api.stream("GET", "/events") as response:
        stream = events(response)
        next(stream)
        publish(site, "one")
        last = until(stream, "worker-stopped")[-1][1]
    publish(site, "two")
    with serving(site) as second:
        headers = {"Last-Event-ID": str(last)}
        with second.api.stream("GET", "/events", headers=headers) as response:
            stream = events(response)
            missed = until(stream, "status")
            names = [name for name, _, _ in missed]
            assert names[:2] == ["worker-started", "start"]
            assert "snapshot" not in names
            assert [data["slug"] for name, _, data in missed if name == "published"] == ["two"]
            ids = [number for _, number, _ in missed if number is not None]
            assert ids == list(range(last + 1, last + 1 + len(ids)))  # type: ignore[operator]
            publish(site, "three")
            assert until(stream, "published")[-1][2]["slug"] == "three"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_dashboard_ends_at_once_also_with_readers(dashboard: Dashboard, number: signal.Signals) -> None:
    with dashboard.api.stream("GET", "/events") as response:
        stream = events(response)
        next(stream)
        began = time.monotonic()
        dashboard.process.send_signal(number)
        with suppress(httpx.RemoteProtocolError):  # cut off between two chunks
            assert list(stream) == []
        assert dashboard.process.wait(60) == 0
        assert time.monotonic() - began < 20, "a stream has no end of its own"
    assert dashboard.process.stderr is not None
    assert dashboard.process.stderr.read() == ""

"""What Prometheus is told, from a worker and from whoever looks on."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from machine import provide
from prometheus_client.parser import text_string_to_metric_families
from sites import Site, eventually, lines_of

from briter_worker.events import Cancelled, Failed, JobStarted, Progress, Published
from briter_worker.measures import Onlooker
from briter_worker.settings import load_settings
from briter_worker.sinks.metrics import Measures, Meters, MetricsSink
from briter_worker.standing import stand

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

MONITORING = Path(__file__).parents[2] / "docs" / "how-to" / "monitoring"
POST = "content/posts/hello.md"
_INVENTED = frozenset({"briter_worker"})  # the job's name in the rules' examples, not a metric


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parsed(text: str) -> dict[str, float]:
    """Each sample by its name and labels, as Prometheus writes them; histograms by sum and count only."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            if not sample.name.endswith(("_bucket", "_created")):
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scraped(port: int) -> dict[str, float]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return parsed(answer.read().decode())
    except OSError:
        return {}


MEASURES = Measures(
    jobs={"pending": 1, "scheduled": 2, "retrying": 0, "claimed": 3, "failed": 4},
    oldest_waiting=12.5,
    oldest_unpushed=99.0,
    holder=("web-1", 4711),
    heartbeat_age=3.0,
    failure="network",
    paused=True,
    dry_run=False,
    quarantined=5,
)


def test_the_standing_of_the_site_is_told_as_it_is() -> None:
    found = parsed(Meters(lambda: MEASURES).render()[0].decode())
    assert found["briter_jobs{state=scheduled}"] == 2
    assert found["briter_in_flight"] == 3
    assert found["briter_dead_letters"] == 4
    assert found["briter_oldest_waiting_seconds"] == 12.5
    assert found["briter_oldest_unpushed_seconds"] == 99
    assert found["briter_worker_alive"] == found["briter_paused"] == 1
    assert found["briter_lock_holder{host=web-1,pid=4711}"] == 1
    assert found["briter_worker_heartbeat_age_seconds"] == 3
    assert found["briter_condition{failure=network}"] == 1
    assert found["briter_quarantined"] == 5
    assert found["briter_dry_run"] == 0


def test_what_ends_is_counted_and_timed() -> None:
    meters, now = Meters(), [1000.0]
    sink = MetricsSink(meters, clock=lambda: now[0])

    def at(moment: float, *events: Any) -> None:  # noqa: ANN401 - any event
        now[0] = moment
        for event in events:
            sink(event)

    facts: dict[str, Any] = {"attempt": 1, "dry_run": False, "duration_ms": 1}
    at(1000, *(_start(job, saved_at=990.0) for job in "abc"))
    at(1002, Progress(phase="push", done=0, total=2))
    at(1005, Progress(phase="push", done=2, total=2), Progress(phase="settle", done=3, total=3))
    at(1006, Published(job_id="a", slug="a", commit="c", **facts))
    at(1006, Failed(job_id="b", slug="b", error="e", failure="network", retry_at=1.0, **facts))
    at(1006, Cancelled(job_id="c", slug="c"))
    found = parsed(meters.render()[0].decode())
    assert found["briter_processed_total{kind=git-sync,outcome=published}"] == 1
    assert found["briter_processed_total{kind=git-sync,outcome=failed}"] == 1
    assert found["briter_processed_total{kind=any,outcome=cancelled}"] == 1
    assert found["briter_save_to_remote_seconds_sum"] == 16
    assert found["briter_phase_seconds_sum{phase=validate}"] == 2
    assert found["briter_phase_seconds_sum{phase=push}"] == 3
    assert found["briter_phase_seconds_sum{phase=settle}"] == 1


def test_what_is_put_back_takes_no_phase_along() -> None:
    meters, now = Meters(), [1000.0]
    sink = MetricsSink(meters, clock=lambda: now[0])
    sink(_start("a", saved_at=990.0))
    sink(Progress(phase="stage", done=1, total=1))
    now[0] = 5000
    sink(_start("b", saved_at=4999.0))
    now[0] = 5002
    sink(Progress(phase="stage", done=1, total=1))
    found = parsed(meters.render()[0].decode())
    assert found["briter_phase_seconds_sum{phase=validate}"] == 2
    assert "briter_phase_seconds_sum{phase=stage}" not in found


def _start(job: str, *, saved_at: float) -> JobStarted:
    return JobStarted(
        job_id=job, slug=job, attempt=1, dry_run=False, title="t", saved_at=saved_at, due_at=None
    )


def test_a_running_worker_answers_prometheus(site: Site) -> None:
    port = free_port()
    with site.running("run", "--metrics-port", str(port)) as worker:
        lines = lines_of(worker)
        eventually(lambda: scraped(port))
        before = scraped(port)
        assert before["briter_worker_alive"] == 1
        assert before[f"briter_lock_holder{{host={socket.gethostname()},pid={worker.pid}}}"] == 1
        assert before["briter_jobs{state=pending}"] == 0
        site.save("late", [POST], scheduledFor="2099-01-01")
        site.save("bad", [".env"])
        site.write_post(POST, "Hello\n")
        site.save("hello", [POST])
        for event in ("nopaths", "published"):
            next(line for line in lines if line["event"] == event)
        eventually(lambda: scraped(port).get("briter_jobs{state=scheduled}") == 1)
        eventually(lambda: scraped(port).get("briter_dead_letters") == 1)
        after = scraped(port)
        assert after["briter_processed_total{kind=git-sync,outcome=published}"] == 1
        assert after["briter_processed_total{kind=git-sync,outcome=nopaths}"] == 1
        assert after["briter_save_to_remote_seconds_count"] == 1
        assert after["briter_phase_seconds_count{phase=push}"] >= 1
        assert after["briter_oldest_waiting_seconds"] == 0, "what is on hold does not wait"
        assert after["briter_oldest_unpushed_seconds"] > 0


def test_a_port_that_is_taken_stops_no_publication(site: Site) -> None:
    site.write_post(POST, "Hello\n")
    site.save("hello", [POST])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = site.run_once(BRITER_METRICS_PORT=str(taken.getsockname()[1]))
    assert run.returncode == 0
    (said,) = run.of("warning")
    assert "BRITER_METRICS_PORT" in said["error"]
    assert site.remote_file(POST) == "Hello\n"


def test_who_looks_on_counts_what_happened_since_it_began_to(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BRITER_APP_ROOT", "BRITER_STORAGE_ROOT"):
        monkeypatch.setenv(name, site.environment()[name])
    settings = load_settings()
    site.write_post(POST, "Before\n")
    site.save("hello", [POST])
    site.run_once()
    onlooker = Onlooker(settings, lambda: stand(settings, time.time()))
    assert "briter_processed_total{kind=git-sync,outcome=published}" not in parsed(_text(onlooker))
    site.write_post(POST, "After\n")
    site.write_post("content/posts/b.md", "After\n")
    site.save("hello", [POST])
    site.save("b", ["content/posts/b.md"])
    site.run_once()
    for _ in range(2):  # asked twice, nothing is counted twice
        found = parsed(_text(onlooker))
        assert found["briter_processed_total{kind=git-sync,outcome=published}"] == 2
        assert found["briter_save_to_remote_seconds_count"] == 2
        assert found["briter_phase_seconds_count{phase=push}"] == 1, "one drain, one push"
        assert found["briter_worker_alive"] == 0
    onlooker.close()
    monkeypatch.undo()


def _text(onlooker: Onlooker) -> str:
    return onlooker.render()[0].decode()


# What the documentation offers


def exported() -> set[str]:
    """Every name that Prometheus may be asked for."""
    meters = Meters(lambda: MEASURES)
    meters.count("git-sync", "published")
    meters.phase("push", 1.0)
    families = text_string_to_metric_families(meters.render()[0].decode())
    return {sample.name for family in families for sample in family.samples}


def names_in(expressions: Iterable[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\bbriter_\w+", text)} - _INVENTED


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_every_alert_asks_for_numbers_that_there_are_and_says_what_to_do() -> None:
    assert rules()
    assert names_in(rule["expr"] for rule in rules()) <= exported()
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]


def test_every_panel_of_the_dashboard_asks_for_numbers_that_there_are() -> None:
    board = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(asked) >= 8
    assert names_in(asked) <= exported()
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


def test_prometheus_itself_finds_nothing_wrong_with_the_alerts() -> None:
    provide("promtool", package="prometheus")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

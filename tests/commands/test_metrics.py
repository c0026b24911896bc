"""Metrics for Prometheus: of a worker, of a dashboard and of a cluster."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from dashboards import serving
from postgres import free_port
from prometheus_client.parser import text_string_to_metric_families
from requirements import provide
from sites import Site, eventually, lines_of

from briter_worker.sinks.metrics import GAUGES, Sample, render_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from briter_worker.sinks.history import Tally

MONITORING = Path(__file__).parents[2] / "docs" / "how-to" / "monitoring"
POST = "content/posts/hello.md"
_INVENTED = frozenset({"briter_worker"})  # the job's name in the rules' examples, not a metric


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


def test_a_running_worker_answers_prometheus(site: Site) -> None:
    port = free_port()
    with site.running("run", "--metrics-port", str(port)) as worker:
        lines = lines_of(worker)
        eventually(lambda: scraped(port))
        before = scraped(port)
        assert before["briter_worker_alive"] == 1
        assert before[f"briter_lock_holder{{host={socket.gethostname()},pid={worker.pid}}}"] == 1
        assert before["briter_jobs{state=pending}"] == 0
        site.save("late", ["content/posts/late.md"], scheduledFor="2099-01-01")
        site.save("bad", [".env"])
        site.save_post("hello", "Hello\n")
        expected = {"nopaths", "published"}
        while expected:
            expected.discard(next(lines)["event"])
        eventually(lambda: scraped(port).get("briter_jobs{state=scheduled}") == 1)
        eventually(lambda: scraped(port).get("briter_dead_letters") == 1)
        after = scraped(port)
        assert after["briter_processed_total{kind=git-sync,outcome=published}"] == 1
        assert after["briter_processed_total{kind=git-sync,outcome=nopaths}"] == 1
        assert after["briter_save_to_remote_seconds_count"] == 1
        assert after["briter_phase_seconds_count{phase=push}"] >= 1
        assert after["briter_oldest_waiting_seconds"] == 0, "what is on hold does not wait"
        assert after["briter_oldest_unpushed_seconds"] > 0
        looked_up = {name.partition("{")[0].removeprefix("briter_") for name in after}
        assert GAUGES.keys() - looked_up == {"condition", "node_sick"}, "nothing is wrong here"


def test_a_port_in_use_stops_no_publication(site: Site) -> None:
    site.save_post("hello", "Hello\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = site.run_once(BRITER_METRICS_PORT=str(taken.getsockname()[1]))
    assert run.returncode == 0
    (said,) = run.of("warning")
    assert "BRITER_METRICS_PORT" in said["fix"]
    assert site.remote_file(POST) == "Hello\n"


def test_the_metrics_of_a_dashboard_count_what_the_history_has(site: Site) -> None:
    for name in ("a", "b"):
        site.save_post(name, "Hello\n")
    site.run_once()
    with serving(site) as dashboard:
        found = parsed(dashboard.api.get("/metrics").text)
    assert found["briter_processed_total{kind=git-sync,outcome=published}"] == 2
    assert found["briter_save_to_remote_seconds_count"] == 2
    assert found["briter_worker_alive"] == 0


def test_sites_that_cannot_be_looked_up_have_no_gauges_instead_of_old_ones() -> None:
    def fail() -> tuple[list[Sample], list[Tally]]:
        raise OSError("the database is away")

    assert parsed(render_metrics(fail)[0].decode()) == {}


# What the documentation offers


def exported() -> set[str]:
    """Every name that Prometheus may be asked for, by the reference, which is made of the models."""
    reference = (MONITORING.parents[1] / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(briter_\w+)` \| (\w+)", reference, re.MULTILINE)
    return {name + ("_bucket" if kind == "histogram" else "") for name, kind in rows}


def names_in(expressions: Iterable[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"\bbriter_\w+", text)} - _INVENTED


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_every_alert_uses_exported_metrics_and_says_what_to_do() -> None:
    assert rules()
    assert names_in(rule["expr"] for rule in rules()) <= exported()
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]


def test_every_panel_of_the_dashboard_uses_exported_metrics() -> None:
    board = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(asked) >= 8
    assert names_in(asked) <= exported()
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


def test_promtool_accepts_the_alerts() -> None:
    provide("promtool", package="prometheus")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts.test.yml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

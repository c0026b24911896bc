"""Plugins as they are installed: found by their entry point, asked by the real worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sites import Result, Site

EXAMPLE = Path(__file__).parents[2] / "docs" / "how-to" / "plugin-example"


class Plugged:
    """A site whose worker has plugins installed beside it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.folder = folder

    def install(self, name: str, code: str) -> None:
        """As pip would: a module, and the metadata that names its entry point."""
        self.folder.mkdir(exist_ok=True)
        module = name.replace("-", "_")
        (self.folder / f"{module}.py").write_text(code)
        metadata = self.folder / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[briter_worker]\n{name} = {module}\n")

    def run(self, **env: str) -> Result:
        return self.site.run_once(PYTHONPATH=str(self.folder), BRITER_WORKER_BACKOFF_MS="600000", **env)

    def post(self, slug: str, folder: str = "content/posts", **keys: object) -> None:
        path = f"{folder}/{slug}.md"
        self.site.save_post(slug, slug, path, **keys)


@pytest.fixture
def plugged(site: Site, tmp_path: Path) -> Plugged:
    return Plugged(site, tmp_path / "plugins")


HEAD = """\
from briter_worker.plugins import JobKind, RefusedError, SnoozedError, hookimpl
from contextlib import contextmanager
"""


def test_the_example_of_the_guide_does_what_the_guide_says(plugged: Plugged) -> None:
    site = plugged.site
    plugged.install("editorial-rules", (EXAMPLE / "editorial_rules.py").read_text())
    cache = site.root / "cache"
    cache.mkdir()
    (cache / "index.html").write_text("old")
    (site.storage / "config.json").write_text(
        json.dumps({"plugins": {"editorial-rules": {"cache": str(cache)}}})
    )
    plugged.post("live")
    plugged.post("letter", "newsletter")
    plugged.post("secret", "content/drafts")
    site.save("purge", ["index.html"], type="purge-cache")
    done = plugged.run()
    assert {line["slug"] for line in done.of("published")} == {"live", "letter"}
    (dead,) = done.of("dead-lettered")
    assert (dead["slug"], dead["failure"]) == ("secret", "plugin")
    assert "move it out of drafts/" in dead["error"]
    assert [line["slug"] for line in done.of("nochange")] == ["purge"]
    assert not (cache / "index.html").exists()
    assert [job["slug"] for job in site.jobs()] == ["secret"]
    notes = done.stderr
    commits = {line["slug"]: line["commit"] for line in done.of("published")}
    assert f"live is live as {commits['live'][:10]}" in notes
    assert "secret attempt 1 took" in notes
    assert site.remote_file("content/drafts/secret.md") is None


def test_a_snooze_costs_no_attempt_and_is_tried_again(plugged: Plugged) -> None:
    plugged.install(
        "later",
        HEAD
        + "import time\n@hookimpl\ndef before_publish(): raise SnoozedError(time.time() + 60, 'not yet')\n",
    )
    plugged.post("a")
    done = plugged.run()
    (snoozed,) = done.of("failed")
    assert (snoozed["error"], snoozed["failure"], snoozed["attempt"]) == ("not yet", "plugin", 1)
    job = plugged.site.job("a")
    assert (job["attempts"], job["status"]) == (0, "pending")
    assert job["nextAttemptAt"] == snoozed["retryAt"]
    assert done.returncode == 1
    assert plugged.run().names() == ["worker-started", "worker-stopped"]
    assert plugged.site.command("publish-now", "a").returncode == 0
    assert plugged.run().of("failed")


@pytest.mark.parametrize("hook", ["before_publish(job)", "around_attempt(job)"])
def test_a_plugin_that_trips_over_one_post_fails_that_post_alone(plugged: Plugged, hook: str) -> None:
    code = f"@hookimpl\ndef {hook}:\n    if job.slug == 'bad': raise KeyError('oops')\n"
    if hook.startswith("around"):
        code += "    from contextlib import nullcontext\n    return nullcontext()\n"
    plugged.install("clumsy", HEAD + code)
    plugged.post("bad")
    plugged.post("good")
    done = plugged.run()
    assert [line["slug"] for line in done.of("published")] == ["good"]
    (failed,) = done.of("failed")
    assert (failed["slug"], failed["failure"], failed["attempt"]) == ("bad", "internal", 1)
    assert "KeyError" in failed["error"]


def test_what_a_plugin_gets_wrong_after_the_push_is_a_warning(plugged: Plugged) -> None:
    plugged.install("late", HEAD + "@hookimpl\ndef after_publish(publication): raise OSError('too late')\n")
    plugged.post("a")
    done = plugged.run()
    assert done.of("published")
    assert "too late" in done.of("warning")[0]["error"]
    assert done.returncode == 0


def test_jobs_of_a_plugins_type_are_retried_by_its_own_rules(plugged: Plugged) -> None:
    plugged.install(
        "mailer",
        HEAD
        + "def send(job): raise ConnectionError('no mail server')\n"
        + "@hookimpl\ndef job_kinds(): return {'mail': JobKind(send, max_attempts=2, delays=(0.0,))}\n",
    )
    plugged.site.save("letter", [], type="mail")
    plugged.site.save("unknown", [], type="fax")
    done = plugged.run()
    assert [line["attempt"] for line in done.of("failed")] == [1]
    dead = {line["slug"]: (line["attempt"], line["failure"]) for line in done.of("dead-lettered")}
    assert dead == {"letter": (2, "internal"), "unknown": (1, "unknown-type")}


def test_a_plugin_that_cannot_be_loaded_stops_no_post_silently(plugged: Plugged) -> None:
    plugged.install("broken", "import no_such_module_anywhere\n")
    plugged.post("a")
    done = plugged.run()
    assert not done.of("published")
    (failed,) = done.of("failed")
    assert failed["failure"] == "plugin-broken"
    assert "no_such_module_anywhere" in failed["error"]
    assert "'broken'" in failed["error"]
    doctor = plugged.site.command("doctor", "--json", PYTHONPATH=str(plugged.folder))
    finding = doctor.finding("plugins")
    assert (finding["state"], finding["fix"]) == ("error", "correct the plugin, or uninstall it")

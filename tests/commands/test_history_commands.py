"""What a person and a program learn of what became of a post."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import serving
from outcomes import save
from postgres import free_port
from sites import eventually

if TYPE_CHECKING:
    from sites import Site


def test_a_published_post_has_a_receipt_with_commit_branch_remote_time_and_link(site: Site) -> None:
    site.save_post("a", "a", message="Hello\n\nmore")
    site.run_once(BRITER_PUBLISHED_HREF_TEMPLATE="https://example.org/{slug}")
    (receipt,) = site.command("history", "--json").json()
    commit = site.remote_log()[0][0]
    assert (receipt["outcome"], receipt["commit"], receipt["branch"]) == ("published", commit, "main")
    assert (receipt["remote"], receipt["href"]) == ("origin", "https://example.org/a")
    assert 0 < receipt["saveToRemoteMs"] < 60_000
    assert receipt["title"] == "Hello"
    names = [phase["name"] for phase in receipt["phases"]]
    assert names == ["validate", "stage", "commit", "push", "settle"]
    assert all(phase["ended"] for phase in receipt["phases"])


def test_a_receipt_names_the_files_of_the_commit_and_their_lines(site: Site) -> None:
    save(site, "a", "gone")
    site.run_once()
    site.write_post("content/posts/a.md", "one\ntwo\n")
    site.write_post("content/posts/é.png", "\0")
    (site.worktree / "content/posts/gone.md").unlink()
    site.save("a", ["content/posts"])
    site.run_once()
    receipt = site.command("history", "--json").json()[0]
    found = [(each["path"], each["added"], each["removed"]) for each in receipt["changes"]]
    expected = [("a.md", 2, 1), ("gone.md", 0, 1), ("é.png", None, None)]
    assert found == [(f"content/posts/{name}", *lines) for name, *lines in expected]
    assert (receipt["filesChanged"], receipt["signedWith"]) == (3, None)
    assert "\t3 files, +2 -2\t" in site.command("history").stdout
    assert "changed\t+2 -1\tcontent/posts/a.md\n" in site.command("show", "a").stdout


def test_a_partly_published_post_says_so_in_the_list(site: Site) -> None:
    site.write_post("content/posts/a.md", "a\n")
    site.save("a", ["content/posts/a.md", "config.php"])
    site.run_once()
    assert "\t1 file, +1 -0, without 1 declared path\t" in site.command("history").stdout


def test_what_left_the_queue_is_still_shown(site: Site) -> None:
    save(site, "a")
    site.run_once()
    shown = site.command("show", "a", "--json").json()
    assert (shown["slug"], shown["state"]) == ("a", "published")
    assert [each["outcome"] for each in shown["receipts"]] == ["published"]
    assert site.remote_log()[0][0] in site.command("show", "a").stdout
    watched = site.command("show", "a", "--watch")
    assert watched.returncode == 0
    assert site.remote_log()[0][0] in watched.stdout


def test_what_was_cancelled_while_it_waited_has_a_receipt_too(site: Site) -> None:
    site.save("a", ["content/posts/a.md"], scheduledFor="2099-01-01")
    site.save("b", ["content/posts/b.md"], scheduledFor="2099-01-01")
    assert site.command("cancel", "a").returncode == 0
    with serving(site) as dashboard:
        assert dashboard.act("cancel", id="b").status_code == 303
        eventually(lambda: len(dashboard.json("/api/history")["items"]) == 2)
    assert [(each["slug"], each["outcome"]) for each in site.command("history", "--json").json()] == [
        ("b", "cancelled"),
        ("a", "cancelled"),
    ]


def test_each_failed_attempt_is_kept_with_its_reason(site: Site) -> None:
    site.save("a", ["../outside"])
    site.run_once()
    (receipt,) = site.command("history", "--json").json()
    assert (receipt["outcome"], receipt["failure"]) == ("nopaths", "nopaths")
    assert receipt["error"]
    watched = site.command("show", "a", "--watch")
    assert watched.returncode == 1
    assert watched.stdout.startswith("failed: ")


def test_a_history_that_cannot_be_read_is_told_and_publishing_goes_on(site: Site) -> None:
    (site.storage / "history.db").mkdir()
    save(site, "a")
    done = site.run_once()
    assert done.returncode == 0
    assert done.of("published")
    (warning,) = done.of("warning")
    assert "history" in warning["error"]
    said = site.command("history")
    assert said.returncode == 1
    assert "history.db cannot be read" in said.stderr


def test_the_commands_show_what_became_of_a_post_on_one_site(site: Site, database_url: str) -> None:
    site.env["BRITER_DATABASE_URL"] = database_url
    for name in ("blog", "shop"):
        assert site.command("site", "add", name, "--remote", str(site.remote)).returncode == 0
    site.write_post("content/posts/hello.md", "# Hello\n")
    for name, paths in (("blog", "content/posts/hello.md"), ("shop", "content/posts/welcome.md")):
        assert site.command("enqueue", "hello", paths, "--site", name).returncode == 0
    done = site.command("run", "--once", "--workers", "2", "--metrics-port", str(free_port()))
    assert done.returncode == 0, done.stderr
    (receipt,) = site.command("history", "--site", "blog", "--json").json()
    files = [{"path": "content/posts/hello.md", "added": None, "removed": None, "deleted": False}]
    assert (receipt["changes"], receipt["filesChanged"]) == (files, 1)
    assert (receipt["outcome"], receipt["slug"], receipt["attempt"]) == ("published", "hello", 1)
    assert receipt["commit"] == site.git("rev-parse", "main", cwd=site.remote)
    assert [phase["name"] for phase in receipt["phases"]][-1] in ("push", "settle")
    assert receipt["saveToRemoteMs"] > 0
    shown = site.command("show", "hello", "--site", "blog", "--json").json()
    assert shown["receipts"] == [receipt]
    (other,) = site.command("history", "--site", "shop", "--json").json()
    assert other["outcome"] == "nochange"

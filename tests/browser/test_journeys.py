"""What an editor does on the pages, from a save to the remote: with a browser, a worker and a remote."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from browsers import Running, Visitor, follows, visiting
from dashboards import TOKEN, serving
from playwright.sync_api import expect
from postgres import free_port
from sites import Site, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Locator, Page, Route


TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()


def stay(page: Page) -> None:
    """Leave a mark that a page loaded anew would not have."""
    page.evaluate("window.stayed = true")


def stayed(page: Page) -> bool:
    """Whether it is the same page still: what changed on it came by itself."""
    return bool(page.evaluate("window.stayed === true"))


def row(page: Page, slug: str) -> Locator:
    """The entry of a post in a list."""
    return page.get_by_role("listitem").filter(has=page.get_by_role("link", name=slug, exact=True))


def receipt(page: Page, slug: str) -> Locator:
    """Its newest entry in a list of what happened."""
    return page.locator(".receipts > li").filter(has=page.get_by_role("link", name=slug, exact=True)).first


def test_a_saved_post_is_seen_on_its_way_and_goes_live_on_the_open_page(
    running: Running, visitor: Visitor
) -> None:
    page = visitor.page
    page.goto("/")
    follows(page)
    stay(page)
    with running.closed_gate():
        path = running.save("hello", message="Say hello")

        expect(page.get_by_role("heading", name="1 post being published.")).to_be_visible()
        expect(row(page, "hello").locator(".phase")).to_contain_text("pushing to the remote")

        running.save("next")
        expect(page.locator("#count-pending")).to_have_text("1")
        expect(page.locator("#oldest")).to_contain_text("next")

    expect(receipt(page, "Say hello")).to_contain_text("published")
    expect(receipt(page, "next")).to_contain_text("published")
    expect(page.locator("#announce")).to_contain_text("next is on the remote.")
    commit = next(commit for commit, subject in running.site.remote_log() if subject == "Say hello")
    link = receipt(page, "Say hello").get_by_role("link", name=f"{commit[:10]} commit of hello")
    expect(link).to_have_attribute("href", f"https://example.org/commit/{commit}")
    seen = receipt(page, "Say hello").get_by_role("link", name="See the post")
    expect(seen).to_have_attribute("href", "https://example.org/hello")
    assert running.site.remote_file(path) is not None
    assert stayed(page)


def test_a_rejected_post_is_corrected_retried_and_published(running: Running, visitor: Visitor) -> None:
    page = visitor.page
    path = running.save("lighthouse", "TODO: who built it?")

    page.goto("/")
    expect(page.get_by_role("heading", name=re.compile("posts? failed"))).to_be_visible()
    page.get_by_role("link", name="See the reason and the fix").click()
    entry = row(page, "lighthouse")
    expect(entry).to_contain_text("Not published: the remote does not accept this post.")
    expect(entry).to_contain_text("A post still says TODO. Write that passage first.")
    expect(entry).to_contain_text("You can change the post as the message says, then save it again.")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    entry.get_by_role("button", name="Copy").click()
    fix = running.site.job("lighthouse")["fix"]  # for the administrator, verbatim
    eventually(lambda: page.evaluate("navigator.clipboard.readText()") == fix)
    assert running.site.remote_file(path) is None

    running.site.write_post(path, "# Lighthouse\n\nAda built it.\n")
    entry.get_by_role("button", name="Retry").click()

    expect(page.locator("#told")).to_have_text("It will be retried now.")
    expect(row(page, "lighthouse")).to_have_count(0)
    page.get_by_role("link", name="Published", exact=True).click()
    expect(receipt(page, "lighthouse")).to_contain_text("published")
    page.get_by_role("link", name="lighthouse", exact=True).first.click()
    attempts = page.locator(".attempts > li")
    expect(attempts.first).to_contain_text("Published")
    expect(attempts.last).to_contain_text("Failed")
    assert running.site.remote_file(path) == "# Lighthouse\n\nAda built it.\n"


def test_a_scheduled_post_is_cancelled_after_a_question(running: Running, visitor: Visitor) -> None:
    page = visitor.page
    path = running.save("regrets", scheduledFor=TOMORROW)
    page.goto("/scheduled")
    entry = row(page, "regrets")
    sure = entry.get_by_role("button", name="Cancel this post")
    expect(sure).to_be_hidden()

    entry.get_by_text("Cancel", exact=False).first.click()
    sure.click()

    expect(page.locator("#told")).to_contain_text("It is cancelled")
    expect(entry).to_have_count(0)
    assert not [job for job in running.site.jobs() if job["slug"] == "regrets"]
    assert running.site.remote_file(path) is None
    assert (running.site.worktree / path).exists()


def test_an_open_page_shows_the_beginning_and_the_end_of_a_pause(running: Running, visitor: Visitor) -> None:
    page = visitor.page
    page.goto("/published")
    follows(page)
    assert running.site.command("pause", "--for", "1h", "--reason", "Lunch").returncode == 0
    expect(page.locator("#obstacle")).to_contain_text("Publishing is paused until")
    expect(page.locator("#obstacle")).to_contain_text("Lunch.")
    assert running.site.command("resume").returncode == 0
    expect(page.locator("#obstacle")).to_be_empty()


def test_a_change_while_a_page_loads_is_on_the_page(running: Running, visitor: Visitor) -> None:
    page = visitor.page

    def late(route: Route) -> None:
        running.save("between", scheduledFor=TOMORROW)
        eventually(lambda: running.knows("between"))
        route.continue_()

    page.route("**/events", late, times=1)
    page.goto("/scheduled")

    expect(row(page, "between")).to_be_visible()


def looked_at(page: Page, *, seen: bool) -> None:
    """Have the browser say that the tab is in front, or behind others: without a screen, all are in front."""
    page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        not seen,
    )


def test_a_hidden_tab_holds_no_connection_and_catches_up_when_shown(
    running: Running, visitor: Visitor
) -> None:
    page = visitor.page
    page.goto("/scheduled")
    follows(page)
    stay(page)
    # Those of earlier pages may be noticed to have left a little later.
    eventually(lambda: running.dashboard.json("/api/status")["readers"] == 1)

    looked_at(page, seen=False)
    eventually(lambda: running.dashboard.json("/api/status")["readers"] == 0)
    running.save("meanwhile", scheduledFor=TOMORROW)
    eventually(lambda: running.knows("meanwhile"))
    looked_at(page, seen=True)

    expect(row(page, "meanwhile")).to_be_visible()
    follows(page)
    eventually(lambda: running.dashboard.json("/api/status")["readers"] == 1)
    assert stayed(page)


def test_opened_details_and_typed_text_outlast_a_reload_of_the_live_part(
    running: Running, visitor: Visitor
) -> None:
    page = visitor.page
    page.goto("/")
    follows(page)
    page.get_by_text("Pause publishing").click()
    page.get_by_label("Reason").press_sequentially("The prin")

    running.save("meanwhile")

    expect(receipt(page, "meanwhile")).to_contain_text("published")
    expect(page.get_by_label("Reason")).to_have_value("The prin")
    expect(page.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("ters")
    expect(page.get_by_label("Reason")).to_have_value("The printers")


def test_a_lost_stream_does_not_reload_over_a_half_filled_form(visitor: Visitor) -> None:
    page = visitor.page
    page.clock.install()
    page.goto("/")
    follows(page)
    stay(page)
    page.get_by_text("Pause publishing").click()
    page.get_by_label("Reason").fill("The prin")
    page.route("**/events", lambda route: route.fulfill(status=401))
    looked_at(page, seen=False)
    looked_at(page, seen=True)
    expect(page.locator("#live-word")).to_have_text("not connected")
    page.clock.run_for(120_000)
    assert stayed(page)
    expect(page.get_by_label("Reason")).to_have_value("The prin")

    page.get_by_label("Reason").fill("")
    page.get_by_text("Pause publishing").click()
    page.unroute("**/events")
    page.clock.run_for(120_000)
    expect(page.locator("#live-word")).to_have_text("connected")
    assert not stayed(page)
    visitor.wrong.clear()


def test_a_lost_stream_connects_again_later_each_time(visitor: Visitor) -> None:
    page = visitor.page
    page.clock.install()
    page.add_init_script(
        "window.tries = 0; window.EventSource = class { static CLOSED = 2; readyState = 0;"
        " constructor() { window.tries += 1; setTimeout(() => this.onerror(), 1); }"
        " addEventListener() {} close() {} };"
    )
    page.goto("/")
    page.clock.run_for(60_000)
    assert page.evaluate("window.tries") == 5, "after 0, 2, 6, 14 and 30 s"


def test_an_open_page_of_a_restarted_dashboard_asks_to_sign_in_again(
    browser: Browser, tmp_path: Path
) -> None:
    site = Site.make(tmp_path)
    port = str(free_port())
    with serving(site, BRITER_DASHBOARD_PORT=port) as first, visiting(browser, first) as visitor:
        page = visitor.page
        page.goto("/failed")
        follows(page)
        first.process.kill()
        first.process.wait()
        expect(page.locator("#live-word")).to_have_text("not connected")
        with serving(site, BRITER_DASHBOARD_PORT=port):
            expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
            page.get_by_label("Token").fill(TOKEN)
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("heading", name="Failed", exact=True)).to_be_visible()
            visitor.wrong.clear()


def forge(page: Page, victim: str, job: str) -> None:
    """A page of another site sends a form of this one."""
    form = f"<form method=post action={victim}/actions/cancel><input name=id value={job}>"
    html = f"<!doctype html><title>Win</title>{form}<button>Win</button></form>"
    page.route("http://evil.localhost/**", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.goto("http://evil.localhost/page")
    page.get_by_role("button", name="Win").click()


def test_a_page_of_another_site_cannot_change_anything(running: Running, visitor: Visitor) -> None:
    running.save("kept", scheduledFor=TOMORROW)
    eventually(lambda: running.knows("kept"))
    job = running.site.job("kept")["id"]
    page = visitor.page
    page.goto("/scheduled")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    forge(page, running.base, job)
    # The browser does not send the cookie along with the form, only with the redirect that refuses it.
    expect(page).to_have_url(f"{running.base}/")
    assert running.site.job("kept")["id"] == job

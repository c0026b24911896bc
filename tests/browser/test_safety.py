"""Who gets in, and what a page of another site can do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from browsers import Running, Visitor, visiting
from dashboards import TOKEN
from playwright.sync_api import expect
from sites import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()


def forge(page: Page, victim: str, job: str) -> None:
    """A page of another site sends a form of this one."""
    form = f"<form method=post action={victim}/actions/cancel><input name=id value={job}>"
    html = f"<!doctype html><title>Win</title>{form}<button>Win</button></form>"
    page.route("http://evil.localhost/**", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.goto("http://evil.localhost/page")
    page.get_by_role("button", name="Win").click()


def test_only_the_right_token_opens_and_signing_out_closes(browser: Browser, running: Running) -> None:
    with visiting(browser, running.dashboard, signed_in=False) as visitor:
        page = visitor.page
        page.goto("/failed")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(page.get_by_role("link", name="Failed")).to_have_count(0)
        expect(page.get_by_label("Token")).to_be_focused()

        page.keyboard.type("a guess")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("That is not the token.")
        visitor.wrong[:] = [each for each in visitor.wrong if "401" not in each]
        page.goto("/failed")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()

        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", name="Failed", exact=True)).to_be_visible()
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
        assert TOKEN not in cookie["value"]
        assert page.evaluate("document.cookie") == ""

        page.get_by_role("button", name="Sign out").click()
        expect(page.locator("#told")).to_have_text("You are signed out.")
        page.goto("/")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert page.context.cookies() == []
        # The page that was left may have asked for its news just as the session ended.
        visitor.wrong[:] = [each for each in visitor.wrong if "401" not in each]


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

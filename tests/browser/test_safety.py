"""Who gets in, and words that were written to do harm."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from browsers import PAGES, Running, Visitor, follows, visiting
from dashboards import TOKEN
from playwright.sync_api import expect
from sites import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOMORROW = (datetime.now(UTC) + timedelta(days=1)).isoformat()
NASTY = "\"'><script>alert(1)</script><img src=x onerror=alert(2)><b hx-get=/ hx-trigger=load>{{7*7}}"
FOREIGN = """() => [
    ...document.querySelectorAll('img, iframe, object, b, base, [style], script:not([src^="/static/"])'),
    ...[...document.querySelectorAll('*')].filter((each) => [...each.attributes].some(
        (one) => one.name.startsWith('on') || /^\\s*(javascript|data):/i.test(one.value))),
].map((each) => each.outerHTML)"""


def harmless(page: Page) -> None:
    """Nothing on the page came from a job's words but words."""
    assert page.evaluate(FOREIGN) == []
    assert "{{7*7}}" in page.content() or "49" not in page.locator("main").inner_text()


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
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert TOKEN not in cookie["value"]
        assert page.evaluate("document.cookie") == ""

        page.get_by_role("button", name="Sign out").click()
        expect(page.locator("#told")).to_have_text("You are signed out.")
        page.goto("/")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert page.context.cookies() == []


def test_signing_in_works_without_scripts(browser: Browser, running: Running) -> None:
    with visiting(browser, running.dashboard, signed_in=False, java_script_enabled=False) as visitor:
        page = visitor.page
        page.goto("/published?q=x")
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_label("Search")).to_have_value("x")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_page_of_another_site_cannot_change_anything(running: Running, visitor: Visitor) -> None:
    running.save("kept", scheduledFor=TOMORROW)
    eventually(lambda: running.knows("kept"))
    job = running.site.job("kept")["id"]
    page = visitor.page
    page.goto("/scheduled")
    expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    forge(page, running.base, job)
    # The browser does not send the strict cookie.
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert running.site.job("kept")["id"] == job


def test_text_of_jobs_and_remotes_never_becomes_markup(running: Running, visitor: Visitor) -> None:
    page, site = visitor.page, running.site
    page.goto("/")
    follows(page)
    everywhere = {"message": NASTY, NASTY: NASTY, "webhook": NASTY, "author": {"name": "A", "email": "a@b.c"}}
    site.save(f"held {NASTY}", [f"content/posts/{NASTY}.md"], scheduledFor=TOMORROW, **everywhere)
    site.save(f"wrong {NASTY}", [NASTY], **everywhere)
    site.save(f"author {NASTY}", ["content/posts/welcome.md"], author={"name": NASTY, "email": NASTY})
    site.save(f"type {NASTY}", ["content/posts/welcome.md"], type=NASTY)
    site.save(f"id {NASTY}", ["content/posts/welcome.md"], id=f"id-{NASTY}"[:60].replace("/", "-"))
    (site.queue / f"{NASTY.replace('/', '-')}.json").write_text(NASTY)
    running.save("refused", "HOSTILE", message=NASTY)
    site.write_post("content/posts/live.md", "live")
    site.save(f"live {NASTY}", ["content/posts/live.md"], message=NASTY)

    # What comes by itself, onto an open page.
    expect(page.locator(".receipts > li", has_text="live \"'><script>").first).to_be_visible()
    harmless(page)
    page.get_by_text("Pause publishing").click()
    page.get_by_label("Reason").fill(NASTY)
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".condition")).to_contain_text(NASTY)
    harmless(page)
    page.get_by_role("button", name="Resume publishing").click()
    page.goto("/failed")
    expect(page.locator(".why", has_text="<img src=x onerror=alert(1)> no")).to_be_visible()
    expect(page.locator(".post", has_text="wrong")).to_contain_text(NASTY)
    page.goto("/scheduled")
    expect(page.locator(".cards")).to_contain_text(NASTY)
    page.goto("/published")
    page.get_by_label("Search").fill(NASTY)
    expect(page).to_have_url(re.compile("q=.*script"))
    expect(page.locator(".receipts > li", has_text="live \"'><script>").first).to_be_visible()
    harmless(page)

    posts = [address for place in PAGES for address in addresses(page, place)]
    assert len(posts) >= 7
    for address in (*PAGES, "/published?show=all", *posts):
        page.goto(address)
        harmless(page)
    page.goto(next(address for address in posts if "held" in address))
    page.get_by_text("Job file").click()
    expect(page.locator(".keys dt", has_text=NASTY)).to_be_visible()
    page.goto(f"/post?slug={'%3Cscript%3Ealert(3)%3C/script%3E'}")
    expect(page.locator("main")).to_contain_text("<script>alert(3)</script>")
    harmless(page)
    visitor.wrong[:] = [each for each in visitor.wrong if "404" not in each]


def addresses(page: Page, place: str) -> list[str]:
    """The posts that a page leads to."""
    page.goto(place)
    found: list[str] = page.eval_on_selector_all(
        "a.post", "all => all.map((each) => each.getAttribute('href'))"
    )
    return found

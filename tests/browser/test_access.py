"""The pages for everybody: by keyboard and screen reader, in the dark, on a phone, with long lists."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest
from browsers import PAGES, Running, Visitor, follows, open_site, visiting
from playwright.sync_api import expect
from sites import Site, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
LONG = "a-slug-without-an-end-" + "x" * 150
HELD = 55
CHANCES = """() => [...document.querySelectorAll(
    'a[href], button, summary, select, input:not([type=hidden]), [tabindex="0"]')]
  .filter((each) => each.checkVisibility() && !each.closest('[hidden]'))"""
NAME = """(each) => `${each.localName} ${each.id || each.getAttribute('href') || each.textContent.trim()}`"""
HERE = f"""() => {{
  const each = document.activeElement;
  if (!each || each === document.body) return null;
  const style = getComputedStyle(each);
  const box = each.getBoundingClientRect();
  return {{
    name: ({NAME})(each),
    ring: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2,
    seen: box.width > 0 && box.height > 0 && box.bottom > 0 && box.top < innerHeight,
  }};
}}"""


def fill(running: Running) -> None:
    """Posts in every state, and lists of more than one page."""
    site = running.site
    running.save("todo", "TODO")
    site.save("concerts", ["drafts/concerts.md"])
    for number in range(HELD):
        site.save(f"wrong-{number:02}", ["drafts/wrong.md"], message=f"Number {number}")
    running.save(LONG, message="A message without spaces: " + "y" * 150)
    running.save("plain", message="Publish plain")
    site.run_once()
    soon = datetime.now(UTC) + timedelta(days=1)
    for number in range(HELD):
        site.save(
            f"held-{number:02}",
            [f"content/posts/{LONG}.md"],
            scheduledFor=(soon + timedelta(hours=number)).isoformat(),
        )
    site.save(f"{LONG}-held", ["content/posts/x.md"], scheduledFor=soon.isoformat())
    eventually(lambda: running.dashboard.json("/api/status")["jobs"]["scheduled"] == HELD + 1)
    running.dashboard.act("examine")
    eventually(lambda: 'aria-busy="false"' in running.dashboard.page.get("/site").text)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A site where much has happened."""
    with open_site(Site.make(tmp_path_factory.mktemp("site")), before=fill) as opened:
        yield opened


def places(running: Running) -> tuple[str, ...]:
    """Every kind of page, with something on it."""
    posts = tuple(f"/post?slug={slug}" for slug in ("todo", "plain", "held-00", LONG))
    assert all(running.dashboard.page.get(post).status_code == 200 for post in posts)
    return (*PAGES, *posts, "/published?show=failed", "/nothing-here")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_on_any_page(browser: Browser, running: Running, scheme: str) -> None:
    # The dark pages differ from the light ones in their colours alone.
    which = {"runOnly": ["color-contrast", "link-in-text-block"]} if scheme == "dark" else {}
    found = []
    with visiting(browser, running.dashboard, color_scheme=scheme, reduced_motion="reduce") as visitor:
        for place in places(running):
            visitor.page.goto(place)
            visitor.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            visitor.page.evaluate(AXE)
            answer = visitor.page.evaluate("which => axe.run({...which, resultTypes: ['violations']})", which)
            found += [
                f"{place}: {each['impact']} {each['id']}: {each['help']}: {each['nodes'][0]['html'][:200]}"
                for each in answer["violations"]
            ]
        visitor.wrong[:] = [each for each in visitor.wrong if "/nothing-here" not in each]
    assert found == []


def test_no_page_is_wider_than_a_phone(browser: Browser, running: Running) -> None:
    phone: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    with visiting(browser, running.dashboard, **phone) as visitor:
        for place in places(running):
            visitor.page.goto(place)
            visitor.page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            assert visitor.page.evaluate("document.documentElement.scrollWidth") == 360, place
        visitor.wrong[:] = [each for each in visitor.wrong if "/nothing-here" not in each]


@pytest.mark.parametrize("place", ["/", "/published", "/site", "/post?slug=todo"])
def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(visitor: Visitor, place: str) -> None:
    page = visitor.page
    page.goto(place)
    for box in page.locator("details").all():
        box.evaluate("each => { each.open = true }")
    wanted = page.evaluate(f"() => ({CHANCES})().map({NAME})")

    reached: list[dict[str, Any]] = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(400):
        page.keyboard.press("Tab")
        here = page.evaluate(HERE)
        if here is None or (reached and here["name"] == reached[0]["name"]):
            break
        reached.append(here)
    assert [each["name"] for each in reached] == wanted
    assert [each["name"] for each in reached if not each["ring"]] == []
    assert [each["name"] for each in reached if not each["seen"]] == []


def test_the_first_key_skips_to_the_content(visitor: Visitor) -> None:
    page = visitor.page
    page.goto("/scheduled")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")


@pytest.mark.parametrize("which", ["summary", "link", "question"])
def test_the_keyboards_place_outlasts_the_news(running: Running, visitor: Visitor, which: str) -> None:
    page = visitor.page
    page.goto("/scheduled")
    follows(page)
    entry = page.get_by_role("listitem").filter(has=page.get_by_role("link", name="held-07", exact=True))
    place = {
        "summary": entry.locator("summary").last,
        "link": entry.get_by_role("link"),
        "question": entry.locator("summary").first,
    }[which]
    place.focus()
    old = place.element_handle()
    assert old is not None

    running.save(f"news-for-{which}")

    page.wait_for_function("each => !each.isConnected", arg=old)
    expect(place).to_be_focused()

"""The pictures of README and docs, taken of a real site: BRITER_SCREENSHOTS=1 keeps them in docs/images."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from browsers import Running, follows, open_site, picture, visiting
from playwright.sync_api import expect
from sites import Site, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser

LINKS = {
    "BRITER_COMMIT_HREF_TEMPLATE": "https://example.org/commit/{commit}",
    "BRITER_PUBLISHED_HREF_TEMPLATE": "https://example.org/{slug}",
}
PUBLISHED = {
    "opening-hours-at-easter": "Correct the opening hours",
    "market-day-in-june": "Announce the market day",
    "new-benches-for-the-park": "Thank the donors of the benches",
    "minutes-of-the-council": "Publish the minutes of November",
}
HELD = {"advent-calendar": 12, "christmas-market": 36, "skating-rink-opens": 41, "new-year-greetings": 1000}


class HarbourNews(Site):
    """A site with a name for a picture."""

    @property
    def worktree(self) -> Path:
        return self.root / "harbour-news"


def fill(running: Running) -> None:
    """What an editor's week leaves."""
    for slug, message in PUBLISHED.items():
        running.save(slug, message=message)
    running.save("the-old-lighthouse", "TODO: who built it?", message="Tell of the old lighthouse")
    running.site.save("summer-concerts", ["drafts/summer-concerts.md"], message="Announce the concerts")
    running.site.run_once()
    for slug, hours in HELD.items():
        due = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=hours)
        running.save(slug, scheduledFor=due.isoformat())
    eventually(lambda: running.dashboard.json("/api/status")["jobs"]["failed"] == 2)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    site = HarbourNews.make(tmp_path_factory.mktemp("site"))
    with open_site(HarbourNews(site.root, LINKS), before=fill) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "place", "options"),
    [
        ("dashboard-light.png", "/", {}),
        ("dashboard-dark.png", "/", {"color_scheme": "dark"}),
        ("failed.png", "/failed", {"viewport": {"width": 1100, "height": 640}}),
        ("phone.png", "/", {"viewport": {"width": 360, "height": 740}, "is_mobile": True}),
    ],
)
def test_the_docs_show_the_dashboard_as_it_is(
    browser: Browser, running: Running, tmp_path: Path, name: str, place: str, options: dict[str, Any]
) -> None:
    slug = f"a-walk-along-the-harbour-{name[:-4]}" if place == "/" else ""
    with visiting(browser, running.dashboard, reduced_motion="reduce", **options) as visitor:
        page = visitor.page
        page.goto(place)
        follows(page)
        expect(page.get_by_role("link", name="Tell of the old lighthouse")).to_be_visible()
        with running.closed_gate():
            if slug:
                running.save("a-walk-along-the-harbour", slug, message="Describe the new path")
                expect(page.locator(".phase")).to_contain_text("pushing to the remote")
            file = picture(page, name, tmp_path)
        if slug:
            expect(page.locator(".progress")).to_have_count(0)
    size = file.stat().st_size
    assert 10_000 < size < 120_000

"""Take the pictures of README and docs: PYTHONPATH=tests python scripts/screenshots.py."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browsers import Running, chromium, follows, open_site, visiting
from playwright.sync_api import expect
from sites import Site, eventually

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LINKS = {
    "BRITER_COMMIT_HREF_TEMPLATE": "https://example.org/commit/{commit}",
    "BRITER_PUBLISHED_HREF_TEMPLATE": "https://example.org/{slug}",
}
PICTURES = Path(__file__).parents[1] / "docs" / "images"
PUBLISHED = {
    "opening-hours-at-easter": "Correct the opening hours",
    "market-day-in-june": "Announce the market day",
    "new-benches-for-the-park": "Thank the donors of the benches",
    "minutes-of-the-council": "Publish the minutes of November",
}
REFUSED = ("the-old-lighthouse", "summer-concerts")
HELD = {"advent-calendar": 12, "christmas-market": 36, "skating-rink-opens": 41, "new-year-greetings": 1000}


class HarbourNews(Site):
    """A site with a name for a picture."""

    @property
    def worktree(self) -> Path:
        """Return the site's repository."""
        return self.root / "harbour-news"


def fill(running: Running) -> None:
    """What an editor's week leaves."""
    for slug, message in PUBLISHED.items():
        running.save(slug, message=message)
    running.save(REFUSED[0], "TODO: who built it?", message="Tell of the old lighthouse")
    running.site.save(REFUSED[1], ["drafts/summer-concerts.md"], message="Announce the concerts")
    running.site.run_once()
    for slug, hours in HELD.items():
        due = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=hours)
        running.save(slug, scheduledFor=due.isoformat())
    eventually(lambda: running.dashboard.json("/api/status")["jobs"]["failed"] == len(REFUSED))


VIEWS: list[tuple[str, str, dict[str, Any]]] = [
    ("dashboard-light.png", "/", {}),
    ("dashboard-dark.png", "/", {"color_scheme": "dark"}),
    ("failed.png", "/failed", {"viewport": {"width": 1100, "height": 640}}),
    ("phone.png", "/", {"viewport": {"width": 360, "height": 740}, "is_mobile": True}),
]


def take(browser: Browser, running: Running, name: str, place: str, options: dict[str, Any]) -> None:
    """Take one picture; those of the overview show a post that is being published."""
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
            # Playwright stops animations by a style that the page's policy refuses.
            page.screenshot(path=PICTURES / name, animations="allow", caret="initial")
        if slug:
            expect(page.locator(".progress")).to_have_count(0)


def main() -> None:
    """Take them all."""
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        site = HarbourNews.make(Path(folder))
        with open_site(HarbourNews(site.root, LINKS), before=fill) as running:
            for name, place, options in VIEWS:
                take(browser, running, name, place, options)


if __name__ == "__main__":
    main()

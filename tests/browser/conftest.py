"""One browser and one site with its worker and dashboard for a file of tests: each has posts of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from browsers import Running, Visitor, chromium, open_site, visiting
from sites import Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

LINKS = {
    "BRITER_COMMIT_HREF_TEMPLATE": "https://example.org/commit/{commit}",
    "BRITER_PUBLISHED_HREF_TEMPLATE": "https://example.org/{slug}",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A site with a worker and a dashboard."""
    root = tmp_path_factory.mktemp("site")
    with open_site(Site(Site.make(root).root, LINKS)) as opened:
        yield opened


@pytest.fixture
def visitor(browser: Browser, running: Running) -> Iterator[Visitor]:
    """An editor with JavaScript."""
    with visiting(browser, running.dashboard) as person:
        yield person

"""A real browser for tests: Debian's Chromium, without a screen, on a dashboard that really serves."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dashboards import Dashboard, serving
from playwright.sync_api import expect, sync_playwright
from requirements import provide

from briter_worker.web.security import COOKIE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page
    from sites import Site

# Only loopback is spoken to; the rest are what Chromium would ask the world for.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 45_000
"""Milliseconds that a page may take: longer than any busy machine needs."""
PAGES = ("/", "/waiting", "/scheduled", "/failed", "/published", "/site")
HOOK = """while [ -e gate ]; do sleep 0.05; done
while read -r old new ref; do
  if git grep -q TODO "$new" -- content; then
    echo "A post still says TODO. Write that passage first."
    exit 1
  fi
  if git grep -q HOSTILE "$new" -- content; then
    echo "<script>alert(1)</script><img src=x onerror=alert(1)> no"
    exit 1
  fi
done
"""
"""Rejects a post that says TODO, with the reason; for HOSTILE, the reason contains markup. Waits while the
file `gate` exists."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium. Skips where there is none; fails in CI."""
    provide("chromium", package="chromium")
    expect.set_options(timeout=PATIENCE)
    program = shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visitor:
    """A person at a page; `wrong` has the complaints of the browser, and the dialogs."""

    page: Page
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def on_console(message: ConsoleMessage) -> None:
            if message.type in {"error", "warning"}:
                self.wrong.append(f"console: {message.text} {message.location.get('url', '')}")

        def on_dialog(dialog: Dialog) -> None:
            self.wrong.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        self.page.on("console", on_console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", on_dialog)


@contextmanager
def visiting(
    browser: Browser,
    dashboard: Dashboard,
    **options: Any,  # noqa: ANN401 - of a context
) -> Iterator[Visitor]:
    """Open a browser's context, with a session; fail if the browser complained by the end."""
    options = {"viewport": {"width": 1100, "height": 780}, "color_scheme": "light", **options}
    context = browser.new_context(base_url=dashboard.base, **options)
    context.set_default_timeout(PATIENCE)
    value = dashboard.page.cookies[COOKIE]
    context.add_cookies([{"name": COOKIE, "value": value, "url": dashboard.base, "sameSite": "Lax"}])
    try:
        visitor = Visitor(context.new_page())
        yield visitor
        assert not visitor.wrong, "\n".join(visitor.wrong)
    finally:
        context.close()


@dataclass(frozen=True)
class Running:
    """A site, its worker and its dashboard."""

    site: Site
    dashboard: Dashboard

    @property
    def base(self) -> str:
        return self.dashboard.base

    def save(self, slug: str, text: str = "", **keys: object) -> str:
        """Write a post and its job, as the CMS does; return the path."""
        path = f"content/posts/{slug}.md"
        self.site.write_post(path, f"# {slug}\n\n{text}\n")
        self.site.save(slug, [path], **keys)
        return path

    @contextmanager
    def closed_gate(self) -> Iterator[None]:
        """Make the remote wait."""
        gate = self.site.remote / "gate"
        gate.touch()
        try:
            yield
        finally:
            gate.unlink()

    def knows(self, slug: str) -> bool:
        """Return True if the dashboard shows the post."""
        return self.dashboard.page.get("/post", params={"slug": slug}).status_code == 200


@contextmanager
def open_site(site: Site, *, before: Callable[[Running], None] | None = None) -> Iterator[Running]:
    """Run a dashboard and a worker for the site; call `before` before the worker starts."""
    site.hook(HOOK)
    with serving(site) as dashboard:
        running = Running(site, dashboard)
        if before is not None:
            before(running)
        with site.running_to(site.root / "worker.log"):
            yield running


def follows(page: Page) -> None:
    """Wait until the page follows the live stream."""
    expect(page.locator("#live-state")).to_be_visible()
    expect(page.locator("#live-word")).to_have_text("connected")

"""A real dashboard for tests: `briter-worker serve` as a process of its own, and readers of its stream."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from sites import Site

TOKEN = "a-token-of-more-than-sixteen-letters"  # noqa: S105 - for tests


@dataclass(frozen=True)
class Dashboard:
    """A dashboard that is running."""

    base: str
    process: subprocess.Popen[str]
    page: httpx.Client
    """Requests pages as a browser, with a session."""
    api: httpx.Client
    """Sends the token as Bearer."""
    link: str = ""
    """The one-time link, where the token was not configured."""

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def csrf(self, path: str = "/site") -> str:
        return csrf_token(self.page, path)

    def act(self, action: str, **fields: str) -> httpx.Response:
        """Send the form of a page; do not follow the redirect."""
        return self.page.post(f"/actions/{action}", data={"csrf": self.csrf(), "back": "/", **fields})

    def json(self, path: str, **query: str | int) -> Any:  # noqa: ANN401 - any JSON
        answer = self.api.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def visitor(self) -> httpx.Client:
        """Return a browser without a session."""
        return httpx.Client(base_url=self.base, headers={"Accept": "text/html"}, timeout=30)


@contextmanager
def serving(site: Site, *arguments: str, token: str = TOKEN, **env: str) -> Iterator[Dashboard]:
    """Serve the dashboard of a site at a free port. Without a token, `serve` makes one and prints a link."""
    env = {"BRITER_DASHBOARD_PORT": "0", **({"BRITER_DASHBOARD_TOKEN": token} if token else {}), **env}
    with site.running("serve", *arguments, **env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, process.communicate(timeout=20)
        base = line.split()[-1]
        link = "" if token else process.stdout.readline().split()[-1]
        with (
            httpx.Client(base_url=base, headers={"Accept": "text/html"}, timeout=30) as page,
            httpx.Client(base_url=base, timeout=30) as api,
        ):
            dashboard = Dashboard(base, process, page, api, link)
            if token:
                api.headers["Authorization"] = f"Bearer {token}"
                assert sign_in(page, token).status_code == 303
            yield dashboard


def csrf_token(page: httpx.Client, path: str) -> str:
    """Return the token of a page's forms."""
    (found, *_) = re.findall(r'name="csrf" value="([0-9a-f]+)"', page.get(path).text)
    return str(found)


def sign_in(page: httpx.Client, token: str, target: str = "/failed") -> httpx.Response:
    data = {"csrf": csrf_token(page, "/sign-in"), "token": token, "next": target}
    return page.post("/sign-in", data=data)


def events(response: httpx.Response) -> Iterator[tuple[str, int | None, Any]]:
    """Yield (name, id, data) of each event of a stream."""
    name, number, data = "", None, ""
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "id":
            number = int(value)
        elif key == "data":
            data = value
        elif not line and data:
            yield name, number, json.loads(data)
            name, number, data = "", None, ""

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
_CSRF = re.compile(r'name="csrf" value="([0-9a-f]+)"')


@dataclass(frozen=True)
class Dashboard:
    """One that is running."""

    base: str
    process: subprocess.Popen[str]
    page: httpx.Client
    """As a browser asks."""
    api: httpx.Client
    """As a program asks; with the CSRF token, or with Bearer where the dashboard has a token."""

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def csrf(self, path: str = "/") -> str:
        """What the page's forms carry."""
        found = _CSRF.search(self.page.get(path).text)
        assert found, path
        return found[1]

    def act(self, action: str, **fields: str) -> httpx.Response:
        """Send the form of a page, and do not follow."""
        data = {"csrf": self.csrf("/site"), "back": "/", **fields}
        return self.page.post(f"/actions/{action}", data=data)

    def json(self, path: str, **query: str | int) -> Any:  # noqa: ANN401 - any JSON
        """What the API says."""
        answer = self.api.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serving(site: Site, *arguments: str, token: str = "", **env: str) -> Iterator[Dashboard]:
    """The dashboard of a site, at a port of its own."""
    env = {"BRITER_DASHBOARD_PORT": "0", **({"BRITER_DASHBOARD_TOKEN": token} if token else {}), **env}
    with site.running("serve", *arguments, **env) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, process.communicate(timeout=20)
        base = line.split()[-1]
        with (
            httpx.Client(base_url=base, headers={"Accept": "text/html"}, timeout=30) as page,
            httpx.Client(base_url=base, timeout=30) as api,
        ):
            if token:
                api.headers["Authorization"] = f"Bearer {token}"
            else:
                api.headers["X-CSRF-Token"] = api.get("/api/csrf").json()["token"]
            yield Dashboard(base, process, page, api)


def sign_in(dashboard: Dashboard, token: str) -> httpx.Response:
    """As a person does, with a token."""
    csrf = dashboard.csrf("/sign-in")
    return dashboard.page.post("/sign-in", data={"csrf": csrf, "token": token, "next": "/failed"})


def events(response: httpx.Response) -> Iterator[tuple[str, int | None, Any]]:
    """(name, id, data) of each event of a stream, as they come."""
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

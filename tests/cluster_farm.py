"""A cluster with everything real: sites with remotes, and hosts that are worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forks
from postgres import count_rows
from sites import Result, Site, eventually

from briter_worker.cluster import sites
from briter_worker.cluster.submit import enqueue
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

AHEAD = {"PYTHONPATH": str(Path(__file__).with_name("skew")), "SKEW_S": "7200"}
"""The surroundings of a process whose clock is two hours ahead."""


@dataclass
class Farm:
    """Sites and their remotes below one folder, and the database they share."""

    root: Path
    database: Database
    url: str
    hosts: list[Running] = field(default_factory=list)

    def settings(self, **extra: str) -> Settings:
        return load_settings(self.environment("settings", **extra))

    def environment(self, host: str, **extra: str) -> dict[str, str]:
        """What a worker of this host finds."""
        folder = self.root / "hosts" / host
        folder.mkdir(parents=True, exist_ok=True)
        return {
            "BRITER_APP_ROOT": str(folder),
            "BRITER_DATABASE_URL": self.url,
            "BRITER_WORKER_DRY_RUN": "false",
            "BRITER_WORKER_POLL_INTERVAL_MS": "500",
            "BRITER_WORKER_BACKOFF_MS": "200",
        } | extra

    def add(self, *names: str, **settings: object) -> None:
        """Sites, each with a remote of its own that has a post."""
        for name in names:
            Site.make(self.root / "sites" / name)
            site = sites.Site(name, str(self.remote(name)), "main", "local-mdx", settings=settings)
            sites.add(self.database, site, self.settings())

    def site(self, name: str) -> Site:
        """Return the site's remote, with a clone in which a person works."""
        return Site(self.root / "sites" / name)

    def remote(self, name: str) -> Path:
        return self.site(name).remote

    def save(self, name: str, slug: str, text: str | None = None, **extra: Any) -> None:  # noqa: ANN401 - enqueue's
        content = (f"# {slug}\n" if text is None else text).encode()
        enqueue(
            slug,
            files={f"content/{slug}.md": content},
            site=name,
            settings=self.settings(),
            message=slug,
            **extra,
        )

    def published(self, name: str) -> Counter[str]:
        """The worker's commits on the remote, by their messages."""
        log = self.site(name).git(
            "log", "--committer=Briter Worker", "--format=%s", "main", cwd=self.remote(name)
        )
        return Counter(log.splitlines())

    def rows(self) -> int:
        """Publications that are in the database still."""
        return count_rows(self.database, "publications")

    def once(self, host: str = "one", **extra: str) -> Result:
        """`run --once` on this host, where all goes well."""
        done = self.command("run", "--once", host=host, **extra)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def fail_once(self, host: str = "one", **extra: str) -> Result:
        """`run --once` on this host, where something fails."""
        done = self.command("run", "--once", host=host, **extra)
        assert done.returncode == 1, done.stdout + done.stderr
        return done

    def command(self, *arguments: str, host: str = "one", **extra: str) -> Result:
        done = forks.run(arguments, os.environ | self.environment(host, **extra), self.root, timeout=120)
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, host: str, *arguments: str, **extra: str) -> Running:
        """A host that runs until it is told to stop."""
        running = Running(self, host, arguments, extra)
        self.hosts.append(running)
        return running

    def end(self) -> None:
        for host in self.hosts:
            host.end()


class Running:
    """A worker process."""

    def __init__(self, farm: Farm, host: str, arguments: tuple[str, ...], extra: dict[str, str]) -> None:
        self._output = farm.root / f"{host}.{len(farm.hosts)}.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "briter_worker", "run", *arguments],
                env=os.environ | farm.environment(host, **extra),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        eventually(lambda: "worker-started" in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self._output.read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

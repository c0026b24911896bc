"""The CMS of one site of a cluster: it stores posts in the database, whether that is there or not."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import Allowlist
from briter_worker.client import compose
from briter_worker.cluster.submit import send
from briter_worker.errors import UnavailableError
from briter_worker.git.payloads import gather
from briter_worker.job import parse_time
from briter_worker.queues.postgres.payloads import PayloadSource, submit
from briter_worker.wiring import open_database
from soak.cms import AUTHOR, FILLER, FLEETING, TITLED, post_path
from soak.ledger import Ledger, Save

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from briter_worker.settings import Settings

_LOGO = bytes(range(256)) * 64
"""A picture that many posts of many sites have."""


class ClusterCms:
    """One site's CMS. Its copies of the posts never see what a colleague pushes."""

    def __init__(self, settings: Settings, root: Path, dice: random.Random, figures: Counter[str]) -> None:
        self.name = settings.site
        self.ledger = Ledger()
        self.settings = settings
        self._root = root
        self._dice = dice
        self._figures = figures
        self._count = 0

    def save(self, *, given_up: Callable[[], bool]) -> None:
        """Save any post, in one of three ways."""
        self._count += 1
        marker = f"m{self._count}"
        slug = self._dice.choice([*TITLED, *TITLED, *FLEETING, "new", "new"])
        slug = f"new-{marker}" if slug == "new" else slug
        held = time.time() + self._dice.uniform(1, 12) if self._dice.random() < 0.12 else 0.0
        files = self._files(slug, marker, held=bool(held))
        author = AUTHOR if self._dice.random() < 0.3 else None
        save = Save(marker, slug, tuple(files), files, f"{marker}: save {slug}", author, held)
        at = datetime.fromtimestamp(held, UTC) if held else None
        document = compose(slug, save.paths, message=save.message, at=at, author=author)
        way = self._dice.choices([self._by_values, self._by_folder, self._without_waking], [70, 20, 10])[0]
        if self._insist(lambda: way(document, files), given_up):
            self.ledger.saves.append(save)
            self._figures["saves"] += 1

    def _files(self, slug: str, marker: str, *, held: bool) -> dict[str, bytes | None]:
        path = post_path(slug)
        if slug in FLEETING and self._dice.random() < 0.3:
            self._figures["deletions"] += 1
            return {path: None}
        lines = ["title: -", *FILLER, f"body: {slug} {marker}"]
        files: dict[str, bytes | None] = {path: ("\n".join(lines) + "\n").encode()}
        luck = self._dice.random()
        if not held and luck < 0.1:
            files[f"content/posts/{slug}.png"] = _LOGO
        elif not held and luck < 0.12:
            files[f"content/posts/{slug}.bin"] = self._dice.randbytes(1_300_000) + f"\n{marker}".encode()
        return files

    def _insist(self, ask: Callable[[], object], given_up: Callable[[], bool]) -> bool:
        """Ask until there is an answer. A request without an answer may have been carried out."""
        while not given_up():
            try:
                ask()
            except UnavailableError:
                self._figures["saves asked for again"] += 1
                time.sleep(0.2)
            else:
                return True
        return False

    def _by_values(self, document: dict[str, Any], files: Mapping[str, bytes | None]) -> None:
        send(self.settings, document, files=files)

    def _by_folder(self, document: dict[str, Any], files: Mapping[str, bytes | None]) -> None:
        self._write(files)
        send(self.settings, document, root=self._root)

    def _without_waking(self, document: dict[str, Any], files: Mapping[str, bytes | None]) -> None:
        """Die, as it were, between the commit and the waking of a node: the sweep has to find the job."""
        self._write(files)
        found = gather(
            self._root,
            document["paths"],
            allowlist=Allowlist(self.settings.folders),
            max_bytes=self.settings.worker_max_file_bytes,
            saved_at=parse_time(document["createdAt"]),
        )
        with open_database(self.settings).transaction() as connection:
            submit(
                connection, self.name, document, PayloadSource(found.payload, found.content), now=time.time()
            )

    def _write(self, files: Mapping[str, bytes | None]) -> None:
        for path, content in files.items():
            file = self._root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content)

"""Who is around a cluster: for each site a CMS that saves, and a colleague who pushes to the remote, too."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from briter_worker.allowlist import Allowlist
from briter_worker.client import compose
from briter_worker.cluster.asking import send
from briter_worker.errors import AwayError
from briter_worker.gathering import gather
from briter_worker.job import parse_time
from briter_worker.queues.postgres.writing import submit
from briter_worker.wiring import open_database
from soak.cms import AUTHOR, post_path
from soak.ledger import Ledger, Save
from soak.persons import Git

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from briter_worker.settings import Settings

TITLED = [f"titled{number}" for number in range(4)]
"""Posts whose first line a colleague changes, and whose last line the CMS does: these merge."""
FLEETING = [f"fleeting{number}" for number in range(2)]
"""Posts that are deleted and written again."""
_LOGO = bytes(range(256)) * 64
"""A picture that many posts of many sites have."""
_FILLER = [f"line {number}" for number in range(8)]


class Cms:
    """One site's CMS. Writes posts to the database, whether that is there or not."""

    def __init__(self, settings: Settings, root: Path, dice: random.Random, figures: Counter[str]) -> None:
        self.name = settings.site
        self.ledger = Ledger()
        self.settings = settings
        self._root = root
        self._dice = dice
        self._figures = figures
        self._count = 0

    def save(self, *, given_up: Callable[[], bool]) -> None:
        """One save, of any post."""
        self._count += 1
        marker = f"m{self._count}"
        slug = self._dice.choice([*TITLED, *TITLED, *FLEETING, *FLEETING, "new", "new"])
        slug = f"new-{marker}" if slug == "new" else slug
        held = time.time() + self._dice.uniform(1, 12) if self._dice.random() < 0.12 else 0.0
        files = self._files(slug, marker, held=bool(held))
        author = AUTHOR if self._dice.random() < 0.3 else None
        save = Save(marker, slug, tuple(files), files, f"{marker}: save {slug}", author, held)
        at = datetime.fromtimestamp(held, UTC) if held else None
        document = compose(slug, save.paths, message=save.message, at=at, author=author)
        way = self._dice.choices([self._by_values, self._by_folder, self._without_word], [70, 20, 10])[0]
        if self._insist(lambda: way(document, files), given_up):
            self.ledger.saves.append(save)
            self._figures["saves"] += 1

    def _files(self, slug: str, marker: str, *, held: bool) -> dict[str, bytes | None]:
        path = post_path(slug)
        if slug in FLEETING and self._dice.random() < 0.3:
            self._figures["deletions"] += 1
            return {path: None}
        lines = ["title: -", *_FILLER, f"body: {slug} {marker}"]
        files: dict[str, bytes | None] = {path: ("\n".join(lines) + "\n").encode()}
        luck = self._dice.random()
        if not held and luck < 0.1:
            files[f"content/posts/{slug}.png"] = _LOGO
        elif not held and luck < 0.12:
            files[f"content/posts/{slug}.bin"] = self._dice.randbytes(1_300_000) + f"\n{marker}".encode()
        return files

    def _insist(self, ask: Callable[[], object], given_up: Callable[[], bool]) -> bool:
        """Until it is answered: nobody knows of a question without an answer whether it was heard."""
        while not given_up():
            try:
                ask()
            except AwayError:
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

    def _without_word(self, document: dict[str, Any], files: Mapping[str, bytes | None]) -> None:
        """As one that dies between its commit and the word: the sweep has to find it."""
        self._write(files)
        source = gather(
            self._root,
            document["paths"],
            allowlist=Allowlist(self.settings.folders),
            max_bytes=self.settings.worker_max_file_bytes,
            saved_at=parse_time(document["createdAt"]),
        )
        submit(open_database(self.settings), self.name, document, source)

    def _write(self, files: Mapping[str, bytes | None]) -> None:
        for path, content in files.items():
            file = self._root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                file.unlink(missing_ok=True)
            else:
                file.write_bytes(content)


class Colleague:
    """Has a clone of one site, and pushes to the same branch."""

    def __init__(self, remote: Path, clone: Path, ledger: Ledger, dice: random.Random) -> None:
        self._remote = remote
        self._git = Git(clone)
        self._ledger = ledger
        self._dice = dice
        self._count = 0

    def push(self) -> bool:
        """One push, if nobody else is quicker."""
        if not self._git.folder.exists():
            self._git.folder.parent.mkdir(parents=True, exist_ok=True)
            Git(self._git.folder.parent)("clone", "--quiet", str(self._remote), str(self._git.folder))
        if self._git("fetch", "--quiet") is None:
            return False
        self._git("reset", "--quiet", "--hard", "origin/main")
        self._count += 1
        there = [slug for slug in TITLED if (self._git.folder / post_path(slug)).exists()]
        slug = self._dice.choice([*there, *there, ""])
        path = post_path(slug) if slug else f"content/colleague/{self._count}.md"
        file = self._git.folder / path
        line = f"title: {self._count}"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if slug else [line]
        lines[0] = line
        file.write_text("\n".join(lines) + "\n")
        message = f"colleague {self._count}"
        self._git("add", path)
        if self._git("commit", "--quiet", f"--message={message}") is None:
            return False
        self._ledger.persons[message] = frozenset({path})
        pushed = self._git("push", "--quiet", "origin", "HEAD:main") is not None
        if pushed:
            self._ledger.committed.add(message)
            if slug:
                self._ledger.titles[path] = line
        return pushed

    def leave(self) -> None:
        """The clone is not needed any more."""
        with suppress(OSError):
            shutil.rmtree(self._git.folder)

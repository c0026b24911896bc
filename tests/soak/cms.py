"""A CMS that saves: posts, folders, deletions, posts on hold; in safe ways and in plain ones."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from soak.ledger import Save
from soak.users import FILLER, post_path

if TYPE_CHECKING:
    import random

    from sites import Site

    from soak.ledger import Ledger

AUTHOR = "An Author <author@example.org>"
TITLED = [f"titled{number}" for number in range(4)]
"""Posts whose first line another clone changes, and whose last line the CMS does: these merge."""
CONTESTED = "contested"
"""A post of which both change the same line."""
FLEETING = [f"fleeting{number}" for number in range(4)]
"""Posts that are deleted and written again."""
BUNDLES = [f"bundle{number}" for number in range(2)]
"""Folders, declared as such."""


class Cms:
    """Writes posts and jobs, and looks at nothing else. With `is_watched` it writes no jobs."""

    def __init__(self, site: Site, ledger: Ledger, dice: random.Random, *, is_watched: bool = False) -> None:
        self._is_watched = is_watched
        self._site = site
        self._ledger = ledger
        self._dice = dice
        self._count = 0

    def act(self, _: random.Random) -> None:
        """One save."""
        bundles = [] if self._is_watched else BUNDLES
        self.save(self._dice.choice([*TITLED, *TITLED, CONTESTED, *FLEETING, *bundles, "new", "new"]))
        time.sleep(self._dice.choice([0, 0.02, 0.1, 0.4]))

    def save(self, slug: str) -> None:
        """A save of this post; `new` is a post that has not been there."""
        self._count += 1
        marker = f"m{self._count}"
        slug = f"new-{marker}" if slug == "new" else slug
        held = time.time() + self._dice.uniform(0.5, 2) if self._dice.random() < 0.15 else 0.0
        if slug in BUNDLES:
            paths, files = self._bundle(slug, marker)
        else:
            path = post_path(slug)
            paths = (path,)
            deleted = slug in FLEETING and self._dice.random() < 0.3
            files = {path: None if deleted else self._text(slug, marker)}
        if self._is_watched:
            slug = f"posts/{slug}"
            save = Save(marker, slug, paths, files, f"Publish {slug}")
            self._write_files(save)
            self._ledger.saves.append(save)
            return
        author = AUTHOR if self._dice.random() < 0.3 else None
        save = Save(marker, slug, paths, files, f"{marker}: save {slug}", author, held)
        # A post on hold is not written before its job says so: a folder's job would carry it.
        order = [self._write_job, self._write_files] if held else [self._write_files, self._write_job]
        for step in order:
            step(save)

    def _text(self, slug: str, marker: str) -> bytes:
        file = self._site.worktree / post_path(slug)
        try:
            lines = file.read_text().splitlines()
        except FileNotFoundError:
            lines = ["title: -", *FILLER, "body: -"]
        lines[-1] = f"body: {slug} {marker}"
        return ("\n".join(lines) + "\n").encode()

    def _bundle(self, slug: str, marker: str) -> tuple[tuple[str, ...], dict[str, bytes | None]]:
        folder = f"content/bundles/{slug}"
        files: dict[str, bytes | None] = {
            f"{folder}/{self._dice.choice('abcde')}.md": f"{slug} {marker} {number}\n".encode()
            for number in range(self._dice.randint(1, 3))
        }
        gone = f"{folder}/{self._dice.choice('abcde')}.md"
        if gone not in files and (self._site.worktree / gone).exists():
            files[gone] = None
        return (folder,), files

    def _write_files(self, save: Save) -> None:
        for path, data in save.files.items():
            file = self._site.worktree / path
            if data is None:
                file.unlink(missing_ok=True)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            if self._dice.random() < 0.5:
                partial = self._site.root / "cms.partial"
                partial.write_bytes(data)
                partial.rename(file)
            else:
                file.write_bytes(data)

    def _write_job(self, save: Save) -> None:
        job: dict[str, object] = {"id": save.marker, "slug": save.slug, "paths": list(save.paths)}
        job |= {"message": save.message, "createdAt": datetime.now(UTC).isoformat()}
        if save.held_until:
            job["scheduledFor"] = datetime.fromtimestamp(save.held_until, UTC).isoformat()
        if save.author:
            name, _, mail = save.author.rstrip(">").partition(" <")
            job["author"] = {"name": name, "email": mail}
        # Some name the file after the post, and write over what is there; a folder's job has paths to lose.
        again = save.slug in TITLED and self._dice.random() < 0.5
        waiting = self._site.queue / f"{save.slug if again else save.marker}.json"
        text = json.dumps(job)
        if self._dice.random() < 0.7:
            partial = waiting.with_suffix(".partial")
            partial.write_text(text)
            partial.rename(waiting)
        else:
            with waiting.open("w") as file:
                file.write(text[: len(text) // 2])
                file.flush()
                time.sleep(self._dice.uniform(0, 0.02))
                file.write(text[len(text) // 2 :])
        self._ledger.saves.append(save)

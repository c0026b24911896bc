"""Puts what jobs brought along into a site's folder, where the CMS has not changed it since."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist, PathRefusedError
from briter_worker.gathering import GatheringError, blob_at, committed
from briter_worker.git.folders import Folders, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from briter_worker.ports import Delivered, Deliveries


class Unpacker:
    """Writes delivered files below one folder, oldest save first. Close it after."""

    def __init__(self, root: Path, allowlist: Allowlist, deliveries: Deliveries) -> None:
        self._root = root
        self._allowlist = allowlist
        self._deliveries = deliveries
        self._folders = Folders(root)
        self._ours: dict[str, set[str]] = {}
        """For each path, the versions that were written here."""
        # Not where a job's folder could carry it, should we die here.
        git_dir = root / ".git"
        self._aside = git_dir if git_dir.is_dir() else root

    def close(self) -> None:
        """Let go of the folder."""
        self._folders.close()

    def unpack(self, delivered: Iterable[Delivered]) -> dict[str, str]:
        """These are there as they were saved; what is not, by its path, with the reason."""
        wanted = sorted(delivered, key=lambda each: each.saved_at)
        known = committed(self._root, [each.path for each in wanted]) if wanted else {}
        kept: dict[str, str] = {}
        for each in wanted:
            try:
                path = self._allowlist.resolve(each.path)
                kept.pop(path, None)
                if not self._put(path, each, known.get(path)):
                    kept[path] = "it was changed here since; what is here is what will be published"
            except (PathRefusedError, Refused) as refused:
                kept[each.path] = refused.reason
            except GatheringError as refused:
                kept[each.path] = str(refused)
        return kept

    def _put(self, path: str, each: Delivered, committed_as: str | None) -> bool:
        """Whether it is there now, as it was saved."""
        here = blob_at(self._root, path)
        if here == each.blob:
            self._ours.setdefault(path, set()).update([here] if here else [])
            return True
        expected = {committed_as, *self._ours.get(path, ())}
        if each.knows_base:
            expected.add(each.base)
        if here is not None and here not in expected:
            return False
        parent, _, name = path.rpartition("/")
        if each.blob is None:
            os.unlink(name, dir_fd=self._folders.open(parent))
            return True
        self._write(parent, name, each)
        self._ours.setdefault(path, set()).add(each.blob)
        return True

    def _write(self, parent: str, name: str, each: Delivered) -> None:
        handle, temporary = tempfile.mkstemp(prefix=".briter-", dir=self._aside)
        try:
            with os.fdopen(handle, "wb") as made:
                for part in self._deliveries.content(str(each.blob)):
                    made.write(part)
                os.fchmod(made.fileno(), 0o755 if each.mode == "100755" else 0o644)
                made.flush()
                os.fsync(made.fileno())
            folder = self._folders.make(parent)
            if os.geteuid() == 0:  # the CMS has to be able to edit it
                like = os.fstat(folder)
                os.chown(temporary, like.st_uid, like.st_gid)
            os.replace(temporary, name, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                Path(temporary).unlink()

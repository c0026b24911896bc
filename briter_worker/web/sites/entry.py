"""How jobs that come over HTTP get into a site's rows, with their files: the same request twice is one job.

The key is written down in the transaction that writes the job. So of two requests with one key, also at once
and at different hosts, one writes both and the other finds them.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from briter_worker.cluster import asking, waking
from briter_worker.strictjson import MalformedJobError, UnreadableJobError
from briter_worker.web.idempotency import OtherBodyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from briter_worker.queues.postgres.database import Connection, Database
    from briter_worker.settings import Settings


class _KnownError(Exception):
    """The key has been used before."""

    def __init__(self, body: str, job_id: str) -> None:
        super().__init__(body)
        self.body = body
        self.job_id = job_id


class RowEntry:
    """Implements `Entry` for one site."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._database = database

    def submit(
        self,
        key: str | None,
        body: dict[str, Any],
        compose: Callable[[], dict[str, Any]],
        files: Mapping[str, bytes | None] | None,
    ) -> tuple[str, bool]:
        """See `Entry`."""
        document = compose()
        contents = {
            path: content and hashlib.sha256(content).hexdigest() for path, content in (files or {}).items()
        }
        print_of_body = _digest(json.dumps([body, contents], sort_keys=True))

        def claim(connection: Connection) -> None:
            if key is not None:
                _claim(connection, (self._settings.site, _digest(key), print_of_body, document["id"]))

        try:
            sent = asking.send(self._settings, document, files=files or {}, first=claim)
        except _KnownError as known:
            if known.body != print_of_body:
                raise OtherBodyError from None
            return known.job_id, True
        except (MalformedJobError, UnreadableJobError) as error:
            raise ValueError(str(error)) from None
        return sent.id, False

    def changed(self) -> None:
        """Have the site drained. Should that fail, the hosts find it by themselves, a little later."""
        with suppress(OSError):
            waking.wake(self._database, [self._settings.site])


def _claim(connection: Connection, row: tuple[str, str, str, str]) -> None:
    """The key is this request's, once the transaction ends. Raises _KnownError."""
    made = connection.execute(
        "INSERT INTO requests (site, key, body, job_id, at) VALUES (%s, %s, %s, %s, %s)"
        " ON CONFLICT DO NOTHING RETURNING key",
        (*row, time.time()),
    ).fetchone()
    if made is None:
        known = connection.execute(
            "SELECT body, job_id FROM requests WHERE site = %s AND key = %s", row[:2]
        ).fetchone()
        if known is not None:
            raise _KnownError(*known)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

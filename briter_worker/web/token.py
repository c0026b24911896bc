"""The dashboard's token: configured, or random and kept where only the operator writes."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker import wiring
from briter_worker.errors import PublishError, UsageError, os_error_fix, os_error_text

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.settings import Settings

_MIN_LENGTH = 16


def read_token(settings: Settings) -> str:
    """Return BRITER_DASHBOARD_TOKEN, else the kept token, which is made when there is none.

    Raises UsageError when the token can be neither read nor kept, and OSError for the database.
    """
    if settings.dashboard_token:
        return settings.dashboard_token
    if settings.database_url:
        return wiring.open_database(settings).value_or_set("dashboard.token", secrets.token_urlsafe(32))
    try:
        path = wiring.open_git(settings).state_dir / "dashboard.token"
    except PublishError:
        return secrets.token_urlsafe(32)  # there is no repository: until the next start
    try:
        if not path.exists():
            _create(path)
        token = path.read_text().strip()
    except OSError as error:
        message = f"the dashboard's token cannot be kept in {path}: {os_error_text(error, with_path=False)}"
        raise UsageError(message, os_error_fix(error) or "set BRITER_DASHBOARD_TOKEN") from None
    if len(token) < _MIN_LENGTH:  # an empty token would let everybody in
        raise UsageError(f"{path} has no token", "delete the file, or set BRITER_DASHBOARD_TOKEN")
    return token


def _create(path: Path) -> None:
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{secrets.token_urlsafe(32)}\n")
    with suppress(FileExistsError):  # another dashboard has just created it
        os.link(temporary, path)
    temporary.unlink()

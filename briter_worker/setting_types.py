"""The types of the settings: what each accepts, as the message of a refused value says it."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, Json, ValidationInfo, WithJsonSchema

from briter_worker.allowlist import FOLDERS, Allowlist, compile_patterns
from briter_worker.errors import UsageError

_MONTH_MS = 31 * 24 * 60 * 60 * 1000
SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""Pattern of a site's name, which also names a folder of the clone cache."""

_NO_LINE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"
_INK = rf"[^\s{_NO_LINE}]"
_REF_PART = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?<!\.lock)"
_REF_NAME = rf"(?!refs/|HEAD$)(?=.{{1,200}}$){_REF_PART}(?:/{_REF_PART})*"
"""Stricter than `git check-ref-format`, which accepts `+main` (a forced push in a refspec)."""
_REF_TEXT = "letters, digits, and between them . _ - and /"
_ADDRESS = r"://(?:[!-~]*@)?(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:[/?][!\"$-+\--~]*)?"
_TOPIC = "(?:published|dead-lettered|condition|updated)"
_TOPICS = rf"{_TOPIC}(?:\+{_TOPIC})*"
_FILE_NAME = r"[^\0\ud800-\udc7f\udd00-\udfff]+"
"""Text that the system can open. The remaining surrogates stand for bytes that are not UTF-8."""


def absolute_path(path: Path, base: Path | None = None) -> Path:
    """Return the absolute path of one that may be relative to `base`."""
    path = ((base or Path()) / path).absolute()
    # `..` after a symlink means what the file system says; other paths stay as written.
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def _parse_folder(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str | Path) or not re.fullmatch(_FILE_NAME, str(value)):
        raise ValueError("a folder, absolute or relative to BRITER_APP_ROOT")
    return absolute_path(Path(value), info.data.get("app_root"))


def _refuse_letters(value: object) -> object:
    # pydantic also takes one letter; only an explicit false may turn the dry run off.
    if isinstance(value, str) and value.casefold() in {"t", "f", "y", "n"}:
        raise ValueError("true or false")
    return value


def _split(value: object) -> object:
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _check_folders(folders: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return Allowlist(folders).folders
    except UsageError as error:
        raise ValueError(f"a list of folders below the repository's root; {error.message}") from None


def _check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    try:
        if patterns:
            compile_patterns(patterns)
    except ValueError:
        raise ValueError("a list of patterns as in .gitignore, such as drafts/ or *.bak") from None
    return patterns


def _parse_signing_key(key: str, info: ValidationInfo) -> str:
    if not re.fullmatch(rf"[^{_NO_LINE}]*", key):
        raise ValueError("the name of a key in one line, not the key itself")
    if not key or key.startswith("key::") or info.data.get("git_signing_format") != "ssh":
        return key
    return str(absolute_path(Path(key).expanduser(), info.data.get("app_root")))


def _check_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise ValueError("a list of IP addresses or networks, such as 10.0.0.0/8") from None


def _check_address(value: str, info: ValidationInfo) -> str:
    scheme = "https?" if info.data.get("webhook_allow_private") else "https"
    if value and not re.fullmatch(scheme + _ADDRESS, value):
        schemes = scheme.replace("?", " or http")
        raise ValueError(f"an address with {schemes}, such as https://example.org/hook")
    return value


def _check_topics(address: str, info: ValidationInfo) -> str:
    url, mark, topics = address.partition("#")
    if not url or (mark and not re.fullmatch(_TOPICS, topics)):
        raise ValueError(
            "addresses, after each if wanted # and the events to send, such as published+condition"
        )
    _check_address(url, info)
    return address


def _check_longest(longest: int, info: ValidationInfo) -> int:
    if longest < info.data.get("worker_quiet_ms", 0):
        raise ValueError("a number that is not below BRITER_WORKER_QUIET_MS (workerQuietMs)")
    return longest


def _matching(pattern: str, accepted: str) -> AfterValidator:
    """Return a validator of texts that match the whole pattern."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(accepted)
        return value

    return AfterValidator(check)


def _list_schema(item: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"items": {"type": item}, "type": "array"}, {"type": "string"}]})


_Split = BeforeValidator(_split)
_Strings = _list_schema("string")
Flag = Annotated[bool, BeforeValidator(_refuse_letters)]
Folder = Annotated[Path, BeforeValidator(_parse_folder)]
Milliseconds = Annotated[int, Field(ge=0, le=_MONTH_MS)]
QuietMaximum = Annotated[Milliseconds, AfterValidator(_check_longest)]
PositiveMilliseconds = Annotated[int, Field(ge=1, le=_MONTH_MS)]
PollInterval = Annotated[int, Field(ge=10, le=_MONTH_MS)]
Attempts = Annotated[int, Field(ge=1, le=1_000_000)]
Jitter = Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)]
FileSize = Annotated[int, Field(ge=1, le=2**53 - 1)]
Concurrency = Annotated[int, Field(ge=1, le=1_000)]
HostLimit = Annotated[int, Field(ge=0, le=1_000)]
Days = Annotated[int, Field(ge=1, le=36_500)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Delays = Annotated[tuple[Milliseconds, ...], Field(min_length=1), _Split, _list_schema("integer")]
Folders = Annotated[tuple[str, ...], AfterValidator(_check_folders), _Split, _Strings]
Patterns = Annotated[tuple[str, ...], AfterValidator(_check_patterns), _Split, _Strings]
Networks = Annotated[tuple[Annotated[str, AfterValidator(_check_network)], ...], _Split, _Strings]
SigningKey = Annotated[str, AfterValidator(_parse_signing_key)]
WebAddress = Annotated[str, AfterValidator(_check_address)]
WebAddresses = Annotated[tuple[Annotated[str, AfterValidator(_check_topics)], ...], _Split, _Strings]
JsonObject = dict[str, Any] | Json[dict[str, Any]]
AdapterName = Annotated[str, _matching("|".join(FOLDERS), f"one of {', '.join(FOLDERS)}")]

_BRANCH = f"a branch's short name, such as main: {_REF_TEXT}"
_REMOTE = f"the name of a configured remote, such as origin: {_REF_TEXT}"
_LINK = "an http(s) address with {%s} in it, such as https://example.org/%s/{%s}"
_LINK_PATTERN = rf"https?://(?![/?#{{]){_INK}*\{{%s\}}{_INK}*|"
_KEY = r"whsec_(?:[A-Za-z0-9+/]{4}){8,21}(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?|"
_SITE = "a site's name: up to 100 letters, digits, and after the first also . _ and -"
_DATABASE = "an address of Postgres, such as postgresql://db.example.org/briter"
_HOST = "an IP address or a host name, such as 127.0.0.1 or ::1"

BranchName = Annotated[str, _matching(_REF_NAME, _BRANCH)]
RemoteName = Annotated[str, _matching(_REF_NAME, _REMOTE)]
PersonName = Annotated[
    str, _matching(rf"(?=.*\w)[^{_NO_LINE}<>]+", "one line with a letter, without < and >")
]
Email = Annotated[str, _matching(rf"(?!.*[<>]){_INK}+", "an address without spaces, < and >")]
PostLink = Annotated[str, _matching(_LINK_PATTERN % "slug", _LINK % ("slug", "notes", "slug"))]
CommitLink = Annotated[str, _matching(_LINK_PATTERN % "commit", _LINK % ("commit", "commit", "commit"))]
Host = Annotated[str, _matching(r"[A-Za-z0-9.:%_-]{1,255}", _HOST)]
SigningSecret = Annotated[str, _matching(_KEY, "whsec_ and 24 to 64 bytes in base64")]
SiteName = Annotated[str, _matching(rf"{SITE_NAME}|", _SITE)]
SiteNames = Annotated[
    tuple[Annotated[str, _matching(rf"{SITE_NAME}|\*", "names of sites, or *")], ...], _Split, _Strings
]
DatabaseAddress = Annotated[str, _matching(r"postgres(?:ql)?://[!-~]+|", _DATABASE)]
HostApi = Annotated[
    str,
    _matching(
        r"(?:https://[A-Za-z0-9.-]+|http://(?:localhost|127\.0\.0\.1|\[::1\]))(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?|",
        "an address with https, on this machine also http, such as https://git.example.org/api/v4",
    ),
]
Token = Annotated[str, _matching(r"[!-~]{16,200}|", "at least 16 characters, without spaces")]

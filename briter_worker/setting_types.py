"""Types of the settings: how the text of a variable or a JSON value is read.

A validator raises ValueError with a text that says what is accepted.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict, ValidationInfo, WithJsonSchema

from briter_worker.adapters import names
from briter_worker.allowlist import Allowlist
from briter_worker.errors import UsageError

MONTH_MS = 31 * 24 * 60 * 60 * 1000
SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""Pattern of a site's name, which also names a folder of the clone cache."""

_NO_LINE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"
_INK = rf"[^\s{_NO_LINE}]"
_REF_PART = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?<!\.lock)"
_REF_NAME = rf"(?!refs/|HEAD$)(?=.{{1,200}}$){_REF_PART}(?:/{_REF_PART})*"
"""Stricter than `git check-ref-format`, which accepts `+main` (a forced push in a refspec)."""
_REF_TEXT = "letters, digits, and between them . _ - and /"
_ADDRESS = r"://(?:[!-~]*@)?(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:[/?][!\"$-+\--~]*)?"
_TOPIC = "(?:published|dead-lettered|condition)"
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


def _parse_digits(value: object) -> object:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,16}", value) else value


def _parse_decimal(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", value):
        return float(value)
    return value


def _parse_truth(value: object) -> bool:
    text = str(value).casefold()
    if text in {"true", "1", "yes", "on"}:
        return True
    if text in {"false", "0", "no", "off"}:
        return False
    raise ValueError("true, false, 1, 0, yes, no, on or off")


def _items(value: object) -> list[object]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [None]


def _parse_delays(value: object) -> tuple[int, ...]:
    given = [_parse_digits(item) for item in _items(value)]
    delays = tuple(item for item in given if type(item) is int and 0 <= item <= MONTH_MS)
    if not delays or len(delays) != len(given):
        raise ValueError(f"a list of whole numbers from 0 to {MONTH_MS}, separated by commas")
    return delays


def _parse_folders(value: object) -> tuple[str, ...]:
    given = _items(value)
    folders = [item for item in given if isinstance(item, str)]
    if len(folders) != len(given):
        raise ValueError("a list of folders, separated by commas")
    try:
        return Allowlist(folders).folders
    except UsageError as error:
        raise ValueError(f"a list of folders below the repository's root; {error.message}") from None


def _parse_networks(value: object) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_network(str(item), strict=False)) for item in _items(value))
    except ValueError:
        raise ValueError(
            "a list of IP addresses or networks, such as 10.0.0.0/8, separated by commas"
        ) from None


def _parse_object(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise ValueError("a JSON object")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def _parse_adapter(value: object) -> str:
    if value not in names():
        raise ValueError(f"one of {', '.join(names())}")
    return str(value)


def _parse_address(value: object, info: ValidationInfo) -> str:
    return "" if value == "" else _check_address(value, info, "")


def _check_address(value: object, info: ValidationInfo, tail: str) -> str:
    scheme = "https?" if info.data.get("webhook_allow_private") else "https"
    if not isinstance(value, str) or not re.fullmatch(f"{scheme}{_ADDRESS}{tail}", value):
        schemes = scheme.replace("?", " or http")
        raise ValueError(f"an address with {schemes}, such as https://example.org/hook")
    return value


def _parse_addresses(value: object, info: ValidationInfo) -> tuple[str, ...]:
    tail = rf"(?:#{_TOPIC}(?:\+{_TOPIC})*)?"
    try:
        return tuple(_check_address(item, info, tail) for item in _items(value))
    except ValueError as error:
        raise ValueError(
            f"a list, separated by commas, each {error}; after a # may stand the events to send: "
            "published, dead-lettered, condition, joined by +"
        ) from None


def _matching(pattern: str, accepted: str) -> BeforeValidator:
    """Return a validator of texts that match the whole pattern."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(accepted)
        return value

    return BeforeValidator(parse)


def _list_schema(item: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"items": {"type": item}, "type": "array"}, {"type": "string"}]})


Folder = Annotated[Path, BeforeValidator(_parse_folder)]
_Digits = BeforeValidator(_parse_digits)
Whole = Annotated[int, Strict(), _Digits]
PositiveMilliseconds = Annotated[int, Strict(), Field(ge=1, le=MONTH_MS), _Digits]
Milliseconds = Annotated[int, Strict(), Field(ge=0, le=MONTH_MS), _Digits]
Concurrency = Annotated[int, Strict(), Field(ge=1, le=1_000), _Digits]
Days = Annotated[int, Strict(), Field(ge=1, le=36_500), _Digits]
Port = Annotated[int, Strict(), Field(ge=0, le=65_535), _Digits]
Fraction = Annotated[float, Strict(), BeforeValidator(_parse_decimal)]
Truth = Annotated[bool, BeforeValidator(_parse_truth)]
Delays = Annotated[tuple[int, ...], BeforeValidator(_parse_delays), _list_schema("integer")]
Folders = Annotated[tuple[str, ...], BeforeValidator(_parse_folders), _list_schema("string")]
Networks = Annotated[tuple[str, ...], BeforeValidator(_parse_networks), _list_schema("string")]
WebAddresses = Annotated[tuple[str, ...], BeforeValidator(_parse_addresses), _list_schema("string")]
WebAddress = Annotated[str, BeforeValidator(_parse_address)]
JsonObject = Annotated[dict[str, Any], BeforeValidator(_parse_object)]
AdapterName = Annotated[str, BeforeValidator(_parse_adapter)]

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
DatabaseAddress = Annotated[str, _matching(r"postgres(?:ql)?://[!-~]+|", _DATABASE)]
Token = Annotated[str, _matching(r"[!-~]{16,200}|", "at least 16 characters, without spaces")]

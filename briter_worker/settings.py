"""The only reader of the environment and of config.json.

Three layers, lowest first: defaults, `<storage>/config.json`, environment. A layer that has nothing to say
about a value (a variable that is unset or blank; a key that is absent, null or blank) hides no lower one.
Where config.json lies is decided by the environment and the defaults: a file cannot move itself. The keys
`appRoot` and `storageRoot` in it move everything else.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.alias_generators import to_camel

from briter_worker.adapters import CUSTOM, folders_for, names
from briter_worker.allowlist import Allowlist
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

PREFIX = "BRITER_"
_MONTH_MS = 31 * 24 * 60 * 60 * 1000
_SHOWN = 200
"""As much of a wrong value as a person needs to find it again."""


def _absolute(path: Path, base: Path | None = None) -> Path:
    path = ((base or Path()) / path).absolute()
    # A symlink may stand before `..`, so the file system decides what that means. Else as written.
    return Path(os.path.realpath(path)) if ".." in path.parts else path


_NAMEABLE = re.compile(r"[^\0\ud800-\udc7f\udd00-\udfff]+")
"""What the system can open. The surrogates left stand for bytes that are no UTF-8."""


def _folder(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str | Path) or not _NAMEABLE.fullmatch(str(value)):
        raise ValueError("a folder, absolute or relative to BRITER_APP_ROOT")
    return _absolute(Path(value), info.data.get("app_root"))


def _digits(value: object) -> object:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,16}", value) else value


def _decimal(value: object) -> object:
    return (
        float(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", value) else value
    )


_TRUTH = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def _truth(value: object) -> bool:
    word = str(value).casefold()
    if word not in _TRUTH:
        raise ValueError("true, false, 1, 0, yes, no, on or off")
    return _TRUTH[word]


def _items(value: object) -> list[object]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [None]


def _delays(value: object) -> tuple[int, ...]:
    given = [_digits(item) for item in _items(value)]
    delays = tuple(item for item in given if type(item) is int and 0 <= item <= _MONTH_MS)
    if not delays or len(delays) != len(given):
        raise ValueError(f"a list of whole numbers from 0 to {_MONTH_MS}, with commas between them")
    return delays


def _folders(value: object) -> tuple[str, ...]:
    folders = [item for item in _items(value) if isinstance(item, str)]
    if len(folders) != len(_items(value)):
        raise ValueError("a list of folders, with commas between them")
    try:
        return Allowlist(folders).folders
    except UsageError as refused:
        raise ValueError(f"a list of folders below the repository's root; {refused}") from None


def _adapter(value: object) -> str:
    if value not in names():
        raise ValueError(f"one of {', '.join(names())}")
    return str(value)


def _matching(pattern: str, accepted: str) -> BeforeValidator:
    def check(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(accepted)
        return value

    return BeforeValidator(check)


# Narrower than `git check-ref-format`, which lets `+main` (a forced push) pass: these reach a refspec.
_NO_LINE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"
_INK = rf"[^\s{_NO_LINE}]"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?<!\.lock)"
_NAME = rf"(?!refs/|HEAD$)(?=.{{1,200}}$){_PART}(?:/{_PART})*"
_ACCEPTED_NAME = "letters, digits, and between them . _ - and /"

_Folder = Annotated[Path, BeforeValidator(_folder)]
_Bool = Annotated[bool, BeforeValidator(_truth)]
_Whole = Annotated[int, Field(strict=True), BeforeValidator(_digits)]
_Branch = Annotated[str, _matching(_NAME, f"a branch's short name, such as main: {_ACCEPTED_NAME}")]
_Remote = Annotated[
    str, _matching(_NAME, f"the name of a configured remote, such as origin: {_ACCEPTED_NAME}")
]
_Person = Annotated[str, _matching(rf"(?=.*\w)[^{_NO_LINE}<>]+", "one line with a letter, without < and >")]
_Email = Annotated[str, _matching(rf"(?!.*[<>]){_INK}+", "an address without spaces, < and >")]
_Href = Annotated[
    str,
    _matching(
        rf"https?://(?![/?#{{]){_INK}*\{{slug\}}{_INK}*|",
        "an http(s) address with {slug} in it, such as https://example.org/notes/{slug}",
    ),
]


class Settings(BaseModel):
    """What the worker was told, checked as a whole; every path is absolute."""

    model_config = ConfigDict(frozen=True, extra="ignore", title="Briter Worker configuration")

    app_root: _Folder = Field(default_factory=Path.cwd, description="What relative paths resolve against.")
    storage_root: _Folder = Field(
        default_factory=lambda data: data["app_root"] / "storage",
        description="Queue, lock, history, quarantine. Default: `storage` in the app root.",
    )
    queue_root: _Folder = Field(
        default_factory=lambda data: data["storage_root"] / "queue",
        description="The queue folder. Default: `queue` in the storage root.",
    )
    adapter: Annotated[str, BeforeValidator(_adapter)] = Field(
        "local-mdx", description="The kind of site: which folders may be published."
    )
    allowed_paths: Annotated[
        tuple[str, ...], BeforeValidator(_folders, json_schema_input_type=list[str] | str)
    ] = Field((), description="Folders added to the adapter's.")
    git_worktree: _Folder = Field(
        default_factory=lambda data: data["app_root"],
        description="The site's repository. Default: the app root.",
    )
    git_branch: _Branch = Field("main", description="Asserted, and pushed to.")
    git_remote: _Remote = Field("origin", description="Asserted, and pushed to.")
    git_author_name: _Person = Field("Briter Worker", description="The worker's identity.")
    git_author_email: _Email = Field("briter-worker@localhost", description="The worker's identity.")
    git_timeout_ms: _Whole = Field(
        120_000, ge=1, le=_MONTH_MS, description="Longest any one git command may take without progress."
    )
    git_hooks: _Bool = Field(False, description="Whether the work tree's hooks may run.")
    worker_dry_run: _Bool = Field(True, description="Every step but the real push.")
    worker_poll_interval_ms: _Whole = Field(
        5_000, ge=10, le=_MONTH_MS, description="The backstop poll; changes wake the worker at once."
    )
    worker_max_attempts: _Whole = Field(8, ge=1, le=1_000_000, description="Attempts before dead-lettering.")
    worker_backoff_ms: Annotated[
        tuple[int, ...], BeforeValidator(_delays, json_schema_input_type=list[int] | str)
    ] = Field((60_000, 300_000, 1_800_000), description="Waits between attempts; the last repeats.")
    worker_backoff_jitter: Annotated[float, BeforeValidator(_decimal)] = Field(
        0.0, strict=True, ge=0, le=0.5, description="The fraction by which waits vary, either way."
    )
    worker_lock_stale_ms: _Whole = Field(
        60_000, ge=1, le=_MONTH_MS, description="How old a heartbeat may be when nothing live holds the lock."
    )
    worker_shutdown_timeout_ms: _Whole = Field(
        300_000, ge=0, le=_MONTH_MS, description="How long a running publication may finish after SIGTERM."
    )
    worker_max_file_bytes: _Whole = Field(
        104_857_600, ge=1, le=2**53 - 1, description="A larger file is refused before it is hashed."
    )
    published_href_template: _Href = Field("", description="`https://example.org/notes/{slug}`, for links.")
    config_path: Path = Field(default=Path(), exclude=True)
    """The config.json that was looked for. Not a setting."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Every folder that may be published from: the adapter's, then the added ones."""
        return tuple(dict.fromkeys([*folders_for(self.adapter), *self.allowed_paths]))

    @property
    def lock_path(self) -> Path:
        """The site's lock."""
        return self.storage_root / "worker.lock"

    @property
    def quarantine_root(self) -> Path:
        """Where the bytes of files that are no job are kept."""
        return self.storage_root / "quarantine"

    @model_validator(mode="after")
    def _something_may_be_published(self) -> Self:
        if self.adapter == CUSTOM and not self.allowed_paths:
            raise ValueError(
                "BRITER_ADAPTER is custom, which has no folders of its own: name them in BRITER_ALLOWED_PATHS"
            )
        return self


def _setting_names() -> list[str]:
    return [name for name, field in Settings.model_fields.items() if not field.exclude]


def _said(values: Mapping[str, object]) -> dict[str, Any]:
    """What a layer has to say: neither null nor blank."""
    stripped = {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}
    return {name: value for name, value in stripped.items() if value not in (None, "")}


def _config_path(environment: Mapping[str, Any]) -> Path:
    app_root = _absolute(Path(environment.get("app_root", "")))
    return _absolute(Path(environment.get("storage_root", "storage")), app_root) / "config.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():  # a FIFO would block
            raise UsageError(for_people(f"{path} is no file: remove it"))
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise UsageError(for_people(f"{where}: not valid JSON: {error.msg}")) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(for_people(f"{path} cannot be read: {error}")) from None
    if not isinstance(document, dict):
        raise UsageError(for_people(f"{path}, line 1, column 1: expected one JSON object"))
    return document


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The three layers as one, from `environ` (the process's own when None).

    Raises UsageError, one line that names the variable or key, its value and what is accepted.
    """
    environ = os.environ if environ is None else environ
    given = _said({name: environ.get(_variable(name)) for name in _setting_names()})
    try:
        path = _config_path(given)
        document = _read(path)
        configured = _said({name: document.get(to_camel(name)) for name in _setting_names()})
        return Settings.model_validate({**configured, **given, "config_path": path})
    except ValidationError as error:
        raise UsageError(for_people(_explained(error.errors(include_url=False)[0], given))) from None
    except OSError as error:
        raise UsageError(for_people(f"no current folder ({error}): set BRITER_APP_ROOT")) from None


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _explained(problem: ErrorDetails, environment: Mapping[str, Any]) -> str:
    own_words = str(problem.get("ctx", {}).get("error", ""))
    if not problem["loc"]:
        return own_words
    name = str(problem["loc"][0])
    source = _variable(name) if name in environment else f"{to_camel(name)} in {_config_path(environment)}"
    # Redacted before it is cut: half a token is not recognised as one.
    value = for_people(json.dumps(problem["input"], ensure_ascii=False, default=str))[:_SHOWN]
    return f"{source} is {value}; accepted: {own_words or _range(name)}"


def _range(name: str) -> str:
    schema = settings_schema()["properties"][to_camel(name)]
    kind = "a whole number" if schema["type"] == "integer" else "a number"
    return f"{kind} from {schema['minimum']} to {schema['maximum']}"


def settings_schema() -> dict[str, Any]:
    """The JSON Schema of config.json; each key also names the variable that overrides it."""
    schema = Settings.model_json_schema()
    properties = {}
    for name in _setting_names():
        described = schema["properties"][name]
        described["title"] = _variable(name)
        properties[to_camel(name)] = described
    properties["adapter"]["enum"] = list(names())
    return {**schema, "properties": properties, "$schema": "https://json-schema.org/draft/2020-12/schema"}

"""The only reader of the environment and of config.json.

Three layers, lowest first: defaults, `<storage>/config.json`, environment. A layer that has nothing to say
about a value (a variable that is unset or blank; a key that is absent, null or blank) hides no lower one.
Where config.json lies is decided by the environment and the defaults: a file cannot move itself. The keys
`appRoot` and `storageRoot` in it move everything else.

`Settings` is the table of what there is; reading, refusing, the JSON Schema and the reference follow it. It
is no pydantic model, because every run of cron would wait for pydantic longer than for all else.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from briter_worker.adapters import CUSTOM, folders_for, names
from briter_worker.allowlist import Allowlist
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from dataclasses import Field

PREFIX = "BRITER_"
_MONTH_MS = 31 * 24 * 60 * 60 * 1000
_SHOWN = 200
"""As much of a wrong value as a person needs to find it again."""


class _Kind(NamedTuple):
    """What values a setting takes. `parse` answers what it refuses with a ValueError: what is accepted."""

    parse: Callable[[Any, Mapping[str, Any]], object]
    """From the text of a variable or any JSON value, and the settings that stand above it."""
    schema: Mapping[str, Any]
    lenient: bool = False
    """Whether what is not accepted is passed over with a warning: no start fails for it."""


def _absolute(path: Path, base: Path | None = None) -> Path:
    path = ((base or Path()) / path).absolute()
    # A symlink may stand before `..`, so the file system decides what that means. Else as written.
    return Path(os.path.realpath(path)) if ".." in path.parts else path


_NAMEABLE = r"[^\0\ud800-\udc7f\udd00-\udfff]+"
"""What the system can open. The surrogates left stand for bytes that are no UTF-8."""


def _folder(value: object, above: Mapping[str, Any]) -> Path:
    if not isinstance(value, str | Path) or not re.fullmatch(_NAMEABLE, str(value)):
        raise ValueError("a folder, absolute or relative to BRITER_APP_ROOT")
    return _absolute(Path(value), above.get("app_root"))


def _digits(value: object) -> object:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,16}", value) else value


def _whole(least: int, most: int) -> _Kind:
    def parse(value: object, _above: object) -> int:
        number = _digits(value)
        if type(number) is not int or not least <= number <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return number

    return _Kind(parse, {"minimum": least, "maximum": most, "type": "integer"})


def _fraction(most: float) -> _Kind:
    def parse(value: object, _above: object) -> float:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", value):
            value = float(value)
        if type(value) not in {int, float} or not 0 <= value <= most:  # type: ignore[operator]
            raise ValueError(f"a number from 0 to {most}")
        return float(value)  # type: ignore[arg-type]

    return _Kind(parse, {"minimum": 0, "maximum": most, "type": "number"})


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


def _truth(value: object, _above: object) -> bool:
    word = str(value).casefold()
    if word not in _TRUTH:
        raise ValueError("true, false, 1, 0, yes, no, on or off")
    return _TRUTH[word]


def _items(value: object) -> list[object]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [None]


def _delays(value: object, _above: object) -> tuple[int, ...]:
    given = [_digits(item) for item in _items(value)]
    delays = tuple(item for item in given if type(item) is int and 0 <= item <= _MONTH_MS)
    if not delays or len(delays) != len(given):
        raise ValueError(f"a list of whole numbers from 0 to {_MONTH_MS}, with commas between them")
    return delays


def _object(value: object, _above: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise ValueError("a JSON object")  # noqa: TRY004 - how every parser here refuses
    return value


def _folders(value: object, _above: object) -> tuple[str, ...]:
    folders = [item for item in _items(value) if isinstance(item, str)]
    if len(folders) != len(_items(value)):
        raise ValueError("a list of folders, with commas between them")
    try:
        return Allowlist(folders).folders
    except UsageError as refused:
        raise ValueError(f"a list of folders below the repository's root; {refused}") from None


def _adapter(value: object, _above: object) -> str:
    if value not in names():
        raise ValueError(f"one of {', '.join(names())}")
    return str(value)


def _matching(pattern: str, accepted: str) -> _Kind:
    def parse(value: object, _above: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(accepted)
        return value

    return _Kind(parse, {"type": "string"})


def _list_of(parse: Callable[[Any, Mapping[str, Any]], object], item: str) -> _Kind:
    return _Kind(parse, {"anyOf": [{"items": {"type": item}, "type": "array"}, {"type": "string"}]})


# Narrower than `git check-ref-format`, which lets `+main` (a forced push) pass: these reach a refspec.
_NO_LINE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"
_INK = rf"[^\s{_NO_LINE}]"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?<!\.lock)"
_NAME = rf"(?!refs/|HEAD$)(?=.{{1,200}}$){_PART}(?:/{_PART})*"
_WEB_ADDRESS = r"://(?:[!-~]*@)?(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:[/?][!\"$-+\--~]*)?"
SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""It names a folder of the cache, too."""
_TOPIC = "(?:published|dead-lettered|condition)"


def _web_address(value: object, above: Mapping[str, Any], tail: str = "") -> str:
    scheme = "https?" if above["webhook_allow_private"] else "https"
    if not isinstance(value, str) or not re.fullmatch(f"(?:{scheme}{_WEB_ADDRESS}{tail})", value):
        raise ValueError(
            f"an address with {scheme.replace('?', ' or http')}, such as https://example.org/hook"
        )
    return value


def _web_addresses(value: object, above: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return tuple(_web_address(item, above, rf"(?:#{_TOPIC}(?:\+{_TOPIC})*)?") for item in _items(value))
    except ValueError as refused:
        raise ValueError(
            f"a list, with commas between: {refused}; behind a # may stand what it is told of: "
            "published, dead-lettered, condition, with + between them"
        ) from None


def _one_of(*words: str) -> _Kind:
    def parse(value: object, _above: object) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return str(value)

    return _Kind(parse, {"enum": list(words), "type": "string"})


_ACCEPTED_NAME = "letters, digits, and between them . _ - and /"

_FOLDER = _Kind(_folder, {"format": "path", "type": "string"})
_TRUE_OR_FALSE = _Kind(_truth, {"type": "boolean"})
_BRANCH = _matching(_NAME, f"a branch's short name, such as main: {_ACCEPTED_NAME}")
_REMOTE = _matching(_NAME, f"the name of a configured remote, such as origin: {_ACCEPTED_NAME}")
_PERSON = _matching(rf"(?=.*\w)[^{_NO_LINE}<>]+", "one line with a letter, without < and >")
_EMAIL = _matching(rf"(?!.*[<>]){_INK}+", "an address without spaces, < and >")
_HREF = _matching(
    rf"https?://(?![/?#{{]){_INK}*\{{slug\}}{_INK}*|",
    "an http(s) address with {slug} in it, such as https://example.org/notes/{slug}",
)
_COMMIT_HREF = _matching(
    rf"https?://(?![/?#{{]){_INK}*\{{commit\}}{_INK}*|",
    "an http(s) address with {commit} in it, such as https://example.org/commit/{commit}",
)
_HOST = _matching(r"[A-Za-z0-9.:%_-]{1,255}", "an address or a host's name, such as 127.0.0.1 or ::1")
_SIGNING_SECRET = _matching(
    r"whsec_(?:[A-Za-z0-9+/]{4}){8,21}(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?|",
    "whsec_ and 24 to 64 bytes as base64: echo whsec_$(openssl rand -base64 32) makes one",
)
_SITE = _matching(
    rf"{SITE_NAME}|", "a site's name: up to 100 letters, digits, and after the first also . _ and -"
)
_DATABASE = _matching(
    r"postgres(?:ql)?://[!-~]+|", "an address of Postgres, such as postgresql://briter@localhost/briter"
)
_TOKEN = _matching(
    r"[!-~]{16,200}|", "at least 16 characters, without spaces: openssl rand -hex 32 makes one"
)


def _setting(
    kind: _Kind, default: object, description: str, *, secret: bool = False, per_site: bool = False
) -> Any:  # noqa: ANN401 - as dataclasses.field
    """A line of the table. A default that can be called is made of the settings above it.

    A secret's value is never shown, not even a wrong one. In a cluster, each site may have a value of its own
    for what is `per_site`.
    """
    return field(
        metadata={
            "kind": kind,
            "default": default,
            "description": description,
            "secret": secret,
            "per_site": per_site,
        }
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """What the worker was told, checked as a whole; every path is absolute."""

    app_root: Path = _setting(_FOLDER, lambda _: Path.cwd(), "What relative paths resolve against.")
    storage_root: Path = _setting(
        _FOLDER,
        lambda above: above["app_root"] / "storage",
        "Queue, lock, history, quarantine. Default: `storage` in the app root.",
    )
    queue_root: Path = _setting(
        _FOLDER,
        lambda above: above["storage_root"] / "queue",
        "The queue folder. Default: `queue` in the storage root.",
    )
    adapter: str = _setting(
        _Kind(_adapter, {"type": "string"}),
        "local-mdx",
        "The kind of site: which folders may be published.",
        per_site=True,
    )
    allowed_paths: tuple[str, ...] = _setting(
        _list_of(_folders, "string"), (), "Folders added to the adapter's.", per_site=True
    )
    git_worktree: Path = _setting(
        _FOLDER, lambda above: above["app_root"], "The site's repository. Default: the app root."
    )
    git_branch: str = _setting(_BRANCH, "main", "Asserted, and pushed to.", per_site=True)
    git_remote: str = _setting(_REMOTE, "origin", "Asserted, and pushed to.")
    git_author_name: str = _setting(_PERSON, "Briter Worker", "The worker's identity.", per_site=True)
    git_author_email: str = _setting(
        _EMAIL, "briter-worker@localhost", "The worker's identity.", per_site=True
    )
    git_timeout_ms: int = _setting(
        _whole(1, _MONTH_MS), 120_000, "Longest any one git command may take without progress.", per_site=True
    )
    git_hooks: bool = _setting(_TRUE_OR_FALSE, False, "Whether the work tree's hooks may run.")
    worker_dry_run: bool = _setting(_TRUE_OR_FALSE, True, "Every step but the real push.", per_site=True)
    worker_poll_interval_ms: int = _setting(
        _whole(10, _MONTH_MS), 5_000, "The backstop poll; changes wake the worker at once."
    )
    worker_max_attempts: int = _setting(
        _whole(1, 1_000_000), 8, "Attempts before dead-lettering.", per_site=True
    )
    worker_backoff_ms: tuple[int, ...] = _setting(
        _list_of(_delays, "integer"),
        (60_000, 300_000, 1_800_000),
        "Waits between attempts; the last repeats.",
        per_site=True,
    )
    worker_backoff_jitter: float = _setting(
        _fraction(0.5), 0.0, "The fraction by which waits vary, either way.", per_site=True
    )
    worker_lock_stale_ms: int = _setting(
        _whole(1, _MONTH_MS), 60_000, "How old a heartbeat may be when nothing live holds the lock."
    )
    worker_shutdown_timeout_ms: int = _setting(
        _whole(0, _MONTH_MS), 300_000, "How long a running publication may finish after SIGTERM."
    )
    worker_max_file_bytes: int = _setting(
        _whole(1, 2**53 - 1), 104_857_600, "A larger file is refused before it is hashed.", per_site=True
    )
    plugins: Mapping[str, Any] = _setting(
        _Kind(_object, {"type": "object"}),
        lambda _: {},
        "What plugins are told, under the name of each: a JSON object.",
        secret=True,
    )
    history_stale_days: int = _setting(
        _whole(1, 36_500), 30, "After so many days a receipt is out of sight, unless it is asked for."
    )
    history_keep_days: int = _setting(_whole(1, 36_500), 365, "After so many days a receipt is deleted.")
    published_href_template: str = _setting(
        _HREF, "", "`https://example.org/notes/{slug}`, for links.", per_site=True
    )
    commit_href_template: str = _setting(
        _COMMIT_HREF, "", "`https://example.org/commit/{commit}`, for the dashboard's links.", per_site=True
    )
    webhook_allow_private: bool = _setting(
        _TRUE_OR_FALSE, False, "Whether webhooks may reach this machine's own network, and by http."
    )
    webhook_urls: tuple[str, ...] = _setting(
        _list_of(_web_addresses, "string"),
        (),
        "Who is told of publications, dead letters and the site's condition.",
        secret=True,
    )
    webhook_secret: str = _setting(
        _SIGNING_SECRET, "", "Signs webhooks by the Standard Webhooks scheme: `whsec_…`.", secret=True
    )
    webhook_template: str = _setting(
        _one_of("json", "slack", "discord", "text"), "json", "The form of what `BRITER_WEBHOOK_URLS` get."
    )
    build_hook_url: str = _setting(
        _Kind(_web_address, {"type": "string"}),
        "",
        "Gets an empty POST after a push that published something, as Netlify's and Vercel's hooks expect.",
        secret=True,
    )
    build_hook_min_interval_ms: int = _setting(
        _whole(0, _MONTH_MS), 60_000, "At most one such POST in this time; the last change always gets one."
    )
    metrics_port: int = _setting(
        _whole(0, 65_535), 0, "Where `run` answers Prometheus, at `/metrics`; 0: nowhere."
    )
    metrics_host: str = _setting(_HOST, "127.0.0.1", "The address at which it does.")
    dashboard_host: str = _setting(
        _HOST, "127.0.0.1", "Where `serve` listens. Anywhere but on this machine it demands the token."
    )
    dashboard_port: int = _setting(_whole(0, 65_535), 8320, "The dashboard's port; 0: any free one.")
    dashboard_token: str = _setting(
        _TOKEN, "", "What readers of the dashboard sign in with, and programs send as Bearer.", secret=True
    )
    database_url: str = _setting(
        _DATABASE,
        "",
        "The Postgres of a cluster: `postgresql://user@host/name`. Empty: the queue is a folder.",
        secret=True,
    )
    site: str = _setting(_SITE, "", "In a cluster, the site that commands are about, unless told otherwise.")
    worker_concurrency: int = _setting(
        _whole(1, 1_000)._replace(lenient=True),
        4,
        "In a cluster, how many sites a worker publishes at once. What is no such number counts for nothing.",
    )
    cache_root: Path = _setting(
        _FOLDER,
        lambda above: above["storage_root"] / "cache",
        "In a cluster, where a worker keeps what it has fetched of the sites, which may be deleted at any "
        "time. Default: `cache` in the storage root.",
    )
    config_path: Path
    """The config.json that was looked for. Not a setting."""
    warnings: tuple[str, ...] = ()
    """What was passed over, in one line each. Not a setting."""

    @property
    def folders(self) -> tuple[str, ...]:
        """Every folder that may be published from: the adapter's, then the added ones."""
        return tuple(dict.fromkeys([*folders_for(self.adapter), *self.allowed_paths]))

    @property
    def lock_path(self) -> Path:
        """The site's lock."""
        return self.storage_root / "worker.lock"

    @property
    def history_path(self) -> Path:
        """The history."""
        return self.storage_root / "history.db"

    @property
    def webhooks_path(self) -> Path:
        """What is still to be sent."""
        return self.storage_root / "webhooks.db"

    @property
    def webhooks_mark(self) -> Path:
        """Is there while anything is still to be sent; as old as that is due."""
        return self.storage_root / ".webhooks.due"

    @property
    def condition_path(self) -> Path:
        """What is wrong with the site's surroundings, or that nothing is any more."""
        return self.storage_root / "condition.json"

    @property
    def quarantine_root(self) -> Path:
        """Where the bytes of files that are no job are kept."""
        return self.storage_root / "quarantine"


def _table() -> list[Field[Any]]:
    return [each for each in fields(Settings) if each.metadata]


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
    table = _table()
    given = _said({each.name: environ.get(_variable(each.name)) for each in table})
    try:
        path = _config_path(given)
        document = _read(path)
        configured = _said({each.name: document.get(_key(each.name)) for each in table})
        values: dict[str, Any] = {}
        warnings: list[str] = []
        for each in table:
            values[each.name] = _value(each, given, configured, values, path, warnings)
    except OSError as error:
        raise UsageError(for_people(f"no current folder ({error}): set BRITER_APP_ROOT")) from None
    if values["adapter"] == CUSTOM and not values["allowed_paths"]:
        raise UsageError(
            "BRITER_ADAPTER is custom, which has no folders of its own: name them in BRITER_ALLOWED_PATHS"
        )
    return Settings(**values, config_path=path, warnings=tuple(warnings))


def _value(
    setting: Field[Any],
    environment: Mapping[str, Any],
    configured: Mapping[str, Any],
    above: Mapping[str, Any],
    path: Path,
    warnings: list[str],
) -> object:
    """What the highest layer that says something means by it."""
    name = setting.name
    layers = ((_variable(name), environment), (f"{_key(name)} in {path}", configured))
    for source, layer in layers:
        if name not in layer:
            continue
        try:
            return _parsed(setting, source, layer[name], above)
        except UsageError as refused:
            if not setting.metadata["kind"].lenient:
                raise
            warnings.append(f"{refused}: passed over")
    default = setting.metadata["default"]
    return default(above) if callable(default) else default


def _parsed(setting: Field[Any], source: str, said: object, above: Mapping[str, Any]) -> object:
    """What is meant by what was said there. Raises UsageError."""
    kind: _Kind = setting.metadata["kind"]
    try:
        return kind.parse(said, above)
    except ValueError as refused:
        if setting.metadata["secret"]:
            raise UsageError(f"{source} is not accepted (not shown here); accepted: {refused}") from None
        # Redacted before it is cut: half a token is not recognised as one.
        value = for_people(json.dumps(said, ensure_ascii=False))[:_SHOWN]
        raise UsageError(for_people(f"{source} is {value}; accepted: {refused}")) from None


def per_site() -> tuple[str, ...]:
    """The keys, as in config.json, for which each site of a cluster may have a value of its own."""
    return tuple(_key(each.name) for each in _table() if each.metadata["per_site"])


def for_site(settings: Settings, own: Mapping[str, object], *, source: str) -> Settings:
    """The worker's settings with what a site has of its own laid over them.

    Raises UsageError, one line that names the key of `source`, its value and what is accepted.
    """
    known = {_key(each.name): each for each in _table() if each.metadata["per_site"]}
    above = {each.name: getattr(settings, each.name) for each in _table()}
    changed: dict[str, Any] = {}
    for key, said in _said(own).items():
        if key not in known:
            raise UsageError(
                for_people(f"{source}: {key} cannot be set for one site; accepted: {', '.join(known)}")
            )
        changed[known[key].name] = _parsed(known[key], f"{source}: {key}", said, above | changed)
    laid = replace(settings, **changed)
    if laid.adapter == CUSTOM and not laid.allowed_paths:
        raise UsageError(
            f"{source}: the adapter is custom, which has no folders of its own: name them in allowedPaths"
        )
    return laid


def parse_concurrency(said: str) -> int | None:
    """How many sites at once, as a flag may say it; None for what is no such number."""
    setting = next(each for each in _table() if each.name == "worker_concurrency")
    try:
        return int(setting.metadata["kind"].parse(said, {}))
    except ValueError:
        return None


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _key(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)


def settings_schema() -> dict[str, Any]:
    """The JSON Schema of config.json; each key also names the variable that overrides it.

    `writeOnly` marks what is a secret.
    """
    properties: dict[str, dict[str, Any]] = {}
    for each in _table():
        default = each.metadata["default"]
        properties[_key(each.name)] = {
            "title": _variable(each.name),
            "description": each.metadata["description"],
            **each.metadata["kind"].schema,
            **({"writeOnly": True} if each.metadata["secret"] else {}),
        }
        if not callable(default):
            properties[_key(each.name)]["default"] = list(default) if isinstance(default, tuple) else default
    properties["adapter"]["enum"] = list(names())
    return {
        "title": "Briter Worker configuration",
        "description": Settings.__doc__,
        "type": "object",
        "properties": properties,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }

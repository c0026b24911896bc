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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from briter_worker.accepted import (
    BRANCH,
    COMMIT_HREF,
    DATABASE,
    EMAIL,
    FOLDER,
    HOST,
    HREF,
    MONTH_MS,
    PERSON,
    REMOTE,
    SIGNING_SECRET,
    SITE,
    TOKEN,
    TRUE_OR_FALSE,
    Kind,
    absolute,
    adapter_name,
    delays,
    folder_list,
    fraction,
    json_object,
    list_of,
    one_of,
    web_address,
    web_addresses,
    whole,
)
from briter_worker.adapters import CUSTOM, folders_for, names
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Mapping
    from dataclasses import Field

PREFIX = "BRITER_"
_SHOWN = 200
"""As much of a wrong value as a person needs to find it again."""


def _setting(
    kind: Kind, default: object, description: str, *, secret: bool = False, per_site: bool = False
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

    app_root: Path = _setting(FOLDER, lambda _: Path.cwd(), "What relative paths resolve against.")
    storage_root: Path = _setting(
        FOLDER,
        lambda above: above["app_root"] / "storage",
        "Queue, lock, history, quarantine. Default: `storage` in the app root.",
    )
    queue_root: Path = _setting(
        FOLDER,
        lambda above: above["storage_root"] / "queue",
        "The queue folder. Default: `queue` in the storage root.",
    )
    adapter: str = _setting(
        Kind(adapter_name, {"type": "string"}),
        "local-mdx",
        "The kind of site: which folders may be published.",
        per_site=True,
    )
    allowed_paths: tuple[str, ...] = _setting(
        list_of(folder_list, "string"), (), "Folders added to the adapter's.", per_site=True
    )
    git_worktree: Path = _setting(
        FOLDER, lambda above: above["app_root"], "The site's repository. Default: the app root."
    )
    git_branch: str = _setting(BRANCH, "main", "Asserted, and pushed to.", per_site=True)
    git_remote: str = _setting(REMOTE, "origin", "Asserted, and pushed to.")
    git_author_name: str = _setting(PERSON, "Briter Worker", "The worker's identity.", per_site=True)
    git_author_email: str = _setting(
        EMAIL, "briter-worker@localhost", "The worker's identity.", per_site=True
    )
    git_timeout_ms: int = _setting(
        whole(1, MONTH_MS), 120_000, "Longest any one git command may take without progress.", per_site=True
    )
    git_hooks: bool = _setting(TRUE_OR_FALSE, False, "Whether the work tree's hooks may run.")
    worker_dry_run: bool = _setting(TRUE_OR_FALSE, True, "Every step but the real push.", per_site=True)
    worker_poll_interval_ms: int = _setting(
        whole(10, MONTH_MS), 5_000, "The backstop poll; changes wake the worker at once."
    )
    worker_max_attempts: int = _setting(
        whole(1, 1_000_000), 8, "Attempts before dead-lettering.", per_site=True
    )
    worker_backoff_ms: tuple[int, ...] = _setting(
        list_of(delays, "integer"),
        (60_000, 300_000, 1_800_000),
        "Waits between attempts; the last repeats.",
        per_site=True,
    )
    worker_backoff_jitter: float = _setting(
        fraction(0.5), 0.0, "The fraction by which waits vary, either way.", per_site=True
    )
    worker_lock_stale_ms: int = _setting(
        whole(1, MONTH_MS), 60_000, "How old a heartbeat may be when nothing live holds the lock."
    )
    worker_shutdown_timeout_ms: int = _setting(
        whole(0, MONTH_MS), 300_000, "How long a running publication may finish after SIGTERM."
    )
    worker_max_file_bytes: int = _setting(
        whole(1, 2**53 - 1), 104_857_600, "A larger file is refused before it is hashed.", per_site=True
    )
    plugins: Mapping[str, Any] = _setting(
        Kind(json_object, {"type": "object"}),
        lambda _: {},
        "What plugins are told, under the name of each: a JSON object.",
        secret=True,
    )
    history_stale_days: int = _setting(
        whole(1, 36_500), 30, "After so many days a receipt is out of sight, unless it is asked for."
    )
    history_keep_days: int = _setting(whole(1, 36_500), 365, "After so many days a receipt is deleted.")
    published_href_template: str = _setting(
        HREF, "", "`https://example.org/notes/{slug}`, for links.", per_site=True
    )
    commit_href_template: str = _setting(
        COMMIT_HREF, "", "`https://example.org/commit/{commit}`, for the dashboard's links.", per_site=True
    )
    webhook_allow_private: bool = _setting(
        TRUE_OR_FALSE, False, "Whether webhooks may reach this machine's own network, and by http."
    )
    webhook_urls: tuple[str, ...] = _setting(
        list_of(web_addresses, "string"),
        (),
        "Who is told of publications, dead letters and the site's condition.",
        secret=True,
    )
    webhook_secret: str = _setting(
        SIGNING_SECRET, "", "Signs webhooks by the Standard Webhooks scheme: `whsec_…`.", secret=True
    )
    webhook_template: str = _setting(
        one_of("json", "slack", "discord", "text"), "json", "The form of what `BRITER_WEBHOOK_URLS` get."
    )
    build_hook_url: str = _setting(
        Kind(web_address, {"type": "string"}),
        "",
        "Gets an empty POST after a push that published something, as Netlify's and Vercel's hooks expect.",
        secret=True,
    )
    build_hook_min_interval_ms: int = _setting(
        whole(0, MONTH_MS), 60_000, "At most one such POST in this time; the last change always gets one."
    )
    metrics_port: int = _setting(
        whole(0, 65_535), 0, "Where `run` answers Prometheus, at `/metrics`; 0: nowhere."
    )
    metrics_host: str = _setting(HOST, "127.0.0.1", "The address at which it does.")
    dashboard_host: str = _setting(
        HOST, "127.0.0.1", "Where `serve` listens. Anywhere but on this machine it demands the token."
    )
    dashboard_port: int = _setting(whole(0, 65_535), 8320, "The dashboard's port; 0: any free one.")
    dashboard_token: str = _setting(
        TOKEN, "", "What readers of the dashboard sign in with, and programs send as Bearer.", secret=True
    )
    database_url: str = _setting(
        DATABASE,
        "",
        "The Postgres of a cluster: `postgresql://user@host/name`. Empty: the queue is a folder.",
        secret=True,
    )
    site: str = _setting(SITE, "", "In a cluster, the site that commands are about, unless told otherwise.")
    worker_concurrency: int = _setting(
        whole(1, 1_000)._replace(lenient=True),
        4,
        "In a cluster, how many sites a worker publishes at once. What is no such number counts for nothing.",
    )
    cache_root: Path = _setting(
        FOLDER,
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
    app_root = absolute(Path(environment.get("app_root", "")))
    return absolute(Path(environment.get("storage_root", "storage")), app_root) / "config.json"


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
    kind: Kind = setting.metadata["kind"]
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

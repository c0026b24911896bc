"""Configuration: the environment over `config.json` over the defaults, as one pydantic-settings model.

A variable that is unset or blank, and a key that is absent, null or blank, hides no lower layer. The
environment and the defaults decide where `config.json` is; the file cannot move itself.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Json,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, SettingsConfigDict

from briter_worker.accepted import accepted_text
from briter_worker.allowlist import ADAPTER_EXCLUDED, EXCLUDED, FOLDERS, Allowlist, compile_patterns
from briter_worker.errors import UsageError, one_line, os_error_fix, os_error_text
from briter_worker.job import MalformedJobError, without_duplicates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pydantic_core import ErrorDetails

PREFIX = "BRITER_"
SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""Pattern of a site's name, which also names a folder of the clone cache."""
_MONTH_MS = 31 * 24 * 60 * 60 * 1000
_FIXES = {
    **dict.fromkeys(("dashboard_token", "pull_secret"), "make one: openssl rand -hex 32"),
    "webhook_secret": "make one: echo whsec_$(openssl rand -base64 32)",
}
PER_SITE = (
    "adapter", "allowed_paths", "excluded_paths", "git_branch", "git_author_name", "git_author_email",
    "git_signing_key", "git_signing_format", "git_co_authors", "git_timeout_ms", "git_transfer_timeout_ms",
    "worker_dry_run", "worker_quiet_ms", "worker_quiet_max_ms", "worker_max_attempts", "worker_backoff_ms",
    "worker_backoff_jitter", "worker_max_file_bytes", "published_href_template", "commit_href_template",
    "webhook_urls", "webhook_template", "build_hook_url", "plugins", "history_keep_days",
)  # fmt: skip
"""What each site of a cluster may set for itself."""
_NO_LINE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"
_INK = rf"[^\s{_NO_LINE}]"
_REF_PART = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?<!\.lock)"
_REF_NAME = rf"(?!refs/|HEAD$)(?=.{{1,200}}$){_REF_PART}(?:/{_REF_PART})*"
"""Stricter than `git check-ref-format`, which accepts `+main` (a forced push in a refspec)."""
_REF_TEXT = "letters, digits, and between them . _ - and /"
_ADDRESS = r"://(?:[!-~]*@)?(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:[/?][!\"$-+\--~]*)?"
_TOPIC = "(?:published|dead-lettered|condition|updated)"
_LINK = rf"https?://(?![/?#{{]){_INK}*\{{%s\}}{_INK}*"
_LINK_TEXT = "an http(s) address with {%s} in it, such as https://example.org/%s"
_SECRET = (r"[!-~]{16,200}", "at least 16 characters, without spaces")
_TEXTS = {
    "adapter": ("|".join(FOLDERS), f"one of {', '.join(FOLDERS)}"),
    "git_branch": (_REF_NAME, f"a branch's short name, such as main: {_REF_TEXT}"),
    "git_remote": (_REF_NAME, f"the name of a configured remote, such as origin: {_REF_TEXT}"),
    "git_author_name": (rf"(?=.*\w)[^{_NO_LINE}<>]+", "one line with a letter, without < and >"),
    "git_author_email": (rf"(?!.*[<>]){_INK}+", "an address without spaces, < and >"),
    "git_host_token": _SECRET,
    "git_host_api": (
        r"(?:https://[A-Za-z0-9.-]+|http://(?:localhost|127\.0\.0\.1|\[::1\]))(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~/-]*)?",
        "an address with https, on this machine also http, such as https://git.example.org/api/v4",
    ),
    "published_href_template": (_LINK % "slug", _LINK_TEXT % ("slug", "notes/{slug}")),
    "commit_href_template": (_LINK % "commit", _LINK_TEXT % ("commit", "commit/{commit}")),
    "webhook_secret": (
        r"whsec_(?:[A-Za-z0-9+/]{4}){8,21}(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?",
        "whsec_ and 24 to 64 bytes in base64",
    ),
    "dashboard_token": _SECRET,
    "pull_secret": _SECRET,
    "database_url": ("postgres(?:ql)?://[!-~]+", "an address such as postgresql://db.example.org/briter"),
    "site": (SITE_NAME, "a site's name: up to 100 letters, digits, and after the first also . _ and -"),
}
"""The pattern of the whole text of a setting, and what is accepted."""


def _absolute_path(path: Path, base: Path | None = None) -> Path:
    """Return the absolute path of one that may be relative to `base`."""
    path = ((base or Path()) / path).absolute()
    # `..` after a symlink means what the file system says; other paths stay as written.
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def _parse_folder(value: object, info: ValidationInfo) -> Path:
    # The surrogates that are left stand for bytes that are not UTF-8.
    if not isinstance(value, str | Path) or not re.fullmatch(r"[^\0\ud800-\udc7f\udd00-\udfff]+", str(value)):
        raise ValueError("a folder, absolute or relative to BRITER_APP_ROOT")
    return _absolute_path(Path(value), info.data.get("app_root"))


def _split(value: object) -> object:
    return [item.strip() for item in value.split(",")] if isinstance(value, str) else value


def _check_folders(folders: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return Allowlist(folders).folders
    except UsageError as error:
        raise ValueError(f"a list of folders below the repository's root; {error.message}") from None


def _check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    try:
        compile_patterns(patterns)
    except ValueError:
        raise ValueError("a list of patterns as in .gitignore, such as drafts/ or *.bak") from None
    return patterns


def _parse_signing_key(key: str, info: ValidationInfo) -> str:
    if not re.fullmatch(rf"[^{_NO_LINE}]*", key):
        raise ValueError("the name of a key in one line, not the key itself")
    if key.startswith("key::") or info.data.get("git_signing_format") != "ssh":
        return key
    return str(_absolute_path(Path(key).expanduser(), info.data.get("app_root")))


def _check_networks(texts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_network(text, strict=False)) for text in texts)
    except ValueError:
        raise ValueError("a list of IP addresses or networks, such as 10.0.0.0/8") from None


def _check_address(address: str, info: ValidationInfo) -> str:
    scheme = "https?" if info.data.get("webhook_allow_private") else "https"
    if not re.fullmatch(scheme + _ADDRESS, address):
        raise ValueError(
            f"an address with {scheme.replace('?', ' or http')}, such as https://example.org/hook"
        )
    return address


def _check_receivers(addresses: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    for address in addresses:
        url, mark, topics = address.partition("#")
        if not url or (mark and not re.fullmatch(rf"{_TOPIC}(?:\+{_TOPIC})*", topics)):
            raise ValueError("addresses, each with # and events if wanted, such as published+condition")
        _check_address(url, info)
    return addresses


def _check_whole(value: object) -> object:
    """Refuse what pydantic rounds: 30.0 is no number of days, wherever it comes from."""
    if isinstance(value, float) or (isinstance(value, str) and "." in value):
        raise ValueError("a whole number")
    return value


def _list_schema(item: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"items": {"type": item}, "type": "array"}, {"type": "string"}]})


_Folder = Annotated[Path, BeforeValidator(_parse_folder)]
_Whole = Annotated[int, BeforeValidator(_check_whole)]
_Milliseconds = Annotated[int, Field(ge=0, le=_MONTH_MS), BeforeValidator(_check_whole)]
_Port = Annotated[int, Field(ge=0, le=65_535), BeforeValidator(_check_whole)]
_Delays = Annotated[
    tuple[_Milliseconds, ...], Field(min_length=1), BeforeValidator(_split), _list_schema("integer")
]
_Texts = Annotated[tuple[str, ...], BeforeValidator(_split), _list_schema("string")]


def _setting(default: object, description: str, *, secret: bool = False, **more: Any) -> Any:  # noqa: ANN401
    """Return a field. A default that is a function derives from the settings above it."""
    more["default_factory" if callable(default) else "default"] = default
    more["json_schema_extra"] = {"writeOnly": True} if secret else None
    return Field(**more, description=description, repr=not secret)


class Settings(BaseSettings):
    """Configuration of one worker. Every path is absolute. Secrets are not in its `repr`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        enable_decoding=False,
        validate_default=False,
        frozen=True,
        field_title_generator=lambda name, _: PREFIX + name.upper(),
    )

    app_root: _Folder = _setting(Path.cwd, "Base of relative paths.")
    storage_root: _Folder = _setting(
        lambda above: above["app_root"] / "storage",
        "Folder of queue, lock, history and quarantine. Default: `storage` in the app root.",
    )
    queue_root: _Folder = _setting(
        lambda above: above["storage_root"] / "queue", "Queue folder. Default: `queue` in the storage root."
    )
    adapter: str = _setting("local-mdx", "Kind of site: decides which folders are published.")
    allowed_paths: Annotated[_Texts, AfterValidator(_check_folders)] = _setting(
        (), "Folders added to the adapter's."
    )
    excluded_paths: Annotated[_Texts, AfterValidator(_check_patterns)] = _setting(
        (), "Patterns as in `.gitignore`, added to the adapter's: never published, also inside a folder."
    )
    git_worktree: _Folder = _setting(
        lambda above: above["app_root"], "The site's repository. Default: the app root."
    )
    git_branch: str = _setting("main", "Branch that is checked out and pushed to.")
    git_remote: str = _setting("origin", "Remote that is pushed to.")
    git_author_name: str = _setting("Briter Worker", "The worker's committer name.")
    git_author_email: str = _setting("briter-worker@localhost", "The worker's committer address.")
    git_timeout_ms: _Whole = _setting(
        120_000,
        "Time in ms that a git command may take while no objects move and none of git's counters rises.",
        ge=1,
        le=_MONTH_MS,
    )
    git_transfer_timeout_ms: _Whole = _setting(
        3_600_000, "Time in ms that a git command may take in all.", ge=1, le=_MONTH_MS
    )
    git_ssh_keep_ms: _Milliseconds = _setting(
        60_000,
        "Time in ms for which an ssh connection is kept for the next push, since it was opened. 0: none.",
    )
    git_pull_interval_ms: _Milliseconds = _setting(
        0, "Interval in ms at which an idle worker pulls the remote's edits. 0: only when publishing."
    )
    git_signing_format: Literal["ssh", "openpgp", "x509"] = _setting("ssh", "Kind of the signing key.")
    git_signing_key: Annotated[str, AfterValidator(_parse_signing_key)] = _setting(
        "",
        "Key that signs every commit: a file for `ssh`, an id for `openpgp` and `x509`. Empty: unsigned.",
    )
    git_co_authors: bool = _setting(
        False, "Name the authors of superseded saves in `Co-authored-by` trailers of the commit."
    )
    git_host_token: str = _setting(
        "", "Token with which `doctor` asks the git host which rules a push has to meet.", secret=True
    )
    git_host_api: str = _setting(
        "", "Address of the git host's API, such as `https://git.example.org/api/v4`. Empty: by its name."
    )
    git_hooks: bool = _setting(False, "Run the repository's own hooks.")
    worker_dry_run: bool = _setting(True, "Do everything except the push. Jobs stay in the queue as `tried`.")
    worker_poll_interval_ms: _Whole = _setting(
        5_000, "Interval of the fallback poll in ms. Changes wake the worker.", ge=10, le=_MONTH_MS
    )
    worker_quiet_ms: _Milliseconds = _setting(
        0, "Quiet time in ms: a post is published when it has not been saved for this time."
    )
    worker_quiet_max_ms: _Milliseconds = _setting(
        lambda above: max(60_000, above["worker_quiet_ms"]),
        "Time in ms after its first unpublished save at which a post is published though it is still saved. "
        "Default: 60000, or the quiet time if that is longer.",
    )
    worker_max_attempts: _Whole = _setting(8, "Attempts before a job is dead-lettered.", ge=1, le=1_000_000)
    worker_backoff_ms: _Delays = _setting(
        (60_000, 300_000, 1_800_000),
        "Delays between attempts in ms. The last one repeats. Only the first can be shorter than 1000.",
    )
    worker_backoff_jitter: float = _setting(
        0.0, "Fraction by which delays vary at random, up and down.", ge=0, le=0.5
    )
    worker_lock_stale_ms: _Whole = _setting(
        60_000, "Age in ms at which the heartbeat of an unheld lock is stale.", ge=1, le=_MONTH_MS
    )
    worker_shutdown_timeout_ms: _Milliseconds = _setting(
        300_000, "Time in ms that a running publication has after SIGTERM."
    )
    worker_max_file_bytes: _Whole = _setting(
        104_857_600, "Maximum size of a published file in bytes.", ge=1, le=2**53 - 1
    )
    plugins: dict[str, Any] | Json[dict[str, Any]] = _setting(
        dict, "Plugin settings: a JSON object, keyed by plugin name.", secret=True
    )
    history_keep_days: _Whole = _setting(365, "Days after which a receipt is deleted.", ge=1, le=36_500)
    published_href_template: str = _setting("", "Address of a post: `https://example.org/notes/{slug}`.")
    commit_href_template: str = _setting(
        "", "Address of a commit, for the dashboard: `https://example.org/commit/{commit}`."
    )
    webhook_allow_private: bool = _setting(False, "Allow webhooks to private networks and over http.")
    webhook_urls: Annotated[_Texts, AfterValidator(_check_receivers)] = _setting(
        (),
        "Addresses notified of publications, dead letters, site conditions and the remote's edits.",
        secret=True,
    )
    webhook_secret: str = _setting("", "Key that signs webhooks (Standard Webhooks): `whsec_…`.", secret=True)
    webhook_template: Literal["json", "slack", "discord", "text"] = _setting(
        "json", "Format of the notifications for `BRITER_WEBHOOK_URLS`."
    )
    build_hook_url: Annotated[str, AfterValidator(_check_address)] = _setting(
        "", "Address that gets an empty POST after a push that published a post.", secret=True
    )
    build_hook_min_interval_ms: _Milliseconds = _setting(
        60_000, "Minimum interval of these POSTs in ms. The last push gets one."
    )
    metrics_port: _Port = _setting(0, "Port of the `/metrics` endpoint of `run`. 0 disables it.")
    metrics_host: str = _setting("127.0.0.1", "Address of the `/metrics` endpoint of `run`.")
    metrics_sites: _Texts = _setting(
        (), "Cluster: sites with metrics of their own; `*`: all. Empty: the 20 in trouble, or busiest."
    )
    dashboard_host: str = _setting("127.0.0.1", "Address that `serve` listens on.")
    dashboard_port: _Port = _setting(8320, "Port that `serve` listens on. 0: any free port.")
    dashboard_token: str = _setting(
        "", "Token of the dashboard. Default: a random one in `.git/briter/dashboard.token`.", secret=True
    )
    pull_secret: str = _setting(
        "", "Secret by which a git host's webhook may call `POST /api/pull` of the dashboard.", secret=True
    )
    trusted_proxies: Annotated[_Texts, AfterValidator(_check_networks)] = _setting(
        (), "IP addresses or networks of proxies whose `X-Forwarded-*` headers count."
    )
    database_url: str = _setting(
        "", "Postgres of a cluster: `postgresql://user@host/name`. Empty: a folder.", secret=True
    )
    site: str = _setting("", "Cluster: site that commands act on by default.")
    worker_concurrency: _Whole = _setting(4, "Cluster: sites published at once.", ge=1, le=1_000)
    worker_per_host: _Whole = _setting(
        0, "Cluster: sites of one remote host that a node publishes at once. 0: half of them.", ge=0, le=1_000
    )
    cache_root: _Folder = _setting(
        lambda above: above["storage_root"] / "cache",
        "Cluster: folder of the sites' disposable clones. Default: `cache` in the storage root.",
    )
    _config_path: Path = PrivateAttr(default=Path())
    _identity: str = PrivateAttr(default="")

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: object, info: ValidationInfo) -> object:
        """Take true and false for no value where a number is meant: pydantic takes them for 1 and 0."""
        if cls.model_fields[str(info.field_name)].annotation is bool:
            return value
        if isinstance(value, list):
            return [None if isinstance(each, bool) else each for each in value]
        return None if isinstance(value, bool) else value

    @field_validator(*_TEXTS)
    @classmethod
    def _check_text(cls, text: str, info: ValidationInfo) -> str:
        pattern, accepted = _TEXTS[str(info.field_name)]
        if not re.fullmatch(pattern, text):
            raise ValueError(accepted)
        return text

    @property
    def config_path(self) -> Path:
        """Return where `config.json` was looked for."""
        return self._config_path

    @property
    def history_key(self) -> str:
        """Return the key of the site's history: its identity, not its name; empty on disk."""
        return (self._identity or self.site) if self.database_url else ""

    def of_site(self, name: str, identity: str) -> Settings:
        """Return these settings for the site of this name and identity."""
        settings = self.model_copy(update={"site": name})
        settings._identity = identity  # noqa: SLF001 - this model's
        return settings

    @property
    def folders(self) -> tuple[str, ...]:
        """Return every folder that may be published from: the adapter's, then the added ones."""
        return tuple(dict.fromkeys([*FOLDERS[self.adapter], *self.allowed_paths]))

    def allowlist(
        self, *, more: Callable[[], Iterable[str]] = tuple, private: Iterable[str] = ()
    ) -> Allowlist:
        """Return what may be published: these folders and `more`, without the excluded paths."""
        excluded = (*EXCLUDED, *ADAPTER_EXCLUDED.get(self.adapter, ()), *self.excluded_paths)
        root = "" if self.database_url else str(self.git_worktree)
        return Allowlist(
            self.folders, excluded=excluded, private=private, more=more, adapter=self.adapter, root=root
        )

    @property
    def lock_path(self) -> Path:
        """Return the path of the site's lock."""
        return self.storage_root / "worker.lock"

    @property
    def quarantine_root(self) -> Path:
        """Return the folder that keeps the bytes of files that are not jobs."""
        return self.storage_root / "quarantine"


class _Environment(EnvSettingsSource):
    """Read the variables from `environ`. Names are upper case only, and blank values count as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return _without_blanks({name.lower(): text for name, text in self._environ.items() if name.isupper()})


def _without_blanks(values: Mapping[str, object]) -> dict[str, Any]:
    stripped = {name: value.strip() if isinstance(value, str) else value for name, value in values.items()}
    return {name: value for name, value in stripped.items() if value not in (None, "")}


def _read_config(path: Path) -> dict[str, Any]:
    """Return the values in `config.json` by field name; none if there is no such file."""
    try:
        if path.exists() and not path.is_file():  # a FIFO would block
            raise UsageError(f"{path} is not a regular file", "remove it")
        document = json.loads(path.read_bytes().decode("utf-8-sig"), object_pairs_hook=without_duplicates)
    except FileNotFoundError:
        return {}
    except OSError as error:
        text = os_error_text(error, with_path=False)
        raise UsageError(f"{path} cannot be read: {text}", os_error_fix(error)) from None
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise UsageError(f"{where}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError, MalformedJobError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}, line 1, column 1: expected one JSON object")
    return _without_blanks({name: document.get(to_camel(name)) for name in Settings.model_fields})


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings from `environ` (None: the process environment), `config.json` and the defaults.

    Raises UsageError with one line that names the refused variable or key, its value and what is accepted.
    """
    environment = _Environment(os.environ if environ is None else environ)()
    app_root = _absolute_path(Path(environment.get("app_root", "")))
    path = _absolute_path(Path(environment.get("storage_root", "storage")), app_root) / "config.json"

    def source_of(name: str) -> str:
        return PREFIX + name.upper() if name in environment else f"{to_camel(name)} in {path}"

    return _merge(environment, _read_config(path), source_of, path)


def for_site(settings: Settings, own: Mapping[str, object], *, source: str) -> Settings:
    """Return the node's settings with the values that a site of the cluster has of its own; secrets by place.

    Raises UsageError with one line that names `source`, the key, its value and what is accepted.
    """
    accepted = {to_camel(name): name for name in PER_SITE}
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    values = {}
    for key, value in _without_blanks(own).items():
        if key not in accepted:
            raise UsageError(f"{source}: {key} cannot be set for one site; accepted: {', '.join(accepted)}")
        values[name := accepted[key]] = value
        if not Settings.model_fields[name].repr:
            given.pop(name, None)  # not the node's in place of the site's
            values[name] = _read_secret(value, f"{source}: {key}")
    values = _without_blanks(values)
    return _merge(values, given, lambda name: f"{source}: {to_camel(name)}", settings.config_path)


def _read_secret(place: object, source: str) -> str:
    """Return a secret from its place on this node; empty where the node has none. Raises UsageError."""
    found = re.fullmatch(r"env:((?!BRITER_)\w+)|file:(/.+)", str(place))
    if found is None:  # the value is not shown: it may be the secret itself
        accepted = "env:NAME or file:/PATH, the place of the value on each node"
        raise UsageError(f"{source} is not accepted (not shown here); accepted: {accepted}")
    if found[1]:
        return os.environ.get(found[1], "").strip()
    try:
        return Path(found[2]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _merge(
    upper: dict[str, Any], lower: dict[str, Any], source_of: Callable[[str], str], path: Path
) -> Settings:
    try:
        settings = Settings(_build_sources=((InitSettingsSource(Settings, lower | upper),), {}))
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        name = str(error["loc"][0])
        layer = upper if name in upper else lower
        raise UsageError(_refusal(source_of(name), layer[name], error), _FIXES.get(name, "")) from None
    if settings.adapter == "custom" and not settings.allowed_paths:
        fix = "name them in BRITER_ALLOWED_PATHS (allowedPaths)"
        raise UsageError(f"{source_of('adapter')} is custom, which has no folders of its own", fix)
    if 0 < settings.git_pull_interval_ms < settings.worker_poll_interval_ms:
        source, poll = source_of("git_pull_interval_ms"), settings.worker_poll_interval_ms
        text = f"{source} is {settings.git_pull_interval_ms}, below the poll interval of {poll} ms"
        fix = "set it to 0 or to the poll interval or more, or lower BRITER_WORKER_POLL_INTERVAL_MS"
        raise UsageError(text, fix)
    settings._config_path = path  # noqa: SLF001 - this module's model
    return settings


def _refusal(source: str, value: object, error: ErrorDetails) -> str:
    accepted = accepted_text(error)
    if not Settings.model_fields[str(error["loc"][0])].repr:
        return f"{source} is not accepted (not shown here); accepted: {accepted}"
    shown = one_line(json.dumps(value, ensure_ascii=False, default=str), length=200)
    return f"{source} is {shown}; accepted: {accepted}"


def settings_schema() -> dict[str, Any]:
    """Return the JSON Schema of `config.json`, generated from the model.

    Each key's title is the variable that overrides it; `writeOnly` marks secrets.
    """
    described = Settings.model_json_schema()["properties"]
    properties = {to_camel(name): described[name] for name in Settings.model_fields}
    properties["adapter"]["enum"] = list(FOLDERS)
    return {
        "title": "Briter Worker configuration",
        "description": "The keys of config.json. The variable in each title overrides the key.",
        "type": "object",
        "properties": properties,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    }

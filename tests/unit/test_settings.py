"""The configuration: the environment over config.json over the defaults."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from briter_worker.allowlist import FOLDERS
from briter_worker.errors import UsageError
from briter_worker.settings import PER_SITE, for_site, load_settings, settings_schema

CONTRACT = {
    "BRITER_ADAPTER": "local-mdx",
    "BRITER_ALLOWED_PATHS": (),
    "BRITER_EXCLUDED_PATHS": (),
    "BRITER_GIT_BRANCH": "main",
    "BRITER_GIT_REMOTE": "origin",
    "BRITER_GIT_AUTHOR_NAME": "Briter Worker",
    "BRITER_GIT_AUTHOR_EMAIL": "briter-worker@localhost",
    "BRITER_GIT_TIMEOUT_MS": 120_000,
    "BRITER_GIT_TRANSFER_TIMEOUT_MS": 3_600_000,
    "BRITER_GIT_SSH_KEEP_MS": 60_000,
    "BRITER_GIT_PULL_INTERVAL_MS": 0,
    "BRITER_PULL_SECRET": "",
    "BRITER_GIT_HOST_TOKEN": "",
    "BRITER_GIT_HOST_API": "",
    "BRITER_GIT_SIGNING_FORMAT": "ssh",
    "BRITER_GIT_SIGNING_KEY": "",
    "BRITER_GIT_HOOKS": False,
    "BRITER_GIT_CO_AUTHORS": False,
    "BRITER_WORKER_QUIET_MS": 0,
    "BRITER_WORKER_QUIET_MAX_MS": 60_000,
    "BRITER_WORKER_DRY_RUN": True,
    "BRITER_WORKER_POLL_INTERVAL_MS": 5000,
    "BRITER_WORKER_MAX_ATTEMPTS": 8,
    "BRITER_WORKER_BACKOFF_MS": (60_000, 300_000, 1_800_000),
    "BRITER_WORKER_BACKOFF_JITTER": 0,
    "BRITER_WORKER_LOCK_STALE_MS": 60_000,
    "BRITER_WORKER_SHUTDOWN_TIMEOUT_MS": 300_000,
    "BRITER_WORKER_MAX_FILE_BYTES": 104_857_600,
    "BRITER_PUBLISHED_HREF_TEMPLATE": "",
    "BRITER_PLUGINS": {},
    "BRITER_HISTORY_KEEP_DAYS": 365,
    "BRITER_COMMIT_HREF_TEMPLATE": "",
    "BRITER_WEBHOOK_ALLOW_PRIVATE": False,
    "BRITER_WEBHOOK_URLS": (),
    "BRITER_WEBHOOK_SECRET": "",
    "BRITER_WEBHOOK_TEMPLATE": "json",
    "BRITER_BUILD_HOOK_URL": "",
    "BRITER_BUILD_HOOK_MIN_INTERVAL_MS": 60_000,
    "BRITER_METRICS_PORT": 0,
    "BRITER_METRICS_HOST": "127.0.0.1",
    "BRITER_METRICS_SITES": (),
    "BRITER_DASHBOARD_HOST": "127.0.0.1",
    "BRITER_DASHBOARD_PORT": 8320,
    "BRITER_DASHBOARD_TOKEN": "",
    "BRITER_TRUSTED_PROXIES": (),
    "BRITER_DATABASE_URL": "",
    "BRITER_SITE": "",
    "BRITER_WORKER_CONCURRENCY": 4,
    "BRITER_WORKER_PER_HOST": 0,
}
DATABASE, SECRET = "postgresql://b:c@db/briter?sslmode=verify-full", f"whsec_{'QUFB' * 8}"
# For each variable: a text, what config.json may hold instead of it, and the value both mean.
VALUES: list[tuple[str, str, Any, Any]] = [
    ("BRITER_QUEUE_ROOT", "/srv/q", "/srv/q", Path("/srv/q")),
    ("BRITER_GIT_WORKTREE", "/srv/w", "/srv/w", Path("/srv/w")),
    ("BRITER_CACHE_ROOT", "/srv/c", "/srv/c", Path("/srv/c")),
    ("BRITER_ALLOWED_PATHS", "a/, b/c", ["a/", "b/c"], ("a", "b/c")),
    ("BRITER_EXCLUDED_PATHS", "a/, !*.b", ["a/", "!*.b"], ("a/", "!*.b")),
    ("BRITER_GIT_HOOKS", "true", True, True),
    ("BRITER_GIT_HOOKS", "1", 1, True),
    ("BRITER_WORKER_DRY_RUN", "false", False, False),
    ("BRITER_WORKER_BACKOFF_MS", "0, 1,2", [0, 1, 2], (0, 1, 2)),
    ("BRITER_WORKER_BACKOFF_JITTER", "0.25", 0.25, 0.25),
    ("BRITER_PLUGINS", '{"a": {"b": 1}}', {"a": {"b": 1}}, {"a": {"b": 1}}),
    ("BRITER_WEBHOOK_URLS", "https://a.org/x#published, https://b.org", ["https://a.org/x#published", "https://b.org"],
     ("https://a.org/x#published", "https://b.org")),
    ("BRITER_TRUSTED_PROXIES", "10.0.0.0/8, ::1", ["10.0.0.0/8", "::1"], ("10.0.0.0/8", "::1/128")),
    *((variable, text, text, text) for variable, text in (
        ("BRITER_ADAPTER", "hugo"),
        ("BRITER_GIT_BRANCH", "release-1.0"),
        ("BRITER_GIT_REMOTE", "upstream"),
        ("BRITER_GIT_AUTHOR_NAME", "Zoë 日本"),
        ("BRITER_GIT_AUTHOR_EMAIL", "a@b.c"),
        ("BRITER_WEBHOOK_SECRET", SECRET),
        ("BRITER_WEBHOOK_TEMPLATE", "slack"),
        ("BRITER_BUILD_HOOK_URL", "https://a.org/b?c=d"),
        ("BRITER_DATABASE_URL", DATABASE),
        ("BRITER_SITE", "blog.example.org"),
        ("BRITER_PUBLISHED_HREF_TEMPLATE", "https://e.org/{slug}/"),
    )),
    *((variable, str(number), number, number) for variable, number in (
        ("BRITER_GIT_TIMEOUT_MS", 1000),
        ("BRITER_GIT_TRANSFER_TIMEOUT_MS", 1000),
        ("BRITER_WORKER_POLL_INTERVAL_MS", 100),
        ("BRITER_WORKER_MAX_ATTEMPTS", 1),
        ("BRITER_WORKER_QUIET_MS", 2000),
        ("BRITER_WORKER_QUIET_MAX_MS", 0),
        ("BRITER_WORKER_LOCK_STALE_MS", 1000),
        ("BRITER_WORKER_SHUTDOWN_TIMEOUT_MS", 0),
        ("BRITER_WORKER_MAX_FILE_BYTES", 1),
        ("BRITER_BUILD_HOOK_MIN_INTERVAL_MS", 0),
        ("BRITER_METRICS_PORT", 9320),
        ("BRITER_WORKER_CONCURRENCY", 16),
        ("BRITER_WORKER_PER_HOST", 3),
    )),
]  # fmt: skip


def key(variable: str) -> str:
    first, *others = variable.removeprefix("BRITER_").lower().split("_")
    return first + "".join(word.title() for word in others)


class Site:
    """A site in an empty folder, which is also the current one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / "storage/config.json"
        self.file.parent.mkdir(exist_ok=True)

    def config(self, document: object) -> None:
        self.file.write_text(
            document if isinstance(document, str) else json.dumps(document), encoding="utf-8"
        )

    def value(self, variable: str, environ: dict[str, str] | None = None) -> object:
        return getattr(load_settings(environ or {}), variable.removeprefix("BRITER_").lower())

    def refusal(self, environ: dict[str, str] | None = None) -> str:
        with pytest.raises(UsageError) as refused:
            load_settings(environ or {})
        assert refused.value.message.isprintable()
        return refused.value.message


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.chdir(tmp_path)
    return Site(tmp_path)


def test_the_defaults_are_those_of_the_contract(site: Site) -> None:
    loaded = load_settings({})
    for variable, default in CONTRACT.items():
        assert getattr(loaded, variable.removeprefix("BRITER_").lower()) == default, variable
    assert loaded.app_root == loaded.git_worktree == site.root
    assert loaded.storage_root == site.root / "storage"
    assert loaded.queue_root == site.root / "storage/queue"
    assert loaded.config_path == site.file
    assert loaded.lock_path == site.root / "storage/worker.lock"
    assert loaded.quarantine_root == site.root / "storage/quarantine"


@pytest.mark.parametrize(("variable", "text", "json_value", "meant"), VALUES)
def test_the_environment_overrides_config_json_which_overrides_the_default(
    site: Site, variable: str, text: str, json_value: object, meant: object
) -> None:
    default = site.value(variable)
    assert default != meant
    assert site.value(variable, {variable: f" {text}\n"}) == meant
    assert site.value(variable, {variable: " \t\n"}) == default
    for configured in (json_value, text):
        site.config({key(variable): configured})
        assert site.value(variable) == meant
    assert site.value(variable, {variable: ""}) == meant, "a blank variable hides nothing"
    site.config({key(variable): " "})
    assert site.value(variable) == default


# --- paths


def test_relative_paths_resolve_against_the_app_root(site: Site) -> None:
    relative = {"APP_ROOT": "app", "STORAGE_ROOT": "data", "QUEUE_ROOT": "q", "GIT_WORKTREE": "."}
    loaded = load_settings({f"BRITER_{name}": path for name, path in relative.items()})
    app = site.root / "app"
    assert (loaded.app_root, loaded.git_worktree) == (app, app)
    assert (loaded.storage_root, loaded.queue_root) == (app / "data", app / "q")


def test_roots_in_config_json_move_everything_but_the_file_itself(site: Site) -> None:
    site.config({"storageRoot": "moved", "gitBranch": "live"})
    (site.root / "moved").mkdir()
    (site.root / "moved/config.json").write_text('{"gitBranch": "never read"}')
    loaded = load_settings({})
    assert loaded.queue_root == site.root / "moved/queue"
    assert loaded.git_branch == "live"
    assert loaded.config_path == site.file


# --- config.json


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "line 1, column 1"),
        ('{"gitBranch": "live" x}', "line 1, column 22"),
        ('{\n  "gitBranch": live\n}', "line 2, column 16"),
        ("[]", "line 1, column 1: expected one JSON object"),
        ('"main"', "expected one JSON object"),
        ("null", "expected one JSON object"),
        ("[" * 100_000, "cannot be read"),
        ('{"gitBranch": "main", "gitBranch": "live"}', "the key 'gitBranch' occurs twice"),
    ],
)
def test_a_broken_config_json_is_named_with_line_and_column(site: Site, text: str, where: str) -> None:
    site.config(text)
    line = site.refusal()
    assert str(site.file) in line
    assert where in line


def test_a_config_json_that_is_no_text_or_no_file_is_named(site: Site) -> None:
    site.file.write_bytes(b'{"gitBranch": "\xff"}')
    assert str(site.file) in site.refusal()
    site.file.unlink()
    os.mkfifo(site.file)
    assert f"{site.file} is not a regular file" in site.refusal()
    site.file.unlink()
    site.file.mkdir()
    assert f"{site.file} is not a regular file" in site.refusal()


def test_a_byte_order_mark_is_no_obstacle(site: Site) -> None:
    site.file.write_bytes(b'\xef\xbb\xbf{"gitBranch": "live"}')
    assert site.value("BRITER_GIT_BRANCH") == "live"


# --- values


def test_only_an_explicit_false_turns_the_dry_run_off(site: Site) -> None:
    for text in ("false", "FALSE", "0", "no", "off", " false "):
        assert site.value("BRITER_WORKER_DRY_RUN", {"BRITER_WORKER_DRY_RUN": text}) is False
    for text in ("flase", "2", "-1", "00", "disabled", "null", "none", "0.0", "false;"):
        line = site.refusal({"BRITER_WORKER_DRY_RUN": text})
        assert line.startswith(f'BRITER_WORKER_DRY_RUN is "{text}"; accepted: true or false')


WHOLE = [
    v for v, default in CONTRACT.items() if type(default) is int and not v.endswith(("JITTER", "CONCURRENCY"))
]
# For each variable: values that are refused (config.json may hold any JSON value), and what is accepted.
REFUSED: list[tuple[list[str], list[Any], str]] = [
    (WHOLE, ["5e3", "1.5", "30.0", 30.0, "0x10", "5s", "\u0665", 1.5, [5], {}, True], "a whole number"),
    (WHOLE, ["9" * 5000, -1], ""),
    (["BRITER_GIT_TIMEOUT_MS", "BRITER_WORKER_MAX_ATTEMPTS"], ["0"], "1 or more"),
    (["BRITER_WORKER_POLL_INTERVAL_MS"], ["9", 9], "10 or more"),
    (["BRITER_WORKER_CONCURRENCY"], ["many", "0", "1001", [7]], ""),
    (["BRITER_METRICS_PORT", "BRITER_DASHBOARD_PORT"], ["65536"], "65535 or less"),
    (["BRITER_WORKER_BACKOFF_MS"], ["1,,2", ",", "1;2", "5.0,6", [1.5], [5.0], [None], [[1]], [True]],
     "a whole number"),
    (["BRITER_WORKER_BACKOFF_MS"], ["-1", "99999999999", [], 5, {"a": 1}], ""),
    (["BRITER_WORKER_BACKOFF_JITTER"], ["20%", ".", [0.1], False], "a number"),
    (["BRITER_WORKER_BACKOFF_JITTER"], ["0.51", "-0.1", "nan", math.nan, math.inf], ""),
    (["BRITER_WORKER_DRY_RUN", "BRITER_GIT_HOOKS"], [2, [], [False], {}, "nope"], "true or false"),
    (["BRITER_EXCLUDED_PATHS"], ["!", "a,,b", "#a", "a[", "[z-a]", "[[:alpha:]]"], "a list of patterns"),
    (["BRITER_ALLOWED_PATHS", "BRITER_EXCLUDED_PATHS"], [5, {"a": 1}, ["a", 1], [None], True], "a "),
    (["BRITER_QUEUE_ROOT", "BRITER_GIT_WORKTREE"], [5, True, ["a"], "a\u0000b", "a\ud800b"], "a folder, "),
    (["BRITER_GIT_AUTHOR_NAME"], ["a<b", "a\nb", "a\ud800b", "a\x1b[2J", "a\x85b", "...", "<>"], "one line"),
    (["BRITER_GIT_AUTHOR_EMAIL"], ["a b@c", "<a@b>", "a@b\nx", "a\u00a0@b"], "an address without spaces"),
    (["BRITER_PUBLISHED_HREF_TEMPLATE"], ["https://e.org/", "ftp://e.org/{slug}", "{slug}"],
     "an http(s) address with {slug}"),
    (["BRITER_WEBHOOK_TEMPLATE"], ["xml", 5], "'json', 'slack', 'discord' or 'text'"),
    (["BRITER_SITE"], ["..", ".a", "a/b", "-a", "a b", "a" * 101], "a site's name"),
    (["BRITER_TRUSTED_PROXIES"], ["proxy", "10.0.0.0/33", "10.0.0.1,,"], "a list of IP addresses"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "values", "accepted"),
    [(variable, values, accepted) for variables, values, accepted in REFUSED for variable in variables],
)
def test_a_refused_value_is_named_with_its_source_and_what_is_accepted(
    site: Site, variable: str, values: list[Any], accepted: str
) -> None:
    for value in values:
        site.config({key(variable): value})
        lines = {f"{key(variable)} in {site.file}": site.refusal()}
        site.config({})
        if isinstance(value, str):
            lines[variable] = site.refusal({variable: value})
        for source, line in lines.items():
            assert line.startswith(f"{source} is "), value
            assert f"; accepted: {accepted}" in line, value


# --- git


GOOD_NAMES = ["feature/x", "release-1.0", "v1", "a_b", "2026", "a/b/c", "x.y.z", "lock", "main.locked", "a-b"]
BAD_NAMES = [
    "+main", ":other", "main:other", "refs/heads/*:refs/heads/*", "refs/heads/main", "--x", "-x",
    "--receive-pack=x", "a b", "a..b", "@{u}", "@", "a@{1}", "main.lock", "a.lock/b", "a/", "/a", "a//b",
    ".a", "a.", "a/.b", "a./b", "a/-b", "*", "a*", "a?", "a[b", "a~1", "a^", "a\\b", "HEAD", "a\x7f", "a\nb",
    "ma\u0131n", "\u043cain", "x" * 201, "https://user:secret@example.org/r.git", "git@example.org:r.git",
    "../other", "a/../b", "$(id)", "a;b",
]  # fmt: skip


@pytest.mark.parametrize("variable", ["BRITER_GIT_BRANCH", "BRITER_GIT_REMOTE"])
def test_a_plain_name_is_a_branch_or_a_remote_and_what_could_be_an_option_or_a_refspec_is_neither(
    site: Site, variable: str
) -> None:
    for name in GOOD_NAMES:
        assert site.value(variable, {variable: name}) == name
    for name in BAD_NAMES:
        assert site.refusal({variable: name}).startswith(f"{variable} is "), name


_PIECES = ["a", "b1", "main", "/", "/", "-", ".", "_", ".lock", "..", "@", "+", "HEAD", "refs/"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6).map("".join))
def test_every_accepted_branch_is_one_that_git_accepts_and_reads_as_itself(site: Site, name: str) -> None:
    try:
        branch = load_settings({"BRITER_GIT_BRANCH": name}).git_branch
    except UsageError:
        return
    command = ["git", "check-ref-format", "--branch", branch]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{name}\n"
    assert "+" not in name
    assert site.value("BRITER_GIT_REMOTE", {"BRITER_GIT_REMOTE": name}) == name


def test_credentials_in_a_wrong_value_are_not_repeated(site: Site) -> None:
    for value in (
        "https://user:s3cret@example.org/r.git",
        "https://s3cret@example.org/r",
        "x" * 190 + " token=s3cret",
    ):
        assert "s3cret" not in site.refusal({"BRITER_GIT_REMOTE": value})
        site.config({"gitRemote": value})
        assert "s3cret" not in site.refusal()
        site.config({})


# --- what may be published


@pytest.mark.usefixtures("site")
def test_the_allowed_paths_are_added_to_the_adapters_folders() -> None:
    loaded = load_settings({"BRITER_ADAPTER": "git-target", "BRITER_ALLOWED_PATHS": "notes/,content, media"})
    assert loaded.allowed_paths == ("notes", "content", "media")
    assert loaded.folders == ("content", "public/uploads", "notes", "media")


def test_an_unknown_adapter_is_answered_with_the_accepted_ones(site: Site) -> None:
    line = site.refusal({"BRITER_ADAPTER": "wordpress"})
    assert line == f'BRITER_ADAPTER is "wordpress"; accepted: one of {", ".join(FOLDERS)}'
    site.config({"adapter": ["hugo"]})
    assert site.refusal().startswith(f"adapter in {site.file} is ")


def test_a_custom_site_must_name_its_folders(site: Site) -> None:
    with pytest.raises(UsageError) as refused:
        load_settings({"BRITER_ADAPTER": "custom"})
    assert "BRITER_ADAPTER is custom" in refused.value.message
    assert "BRITER_ALLOWED_PATHS" in refused.value.fix
    site.config({"allowedPaths": "notes"})
    assert load_settings({"BRITER_ADAPTER": "custom"}).folders == ("notes",)


@pytest.mark.parametrize(
    "paths", [".", "/srv", "..", "a,../b", "a,,b", "a//b", ".git", "a/.GIT", "a\\b", "./content", "a\x00"]
)
def test_a_folder_that_would_open_too_much_stops_the_start(site: Site, paths: str) -> None:
    line = site.refusal({"BRITER_ALLOWED_PATHS": paths})
    assert line.startswith("BRITER_ALLOWED_PATHS is ")
    assert "cannot be an allowed folder" in line


# --- secrets


@pytest.mark.parametrize(
    ("variable", "wrong"),
    [
        ("BRITER_DASHBOARD_TOKEN", "fifteen-letters"),
        ("BRITER_DASHBOARD_TOKEN", "with a space in it"),
        ("BRITER_DASHBOARD_TOKEN", "x" * 201),
        ("BRITER_DATABASE_URL", "mysql://a/b"),
        ("BRITER_DATABASE_URL", "host=db password=canary"),
        ("BRITER_WEBHOOK_SECRET", "whsec_short"),
        ("BRITER_WEBHOOK_URLS", "http://example.org/canary"),
        ("BRITER_PLUGINS", "[1]"),
    ],
)
def test_a_refused_secret_is_not_shown(site: Site, variable: str, wrong: str) -> None:
    assert site.refusal({variable: wrong}).startswith(f"{variable} is not accepted")
    assert wrong not in site.refusal({variable: wrong})
    site.config({key(variable): wrong})
    assert wrong not in site.refusal()
    assert settings_schema()["properties"][key(variable)]["writeOnly"] is True
    assert "writeOnly" not in settings_schema()["properties"]["dashboardHost"]


def test_secrets_are_not_shown_when_settings_are_printed() -> None:
    assert "canary" not in repr(load_settings({"BRITER_DATABASE_URL": "postgresql://u:canary@db/x"}))


# --- the cluster


def test_what_a_site_has_of_its_own_lies_over_the_workers_settings(site: Site) -> None:
    loaded = load_settings({"BRITER_WORKER_MAX_ATTEMPTS": "3", "BRITER_WORKER_DRY_RUN": "true"})
    own = {"adapter": "hugo", "allowedPaths": ["media"], "workerDryRun": "false", "workerBackoffMs": "5, 6"}
    laid = for_site(loaded, own, source="the site blog")
    assert (laid.adapter, laid.allowed_paths, laid.worker_dry_run) == ("hugo", ("media",), False)
    assert (laid.worker_backoff_ms, laid.worker_max_attempts) == ((5, 6), 3)
    assert loaded.adapter == "local-mdx"
    assert (laid.storage_root, laid.config_path) == (site.root / "storage", site.file)


def test_no_site_has_a_place_on_the_worker_of_its_own_and_its_secrets_are_places_on_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = settings_schema()["properties"]
    refused = {name for name in properties if name.endswith(("Root", "Worktree", "Host", "Port"))}
    refused |= {"databaseUrl", "dashboardToken", "webhookSecret", "pullSecret", "gitHostToken", "gitHostApi"}
    assert not {key(f"BRITER_{name}") for name in PER_SITE} & refused
    node = load_settings({"BRITER_BUILD_HOOK_URL": "https://node.example.org/x"})
    file = tmp_path / "build"
    own = {"buildHookUrl": f"file:{file}", "webhookUrls": "env:SHOP_HOOKS"}
    assert for_site(node, own, source="the site shop").build_hook_url == ""  # not the node's
    for address in ("https://a.example.org/1", "https://a.example.org/2"):  # rotated without a restart
        file.write_text(f"{address}\n")
        monkeypatch.setenv("SHOP_HOOKS", f"{address}, {address}#published")
        laid = for_site(node, own, source="the site shop")
        assert (laid.build_hook_url, laid.webhook_urls[0]) == (address, address)
    with pytest.raises(UsageError, match="accepted: env:NAME or file:/PATH") as wrong:
        for_site(node, {"buildHookUrl": "https://a.example.org/canary"}, source="the site shop")
    assert "canary" not in str(wrong.value)


def test_the_schema_names_every_variable_of_the_contract_in_camel_case() -> None:
    properties = settings_schema()["properties"]
    roots = {"appRoot", "storageRoot", "queueRoot", "gitWorktree", "cacheRoot"}
    assert set(properties) == {key(variable) for variable in CONTRACT} | roots
    used = load_settings({})
    for name, described in properties.items():
        assert key(described["title"]) == name
        if "default" in described:
            value = getattr(used, described["title"].removeprefix("BRITER_").lower())
            assert json.loads(json.dumps(value)) == described["default"], name
        assert described["description"]
    assert properties["adapter"]["enum"] == list(FOLDERS)
    assert properties["workerBackoffJitter"]["maximum"] == 0.5
    assert {"type": "string"} in properties["allowedPaths"]["anyOf"]
    json.dumps(settings_schema())

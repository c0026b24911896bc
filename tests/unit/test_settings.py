"""What the worker was told: three layers, checked as a whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from briter_worker.adapters import names
from briter_worker.errors import UsageError
from briter_worker.settings import for_site, load_settings, parse_concurrency, per_site, settings_schema

CONTRACT = {
    "BRITER_ADAPTER": "local-mdx",
    "BRITER_ALLOWED_PATHS": (),
    "BRITER_GIT_BRANCH": "main",
    "BRITER_GIT_REMOTE": "origin",
    "BRITER_GIT_AUTHOR_NAME": "Briter Worker",
    "BRITER_GIT_AUTHOR_EMAIL": "briter-worker@localhost",
    "BRITER_GIT_TIMEOUT_MS": 120_000,
    "BRITER_GIT_HOOKS": False,
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
    "BRITER_HISTORY_STALE_DAYS": 30,
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
    "BRITER_DASHBOARD_HOST": "127.0.0.1",
    "BRITER_DASHBOARD_PORT": 8320,
    "BRITER_DASHBOARD_TOKEN": "",
    "BRITER_DATABASE_URL": "",
    "BRITER_SITE": "",
    "BRITER_WORKER_CONCURRENCY": 4,
}
# For each variable: a text, what config.json may hold instead of it, and the value both mean.
VALUES: list[tuple[str, str, Any, Any]] = [
    ("BRITER_QUEUE_ROOT", "/srv/q", "/srv/q", Path("/srv/q")),
    ("BRITER_GIT_WORKTREE", "/srv/w", "/srv/w", Path("/srv/w")),
    ("BRITER_ADAPTER", "hugo", "hugo", "hugo"),
    ("BRITER_ALLOWED_PATHS", "a/, b/c", ["a/", "b/c"], ("a", "b/c")),
    ("BRITER_GIT_BRANCH", "release-1.0", "release-1.0", "release-1.0"),
    ("BRITER_GIT_REMOTE", "upstream", "upstream", "upstream"),
    ("BRITER_GIT_AUTHOR_NAME", "Zoë 日本", "Zoë 日本", "Zoë 日本"),
    ("BRITER_GIT_AUTHOR_EMAIL", "a@b.c", "a@b.c", "a@b.c"),
    ("BRITER_GIT_TIMEOUT_MS", "1000", 1000, 1000),
    ("BRITER_GIT_HOOKS", "true", True, True),
    ("BRITER_WORKER_DRY_RUN", "false", False, False),
    ("BRITER_WORKER_POLL_INTERVAL_MS", "100", 100, 100),
    ("BRITER_WORKER_MAX_ATTEMPTS", "1", 1, 1),
    ("BRITER_WORKER_BACKOFF_MS", "0, 1,2", [0, 1, 2], (0, 1, 2)),
    ("BRITER_WORKER_BACKOFF_JITTER", "0.25", 0.25, 0.25),
    ("BRITER_WORKER_LOCK_STALE_MS", "1000", 1000, 1000),
    ("BRITER_WORKER_SHUTDOWN_TIMEOUT_MS", "0", 0, 0),
    ("BRITER_WORKER_MAX_FILE_BYTES", "1", 1, 1),
    ("BRITER_PLUGINS", '{"a": {"b": 1}}', {"a": {"b": 1}}, {"a": {"b": 1}}),
    (
        "BRITER_WEBHOOK_URLS",
        "https://a.org/x#published, https://b.org",
        ["https://a.org/x#published", "https://b.org"],
        ("https://a.org/x#published", "https://b.org"),
    ),
    ("BRITER_WEBHOOK_SECRET", f"whsec_{'QUFB' * 8}", f"whsec_{'QUFB' * 8}", f"whsec_{'QUFB' * 8}"),
    ("BRITER_WEBHOOK_TEMPLATE", "slack", "slack", "slack"),
    ("BRITER_BUILD_HOOK_URL", "https://a.org/b?c=d", "https://a.org/b?c=d", "https://a.org/b?c=d"),
    ("BRITER_BUILD_HOOK_MIN_INTERVAL_MS", "0", 0, 0),
    ("BRITER_METRICS_PORT", "9320", 9320, 9320),
    (
        "BRITER_DATABASE_URL",
        "postgresql://b:c@db/briter?sslmode=verify-full",
        "postgresql://b:c@db/briter?sslmode=verify-full",
        "postgresql://b:c@db/briter?sslmode=verify-full",
    ),
    ("BRITER_SITE", "blog.example.org", "blog.example.org", "blog.example.org"),
    ("BRITER_WORKER_CONCURRENCY", "16", 16, 16),
    ("BRITER_CACHE_ROOT", "/srv/c", "/srv/c", Path("/srv/c")),
    (
        "BRITER_PUBLISHED_HREF_TEMPLATE",
        "https://e.org/{slug}/",
        "https://e.org/{slug}/",
        "https://e.org/{slug}/",
    ),
]


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
        line = str(refused.value)
        assert line.isprintable()
        return line


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


def test_a_worker_that_was_told_nothing_runs_dry(site: Site) -> None:
    assert site.value("BRITER_WORKER_DRY_RUN") is True


@pytest.mark.parametrize(("variable", "text", "json_value", "meant"), VALUES)
def test_the_environment_overrides_config_json_which_overrides_the_default(
    site: Site, variable: str, text: str, json_value: object, meant: object
) -> None:
    default = site.value(variable)
    assert default != meant
    assert site.value(variable, {variable: text}) == meant
    site.config({key(variable): json_value})
    assert site.value(variable) == meant
    site.config({key(variable): text})
    assert site.value(variable) == meant
    if default:
        again = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert site.value(variable, {variable: again}) == default


@pytest.mark.parametrize("blank", ["", " ", "\t \n"])
@pytest.mark.parametrize(("variable", "text", "_json", "meant"), VALUES)
def test_a_blank_variable_hides_neither_config_json_nor_the_default(
    site: Site, variable: str, text: str, _json: object, meant: object, blank: str
) -> None:
    default = site.value(variable)
    assert site.value(variable, {variable: blank}) == default
    site.config({key(variable): text})
    assert site.value(variable, {variable: blank}) == meant
    assert site.value(variable, {variable: f" {text}\n"}) == meant


@pytest.mark.parametrize("nothing", [None, "", "  "])
@pytest.mark.parametrize("variable", [value[0] for value in VALUES])
def test_null_or_a_blank_text_in_config_json_hides_no_default(
    site: Site, variable: str, nothing: str | None
) -> None:
    default = site.value(variable)
    site.config({key(variable): nothing})
    assert site.value(variable) == default


def test_blank_roots_do_not_move_config_json(site: Site) -> None:
    site.config({"gitBranch": "live"})
    assert site.value("BRITER_GIT_BRANCH", {"BRITER_APP_ROOT": " ", "BRITER_STORAGE_ROOT": ""}) == "live"


def test_unknown_keys_and_variables_are_ignored(site: Site) -> None:
    site.config(
        {
            "gitbranch": "a",
            "git_branch": "b",
            "BRITER_GIT_BRANCH": "c",
            "theme": {"dark": True},
            "configPath": "/x",
        }
    )
    environ = {"briter_git_branch": "d", "GIT_BRANCH": "e", "BRITER_CONFIG_PATH": "/x", "BRITER_X": "1"}
    assert load_settings(environ).git_branch == "main"
    assert load_settings(environ).config_path == site.file


def test_the_process_environment_is_read_when_none_is_given(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRITER_GIT_BRANCH", "live")
    monkeypatch.setenv("GIT_REMOTE", "elsewhere")
    assert load_settings().git_branch == "live"
    assert load_settings().git_remote == "origin"
    assert site.value("BRITER_GIT_BRANCH") == "main"


def test_settings_cannot_be_changed(site: Site) -> None:
    loaded = load_settings({"BRITER_APP_ROOT": str(site.root)})
    with pytest.raises(AttributeError, match="worker_dry_run"):
        loaded.worker_dry_run = False  # type: ignore[misc]


# --- paths


def test_relative_paths_resolve_against_the_app_root(site: Site) -> None:
    loaded = load_settings(
        {
            "BRITER_APP_ROOT": "app",
            "BRITER_STORAGE_ROOT": "data",
            "BRITER_QUEUE_ROOT": "q",
            "BRITER_GIT_WORKTREE": ".",
        }
    )
    app = site.root / "app"
    assert (loaded.app_root, loaded.storage_root, loaded.queue_root, loaded.git_worktree) == (
        app,
        app / "data",
        app / "q",
        app,
    )


def test_the_queue_follows_the_storage_root(site: Site) -> None:
    loaded = load_settings({"BRITER_STORAGE_ROOT": "/var/lib/briter"})
    assert loaded.queue_root == Path("/var/lib/briter/queue")
    assert loaded.lock_path == Path("/var/lib/briter/worker.lock")
    assert loaded.git_worktree == site.root


def test_dots_after_a_symlink_mean_what_the_file_system_says(site: Site) -> None:
    (site.root / "releases/7").mkdir(parents=True)
    (site.root / "current").symlink_to("releases/7")
    environ = {"BRITER_APP_ROOT": "current", "BRITER_STORAGE_ROOT": "../shared"}
    loaded = load_settings(environ)
    assert loaded.app_root == site.root / "current"
    assert loaded.storage_root == site.root / "releases/shared"
    assert loaded.config_path == site.root / "releases/shared/config.json"


def test_config_json_lies_in_the_storage_root_that_the_environment_names(site: Site) -> None:
    elsewhere = site.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text('{"gitBranch": "live"}')
    assert site.value("BRITER_GIT_BRANCH", {"BRITER_STORAGE_ROOT": "elsewhere"}) == "live"
    assert site.value("BRITER_GIT_BRANCH") == "main"


def test_roots_in_config_json_move_everything_but_the_file_itself(site: Site) -> None:
    site.config({"storageRoot": "moved", "gitBranch": "live"})
    (site.root / "moved").mkdir()
    (site.root / "moved/config.json").write_text('{"gitBranch": "never read"}')
    loaded = load_settings({})
    assert loaded.queue_root == site.root / "moved/queue"
    assert loaded.git_branch == "live"
    assert loaded.config_path == site.file


def test_a_vanished_current_folder_is_a_matter_of_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    here = Path.cwd()
    os.chdir(gone)
    gone.rmdir()
    try:
        with pytest.raises(UsageError, match="set BRITER_APP_ROOT"):
            load_settings({})
        assert load_settings({"BRITER_APP_ROOT": str(tmp_path)}).app_root == tmp_path
    finally:
        os.chdir(here)


# --- config.json


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "line 1, column 1"),
        ('{"gitBranch": "live",}', "line 1, column 22"),
        ('{\n  "gitBranch": live\n}', "line 2, column 16"),
        ("[]", "line 1, column 1: expected one JSON object"),
        ('"main"', "expected one JSON object"),
        ("null", "expected one JSON object"),
        ("[" * 100_000, "cannot be read"),
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
    assert f"{site.file} is no file" in site.refusal()
    site.file.unlink()
    site.file.mkdir()
    assert f"{site.file} is no file" in site.refusal()


def test_a_storage_root_that_is_a_file_is_named(site: Site) -> None:
    (site.root / "taken").write_text("")
    assert "taken/config.json cannot be read" in site.refusal({"BRITER_STORAGE_ROOT": "taken"})


def test_a_byte_order_mark_is_no_obstacle(site: Site) -> None:
    site.file.write_bytes(b'\xef\xbb\xbf{"gitBranch": "live"}')
    assert site.value("BRITER_GIT_BRANCH") == "live"


# --- values


@pytest.mark.parametrize("text", ["false", "FALSE", "False", "0", "no", "No", "off", " false "])
def test_only_an_explicit_false_turns_the_dry_run_off(site: Site, text: str) -> None:
    assert site.value("BRITER_WORKER_DRY_RUN", {"BRITER_WORKER_DRY_RUN": text}) is False


@pytest.mark.parametrize("text", ["true", "TRUE", "1", "yes", "Yes", "on"])
def test_an_explicit_true_keeps_it_on(site: Site, text: str) -> None:
    site.config({"workerDryRun": False})
    assert site.value("BRITER_WORKER_DRY_RUN", {"BRITER_WORKER_DRY_RUN": text}) is True


@pytest.mark.parametrize(
    "text", ["flase", "n", "f", "2", "-1", "00", "disabled", "null", "none", "0.0", "false;"]
)
def test_what_is_neither_true_nor_false_stops_the_start(site: Site, text: str) -> None:
    line = site.refusal({"BRITER_WORKER_DRY_RUN": text})
    assert line == f'BRITER_WORKER_DRY_RUN is "{text}"; accepted: true, false, 1, 0, yes, no, on or off'


@pytest.mark.parametrize("value", [0.0, 1.0, 2, [], [False], {}, "nope"])
def test_in_config_json_too(site: Site, value: object) -> None:
    site.config({"workerDryRun": value})
    assert site.refusal().startswith(
        f"workerDryRun in {site.file} is {json.dumps(value)}; accepted: true, false"
    )


def test_config_json_may_say_zero_or_one(site: Site) -> None:
    site.config({"workerDryRun": 0, "gitHooks": 1})
    assert (load_settings({}).worker_dry_run, load_settings({}).git_hooks) == (False, True)


NUMBERS = [
    v for v, default in CONTRACT.items() if type(default) is int and not v.endswith(("JITTER", "CONCURRENCY"))
]


@pytest.mark.parametrize(
    "text", ["5e3", "1.5", "-1", "+5", "1_000", "0x10", "5s", "\u0665", "1 000", "1,000", "9" * 30, "abc"]
)
@pytest.mark.parametrize("variable", NUMBERS)
def test_a_number_that_is_not_plainly_whole_is_refused_with_its_range(
    site: Site, variable: str, text: str
) -> None:
    line = site.refusal({variable: text})
    assert re.fullmatch(rf'{variable} is "{re.escape(text)}"; accepted: a whole number from \d+ to \d+', line)


@pytest.mark.parametrize("value", [1.5, -1, True, "5e3", [5], {}, 1e300])
@pytest.mark.parametrize("variable", NUMBERS)
def test_so_is_one_in_config_json(site: Site, variable: str, value: object) -> None:
    site.config({key(variable): value})
    line = site.refusal()
    assert line.startswith(f"{key(variable)} in {site.file} is ")
    assert "accepted: a whole number from " in line


@pytest.mark.parametrize(
    ("variable", "least"),
    [
        ("BRITER_GIT_TIMEOUT_MS", 1),
        ("BRITER_WORKER_POLL_INTERVAL_MS", 10),
        ("BRITER_WORKER_MAX_ATTEMPTS", 1),
        ("BRITER_WORKER_LOCK_STALE_MS", 1),
        ("BRITER_WORKER_SHUTDOWN_TIMEOUT_MS", 0),
        ("BRITER_WORKER_MAX_FILE_BYTES", 1),
    ],
)
def test_each_number_has_a_least_value(site: Site, variable: str, least: int) -> None:
    assert site.value(variable, {variable: str(least)}) == least
    if least:
        assert f"from {least} to " in site.refusal({variable: str(least - 1)})


@pytest.mark.parametrize(
    "text", ["1,,2", ",", "1,", "1;2", "1 2", "-1", "1.5", "1e3", "a", "99999999999", "[1,2]"]
)
def test_a_backoff_is_a_list_of_whole_numbers(site: Site, text: str) -> None:
    line = site.refusal({"BRITER_WORKER_BACKOFF_MS": text})
    assert line.startswith(f'BRITER_WORKER_BACKOFF_MS is "{text}"; accepted: a list of whole numbers')


@pytest.mark.parametrize("value", [[], [True], [1.5], [None], [1, -1], 5, {"a": 1}, [[1]]])
def test_a_backoff_in_config_json_too(site: Site, value: object) -> None:
    site.config({"workerBackoffMs": value})
    assert f"is {json.dumps(value)}; accepted: a list of whole numbers" in site.refusal()


@pytest.mark.parametrize(("text", "meant"), [("0", 0), ("0.5", 0.5), (".2", 0.2), ("0.20", 0.2)])
def test_jitter_is_a_fraction(site: Site, text: str, meant: float) -> None:
    assert site.value("BRITER_WORKER_BACKOFF_JITTER", {"BRITER_WORKER_BACKOFF_JITTER": text}) == meant


@pytest.mark.parametrize("text", ["0.51", "1", "-0.1", "nan", "inf", "1e-1", "20%", "0,2", "."])
def test_jitter_goes_up_to_a_half(site: Site, text: str) -> None:
    line = site.refusal({"BRITER_WORKER_BACKOFF_JITTER": text})
    assert line.startswith("BRITER_WORKER_BACKOFF_JITTER is ")
    assert line.endswith("; accepted: a number from 0 to 0.5")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "true", "[0.1]"])
def test_jitter_in_config_json_too(site: Site, value: str) -> None:
    site.config(f'{{"workerBackoffJitter": {value}}}')
    assert "accepted: a number from 0 to 0.5" in site.refusal()


# --- git


GOOD_NAMES = [
    "main",
    "feature/x",
    "release-1.0",
    "v1",
    "a_b",
    "2026",
    "a/b/c",
    "x.y.z",
    "lock",
    "main.locked",
    "-".join("ab"),
]
BAD_NAMES = [
    "+main", ":other", "main:other", "refs/heads/*:refs/heads/*", "refs/heads/main", "--x", "-x",
    "--receive-pack=x", "a b", "a..b", "@{u}", "@", "a@{1}", "main.lock", "a.lock/b", "a/", "/a", "a//b",
    ".a", "a.", "a/.b", "a./b", "a/-b", "*", "a*", "a?", "a[b", "a~1", "a^", "a\\b", "HEAD", "a\x7f", "a\nb",
    "ma\u0131n", "\u043cain", "x" * 201, "https://user:secret@example.org/r.git", "git@example.org:r.git",
    "../other", "a/../b", "$(id)", "a;b",
]  # fmt: skip


@pytest.mark.parametrize("variable", ["BRITER_GIT_BRANCH", "BRITER_GIT_REMOTE"])
@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_plain_name_is_a_branch_or_a_remote(site: Site, variable: str, name: str) -> None:
    assert site.value(variable, {variable: name}) == name


@pytest.mark.parametrize("variable", ["BRITER_GIT_BRANCH", "BRITER_GIT_REMOTE"])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_could_be_an_option_or_a_refspec_is_neither(site: Site, variable: str, name: str) -> None:
    assert site.refusal({variable: name}).startswith(f"{variable} is ")


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


def test_a_secret_is_not_shown_by_cutting_a_long_value_in_the_middle_of_it(site: Site) -> None:
    for length in range(170, 200):
        assert "s3cret" not in site.refusal({"BRITER_GIT_REMOTE": "x" * length + " https://u:s3cret@h/"})


def test_a_long_wrong_value_is_cut(site: Site) -> None:
    assert len(site.refusal({"BRITER_GIT_BRANCH": "+" * 5000})) < 400


@pytest.mark.parametrize(
    "name", ["a<b", "a>", "a\nb", "a\ud800b", "a\x00b", "a\x1b[2J", "a\x85b", "...", "<>"]
)
def test_an_author_name_that_would_break_the_commit_is_refused(site: Site, name: str) -> None:
    assert site.refusal({"BRITER_GIT_AUTHOR_NAME": name}).startswith("BRITER_GIT_AUTHOR_NAME is ")


@pytest.mark.parametrize("email", ["a b@c", "<a@b>", "a@b>", "a@b\nx", "a\x00@b", "a\u00a0@b", "a\u2028b"])
def test_an_author_email_that_would_break_the_commit_is_refused(site: Site, email: str) -> None:
    assert site.refusal({"BRITER_GIT_AUTHOR_EMAIL": email}).startswith("BRITER_GIT_AUTHOR_EMAIL is ")


@pytest.mark.parametrize(
    "href",
    ["https://e.org/notes/", "ftp://e.org/{slug}", "javascript:alert('{slug}')", "/notes/{slug}", "{slug}",
     "https://{slug}", "https:///{slug}", "https://e.org/{slug} x", "https://e.org/{ slug }", "https://e.org/\x1b{slug}"],
)  # fmt: skip
def test_a_link_template_is_an_http_address_with_a_slug(site: Site, href: str) -> None:
    assert site.refusal({"BRITER_PUBLISHED_HREF_TEMPLATE": href}).startswith(
        "BRITER_PUBLISHED_HREF_TEMPLATE is "
    )


@pytest.mark.parametrize(
    "href", ["http://localhost:8080/{slug}", "https://e.org/a?p={slug}#x", "https://[::1]/{slug}"]
)
def test_any_http_address_with_a_slug_will_do(site: Site, href: str) -> None:
    environ = {"BRITER_PUBLISHED_HREF_TEMPLATE": href}
    assert site.value("BRITER_PUBLISHED_HREF_TEMPLATE", environ) == href


# --- what may be published


@pytest.mark.usefixtures("site")
def test_the_allowed_paths_are_added_to_the_adapters_folders() -> None:
    loaded = load_settings({"BRITER_ADAPTER": "git-target", "BRITER_ALLOWED_PATHS": "notes/,content, media"})
    assert loaded.allowed_paths == ("notes", "content", "media")
    assert loaded.folders == ("content", "public/uploads", "notes", "media")


def test_an_unknown_adapter_is_answered_with_the_accepted_ones(site: Site) -> None:
    line = site.refusal({"BRITER_ADAPTER": "wordpress"})
    assert line == f'BRITER_ADAPTER is "wordpress"; accepted: one of {", ".join(names())}'
    site.config({"adapter": ["hugo"]})
    assert site.refusal().startswith(f"adapter in {site.file} is ")


def test_a_custom_site_must_name_its_folders(site: Site) -> None:
    line = site.refusal({"BRITER_ADAPTER": "custom"})
    assert "BRITER_ADAPTER is custom" in line
    assert "BRITER_ALLOWED_PATHS" in line
    site.config({"allowedPaths": "notes"})
    assert load_settings({"BRITER_ADAPTER": "custom"}).folders == ("notes",)


@pytest.mark.parametrize(
    "paths", [".", "/", "/srv/site", "..", "a,../b", "a,,b", ".git", "a/.GIT", "a\\b", "./content"]
)
def test_a_folder_that_would_open_too_much_stops_the_start(site: Site, paths: str) -> None:
    line = site.refusal({"BRITER_ALLOWED_PATHS": paths})
    assert line.startswith("BRITER_ALLOWED_PATHS is ")
    assert "cannot be an allowed folder" in line


@pytest.mark.parametrize("value", [5, {"a": 1}, ["a", 1], [None], True])
def test_allowed_paths_in_config_json_are_texts(site: Site, value: object) -> None:
    site.config({"allowedPaths": value})
    assert "accepted: a list of folders" in site.refusal()


@pytest.mark.parametrize("value", [5, True, ["a"], "a\u0000b", "a\ud800b"])
@pytest.mark.parametrize("name", ["appRoot", "storageRoot", "queueRoot", "gitWorktree"])
def test_a_root_is_a_text(site: Site, name: str, value: object) -> None:
    site.config({name: value})
    assert site.refusal().startswith(f"{name} in {site.file} is ")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    variable=st.sampled_from([value[0] for value in VALUES]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    ),
)
def test_any_json_value_is_either_taken_or_refused_in_one_line_with_its_key(
    site: Site, variable: str, value: object
) -> None:
    site.config({key(variable): value})
    try:
        load_settings({})
    except UsageError as refused:
        assert str(refused).isprintable()  # noqa: PT017 - either outcome is right
        assert key(variable) in str(refused) or "custom" in str(refused)  # noqa: PT017


# --- secrets


@pytest.mark.parametrize("wrong", ["short", "fifteen-letters", "with a space in it", "x" * 201])
def test_a_token_that_is_not_accepted_is_not_shown(site: Site, wrong: str) -> None:
    line = site.refusal({"BRITER_DASHBOARD_TOKEN": wrong})
    assert line.startswith("BRITER_DASHBOARD_TOKEN is not accepted")
    assert "at least 16 characters" in line
    assert wrong not in line
    site.config(json.dumps({"dashboardToken": wrong}))
    assert wrong not in site.refusal()


def test_the_schema_says_what_is_a_secret() -> None:
    properties = settings_schema()["properties"]
    assert properties["dashboardToken"]["writeOnly"] is True
    assert "writeOnly" not in properties["dashboardHost"]


# --- the cluster


@pytest.mark.parametrize("nonsense", ["many", "0", "-1", "2.5", "1001"])
def test_a_concurrency_that_makes_no_sense_falls_back_with_a_warning(site: Site, nonsense: str) -> None:
    variable = "BRITER_WORKER_CONCURRENCY"
    loaded = load_settings({variable: nonsense})
    assert loaded.worker_concurrency == 4
    (warning,) = loaded.warnings
    assert warning.startswith(f'{variable} is "{nonsense}"; accepted: a whole number from 1 to 1000')
    site.config({"workerConcurrency": 7})
    assert site.value(variable, {variable: nonsense}) == 7
    site.config({"workerConcurrency": [7]})
    assert site.value(variable) == 4
    assert parse_concurrency(nonsense) is None
    assert parse_concurrency("12") == 12


def test_what_makes_sense_warns_of_nothing() -> None:
    assert load_settings({"BRITER_WORKER_CONCURRENCY": "9"}).warnings == ()


@pytest.mark.parametrize("wrong", ["mysql://a/b", "host=db password=canary", "postgres://a:canary@b c"])
def test_an_address_of_the_database_that_is_none_is_refused_and_not_shown(site: Site, wrong: str) -> None:
    line = site.refusal({"BRITER_DATABASE_URL": wrong})
    assert line.startswith("BRITER_DATABASE_URL is not accepted")
    assert wrong not in line


@pytest.mark.parametrize("wrong", ["..", ".a", "a/b", "-a", "a b", "a" * 101])
def test_a_sites_name_can_name_a_folder(site: Site, wrong: str) -> None:
    assert site.refusal({"BRITER_SITE": wrong}).startswith("BRITER_SITE is ")


def test_what_a_site_has_of_its_own_lies_over_the_workers_settings(site: Site) -> None:
    loaded = load_settings({"BRITER_WORKER_MAX_ATTEMPTS": "3", "BRITER_WORKER_DRY_RUN": "true"})
    own = {"adapter": "hugo", "allowedPaths": ["media"], "workerDryRun": "false", "workerBackoffMs": "5, 6"}
    laid = for_site(loaded, own, source="the site blog")
    assert (laid.adapter, laid.allowed_paths, laid.worker_dry_run) == ("hugo", ("media",), False)
    assert (laid.worker_backoff_ms, laid.worker_max_attempts) == ((5, 6), 3)
    assert loaded.adapter == "local-mdx"
    assert (laid.storage_root, laid.config_path) == (site.root / "storage", site.file)


def test_no_site_has_a_secret_or_a_place_on_the_worker_of_its_own() -> None:
    secret = {name for name, what in settings_schema()["properties"].items() if what.get("writeOnly")}
    placed = {n for n in settings_schema()["properties"] if n.endswith(("Root", "Worktree", "Host", "Port"))}
    assert not set(per_site()) & (secret | placed)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"gitBranch": "+main"}, 'the site blog: gitBranch is "+main"; accepted: a branch'),
        ({"storageRoot": "/"}, "the site blog: storageRoot cannot be set for one site; accepted: adapter"),
        ({"adapter": "custom"}, "the site blog: the adapter is custom"),
    ],
)
@pytest.mark.usefixtures("site")
def test_what_a_site_may_not_have_of_its_own_is_named(own: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        for_site(load_settings({}), own, source="the site blog")
    assert str(refused.value).startswith(said)


# --- the schema


def test_the_schema_names_every_variable_of_the_contract_in_camel_case() -> None:
    properties = settings_schema()["properties"]
    roots = {"appRoot", "storageRoot", "queueRoot", "gitWorktree", "cacheRoot"}
    assert set(properties) == {key(variable) for variable in CONTRACT} | roots
    for name, described in properties.items():
        assert key(described["title"]) == name
        assert described["description"]
    assert properties["adapter"]["enum"] == list(names())
    assert properties["workerBackoffJitter"]["maximum"] == 0.5
    assert {"type": "string"} in properties["allowedPaths"]["anyOf"]
    json.dumps(settings_schema())


def test_every_default_in_the_schema_is_the_one_that_is_used(site: Site) -> None:
    loaded = load_settings({})
    for name, described in settings_schema()["properties"].items():
        if "default" in described:
            used = getattr(loaded, described["title"].removeprefix("BRITER_").lower())
            assert json.loads(json.dumps(used)) == described["default"], name
    assert loaded.app_root == site.root

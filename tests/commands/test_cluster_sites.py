"""The register of a cluster's sites, and the commands that keep it; on a real Postgres."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from postgres import count_rows, execute

from briter_worker.cluster import sites
from briter_worker.cluster.sites import check_credentials, check_remote
from briter_worker.commands import user_name
from briter_worker.errors import UsageError
from briter_worker.queues.postgres.rows import SiteMissingError
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from sites import Site

    from briter_worker.queues.postgres.database import Database

REMOTE = "https://git.example.org/blog.git"
SECRET = "hunter2canary"  # noqa: S105 - no text may show it


@pytest.fixture
def cluster(site: Site, database_url: str) -> Site:
    site.env["BRITER_DATABASE_URL"] = database_url
    return site


# --- the database


def test_an_empty_database_is_made_ready_by_one_command_which_may_be_repeated(
    site: Site, empty_database_url: str
) -> None:
    site.env["BRITER_DATABASE_URL"] = empty_database_url
    assert "briter-worker db upgrade" in site.command("db", "check").error(1)
    assert "briter-worker db upgrade" in site.command("site", "list").error(1)
    assert site.command("db", "upgrade", "--json").json()["applied"]
    assert site.command("db", "upgrade", "--json").json()["applied"] == []
    assert site.command("db", "check", "--json").json()["ok"] is True


def test_a_database_that_is_away_is_a_matter_of_one_line_without_its_password(cluster: Site) -> None:
    line = cluster.command("db", "check", BRITER_DATABASE_URL=f"postgresql://u:{SECRET}@127.0.0.1:1/x").error(
        1
    )
    assert "Fix: start Postgres, or correct BRITER_DATABASE_URL" in line
    assert SECRET not in line


@pytest.mark.parametrize(
    "command", [["db", "upgrade"], ["db", "check"], ["site", "list"], ["site", "show", "a"]]
)
def test_without_a_database_the_commands_of_a_cluster_name_what_to_set(
    site: Site, command: list[str]
) -> None:
    line = site.command(*command).error(2)
    assert "is for a cluster, and there is none. Fix: set BRITER_DATABASE_URL" in line


@pytest.mark.parametrize(
    "command",
    ["list", "status", "show a", "history", "retry a", "cancel a", "publish-now a", "pause", "resume"],
)
def test_on_a_folder_a_site_is_refused_and_why_is_said(site: Site, command: str) -> None:
    line = site.command(*command.split(), "--site", "blog").error(2)
    assert "BRITER_DATABASE_URL is not set" in line
    assert "Fix: leave --site out" in line


# --- the register


def test_a_site_is_added_shown_listed_changed_and_removed(cluster: Site) -> None:
    made = cluster.command(
        *("site", "add", "blog", "--remote", REMOTE, "--branch", "live", "--adapter", "hugo"),
        *("--allow", "media", "--author", "Blog Bot <bot@example.org>", "--credential-env", "BLOG_TOKEN"),
        *("--set", "workerDryRun=false", "--set", "workerMaxAttempts=3", "--json"),
    ).json()
    assert made == {
        "name": "blog",
        "remote": REMOTE,
        "branch": "live",
        "adapter": "hugo",
        "allowedPaths": ["media"],
        "settings": {
            "workerDryRun": "false",
            "workerMaxAttempts": "3",
            "gitAuthorName": "Blog Bot",
            "gitAuthorEmail": "bot@example.org",
        },
        "credentials": {"env": "BLOG_TOKEN"},
        "createdAt": made["createdAt"],
        "changedBy": user_name(),
        "paused": False,
    }
    assert cluster.command("site", "show", "blog", "--json").json() == made
    again = cluster.command("site", "add", "blog", "--remote", REMOTE)
    assert "there is a site 'blog' already" in again.error(1)
    changed = cluster.command(
        *("site", "change", "blog", "--branch", "main", "--set", "workerMaxAttempts=", "--json")
    ).json()
    assert changed == {
        **made,
        "branch": "main",
        "settings": {k: v for k, v in made["settings"].items() if k != "workerMaxAttempts"},
    }
    cluster.command(
        "site", "add", "a-shop", "--remote", "git@git.example.org:shop.git", "--ssh-key", "/k/shop"
    )
    listed = cluster.command("site", "list", "--json").json()
    assert [(row["name"], row["jobs"]) for row in listed] == [
        ("a-shop", {"waiting": 0, "claimed": 0, "failed": 0}),
        ("blog", {"waiting": 0, "claimed": 0, "failed": 0}),
    ]
    assert cluster.command("site", "remove", "blog", "--json").json() == {"name": "blog", "removed": True}
    assert [row["name"] for row in cluster.command("site", "list", "--json").json()] == ["a-shop"]
    assert "there is no site 'blog'" in cluster.command("site", "show", "blog").error(1)


DECLARED = """
sites:
  blog:
    {remote: https://git.example.org/blog.git, branch: live, adapter: hugo, credentials: {env: BLOG_TOKEN}}
  shop:
    remote: git@git.example.org:shop.git
    allowedPaths: [media]
    settings:
      workerDryRun: false
      workerMaxAttempts: 3
      webhookUrls: env:SHOP_WEBHOOKS
      buildHookUrl: file:/run/secrets/shop-build
      plugins: file:/etc/shop-plugins.json
      historyKeepDays: 30
"""


def test_sites_are_applied_from_a_file_and_exported_into_one(cluster: Site) -> None:
    file = cluster.root / "sites.yaml"
    file.write_text(DECLARED)
    cluster.command("site", "add", "old", "--remote", REMOTE)
    cluster.command("site", "add", "blog", "--remote", REMOTE, "--adapter", "hugo")
    cluster.command("site", "pause", "blog")
    before = cluster.command("site", "list", "--json").json()
    shown = cluster.command("site", "apply", str(file), "--prune", "--diff").stdout.splitlines()
    assert shown == [
        "+ shop: main on git@git.example.org:shop.git",
        '~ blog: branch "main" -> "live"; credentials null -> {"env": "BLOG_TOKEN"}',
        "- old",
        "1 added, 1 changed, 1 removed, 0 unchanged; nothing was done yet",
    ]
    assert cluster.command("site", "list", "--json").json() == before
    kept = cluster.command("site", "apply", str(file), "--json").json()
    assert (kept["added"], kept["removed"], kept["undeclared"]) == (["shop"], [], 1)
    assert cluster.command("site", "apply", str(file), "--prune", "--json").json()["removed"] == ["old"]
    blog, shop = cluster.command("site", "list", "--json").json()
    assert (blog["branch"], blog["paused"], blog["credentials"]) == ("live", True, {"env": "BLOG_TOKEN"})
    assert shop["settings"]["workerMaxAttempts"] == 3
    assert shop["settings"]["webhookUrls"] == "env:SHOP_WEBHOOKS"
    assert {row["changedBy"] for row in (blog, shop)} == {user_name()}
    file.write_text(cluster.command("site", "export").stdout)
    again = cluster.command("site", "apply", str(file), "--prune", "--json").json()
    assert (again["unchanged"], again["added"], again["changed"], again["removed"]) == (2, [], {}, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sites: [", "not valid YAML"),
        (
            "sites:\n  a: {remote: /a}\n  a: {remote: /b}\n",
            "line 3, column 3: not valid YAML: the key 'a' occurs",
        ),
        ("sites: {a: {remote: /a, colour: red}}", "sites.a.colour is not known here"),
        ("sites: {a: {}}", "sites.a.remote is missing"),
        ("sites: {a: {remote: /a, branch: +x}, b: {remote: /b, adapter: wiki}}", "the site 'b': "),
        pytest.param("sites: " + 100_000 * "[", "nested deeper than 64 levels", id="deep"),
        pytest.param(f"sites: {5000 * '9'}", "not valid YAML", id="digits"),
        ("sites: !!python/object/apply:os.system ['touch /tmp/ran']", "could not determine a constructor"),
    ],
)
def test_a_file_of_sites_with_a_mistake_changes_nothing(cluster: Site, text: str, said: str) -> None:
    file = cluster.root / "sites.yaml"
    file.write_text(text)
    line = cluster.command("site", "apply", str(file), "--prune").error(2)
    assert "sites.yaml" in line
    assert said in line
    assert cluster.command("site", "list", "--json").json() == []


def test_a_site_with_jobs_is_not_pruned_and_then_nothing_is_applied(cluster: Site) -> None:
    cluster.command("site", "add", "old", "--remote", REMOTE, "--allow", "content")
    cluster.write_post("content/a.md", "A\n")
    cluster.command("enqueue", "a", "content/a.md", "--site", "old", "--json").json()
    file = cluster.root / "sites.yaml"
    file.write_text(DECLARED)
    assert "still has 1 job" in cluster.command("site", "apply", str(file), "--prune").error(1)
    assert [row["name"] for row in cluster.command("site", "list", "--json").json()] == ["old"]


def test_what_a_worker_could_not_work_with_is_not_written(cluster: Site) -> None:
    for arguments, said in (
        (("--branch", "+main"), "gitBranch is"),
        (("--adapter", "wordpress"), "adapter is"),
        (("--allow", "../up"), "allowedPaths is"),
        (("--adapter", "custom"), "adapter is custom"),
        (("--set", "storageRoot=/"), "storageRoot cannot be set for one site"),
        (("--set", "gitBranch=x"), "use --branch"),
        (("--set", "workerDryRun"), "a key of config.json, = and its value"),
        (("--author", "nobody"), "is no author"),
        (("--ssh-key", "/k/id"), "--ssh-key goes with an address for ssh"),
        (("--credential-env", "A", "--credential-file", "/b"), "are one of"),
    ):
        line = cluster.command("site", "add", "blog", "--remote", REMOTE, *arguments).error(2)
        assert said in line, line
    assert "no name of a site" in cluster.command("site", "add", "../x", "--remote", REMOTE).error(2)
    assert cluster.command("site", "list", "--json").json() == []


def test_no_secret_reaches_the_database_or_the_screen(cluster: Site, database_url: str) -> None:
    for remote in (
        f"https://git:{SECRET}@git.example.org/blog.git",
        f"https://{SECRET}@git.example.org/blog.git",
        f"https://git.example.org/blog.git?token={SECRET}",
        f"ssh://git:{SECRET}@git.example.org/blog.git",
    ):
        assert SECRET not in cluster.command("site", "add", "blog", "--remote", remote).error(2)
    for options in (
        ("--credential-env", f"ghp_{SECRET}12345"),
        ("--set", f"buildHookUrl=https://builds.example.org/{SECRET}"),
    ):
        assert SECRET not in cluster.command("site", "add", "blog", "--remote", REMOTE, *options).error(2)
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM briter.sites").fetchone() == (0,)


@pytest.mark.parametrize(
    "remote",
    """|blog|../blog|-oProxyCommand=x|ext::sh -c x|ext::sh|https://u:p@h/x|https://u@h/x|ssh://u:p@h/x
ftp://h/x|https://h/x?a=b|https://h/x#y|https://h/a b|fd::7|host:|https://h|https:///x|-h:x|git@-h:x
https://h/x\x7f|https://h/glpat-a1a1a1a1a1a1a1a1a1a1/x""".replace("\n", "|").split("|"),
)
def test_what_is_none_or_opens_something_is_refused_unseen(remote: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_remote(remote)
    assert str(refused.value).isprintable()
    assert "@" not in remote or remote not in str(refused.value)


def test_credentials_are_places() -> None:
    assert check_credentials(REMOTE, None) is None
    assert check_credentials(REMOTE, {"env": "T", "username": "bot"}) == {"env": "T", "username": "bot"}
    assert check_credentials("git@h:x", {"sshKey": "/k"}) == {"sshKey": "/k"}
    for remote, said in (
        (REMOTE, {"username": "bot"}),
        (REMOTE, {"file": "relative"}),
        (REMOTE, {"env": "BRITER_DATABASE_URL"}),
        (REMOTE, {"env": "A B"}),
        (REMOTE, {"token": "x"}),
        ("git@h:x", {"sshKey": "/k", "username": "u"}),
        ("git@h:x", {"env": "T"}),
        ("/srv/x", {"env": "T"}),
    ):
        with pytest.raises(UsageError):
            check_credentials(remote, said)


def test_a_removed_site_comes_back_with_a_fence_that_goes_on_counting(database: Database) -> None:
    """A worker that was stopped while it drained the old site must not pass for a worker of the new one."""
    worker = load_settings({})
    site = sites.Site("blog", REMOTE, "main", "hugo")
    sites.add(database, site, worker)
    execute(database, "UPDATE sites SET token = 41")
    with database.transaction() as connection:
        sites.remove(connection, "blog", discard=False)
    with pytest.raises(SiteMissingError):
        sites.get(database, "blog")
    sites.add(database, sites.Site("blog", "/srv/other.git", "main", "hugo"), worker)
    assert sites.get(database, "blog").remote == "/srv/other.git"
    with database.transaction() as connection:
        row = connection.execute("SELECT token FROM sites").fetchone()
    assert row is not None
    assert row[0] > 41


def test_a_site_that_moves_to_another_remote_forgets_what_was_published(database: Database) -> None:
    worker = load_settings({})
    site = sites.Site("blog", REMOTE, "main", "hugo")
    sites.add(database, site, worker)
    execute(database, "INSERT INTO published VALUES ('blog', 'content/a.md', 1)")
    execute(database, "INSERT INTO base_versions (site, path, base) VALUES ('blog', 'content/a.md', 'abc')")
    sites.change(database, sites.Site("blog", REMOTE, "main", "jekyll"), worker)
    assert count_rows(database, "published") == 1
    sites.change(database, sites.Site("blog", "/srv/other.git", "main", "jekyll"), worker)
    assert count_rows(database, "published") == count_rows(database, "base_versions") == 0


@given(st.text(max_size=60))
def test_no_text_gets_through_that_git_could_take_for_an_option_or_a_program(text: str) -> None:
    try:
        check_remote(text)
    except UsageError:
        return
    assert not text.startswith("-")
    assert "::" not in text.partition("/")[0]
    assert text.isprintable() or not text.isascii()

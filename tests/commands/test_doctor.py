"""The doctor finds what would stop a publication, names one fix for it, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from remotes import Exchange, HttpRemote, http_remote, serve, stalls
from sites import program

from briter_worker.doctor.host import SET_API, check_rules
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sites import Result, Site

POST = "content/posts/hello.md"


def findings(result: Result, check: str | None = None) -> list[dict[str, Any]]:
    """What the doctor found, of one check or of all."""
    assert result.stderr == ""
    found = json.loads(result.stdout)["findings"]
    return [finding for finding in found if check in {None, finding["check"]}]


def examine(site: Site, **env: str) -> Result:
    return site.command("doctor", "--json", **env)


def checks(result: Result, state: str) -> set[str]:
    return {finding["check"] for finding in findings(result) if finding["state"] == state}


errors, warnings = partial(checks, state="error"), partial(checks, state="warning")


def snapshot(root: Path) -> dict[str, tuple[int, int, str]]:
    """Every file and folder with its mode, its time stamp and its content."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        about = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(about.st_mode) else ""
        found[str(path)] = (about.st_mode, about.st_mtime_ns, content)
    return found


def test_a_healthy_site_has_no_finding_to_mend(site: Site) -> None:
    result = examine(site)
    assert result.returncode == 0
    assert errors(result) == warnings(result) == set()
    assert result.json()["ok"] is True
    assert {finding["check"] for finding in findings(result)} == {
        *("configuration", "dry-run", "queue", "quarantine", "storage", "lock", "disk"),
        *("dead-letters", "unreadable-files", "worker", "worktree", "git", "state", "ownership", "branch"),
        *("unfinished", "index", "repository", "accounts", "folders", "storage-place", "remote"),
        *("plugins", "format"),
    }


def test_looking_changes_nothing(site: Site) -> None:
    site.save_post("hello", "text\n")
    site.save("secret", [".env"])
    site.run_once()
    (site.worktree / ".git" / "index.lock").touch()
    (site.worktree / ".git" / "packed-refs.lock").touch()
    before = snapshot(site.root)
    examine(site)
    assert snapshot(site.root) == before


def git(*args: str) -> Callable[[Site], object]:
    return lambda site: site.git(*args)


def unborn(site: Site) -> None:
    site.git("switch", "--quiet", "--orphan", "main2")
    site.git("branch", "--delete", "--force", "main")
    site.git("symbolic-ref", "HEAD", "refs/heads/main")


def bare(site: Site) -> None:
    shutil.rmtree(site.worktree)
    site.git("clone", "--quiet", "--bare", str(site.remote), str(site.worktree), cwd=site.root)


def linked_folder(site: Site) -> None:
    (site.worktree / "content").rename(site.root / "content")
    (site.worktree / "content").symlink_to(site.root / "content")


def queue_is_a_file(site: Site) -> None:
    site.queue.rmdir()
    site.queue.write_text("")


FAULTS: dict[str, tuple[Callable[[Site], object], str, str]] = {
    "detached": (git("checkout", "--quiet", "--detach"), "branch", "git switch main"),
    "another branch": (git("switch", "--quiet", "--create", "draft"), "branch", "git switch main"),
    "unborn": (unborn, "branch", "commit and push once"),
    "corrupt index": (
        lambda site: (site.worktree / ".git" / "index").write_bytes(b"x" * 200),
        "index",
        "rm .git/index && git reset",
    ),
    "merging": (git("update-ref", "MERGE_HEAD", "HEAD"), "unfinished", "git merge --abort"),
    "remote renamed": (git("remote", "rename", "origin", "upstream"), "remote", "git remote add origin"),
    "remote gone": (lambda site: shutil.rmtree(site.remote), "remote", "git remote -v"),
    "remote branch gone": (
        lambda site: site.git("update-ref", "-d", "refs/heads/main", cwd=site.remote),
        "remote",
        "git push origin main",
    ),
    "no repository": (lambda site: shutil.rmtree(site.worktree / ".git"), "worktree", "clone the site there"),
    "bare": (bare, "worktree", "BRITER_GIT_WORKTREE"),
    "linked folder": (linked_folder, "folders", "plain folder"),
    "nested repository": (git("init", "--quiet", "content"), "folders", "plain folder"),
    "queue a file": (queue_is_a_file, "queue", "may write"),
    "lock a link": (
        lambda site: (site.storage / "worker.lock").symlink_to(site.write_post("elsewhere", "")),
        "lock",
        "remove",
    ),
    "lock a folder": (lambda site: (site.storage / "worker.lock").mkdir(), "lock", "remove"),
    "quarantine a file": (lambda site: (site.storage / "quarantine").touch(), "quarantine", "may write"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_stops_a_publication_is_found_with_its_fix(site: Site, fault: str) -> None:
    happens, check, fix = FAULTS[fault]
    happens(site)
    result = examine(site)
    assert result.returncode == 1
    assert check in errors(result)
    assert any(
        fix in (finding["fix"] or "") for finding in findings(result, check) if finding["state"] == "error"
    )


def test_without_git_the_rest_is_still_looked_at(site: Site) -> None:
    result = examine(site, PATH="/nowhere")
    assert errors(result) == {"git"}
    assert "2.38" in result.finding("git")["fix"]


def test_a_git_that_is_too_old_is_told(site: Site) -> None:
    old = 'for last; do :; done; [ "$last" = version ] && echo git version 2.25.1 && exit'
    script = program(site.root / "bin" / "git", f'{old}\nexec {shutil.which("git")} "$@"')
    result = examine(site, PATH=f"{script.parent}:{os.environ['PATH']}")
    assert errors(result) == {"git"}
    assert "2.25.1" in result.finding("git")["message"]


def test_an_unknown_host_key_is_told(site: Site) -> None:
    script = program(site.root / "ssh", "echo 'Host key verification failed.' >&2\nexit 255")
    site.git("config", "core.sshCommand", str(script))
    site.git("remote", "set-url", "origin", "git@example.org:site.git")
    assert "known_hosts" in examine(site).finding("remote")["fix"]


def test_a_persons_unpushed_commits_beside_the_remotes_are_warned_of(site: Site) -> None:
    site.push_elsewhere({"more.txt": "more\n"})
    site.git("commit", "--quiet", "--allow-empty", "--message=Mine")
    result = examine(site)
    told = result.finding("local-commits")
    assert (told["state"], told["fix"]) == ("warning", "briter-worker pull --rebase --push")
    assert "Mine" in told["message"]
    assert result.finding("remote")["state"] == "ok"


def branch_not_yet(site: Site) -> None:
    site.git("init", "--quiet", "--bare", str(site.root / "empty.git"), cwd=site.root)
    site.git("remote", "remove", "origin")
    site.git("remote", "add", "origin", str(site.root / "empty.git"))


def bad_files(site: Site) -> None:
    site.save("secret", [".env"])
    (site.queue / "torn.json").write_text('{"slug": "to')
    os.utime(site.queue / "torn.json", (1, 1))
    site.run_once()


RESTRICTIONS: list[tuple[Callable[[Site], object], dict[str, str], dict[str, str]]] = [
    (branch_not_yet, {}, {"remote": "git push origin main"}),
    (lambda site: site.write_post(".gitignore", "/content/\n"), {}, {"folders": ".gitignore"}),
    (lambda site: site.write_post(".git/packed-refs.lock", ""), {}, {"locks": "end that command"}),
    (bad_files, {}, {"dead-letters": "list --status failed", "unreadable-files": "correct the program"}),
    (lambda _: None, {"BRITER_WORKER_DRY_RUN": ""}, {"dry-run": "set BRITER_WORKER_DRY_RUN=false"}),
    (lambda _: None, {"GIT_SSH_COMMAND": "ssh -i key"}, {"environment": "core.sshCommand"}),
]


@pytest.mark.parametrize(
    ("restrict", "env", "fixes"), RESTRICTIONS, ids=[", ".join(fixes) for _, _, fixes in RESTRICTIONS]
)
def test_what_restricts_publishing_is_a_warning_with_its_fix(
    site: Site, restrict: Callable[[Site], object], env: dict[str, str], fixes: dict[str, str]
) -> None:
    restrict(site)
    result = examine(site, **env)
    assert result.returncode == 0
    found = {
        finding["check"]: finding["fix"] for finding in findings(result) if finding["state"] == "warning"
    }
    assert found.keys() == fixes.keys()
    assert all(fix in found[check] for check, fix in fixes.items())


def test_settings_that_nothing_reads_are_named_but_not_the_keys_of_a_cms(site: Site) -> None:
    config = {"gitBranch": "main", "gitBranhc": "x", "BRITER_GIT_REMOTE": "origin", "theme": "dark"}
    (site.storage / "config.json").write_text(json.dumps(config))
    result = examine(site, BRITER_GIT_REMOT="origin")
    named = [f for f in findings(result, "configuration") if f["state"] == "warning"]
    wrong = ["BRITER_GIT_REMOTE", "gitBranhc", "BRITER_GIT_REMOT"]
    assert len(named) == 3
    assert all(word in found["message"] for word, found in zip(wrong, named, strict=True))
    assert [found["fix"].split()[1] for found in named[:2]] == ["gitRemote", "gitBranch"]


def test_missing_folders_of_posts_are_warned_of(site: Site) -> None:
    assert examine(site, BRITER_ADAPTER="mkdocs").finding("folders")["state"] == "warning"
    result = examine(site, BRITER_ALLOWED_PATHS="media")
    assert [finding["state"] for finding in findings(result, "folders")] == ["warning", "ok"]


def test_storage_in_the_site_is_to_be_ignored(site: Site) -> None:
    inside = str(site.worktree / "storage")
    told = examine(site, BRITER_STORAGE_ROOT=inside).finding("storage-place")
    assert told["state"] == "warning"
    site.write_post(".gitignore", "/storage/\n")
    assert examine(site, BRITER_STORAGE_ROOT=inside).finding("storage-place")["state"] == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
def test_a_repository_of_somebody_else_is_told(site: Site) -> None:
    for path in [site.worktree, *site.worktree.rglob("*")]:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    told = examine(site).finding("ownership")
    assert told["state"] == "error"
    assert "safe.directory" in told["fix"]


# The rules of a git host, which a dry run of git does not show


TOKEN = "canary-0123456789-abcdef"  # noqa: S105 - of nobody
GITHUB_RULE = {"ruleset_source_type": "Repository", "ruleset_source": "me/blog", "ruleset_id": 42}
RULES, BRANCH = "/repos/me/blog/rules/branches/main", "/repos/me/blog/branches/main"
GITLABS_BRANCH = "/projects/me%2Fblog/repository/branches/main"
FREE = {"name": "main", "protected": False, "protection": {"enabled": False}}
PROTECTED = {"name": "main", "protected": True, "protection": {"enabled": True}}
FINE = ("ok", "no rule that refuses", "")
SIGNED_ONLY = ("warning", "required signatures", "BRITER_GIT_SIGNING_KEY")
CLOSED = ("error", "is protected", "let the account that pushes push to main")
HOSTS: dict[str, tuple[str, dict[str, Any], tuple[str, str, str]]] = {
    "github, unprotected": ("/api/v3", {RULES: [], BRANCH: FREE}, FINE),
    "github, a ruleset": (
        "/api/v3",
        {
            RULES: [
                {**GITHUB_RULE, "type": "deletion"},
                {**GITHUB_RULE, "type": "pull_request", "parameters": {"required_approving_review_count": 1}},
            ],
            "/repos/me/blog/rulesets/42": {"id": 42, "current_user_can_bypass": "never"},
            BRANCH: FREE,
        },
        ("warning", "refuse pushes: pull request", "bypass"),
    ),
    "github, a ruleset that is bypassed": (
        "/api/v3",
        {
            RULES: [{**GITHUB_RULE, "type": "required_status_checks"}],
            "/repos/me/blog/rulesets/42": {"id": 42, "current_user_can_bypass": "always"},
            BRANCH: FREE,
        },
        FINE,
    ),
    "github, a protection": (
        "/api/v3",
        {
            RULES: [],
            BRANCH: PROTECTED,
            f"{BRANCH}/protection": {
                "required_status_checks": {"strict": True, "contexts": ["ci"]},
                "required_signatures": {"url": "https://api.github.com/…", "enabled": True},
                "enforce_admins": {"enabled": True},
                "lock_branch": {"enabled": False},
            },
        },
        ("warning", "refuse pushes: required status checks, required signatures", "BRITER_GIT_SIGNING_KEY"),
    ),
    "github, a protection that the token may not read": (
        "/api/v3",
        {RULES: [], BRANCH: PROTECTED},
        ("warning", "this token may not read", "bypass"),
    ),
    "gitlab, unprotected": ("/api/v4", {GITLABS_BRANCH: {"protected": False, "can_push": False}}, FINE),
    "gitlab, protected": ("/api/v4", {GITLABS_BRANCH: {"protected": True, "can_push": False}}, CLOSED),
    "gitlab, open to the user, signed only": (
        "/api/v4",
        {
            GITLABS_BRANCH: {"protected": True, "can_push": True},
            "/projects/me%2Fblog/push_rule": {"id": 1, "reject_unsigned_commits": True},
        },
        SIGNED_ONLY,
    ),
    "gitea, unprotected": ("/api/v1", {BRANCH: {"protected": False, "user_can_push": True}}, FINE),
    "gitea, protected": ("/api/v1", {BRANCH: {"protected": True, "user_can_push": False}}, CLOSED),
    "forgejo, open to the user, signed only": (
        "/api/v1",
        {
            BRANCH: {"protected": True, "user_can_push": True, "effective_branch_protection_name": "ma*"},
            "/repos/me/blog/branch_protections/ma%2A": {"require_signed_commits": True},
        },
        SIGNED_ONLY,
    ),
    "a repository that the token may not see": (
        "/api/v4",
        {},
        ("warning", "its API answered 404", "BRITER_GIT_HOST_TOKEN"),
    ),
    "another API": (
        "/api/v4",
        {GITLABS_BRANCH: ["main"]},
        ("warning", "not of a known API", "BRITER_GIT_HOST_API"),
    ),
}


class GitHost:
    """A git host whose API answers what it is told to, and who asked with what."""

    def __init__(self, remote: HttpRemote) -> None:
        self.remote = remote
        self.api = ""
        self.answers: dict[str, Any] = {}
        self.tokens: list[str | None] = []
        self.instead: Callable[[Exchange], None] | None = None

    def behave(self, exchange: Exchange) -> None:
        path = exchange.handler.path.partition("?")[0]
        if not path.startswith("/api/"):
            serve(exchange)
            return
        self.tokens.append(exchange.handler.headers.get("Authorization"))
        if self.instead is not None:
            self.instead(exchange)
            return
        answer = self.answers.get(path.removeprefix(self.api))
        body = json.dumps({"message": "Not Found"} if answer is None else answer).encode()
        exchange.reply(404 if answer is None else 200, body)

    @property
    def settings(self) -> dict[str, str]:
        address = f"http://127.0.0.1:{self.remote.port}{self.api}"
        return {"BRITER_GIT_HOST_TOKEN": TOKEN, "BRITER_GIT_HOST_API": address}


@pytest.fixture
def host(site: Site) -> Iterator[GitHost]:
    (site.root / "me").mkdir()
    site.remote.rename(site.root / "me" / "blog.git")
    with http_remote(site.root) as remote:
        found = GitHost(remote)
        remote.behaviour = found.behave
        site.git("remote", "set-url", "origin", remote.url(site.root / "me" / "blog.git"))
        yield found


@pytest.mark.parametrize("case", HOSTS)
def test_the_host_is_asked_for_rules_that_git_does_not_show(site: Site, host: GitHost, case: str) -> None:
    host.api, host.answers, (state, message, fix) = HOSTS[case]
    result = examine(site, **host.settings)
    told = result.finding("rules")
    assert (told["state"], message in told["message"]) == (state, True), told
    assert fix in (told["fix"] or "")
    assert set(host.tokens) == {f"Bearer {TOKEN}"}
    assert result.returncode == (1 if state == "error" else 0)
    assert TOKEN not in result.stdout


def test_signed_commits_meet_the_rule_that_asks_for_them(site: Site, host: GitHost) -> None:
    host.api, host.answers, _ = HOSTS["forgejo, open to the user, signed only"]
    key = site.root / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    assert examine(site, **host.settings, BRITER_GIT_SIGNING_KEY=str(key)).finding("rules")["state"] == "ok"


def test_without_a_token_nobody_is_asked_and_the_doctor_says_so(site: Site, host: GitHost) -> None:
    told = examine(site, BRITER_GIT_HOST_API=host.settings["BRITER_GIT_HOST_API"]).finding("remote")
    assert told["state"] == "ok"
    assert "were not asked, as BRITER_GIT_HOST_TOKEN is not set" in told["message"]
    assert host.tokens == []


def test_the_token_goes_to_the_remotes_own_host_only(site: Site, host: GitHost) -> None:
    asks = {"BRITER_GIT_HOST_TOKEN": TOKEN}
    for api in ("", "https://git.example.org/api/v4", f"http://localhost:{host.remote.port}/api/v4"):
        told = examine(site, **asks, BRITER_GIT_HOST_API=api).finding("rules")
        assert (told["state"], "BRITER_GIT_HOST_API" in told["fix"]) == ("warning", True)
    refused = site.command("doctor", **asks, BRITER_GIT_HOST_API="http://git.example.org/api/v4")
    assert (refused.returncode, "BRITER_GIT_HOST_API is" in refused.stderr) == (2, True)
    assert host.tokens == []


@pytest.mark.parametrize("api", ["", "https://git.example.org/api/v4"])
def test_in_a_cluster_who_adds_a_site_does_not_choose_who_gets_the_token(api: str) -> None:
    node = {"BRITER_DATABASE_URL": "postgresql://db.example.org/briter", "BRITER_GIT_HOST_TOKEN": TOKEN}
    settings = load_settings({**node, "BRITER_GIT_HOST_API": api})
    told = check_rules(settings, "https://github.com/me/blog.git")
    assert (told.state, told.fix) == ("warning", SET_API)


@pytest.mark.parametrize("answer", ["[" * 100_000, '[{"ruleset_id": 1e999, "type": "update"}]'])
def test_an_odd_answer_of_a_host_ends_no_doctor(site: Site, host: GitHost, answer: str) -> None:
    host.api, host.instead = "/api/v3", lambda exchange: exchange.reply(200, answer.encode())
    told = examine(site, **host.settings).finding("rules")
    assert (told["state"], "not of a known API" in told["message"]) == ("warning", True)


def test_a_host_with_rules_without_end_is_not_asked_without_end(
    monkeypatch: pytest.MonkeyPatch, host: GitHost
) -> None:
    def slow(exchange: Exchange) -> None:
        time.sleep(0.1)
        rules = [{"ruleset_id": number, "type": "update"} for number in range(1000)]
        exchange.reply(200, json.dumps(rules if "/branches/" in exchange.handler.path else {}).encode())

    monkeypatch.setattr("briter_worker.doctor.host._DEADLINE_S", 1.0)
    host.instead, host.api = slow, "/api/v3"
    began = time.monotonic()
    told = check_rules(load_settings(host.settings), f"http://127.0.0.1:{host.remote.port}/me/blog.git")
    assert (told.state, time.monotonic() - began < 30) == ("warning", True)


def redirects(exchange: Exchange) -> None:
    exchange.reply(302, headers={"Location": f"http://{exchange.handler.headers['Host']}/api/elsewhere"})


def never_ends(exchange: Exchange) -> None:
    exchange.reply(200, b"[" + b" " * (2 << 20))


@pytest.mark.parametrize("misbehaves", [never_ends, stalls, redirects])
def test_a_host_that_misbehaves_is_warned_of_in_time(
    site: Site, host: GitHost, misbehaves: Callable[[Exchange], None]
) -> None:
    host.api, host.instead = "/api/v1", misbehaves
    told = examine(site, **host.settings).finding("rules")
    assert (told["state"], "was not asked for its rules" in told["message"]) == ("warning", True)
    assert len(host.tokens) == 1, "no redirect is followed"

"""What a remote answers that is there, or not: it will not, it cannot, it has changed; and one behind ssh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest
from outcomes import (
    LAST,
    SOON,
    assert_dead_letter,
    assert_once,
    assert_published,
    assert_put_off,
    assert_refused,
    assert_waits_until_it_passes,
    save,
)
from remotes import HOST, SshHost, closed_port, git_daemon, silent_port, sshd
from requirements import full, small, unavailable
from sites import program

from briter_worker.errors import FailureClass, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sites import Site


# The remote cannot, or will not for any post


GH006 = "echo 'GH006: Protected branch update failed for refs/heads/main.' >&2; exit 1"


@pytest.mark.parametrize(
    ("file", "content", "failure", "fix", "said"),
    [
        (
            "hooks/pre-receive",
            f"#!/bin/sh\n{GH006}\n",
            "protected",
            "the worker's key on the branch",
            "GH006",
        ),
        ("hooks/pre-receive", "#!/nonexistent/interpreter\n", "remote-refused", "its hooks", ""),
        ("refs/heads/main.lock", "", "remote-refused", "its locks", "main.lock"),
    ],
    ids=["a protected branch", "a hook that cannot be started", "a lock"],
)
def test_a_remote_that_takes_no_post_is_waited_for(
    site: Site, file: str, content: str, failure: str, fix: str, said: str
) -> None:
    there = site.remote / file
    there.parent.mkdir(exist_ok=True)
    there.write_text(content)
    there.chmod(0o755)
    assert said in assert_waits_until_it_passes(site, FailureCode(failure), fix, there.unlink)


def test_a_remote_whose_disk_is_full_is_waited_for(site: Site) -> None:
    with ExitStack() as mounted:
        disk = mounted.enter_context(small(site.root / "disk", size="2m"))
        shutil.move(site.remote, disk / "remote.git")
        site.remote.symlink_to(disk / "remote.git")
        filled = mounted.enter_context(ExitStack())
        filled.enter_context(full(disk))
        reason = assert_waits_until_it_passes(site, FailureCode.REMOTE_REFUSED, "its disk", filled.close)
        assert "No space left on device" in reason


def test_a_remote_of_another_owner_is_waited_for(site: Site) -> None:
    if os.geteuid() != 0:
        unavailable("only root may give files away")
    subprocess.run(["chown", "-R", "65534", str(site.remote)], check=True)
    mend = partial(subprocess.run, ["chown", "-R", "0", str(site.remote)], check=True)
    reason = assert_waits_until_it_passes(site, FailureCode.OWNERSHIP, "safe.directory", mend)
    assert str(site.remote) in reason


# The remote is not what it was


def test_a_branch_that_was_deleted_is_waited_for(site: Site) -> None:
    tip = site.git("rev-parse", "main")
    site.git("update-ref", "-d", "refs/heads/main", cwd=site.remote)
    mend = partial(site.git, "update-ref", "refs/heads/main", tip, cwd=site.remote)
    assert_waits_until_it_passes(site, FailureCode.REMOTE_REWRITTEN, "git push origin main", mend)


def test_a_branch_that_was_set_back_is_waited_for(site: Site) -> None:
    """What the worker has pushed or fetched counts, and not what a person has fetched."""
    first = site.git("rev-parse", "main")
    save(site, "x")
    site.run_once()
    tip = site.git("rev-parse", "main")
    site.git("update-ref", "refs/heads/main", first, cwd=site.remote)
    site.git("fetch", "-q")
    save(site, "a")
    assert_dead_letter(site, site.run_once(**LAST), FailureCode.REMOTE_REWRITTEN)
    assert "git reset --keep origin/main" in site.job("a")["fix"]
    assert site.git("rev-parse", "main", cwd=site.remote) == first
    site.git("update-ref", "refs/heads/main", tip, cwd=site.remote)
    save(site, "b")
    assert_published(site, site.run_once(), "a", "b")


@pytest.mark.parametrize("how", ["pushurl", "pushInsteadOf"])
def test_a_replica_that_is_behind_the_push_address_is_no_rewritten_history(site: Site, how: str) -> None:
    replica = site.root / "replica.git"
    site.git("clone", "--quiet", "--mirror", str(site.remote), str(replica))
    site.git("remote", "set-url", "origin", str(replica))
    if how == "pushurl":
        site.git("remote", "set-url", "--push", "origin", str(site.remote))
    else:
        site.git("config", f"url.{site.remote}.pushInsteadOf", str(replica))
    save(site, "a")
    assert_published(site, site.run_once(), "a")
    save(site, "a")
    assert site.run_once().names().count("nochange") == 1
    site.push_elsewhere({"content/posts/theirs.md": "Theirs\n"})
    save(site, "b")
    assert_published(site, site.run_once(), "b")
    assert site.command("pull").returncode == 0
    assert (site.worktree / "content/posts/theirs.md").exists()
    assert site.command("doctor", "--json").finding("remote")["state"] == "ok"
    site.git("update-ref", "refs/heads/main", site.git("rev-parse", "main~2"), cwd=site.remote)
    site.git("push", "--quiet", "--mirror", str(replica), cwd=site.remote)
    save(site, "c")
    assert_dead_letter(site, site.run_once(**LAST), FailureCode.REMOTE_REWRITTEN, slug="c")


RACE = """
read old new ref
unset GIT_QUARANTINE_PATH GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES
count=$(cat races 2>/dev/null || echo 0)
[ "$count" -lt {races} ] || exit 0
echo $((count + 1)) > races
who='-c user.name=Other -c user.email=other@example.org'
git update-ref "$ref" "$(git $who commit-tree -p "$ref" -m "Race $count" "$ref^{{tree}}")"
"""


def test_five_races_lost_in_a_row_cost_no_attempt(site: Site) -> None:
    site.hook(RACE.format(races=5))
    save(site, "a")
    assert_published(site, site.run_once(), attempt=1)
    subjects = site.subjects()
    assert subjects == ["Publish a", *(f"Race {n}" for n in range(4, -1, -1)), "Start the site"]
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]


def test_races_that_never_end_are_this_batchs_bad_luck(site: Site) -> None:
    file = site.hook(RACE.format(races=100))
    save(site, "a")
    result = site.run_once()
    assert_put_off(site, result, FailureCode.LOST_RACE, kind=FailureClass.TRANSIENT)
    assert (site.remote / "races").read_text().strip() == "6"
    file.unlink()
    site.command("retry", "a")
    assert site.run_once().of("published")
    assert site.subjects().count("Publish a") == 1


MINDS = {
    "a secret": ("echo 'GH009: Secrets detected' >&2; exit 1", "Secrets detected"),
    "its size": ("echo 'File b.md exceeds the limit of 1 MB' >&2; exit 1", "exceeds the limit"),
    "a word": ("echo 'no swearing, please' >&2; exit 1", "no swearing, please"),
    "and trips over it": ("frobnicate || exit 1", "frobnicate"),
    "and says nothing": ("exit 1", "hook declined"),
    "as if it were busy": ("echo 'archived, try again with a pull request' >&2; exit 1", "try again"),
    "as a host does": (GH006, "GH006"),
    "as git does": ("echo 'error: cannot lock ref; fetch first; no space left' >&2; exit 1", "fetch first"),
}


@pytest.mark.parametrize("what", MINDS)
def test_only_the_post_that_the_remote_minds_dies_with_its_words(site: Site, what: str) -> None:
    text, words = MINDS[what]
    site.hook(f"read old new ref\nif git log -p $old..$new | grep -q BAD; then {text}; fi")
    save(site, "a", "b", "c")
    site.write_post("content/posts/b.md", "BAD\n")
    result = site.run_once()
    assert words in assert_refused(site, result, FailureCode.REJECTED, slug="b")
    assert_published(site, result, "a", "c")
    site.save_post("b", "good\n")
    assert_published(site, site.run_once(), "b")
    assert_once(site, "a", "b", "c")


GITLAB = "GitLab: You are not allowed to push code to protected branches on this project."


@pytest.mark.parametrize("words", [GITLAB, "post $new is refused, as all are"])
def test_a_branch_that_takes_no_post_is_one_condition_and_few_pushes(site: Site, words: str) -> None:
    """Also for words that nobody knows: all are refused alike, whichever post is pushed alone."""
    slugs = [f"post-{number}" for number in range(30)]
    save(site, *slugs)
    hook = site.hook(f'read old new ref; echo >> pushes; echo "{words}" >&2; exit 1')
    result = site.run_once(**LAST)
    expected = FailureCode.PROTECTED if words == GITLAB else FailureCode.REMOTE_REFUSED
    for slug in slugs:
        assert_dead_letter(site, result, expected, slug=slug)
    assert len(result.of("condition")) == 1
    assert len((site.remote / "pushes").read_text()) <= 13
    hook.unlink()
    save(site, "last")
    after = site.run_once()
    assert len(after.of("revived")) == len(slugs)
    assert_published(site, after, *slugs, "last")


@pytest.mark.parametrize("bad", [(0, 1), (0, 5), (4, 5), (0, 1, 2)], ids=str)
def test_a_few_posts_that_are_refused_alike_stop_no_other_post(site: Site, bad: tuple[int, ...]) -> None:
    slugs = ["a", "b", "c", "d", "e", "f"]
    site.hook("read old new ref; if git log -p $old..$new | grep -q BAD; then echo no >&2; exit 1; fi")
    save(site, *slugs)
    for number in bad:
        site.write_post(f"content/posts/{slugs[number]}.md", "BAD\n")
    result = site.run_once()
    for number, slug in enumerate(slugs):
        if number in bad:
            assert_refused(site, result, FailureCode.REJECTED, slug=slug)
        else:
            assert_published(site, result, slug)


# Names and addresses


@pytest.mark.parametrize("variable", ["BRITER_GIT_BRANCH", "BRITER_GIT_REMOTE"])
def test_what_is_no_name_stops_the_start_and_reaches_no_git(site: Site, variable: str) -> None:
    mark = site.root / "ran"
    save(site, "a")
    before = site.git("for-each-ref", cwd=site.remote)
    names = ("+main", ":other", "refs/heads/*:refs/heads/*", f"--receive-pack=touch {mark}")
    for name in names:
        result = site.run_once(**{variable: name})
        assert result.returncode == 2
        assert variable in result.stderr
        assert len(result.stderr.splitlines()) == 1
    key = "gitBranch" if variable == "BRITER_GIT_BRANCH" else "gitRemote"
    (site.storage / "config.json").write_text(json.dumps({key: names[-1]}))
    assert site.run_once().returncode == 2
    assert not mark.exists()
    assert site.git("for-each-ref", cwd=site.remote) == before
    assert site.job("a").get("attempts", 0) == 0


@pytest.mark.parametrize(
    "address",
    [
        "--receive-pack=touch {mark}",
        "-oProxyCommand=touch {mark}",
        "ssh://-oProxyCommand=touch%20{mark}/x",
        "-oProxyCommand=touch {mark}:x",
        "ext::touch {mark}",
        "fd::17",
    ],
)
def test_an_address_that_would_run_or_take_something_does_not(site: Site, address: str) -> None:
    mark = site.root / "ran"
    url = site.git("remote", "get-url", "origin")
    site.git("config", "remote.origin.url", address.format(mark=mark))
    save(site, "a")
    result = site.run_once(**LAST)
    failure = FailureCode(site.job("a")["failure"])
    assert failure.failure_class is FailureClass.ENVIRONMENT, site.job("a")
    assert_dead_letter(site, result, failure)
    assert not mark.exists()
    site.git("config", "remote.origin.url", url)
    save(site, "b")
    assert_published(site, site.run_once(), "a", "b")


@pytest.mark.parametrize(
    "kind", ["receivepack", "uploadpack", "proxy", "vcs", "push", "mirror", "push option"]
)
def test_what_the_remotes_settings_say_besides_is_not_heeded(site: Site, kind: str) -> None:
    mark = site.root / "ran"
    ran = str(program(site.root / "canary", f"touch {mark}; exit 1"))
    value = {"proxy": "http://127.0.0.1:9", "push": "+refs/heads/*:refs/heads/*", "mirror": "true"}
    site.git("branch", "draft")
    key = "push.pushOption" if kind == "push option" else f"remote.origin.{kind}"  # some remotes take none
    site.git("config", key, value.get(kind, ran))
    save(site, "a")
    result = site.run_once()
    assert not mark.exists()
    if kind == "vcs":  # a transport of its own: told, and not used
        assert FailureCode(site.job("a")["failure"]).failure_class is FailureClass.ENVIRONMENT
        return
    assert_published(site, result)
    assert site.git("for-each-ref", "--format=%(refname)", cwd=site.remote) == "refs/heads/main"


def test_the_site_needs_no_identity_of_its_own(site: Site) -> None:
    site.git("config", "user.useConfigOnly", "true")
    save(site, "a")
    assert_published(site, site.run_once(EMAIL="", HOME=str(site.root / "nobody")))


# A remote behind ssh: its key, the worker's, what its login prints, and what ssh leaves running here


@pytest.fixture
def ssh(site: Site) -> Iterator[SshHost]:
    """The site's remote, reached by ssh."""
    with sshd(site.root / "sshd") as host:
        site.git("config", "core.sshCommand", host.command)
        site.git("remote", "set-url", "origin", host.url(site.remote))
        yield host


def test_a_host_that_does_not_let_the_worker_in_is_waited_for(site: Site, ssh: SshHost) -> None:
    ssh.keep_out()
    reason = assert_waits_until_it_passes(site, FailureCode.AUTH, "deploy key or token", ssh.let_in)
    assert "Permission denied (publickey)" in reason


def test_a_host_whose_key_has_changed_is_not_talked_to(site: Site, ssh: SshHost) -> None:
    ssh.change_host_key()
    reason = assert_waits_until_it_passes(site, FailureCode.HOST_KEY, "ssh-keygen -R HOST", ssh.introduce)
    assert "IDENTIFICATION HAS CHANGED" in reason


@pytest.mark.parametrize("strict", ["-o StrictHostKeyChecking=yes", "-o StrictHostKeyChecking=ask"])
def test_a_host_whose_key_is_unknown_is_not_talked_to_and_nobody_is_asked(
    site: Site, ssh: SshHost, strict: str
) -> None:
    (ssh.folder / "known_hosts").unlink()
    site.git("config", "core.sshCommand", ssh.command.replace("-o StrictHostKeyChecking=yes", strict))
    assert_waits_until_it_passes(site, FailureCode.HOST_KEY, "ssh-keyscan HOST", ssh.introduce)


def test_nobody_is_ever_asked_for_a_passphrase(site: Site, ssh: SshHost) -> None:
    key = str(ssh.folder / "client")
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "passphrase", "-f", key], check=True)
    mark = site.root / "asked"
    ask = str(program(site.root / "askpass", f'echo "$@" >> {mark}; echo passphrase'))
    save(site, "a")
    asking = {"SSH_ASKPASS": ask, "SSH_ASKPASS_REQUIRE": "force", "GIT_ASKPASS": ask, "DISPLAY": ":0"}
    assert_dead_letter(site, site.run_once(**asking, **LAST), FailureCode.AUTH)
    assert not mark.exists(), mark.read_text()


@pytest.mark.usefixtures("ssh")
def test_a_master_connection_that_stays_does_not_hold_up_the_push(site: Site) -> None:
    """As ControlPersist has it: a daemon of ssh's own, with git's standard error still open."""
    strays = site.root / "strays"
    stay = f"setsid sleep 60 </dev/null >/dev/null & echo $! >> {strays}\n"
    command = site.git("config", "core.sshCommand")
    site.git("config", "core.sshCommand", str(program(site.root / "ssh", f'{stay}exec {command} "$@"')))
    site.git("config", "ssh.variant", "ssh")
    save(site, "a")
    began = time.monotonic()
    try:
        result = site.run_once()
        assert time.monotonic() - began < 50
    finally:
        for pid in strays.read_text().split():
            os.kill(int(pid), 9)
    assert_published(site, result)
    assert_once(site, "a")


# git's own protocol, and nobody there


def move(site: Site, url: str) -> Callable[[], str]:
    """Give the site another address for its remote; return what gives the old one back."""
    site.git("config", "core.sshCommand", "ssh -F /dev/null")
    site.git("remote", "set-url", "origin", url)
    return partial(site.git, "remote", "set-url", "origin", str(site.remote))


@pytest.mark.parametrize("host", [HOST, "nowhere.invalid"], ids=["down", "unknown"])
@pytest.mark.parametrize("scheme", ["git", "https", "ssh"])
def test_a_host_that_is_down_is_waited_for(site: Site, scheme: str, host: str) -> None:
    with closed_port() as port:
        back = move(site, f"{scheme}://{host}:{port}/x.git")
        assert_waits_until_it_passes(site, FailureCode.NETWORK, "the host's status", back)


@pytest.mark.parametrize("scheme", ["git", "https", "ssh"])
def test_a_host_that_never_says_a_word_is_given_up_with_every_process(site: Site, scheme: str) -> None:
    with silent_port() as port:
        back = move(site, f"{scheme}://{HOST}:{port}/x.git")
        fix = "raise BRITER_GIT_TIMEOUT_MS"
        assert_waits_until_it_passes(site, FailureCode.TIMEOUT, fix, back, **SOON)


@pytest.mark.parametrize("wrong", ["no such repository", "for reading only"])
def test_an_address_that_is_not_served_is_told(site: Site, wrong: str) -> None:
    options = ["--enable=receive-pack"] if wrong == "no such repository" else []
    name = "renamed.git" if wrong == "no such repository" else site.remote.name
    with git_daemon(site.root, *options) as url:
        back = move(site, f"{url}/{name}")
        fix = "git remote -v, and that its server lets the worker push"
        assert_waits_until_it_passes(site, FailureCode.REMOTE_MISSING, fix, back)

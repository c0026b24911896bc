"""No remote, work tree or environment runs code, reads a secret, or reaches another branch."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from machine import provide

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sites import Site

SECRET = "s3cr3t-canary"  # noqa: S105 - it opens nothing


def save(site: Site, slug: str = "a") -> None:
    site.write_post(f"content/posts/{slug}.md", f"{slug}\n")
    site.save(slug, [f"content/posts/{slug}.md"])


def canary(site: Site) -> tuple[Path, Path]:
    """A program that leaves a mark, and where."""
    mark = site.root / "canary-has-run"
    program = site.root / "canary.sh"
    program.write_text(f"#!/bin/sh\necho $0 $@ >> {mark}\n")
    program.chmod(0o755)
    return program, mark


def test_no_hook_or_program_of_the_work_tree_is_run(site: Site) -> None:
    program, mark = canary(site)
    for name in (
        *(
            "pre-commit",
            "commit-msg",
            "post-commit",
            "pre-push",
            "reference-transaction",
            "post-index-change",
        ),
        *("post-checkout", "post-merge", "prepare-commit-msg", "pre-auto-gc", "fsmonitor-watchman"),
    ):
        shutil.copy(program, site.worktree / ".git" / "hooks" / name)
    for key in ("fsmonitor", "editor", "pager", "askPass", "gitProxy", "alternateRefsCommand", "hooksPath"):
        value = str(site.worktree / ".git" / "hooks") if key == "hooksPath" else str(program)
        site.git("config", f"core.{key}", value)
    for key in (
        "diff.external",
        "gpg.program",
        "alias.push",
        "remote.origin.receivepack",
        "remote.origin.uploadpack",
    ):
        site.git("config", key, f"!{program}" if key.startswith("alias") else str(program))
    mark.unlink(missing_ok=True)
    save(site)
    assert site.run_once().of("published")
    assert not mark.exists(), mark.read_text()


def test_the_work_trees_hooks_run_when_the_operator_wants_them(site: Site) -> None:
    program, mark = canary(site)
    shutil.copy(program, site.worktree / ".git" / "hooks" / "pre-push")
    save(site)
    assert site.run_once(BRITER_GIT_HOOKS="true").of("published")
    assert mark.exists()


def test_inherited_git_variables_lead_nowhere(site: Site) -> None:
    program, mark = canary(site)
    save(site)
    result = site.run_once(
        GIT_DIR="/nonexistent",
        GIT_WORK_TREE="/nonexistent",
        GIT_INDEX_FILE="/nonexistent",
        GIT_SSH_COMMAND=str(program),
        GIT_EXTERNAL_DIFF=str(program),
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0="core.fsmonitor",
        GIT_CONFIG_VALUE_0=str(program),
        GIT_AUTHOR_NAME="Somebody",
        GIT_COMMITTER_EMAIL="somebody@example.org",
        GIT_AUTHOR_DATE="2001-01-01T00:00:00Z",
    )
    assert result.of("published")
    assert not mark.exists()
    who = site.git("log", "-1", "--format=%an %ce", "main", cwd=site.remote)
    assert who == "Briter Worker briter-worker@localhost"


@pytest.mark.parametrize(
    "url",
    [
        f"https://user:{SECRET}@127.0.0.1:9/x.git",
        f"https://{SECRET}@127.0.0.1:9/x.git",
        f"http://127.0.0.1:9/x.git?private_token={SECRET}",
        f"https://user:{SECRET}%40x@127.0.0.1:9/x.git",
        f"ssh://user:{SECRET}@127.0.0.1:9/x.git",
    ],
)
def test_credentials_never_reach_a_log_or_a_job(site: Site, url: str) -> None:
    site.git("remote", "set-url", "origin", url)
    save(site)
    result = site.run_once()
    assert result.of("failed")
    shown = result.stdout + result.stderr + (site.queue / next(site.queue.glob("*.json")).name).read_text()
    shown += site.command("list", "--json").stdout + site.command("doctor").stdout
    assert SECRET not in shown


def test_what_a_remote_says_is_shown_without_control_characters(site: Site) -> None:
    hook = site.remote / "hooks" / "pre-receive"
    words = r"\033[31mred\033[0m \033]0;title\007 bell\007 \342\200\256 rtl\n"
    hook.write_text(f"#!/bin/sh\nprintf '{words}' >&2; exit 1\n")
    hook.chmod(0o755)
    save(site)
    result = site.run_once()
    job = site.job("a")
    assert "red" in job["lastError"]
    assert job["lastError"].isprintable()
    assert len(job["lastError"]) <= 2000
    for line in result.stdout.splitlines():
        assert line.isprintable()


def _object(site: Site, kind: str, content: bytes) -> str:
    """An object in the remote, as it is, whether git would make it or not."""
    done = subprocess.run(
        ["git", "hash-object", "-w", "-t", kind, "--stdin", "--literally"],
        cwd=site.remote,
        input=content,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode().strip()


def _tree(site: Site, entries: dict[str, str | dict[str, Any]]) -> str:
    """A tree with these names, to the letter: files by their text, folders by what is in them."""
    raw = b""
    for name, what in sorted(entries.items()):
        folder = isinstance(what, dict)
        sha = _tree(site, what) if isinstance(what, dict) else _object(site, "blob", what.encode())
        raw += f"{'40000' if folder else '100755'} {name}\0".encode() + bytes.fromhex(sha)
    return _object(site, "tree", raw)


def test_a_remote_writes_nothing_outside_the_work_tree_nor_into_gits_own_folder(site: Site) -> None:
    elsewhere = site.root / "elsewhere"
    elsewhere.mkdir()
    (site.worktree / "link").symlink_to(elsewhere)
    out: dict[str, Any] = {"out.sh": "out"}
    hostile: dict[str, Any] = {
        **dict.fromkeys(("..", ".", "../..", "../site", "a/../..", str(elsewhere), "git~1"), out),
        "../out.sh": "out",
        ".git": {"hooks": out},
        ".GIT": {"hooks": out},
        "link": {"made": out},
        "nested": {".git": "gitdir: ../elsewhere", ".g\u200cit": out},
        "content": {"..": {"..": out}, "posts": {"welcome.md": "# Welcome\n", "theirs.md": "theirs\n"}},
    }
    commit = site.git("commit-tree", _tree(site, hostile), "-p", "main", "-m", "Hostile", cwd=site.remote)
    site.git("update-ref", "refs/heads/main", commit, cwd=site.remote)
    hooks = sorted((site.worktree / ".git" / "hooks").iterdir())
    save(site)
    result = site.run_once()
    assert result.of("published"), result.stdout
    assert (site.worktree / "content/posts/theirs.md").read_text() == "theirs\n"
    assert not [path for path in site.root.rglob("out.sh") if path.is_file()]
    assert list(elsewhere.iterdir()) == []
    assert not (site.worktree / "nested" / ".git").exists()
    assert sorted((site.worktree / ".git" / "hooks").iterdir()) == hooks


@contextmanager
def silent_server() -> Iterator[int]:
    """Takes connections, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            try:
                while True:
                    kept.append(server.accept()[0])
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


@pytest.mark.parametrize("scheme", ["git", "http"])
def test_a_remote_that_never_answers_is_given_up_in_time(site: Site, scheme: str) -> None:
    with silent_server() as port:
        site.git("remote", "set-url", "origin", f"{scheme}://127.0.0.1:{port}/x.git")
        save(site)
        result = site.run_once(BRITER_GIT_TIMEOUT_MS="1000")
    assert result.of("failed")[0]["failure"] == "timeout"


def test_a_remote_that_refuses_connections_is_a_network_failure(site: Site) -> None:
    site.git("remote", "set-url", "origin", "http://127.0.0.1:9/x.git")
    save(site)
    result = site.run_once()
    assert result.of("failed")[0]["failure"] == "network"
    assert result.returncode == 1


def test_a_remote_helper_program_is_not_run(site: Site) -> None:
    program, mark = canary(site)
    site.git("remote", "set-url", "origin", f"ext::{program} %S x")
    save(site)
    assert site.run_once().of("failed")[0]["failure"] == "remote-missing"
    assert not mark.exists()


@pytest.mark.parametrize(
    ("spoil", "failure"),
    [
        (("checkout", "-q", "-b", "other"), "wrong-branch"),
        (("checkout", "-q", "--detach"), "wrong-branch"),
        (("remote", "remove", "origin"), "remote-missing"),
        (("remote", "set-url", "origin", "/nowhere/at/all.git"), "remote-missing"),
        (("update-ref", "MERGE_HEAD", "HEAD"), "unfinished-operation"),
        (("update-ref", "CHERRY_PICK_HEAD", "HEAD"), "unfinished-operation"),
        (("bisect", "start"), "unfinished-operation"),
    ],
)
def test_a_site_that_is_not_fit_says_what_is_wrong_and_how_to_mend_it(
    site: Site, spoil: tuple[str, ...], failure: str
) -> None:
    site.git(*spoil)
    save(site)
    before = site.git("for-each-ref")
    result = site.run_once()
    job = site.job("a")
    assert (job["status"], job["failure"], job["attempts"]) == ("pending", failure, 1)
    assert "Fix: " in job["lastError"]
    assert result.returncode == 1
    assert site.git("for-each-ref") == before
    assert len(site.remote_log()) == 1


def test_large_files_of_lfs_are_uploaded_with_the_post(site: Site) -> None:
    provide("git-lfs", package="git-lfs")
    site.git("lfs", "install", "--local")
    site.git("remote", "set-url", "origin", f"file://{site.remote}")
    site.write_post(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n")
    site.git("add", ".gitattributes")
    site.git("-c", "core.hooksPath=/dev/null", "commit", "-qm", "attributes")
    site.git("-c", "core.hooksPath=/dev/null", "push", "-q", "origin", "main")
    site.write_post("content/posts/large.bin", "large\n" * 1000)
    site.save("large", ["content/posts/large.bin"])
    result = site.run_once()
    assert result.of("published"), result.stdout
    pointer = site.remote_file("content/posts/large.bin")
    assert pointer is not None
    assert pointer.startswith("version https://git-lfs")
    clone = site.root / "clone"
    subprocess.run(["git", "clone", "-q", f"file://{site.remote}", str(clone)], check=True)
    site.git("lfs", "install", "--local", cwd=clone)
    site.git("lfs", "pull", cwd=clone)
    assert (clone / "content/posts/large.bin").read_text() == "large\n" * 1000

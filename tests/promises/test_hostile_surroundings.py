"""No remote, work tree or environment runs code, reads a secret, or reaches another branch."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from outcomes import save
from requirements import provide
from sites import program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sites import Site


def canary(site: Site) -> tuple[Path, Path]:
    """A program that leaves a mark, and where."""
    mark = site.root / "canary-has-run"
    return program(site.root / "canary.sh", f"echo $0 $@ >> {mark}"), mark


HOOKS = shlex.split("""
    applypatch-msg pre-applypatch post-applypatch pre-commit pre-merge-commit prepare-commit-msg commit-msg
    post-commit pre-rebase post-checkout post-merge pre-push pre-receive update proc-receive post-receive
    post-update reference-transaction push-to-checkout pre-auto-gc post-rewrite sendemail-validate
    fsmonitor-watchman p4-changelist p4-prepare-changelist p4-post-changelist p4-pre-submit post-index-change
""")
COMMANDS = shlex.split("""
    cat-file check-attr check-ignore config diff-index diff-tree fetch for-each-ref hash-object index-pack
    ls-files ls-remote merge-base merge-file mktree pack-objects push read-tree rev-list rev-parse
    symbolic-ref update-index update-ref
""")
NEEDLESS = {
    **dict.fromkeys(("core.fsmonitor", "core.editor", "core.pager", "core.askPass", "sequence.editor"), "{}"),
    **dict.fromkeys(("core.alternateRefsCommand", "diff.external", "interactive.diffFilter"), "{}"),
    **dict.fromkeys(("diff.mine.command", "diff.mine.textconv", "merge.mine.driver"), "{} %O %A %B"),
    **dict.fromkeys(("filter.mine.clean", "filter.mine.smudge", "filter.mine.process"), "{}"),
    **dict.fromkeys(
        ("gpg.program", "gpg.ssh.program", "gpg.ssh.defaultKeyCommand", "gpg.x509.program"), "{}"
    ),
    **dict.fromkeys(("commit.gpgSign", "tag.gpgSign", "push.gpgSign", "user.signingKey"), "true"),
    **dict.fromkeys(("remote.origin.receivepack", "remote.origin.uploadpack"), "{}"),
    **dict.fromkeys(("uploadpack.packObjectsHook", "gc.recentObjectsHook", "trailer.x.command"), "{}"),
    **dict.fromkeys((f"alias.{command}" for command in COMMANDS), "!{}"),
    **dict.fromkeys((f"pager.{command}" for command in COMMANDS), "{}"),
    **dict.fromkeys(("submodule.recurse", "push.followTags", "fetch.prune", "maintenance.auto"), "true"),
    **dict.fromkeys(("protocol.allow", "protocol.ext.allow"), "always"),
    "submodule.nested.update": "!{}",
    "push.recurseSubmodules": "on-demand",
    "gc.auto": "1",
}
"""Settings that run programs, and that no publication needs: `{}` is the canary."""


def configure(file: Path, program: Path, more: dict[str, str] | None = None) -> None:
    """All of them in one file, as git writes it."""
    lines = []
    for key, value in {**NEEDLESS, **(more or {})}.items():
        section, _, rest = key.partition(".")
        middle, _, name = rest.rpartition(".")
        header = f'[{section} "{middle}"]' if middle else f"[{section}]"
        lines.append(f'{header}\n\t{name} = "{value.format(program)}"\n')
    with file.open("a") as config:
        config.writelines(lines)


ATTRIBUTES = "*.md diff=mine merge=mine filter=nobodys\n"


@pytest.mark.parametrize("where", ["config", "config.worktree", "include"])
def test_no_hook_or_program_of_the_work_tree_is_run(site: Site, where: str) -> None:
    ran, mark = canary(site)
    git_dir = site.worktree / ".git"
    site.push_elsewhere({".gitattributes": ATTRIBUTES, "content/posts/both.md": "1\n2\n3\n4\n5\n"})
    site.git("pull", "-q", "--rebase")
    bare = site.worktree / "content" / "posts" / "bare"
    site.git("clone", "-q", "--bare", str(site.remote), str(bare), cwd=site.root)
    site.git("clone", "-q", str(site.remote), "content/posts/nested")
    for folder in (bare, site.worktree / "content/posts/nested/.git"):
        configure(folder / "config", ran, {"core.worktree": "/"})
    for folder in (git_dir / "hooks", bare / "hooks", site.worktree / "content" / "hooks"):
        folder.mkdir(exist_ok=True)
        for name in HOOKS:
            shutil.copy(ran, folder / name)
    if where == "config":
        configure(git_dir / "config", ran, {"core.hooksPath": str(site.worktree / "content" / "hooks")})
    elif where == "config.worktree":
        site.git("config", "extensions.worktreeConfig", "true")
        configure(git_dir / "config.worktree", ran, {"core.worktree": str(site.root)})
    else:
        configure(site.worktree / "content" / "evil", ran)
        site.git("config", "includeIf.onbranch:main.path", str(site.worktree / "content" / "evil"))
        site.git("config", "include.path", "../content/evil")
    (git_dir / "objects" / "info" / "alternates").write_text(f"{site.root}/other/.git/objects\n")
    # Every way of the worker's: new, edited, deleted, a folder, the remote ahead, a merge, a conflict.
    site.push_elsewhere(
        {"content/posts/both.md": "1, theirs\n2\n3\n4\n5\n", "content/posts/welcome.md": "theirs\n"}
    )
    mark.unlink(missing_ok=True)
    site.save_post("both", "1\n2\n3\n4\n5, ours\n")
    site.save_post("welcome", "ours\n")
    save(site)
    site.save("folder", ["content/posts"])
    result = site.run_once()
    assert {e["slug"] for e in result.of("published")} >= {"a", "both"}, result.stdout
    assert site.remote_file("content/posts/both.md") == "1, theirs\n2\n3\n4\n5, ours\n"
    assert not mark.exists(), mark.read_text()


def test_each_of_those_programs_would_run_if_git_were_asked_by_hand(site: Site) -> None:
    """Else the test above could not fail: a person's own `git` does run them."""
    ran, mark = canary(site)
    configure(site.worktree / ".git" / "config", ran)
    subprocess.run(["git", "status"], cwd=site.worktree, capture_output=True, check=False)
    assert mark.exists()


def test_the_work_trees_hooks_run_when_the_operator_wants_them(site: Site) -> None:
    ran, mark = canary(site)
    shutil.copy(ran, site.worktree / ".git" / "hooks" / "pre-push")
    save(site)
    assert site.run_once(BRITER_GIT_HOOKS="true").of("published")
    assert mark.exists()


def test_what_the_operator_configured_to_reach_the_remote_is_run(site: Site) -> None:
    ran, mark = canary(site)
    for url, key in (
        ("ssh://h.invalid/x.git", "core.sshCommand"),
        ("git://h.invalid/x.git", "core.gitProxy"),
    ):
        site.git("remote", "set-url", "origin", url)
        site.git("config", key, str(ran))
        save(site, key.rpartition(".")[2])
        site.run_once()
        assert "h.invalid" in mark.read_text(), key
        mark.unlink()


def test_a_filter_is_the_operators_and_the_work_tree_only_says_for_which_files(site: Site) -> None:
    site.git("config", "filter.loud.clean", "tr a-z A-Z")
    site.git("config", "filter.loud.smudge", "tr A-Z a-z")
    site.write_post("content/.gitattributes", "*.md filter=loud\n*.txt filter=quiet\n")
    for name in ("a.md", "a.txt"):
        site.write_post(f"content/posts/{name}", "words\n")
    site.save("a", ["content/posts"])
    assert site.run_once().of("published")
    assert site.remote_file("content/posts/a.md") == "WORDS\n"
    assert site.remote_file("content/posts/a.txt") == "words\n"


def replaced(site: Site) -> None:
    empty = site.git("commit-tree", site.git("hash-object", "-wt", "tree", "/dev/null"), "-m", "Nothing")
    site.git("replace", "HEAD", empty)


def grafted(site: Site) -> None:
    (site.worktree / ".git" / "info" / "grafts").write_text(site.git("rev-parse", "HEAD") + "\n")


def borrowing(site: Site) -> None:
    (site.worktree / ".git/objects/info/alternates").write_text("../../../elsewhere/.git/objects\n")


def linked(site: Site) -> None:
    for name in ("hooks", "index", "refs", "objects"):
        inside = site.worktree / ".git" / name
        moved = site.root / "elsewhere" / name
        inside.rename(moved)
        inside.symlink_to(moved)


def pointing(site: Site) -> None:
    (site.worktree / ".git").rename(site.root / "elsewhere" / "its.git")
    (site.worktree / ".git").write_text(f"gitdir: {site.root}/elsewhere/its.git\n")


def elsewhere_by_configuration(site: Site) -> None:
    site.git("config", "core.worktree", str(site.root / "elsewhere"))


def shared(site: Site) -> None:
    (site.worktree / ".git" / "commondir").write_text(f"{site.root}/elsewhere/.git\n")


@pytest.mark.parametrize(
    ("odd", "published"),
    [
        ((replaced, grafted, borrowing), True),
        ((linked,), True),
        ((pointing,), True),
        ((elsewhere_by_configuration,), True),
        ((shared,), False),
    ],
    ids=["other objects", "links", "gitfile", "core.worktree", "commondir"],
)
def test_an_odd_repository_is_published_from_or_refused_and_runs_nothing(
    site: Site,
    odd: tuple[Callable[[Site], None], ...],
    published: bool,  # noqa: FBT001
) -> None:
    ran, mark = canary(site)
    decoy = site.root / "elsewhere"
    site.git("init", "-q", "--initial-branch=main", str(decoy), cwd=site.root)
    (decoy / "content" / "posts").mkdir(parents=True)
    (decoy / "content" / "posts" / "a.md").write_text("of somebody else\n")
    for hooks in (decoy / ".git" / "hooks", site.worktree / ".git" / "hooks"):
        hooks.mkdir(exist_ok=True)
        for name in HOOKS:
            shutil.copy(ran, hooks / name)
    configure(decoy / ".git" / "config", ran)
    for each in odd:
        each(site)
    mark.unlink(missing_ok=True)
    save(site)
    # What git itself looks for in the work tree, it finds in this one.
    site.write_post(".gitattributes", "*.md text eol=lf\n")
    (site.worktree / "content/posts/a.md").write_bytes(b"a\r\n")
    result = site.run_once()
    assert bool(result.of("published")) == published, result.stdout
    assert not mark.exists(), mark.read_text()
    assert subprocess.run(["git", "log"], cwd=decoy, capture_output=True, check=False).returncode
    if published:
        assert site.remote_file("content/posts/a.md") == "a\n"
        assert site.remote_file("content/posts/welcome.md") == "# Welcome\n"
        assert site.subjects() == ["Publish a", "Start the site"]
    else:
        assert site.job("a")["lastError"]
        assert len(site.remote_log()) == 1


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
        **dict.fromkeys((".gitattributes", ".gitmodules", "..a"), ""),
    }
    commit = site.git("commit-tree", _tree(site, hostile), "-p", "main", "-m", "Hostile", cwd=site.remote)
    site.git("update-ref", "refs/heads/main", commit, cwd=site.remote)
    hooks = sorted((site.worktree / ".git" / "hooks").iterdir())
    save(site)
    result = site.run_once()
    assert result.of("published"), result.stdout
    assert (site.worktree / "content/posts/theirs.md").read_text() == "theirs\n"
    written = {path.name for path in site.worktree.glob(".*")}
    assert written == {".git", ".gitattributes", ".gitmodules", "..a"}
    assert not [path for path in site.root.rglob("out.sh") if path.is_file()]
    assert list(elsewhere.iterdir()) == []
    assert not (site.worktree / "nested" / ".git").exists()
    assert sorted((site.worktree / ".git" / "hooks").iterdir()) == hooks


UNSEEN = "".join(map(chr, (*range(1, 32), *range(127, 160), 0xAD, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029)))
UNSEEN += "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF, 0xE0001, 0xFFF9)))
"""C0, C1, and what changes the direction or the line of a text, or is not seen at all."""


def visible(text: str) -> bool:
    return text.replace("\n", "").replace("\t", "").isprintable()


def test_no_text_of_a_job_or_a_remote_reaches_a_terminal_or_a_log_as_a_command(site: Site) -> None:
    words = f"x{UNSEEN}y\x1b[31mred\x1b]0;title\x07"
    soft = UNSEEN[32:]  # a job may have these: the contract refuses no more than C0
    (site.root / "words").write_bytes(words.encode())
    site.hook(f"cat {site.root}/words >&2; exit 1")
    site.write_post("content/posts/a.md", "a\n")
    name = f"content/posts/{UNSEEN.translate(dict.fromkeys(map(ord, UNSEEN[:94])))}.md"
    site.write_post(name, "odd\n")
    bad = ["content/posts/\x1b[31m.md", "../\u202e"]
    site.save("a", ["content/posts/a.md", name, *bad], message=words, author={"name": soft, "email": soft})
    site.save(f"s{soft}", [name], id=f"t{soft}", type=soft)
    site.save("e", ["content/posts/a.md"], author={"name": words, "email": words})
    site.save("b", [*bad, name], id=f"b{words}".replace("/", ""), message=words)
    site.save(words.replace("/", ""), ["content/posts/a.md"], message=words)
    site.save("c", ["content/posts/a.md"], type=words, lastError=words, failure=words)
    (site.queue / f"d{UNSEEN.replace('/', '')[:60]}.json").write_text('{"slug": ["' + UNSEEN[94:] + '"]}')
    said = [site.run_once(BRITER_DEBUG=debug) for debug in ("", "1")]
    assert any("red" in each["error"] for each in said[0].of("dead-lettered")), said[0].stdout
    for args in (["list"], ["show", "a"], ["history"]):
        said += [site.command(*args), site.command(*args, "--json")]
    said += [site.command("status"), site.command("doctor")]
    said.append(site.command("cancel", words))
    for each in said:
        assert visible(each.stdout), each.stdout
        assert visible(each.stderr), each.stderr
    jobs = site.jobs()
    assert {job["slug"] for job in jobs} >= {"a", "b", "c"}
    for job in jobs:
        assert job["lastError"]
        assert job["lastError"].isprintable(), job
    for file in site.queue.glob("[!.]*.json"):
        assert visible(file.read_text()), file


def test_large_files_of_lfs_are_uploaded_with_the_post(site: Site) -> None:
    provide("git-lfs", package="git-lfs")
    site.git("lfs", "install", "--local")
    site.git("remote", "set-url", "origin", f"file://{site.remote}")
    site.write_post(".gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n")
    site.git("add", ".gitattributes")
    site.git("-c", "core.hooksPath=/dev/null", "commit", "-qm", "attributes")
    site.git("-c", "core.hooksPath=/dev/null", "push", "-q", "origin", "main")
    site.save_post("large", "large\n" * 1000, "content/posts/large.bin")
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

"""Trees and packs written without git are what git itself would have written."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from briter_worker.errors import PublishError
from briter_worker.git.command import Commands
from briter_worker.git.commits import Commit, Person, Writer
from briter_worker.git.objects import Entry, Folder, Objects

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WHO = Person("A Person", "person@example.org").line(0)
ODD = (b"100644 a", b"x100644 a", b"40000 a", b"a 100644", b"100755 b")
"""Names that look like the start of another entry."""
PARTS = st.sampled_from(["a", "a-", "a.md", "b", "a0", "x", "ab", "ä", *map(os.fsdecode, ODD)])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
CHANGES = st.dictionaries(PATHS, st.one_of(st.none(), st.sampled_from([b"one\n", b"two\n", b""])), max_size=6)


@pytest.fixture(scope="module", params=["sha1", "sha256"])
def repository(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository")
    run(path, "init", "--quiet", f"--object-format={request.param}", "--initial-branch=main")
    return path


def run(path: Path, *args: str, stdin: bytes = b"") -> str:
    who = ("-c", "user.name=A Person", "-c", "user.email=person@example.org")
    done = subprocess.run(["git", *who, *args], cwd=path, input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return os.fsdecode(done.stdout)


def start(path: Path, files: Mapping[str, bytes]) -> str:
    """A commit of these files, made by git."""
    run(path, "read-tree", "--empty")
    add(path, files)
    return run(path, "commit-tree", run(path, "write-tree").strip(), "-m", "Start").strip()


def add(path: Path, files: Mapping[str, bytes | None]) -> None:
    """Put these into git's index; removals first, and whatever is in a file's way goes."""
    lines = []
    for name, content in sorted(files.items(), key=lambda item: item[1] is not None):
        if content is None:
            lines.append(b"0 " + b"0" * 64 + b"\t" + os.fsencode(name))
        else:
            sha = run(path, "hash-object", "-w", "--stdin", stdin=content).strip()
            lines.append(f"100644 {sha}\t".encode() + os.fsencode(name))
    width = 64 if "sha256" in run(path, "rev-parse", "--show-object-format") else 40
    stdin = b"".join(line.replace(b"0 " + b"0" * 64, b"0 " + b"0" * width) + b"\0" for line in lines)
    run(path, "update-index", "-z", "--add", "--replace", "--index-info", stdin=stdin)


def listed(path: Path, commit: str) -> str:
    return run(path, "ls-tree", "-r", "-t", "-z", commit)


def sound(changes: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """Without files below files of the same commit: a commit of the worker's never has those."""
    files = {name for name, content in changes.items() if content is not None}
    return {
        name: content
        for name, content in changes.items()
        if not any(name.startswith(f"{other}/") for other in files if other != name)
    }


@settings(max_examples=25, deadline=None)
@given(st.lists(CHANGES.map(sound), min_size=2, max_size=6))
def test_each_commit_has_the_tree_that_git_makes(
    repository: Path, batches: list[dict[str, bytes | None]]
) -> None:
    parent = start(repository, {k: v for k, v in batches[0].items() if v is not None} | {"keep": b"k"})
    commands = Commands(repository, remote="origin", timeout=60)
    writer = Writer(commands, tip=parent)
    commits = []
    for changes in batches[1:]:
        entries: dict[str, Entry | None] = {}
        for name, content in changes.items():
            if content is None:
                entries[name] = None
            else:
                entries[name] = Entry("100644", writer.hash(content))
                writer.blob(writer.hash(content), content)
        commits.append(Commit("Grüße\n\nzwei".encode(), WHO, WHO, entries))
    with Objects(commands) as objects:
        names = writer.commits(objects, parent, commits)
    for name, changes in zip(names, batches[1:], strict=True):
        add(repository, changes)
        assert listed(repository, name) == listed(repository, run(repository, "write-tree").strip())
    assert run(repository, "rev-list", f"{parent}..{names[-1]}").split() == names[::-1]
    assert run(repository, "fsck", "--strict", "--no-dangling", names[-1]) == ""


def test_a_folder_of_thousands_grows_by_a_few_bytes_a_commit(repository: Path) -> None:
    tip = start(repository, {f"posts/{number:04}.md": b"old\n" for number in range(300)})
    packs = repository / ".git" / "objects" / "pack"
    before = set(packs.glob("*.pack"))
    commands = Commands(repository, remote="origin", timeout=60)
    writer = Writer(commands, tip=tip)
    commits = []
    for number in range(200):
        content = b"new %d\n" % number
        writer.blob(writer.hash(content), content)
        path = f"posts/{number * 7 % 400:04}.md"  # a third of them new
        commits.append(Commit(b"One", WHO, WHO, {path: Entry("100644", writer.hash(content))}))
    with Objects(commands) as objects:
        names = writer.commits(objects, tip, commits)
    (pack,) = set(packs.glob("*.pack")) - before
    assert pack.stat().st_size < 200 * 350 + 6 * 20_000
    depths = [
        int(line.rsplit(" ", 2)[-2])
        for line in run(repository, "verify-pack", "-v", str(pack)).splitlines()
        if line.count(" ") > 5 and len(line.rsplit(" ", 2)[-1]) in (40, 64)
    ]
    assert max(depths) <= 51
    assert len(run(repository, "ls-tree", "-r", "--name-only", names[-1]).split()) == len(
        {*range(300), *(number * 7 % 400 for number in range(200))}
    )


def test_what_git_has_not_taken_is_written_again(repository: Path) -> None:
    commands = Commands(repository, remote="origin", timeout=60)
    writer = Writer(commands, tip=start(repository, {}))
    content = b"not taken at first\n"
    sha = writer.hash(content)
    writer.blob(sha, content)
    for pid in commands.watch.running():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(PublishError):
        writer.close()
    writer.blob(sha, content)
    writer.close()
    assert run(repository, "cat-file", "blob", sha) == content.decode()


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=12).filter(lambda b: not {0, 47} & set(b)) | st.sampled_from(ODD),
        st.sampled_from([b"100644", b"40000", b"100664", b"120000"]),
        max_size=30,
    ),
    st.randoms(),
    st.sampled_from([20, 32]),
)
def test_an_entry_is_found_as_if_all_were_read(
    entries: dict[bytes, bytes], random: object, size: int
) -> None:
    filler = bytes(size), b"\x007" * (size // 2), b"\0 a\0".rjust(size, b"4")
    raw = b"".join(
        b"%s %s\0%s" % (mode, name, filler[random.randrange(3)])  # type: ignore[attr-defined]
        for name, mode in entries.items()
    )
    everything = dict(Folder(raw, size).items())
    for name in [*entries, *ODD, b"a", b"b", b"7"]:
        one = Folder(raw, size).get(os.fsdecode(name))
        assert one == everything.get(os.fsdecode(name))


def test_a_folder_that_was_written_out_of_order_is_changed_all_the_same(repository: Path) -> None:
    sha = run(repository, "hash-object", "-w", "--stdin", stdin=b"old\n").strip()
    entries = b"".join(b"100644 %s\0" % name + bytes.fromhex(sha) for name in (b"z", b"a", b"m"))
    odd = ("hash-object", "-t", "tree", "-w", "--literally", "--stdin")
    tree = run(repository, *odd, stdin=entries).strip()
    tip = run(repository, "commit-tree", tree, "-m", "Odd").strip()
    commands = Commands(repository, remote="origin", timeout=60)
    writer = Writer(commands, tip=tip)
    new = Entry("100644", writer.hash(b"new\n"))
    writer.blob(new.sha, b"new\n")
    with Objects(commands) as objects:
        names = writer.commits(
            objects,
            tip,
            [Commit(b"One", WHO, WHO, {"a": new, "q": new}), Commit(b"Two", WHO, WHO, {"m": None, "r": new})],
        )
    found = dict(line.split("\t")[::-1] for line in run(repository, "ls-tree", names[-1]).splitlines())
    assert {name: about.split()[2] for name, about in found.items()} == {
        "z": sha,
        "a": new.sha,
        "q": new.sha,
        "r": new.sha,
    }

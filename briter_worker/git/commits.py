"""Commits: write them with one `git fast-import`, sign them, and read those of others."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, cast

from briter_worker.errors import FailureCode, PublishError
from briter_worker.events import FileChange
from briter_worker.git import messages
from briter_worker.git.repository import (
    COMMIT_MARK,
    COUNT_LINES,
    DIFF_TREE,
    FAST_IMPORT,
    blob_of,
    quote_path,
    read_raw,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from briter_worker.git.environment import Signer
    from briter_worker.git.repository import Entry
    from briter_worker.git.run import Git

_PROGRESS_STEP = 100
_WRITE_BLOBS = (*FAST_IMPORT, "--depth=0")
"""Differs from FAST_IMPORT, which may run ahead for the commits. Does not look for deltas between blobs."""
_IDENT = re.compile(rb"(?P<name>.*?) ?<(?P<email>.*)> (?P<date>\d+ [+-]\d+)")
_PLAIN = re.compile(rb"(?![\0- .,:;\"'\\])[^<>\n]+(?<![\0- .,:;\"'\\])")
"""Names that every git records as they are. From others, `git commit` drops marks: full stops until 2.44."""


@dataclass(frozen=True, slots=True)
class Person:
    """An author or committer, as git records it."""

    name: str
    email: str

    def line(self, now: float) -> bytes:
        """Return name, address and time in git's raw format."""
        return f"{self} {int(now)} +0000".encode()

    def __str__(self) -> str:
        """Return name and address, as git shows them."""
        return f"{self.name} <{self.email}>"


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit to write. `files` maps each changed path to its new file; None deletes the path."""

    message: bytes
    author: bytes
    committer: bytes
    files: Mapping[str, Entry | None]


@dataclass(frozen=True, slots=True)
class RemoteCommit:
    """A commit on the remote, and what it made of each path that it changed."""

    sha: str
    is_own: bool
    """The worker is the committer."""
    blobs: dict[str, str | None]


def write_commits(
    git: Git, commits: Sequence[Commit], *, parent: str, ref: str, progress: Callable[[str, int, int], None]
) -> list[str]:
    """Write the commits on top of `parent`, point `ref` at the last one, and return their ids in order.

    Commits, trees, blobs and the ref are durable when this returns. Raises PublishError.
    """
    commits = _with_recorded_people(git, commits)
    names: list[str] = []
    with git.open(*FAST_IMPORT) as command:
        for number, commit in enumerate(commits, start=1):
            if number % _PROGRESS_STEP == 1:
                progress("commit", number - 1, len(commits))
            _send_commit(command.send, commit, ref=ref, mark=number, parent="" if names else parent)
            name = command.answers.readline().decode().strip()
            if not name:
                raise EOFError
            names.append(name)
    if git.signer is not None:
        for number, commit in enumerate(commits):
            people = (commit.author, commit.committer)
            tree = f"{names[number]}^{{tree}}"
            parent = names[number] = write_commit(
                git, tree, parent, people=people, message=commit.message, signer=git.signer
            )
        git.run("update-ref", ref, parent)
    progress("commit", len(commits), len(commits))
    return names


def write_blobs(git: Git, contents: Iterable[bytes]) -> None:
    """Store contents in the repository, durably, in one pack. Raises PublishError."""
    with git.open(*_WRITE_BLOBS) as command:
        for content in contents:
            command.send.write(b"blob\n")
            _send_data(command.send, content)


def write_commit(
    git: Git,
    tree: str,
    parent: str = "",
    *,
    people: Iterable[bytes],
    message: bytes,
    encoding: str = "UTF-8",
    signer: Signer | None = None,
) -> str:
    """Have git write one commit; return its id. `people`: author and committer in git's raw format.

    Raises PublishError: SIGNING where the signer's key cannot be used.
    """
    variables: dict[str, str] = {}
    for role, line in zip(("AUTHOR", "COMMITTER"), people, strict=True):
        variables |= _ident_variables(role, recorded_person(git, line))
    key_settings: Sequence[str] = ()
    key_option: Sequence[str] = ()
    if signer is not None:
        key_settings = signer.options(git.state_dir)
        key_option = (f"-S{signer.key}",)
    parents = ("-p", parent) if parent else ()
    settings = ("-c", f"i18n.commitEncoding={encoding}", *key_settings)
    command = (*settings, "commit-tree", *key_option, *parents, tree)
    try:
        status, out, said = git.attempt(*command, stdin=message, env=variables)
    except PublishError as error:
        if signer is None or error.code is not FailureCode.TIMEOUT:
            raise
        text = f"the commit could not be signed: {error.message}"
        raise PublishError(FailureCode.SIGNING, text, messages.UNLOCK) from None
    if status == 0:
        return out.decode().strip()
    if signer is not None:
        if "failed to sign" in said:
            said += signer.report(git.state_dir)
        if failure := messages.from_signing(said):
            raise failure
    raise git.failure(["commit-tree"], said, status)


def recorded_person(git: Git, line: bytes) -> bytes:
    """Return an author or committer in git's raw format, as this git's `git commit` records the person.

    `git fast-import` would record every mark around the name, and `git commit-tree`, which signs, would not.
    Git refuses a name of marks alone: then the name is "unknown".
    """
    ident = cast("re.Match[bytes]", _IDENT.fullmatch(line))
    if _PLAIN.fullmatch(ident["name"]) and _PLAIN.fullmatch(ident["email"]):
        return line
    variables = _ident_variables("AUTHOR", line)
    status, recorded, _ = git.attempt("var", "GIT_AUTHOR_IDENT", env=variables)
    if status:
        recorded = git.run("var", "GIT_AUTHOR_IDENT", env={**variables, "GIT_AUTHOR_NAME": "unknown"})
    return recorded.removesuffix(b"\n")


def _ident_variables(role: str, line: bytes) -> dict[str, str]:
    """Return the variables by which git gets an author or committer."""
    ident = cast("re.Match[bytes]", _IDENT.fullmatch(line))
    return {
        f"GIT_{role}_NAME": os.fsdecode(ident["name"]),
        f"GIT_{role}_EMAIL": os.fsdecode(ident["email"]),
        f"GIT_{role}_DATE": f"@{ident['date'].decode()}",
    }


def _with_recorded_people(git: Git, commits: Sequence[Commit]) -> list[Commit]:
    people = {line for commit in commits for line in (commit.author, commit.committer)}
    recorded = {line: recorded_person(git, line) for line in people}
    return [
        replace(commit, author=recorded[commit.author], committer=recorded[commit.committer])
        for commit in commits
    ]


def read_signature(git: Git, signer: Signer, commit: str) -> str | None:
    """Return kind and key of a commit's signature, as receipts show them; None if there is none."""
    if signer.format == "x509":  # gpgsm would ask the network whether the certificate is revoked
        return f"x509 {signer.key}"
    # Without a list of allowed signers, git shows the key all the same.
    options = (*signer.options(git.state_dir), "-c", f"gpg.ssh.allowedSignersFile={os.devnull}")
    show = ("show", "-s", "--no-show-signature", "--format=%G?%n%GF")
    state, key = git.run(*options, *show, commit).decode().split("\n")[:2]
    return None if state == "N" else f"{signer.format} {key or signer.key}"


def _send_commit(send: IO[bytes], commit: Commit, *, ref: str, mark: int, parent: str) -> None:
    send.write(b"commit %s\nmark :%d\n" % (ref.encode(), mark))
    send.write(b"author %s\ncommitter %s\n" % (commit.author, commit.committer))
    _send_data(send, commit.message)
    if parent:
        send.write(b"from %s\n" % parent.encode())
    # Deletions first, because a file may take a folder's place.
    for path, file in sorted(commit.files.items(), key=lambda item: item[1] is not None):
        if file is None:
            send.write(b"D %s\n" % quote_path(path))
        elif file.content is None:
            send.write(b"M %s %s %s\n" % (file.mode.encode(), file.blob.encode(), quote_path(path)))
        else:
            send.write(b"M %s inline %s\n" % (file.mode.encode(), quote_path(path)))
            _send_data(send, file.content)
    send.write(b"\nget-mark :%d\n" % mark)
    send.flush()


def _send_data(send: IO[bytes], data: bytes) -> None:
    send.write(b"data %d\n" % len(data))
    send.write(data)
    send.write(b"\n")


def read_commits(git: Git, since: str, tip: str, identity: Person) -> list[RemoteCommit]:
    """Return the commits after `since` up to `tip` that change files, oldest first, without merges.

    A commit whose committer is `identity` counts as the worker's own.
    """
    log = git.fields(
        *("log", "--reverse", "--topo-order", "--no-merges", "--raw", "-z", "--no-renames", "--no-abbrev"),
        *("--encoding=UTF-8", f"--format={COMMIT_MARK}%H%n%cn <%ce>", f"{since}..{tip}", "--"),
    )
    recorded_name = recorded_person(git, identity.line(0)).rpartition(b" 0 ")[0].decode(errors="replace")
    name_of_earlier_versions = str(identity)
    found: dict[str, RemoteCommit] = {}
    for text, path, _, new in read_raw(log):
        sha, committer = text.split("\n")
        if sha not in found:
            is_own = committer in {recorded_name, name_of_earlier_versions}
            found[sha] = RemoteCommit(sha, is_own, {})
        found[sha].blobs[path] = blob_of(new)
    return [*found.values()]


def read_changes(
    git: Git, known: Mapping[str, Sequence[FileChange]], commits: set[str], base: str | None, tip: str
) -> dict[str, tuple[FileChange, ...]]:
    """Return the files that each commit changed: as `known`, or as git shows them.

    The lines of each file are counted between `base` and `tip`: a comparison for each commit would read the
    tree again and again. Nothing is known of the lines where several of the commits changed one file.
    """
    found = {commit: [*known[commit]] for commit in commits & known.keys()}
    if others := "".join(f"{commit}\n" for commit in commits - known.keys()):
        shown = ("--raw", f"--format={COMMIT_MARK}%H", "--stdin")
        # A commit that a shallow clone lacks is answered with its name alone.
        for sha, path, _, new in read_raw(git.fields(*DIFF_TREE, *shown, stdin=others.encode())):
            found.setdefault(sha, []).append(FileChange(path, None, None, new is None))
    times = Counter(each.path for changes in found.values() for each in changes)
    lines: dict[str, tuple[int | None, int | None]] = dict.fromkeys(times, (None, None))
    if times and base and git.worktree:  # a cluster's clone has no contents, and would fetch them
        for row in git.fields(*COUNT_LINES, base, tip):
            added, removed, path = row.split("\t", 2)
            if added != "-" and times[path] == 1:
                lines[path] = int(added), int(removed)
    return {
        sha: tuple(FileChange(path, *lines[path], gone) for path, _, _, gone in sorted(changes))
        for sha, changes in found.items()
    }

"""The commit point: write commits with one `git fast-import`, record their plan, push them with a lease."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

import git
from git.remote import PushInfo

from briter_worker.errors import FailureCode, PublishError, sync_folder
from briter_worker.events import FileChange
from briter_worker.git import messages
from briter_worker.git.environment import without
from briter_worker.git.repository import (
    COMMIT_MARK,
    COUNT_LINES,
    DIFF_TREE,
    FAST_IMPORT,
    blob_of,
    quote_path,
    read_raw,
)
from briter_worker.ports import BaseVersion, Conflict, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from briter_worker.git.environment import Signer
    from briter_worker.git.repository import Repository
    from briter_worker.git.run import Git

_PROGRESS_STEP = 100
_DROPPED = " .,:;<>\"\\'"
_IDENT = re.compile(rb"(?P<name>.*?) ?<(?P<email>.*)> (?P<date>\d+ [+-]\d+)")
_PROGRESS_LINE = re.compile(
    r"(?:^|(?<=\r))(?:remote: )?(?:Enumerating|Counting|Compressing|Writing|Delta|Resolving|Total|Unpacking"
    r"|Receiving)\b[^\r\n]*",
    re.MULTILINE,
)
_REFUSED = PushInfo.REJECTED | PushInfo.REMOTE_REJECTED
_WRITTEN = re.compile(rb"Writing objects:[^\r\n]*\((\d+)/(\d+)\)")


@dataclass(frozen=True, slots=True)
class Person:
    """An author or committer, as git records it."""

    name: str
    email: str

    def plain(self) -> Person:
        """Return the person as `git commit` records one: without the marks around the name that git drops."""
        return Person(self.name.strip(_DROPPED) or "unknown", self.email.strip(_DROPPED))

    def line(self, now: float) -> bytes:
        """Return name, address and time in git's raw format."""
        return f"{self} {int(now)} +0000".encode()

    def __str__(self) -> str:
        """Return name and address, as git shows them."""
        return f"{self.name} <{self.email}>"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a commit. `content` is given where the repository may lack the blob."""

    mode: str
    blob: str
    content: bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit to write. `files` maps each changed path to its new file; None deletes the path."""

    message: bytes
    author: bytes
    committer: bytes
    files: Mapping[str, File | None]


@dataclass(frozen=True, slots=True)
class RemoteCommit:
    """A commit on the remote, and the blobs of each path before and after it."""

    sha: str
    is_own: bool
    """The worker is the committer."""
    message: bytes
    blobs: dict[str, tuple[str | None, str | None]]


def write_commits(
    git: Git, commits: Sequence[Commit], *, parent: str, ref: str, progress: Callable[[str, int, int], None]
) -> list[str]:
    """Write the commits on top of `parent`, point `ref` at the last one, and return their ids in order.

    Commits, trees, blobs and the ref are durable when this returns. Raises PublishError.
    """
    names: list[str] = []
    with git.open(*FAST_IMPORT, what="the commits could not be written") as command:
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
        git.run("update-ref", ref, parent, what="the refs could not be moved")
    progress("commit", len(commits), len(commits))
    return names


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
    options, variables = ["-c", f"i18n.commitEncoding={encoding}"], {}
    for role, line in zip(("AUTHOR", "COMMITTER"), people, strict=True):
        ident = cast("re.Match[bytes]", _IDENT.fullmatch(line))
        person = Person(os.fsdecode(ident["name"]), os.fsdecode(ident["email"])).plain()
        variables[f"GIT_{role}_NAME"], variables[f"GIT_{role}_EMAIL"] = person.name, person.email
        variables[f"GIT_{role}_DATE"] = f"@{ident['date'].decode()}"
    options += signer.options(git.state_dir) if signer else []
    parents, sign = ["-p", parent] if parent else [], [f"-S{signer.key}"] if signer else []
    command = (*options, "commit-tree", *sign, *parents, tree)
    status, out, said = git.attempt(*command, stdin=message, env=variables)
    if status == 0:
        return out.decode().strip()
    if signer is not None:
        said += signer.report(git.state_dir) if "failed to sign" in said else ""
        if failure := messages.from_signing(said):
            raise failure
    raise git.failure("the commit could not be written", said, status)


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
    """Return the commits between `since` and `tip`, oldest first. The worker's are those of `identity`."""
    out = git.run(
        *("log", "--reverse", "--topo-order", "--no-merges", "--raw", "-z", "--no-renames", "--no-abbrev"),
        *("--encoding=UTF-8", f"--format={COMMIT_MARK}%H%n%cn <%ce>%n%B", f"{since}..{tip}", "--"),
        what="the remote's new commits could not be read",
    )
    found: dict[str, RemoteCommit] = {}
    for text, path, old, new in read_raw(out):
        sha, committer, message = text.split("\n", 2)
        is_own = committer in (str(identity), str(identity.plain()))
        commit = RemoteCommit(sha, is_own, os.fsencode(message).strip(), {})
        found.setdefault(sha, commit).blobs[path] = blob_of(old), blob_of(new)
    return [*found.values()]


def read_changes(
    git: Git, known: Mapping[str, Sequence[FileChange]], commits: set[str], base: str | None, tip: str
) -> dict[str, tuple[FileChange, ...]]:
    """Return the files that each commit changed: as `known`, or as git shows them.

    The lines of each file are counted between `base` and `tip`: a comparison for each commit would read the
    tree again and again. Nothing is known of the lines where several of the commits changed one file.
    """
    what = "what the commits changed could not be read"
    found = {commit: [*known[commit]] for commit in commits & known.keys()}
    if others := "".join(f"{commit}\n" for commit in commits - known.keys()):
        shown = ("--raw", f"--format={COMMIT_MARK}%H", "--stdin")
        # A commit that a shallow clone lacks is answered with its name alone.
        for sha, path, _, new in read_raw(git.run(*DIFF_TREE, *shown, stdin=others.encode(), what=what)):
            found.setdefault(sha, []).append(FileChange(path, None, None, new is None))
    times = Counter(each.path for changes in found.values() for each in changes)
    lines: dict[str, tuple[int | None, int | None]] = dict.fromkeys(times, (None, None))
    if times and base and git.worktree:  # a cluster's clone has no contents, and would fetch them
        for row in os.fsdecode(git.run(*COUNT_LINES, base, tip, what=what)).split("\0")[:-1]:
            added, removed, path = row.split("\t", 2)
            if added != "-" and times[path] == 1:
                lines[path] = int(added), int(removed)
    return {
        sha: tuple(FileChange(path, *lines[path], gone) for path, _, _, gone in sorted(changes))
        for sha, changes in found.items()
    }


class UncertainPushError(PublishError):
    """Report a push that failed after git began to send: it may have landed, or land later."""


def _receive_pack(git: Git) -> str:
    """Return the command for the remote's end, whatever the configuration names: git would run that.

    On this machine, the command runs without our descriptors: a hook may leave a daemon behind.
    """
    urls = [each for name in ("pushurl", "url") for each in git.config_values(f"remote.{git.remote}.{name}")]
    is_rewritten = any(key.startswith("url.") for key, _ in git.settings)
    is_here = bool(urls) and urls[0].startswith(("/", "file://")) and not is_rewritten
    return without(git.pass_fds if is_here else (), "git-receive-pack")


def push(
    repository: Repository,
    refspec: str,
    *,
    expect: str | None,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> bool:
    """Make the remote's branch what the local ref is, if it is still `expect` (None: absent).

    Return False if it is not: then nothing was changed. The lease has the remote compare before it swaps.
    Raises UncertainPushError when the push may have landed all the same, and PublishError when it did not:
    REJECTED where the remote objects to the contents.
    """

    def watch(part: bytes) -> None:
        if not part:  # this push takes long: whoever looks is to see it
            progress("push", 0, 0)
        for done, total in _WRITTEN.findall(part)[-1:]:
            progress("push", int(done), int(total))

    repository.git.watch, repository.git.said = watch, ""
    infos: list[PushInfo] = []
    try:
        with suppress(git.GitCommandError):
            infos = git.Remote(repository.git.repo, repository.remote).push(
                refspec,
                progress=git.RemoteProgress(),  # has git print it
                allow_unsafe_options=True,  # for the next one, which makes it safe
                receive_pack=_receive_pack(repository.git),
                force_with_lease=f"{refspec.rpartition(':')[2]}:{expect or ''}",
                dry_run=dry_run,
                no_thin=repository.git.worktree is None,  # a bare clone lacks contents
            )
        return _result_of(infos, _PROGRESS_LINE.sub("", repository.git.said))
    except PublishError as error:
        is_answered = any(each.flags & _REFUSED for each in infos)
        if dry_run or is_answered or not _PROGRESS_LINE.search(repository.git.said):
            raise
        raise UncertainPushError(error.code, error.message, error.fix) from error


def move_side_branch(repository: Repository, source: str, branch: str, expect: str | None) -> bool:
    """Move a branch of the worker's own on the remote, if it is still `expect`; an empty `source` deletes it.

    Return False if the remote did not do it.
    """
    try:
        return push(repository, f"{source}:refs/heads/{branch}", expect=expect)
    except PublishError:
        return False


def push_large_files(repository: Repository, ref: str, *, base: str | None, dry_run: bool) -> None:
    """Upload what git-lfs stores for this ref; the pointers alone would be broken files."""
    if base and repository.git.worktree is None:
        # git-lfs skips what a tracking ref has. It cannot fetch the blobs that a blobless clone lacks.
        repository.update_refs((repository.tracking_ref, base, None))
    options = ["--dry-run"] if dry_run else []
    repository.git.run(
        *("lfs", "push", *options, repository.remote, ref), what="git-lfs could not upload large files"
    )


def _result_of(infos: list[PushInfo], text: str) -> bool:
    if infos and not infos[0].flags & PushInfo.ERROR:
        return True
    summary = infos[0].summary.strip() if infos else ""
    if not infos or not infos[0].flags & _REFUSED:
        raise messages.from_git("the push failed", f"{summary}\n{text}")
    if failure := messages.from_rejection(summary, text):
        raise failure
    return False


def note_unlanded(repository: Repository, commits: Mapping[str, str]) -> None:
    """Remember the commits of a push that a slow remote may apply later, by the key of each save."""
    repository.update_refs(*((_unlanded_ref(repository, key), sha, None) for key, sha in commits.items()))


def find_late(repository: Repository, keys: Iterable[str], tip: str) -> Mapping[str, str]:
    """Return the commits of these saves that have landed after all: `tip` contains them."""
    folder, prefix = repository.git.common_dir, repository.unlanded_refs
    packed = folder / "packed-refs"
    if not (folder / prefix).is_dir() and not (packed.is_file() and prefix.encode() in packed.read_bytes()):
        return {}  # nearly always: a batch may have thousands of saves
    noted = ((key, repository.ref(_unlanded_ref(repository, key))) for key in keys)
    return {key: sha for key, sha in noted if sha and repository.is_ancestor(sha, tip)}


def _unlanded_ref(repository: Repository, key: str) -> str:
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
    return f"{repository.unlanded_refs}/{digest}"


class FilePlans:
    """Store each plan of the disk backend in a file below `.git/briter/`. Implements `ports.PlanStore`."""

    def __init__(self, state_dir: Path, branch: str) -> None:
        self._folder = _branch_folder(state_dir, branch) / "plans"

    def record(self, plan: Plan) -> None:
        """Store the plan durably."""
        _write(self._folder / f"{plan.id}.json", plan)

    def plans(self) -> Sequence[Plan]:
        """Return the recorded plans, oldest first. Raises OSError, and PublishError for a damaged file."""
        files = sorted((file.stat().st_mtime_ns, file) for file in self._folder.glob("*.json"))
        return [Plan(*_read(file)) for _, file in files]

    def drop(self, plan: Plan) -> None:
        """Delete the plan durably. Raises OSError."""
        with suppress(FileNotFoundError):
            (self._folder / f"{plan.id}.json").unlink()
            sync_folder(self._folder)


class FileConflicts:
    """Remember the conflicts that are open. Implements `ports.BaseVersions` beside the checkout.

    The checkout remembers every other base version, so a version without a conflict is forgotten here.
    """

    def __init__(self, state_dir: Path, branch: str) -> None:
        self._file = _branch_folder(state_dir, branch) / "conflicts.json"

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        """Return the base versions of those paths that have an open conflict."""
        known = _read(self._file) if self._file.exists() else {}
        return {
            path: BaseVersion(blob, {slug: Conflict(*each) for slug, each in conflicts.items()})
            for path, (blob, conflicts) in known.items()
            if path in paths
        }

    def remember(
        self,
        versions: Mapping[str, BaseVersion],
        contents: Mapping[str, bytes],  # noqa: ARG002 - the repository has them
        tip: str | None = None,  # noqa: ARG002 - as the contents
    ) -> None:
        """Store the versions that have a conflict, and forget those of the other paths."""
        known = _read(self._file) if self._file.exists() else {}
        both = {**known, **{path: (base.blob, dict(base.conflicts)) for path, base in versions.items()}}
        _write(self._file, {path: each for path, each in both.items() if each[1]})


def _branch_folder(state_dir: Path, branch: str) -> Path:
    """Return the folder of one branch's state: linked work trees share `state_dir`, but no branch."""
    return state_dir / hashlib.sha256(branch.encode(errors="surrogateescape")).hexdigest()[:16]


def _read(file: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise PublishError.from_os("the state of earlier pushes cannot be read", error) from error
    except ValueError as error:
        raise PublishError(
            FailureCode.CORRUPT,
            f"{file} is damaged",
            f"compare the remote's last commits with the posts that wait, then: rm {file}",
        ) from error


def _write(file: Path, document: object) -> None:
    """Replace the file durably. Raises PublishError."""
    partial = file.with_name("new.tmp")  # one name: what a dead worker left is replaced
    try:
        if not file.parent.is_dir():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (file.parent.parent, file.parent.parent.parent):
                sync_folder(folder)
        with partial.open("w") as handle:
            handle.write(json.dumps(document))
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        raise PublishError.from_os("the plan of a push cannot be stored", error) from error

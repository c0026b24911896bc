"""The publisher: a transaction whose commit point is the push.

Look, stage, commit aside, push, adopt. Until the push nothing moves in the branch, the index or the work
tree, so whatever happens before leaves the repository as it was.
"""

from __future__ import annotations

import re
import uuid
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError, Stopped
from briter_worker.git.adopt import Adoption
from briter_worker.git.attributes import Attributes
from briter_worker.git.bases import Base, Bases, Conflict, read_bases, write_bases
from briter_worker.git.commits import Commit, Person, Writer
from briter_worker.git.objects import Objects
from briter_worker.git.reconcile import Placing
from briter_worker.git.remote import Pushed, Remote
from briter_worker.git.site import BASES, DRY_RUN, PRIVATE, Site, Tips
from briter_worker.git.staging import Staging
from briter_worker.ports import Change, Outcome, Plan, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Entry

_RACES = 5
_LAST_WORDS = 10.0
"""How long each command may take that asks what became of an aborted push."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A post that is to be put on the branch; without a key, a dry run's commit that goes along."""

    key: str
    slug: str
    message: bytes
    author: bytes
    changes: tuple[Change, ...]
    rejected: tuple[str, ...] = ()


@dataclass(slots=True)
class _Built:
    """Items put on a tip, as commits."""

    tip: str
    commits: dict[str, str] = field(default_factory=dict)
    entries: dict[str, Entry | None] = field(default_factory=dict)
    unchanged: list[_Item] = field(default_factory=list)
    conflicts: list[tuple[_Item, tuple[str, ...]]] = field(default_factory=list)
    carriers: dict[str, str] = field(default_factory=dict)
    """For each path that a commit changed, the last commit that did."""


@dataclass(slots=True)
class _Run:
    """One call of `publish`: what stays the same over all its pushes."""

    objects: Objects
    record: Callable[[Plan], None]
    now: float
    lfs: bool = False
    remote_checked: bool = False
    seen_remote: str | None = None
    """Where the remote was when the run began: what it lacked then, this run's pushes carry."""


class GitPublisher:
    """Publishes from one work tree to one branch of one remote. The worker holds the site meanwhile."""

    def __init__(
        self,
        commands: Commands,
        *,
        branch: str,
        remote: str,
        allowlist: Allowlist,
        identity: Person,
        max_file_bytes: int,
        dry_run: bool,
        progress: Callable[[str, int, int], None],
        warn: Callable[[str], None],
        still_ours: Callable[[], bool],
    ) -> None:
        self._commands = commands
        self._site = Site(commands, branch=branch, remote=remote)
        self._remote = Remote(self._site, progress=lambda done, total: progress("push", done, total))
        self._allowlist = allowlist
        self._identity = identity
        self._max_file_bytes = max_file_bytes
        self._dry_run = dry_run
        self._progress = progress
        self._warn = warn
        self._still_ours = still_ours

    # What the drain asks for

    def publish(
        self,
        requests: Sequence[Request],
        *,
        held: Collection[str],
        record: Callable[[Plan], None],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        """See `ports.Publisher`."""
        with self._run(record, now) as (run, found):
            tips = found
            if not self._dry_run and self._site.ref(DRY_RUN) is not None:
                self._flush(run, tips)
                tips = self._site.look()
            items, refused = self._stage(run, requests, tips.local, held)
            if refused:
                yield refused
            yield from self._settle(run, items, tips)

    def abort(self) -> None:
        """Give up what is running, at once; `landed` then says what became of it. From any thread."""
        self._commands.abort()

    def landed(self, plan: Plan) -> bool:
        """See `ports.Publisher`."""
        self._commands.reopen(_LAST_WORDS)
        self._commands.refresh()
        if plan.dry_run:
            done = self._site.ref(self._site.branch_ref) == plan.new
        else:
            tip = self._remote.tip()
            done = tip == plan.new
            if tip is not None and not done and self._site.ref(plan.ref) == plan.new:
                done = self._site.is_ancestor(plan.new, self._remote.fetch())
        if done:
            with Objects(self._commands) as objects:
                self._adopt(objects, plan, None)
        return done

    def flush(self, now: float) -> str | None:
        """See `ports.Publisher`."""
        with self._run(lambda _: None, now) as (run, tips):
            return self._flush(run, tips)

    def tidy(self, now: float) -> None:
        """See `ports.Publisher`."""
        self._site.tidy(now)
        with Objects(self._commands) as objects:
            tip = self._site.ref(self._site.branch_ref)
            if tip is not None:
                Adoption(self._site, objects).heal(tip)

    @contextmanager
    def _run(self, record: Callable[[Plan], None], now: float) -> Iterator[tuple[_Run, Tips]]:
        tips = self._site.look()
        with Objects(self._commands) as objects:
            yield _Run(objects, record, now, seen_remote=tips.remote), tips
        self._site.leave()

    # Stage

    def _stage(
        self, run: _Run, requests: Sequence[Request], tip: str, held: Collection[str]
    ) -> tuple[list[_Item], list[Outcome]]:
        tree = run.objects.tree(tip)
        attributes = Attributes(self._commands, tree)
        file_mode = self._commands.repo.config_reader().get_value("core", "fileMode", default="true")
        writer = self._writer(tip)
        try:
            staged = Staging(
                self._commands,
                allowlist=self._allowlist,
                attributes=attributes,
                tree=tree,
                writer=writer,
                max_file_bytes=self._max_file_bytes,
                keep_modes=str(file_mode).lower() in ("false", "0", "no", "off"),
                progress=self._progress,
            ).stage(requests, held=held)
            writer.close()
        finally:
            writer.give_up()
        run.lfs = attributes.uses_lfs
        bases = read_bases(self._site, run.objects)
        items: list[_Item] = []
        refused: list[Outcome] = []
        for request in requests:
            each = staged[request.key]
            rejected = (*each.rejected, *each.missing)
            if each.failure is not None:
                refused.append(
                    Outcome(request.key, failure=each.failure, text=each.text, rejected_paths=rejected)
                )
                continue
            author = Person(*request.author) if request.author else self._identity
            items.append(
                _Item(
                    request.key,
                    request.slug,
                    request.message.encode(),
                    author.line(run.now),
                    tuple(_based(change, bases) for change in each.changes),
                    rejected,
                )
            )
        return items, refused

    def _writer(self, tip: str) -> Writer:
        return Writer(self._commands, hash_name="sha1" if len(tip) == 40 else "sha256")  # noqa: PLR2004

    # Commit

    def _build(self, run: _Run, items: Sequence[_Item], tip: str, ref: str) -> _Built:
        placing = Placing(self._commands, run.objects, run.objects.tree(tip))
        built = _Built(tip)
        commits: list[Commit] = []
        keys: list[str] = []
        for item in items:
            placed = placing.place(item.changes)
            if placed.conflicts:
                built.conflicts.append((item, placed.conflicts))
            elif not placed.entries:
                built.unchanged.append(item)
            else:
                committer = self._identity.line(run.now)
                commits.append(Commit(item.message, item.author, committer, placed.entries))
                keys.append(item.key)
                built.entries.update(placed.entries)
        if commits:
            names = self._writer(tip).commits(ref, tip, commits)
            built.tip = names[-1]
            for key, name, commit in zip(keys, names, commits, strict=True):
                built.commits[key] = name
                built.carriers.update(dict.fromkeys(commit.entries, name))
        return built

    # Push

    def _settle(self, run: _Run, items: Sequence[_Item], tips: Tips) -> Iterator[list[Outcome]]:
        """Push the items; what the remote rejects is halved until the post at fault stands alone."""
        todo = deque([list(items)] if items else [])
        while todo:
            part = todo.popleft()
            try:
                outcomes, tips = self._publish_part(run, part, tips)
            except PublishError as failure:
                if failure.failure is not Failure.REJECTED:
                    raise
                if len(part) > 1:
                    middle = len(part) // 2
                    todo.extendleft([part[middle:], part[:middle]])
                    continue
                item = part[0]
                outcomes = [
                    Outcome(
                        item.key, failure=failure.failure, text=failure.text, rejected_paths=item.rejected
                    )
                ]
            yield outcomes

    def _publish_part(self, run: _Run, items: Sequence[_Item], tips: Tips) -> tuple[list[Outcome], Tips]:
        """Put the items on the remote, wherever it has moved to. One push, if nobody else pushes."""
        base, own = tips.local, list[_Item]()
        settled: list[Outcome] = []
        waiting = list(items)
        if tips.remote is not None and tips.remote != base and not self._site.is_ancestor(tips.remote, base):
            tips, own, base = self._catch_up(run, tips)
        for _ in range(_RACES + 1):
            ref = f"{PRIVATE}/{uuid.uuid4().hex}"
            built = self._build(run, [*own, *waiting], base, ref)
            for item, paths in built.conflicts:
                settled.append(self._conflict(run, item, paths, tips, base))
                waiting.remove(item)
            carried, same = self._sort_unchanged(run, built, base)
            if not built.commits and not carried:
                if run.remote_checked or not same or self._remote.tip() == tips.remote:
                    return settled + [self._unchanged(run, item, tips, base) for item in same], tips
                tips, own, base = self._catch_up(run, tips)
                continue
            if not built.commits:
                self._site.update((ref, built.tip, None), log="briter")
            commits = built.commits | {item.key: _carrier(built, item) for item in carried}
            commits.pop("", None)
            staged = {change.path: change.blob for item in waiting for change in item.changes}
            plan = Plan(tips.local, built.tip, ref, commits, staged, self._dry_run, tips.remote)
            if self._push(run, plan) is Pushed.MOVED:
                tips, own, base = self._catch_up(run, tips)
                continue
            run.remote_checked = True
            self._adopt(run.objects, plan, built.entries if _is_plain(plan, built, base) else None)
            rejected = {item.key: item.rejected for item in waiting}
            settled += [Outcome(key, sha, rejected_paths=rejected[key]) for key, sha in commits.items()]
            settled += [self._unchanged(run, item, tips, base) for item in same]
            return settled, Tips(plan.new, tips.remote if self._dry_run else plan.new)
        raise PublishError(
            Failure.LOST_RACE, f"others pushed {_RACES} times while this was being pushed; it is tried again"
        )

    def _push(self, run: _Run, plan: Plan) -> Pushed:
        run.record(plan)
        if not self._still_ours():
            raise Stopped
        if run.lfs:
            self._remote.push_large_files(plan.ref, dry_run=plan.dry_run)
        return self._remote.push(plan.ref, new=plan.new, expect=plan.remote, dry_run=plan.dry_run)

    def _adopt(self, objects: Objects, plan: Plan, known: dict[str, Entry | None] | None) -> None:
        try:
            Adoption(self._site, objects).adopt(plan, known)
        except (PublishError, OSError) as error:
            # The posts are on the remote. The next adoption brings the local side up to it.
            self._warn(str(error))

    def _sort_unchanged(self, run: _Run, built: _Built, base: str) -> tuple[list[_Item], list[_Item]]:
        """Unchanged items whose content this push carries to the remote, and those that it has already."""
        items = [item for item in built.unchanged if item.key]
        if not items or (run.seen_remote == base and not built.commits):
            return [], items
        seen = None if run.seen_remote is None else run.objects.tree(run.seen_remote)
        now = run.objects.tree(built.tip)
        carried = [
            item
            for item in items
            if any(
                (seen.entry(change.path) if seen else None) != now.entry(change.path)
                for change in item.changes
            )
        ]
        return carried, [item for item in items if item not in carried]

    def _unchanged(self, run: _Run, item: _Item, tips: Tips, base: str) -> Outcome:
        """Nothing to do; but it may have been our own push, whose answer was lost, that brought it there."""
        commit = None
        if base != tips.local:
            commit = self._own_commit(run, item, tips.local, base)
        return Outcome(item.key, commit, rejected_paths=item.rejected)

    def _own_commit(self, run: _Run, item: _Item, old: str, new: str) -> str | None:
        out = self._commands.run("rev-list", "--no-merges", f"{old}..{new}")
        committer = f"committer {self._identity.name} <{self._identity.email}> ".encode()
        for sha in out.decode().split():
            found = run.objects.read(sha)
            if found is not None:
                header, _, message = found[1].partition(b"\n\n")
                if message == item.message and b"\n" + committer in header:
                    return sha
        return None

    # The remote moved

    def _catch_up(self, run: _Run, tips: Tips) -> tuple[Tips, list[_Item], str]:
        """The new tips, the dry runs' commits to put on the remote's, and the commit to build on."""
        theirs = self._remote.fetch()
        if tips.remote is not None and not self._site.is_ancestor(tips.remote, theirs):
            raise PublishError(
                Failure.REMOTE_REWRITTEN,
                f"the remote's {self._site.branch} no longer contains what it had ({tips.remote[:10]}). "
                f"Fix: git push it again, or git fetch && git reset --keep {self._site.remote}/{self._site.branch}",
            )
        run.seen_remote = theirs
        run.remote_checked = True
        moved = Tips(tips.local, theirs)
        if self._site.is_ancestor(theirs, tips.local):
            return moved, [], tips.local
        if self._site.is_ancestor(tips.local, theirs):
            return moved, [], theirs
        return moved, self._own_commits(run, tips.local, theirs), theirs

    def _own_commits(self, run: _Run, local: str, theirs: str) -> list[_Item]:
        """The commits that the remote lacks, to be put on its tip: ours, of dry runs, and no person's."""
        out = self._commands.run("rev-list", "--reverse", "--topo-order", "--parents", f"{theirs}..{local}")
        dry = self._site.ref(DRY_RUN)
        ours = dry is not None and self._site.is_ancestor(local, dry)
        adoption = Adoption(self._site, run.objects)
        committer = f"\ncommitter {self._identity.name} <{self._identity.email}> ".encode()
        items: list[_Item] = []
        for line in out.decode().splitlines():
            sha, *parents = line.split()
            found = run.objects.read(sha)
            header, _, message = found[1].partition(b"\n\n") if found else (b"", b"", b"")
            author = re.search(rb"^author (.*)$", header, re.MULTILINE)
            if not ours or len(parents) != 1 or author is None or committer not in header:
                remote, branch = self._site.remote, self._site.branch
                raise PublishError(
                    Failure.DIVERGED,
                    f"{branch} has a commit of a person's ({sha[:10]}) that the remote lacks, and the remote "
                    f"has others. Fix: git pull --rebase {remote} {branch}",
                )
            changes = tuple(
                Change(
                    path,
                    each.new.mode if each.new else "",
                    each.new.sha if each.new else None,
                    each.old.sha if each.old else None,
                )
                for path, each in adoption.differences(parents[0], sha).items()
            )
            items.append(_Item("", "", message, author.group(1), changes))
        return items

    def _conflict(self, run: _Run, item: _Item, paths: Sequence[str], tips: Tips, base: str) -> Outcome:
        """Keep the post's version on a branch of its own, and both versions in mind."""
        if not item.key:
            raise PublishError(
                Failure.DIVERGED,
                f"the remote changed {', '.join(paths)} in the same lines as a dry run's commit. Fix: "
                f"git reset --keep {self._site.remote}/{self._site.branch} drops the dry runs' commits",
            )
        name = f"conflict/{_branch_name(item.slug)}"
        ref = f"{PRIVATE}/{name}-{uuid.uuid4().hex[:8]}"
        alone = tuple(Change(c.path, c.mode, c.blob, _blob(run, tips.local, c.path)) for c in item.changes)
        built = self._build(
            run, [_Item(item.key, item.slug, item.message, item.author, alone)], tips.local, ref
        )
        kept = False
        if built.commits:
            kept = self._remote.keep(ref, name, dry_run=self._dry_run)
            if not kept:
                name = f"{name}-{built.tip[:8]}"
                kept = self._remote.keep(ref, name, dry_run=self._dry_run)
        bases = read_bases(self._site, run.objects)
        by_path = {change.path: change for change in item.changes}
        for path in paths:
            start = bases[path].start if path in bases else by_path[path].base
            bases[path] = Base(start, Conflict(by_path[path].blob, _blob(run, base, path)))
        self._site.update((BASES, write_bases(self._commands, bases), None), log="briter")
        where = f"the branch {name} of the remote" if kept else f"the local ref {ref}"
        return Outcome(
            item.key,
            failure=Failure.CONFLICT,
            text=f"the remote changed {', '.join(paths)} in the same lines. Both versions are kept, "
            f"the post's on {where}. Fix: take the remote's changes over into the post, and save it again",
            rejected_paths=item.rejected,
        )

    # Commits of dry runs

    def _flush(self, run: _Run, tips: Tips) -> str | None:
        """Push what dry runs have committed, and nothing of a person's that came after it."""
        dry = self._site.ref(DRY_RUN)
        if dry is None:
            return None
        if tips.remote is not None and self._site.is_ancestor(dry, tips.remote):
            self._site.update((DRY_RUN, None, None), log="briter")
            return None
        new, own, base = dry, list[_Item](), dry
        for _ in range(_RACES + 1):
            ref = f"{PRIVATE}/{uuid.uuid4().hex}"
            if own:
                built = self._build(run, own, base, ref)
                if built.conflicts:
                    self._conflict(run, *built.conflicts[0], tips, base)
                new = built.tip
            if not own or not built.commits:
                self._site.update((ref, new, None), log="briter")
            plan = Plan(tips.local, new, ref, {}, {}, dry_run=False, remote=tips.remote)
            try:
                pushed = self._push(run, plan)
            except PublishError as failure:
                if failure.failure is Failure.REJECTED:
                    raise PublishError(
                        Failure.REMOTE_REFUSED, f"a dry run's commit: {failure.text}"
                    ) from failure
                raise
            if pushed is Pushed.DONE:
                run.remote_checked = True
                if own or tips.local == dry:
                    self._adopt(run.objects, plan, {} if not own else None)
                else:
                    self._site.update(
                        (self._site.tracking_ref, new, None),
                        (DRY_RUN, None, None),
                        (ref, None, None),
                        log="briter",
                    )
                return new
            seen = run.seen_remote
            tips, own, base = self._catch_up(run, tips)
            run.seen_remote = seen
            new = base if base != tips.local else dry
        raise PublishError(Failure.LOST_RACE, "others pushed again and again; it is tried again")


def _based(change: Change, bases: Bases) -> Change:
    base = bases.get(change.path)
    return change if base is None else Change(change.path, change.mode, change.blob, base.of(change.blob))


def _is_plain(plan: Plan, built: _Built, base: str) -> bool:
    """Whether all that the plan changes is what the work tree has already: nothing came from elsewhere."""
    return base == plan.old and all(
        plan.staged.get(path) == (entry.sha if entry else None) for path, entry in built.entries.items()
    )


def _carrier(built: _Built, item: _Item) -> str:
    return next((built.carriers[c.path] for c in item.changes if c.path in built.carriers), built.tip)


def _blob(run: _Run, commit: str, path: str) -> str | None:
    entry = run.objects.tree(commit).entry(path)
    return None if entry is None or entry.is_folder else entry.sha


def _branch_name(slug: str) -> str:
    """A slug as part of a branch's name: what git does not take becomes a dash."""
    name = re.sub(r"[^\w/.-]+|\.\.+|/\.+|//+|@\{", "-", slug).strip("/.-")
    return re.sub(r"\.lock(?=/|$)", "-lock", name)[:100].rstrip("/.-") or "post"

"""The publisher: a transaction whose commit point is the push.

Look, stage, commit aside, push, adopt. Until the push nothing moves in the branch, the index or the work
tree, so whatever happens before leaves the repository as it was.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from briter_worker.errors import PublishError
from briter_worker.git.attributes import Attributes
from briter_worker.git.building import Building, Item
from briter_worker.git.commits import Person, Writer
from briter_worker.git.objects import Objects
from briter_worker.git.pending import has_late_adoption
from briter_worker.git.place import WorkTree
from briter_worker.git.remote import Remote
from briter_worker.git.staging import Staging
from briter_worker.git.transaction import Transaction
from briter_worker.ports import Outcome, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.command import Commands
    from briter_worker.git.place import Place
    from briter_worker.git.site import Tips
    from briter_worker.ports import Change, Request

_LAST_WORDS = 10.0
"""How long each command may take that asks what became of an aborted push."""


class GitPublisher:
    """Publishes from one place to one branch of one remote. The worker holds the site meanwhile.

    The place is the work tree of `commands`, if no other is given.
    """

    def __init__(  # noqa: PLR0913 - all that a publication needs
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
        place: Place | None = None,
    ) -> None:
        self._commands = commands
        self._place: Place = place or WorkTree(commands, branch=branch, remote=remote)
        self._site = self._place.site
        self._remote = Remote(self._site, progress=lambda done, total: progress("push", done, total))
        self._allowlist = allowlist
        self._identity = identity
        self._max_file_bytes = max_file_bytes
        self._dry_run = dry_run
        self._progress = progress
        self._warn = warn
        self._still_ours = still_ours
        self._late: list[Plan] = []

    def publish(
        self,
        requests: Sequence[Request],
        *,
        held: Collection[str],
        examine: Callable[[str, Sequence[Change]], Outcome | None],
        cancelled: Callable[[], Collection[str]],
        record: Callable[[Plan], None],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        """See `ports.Publisher`."""
        left = {request.key: request for request in requests}
        known: dict[str, tuple[Sequence[Change], Outcome | None]] = {}

        def once(key: str, changes: Sequence[Change]) -> Outcome | None:
            """Nobody is asked the same again, should it have to be built anew."""
            if key not in known or known[key][0] != changes:
                known[key] = changes, examine(key, changes)
            return known[key][1]

        while True:
            try:
                for outcomes in self._publish(
                    list(left.values()),
                    held=held,
                    examine=once,
                    cancelled=cancelled,
                    record=record,
                    now=now,
                ):
                    for outcome in outcomes:
                        left.pop(outcome.key, None)
                    yield outcomes
            except (PublishError, OSError) as failure:
                if self._place.renewed(failure):
                    continue
                raise
            return

    def _publish(
        self,
        requests: Sequence[Request],
        *,
        held: Collection[str],
        examine: Callable[[str, Sequence[Change]], Outcome | None],
        cancelled: Callable[[], Collection[str]],
        record: Callable[[Plan], None],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        with self._looked() as (found, objects):
            tips = found
            if self.pending_flush() and not self._is_merged(tips):  # else it goes along with the posts
                self._flush(objects, tips, now)
                tips = self._site.look()
            writer = Writer(self._commands, tip=tips.local, progress=self._progress)
            try:
                items, refused, large_files = self._stage(objects, writer, requests, tips.local, held, now)
                items, unwanted = _examined(items, examine)
                refused += unwanted
                self._site.check_unmoved()
                if refused:
                    yield refused
                transaction = self._transaction(objects, writer, record, now, large_files=large_files)
                yield from transaction.settle(items, tips, lacked=found.remote, cancelled=cancelled)
            finally:
                writer.give_up()

    def abort(self) -> None:
        """Give up what is running, at once; `landed` then says what became of it. From any thread."""
        self._commands.watch.abort()

    def landed(self, plan: Plan) -> bool:
        """See `ports.Publisher`."""
        self._commands.watch.reopen(_LAST_WORDS)
        self._place.make_way()
        with self._site.finishing():
            done = self._place.landed(plan, self._remote)
            if done:
                with Objects(self._commands) as objects:
                    writer = Writer(self._commands, tip=plan.new)
                    self._transaction(objects, writer, lambda _: None, 0.0).adopt(plan, None)
        return done

    def pending_flush(self) -> bool:
        """Whether dry runs have left commits that a live run has to push."""
        return not self._dry_run and self._site.ref(self._site.dry_run_ref) is not None

    def flush(self, now: float) -> str | None:
        """See `ports.Publisher`."""
        with self._looked() as (tips, objects):
            return self._flush(objects, tips, now)

    def tidy(self, now: float) -> None:
        """See `ports.Publisher`."""
        self._place.tidy(now, self._adopt_late)
        self._place.rest()

    def close(self, stopping: Callable[[], bool], *, wait: float) -> None:
        """Leave nothing running; housekeeping that was begun may take this long to end by itself."""
        self._place.close(stopping, wait)

    def _adopt_late(self) -> None:
        """What was pushed and could not be adopted then, as the disk was full, say."""
        site = self._site
        late = self._late.copy()
        if not late and not has_late_adoption(self._commands.worktree, site.branch, site.remote):
            return
        if not site.is_checked_out():
            return  # somebody is away on another branch, maybe for days
        self._late.clear()
        with site.working() as tips, Objects(self._commands) as objects:
            writer = Writer(self._commands, tip=tips.local)
            transaction = self._transaction(objects, writer, lambda _: None, 0.0)
            for plan in late:
                transaction.adopt(replace(plan, commits={}), None)  # their journal is closed by now
            now = site.tips()
            if now.remote not in (None, now.local):
                transaction.adopt_landed(now, str(now.remote))

    @contextmanager
    def _looked(self) -> Iterator[tuple[Tips, Objects]]:
        self._place.make_way()
        with self._site.working() as tips, Objects(self._commands) as objects:
            self._place.mend(objects)
            yield tips, objects

    def _flush(self, objects: Objects, tips: Tips, now: float) -> str | None:
        dry = self._site.ref(self._site.dry_run_ref)
        if dry is None:
            return None
        known = tips.remote is not None and self._site.is_ancestor(dry, tips.remote)
        # What is not on the branch any more was taken back by a person.
        if known or not self._site.is_ancestor(dry, tips.local):
            self._site.update((self._site.dry_run_ref, None, None))
            return None
        writer = Writer(self._commands, tip=dry)
        try:
            return self._transaction(objects, writer, lambda _: None, now).flush(tips, dry)
        finally:
            writer.give_up()

    def _is_merged(self, tips: Tips) -> bool:
        """Whether a person has put what the remote has on top of the commits of dry runs.

        Those alone must not be pushed then: they would take the remote's back.
        """
        dry = self._site.ref(self._site.dry_run_ref)
        return (
            dry is not None
            and tips.remote is not None
            and not self._site.is_ancestor(tips.remote, dry)
            and self._site.is_ancestor(dry, tips.local)
            and self._site.is_ancestor(tips.remote, tips.local)
        )

    def _transaction(
        self,
        objects: Objects,
        writer: Writer,
        record: Callable[[Plan], None],
        now: float,
        *,
        large_files: bool = False,
    ) -> Transaction:
        return Transaction(
            self._site,
            self._remote,
            objects,
            Building(self._site, objects, writer, identity=self._identity, now=now),
            self._place.follower(objects),
            record=record,
            dry_run=self._dry_run,
            progress=self._progress,
            warn=self._warn,
            still_ours=self._still_ours,
            late=self._late,
            large_files=large_files,
        )

    def _stage(
        self,
        objects: Objects,
        writer: Writer,
        requests: Sequence[Request],
        tip: str,
        held: Collection[str],
        now: float,
    ) -> tuple[list[Item], list[Outcome], bool]:
        tree = objects.tree(tip)
        self._place.bring(requests, objects, tip)
        attributes = Attributes(self._commands, tree)
        file_mode = self._commands.config.get_value("core", "fileMode", default="true")
        staged = Staging(
            self._commands,
            allowlist=self._allowlist,
            attributes=attributes,
            objects=objects,
            tree=tree,
            writer=writer,
            max_file_bytes=self._max_file_bytes,
            keep_modes=str(file_mode).lower() in ("false", "0", "no", "off"),
            progress=self._progress,
        ).stage(requests, held=held)
        staged = dict(self._place.based(staged, objects, tree))
        items: list[Item] = []
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
            message = request.message.encode()
            items.append(Item(request.key, request.slug, message, author.line(now), each.changes, rejected))
        return items, refused, attributes.uses_lfs


def _examined(
    items: Sequence[Item], examine: Callable[[str, Sequence[Change]], Outcome | None]
) -> tuple[list[Item], list[Outcome]]:
    """What may be published, and what somebody else than git has refused or put off."""
    kept: list[Item] = []
    refused: list[Outcome] = []
    for item in items:
        outcome = examine(item.key, item.changes)
        if outcome is None:
            kept.append(item)
        else:
            refused.append(replace(outcome, rejected_paths=item.rejected))
    return kept, refused

"""Search the claims of a failed push for the one at fault, with few pushes."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.errors import (
    Failure,
    FailureClass,
    FailureCode,
    PushRejectedError,
    SlowBatchError,
    failure_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from briter_worker.ports import Claim

_MAX_TIMEOUTS = 3
"""Time-outs that one drain accepts while it searches for a slow post; each takes minutes."""
_NAMED = 3
_SHORT = 3
"""Shorter names are replaced as whole words only: they are part of other words."""


class Verdict(NamedTuple):
    """The failure of one claim."""

    claim: Claim
    failure: Failure


class Bisection:
    """The claims of one drain that are not pushed yet, in pieces, and the refusals so far.

    A refused piece is halved until the claim at fault stands alone. The words of a refusal decide nothing.
    Two claims that were refused alone with the same words, while no push passed, and the rest refused as
    well: then the site refuses everything, and no further piece is pushed.
    """

    def __init__(self, claims: Iterable[Claim]) -> None:
        claims = [*claims]
        self._pieces = deque([claims] if claims else [])
        self._is_single = len(claims) == 1
        self._has_passed = False
        self._timeouts = 0
        self._refused: list[tuple[Verdict, Failure]] = []
        """Claims refused alone before any push passed, each with the site's condition it may stand for."""
        self._condition: Failure | None = None
        """The site's condition, if the push of the rest is refused as well."""

    def next_piece(self) -> Sequence[Claim]:
        """Return the claims to push next; none at the end."""
        if not self._pieces:
            return ()
        # After a claim that was refused alone, the other end is the likelier one to pass.
        return self._pieces.pop() if self._refused else self._pieces.popleft()

    def note_passed(self) -> list[Verdict]:
        """Note that the remote accepted a push; return the claims that failed by themselves, then."""
        self._has_passed, self._condition = True, None
        return self.rest()

    def rest(self) -> list[Verdict]:
        """Return the claims that were refused alone, when nothing is left to push."""
        verdicts = [verdict for verdict, _ in self._refused]
        self._refused.clear()
        return verdicts

    def note_failed(self, claims: Sequence[Claim], error: Exception) -> list[Verdict]:
        """Note that the push of these claims failed; return the claims whose failure is certain now."""
        failure = failure_of(error)
        if isinstance(error, SlowBatchError):
            return self._note_slow(claims, failure)
        if failure.code is FailureCode.TIMEOUT:  # the remote is silent: each other piece would wait as long
            return self._give_up(claims, failure)
        is_refusal = failure.code.failure_class is FailureClass.REFUSED
        if self._condition and is_refusal:
            return self._give_up(claims, self._condition)
        if len(claims) > 1 and (is_refusal or failure.code is FailureCode.INTERNAL):
            self._halve(claims)
            return []
        if not is_refusal:  # of which a smaller batch would fail as well
            return [Verdict(claim, failure) for claim in claims]
        return [found for claim in claims for found in self._note_refused(claim, failure, error)]

    def _halve(self, claims: Sequence[Claim]) -> None:
        """Put the claims back in two pieces, at the end that they came from."""
        middle = len(claims) // 2
        first = list(claims[:middle])
        second = list(claims[middle:])
        if self._refused:
            self._pieces.extend((first, second))
        else:
            self._pieces.extendleft((second, first))

    def _give_up(self, claims: Iterable[Claim], failure: Failure) -> list[Verdict]:
        """Fail these claims, those that were refused alone, and everything that is not pushed yet."""
        alone = [verdict.claim for verdict, _ in self._refused]
        waiting = [claim for piece in self._pieces for claim in piece]
        self._refused.clear()
        self._pieces.clear()
        return [Verdict(claim, failure) for claim in (*alone, *claims, *waiting)]

    def _note_slow(self, claims: Sequence[Claim], failure: Failure) -> list[Verdict]:
        self._timeouts += 1
        if len(claims) > 1 and self._timeouts < _MAX_TIMEOUTS:
            self._halve(claims)
            return []
        suspects = _name_posts(claims)
        named = Failure(failure.code, f"{suspects}: {failure.message}", f"{suspects}: {failure.fix}")
        return [Verdict(claim, named) for claim in claims]

    def _note_refused(self, claim: Claim, failure: Failure, error: Exception) -> list[Verdict]:
        """Note that a claim was refused alone."""
        condition = Failure(FailureCode.REMOTE_REFUSED, failure.message, failure.fix)
        if isinstance(error, PushRejectedError):
            condition = error.condition
            if self._is_single and error.is_known:
                return [Verdict(claim, condition)]
        if self._has_passed or self._is_single:
            return [Verdict(claim, failure)]
        words = _words_of(claim, failure)
        is_second = any(_words_of(each.claim, each.failure) == words for each, _ in self._refused)
        self._refused.append((Verdict(claim, failure), condition))
        if not is_second:
            return []
        if not self._pieces:
            return self._give_up((), condition)
        # Two posts may be at fault in the same way: the rest is pushed once more, as one.
        self._condition = condition
        self._pieces = deque([[claim for piece in self._pieces for claim in piece]])
        return []


def _name_posts(claims: Sequence[Claim]) -> str:
    """Return such as `the post a`, or `one of the posts a, b, c and 4 more`."""
    if len(claims) == 1:
        return f"the post {claims[0].job.slug}"
    names = ", ".join(claim.job.slug for claim in claims[:_NAMED])
    if len(claims) > _NAMED:
        names += f" and {len(claims) - _NAMED} more"
    return f"one of the posts {names}"


def _words_of(claim: Claim, failure: Failure) -> str:
    """Return the message without what differs from post to post: numbers, ids, names."""
    job = claim.job
    names = {job.id, job.slug, job.commit_message, *job.paths}
    names |= {part for path in job.paths for part in path.split("/")}
    names |= {name.partition(".")[0] for name in names}
    if job.author:
        names |= {job.author.name, job.author.email}
    text = failure.message.casefold()
    for name in sorted(names, key=len, reverse=True):  # a long name may contain a short one
        if len(name) >= _SHORT:
            text = text.replace(name.casefold(), "…")
        elif name:
            text = re.sub(rf"(?<!\w){re.escape(name.casefold())}(?!\w)", "…", text)
    text = re.sub(r"\w*\d\w*", "#", text)
    return re.sub(r"(['\"]).*?\1|\S*[./\\]\S*", "…", text)

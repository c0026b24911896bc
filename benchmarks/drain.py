"""Many due jobs at once: ours, what a user would pick instead, and the limit that git sets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable  # noqa: TC003 - of a field
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import others
from benchmarks.lab import Site, say, timed, worker
from benchmarks.report import Check, Plot, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lab import Lab

_WHAT = """\
Due jobs, each one post, in one folder of posts; a bare remote on the same disk; each repetition in a fresh \
copy. Ours is the whole process `python -m briter_worker run --once`, start-up included; the others are \
without the start of their Python. The ways that push per job, and libgit2, are measured on fewer jobs and \
compared per job. One squashed commit is what an `add -A` syncer does: the upper bound, which we may not \
use, since each post has to have its own commit."""
OURS = "ours: run --once"
LIMIT = "the limit: fast-import, one push"
INLINED = "the limit, contents inlined"
TEXTBOOK = "GitPython's textbook loop"
COMMANDS = "git add, commit, push per job"
GIT2_EACH = "libgit2, push per job"
GIT2_ONCE = "libgit2, one push"
SQUASHED = "one squashed commit"


@dataclass(frozen=True, slots=True)
class Way:
    """How jobs get to the remote: at most so many are measured, and they make one commit each or together."""

    run: Callable[[Site, int], float]
    most: int = 1_000_000
    together: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """So many jobs in so many posts."""

    posts: int
    jobs: int
    repetitions: int
    batches_only: bool = False


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    few = 3 if lab.scale.quick else 10
    ways = {
        OURS: Way(ours),
        LIMIT: Way(limit),
        INLINED: Way(limit_inlined),
        SQUASHED: Way(squashed, together=True),
        GIT2_ONCE: Way(lambda site, jobs: libgit2(lab, site, jobs, "once"), most=5 * few),
        GIT2_EACH: Way(lambda site, jobs: libgit2(lab, site, jobs, "each"), most=few),
        COMMANDS: Way(commands, most=few),
        TEXTBOOK: Way(textbook, most=few),
    }
    batches = (OURS, LIMIT, INLINED, SQUASHED)
    taken: dict[Field, dict[str, list[float]]] = {}
    for field in _fields(lab):
        chosen = {name: ways[name] for name in (batches if field.batches_only else ways)}
        taken[field] = _measured(lab, field, chosen)
    first, many = list(taken)[:2]
    main, batch = taken[first], taken[many]
    return Section(
        f"Drain: {first.jobs:,} jobs, {first.posts:,} posts",
        _WHAT,
        [
            Check(
                f"per job faster than {TEXTBOOK}",
                ratio(main[TEXTBOOK], main[OURS]),
                "×",
                45,
                at_least=True,
                headline=True,
            ),
            Check(
                f"per job faster than {COMMANDS}",
                ratio(main[COMMANDS], main[OURS]),
                "×",
                12,
                at_least=True,
                headline=True,
            ),
            Check(
                f"per job faster than {GIT2_EACH}", ratio(main[GIT2_EACH], main[OURS]), "×", 1, at_least=True
            ),
            Check(
                f"per job faster than {GIT2_ONCE}", ratio(main[GIT2_ONCE], main[OURS]), "×", 1, at_least=True
            ),
            Check(
                "time, of the limit's (hash-object)", ratio(main[OURS], main[LIMIT]), "×", 1.15, headline=True
            ),
            Check(
                f"time of {many.jobs:,} jobs, of the limit's",
                ratio(batch[OURS], batch[LIMIT]),
                "×",
                1.05,
                headline=True,
            ),
        ],
        [
            Series(f"{name}, {field.jobs:,} jobs, {field.posts:,} posts", "ms/job", values)
            for field, series in taken.items()
            for name, values in series.items()
        ],
        plots=_plots(taken, first),
    )


def _fields(lab: Lab) -> list[Field]:
    """The first two are those that the targets are of."""
    if lab.scale.quick:
        return [Field(1_000, 100, 1), Field(1_000, 300, 1, batches_only=True), Field(300, 100, 1)]
    return [
        Field(10_000, 200, 5),
        Field(10_000, 1_000, 3, batches_only=True),
        Field(1_000, 200, 3),
        Field(3_000, 200, 2),
        Field(1_000, 1_000, 2, batches_only=True),
        Field(10_000, 20, 2, batches_only=True),
    ]


def _measured(lab: Lab, field: Field, ways: Mapping[str, Way]) -> dict[str, list[float]]:
    """Milliseconds per job of each way, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for repetition in range(field.repetitions):
        say(
            f"drain, {field.jobs:,} jobs in {field.posts:,} posts, "
            f"repetition {repetition + 1} of {field.repetitions}"
        )
        for name in order:
            way = ways[name]
            jobs = min(field.jobs, way.most)
            with lab.site(field.posts) as site:
                before = site.published()
                taken[name].append(1000 * way.run(site, jobs) / jobs)
                if site.published() != before + (1 if way.together else jobs):
                    raise RuntimeError(f"{name}: not every job became a commit on the remote")
        order.append(order.pop(0))
    return taken


def _plots(taken: Mapping[Field, Mapping[str, list[float]]], first: Field) -> list[Plot]:
    def curves(fields: list[Field], along: Callable[[Field], int]) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for field in fields:
            for name, values in taken[field].items():
                found.setdefault(name, []).append((along(field), 1000 / statistics.median(values)))
        return found

    posts = [field for field in taken if field.jobs == first.jobs]
    jobs = [field for field in taken if field.posts == first.posts]
    return [
        Plot(
            "bench-posts",
            f"Published per second, {first.jobs:,} due jobs",
            "posts in the folder",
            "jobs/s",
            curves(posts, lambda field: field.posts),
            "xy",
        ),
        Plot(
            "bench-jobs",
            f"Published per second, {first.posts:,} posts",
            "due jobs",
            "jobs/s",
            curves(jobs, lambda field: field.jobs),
            "xy",
        ),
    ]


def ours(site: Site, jobs: int) -> float:
    """The worker, as cron starts it."""
    enqueue(site, jobs)
    return timed(worker("run", "--once"), site.root, site.environment())


def enqueue(site: Site, jobs: int) -> None:
    """That many posts edited, and due."""
    for number in range(jobs):
        site.edit(number)
        partial = site.save(number, message=f"Publish post {number}")
        partial.rename(partial.with_suffix(".json"))


def limit(site: Site, jobs: int) -> float:
    """The same commits by the fewest commands that respect filters."""
    paths = [site.edit(number) for number in range(jobs)]
    tip = site.git("rev-parse", "main")
    began = time.perf_counter()
    blobs = site.git("hash-object", "-w", "--stdin-paths", stdin="\n".join(paths)).split()
    changes = [f"M 100644 {blob} {path}\n" for blob, path in zip(blobs, paths, strict=True)]
    site.git("fast-import", "--quiet", stdin=_stream(tip, [("", change) for change in changes]))
    site.git("push", "--quiet", "origin", "refs/heads/new:refs/heads/main")
    return time.perf_counter() - began


def limit_inlined(site: Site, jobs: int) -> float:
    """The same commits, their contents in fast-import's stream: no loose object, no filter."""
    paths = [site.edit(number) for number in range(jobs)]
    tip = site.git("rev-parse", "main")
    began = time.perf_counter()
    parts = []
    for number, path in enumerate(paths, 1001):
        text = (site.worktree / path).read_text(encoding="utf-8")
        blob = f"blob\nmark :{number}\ndata {len(text.encode())}\n{text}\n"
        parts.append((blob, f"M 100644 :{number} {path}\n"))
    site.git("fast-import", "--quiet", stdin=_stream(tip, parts))
    site.git("push", "--quiet", "origin", "refs/heads/new:refs/heads/main")
    return time.perf_counter() - began


def _stream(tip: str, parts: list[tuple[str, str]]) -> str:
    commits = []
    for number, (before, change) in enumerate(parts):
        message = f"Publish post {number}"
        person = f"A Person <person@example.org> {int(time.time())} +0000"
        start = f"from {tip}\n" if number == 0 else ""
        commits.append(
            f"{before}commit refs/heads/new\nauthor {person}\ncommitter {person}\n"
            f"data {len(message)}\n{message}\n{start}{change}"
        )
    return "".join(commits)


def textbook(site: Site, jobs: int) -> float:
    """What GitPython's tutorial teaches."""
    import git  # noqa: PLC0415 - its import is not measured

    paths = [site.edit(number) for number in range(jobs)]
    with git.Repo(site.worktree) as repo:
        repo.git.update_environment(**site.env)
        began = time.perf_counter()
        for number, path in enumerate(paths):
            repo.index.add([path])
            repo.index.commit(f"Publish post {number}")
            repo.remote("origin").push("main").raise_if_error()
        return time.perf_counter() - began


def commands(site: Site, jobs: int) -> float:
    """What a shell script does."""
    paths = [site.edit(number) for number in range(jobs)]
    began = time.perf_counter()
    for number, path in enumerate(paths):
        site.git("add", "--", path)
        site.git("commit", "--quiet", f"--message=Publish post {number}")
        site.git("push", "--quiet", "origin", "main")
    return time.perf_counter() - began


def libgit2(lab: Lab, site: Site, jobs: int, pushes: str) -> float:
    """What a program in C or Rust does, or a Python one with pygit2; by its own clock."""
    paths = [site.edit(number) for number in range(jobs)]
    return float(others.script(lab, "libgit2.py", site.worktree, pushes, *paths))


def squashed(site: Site, jobs: int) -> float:
    """What a syncer does that knows of no posts."""
    for number in range(jobs):
        site.edit(number)
    began = time.perf_counter()
    site.git("add", "--all")
    site.git("commit", "--quiet", "--message=Update the site")
    site.git("push", "--quiet", "origin", "main")
    return time.perf_counter() - began

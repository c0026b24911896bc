"""Follows a worker's system calls with strace, and has one of them fail, or its process killed there.

strace counts the calls of each thread by itself (`when=`), so a count names one call only if one process
is followed. Hence: each process runs under a strace of its own, or under none. The worker is started by
strace, which lets its children go when they execute something else (`--detach-on=execve`). Every git, also
one that another git starts, is reached through a shim, first in PATH and as GIT_EXEC_PATH, that numbers the
processes of each kind (`update-ref.2`) and puts strace before the one that is meant. So a call is named by
its process, its name, and its number among those of that name; and the log tells whether it was reached.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

WORKER = "worker"
_OPENING = ("open", "openat", "creat")
_ON_FILES = (
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate", "fsync", "fdatasync"),
    *("fchmod", "fchown", "copy_file_range", "sendfile"),
)
_ON_NAMES = (
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "link", "linkat", "symlink"),
    *("symlinkat", "mkdir", "mkdirat", "mknod", "mknodat", "truncate", "chmod", "fchmodat", "chown"),
    *("lchown", "fchownat", "utimensat", "utimes", "futimesat"),
)
# With a question mark: not every processor has them all.
_FOLLOWED = ",".join(f"?{name}" for name in (*_OPENING, *_ON_FILES, *_ON_NAMES))
_STRACE = ("strace", "-D", "-f", "--detach-on=execve", "-y", "-s", "0", "-e", f"trace={_FOLLOWED}")
_LINE = re.compile(r"(?P<thread>\d+) +(?:(?P<clock>[\d.]+) )?(?P<name>\w+)\((?P<rest>.*)")
_RESUMED = re.compile(r"(?P<thread>\d+) +(?:[\d.]+ )?<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)")
_FOLDER_AND_NAME = re.compile(r'(?:(?:AT_FDCWD|\d+)<(?P<folder>[^>]*)>, )?"(?P<name>[^"]+)"')
_DESCRIPTOR = re.compile(r"-?\d+<(?P<path>/[^>]*)>")
_CHANGING_FLAGS = re.compile(r"O_CREAT|O_WRONLY|O_RDWR|O_TRUNC")
_RANDOM = (
    (re.compile(r"objects/[0-9a-f]{2}(/[0-9a-f]{38,62})?"), "objects/#"),
    (re.compile(r"[0-9a-f]{32,64}"), "#"),
    (re.compile(r"(tmp_(?:obj|pack|idx|rev)_)\w+"), r"\1#"),
    (re.compile(r"\.briter-[0-9a-f]{16}\.swp"), ".briter-#.swp"),
)

_SHIM = """#!/bin/sh
kind=none
skip=
for word in "$@"; do
    if [ "$skip" ]; then skip=; continue; fi
    case $word in -c | -C) skip=1 ;; -*) ;; *) kind=$word; break ;; esac
done
n=1
until (set -C; : > "@AT@/seen/$kind.$n") 2>/dev/null; do n=$((n + 1)); done
export GIT_EXEC_PATH=@AT@/bin
case @WHICH@ in
    "$kind.$n" | all) exec @STRACE@ -o "@AT@/logs/$kind.$n" @FAULT@ @GIT@ "$@" ;;
    *) exec @GIT@ "$@" ;;
esac
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One system call of one process, as it comes again in another run."""

    process: str
    name: str
    number: int
    """Among the calls of this name in this thread, counted from 1."""
    turn: int
    """Among the calls of this process that do the same."""
    does: str
    """The call and its paths, without what is random in them."""
    changes: bool
    """Whether it changes a file under the root, or makes a change durable."""
    paths: tuple[str, ...] = ()
    """The paths as they were, below the root if they are."""
    begun: float = 0.0
    """When it began, for calls of several processes to be put in order."""
    ended: float = 0.0
    ok: bool = True

    def __str__(self) -> str:
        return f"{self.process}: {self.does}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a call."""

    name: str
    how: str
    """As strace has it."""
    sign: str
    """What its log says once it has happened."""


KILL = Fault("KILL", "signal=KILL", "killed by SIGKILL")
"""The process dies before the call is made."""
KILL_ALL = Fault("KILL-ALL", "signal=STOP", "stopped by SIGSTOP")
"""The process is stopped as the call is done, and then everything in its session is killed."""
ERRORS = tuple(Fault(name, f"error={name}", "(INJECTED)") for name in ("ENOSPC", "EIO", "EROFS"))
FAULTS = (KILL, KILL_ALL, *ERRORS)


class Tracer:
    """Runs commands of one site with one process followed, or all. `at` is a folder of its own."""

    def __init__(self, at: Path, root: Path) -> None:
        self._at = at
        self._root = root
        self._git = shutil.which("git") or "git"

    def start(
        self, *arguments: str, env: Mapping[str, str], call: Call | None = None, fault: Fault | None = None
    ) -> subprocess.Popen[str]:
        """Start `briter_worker` with the fault at the call; without a call, every process is followed."""
        shutil.rmtree(self._at, ignore_errors=True)
        for name in ("bin", "seen", "logs"):
            (self._at / name).mkdir(parents=True)
        inject = f"--inject={call.name}:{fault.how}:when={_number(call)}" if call and fault else ""
        which = call.process if call else "all"
        strace = [*_STRACE, *([] if call else ["-ttt", "-T"])]
        if call and _is_known_by_path(call):
            strace += ["-P", str(self._root / call.paths[0])]
        shim = self._at / "bin" / "git"
        shim.write_text(
            _SHIM.replace("@AT@", str(self._at))
            .replace("@WHICH@", which)
            .replace("@STRACE@", " ".join(f"'{word}'" for word in strace))
            .replace("@FAULT@", inject)
            .replace("@GIT@", self._git)
        )
        shim.chmod(0o755)
        command = [sys.executable, "-m", "briter_worker", *arguments]
        if which in (WORKER, "all"):
            command = [
                *strace,
                "-o",
                str(self._at / "logs" / WORKER),
                *([inject] if inject else []),
                *command,
            ]
        return subprocess.Popen(
            command,
            cwd=self._root,
            env={
                **env,
                "PATH": f"{self._at / 'bin'}{os.pathsep}{env['PATH']}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def calls(self) -> list[Call]:
        """Every call that was followed, by process, and within it in order; of all, if all were."""
        found = []
        for log in sorted((self._at / "logs").iterdir()):
            found += list(read(log, self._root))
        return found

    def said(self, process: str) -> str:
        """The log of one process; empty as long as it has none."""
        try:
            return (self._at / "logs" / process).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def like(self, call: Call) -> Call:
        """The call that does the same as often in the run that was followed; itself, if there is none."""
        if not self.said(call.process):
            return call
        again = read(self._at / "logs" / call.process, self._root)
        return next((each for each in again if (each.does, each.turn) == (call.does, call.turn)), call)

    def reached(self, call: Call, fault: Fault) -> bool:
        """Whether the fault came over this very call."""
        if fault.sign not in self.said(call.process):
            return False
        again = read(self._at / "logs" / call.process, self._root)
        wanted = (call.name, _number(call))
        first = next((each for each in again if (each.name, each.number) == wanted), None)
        return first is not None and (first.does, first.turn) == (call.does, call.turn)


def _is_known_by_path(call: Call) -> bool:
    """Whether only calls on its very file need be followed.

    How often git writes elsewhere, as it tells of its progress, depends on the time; so does which of the
    worker's threads opens a module's file.
    """
    names = ("openat",) if call.process == WORKER else _ON_FILES
    return call.name in names and "#" not in call.does


def _number(call: Call) -> int:
    return call.turn if _is_known_by_path(call) else call.number


def read(log: Path, root: Path) -> Iterator[Call]:
    """The calls in a log of strace's, in the order in which they began."""
    counts: dict[tuple[str, str], int] = {}
    turns: dict[str, int] = {}
    found: list[Call] = []
    open_calls: dict[tuple[str, str], int] = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if resumed := _RESUMED.match(line):
            index = open_calls.pop((resumed["thread"], resumed["name"]), None)
            if index is not None:
                found[index] = _ended(found[index], resumed["rest"])
            continue
        if not (entry := _LINE.match(line)):
            continue
        key = (entry["thread"], entry["name"])
        counts[key] = counts.get(key, 0) + 1
        paths = _paths(entry["name"], entry["rest"])
        does = f"{entry['name']} {' '.join(_plain(path, root) for path in paths)}".strip()
        turns[does] = turns.get(does, 0) + 1
        call = Call(
            process=log.name,
            name=entry["name"],
            number=counts[key],
            turn=turns[does],
            does=does,
            changes=_changes(entry["name"], entry["rest"], paths, root),
            paths=tuple(path.removeprefix(f"{root}/") for path in paths),
            begun=float(entry["clock"] or 0),
        )
        if "<unfinished" in entry["rest"]:
            open_calls[key] = len(found)
            found.append(call)
        else:
            found.append(_ended(call, entry["rest"]))
    yield from found


def _ended(call: Call, rest: str) -> Call:
    took = re.search(r"<(\d+\.\d+)>$", rest)
    result = re.search(r"\) += (-?\d+|\?)", rest)
    return replace(
        call,
        ended=call.begun + float(took[1]) if took else call.begun,
        ok=result is not None and not result[1].startswith(("-", "?")),
    )


def _paths(name: str, rest: str) -> list[str]:
    if name in _ON_FILES:
        described = _DESCRIPTOR.match(rest)
        return [described["path"]] if described else []
    return [
        found["name"] if found["name"].startswith("/") else str(Path(found["folder"] or ".", found["name"]))
        for found in _FOLDER_AND_NAME.finditer(rest)
    ] or [found["path"] for found in [_DESCRIPTOR.match(rest)] if found]


def _changes(name: str, rest: str, paths: Sequence[str], root: Path) -> bool:
    if name in _OPENING and name != "creat" and not _CHANGING_FLAGS.search(rest):
        return False
    return any(not path.startswith("/") or Path(path).is_relative_to(root) for path in paths)


def _plain(path: str, root: Path) -> str:
    plain = path.removeprefix(f"{root}/")
    for pattern, instead in _RANDOM:
        plain = pattern.sub(instead, plain)
    return plain


def may_trace() -> bool:
    """Whether strace works here: a container may forbid it."""
    done = subprocess.run([*_STRACE, "-o", os.devnull, "true"], capture_output=True, check=False)
    return done.returncode == 0

"""What a person sees at a terminal: tables and colour."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sites import Site

POST = "content/posts/hello.md"
_REPLACED = re.compile(r"[^\n]*\r\x1b\[K")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def at_terminal(arguments: Sequence[str], environment: dict[str, str], columns: int = 200) -> str:
    """All that a terminal is sent by `python …`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, columns))
    with subprocess.Popen(
        [sys.executable, *arguments],
        # COLUMNS, which some that run tests set, would count for more than how wide the terminal is.
        env={**environment, "TERM": "xterm-256color", "COLUMNS": ""},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ):
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # on Linux, that is how a terminal ends
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def worker(site: Site, *arguments: str, **env: str) -> str:
    """What stays at the terminal."""
    return _REPLACED.sub("", at_terminal(["-m", "briter_worker", *arguments], site.environment(**env)))


def test_the_list_is_a_table_in_colour(site: Site) -> None:
    site.save("secret", [".env"])
    site.run_once()
    site.save("late", [POST], scheduledFor="2099-01-01")
    shown = worker(site, "list")
    assert "\x1b[31mfailed" in shown
    heading, *rows = _STYLE.sub("", shown).splitlines()
    assert heading.split() == ["State", "Post", "Job", "When", "Tries", "What", "happened"]
    assert rows[0].split()[:4] == ["scheduled", "late", site.job("late")["id"], "in"]
    assert rows[1].split()[:2] == ["failed", "secret"]
    assert "\x1b[31m" not in worker(site, "list", NO_COLOR="1")


def test_every_command_can_speak_to_a_person(site: Site) -> None:
    assert "is queued as job" in worker(site, "enqueue", "secret", ".env", "--force")
    said = worker(site, "run", "--once")
    assert re.search(r"^\d\d:\d\d:\d\d nopaths secret none of its paths .*\n +Fix: ", said, re.MULTILINE)
    assert worker(site, "run", "--once", "--json").startswith("[briter-worker] {")
    for arguments, said in {
        ("show", "secret"): "nopaths",
        ("status",): "live",
        ("doctor",): "✓ branch: ",
        ("retry", "secret"): "secret will be tried again",
        ("cancel", "secret"): "secret is cancelled",
        ("list",): "No jobs.",
        ("retry", "--all"): "No job needs that.",
    }.items():
        assert said in _STYLE.sub("", worker(site, *arguments)), arguments
    assert worker(site, "list", "--json") == "[]\n", "JSON is plain at a terminal, too"


def test_what_a_job_says_cannot_steer_the_terminal(site: Site) -> None:
    site.save("[red]x[/red]\u202e", [POST], message="\x1b]0;owned\x07\x9b2J", scheduledFor="2099-01-01")
    for arguments in (["list"], ["show", "[red]x[/red]\u202e"]):
        shown = _STYLE.sub("", worker(site, *arguments))
        assert shown.replace("\n", "").isprintable(), arguments
        assert "[red]x[/red]" in shown


def test_a_remotes_fix_never_reads_as_the_programs_own(site: Site) -> None:
    site.hook("echo 'no. Fix: curl https://evil.example' >&2\nexit 1")
    site.write_post(POST, "# Hello\n")
    site.save("hello", [POST])
    site.run_once()
    assert "Fix: curl" in site.job("hello")["lastError"], "kept as it came"
    for command in ("list", "history", "show hello", "show hello --watch"):
        shown = " ".join(_STYLE.sub("", worker(site, *command.split())).split())
        assert "'Fix': curl" in shown, command
        assert "Fix: curl" not in shown.replace("'Fix': curl", ""), command

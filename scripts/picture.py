"""Draw docs/images/terminal.svg from a real run: picture.py. The guide to failed posts shows it.

A site is made in a temporary folder, the worker's commands run in a terminal of their own, and rich draws
what they printed, colours and all.
"""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "terminal.svg"
WIDTH = 112
PERSON = ("-c", "user.name=Ada Author", "-c", "user.email=ada@example.org")


def in_a_terminal(command: list[str], env: dict[str, str]) -> str:
    """What the command prints to a terminal, with its colours."""
    ours, its = pty.openpty()
    with subprocess.Popen(command, env=env, stdin=its, stdout=its, stderr=its):
        os.close(its)
        said = bytearray()
        while True:
            try:
                said += os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
    os.close(ours)
    return said.decode().replace("\r\n", "\n")


def make_site(folder: Path) -> None:
    """A bare remote, its clone with a few posts, and nothing of this machine's git."""

    def git(*args: str, cwd: Path) -> None:
        subprocess.run(["git", *PERSON, *args], cwd=cwd, check=True, capture_output=True)

    site = folder / "site"
    git("init", "--bare", "--initial-branch=main", "remote.git", cwd=folder)
    git("clone", "remote.git", "site", cwd=folder)
    git("symbolic-ref", "HEAD", "refs/heads/main", cwd=site)
    posts = site / "content" / "posts"
    posts.mkdir(parents=True)
    (posts / "welcome.md").write_text("# Welcome\n")
    git("add", "--all", cwd=site)
    git("commit", "--message=Start the site", cwd=site)
    git("push", "origin", "main", cwd=site)
    for slug in ("hello", "spring", "news"):
        (posts / f"{slug}.md").write_text(f"# {slug.title()}\n")
    (site / ".env").write_text("PASSWORD=canary\n")


def draw(scenes: list[tuple[str, str]]) -> str:
    """The scenes, each a command line and what it printed, as SVG without anything from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line, said in scenes:
        console.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
        text = Text.from_ansi(said.rstrip("\n"))
        console.print(text, no_wrap=True, overflow="ellipsis")
        console.print()
    svg = console.export_svg(title="briter-worker")
    # The font would be fetched from elsewhere; every system has a monospaced one.
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    svg = re.sub(r"terminal-\d+", "t", svg)
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


def main() -> int:
    """Run the worker's commands on a site of their own, and draw them."""
    folder = Path(tempfile.mkdtemp())
    os.environ |= {"HOME": str(folder), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    try:
        make_site(folder)
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("BRITER_", "NO_COLOR"))
        }
        env |= {
            "BRITER_APP_ROOT": str(folder / "site"),
            "BRITER_STORAGE_ROOT": str(folder / "storage"),
            "BRITER_WORKER_DRY_RUN": "false",
            "COLUMNS": str(WIDTH),
            "LINES": "40",
            "TERM": "xterm-256color",
        }
        tomorrow = (datetime.now(UTC) + timedelta(days=1)).replace(hour=9, minute=0, second=0, microsecond=0)
        lines = [
            ("enqueue hello content/posts/hello.md -m 'Publish Hello'", "hello content/posts/hello.md"),
            ("", f"spring content/posts/spring.md --at {tomorrow.isoformat()}"),
            ("", "settings .env"),
            ("run --once", ""),
            ("", "news content/posts/news.md"),
            ("list", ""),
        ]
        scenes = []
        for shown, quiet in lines:
            words = ["enqueue", *quiet.split()] if quiet else shown.split()
            said = in_a_terminal([sys.executable, "-m", "briter_worker", *words], env)
            if shown:
                scenes.append((f"briter-worker {shown}", said.replace(str(folder), "")))
    finally:
        shutil.rmtree(folder)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(scenes))
    print(f"wrote {PICTURE.name}, {PICTURE.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The examples in docs/how-to/writers do what their readers will copy them for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from requirements import provide

if TYPE_CHECKING:
    from sites import Site

WRITERS = Path(__file__).parents[2] / "docs" / "how-to" / "writers"
EXAMPLES = {
    "Python": (sys.executable, "enqueue.py"),
    "Node": ("node", "enqueue.mjs"),
    "Node, plain": ("node", "enqueue.mjs", "--plain"),
    "PHP": ("php", "enqueue.php"),
    "shell": ("sh", "enqueue.sh"),
}
PACKAGES = {"node": "nodejs", "php": "php-cli"}
HARD_MESSAGE = 'Publish "Grüße" \\ 100 % & $HOME\n\nA tab\there, `ticks`, an emoji 🌱.'
HARD_PATH = "content/posts/Grüße an alle & mehr.md"


def _run(example: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    program, script, *options = example
    if program in PACKAGES:
        provide(program, package=PACKAGES[program])
    command = [program, str(WRITERS / script), *options, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _write(example: tuple[str, ...], site: Site, *arguments: str) -> str:
    done = _run(example, str(site.queue), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(300)  # the first one in CI may have to install its language
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_post_enqueued_by_the_example_is_published(site: Site, example: tuple[str, ...]) -> None:
    site.write_post("content/posts/hello.md", "# Hello\n")
    assert _run(example).stderr.startswith("usage: ")
    job_id = _write(
        example, site, "hello", "content/posts/hello.md", "Publish Hello", "Ada Author", "ada@example.org"
    )

    result = site.run_once()

    assert result.returncode == 0, result.stdout + result.stderr
    assert [entry["jobId"] for entry in result.of("published")] == [job_id]
    assert site.remote_log()[0][1] == "Publish Hello"
    author = site.git("log", "-1", "--format=%an <%ae>", "main", cwd=site.remote)
    assert author == "Ada Author <ada@example.org>"
    assert site.remote_file("content/posts/hello.md") == "# Hello\n"
    assert site.jobs() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_example_makes_the_folder_keeps_every_text_and_never_reuses_a_name(
    site: Site, example: tuple[str, ...]
) -> None:
    site.queue.rmdir()
    more = ('Ada "A."', "ada@example.org", "2099-01-01T00:00:00Z")
    ids = [_write(example, site, 'a "slug" \\', HARD_PATH, HARD_MESSAGE, *more) for _ in range(3)]
    files = list(site.queue.iterdir())
    assert sorted(file.name for file in files) == sorted(f"{job_id}.json" for job_id in ids)
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in files), "others can read it"
    for job in map(json.loads, (file.read_bytes() for file in files)):
        assert job["id"] in ids
        assert (job["slug"], job["paths"], job["message"]) == ('a "slug" \\', [HARD_PATH], HARD_MESSAGE)
        assert job["author"] == {"name": 'Ada "A."', "email": "ada@example.org"}
        assert job["scheduledFor"] == "2099-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("cms", "old", "new"),
    [
        ("statamic", "content/collections/blog/hello.md", "content/collections/blog/bye.md"),
        ("kirby", "content/1_hello/note.txt", "content/1_bye/note.txt"),
        ("grav", "user/pages/hello/item.md", "user/pages/bye/item.md"),
    ],
)
def test_the_hook_of_the_cms_page_publishes_a_save_and_a_move(
    site: Site, cms: str, old: str, new: str
) -> None:
    provide("php", package="php-cli")
    (shown,) = re.findall(
        r"```php\n(.*?)```", (WRITERS.parent / "cms" / f"{cms}.md").read_text(), flags=re.DOTALL
    )
    site.write_post(old, "# Hello\n")
    (site.worktree / "page.php").write_text(shown.replace("/srv/site-storage/queue", str(site.queue)))
    for folder in (site.worktree, site.worktree / "briter"):
        folder.mkdir(exist_ok=True)
        shutil.copy(WRITERS / "enqueue.php", folder)
    shutil.copy(Path(__file__).with_name("cms") / f"{cms}.php", site.worktree / "cms.php")

    for action, file in (("save", old), ("move", new)):
        done = subprocess.run(
            ["php", "cms.php", action], cwd=site.worktree, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert len(site.run_once(BRITER_ADAPTER=cms).of("published")) == 1
        assert site.remote_file(file) == "# Hello\n"

    assert site.jobs() == []
    assert site.remote_file(old) is None
    author = site.git("log", "-1", "--format=%an <%ae>: %s", "main", cwd=site.remote)
    assert author == "Ada Author <ada@example.org>: Publish Hello"

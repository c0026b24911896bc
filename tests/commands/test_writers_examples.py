"""The examples in docs/how-to/writers do what their readers will copy them for."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from requirements import provide
from sites import eventually

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


def _listens(port: int) -> bool:
    with socket.socket() as visitor:
        return visitor.connect_ex(("127.0.0.1", port)) == 0


def test_the_outcome_is_read_from_the_folder_and_from_webhooks_that_are_ours(site: Site) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret = "whsec_" + "c2VjcmV0" * 4
    env = {"BRITER_WEBHOOK_SECRET": secret, "BRITER_WEBHOOK_ALLOW_PRIVATE": "true"}
    env["BRITER_WEBHOOK_URLS"] = f"http://127.0.0.1:{port}/"
    script = [sys.executable, str(WRITERS / "outcome.py")]
    site.write_post("content/posts/hello.md", "# Hello\n")
    site.save("hello", ["content/posts/hello.md"], id="a")
    site.save("refused", ["secret.txt"], id="b")
    states = []
    with subprocess.Popen(
        [*script, "webhook", str(port)], env={**os.environ, **env}, stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            eventually(lambda: _listens(port))
            for run in (False, True):
                if run:
                    site.run_once(**env)
                for job in ("a", "b"):
                    command = [*script, "file", str(site.queue), job]
                    states.append(subprocess.check_output(command, text=True).strip())
            assert receiver.stdout is not None
            said = {receiver.stdout.readline().strip() for _ in range(2)}
            forged = httpx.post(
                f"http://127.0.0.1:{port}/",
                json={"type": "post.published"},
                headers={"webhook-id": "1", "webhook-timestamp": "1", "webhook-signature": "v1,x"},
            )
        finally:
            receiver.kill()
    assert states[:3] == ["waiting", "waiting", "gone"]
    assert states[3].startswith("failed: none of its paths may be published")
    assert f"post.published hello {site.remote_log()[0][0]}" in said
    assert any(line.startswith("post.dead-lettered refused") for line in said)
    assert forged.status_code == 400


# The classes of each CMS that its page uses, and two saves: a new post, then the post at another place.
STATAMIC = """
namespace Statamic\\Events {
    class EntrySaving { public $authenticatedUser; public function __construct(public $entry) {} }
    class EntrySaved extends EntrySaving {}
    class EntryDeleted extends EntrySaving {}
}
namespace {
    function base_path($path = '') { return getcwd() . ($path ? "/$path" : ''); }
    class User { function name() { return 'Ada Author'; } function email() { return 'ada@example.org'; } }
    class Entry {
        public $path = 'content/collections/blog/hello.md';
        function id() { return 7; }
        function path() { return base_path($this->path); }
        function collectionHandle() { return 'blog'; }
        function slug() { return basename($this->path, '.md'); }
        function get($key) { return 'Hello'; }
    }
    require 'page.php';
    $listener = new App\\Listeners\\EnqueueEntry();
    $entry = new Entry();
    $listener->handleSaving(new Statamic\\Events\\EntrySaving($entry));
    if ($argv[1] === 'move') {
        rename($entry->path, $entry->path = 'content/collections/blog/bye.md');
    }
    $saved = new Statamic\\Events\\EntrySaved($entry);
    $saved->authenticatedUser = new User();
    $listener->handleSaved($saved);
}
"""
KIRBY = """
namespace Kirby\\Cms {
    class Field { function __construct(public $text) {} function value() { return $this->text; } }
    class File {}
    class Page {
        function __construct(public $id) {}
        function id() { return $this->id; }
        function root() { return getcwd() . "/content/$this->id"; }
        function title() { return new Field('Hello'); }
    }
    class User {
        function nameOrEmail() { return new Field('Ada Author'); }
        function email() { return 'ada@example.org'; }
    }
    class Event {
        function __construct(public $action, public $arguments) {}
        function action() { return $this->action; }
        function arguments() { return $this->arguments; }
    }
    class App {
        static $hooks;
        static function plugin($name, $parts) { self::$hooks = $parts['hooks']; }
        static function instance() { return new self(); }
        function root($name) { return getcwd() . "/$name"; }
        function user() { return new User(); }
    }
}
namespace {
    use Kirby\\Cms\\{App, Event, Page};
    require 'page.php';
    $hook = App::$hooks['page.*:after'];
    $old = new Page('1_hello');
    if ($argv[1] === 'save') {
        $hook(new Event('create', ['page' => $old]));
        $hook(new Event('render', ['contentType' => 'html', 'page' => $old]));
    } else {
        rename('content/1_hello', 'content/1_bye');
        $hook(new Event('changeSlug', ['newPage' => new Page('1_bye'), 'oldPage' => $old]));
    }
}
"""
GRAV = """
namespace Grav\\Common { class Plugin { public $grav; } }
namespace Grav\\Common\\Page\\Interfaces { interface PageInterface {} }
namespace RocketTheme\\Toolbox\\Event { class Event extends \\ArrayObject {} }
namespace {
    define('GRAV_ROOT', getcwd());
    class Page implements Grav\\Common\\Page\\Interfaces\\PageInterface {
        public $original;
        function __construct(public $name) {}
        function path() { return GRAV_ROOT . "/user/pages/$this->name"; }
        function route() { return "/$this->name"; }
        function title() { return 'Hello'; }
        function getOriginal() { return $this->original; }
    }
    require 'page.php';
    $plugin = new Grav\\Plugin\\BriterWorkerPlugin();
    $user = ['email' => 'ada@example.org', 'fullname' => 'Ada Author', 'username' => 'ada'];
    $plugin->grav = ['user' => (object) $user];
    $fire = function ($event, $object) use ($plugin) {
        $method = $plugin::getSubscribedEvents()[$event][0];
        $plugin->$method(new RocketTheme\\Toolbox\\Event\\Event(['object' => $object]));
    };
    $page = new Page('hello');
    if ($argv[1] === 'save') {
        $fire('onAdminSave', $page);
        $fire('onAdminAfterSave', $page);
        $fire('onAdminAfterSave', new stdClass());
    } else {
        $moved = new Page('bye');
        $moved->original = $page;
        $fire('onAdminSave', $moved);
        rename('user/pages/hello', 'user/pages/bye');
        $fire('onAdminAfterSave', $moved);
    }
}
"""


@pytest.mark.parametrize(
    ("cms", "stubs", "old", "new"),
    [
        ("statamic", STATAMIC, "content/collections/blog/hello.md", "content/collections/blog/bye.md"),
        ("kirby", KIRBY, "content/1_hello/note.txt", "content/1_bye/note.txt"),
        ("grav", GRAV, "user/pages/hello/item.md", "user/pages/bye/item.md"),
    ],
)
def test_the_hook_of_the_cms_page_publishes_a_save_and_a_move(
    site: Site, cms: str, stubs: str, old: str, new: str
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
    (site.worktree / "cms.php").write_text(f"<?php{stubs}")

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

"""Who follows the tutorial or the README to the letter gets what they promise."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from dashboards import TOKEN, serving
from outcomes import assert_published, save
from remotes import asks_for, http_remote
from requirements import provide
from sites import Result, events_in, eventually, program
from standardwebhooks.webhooks import Webhook

if TYPE_CHECKING:
    from sites import Site

ROOT = Path(__file__).parents[2]
BRITER = "docs/how-to/cms/briter.md"
WORKER = 'briter-worker() { "$PYTHON" -m briter_worker "$@"; }\n'


def _commands(page: str, kind: str = "sh") -> list[str]:
    """The shell blocks of a page, in order."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def _follow(blocks: list[str], home: Path) -> str:
    """Type the blocks into one shell; what it printed. It stops at the first thing that fails."""
    done = subprocess.run(
        ["bash", "-euc", WORKER + "\n".join(blocks)],
        cwd=home,
        env={**os.environ, "HOME": str(home), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _exports(site: Site) -> list[str]:
    """The site's settings, for a shell."""
    kept = ("BRITER_", "BLOG_", "GIT_")
    return [f"export {key}='{value}'" for key, value in site.environment().items() if key.startswith(kept)]


def test_the_tutorial_publishes_holds_and_refuses(tmp_path: Path) -> None:
    install, *steps, daemon = _commands("docs/tutorial/first-post.md")
    assert "scripts/setup" in install
    assert daemon.strip() == "briter-worker run"
    # The last drain has a post to refuse: exit 1, as it should be.
    refusal = steps[-1].replace("run --once\n", "run --once && exit 9\n")

    said = _follow([*steps[:-1], "set +e\n", refusal], tmp_path)

    remote = tmp_path / "first-post" / "remote.git"
    log = subprocess.run(
        ["git", "log", "--format=%s", "main"], cwd=remote, capture_output=True, text=True, check=True
    )
    assert log.stdout.split("\n")[:2] == ["Publish Hello", "Start the site"]
    assert "scheduled\ttomorrow" in said
    waiting = [file.read_text() for file in (tmp_path / "first-post/site/storage/queue").glob("*.json")]
    assert ["settings" in job and "tomorrow" not in job for job in waiting] == [True]
    assert "none of its paths may be published" in said


def test_the_demo_shows_lines_for_a_person_at_a_terminal_and_json_into_a_pipe() -> None:
    demo = str(ROOT / "scripts" / "demo")
    spawn = f"import os, pty; raise SystemExit(os.waitstatus_to_exitcode(pty.spawn([{demo!r}])))"
    shown, piped = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout
        for command in ([sys.executable, "-c", spawn], [demo])
    )
    assert re.search(r"\d\d:\d\d:\d\d published hello", shown)
    assert "[briter-worker] {" not in shown
    assert '"event":"published"' in piped
    assert "It works." in shown
    assert "It works." in piped


def test_the_readmes_five_minutes_publish_a_first_and_a_second_post(site: Site) -> None:
    _, install, first, daemon, second = _commands("README.md")
    assert "pip install --constraint constraints.txt ." in install
    site.write_post("content/posts/hello.md", "# Hello\n")
    first, second = (
        block.replace("/srv/site-storage", str(site.storage)).replace("/srv/site", str(site.worktree))
        for block in (first, second)
    )

    said = _follow([first], site.root)

    assert '"event":"published"' in said
    assert site.subjects() == ["Publish Hello", "Start the site"]
    settings = [line for line in first.splitlines() if line.startswith("export ")]
    assert daemon.strip() == "briter-worker run"
    with site.running():
        said = _follow([*settings, second], site.root)
    assert "published as " in said
    assert site.subjects()[0] == "One more line"
    assert site.remote_file("content/posts/hello.md") == "# Hello\nOne more line.\n"


def test_a_publication_is_looked_at_and_undone(site: Site) -> None:
    for text in ("one", "two"):
        site.save_post("hello", f"{text}\n")
        site.run_once()
    first, again, older = _commands("docs/how-to/undo.md")
    exports = _exports(site)
    with site.running():
        said = _follow([*exports, first], site.root)
        assert "-one\n+two\n" in said
        assert "published as" in said
        assert site.remote_file("content/posts/hello.md") == "one\n"
        _follow([*exports, again, "briter-worker show hello --watch"], site.root)
        assert site.remote_log()[0][1] == "Keep the new version"
        _follow([*exports, older, "briter-worker show hello --watch"], site.root)
    assert site.remote_file("content/posts/hello.md") == "one\n"


def test_the_commits_are_signed_as_the_page_says(site: Site) -> None:
    provide("gpg", package="gnupg")
    ssh, verify, openpgp = _commands("docs/how-to/signing.md")
    save(site, "a", "b")
    home = Path(tempfile.mkdtemp(prefix="home-"))  # not in tmp_path: an agent's socket has a short name
    run = f"briter-worker run --once\ncd {site.worktree}\n"
    try:
        said = _follow([*_exports(site), ssh, run, verify, openpgp, "gpgconf --kill all"], home)
    finally:
        shutil.rmtree(home)

    assert said.count("a test commit was signed") == 2
    assert_published(site, Result(0, said, ""), "a", "b")


def test_the_line_for_cron_takes_every_setting_from_the_one_file(site: Site) -> None:
    settings = (ROOT / "docs/how-to/briter-worker.env").read_text()
    settings = settings.replace("/srv/site-storage", str(site.storage))
    settings = settings.replace("/srv/site", str(site.worktree))
    file = site.root / "briter-worker.env"
    file.write_text(
        settings.replace("DRY_RUN=true", "DRY_RUN=false").replace("ADAPTER=local-mdx", "ADAPTER=mkdocs")
    )
    line = (ROOT / "docs/how-to/crontab").read_text().splitlines()[-1].removeprefix("* * * * * ")
    line = line.replace("/etc/briter-worker.env", str(file)).replace("/srv/site-storage", str(site.storage))
    line = line.replace("/opt/briter-worker/bin/briter-worker", "briter-worker")
    _follow([line], site.root)
    log = site.storage / "worker.log"
    assert log.read_text() == "", "a run with nothing to do writes nothing"
    site.save_post("page", "# Page\n", "docs/page.md")

    _follow([line], site.root)

    assert site.remote_file("docs/page.md") == "# Page\n"
    names = [entry["event"] for entry in events_in(log.read_text())]
    assert names == ["worker-started", "start", "published", "worker-stopped"]


def test_the_token_of_the_https_recipe_outlives_a_host_that_refuses_it(site: Site) -> None:
    recipe = next(block for block in _commands("docs/how-to/deploy-keys.md") if "credentials" in block)
    with http_remote(site.root) as http:
        address = http.url(site.remote)
        recipe = recipe.replace("https://git.example.org/me/site.git", address).replace("TOKEN", "right")
        _follow([f"export HOME={site.root}; cd {site.worktree}", recipe], site.root)
        http.behaviour = asks_for("worker", "another")
        save(site, "a")
        refused = site.run_once(HOME=str(site.root))
        assert [each["failure"] for each in refused.of("failed")] == ["auth"]

        http.behaviour = asks_for("worker", "right")
        save(site, "b")

        assert_published(site, site.run_once(HOME=str(site.root)), "b")
    assert (site.root / ".site-credentials").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("page", "post"), [("hugo", "content/posts/trip/index.md"), ("astro", "src/content/blog/trip.md")]
)
def test_the_page_of_a_generator_publishes_what_an_editor_saves(site: Site, page: str, post: str) -> None:
    (block,) = _commands(f"docs/how-to/cms/{page}.md")
    block = block.replace("/srv/site-storage", str(site.storage)).replace("/srv/site", str(site.worktree))
    settings, watch = block.strip().rsplit("\n", 1)
    _follow([settings], site.root)
    exports = dict(re.findall(r"export (\w+)=(\S+)", settings))
    (site.worktree / post).parent.mkdir(parents=True)
    with site.running(*watch.split()[1:], **exports):
        site.write_post(post, "# Trip\n")
        eventually(lambda: site.remote_file(post) == "# Trip\n")


def test_a_briter_note_is_published(site: Site) -> None:
    provide("node", package="nodejs")
    ignore, publish = (block.replace("/srv/site", str(site.worktree)) for block in _commands(BRITER))
    (script,) = re.findall(r"```js\n(.*?)```", (ROOT / BRITER).read_text(), flags=re.DOTALL)
    site.write_post("content/notes/hello.mdx", "# Hello\n")
    (site.worktree / "save.mjs").write_text(script)
    shutil.copy(ROOT / "docs/how-to/writers/enqueue.mjs", site.worktree)
    live = "export BRITER_WORKER_DRY_RUN=false"
    _follow([ignore, "node save.mjs", live, publish], site.root)
    assert site.remote_file("content/notes/hello.mdx") == "# Hello\n"
    assert "storage" not in site.git("status", "--porcelain")


RUN = ["quiet-time", "remote-edits", "outcome", "symptoms", "failed-posts", "write-jobs", "upgrade"]
RUN += ["cms/statamic", "cms/kirby", "cms/grav"]


def test_every_command_of_these_pages_runs(site: Site) -> None:
    provide("node", package="nodejs")
    for path, target in (("storage", site.storage), ("docs", ROOT / "docs")):
        (site.worktree / path).symlink_to(target)
    (site.root / "site-storage").symlink_to(site.storage)
    save(site, "hello")
    ident = site.job("hello")["id"]
    assert site.run_once().of("published")
    site.save("refused", ["secret.txt"])
    site.run_once()
    # A PYTHON of the machine's own, which the scripts use, is not the one that the pages run.
    settings = {key: value for key, value in site.environment().items() if key != "PYTHON"}
    exports = [f"export {key}='{value}'" for key, value in settings.items()]
    pages = {page: "\n".join(_commands(f"docs/how-to/{page}.md")) for page in RUN}
    pages["failed-posts"] = pages["failed-posts"].replace("retry hello", "retry refused")
    client = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reference/python.md").read_text(), re.DOTALL)
    pages["python"] = f"\"$PYTHON\" - <<'END'\n{client[0]}END\nbriter-worker list --json"

    with serving(site) as dashboard:
        exports.append(f"export BRITER_DASHBOARD_TOKEN={TOKEN}; ID={ident}; cd {site.worktree}")
        blocks = [f"echo '# {page}'\n{text}" for page, text in pages.items()]
        commands = (
            "\n".join([*exports, *blocks]).replace("/srv", str(site.root)).replace("/tmp", str(site.root))
        )
        said = _follow([commands.replace("http://127.0.0.1:8320", dashboard.base)], site.root)

    assert '"name": "Ada"' in said.partition("# python\n")[2]
    outcome = said.partition("# outcome\n")[2]
    assert outcome.startswith("gone\n")
    assert f"\npublished {site.remote_log()[0][0]}" in outcome


# What a `shell` block needs of a machine of its own. Each stands before the real program in PATH.
STAND_INS = {
    "sudo": 'while [ "${1#-}" != "$1" ]; do [ "$1" != -u ] || shift; shift; done; exec "$@"',
    "python3": f"""
        case "$*" in
            "-m venv "*) exit ;;
            *" webhook "*) timeout 1 {sys.executable} "$@"; [ $? = 124 ]; exit ;;
        esac
        exec {sys.executable} "$@" """,
    "systemctl": """
        [ "$1" = enable ] || exit 0
        sed -i 's|=/opt/|=HERE/opt/|' HERE/etc/systemd/system/*
        ! systemd-analyze verify HERE/etc/systemd/system/* 2>&1 | grep .""",
    "briter-worker": f"""
        case "$1 $*" in *--once*) ;; "run "* | "serve "*) set -- "$@" --help ;; esac
        exec {sys.executable} -m briter_worker "$@" """,
    "curl": """
        case "$*" in *-N*) set -- --max-time 1 "$@" ;; esac
        PATH=${PATH#*:}
        curl --silent --show-error --fail-with-body "$@" || [ $? = 28 ]""",
    "ssh-keyscan": "sed 's/^/git.example.org /; s/ briter-worker$//' ~/.ssh/*.pub secrets/*.pub 2>/dev/null",
    "editor": "sed -i 's|=/srv/|=HERE/srv/|' \"$1\"",
    **dict.fromkeys(("pip", "journalctl", "docker", "groupadd", "usermod", "pgrep"), "true"),
}


def _follow_as_administrator(site: Site, pages: dict[str, list[str]], **replaced: str) -> None:
    """Type the `shell` blocks of pages, each from the project's folder, on a machine made of stand-ins."""
    programs = site.root / "opt/briter-worker/bin"
    for folder in (
        programs,
        *(
            site.root / each
            for each in ("etc/systemd/system", "etc/logrotate.d", "home/.ssh", "tmp", "srv/cms")
        ),
    ):
        folder.mkdir(parents=True, exist_ok=True)
    for name, script in STAND_INS.items():
        program(programs / name, script.replace("HERE", str(site.root)))
    for name in ("docs", "constraints.txt", "scripts"):
        (site.worktree / name).symlink_to(ROOT / name)
    for name, target in (
        ("site", site.worktree),
        ("cms/blog", site.worktree),
        ("site-storage", site.storage),
    ):
        (site.root / "srv" / name).symlink_to(target)
    text = "".join(
        f"(echo '# {page}'; cd {site.worktree}\n{block})\n"
        for page, blocks in pages.items()
        for block in blocks
    )
    text = re.sub(r"(?<![\w.*])/(srv|etc|opt|tmp)/", rf"{site.root}/\1/", text)
    for old, new in {"=site ": f"={os.geteuid()} ", **replaced}.items():
        text = text.replace(old, new)
    _follow(
        [
            *_exports(site),
            f"export PATH={programs}:$PATH HOME={site.root}/home; unset -f briter-worker",
            text,
        ],
        site.root,
    )


# Of each page with `shell` blocks. The last ones change or remove what the others need.
SHELL = ["install", "systemd", "cron", "container", "watch", "dashboard", "monitoring", "webhooks"]
SHELL += ["remote-edits", "outcome", "other-user", "symptoms", "deploy-keys", "upgrade"]


def test_every_command_for_an_administrator_runs(site: Site) -> None:
    provide("systemd-analyze", package="systemd")
    save(site, "hello")
    (site.worktree / ".git/index.lock").touch()
    pages = {page: _commands(f"docs/how-to/{page}.md", "shell") for page in SHELL}
    assert {*SHELL, "cluster"} == {
        page.stem for page in (ROOT / "docs").rglob("*.md") if "```shell" in page.read_text()
    }
    pages["dashboard"].pop()  # a cluster's
    with serving(site) as dashboard:
        places = {"https://posts.example.org": dashboard.base, "$TOKEN": TOKEN, " 8321": " 0"}
        _follow_as_administrator(site, pages, **places)


def test_every_command_for_a_cluster_runs(site: Site, empty_database_url: str) -> None:
    site.env.update({"BRITER_DATABASE_URL": empty_database_url, "BLOG_TOKEN": "secret"})
    for path in ("content/posts/hello.md", "hello.md"):
        site.write_post(path, "# Hello\n")
    page = "docs/how-to/cluster.md"
    start, *blocks, containers = _commands(page, "shell")
    start = re.sub("export BRITER_DATABASE_URL=.*", "", start)
    (declared,), (python,) = _commands(page, "yaml"), _commands(page, "python")
    python = f"$PYTHON - <<'END'\nfrom pathlib import Path\n{python}END\n"
    with http_remote(site.root) as http, serving(site) as dashboard:
        places = {"https://git.example.org/blog.git": http.url(site.remote), "$TOKEN": TOKEN}
        places |= dict.fromkeys(("https://publish.example.org", "https://posts.example.org"), dashboard.base)
        blocks.insert(1, f"cat >sites.yaml <<'END'\n{declared}END\n")
        blocks += [python, _commands("docs/how-to/dashboard.md", "shell")[-1], *_commands(page)[1:]]
        _follow_as_administrator(site, {"cluster": [start, *blocks, containers]}, **places)


def test_the_python_of_the_pages_runs() -> None:
    (shard,) = _commands("docs/explanation/cluster-speed.md", "python")
    (verify,) = _commands("docs/how-to/webhooks.md", "python")
    names: dict[str, Any] = {}
    exec(textwrap.dedent(shard), names)  # noqa: S102 - this project's own page
    databases = [names["shard"](f"site-{number}", ["a", "b"]) for number in range(50)]
    assert set(databases) == {"a", "b"}
    grown = [names["shard"](f"site-{number}", ["a", "b", "c"]) for number in range(50)]
    assert {after for before, after in zip(databases, grown, strict=True) if before != after} == {"c"}

    secret, now = "whsec_" + base64.b64encode(b"x" * 24).decode(), datetime.now(UTC)
    headers = {"webhook-id": "1", "webhook-timestamp": str(int(now.timestamp()))}
    headers["webhook-signature"] = Webhook(secret).sign("1", now, '{"type": "post.published"}')
    names["request"] = SimpleNamespace(body='{"type": "post.published"}', headers=headers)
    exec(verify.replace("whsec_…", secret), names)  # noqa: S102 - this project's own page
    assert names["message"] == {"type": "post.published"}

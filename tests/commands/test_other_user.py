"""The CMS runs as another user than the worker, as `docs/how-to/other-user.md` sets it up."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from requirements import python_for_everybody
from sites import Result, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
WORKER, CMS, GROUP = 20001, 20002, 20003

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


def _as(user: int) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={GROUP}", "--no-new-privs", "env"]


@pytest.fixture
def site() -> Iterator[Site]:
    """A site in a folder that every user may enter; pytest's own are root's alone."""
    root = Path(tempfile.mkdtemp(prefix="briter-users-"))
    root.chmod(0o755)
    site = Site.make(root)
    site.write_post("content/posts/there.md", "there\n")
    site.commit_all("There")
    for path in (root, *root.rglob("*")):
        os.chown(path, WORKER, WORKER, follow_symlinks=False)
    yield site
    shutil.rmtree(root)


def _follow_the_page(site: Site) -> None:
    page = (ROOT / "docs/how-to/other-user.md").read_text()
    (recipe,) = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    recipe = recipe.replace("/srv/site-storage", str(site.storage)).replace("/srv/site", str(site.worktree))
    recipe = recipe.replace("chgrp -R posts", f"chgrp -R {GROUP}")
    subprocess.run(["bash", "-euc", f'sudo() {{ "$@"; }}\n{recipe}'], check=True)


def _cms(site: Site, script: str) -> None:
    """Run a script as the CMS's user, in the site's folder."""
    subprocess.run([*_as(CMS), "bash", "-euc", script], cwd=site.worktree, check=True)


def _run_once(site: Site, command: str = "run --once", before: str = "") -> Result:
    python, env = python_for_everybody(_as(WORKER))
    done = subprocess.run(
        [
            *_as(WORKER),
            "bash",
            "-c",
            f"{before} umask 027; exec {shlex.quote(python)} -m briter_worker {command}",
        ],
        env=site.environment(**env),
        cwd=site.worktree,
        capture_output=True,
        text=True,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def _save(site: Site, slug: str, *paths: str) -> str:
    """A script that writes a job as a CMS does."""
    listed = ", ".join(f'"{path}"' for path in paths)
    job = shlex.quote(f'{{"slug": "{slug}", "paths": [{listed}]}}')
    return f"echo {job} > {site.queue}/.{slug}; mv {site.queue}/.{slug} {site.queue}/{slug}.json\n"


def test_each_can_write_what_the_other_wrote(site: Site) -> None:
    _follow_the_page(site)
    _cms(
        site,
        "umask 022; mkdir content/posts/new; echo new > content/posts/new/index.md\n"
        + _save(site, "new", "content/posts/new"),
    )
    assert _run_once(site).of("published")
    paths = ("content/posts/there.md", "content/posts/deep/theirs.md")
    person = "git -c user.name=x -c user.email=x@example.org"
    writes = "; ".join(f"mkdir -p $(dirname {path}); echo theirs > {path}" for path in paths)
    script = f"git clone -q {site.remote} other; cd other; {writes}; git add -A; {person} commit -qm x"
    subprocess.run([*_as(WORKER), "bash", "-euc", f"{script}; git push -q"], cwd=site.root, check=True)
    _cms(
        site,
        "umask 022; echo again >> content/posts/new/index.md\n" + _save(site, "new", "content/posts/new"),
    )
    assert _run_once(site).of("published")

    _cms(site, "for each in there deep/theirs; do echo edited >> content/posts/$each.md; done")
    _cms(site, "echo beside > content/posts/deep/beside.md\n" + _save(site, "deep", "content/posts"))

    assert _run_once(site).of("published")
    for path in paths:
        shown = site.git("-c", "safe.directory=*", "show", f"main:{path}", cwd=site.remote)
        assert shown == "theirs\nedited"


def test_the_cms_can_write_neither_the_repository_nor_the_workers_state(site: Site) -> None:
    _follow_the_page(site)
    _run_once(site)

    for place in (".git/config", ".git/hooks/post-commit", str(site.storage / "config.json"), "layout.html"):
        with pytest.raises(subprocess.CalledProcessError):
            _cms(site, f"echo x >> {place}")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("", ""),
        ("ln -s nowhere content/dangling; ln -s ../.git content/linked", ""),
        ("chmod -R g-s content", "content has no setgid bit"),
        ("chmod g+w,o+w .git", ".git can be written by others"),
        (f"chown {CMS} ../storage", "storage can be written by others"),
        (f"mkdir content/closed; chown {CMS} content/closed; chmod 700 content/closed", "may not write"),
        (f"echo x > content/x; chown {CMS} content/x; chmod 600 content/x", "may not read"),
        (f"chmod 2750 ../storage/queue; chown {CMS} ../storage/queue", "may not write"),
    ],
)
def test_the_doctor_names_the_permission_that_is_wrong(site: Site, spoil: str, message: str) -> None:
    _follow_the_page(site)
    _cms(site, "umask 002; echo new > content/posts/new.md\n")
    subprocess.run(["bash", "-euc", spoil], cwd=site.worktree, check=True)
    finding = _run_once(site, "doctor --json").finding("accounts")
    assert finding["state"] == ("warning" if message else "ok"), finding
    assert message in finding["message"]
    assert bool(finding["fix"]) == bool(message)


def test_a_job_that_the_worker_may_not_read_says_so(site: Site) -> None:
    _follow_the_page(site)
    _cms(site, "umask 077\n" + _save(site, "mine", "content/posts/there.md"))
    os.utime(site.queue / "mine.json", (0, 0))

    result = _run_once(site)

    (entry,) = result.of("quarantined")
    assert "may not read it" in entry["error"]


def test_a_folder_that_the_worker_may_not_enter_concerns_its_own_post_alone(site: Site) -> None:
    _follow_the_page(site)
    _cms(
        site,
        "umask 022; echo good > content/posts/good.md\n"
        + _save(site, "good", "content/posts/good.md")
        + "umask 077; mkdir content/posts/closed; echo x > content/posts/closed/index.md; umask 022\n"
        + _save(site, "closed", "content/posts/closed"),
    )

    result = _run_once(site)

    assert [entry["slug"] for entry in result.of("published")] == ["good"]
    (failed,) = result.of("failed")
    assert (failed["slug"], failed["failure"], failed["attempt"]) == ("closed", "unsettled", 1)
    assert "retryAt" in failed


def test_a_user_without_a_home_and_without_a_passwd_entry_can_do_everything(site: Site) -> None:
    nobody = "unset HOME USER LOGNAME XDG_CONFIG_HOME;"
    write = "echo new > content/posts/new.md"
    subprocess.run([*_as(WORKER), "bash", "-euc", write], cwd=site.worktree, check=True)
    commands = ("enqueue new content/posts/new.md", "run --once", "pull", "history", "status", "retry --all")
    for command in commands:
        done = _run_once(site, command, nobody)
        assert done.returncode == 0, done
        assert "Traceback" not in done.stderr, done
    doctor = _run_once(site, "doctor --json", nobody)
    assert doctor.finding("remote")["state"] == "ok", doctor.stdout

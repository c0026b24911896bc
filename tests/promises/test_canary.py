"""A known secret wherever one can be, in an address, a header, a helper; and looked for everywhere.

Each shape has a canary of its own, as a worker that has learned one hides it from then on.
"""

from __future__ import annotations

import base64
import html
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from outcomes import LAST, save
from remotes import HOST, Exchange, closed_port, http_remote
from sites import events_in, eventually, program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from remotes import HttpRemote
    from sites import Site


def canary(name: str) -> str:
    """A secret that no pattern knows."""
    return f"cAnArY7{name}Zk4Wq9Xv2"


@dataclass(frozen=True)
class Shape:
    """One place for a secret. `at` stands for a server that answers, `nobody` for a port where none does."""

    name: str
    url: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def secret(self) -> str:
        return canary(self.name)

    def configured(self, at: str, nobody: str) -> dict[str, str]:
        settings = {"remote.origin.url": self.url, **self.settings}
        names = {"at": at, "nobody": nobody, "secret": self.secret}
        return {key.format(**names): value.format(**names) for key, value in settings.items()}


SHAPES = [
    Shape("password", "http://user:{secret}@{at}/x.git"),
    Shape("user", "http://{secret}@{at}/x.git"),
    Shape("query", "http://{at}/x.git?private={secret}"),
    Shape("hook", "http://{at}/hooks/{secret}/x.git"),
    Shape("path", "http://{at}/x-access-token/{secret}/"),
    Shape("encoded", "http://user:%2F{secret}%40%3A@{at}/x.git"),
    Shape("slash", "http://user:a/{secret}/b@{at}/x.git"),
    Shape("beside", "{secret}@127.0.0.1:x.git"),
    Shape("ssh", "ssh://user:{secret}@{nobody}/x.git"),
    Shape("tls", "https://user:{secret}@{nobody}/x.git"),
    Shape("program", "ext::sh -c https://user:a/{secret}@h/x"),
    Shape("pushurl", "http://{at}/x.git", {"remote.origin.pushurl": "http://user:a/{secret}@{at}/x.git"}),
    Shape("proxy", "http://{at}/x.git", {"http.proxy": "http://user:{secret}@{nobody}"}),
    Shape("instead", "mine:x.git", {"url.http://user:a/{secret}@{at}/.insteadOf": "mine:"}),
    Shape("header", "http://{at}/x.git", {"http.extraHeader": "X-Opens: {secret}"}),
    Shape(
        "helper",
        "http://{at}/x.git",
        {"credential.helper": "!f() {{ echo username=u; echo password={secret}; }}; f"},
    ),
]
NETRC = canary("netrc")
PROXY = canary("proxyvariable")


def repeats(exchange: Exchange) -> None:
    """Refuses, with all that it was told, in every spelling."""
    headers = exchange.handler.headers
    given = headers.get("Authorization")
    if given is None:
        exchange.reply(401, headers={"WWW-Authenticate": 'Basic realm="posts"'})
        return
    said = [exchange.handler.path, *(f"{name}: {value}" for name, value in headers.items())]
    _, _, encoded = given.partition(" ")
    with suppress(ValueError):
        user_and_password = base64.b64decode(encoded).decode()
        if NETRC not in user_and_password:
            # Only curl has seen that one. In the header, it is known for a secret by the header's name.
            said += [encoded, user_and_password, *user_and_password.split(":")]
    for each in list(said):
        said += [unquote(each), html.escape(each), each.replace("cAnArY", "cAn\x1b[0mA\x1b[1mrY")]
    exchange.reply(404, "\n".join(said).encode(), headers={"Content-Type": "text/plain"})


@dataclass
class Watched:
    """A site with a remote that repeats what it hears, and all that was said so far."""

    site: Site
    http: HttpRemote
    nobody: str
    env: dict[str, str]
    said: list[str] = field(default_factory=list)

    @property
    def commands(self) -> str:
        """The argv of every git that the worker has started itself."""
        return (self.site.root / "argv").read_text()

    def configure(self, shape: Shape) -> None:
        """The operator's configuration has the secret, in the middle of a file as a person leaves it."""
        config = self.site.worktree / ".git" / "config"
        plain = self.site.root / "config"
        if not plain.exists():
            shutil.copy(config, plain)
        fresh = self.site.root / "fresh"
        shutil.copy(plain, fresh)
        for key, value in shape.configured(f"{HOST}:{self.http.port}", self.nobody).items():
            self.site.git("config", "--file", str(fresh), key, value)
        fresh.replace(config)

    def run(self, *args: str) -> str:
        result = self.site.command(*args, **self.env)
        self.said.append(result.stdout + result.stderr)
        return self.said[-1]

    def everything(self) -> bytes:
        """All that was printed, all argv, and every byte of the worker's files."""
        files = [file for file in self.site.storage.rglob("*") if file.is_file()]
        database = self.site.storage / "history.db"
        assert database in files
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            rows = "\n".join(connection.iterdump())
        assert "INSERT INTO" in rows
        texts = [self.commands, rows, *self.said]
        return "\n".join(texts).encode() + b"\n".join(file.read_bytes() for file in files)


@pytest.fixture
def watched(site: Site) -> Iterator[Watched]:
    """Git is started through a program that notes its argv."""
    programs = site.root / "programs"
    programs.mkdir()
    real = shutil.which("git")
    program(programs / "git", f'printf "%s\\n" "$*" >> {site.root}/argv\nexec {real} "$@"')
    (site.root / ".netrc").write_text(f"machine {HOST} login u password {NETRC}\n")
    (site.root / ".netrc").chmod(0o600)
    with http_remote(site.root) as http, closed_port() as port:
        http.behaviour = repeats
        env = {
            **LAST,
            "BRITER_DEBUG": "1",
            "BRITER_GIT_TIMEOUT_MS": "5000",
            "BRITER_WORKER_POLL_INTERVAL_MS": "100",
            "HOME": str(site.root),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HTTPS_PROXY": f"http://user:a/{PROXY}@{HOST}:{port}",
        }
        yield Watched(site, http, f"{HOST}:{port}", env)


def assert_unsaid(where: bytes, secret: str, name: str) -> None:
    for spelling in (secret, base64.b64encode(secret.encode()).decode().rstrip("=")[1:-1]):
        at = where.find(spelling.encode())
        assert at < 0, f"{name}: {where[max(0, at - 300) : at + 100]!r}"


@pytest.mark.timeout(300)
def test_no_secret_of_an_address_is_shown_anywhere(watched: Watched) -> None:
    site = watched.site
    log = site.root / "log"
    with site.running_to(log, **watched.env) as worker:
        for shape in SHAPES:
            watched.configure(shape)
            save(site, shape.name)
            eventually(partial(dead, log, shape.name))
        worker.terminate()
        worker.wait(60)
    watched.said.append(log.read_text())
    for name, form in (("hook", ["--json"]), ("slash", []), ("instead", [])):
        watched.configure(next(shape for shape in SHAPES if shape.name == name))
        assert "remote" in watched.run("doctor", *form)
    watched.run("retry", "slash")
    watched.run("run", "--once")
    for args in (["status"], ["list"], ["show", "slash"], ["history"]):
        watched.run(*args)
        watched.run(*args, "--json")
    jobs = {job["slug"]: job for job in site.jobs()}
    everything = watched.everything()
    for shape in SHAPES:
        assert jobs[shape.name]["lastError"], shape.name
        assert_unsaid(everything, shape.secret, shape.name)
    for secret in (NETRC, PROXY):
        assert_unsaid(everything, secret, secret)
    # It was there to be found: the server has heard it, and git was asked to fetch by the remote's name.
    assert "***" in jobs["hook"]["lastError"]
    assert "origin" in next(line for line in watched.commands.splitlines() if " fetch " in line)
    # What is no secret is still said.
    assert "not found" in jobs["hook"]["lastError"]
    assert HOST in jobs["hook"]["lastError"]


def dead(log: Path, slug: str) -> bool:
    told = [event for event in events_in(log.read_text()) if event.get("slug") == slug]
    return any(event["event"] == "dead-lettered" for event in told)


@pytest.mark.parametrize("line", ["url = https://h/hooks/{secret}/x.git\n[", '[remote "https://h/{secret}\n'])
def test_a_configuration_that_cannot_be_read_is_not_shown_instead(site: Site, line: str) -> None:
    secret = canary("torn")
    config = site.worktree / ".git" / "config"
    config.write_text(line.format(secret=secret) + config.read_text())
    save(site, "a")
    result = site.run_once(BRITER_DEBUG="1", **LAST)
    assert "git config --list" in site.job("a")["fix"]
    assert secret not in result.stdout + result.stderr + str(site.jobs())


MISTAKE = """
import sys, threading
from briter_worker import __main__, commands, errors

def fail(*_, **__):
    errors.conceal({secret})
    try:
        raise ValueError("at https://h/" + secret)
    except ValueError as error:
        raise KeyError("\\x1b]0;title\\x07" + secret) from error

secret = sys.argv.pop()
if sys.argv[1] == "thread":
    commands.main = lambda _: threading.Thread(target=fail).start()
else:
    commands.typer.main.get_command = lambda app: type('Command', (), {'main': fail, 'params': ()})()
__main__.main()
"""


@pytest.mark.parametrize("where", ["worker", "thread"])
@pytest.mark.parametrize("debug", ["1", ""])
def test_what_a_mistake_of_ours_prints_has_no_secret_and_no_escape_in_it(
    site: Site, where: str, debug: str
) -> None:
    secret = canary("mistake")
    done = subprocess.run(
        [sys.executable, "-c", MISTAKE.replace("{secret}", "[secret]"), where, secret],
        env=site.environment(BRITER_DEBUG=debug),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "KeyError" in done.stderr
    assert ("Traceback" in done.stderr) == (debug == "1" or where == "thread")
    assert secret not in done.stderr
    assert done.stderr.replace("\n", "").isprintable()

"""Every commit of the worker's verifies, keeps its message, and never waits for a passphrase."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from outcomes import save
from requirements import provide
from sites import eventually, program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster_farm import Farm
    from sites import Site


X509 = """Key-Type: RSA
Key-Length: 2048
Key-Usage: sign
Serial: random
Name-DN: CN=Worker
Name-Email: worker@example.org
%no-protection
"""


def shell(*command: str, stdin: str = "", ok: tuple[int, ...] = (0,), **env: str) -> bytes:
    done = subprocess.run(
        command, env={**os.environ, **env}, input=stdin.encode(), capture_output=True, check=False
    )
    assert done.returncode in ok, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Keys:
    """A home with keys of every kind."""

    home: Path

    @property
    def ssh(self) -> Path:
        return self.home / "ssh key"

    def make_ssh(self, passphrase: str = "") -> None:
        shell("ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(self.ssh))
        public = self.ssh.with_suffix(".pub").read_text()
        (self.home / "allowed").write_text(f"* {public}")

    def gpg(self, *args: str, program: str = "gpg", stdin: str = "") -> bytes:
        # gpgsm makes a certificate and exits with 2.
        options, ok = ("--batch", "--pinentry-mode=loopback"), (0, 2) if "--generate-key" in args else (0,)
        return shell(program, *options, *args, stdin=stdin, ok=ok, GNUPGHOME=str(self.home))

    def settings(self, kind: str, passphrase: str = "") -> dict[str, str]:
        """Make a key of this kind; return the worker's settings for it."""
        env = {"BRITER_GIT_SIGNING_FORMAT": kind, "GNUPGHOME": str(self.home)}
        if kind == "ssh":
            self.make_ssh(passphrase)
            return env | {"BRITER_GIT_SIGNING_KEY": str(self.ssh)}
        if kind == "openpgp":
            provide("gpg", package="gnupg")
            self.gpg(
                "--passphrase", passphrase, "--quick-gen-key", "W <worker@example.org>", "ed25519", "sign"
            )
            return env | {"BRITER_GIT_SIGNING_KEY": "worker@example.org"}
        provide("gpgsm", package="gpgsm")
        (self.home / "gpgsm.conf").write_text("disable-crl-checks\n")
        (self.home / "parameters").write_text(X509)
        certificate = self.gpg("--generate-key", str(self.home / "parameters"), program="gpgsm")
        (self.home / "certificate").write_bytes(certificate)
        self.gpg("--import", str(self.home / "certificate"), program="gpgsm")
        listed = self.gpg("--list-secret-keys", "--with-colons", program="gpgsm").decode()
        fingerprint = re.findall(r"^fpr:+(\w+):", listed, re.MULTILINE)[0]
        (self.home / "trustlist.txt").write_text(f"{fingerprint} S relax\n")
        shell("gpgconf", "--reload", "gpg-agent", GNUPGHOME=str(self.home))
        return env | {"BRITER_GIT_SIGNING_KEY": fingerprint}

    def verify(self, repository: Path, commit: str, kind: str) -> None:
        allowed = f"gpg.ssh.allowedSignersFile={self.home}/allowed"
        options = ("-c", allowed, "-c", f"gpg.format={kind}")
        shell("git", "-C", str(repository), *options, "verify-commit", commit, GNUPGHOME=str(self.home))


@pytest.fixture
def keys() -> Iterator[Keys]:
    # Not in tmp_path: the name of an agent's socket has at most 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="keys-"))
    yield Keys(home)
    if shutil.which("gpgconf"):
        shell("gpgconf", "--kill", "all", GNUPGHOME=str(home))
    shutil.rmtree(home, ignore_errors=True)


def own_commits(site: Site) -> list[str]:
    out = site.git("log", "--all", "--format=%H", "--committer=Briter Worker", cwd=site.remote)
    return out.splitlines()


LINES = "".join(f"line {n}\n" for n in range(20))


@pytest.mark.parametrize("kind", ["ssh", "openpgp", "x509"])
def test_every_commit_verifies_whatever_way_it_took(site: Site, keys: Keys, kind: str) -> None:
    site = replace(site, env=keys.settings(kind))
    site.save_post("long", LINES)
    save(site, "a", "b")
    assert len(site.run_once().of("published")) == 3  # a batch
    site.push_elsewhere({"content/posts/long.md": LINES.replace("line 1\n", "line one\n")})
    site.push_elsewhere({"content/posts/welcome.md": "theirs\n"})
    site.save_post("long", LINES.replace("line 18\n", "line eighteen\n"))
    site.save_post("welcome", "ours\n")
    result = site.run_once()  # the remote moved: one post is merged, one kept on a branch of its own
    assert [event["slug"] for event in result.of("published")] == ["long"], result.stdout
    assert "conflict/welcome" in site.job("welcome")["lastError"]
    site.hook("read o n r; ! git ls-tree -r $n --name-only | grep -q bad || exit 1")
    save(site, "c", "bad", "d")
    site.run_once(BRITER_WORKER_BACKOFF_MS="0")  # one post is refused, and the batch halved

    commits = own_commits(site)
    assert len(commits) == 7, site.git("log", "--all", "--oneline", cwd=site.remote)
    for commit in commits:
        keys.verify(site.remote, commit, kind)
    key = site.env["BRITER_GIT_SIGNING_KEY"]
    if kind == "ssh":
        key = shell("ssh-keygen", "-lf", key).decode().split()[1]
    elif kind == "openpgp":
        key = re.findall(r"^fpr:+(\w+):", keys.gpg("--list-keys", "--with-colons").decode(), re.MULTILINE)[0]
    receipts = site.command("history", "--json").json()
    signed = {each["signedWith"] for each in receipts if each["outcome"] == "published"}
    assert signed == {f"{kind} {key}"}


MESSAGES = [
    "no final newline",
    "final\n",
    "# leading\n\n#marks",
    "\n\n  spaces  \n\n\n",
    "",
    "Gruß\r\n\tñ 🙂",
]


def raw(site: Site, commit: str) -> tuple[bytes, bytes]:
    """The commit's header and message, to the letter, without parents and signature."""
    content = shell("git", "-C", str(site.remote), "cat-file", "commit", commit)
    header, _, message = content.partition(b"\n\n")
    lines = [line for line in header.split(b"\n") if not line.startswith((b"parent", b"gpgsig", b" "))]
    return re.sub(rb"tree \w+|(?<=> )\d+", b"", b"\n".join(lines)), message


def test_a_signature_changes_nothing_else_of_a_commit(site: Site, keys: Keys) -> None:
    signed = keys.settings("ssh")
    site.git("config", "i18n.commitEncoding", "ISO-8859-1")
    site.git("config", "commit.gpgSign", "true")
    found = []
    for env in ({}, signed):
        for number, message in enumerate(MESSAGES):
            site.write_post(f"content/posts/{number}.md", "signed\n" if env else "plain\n")
            author = {"name": "Ñ d'Arc", "email": f"{number}@example.org"}
            site.save(f"{number}", [f"content/posts/{number}.md"], message=message, author=author)
        published = {event["slug"]: event["commit"] for event in site.run_once(**env).of("published")}
        found += [raw(site, published[f"{number}"]) for number in range(len(MESSAGES))]
    assert found[: len(MESSAGES)] == found[len(MESSAGES) :]
    expected = [message or f"Publish {number}" for number, message in enumerate(MESSAGES)]
    assert [message.decode() for _, message in found] == expected * 2


MARKED = ['"Q"', "Jr.", "'quoted' name,", "O'Neil", " spaces ", "...", ";"]
"""Names with marks around them, most of which `git commit` drops: git 2.44 and newer keep full stops."""


def committed_name(site: Site, name: str) -> str:
    """The name that git itself records for an author; git refuses one of which nothing is left."""
    env = {**os.environ, "GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": "a@example.org"}
    done = subprocess.run(
        ["git", "var", "GIT_AUTHOR_IDENT"], cwd=site.worktree, env=env, capture_output=True, check=False
    )
    return done.stdout.decode().partition(" <")[0] or "unknown"


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_authors_are_recorded_as_git_commit_records_them(site: Site, keys: Keys, *, signed: bool) -> None:
    names = {f"p{number}": name for number, name in enumerate(MARKED)}
    for slug, name in names.items():
        site.save_post(slug, f"{slug}\n", author={"name": name, "email": '"a@example.org",'})
    result = site.run_once(**(keys.settings("ssh") if signed else {}))
    commits = {event["slug"]: event["commit"] for event in result.of("published")}
    found = {
        slug: site.git("log", "-1", "--format=%an <%ae>", commit, cwd=site.remote)
        for slug, commit in commits.items()
    }
    assert found == {slug: f"{committed_name(site, name)} <a@example.org>" for slug, name in names.items()}


def path_without(site: Site, name: str, script: str = "") -> str:
    """A PATH with everything but this program, which is `script` instead."""
    folder = site.root / "bin"
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for file in Path(place).glob("*") if Path(place).is_dir() else ():
            link = folder / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)
    (folder / name).unlink()
    if script:
        program(folder / name, script)
    return str(folder)


OLD = "echo 'unknown option -- Y' >&2; echo 'usage: ssh-keygen [-q]' >&2; exit 1"
CASES = {
    "missing": ("ssh", "set BRITER_GIT_SIGNING_KEY"),
    "no key": ("ssh", "set BRITER_GIT_SIGNING_KEY"),
    "no agent": ("ssh", "set BRITER_GIT_SIGNING_KEY"),
    "open to others": ("ssh", "chmod 600"),
    "passphrase": ("ssh", "without a passphrase"),
    "old ssh-keygen": ("ssh", "OpenSSH 8.2"),
    "no ssh-keygen": ("ssh", "install openssh-client"),
    "gpg passphrase": ("openpgp", "without a passphrase"),
    "unknown gpg key": ("openpgp", "gpg --list-secret-keys"),
    "no gpg": ("openpgp", "gnupg for openpgp"),
}


def break_key(site: Site, keys: Keys, case: str) -> dict[str, str]:
    kind = CASES[case][0]
    env = keys.settings(kind, "secret" if "passphrase" in case else "")
    if kind == "openpgp":
        shell("gpgconf", "--kill", "gpg-agent", GNUPGHOME=str(keys.home))  # it knows the passphrase
    match case:
        case "missing":
            keys.ssh.unlink()
            keys.ssh.with_suffix(".pub").unlink()
        case "no key":
            keys.ssh.write_text("junk\n")
            keys.ssh.with_suffix(".pub").unlink()
        case "no agent":
            env["BRITER_GIT_SIGNING_KEY"] = f"key::{keys.ssh.with_suffix('.pub').read_text().strip()}"
        case "open to others":
            keys.ssh.chmod(0o644)
        case "old ssh-keygen":
            env["PATH"] = path_without(site, "ssh-keygen", OLD)
        case "no ssh-keygen":
            env["PATH"] = path_without(site, "ssh-keygen")
        case "unknown gpg key":
            env["BRITER_GIT_SIGNING_KEY"] = "nobody@example.org"
        case "no gpg":
            env["PATH"] = path_without(site, "gpg")
    return env


@pytest.mark.parametrize("case", CASES)
def test_an_unusable_key_is_named_with_its_fix_and_nothing_is_published(
    site: Site, keys: Keys, case: str
) -> None:
    env = break_key(site, keys, case)
    save(site, "a")

    result = site.run_once(**env)

    job = site.job("a")
    assert (job["failure"], job["status"], job["attempts"]) == ("signing", "pending", 1), result.stdout
    assert CASES[case][1] in job["fix"]
    assert "GNUPG:" not in job["lastError"]
    assert len(site.remote_log()) == 1
    assert "/batch/" not in site.git("for-each-ref", "refs/briter")
    finding = site.command("doctor", "--json", **env).finding("signing")
    assert (finding["state"], finding["fix"]) == ("error", job["fix"])

    if case != "missing":
        return
    good = keys.settings("ssh")
    assert site.command("doctor", "--json", **good).finding("signing")["state"] == "ok"
    site.command("retry", "a", **good)
    assert site.run_once(**good).of("published")


def test_a_key_that_is_expired_or_not_trusted_has_a_fix_of_its_own(site: Site, keys: Keys) -> None:
    env = keys.settings("x509")
    (keys.home / "trustlist.txt").write_text("")
    shell("gpgconf", "--reload", "gpg-agent", GNUPGHOME=str(keys.home))
    assert "trustlist.txt" in site.command("doctor", "--json", **env).finding("signing")["fix"]
    provide("gpg", package="gnupg")
    past = ("--faked-system-time", "20200101T000000", "--passphrase", "")
    keys.gpg(*past, "--quick-gen-key", "old@example.org", "ed25519", "sign", "1d")
    env |= {"BRITER_GIT_SIGNING_FORMAT": "openpgp", "BRITER_GIT_SIGNING_KEY": "old@example.org"}
    assert "renew the key" in site.command("doctor", "--json", **env).finding("signing")["fix"]


def test_a_program_that_does_not_answer_is_the_keys_failure(site: Site, keys: Keys) -> None:
    env = keys.settings("ssh") | {"PATH": path_without(site, "ssh-keygen", "exec sleep 60")}
    save(site, "a")
    site.run_once(**env, BRITER_GIT_TIMEOUT_MS="2000")
    assert (site.job("a")["failure"], "gpg-agent" in site.job("a")["fix"]) == ("signing", True)


def test_a_terminal_is_never_asked_for_a_passphrase(site: Site, keys: Keys) -> None:
    provide("script", package="bsdutils")
    env = keys.settings("ssh", "secret")
    save(site, "a")
    worker = f"{sys.executable} -m briter_worker run --once --json"
    done = subprocess.run(
        ["script", "--quiet", "--return", "--command", worker, "/dev/null"],
        env=site.environment(**env, BRITER_GIT_TIMEOUT_MS="20000"),
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert site.job("a")["failure"] == "signing", done.stdout
    assert "did not end" not in site.job("a")["lastError"]
    assert "Enter passphrase" not in re.sub(r"\[briter-worker\].*", "", done.stdout)


def test_an_ssh_agent_signs_for_a_public_key(site: Site, keys: Keys) -> None:
    keys.make_ssh("secret")
    plain = keys.home / "plain"
    shutil.copy(keys.ssh, plain)
    shell("ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", str(plain))
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(keys.home / "agent")], stdout=subprocess.DEVNULL)
    try:
        env = {"SSH_AUTH_SOCK": str(keys.home / "agent")}
        add = ["ssh-add", "-q", str(plain)]
        eventually(lambda: not subprocess.run(add, env=os.environ | env, check=False).returncode)
        public = keys.ssh.with_suffix(".pub")
        for slug, key in (
            ("a", str(public)),
            ("b", f"key::{public.read_text().strip()}"),
            ("c", str(keys.ssh)),
        ):
            save(site, slug)
            assert site.run_once(**env, BRITER_GIT_SIGNING_KEY=key).of("published"), key
    finally:
        agent.kill()
        agent.wait()
    for commit in own_commits(site):
        keys.verify(site.remote, commit, "ssh")


def test_no_program_of_the_repositorys_configuration_signs(site: Site, keys: Keys) -> None:
    mark = site.root / "has-run"
    canary = program(site.root / "canary", f"touch {mark}\nexit 1")
    for key in ("gpg.program", "gpg.openpgp.program", "gpg.ssh.program", "gpg.ssh.defaultKeyCommand"):
        site.git("config", key, str(canary))
    for slug, kind in (("a", "ssh"), ("b", "openpgp")):
        env = keys.settings(kind)
        save(site, slug)
        assert site.run_once(**env).of("published")
    assert not mark.exists()


def test_a_relative_path_counts_from_the_app_root_and_a_key_itself_is_refused(site: Site, keys: Keys) -> None:
    keys.make_ssh()
    shutil.copy(keys.ssh, site.worktree / ".git" / "signing")
    save(site, "a")
    assert site.run_once(BRITER_GIT_SIGNING_KEY=".git/signing").of("published")
    keys.verify(site.remote, own_commits(site)[0], "ssh")
    refused = site.run_once(BRITER_GIT_SIGNING_KEY=keys.ssh.read_text())
    assert refused.returncode == 2
    assert "in one line, not the key itself" in refused.stderr
    assert keys.ssh.read_text().splitlines()[1][:20] not in refused.stderr
    assert site.run_once(BRITER_GIT_SIGNING_FORMAT="pgp").returncode == 2


def test_a_clusters_nodes_sign_with_the_sites_key(farm: Farm, keys: Keys) -> None:
    keys.make_ssh()
    farm.add("blog", gitSigningKey=str(keys.ssh))
    farm.save("blog", "a")
    farm.save("blog", "b")
    done = farm.once()
    assert farm.published("blog") == {"a": 1, "b": 1}, done.stdout
    for commit in farm.site("blog").git("log", "-2", "--format=%H", "main", cwd=farm.remote("blog")).split():
        keys.verify(farm.remote("blog"), commit, "ssh")

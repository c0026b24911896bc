"""Real messages of git, ssh, curl, GitHub and GitLab, and the failure code that each stands for."""

from __future__ import annotations

import time

import pytest

from briter_worker.errors import FailureClass, FailureCode, PublishError, PushRejectedError, is_environment
from briter_worker.git import messages

F = FailureCode
HUNG_UP = (
    "fatal: Could not read from remote repository.\n\nPlease make sure you have the correct access rights"
)


def read_cases(table: str) -> list[tuple[FailureCode, str]]:
    """A code and a text in each line; a line that begins with | continues the text."""
    cases: list[tuple[FailureCode, str]] = []
    for line in table.strip().splitlines():
        word, _, rest = line.strip().partition(" ")
        text = rest.strip().replace("{hung up}", HUNG_UP)
        if word == "|":
            code, begun = cases.pop()
            cases.append((code, f"{begun}\n{text}"))
        else:
            cases.append((FailureCode(word), text))
    return cases


WORDS = read_cases(r"""
    auth             git@github.com: Permission denied (publickey).
                   | {hung up}
    auth             remote: Invalid username or token.
                   | fatal: Authentication failed for 'https://github.com/a/b.git/'
    auth             fatal: could not read Username for 'https://github.com': terminal prompts disabled
    auth             remote: Permission to a/b.git denied to c.
                   | fatal: unable to access 'https://h/b.git/': The requested URL returned error: 403
    auth             ERROR: The key you are authenticating with has been marked as read only.
                   | {hung up}
    auth             remote: ERROR: This deploy key does not have write access to this project.
                   | {hung up}
    auth             fatal: unable to access 'https://h/x/': The requested URL returned error: 401
    auth             batch response: Authentication required: You must have push access
    host-key         No ED25519 host key is known for h and you have requested strict checking.
                   | {hung up}
    host-key         @ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @
                   | Host key verification failed.
                   | {hung up}
    network          fatal: unable to access 'https://h.example/x/': Could not resolve host: h.example
    network          ssh: Could not resolve hostname h.example: Name or service not known
                   | {hung up}
    network          ssh: connect to host h.example port 22: Connection refused
                   | {hung up}
    network          ssh: connect to host h port 22: Connection timed out
                   | {hung up}
    network          kex_exchange_identification: Connection closed by remote host
                   | {hung up}
    network          fatal: unable to access 'https://h/x/': Failed to connect to h port 443
    network          fatal: unable to access 'https://h/x/': SSL certificate problem: certificate has expired
    network          fatal: unable to access 'https://h/x/': OpenSSL SSL_connect: SSL_ERROR_SYSCALL
    network          fatal: unable to access 'https://h/x/': The requested URL returned error: 502
    network          remote: Internal Server Error
                   | error: RPC failed; HTTP 500 curl 22
                   | fatal: the remote end hung up
    network          fatal: unable to access 'https://h/x/': The requested URL returned error: 429
    network          error: RPC failed; curl 92 HTTP/2 stream 5 was not closed cleanly
                   | fatal: early EOF
    network          fatal: unable to access 'https://h/x/': Operation timed out after 300 seconds
    network          send-pack: unexpected disconnect while reading sideband packet
                   | fatal: the remote end hung up
    network          [remote failure] (remote failed to report status)
    remote-missing   ERROR: Repository not found.
                   | {hung up}
    remote-missing   remote: Repository not found.
                   | fatal: repository 'https://github.com/a/b.git/' not found
    remote-missing   fatal: '/srv/x.git' does not appear to be a git repository
                   | {hung up}
    remote-missing   fatal: repository '/srv/x.git' does not exist
    remote-missing   fatal: unable to access 'https://h/x/': The requested URL returned error: 404
    remote-missing   remote: ERROR: The project you were looking for could not be found
                   | {hung up}
    remote-missing   fatal: unable to find remote helper for 'foo'
    remote-missing   fatal: remote error: access denied or repository not exported: /x.git
    remote-missing   fatal: transport 'ext' not allowed
    remote-missing   fatal: strange hostname '-oProxyCommand=touch x' blocked
    remote-missing   fatal: http://h/x.git/info/refs not valid: is this a git repository?
    git-missing      git: 'lfs' is not a git command. See 'git --help'.
    disk             error: unable to write file .git/objects/ab/cd: No space left on device
    disk             fatal: Unable to create '/s/.git/index.lock': Read-only file system
    disk             error: read error on x.md: Input/output error
    disk             error: insufficient permission for adding an object to repository database .git/objects
    disk             fatal: Unable to create '/s/.git/index.lock': Permission denied
    disk             warning: unable to access 'content/.gitattributes': Permission denied
    disk             fatal: Out of memory, malloc failed (tried to allocate 1234 bytes)
    remote-refused   remote: fatal: write error: No space left on device
                   | fatal: the remote end hung up
    remote-refused   remote: error: file write error: Disk quota exceeded
                   | fatal: write error: Broken pipe
    remote-refused   error: remote unpack failed: unable to create temporary object directory
    remote-refused   remote: error: Unable to create '/srv/x.git/packed-refs.lock': File exists.
    network          remote: down for maintenance
                   | {hung up}
    remote-refused   fatal: protocol error: bad line length character: Welc
    ownership        fatal: detected dubious ownership in repository at '/srv/site'
    not-a-repository fatal: not a git repository (or any of the parent directories): .git
    locked           fatal: Unable to create '/s/.git/index.lock': File exists.
                   | Another git process seems
    locked           fatal: cannot lock ref 'refs/heads/main': is at abcdef0123 but expected 0123abcdef
    corrupt          error: bad signature 0x00000000
                   | fatal: index file corrupt
    corrupt          fatal: loose object 1234 (stored in .git/objects/12/34) is corrupt
    corrupt          fatal: unable to read tree 4b825dc642cb6eb9a060e54bf8d69288fbee4904
    corrupt          error: refs/heads/main is not valid
                   | fatal: bad config line 3 in file .git/config
                   | fatal: bad boolean config value 'maybe' for 'core.filemode'
    internal         fatal: something that git has never said
""")


@pytest.mark.parametrize(("word", "text"), [*WORDS, (F.INTERNAL, "")])
def test_gits_words_have_a_meaning(word: FailureCode, text: str) -> None:
    failure = messages.from_git(["gc"], text)
    assert failure.code is word, failure.message
    assert bool(failure.fix) is (word is not F.INTERNAL)


@pytest.mark.parametrize(
    "name",
    [
        "no-hassle.md",
        "content/posts/ssl.md",
        "/srv/timeout/policy-site.git",
        "https://timeout.example/ssl/413/secret",
        "content/no space left on device.md",
        "'content/rate limit.md'",
        "posts/broken-certificate.md",
        "tls.example.org",
    ],
)
@pytest.mark.parametrize(
    "frame", ["fatal: {}: it is strange", "error: '{}' is strange", 'fatal: "{}" is strange']
)
def test_a_name_in_the_message_means_nothing(name: str, frame: str) -> None:
    text = frame.format(name.replace(" ", "-") if "'" not in frame + name else name)
    assert messages.from_git(["gc"], text).code is F.INTERNAL


REFUSALS = read_cases(r"""
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: no swearing
    rejected         [remote rejected] (update hook declined)
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: error: GH001: Large files detected. You may want to try Git Large File Storage
                   | remote: error: File a.bin is 120.00 MB; this exceeds GitHub's file size limit of it
    rejected         [remote rejected] (push declined due to repository rule violations)
                   | remote: error: GH013: Repository rule violations found for refs/heads/main.
                   | remote: - GITHUB PUSH PROTECTION
                   | remote: - Push cannot contain secrets
    rejected         [remote rejected] (declined)
                   | remote: error: GH009: Secrets detected! This push failed.
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: PUSH BLOCKED: Secrets detected in code
    rejected         [remote rejected] (unpacker error)
                   | remote: fatal: pack exceeds maximum allowed size (1.00 KiB)
                   | error: remote unpack failed: index-pack abnormal exit
    rejected         [remote rejected] (unpacker error)
                   | remote: fatal: fsck error in packed object
    rejected         [remote rejected] (refusing to allow an OAuth App to create or update workflow)
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: GitLab: File name x was prohibited by it
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: hooks/pre-receive: line 7: frob: command not found
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: Traceback (most recent call last):
                   | remote:   File x, line 1
    remote-refused   [remote rejected] (pre-receive hook declined)
                   | fatal: cannot run hooks/pre-receive: No such file or directory
    protected        [remote rejected] (protected branch hook declined)
                   | remote: error: GH006: Protected branch update failed for refs/heads/main.
    protected        [remote rejected] (push declined due to repository rule violations)
                   | remote: error: GH013: Repository rule violations found for refs/heads/main.
                   | remote: - Changes must be made through a pull request.
    protected        [remote rejected] (pre-receive hook declined)
                   | remote: GitLab: You are not allowed to push code to protected branches on this project.
    remote-refused   [remote rejected] (branch is currently checked out)
                   | remote: error: refusing to update checked out branch: refs/heads/main
    remote-refused   [remote rejected] (shallow update not allowed)
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: down for maintenance
    rejected         [remote rejected] (pre-receive hook declined)
                   | remote: try again: this post is archived, and not allowed to push without a pull request
    rejected         [remote rejected] (failed to update ref)
                   | remote: no space left, cannot lock ref 'main': is at 0a1b2c3d but expected 4e5f
                   | remote: error: ref updates aborted by hook
    rejected         [remote rejected] (proc-receive says: failed to update ref)
    remote-refused   [remote rejected] (unpacker error)
                   | error: remote unpack failed: eof before pack header
    remote-refused   [remote rejected] (failed to update ref)
                   | remote: error: cannot lock ref 'refs/heads/main': Unable to create 'main.lock'
    remote-refused   [remote rejected] (unpacker error)
                   | remote: error: file write error: No space left on device
                   | error: remote unpack failed: unpack abnormal exit
    remote-refused   [remote rejected] (failed to update ref)
                   | remote: error: failed at /srv/policy-site.git/secret/413
                   | To /srv/x
                   | GH001 declined by secret
    remote-refused   [remote rejected] (unpacker error)
                   | To https://h/413/secret-policy/declined.git
    rejected         [remote rejected] (hook declined)
                   | remote: 'content/maintenance/protected branch.md' is bad
""")


@pytest.mark.parametrize(("word", "said"), REFUSALS)
def test_a_refusal_says_whether_the_contents_are_at_fault(word: FailureCode, said: str) -> None:
    summary, _, text = said.partition("\n")
    failure = messages.from_rejection(summary, text)
    assert failure is not None
    assert failure.fix
    if isinstance(failure, PushRejectedError) and failure.is_known:
        assert failure.code is F.REJECTED, "a sentence of a host decides where a single job is due"
        failure = PublishError(failure.condition.code, failure.condition.message)
    assert failure.code is word, failure.message


@pytest.mark.parametrize(
    ("summary", "text", "moved"),
    [
        ("[rejected] (stale info)", "", True),
        ("[rejected] (fetch first)", "", True),
        ("[rejected] (non-fast-forward)", "", True),
        ("[remote rejected] (incorrect old value provided)", "", True),
        ("[remote rejected] (reference already exists)", "", True),
        (
            "[remote rejected] (failed to update ref)",
            "remote: error: cannot lock ref 'refs/heads/main': is at 0a1b2c3d but expected 4e5f6a7b",
            True,
        ),
        (
            "[remote rejected] (failed to update ref)",
            "remote: error: cannot lock ref 'refs/heads/main'",
            False,
        ),
        ("[remote rejected] (hook declined)", "To /srv/is at 0a1b but expected.git", False),
        ("[remote rejected] ('stale info.md' is bad)", "", False),
    ],
)
def test_a_refusal_says_whether_the_remote_has_moved(summary: str, text: str, moved: bool) -> None:  # noqa: FBT001
    assert (messages.from_rejection(summary, text) is None) is moved


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "'",
        "' ",
        "unable to create ",
        "permission to x",
        "exceeds ",
        "remote: ",
        "\n",
        "/",
        ".",
        "index uses ",
    ],
)
def test_a_megabyte_of_words_is_read_at_once(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    messages.from_git(["gc"], text)
    messages.from_rejection("y", text)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize("pad", range(15_960, 15_990, 2))
def test_no_half_of_a_secret_is_shown_where_words_are_cut(pad: int) -> None:
    secret = "https://u:s3cr3tcanary@h/x "  # noqa: S105 - it opens nothing
    for text in ("remote: " + "x " * (pad // 2) + "y" * (pad % 2) + secret * 2000, secret * 2000 + "z" * pad):
        assert "s3cr" not in messages.from_git(["gc"], text).message
        assert "s3cr" not in str(messages.from_rejection("[remote rejected] (hook declined)", text))


CODES = {
    FailureClass.REFUSED: (
        "nopaths malformed unreadable unknown-type too-large rejected conflict outdated plugin"
    ),
    FailureClass.TRANSIENT: "missing lost-race unsettled killed-worker internal",
}


@pytest.mark.parametrize("code", FailureCode)
def test_a_code_is_an_environment_failure_unless_it_is_listed_otherwise(code: FailureCode) -> None:
    named = [each for each, codes in CODES.items() if code.value in codes.split()]
    assert [code.failure_class] == (named or [FailureClass.ENVIRONMENT])
    assert is_environment(code.value) == (not named)

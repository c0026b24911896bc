"""What may be shown to a person: no secret, no control character, never too long, and at once."""

from __future__ import annotations

import errno
import time

import pytest

from briter_worker import errors
from briter_worker.errors import (
    MAX_TEXT,
    Failure,
    Kind,
    LockLostError,
    PublishError,
    RefusedError,
    SnoozedError,
    explained,
    for_people,
    paragraphs,
)

CANARY = "cAnArY0123456789abcdef"

URLS = [
    f"https://user:{CANARY}@example.org/site.git",
    f"https://{CANARY}@example.org/site.git",
    f"https://{CANARY}:x-oauth-basic@example.org/site.git",
    f"https://user:p@{CANARY}@example.org/site.git",
    f"https://user:pa/ss{CANARY}@example.org/site.git",
    f"https://user:%40{CANARY}%3A@[::1]:8443/site.git",
    f"ssh://git:{CANARY}@example.org:22/site.git",
    f"git+https://user:{CANARY}@example.org",
    f"https://example.org/site.git?private_token={CANARY}",
    f"https://example.org/site.git?a=1&X-Amz-Signature={CANARY}#x",
    f"https://example.org/site.git#access_token={CANARY}",
    f"user:{CANARY}@example.org:site.git",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "frame",
    ["{}", "fatal: unable to access '{}': 403", 'remote "{}" is gone', "To {}\n ! [rejected]", "({}), again"],
)
def test_a_url_is_shown_without_its_credentials(url: str, frame: str) -> None:
    shown = for_people(frame.format(url))
    assert CANARY not in shown
    assert "example.org" in shown or "[::1]" in shown


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {CANARY}",
        f"authorization: token {CANARY}",
        f"Proxy-Authorization: Basic {CANARY}==",
        f"{{'Authorization': 'Bearer {CANARY}'}}",
        f"PRIVATE-TOKEN: {CANARY}",
        f"X-Api-Key: {CANARY}",
        f"Set-Cookie: session={CANARY}; other={CANARY}; Path=x",
        f"AWS_SECRET_ACCESS_KEY={CANARY}",
        f'{{"password": "two words {CANARY}"}}',
        f'{{"token":"{CANARY}","a":1}}',
        f"password=a,b{CANARY}",
        f"auth : token: {CANARY}",
        f"auth: token : {CANARY}",
        f"auth=token='{CANARY}'",
        f'{{"credentials":{{"secret":"{CANARY}"}}}}',
        f"Authorization: password: {CANARY}",
        f"bearer my-secret = {CANARY}",
        f"Authorization: Bearer {CANARY}: denied",
        f"--api-key={CANARY}",
        f"ghp_{CANARY}",
        f"github_pat_{CANARY}",
        f"glpat-{CANARY}",
        f"gh\x1b[31mp_{CANARY}",
        f"eyJ{CANARY}.{CANARY}.{CANARY}",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}\n{CANARY}\n-----END OPENSSH PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n{CANARY}",
    ],
)
def test_a_secret_is_not_shown(text: str) -> None:
    assert CANARY not in for_people(f"remote: it says {text} and so on")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"at https://user:{CANARY}@example.org/x", "at https://***@example.org/x"),
        (f"at user:{CANARY}@example.org:site.git", "at ***@example.org:site.git"),
        (f"at https://example.org/x?token={CANARY} now", "at https://example.org/x?*** now"),
        ("at https://example.org/x now", "at https://example.org/x now"),
        (f"Authorization: Bearer {CANARY} now", "Authorization: Bearer *** now"),
        (f"cookie: a={CANARY}; b=2 now", "cookie: *** now"),
        (f"password={CANARY} now", "password=*** now"),
        (f"auth: token: {CANARY} now", "auth: *** now"),
        (f"-----BEGIN PRIVATE KEY----- {CANARY} -----END PRIVATE KEY----- now", "*** now"),
        (f"is ghp_{CANARY} now", "is *** now"),
    ],
)
def test_of_a_secret_nothing_but_its_place_is_shown(text: str, shown: str) -> None:
    assert for_people(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "fatal: unable to access 'https://example.org/site.git/': Could not resolve host: example.org",
        "git@example.org:site.git: Permission denied (publickey)",
        "the monkey: it is a donkey: both eat",
        "connected to https://example.org:8443/@someone/site.git",
        "ssh://git.example.org/x at 12:30",
        "author: Somebody",
    ],
)
def test_what_is_no_secret_is_shown_as_it_is(text: str) -> None:
    assert for_people(text) == text


@pytest.mark.parametrize("padding", [0, 1, 20, 40, 60])
@pytest.mark.parametrize(
    "secret", [f"https://{CANARY}:{CANARY}@example.org/", f"ghp_{CANARY}", f'token="{CANARY} {CANARY}"']
)
def test_a_secret_at_the_cut_is_not_shown_by_half(secret: str, padding: int) -> None:
    # Redaction makes the text much shorter, so that what stands at the cut would be shown.
    filler = f"https://{'x' * 900}@h/ "
    count = 4 * MAX_TEXT // len(filler)
    start = filler * count
    text = start + "y " * ((4 * MAX_TEXT - len(start) - padding) // 2) + secret + " z" * 9000
    shown = for_people(text)
    assert CANARY[:4] not in shown


def test_half_of_a_word_without_an_end_is_not_shown() -> None:
    assert for_people(f"https://{CANARY * 1000}:x@example.org") == "…"
    assert CANARY not in for_people(f"the url https://{CANARY * 1000}:x@example.org")


ADVERSARIES = [
    "a-",
    "a",
    "token",
    "a-token",
    "auth:",
    "://",
    "a://",
    "://a:b",
    "://a@",
    "://u:p/",
    "user:x",
    "a:a@",
    "eyJ-",
    "eyJaaaaaaaa.",
    "\x1b[",
    "\x1b]",
    "\x1b[0;",
    "'",
    "token='",
    "cookie: a;",
    "cookie: a; b=c; ",
    "-----BEGIN PRIVATE KEY-----",
    "-----BEGIN ",
    "basic ",
    "Bearer\t",
    "key ",
    "key= ",
    "token: ",
    "token : a",
    "bearer aaaaaa : ",
    " ",
    "\n",
    "ghp_",
    "glpat-",
    "xoxb-",
    "\u202e",
    "é",
]


@pytest.mark.parametrize("piece", ADVERSARIES)
def test_a_megabyte_of_an_adversary_is_read_at_once(piece: str) -> None:
    began = time.process_time()
    shown = for_people(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 0.2
    assert len(shown) <= MAX_TEXT


@pytest.mark.parametrize("piece", ADVERSARIES)
def test_so_is_as_much_as_is_looked_at_when_it_ends_otherwise(piece: str) -> None:
    began = time.process_time()
    for_people((piece * MAX_TEXT * 4)[: 4 * MAX_TEXT - 3] + " !")
    assert time.process_time() - began < 0.1


@pytest.mark.parametrize(
    "text", ["x" * 1_999, "x" * 2_000, "x" * 2_001, "word " * 3_000, "wörd\u200b\x00 " * 400]
)
def test_what_is_shown_is_short_and_printable(text: str) -> None:
    shown = for_people(text)
    assert 0 < len(shown) <= MAX_TEXT
    assert shown.isprintable()
    assert (shown == text) or shown.endswith("…") or "\x00" in text


def test_control_characters_and_escape_sequences_are_gone() -> None:
    assert for_people("a\x1b[2J\x1b]0;title\x07b\r\nc\u202ed\x00") == "ab c d"


def test_a_failure_is_safe_to_show_and_belongs_to_one_class() -> None:
    failure = PublishError(Failure.AUTH, f"https://u:{CANARY}@h/\x1b[2J")
    assert str(failure) == failure.text == "https://***@h/"
    assert {each.kind for each in Failure} == set(Kind)
    assert str(LockLostError()) == for_people(str(LockLostError()))


def test_an_error_of_the_system_says_where_and_what_to_do() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/storage")
    assert explained(full) == "No space left on device (/storage). Fix: free some space"
    assert explained(full, where=False) == "No space left on device. Fix: free some space"
    assert explained(OSError(errno.EROFS, "Read-only")) == "Read-only. Fix: make the file system writable"
    assert explained(OSError(errno.EEXIST, "File exists", "/f")) == "File exists (/f)"
    assert explained(OSError("of our own")) == "of our own"


def test_a_long_text_is_shown_up_to_the_limit() -> None:
    assert for_people("x" * MAX_TEXT) == "x" * MAX_TEXT
    assert for_people("x" * (MAX_TEXT + 1)) == "x" * (MAX_TEXT - 2) + " …"
    for words in ("word " * 1_600, "word " * 9_000):  # as much as is read, and more
        shown = for_people(words)
        assert shown == words[: MAX_TEXT - 2] + " …"


def test_what_is_shorter_only_for_its_redaction_is_marked_as_cut() -> None:
    url = f"https://{'x' * 900}@h/ "
    read = (url * 9)[: 4 * MAX_TEXT - 1].rpartition(" ")[0]
    assert not for_people(read.ljust(4 * MAX_TEXT)).endswith("…")
    assert for_people(read.ljust(4 * MAX_TEXT + 1)).endswith("…")
    assert for_people(f"one {'x' * 4 * MAX_TEXT}") == "one …"


def test_a_lost_lock_says_what_it_means_and_what_to_do() -> None:
    assert str(LockLostError()) == (
        "the worker's lock file was removed or replaced while it ran, so another worker may have the site "
        "now; this one ends. Fix: start it again, and leave worker.lock alone"
    )


KINDS = {
    Kind.REFUSED: "nopaths malformed unreadable unknown-type too-large rejected conflict plugin",
    Kind.TRANSIENT: "lost-race unsettled killed-worker internal",
}


@pytest.mark.parametrize("failure", Failure)
def test_only_what_no_repetition_helps_is_refused_and_the_surroundings_are_blamed_for_the_rest(
    failure: Failure,
) -> None:
    named = [kind for kind, words in KINDS.items() if failure.value in words.split()]
    assert [failure.kind] == (named or [Kind.ENVIRONMENT])


def test_what_a_plugin_says_is_safe_to_show_too() -> None:
    refused = RefusedError(f"see https://u:{CANARY}@h/")
    assert (refused.failure, refused.text, str(refused)) == (
        Failure.PLUGIN,
        "see https://***@h/",
        "see https://***@h/",
    )
    snoozed = SnoozedError(7.0, f"see https://u:{CANARY}@h/")
    assert (snoozed.until, snoozed.text, str(snoozed)) == (7.0, "see https://***@h/", "see https://***@h/")


@pytest.fixture
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_concealed", ())


@pytest.mark.usefixtures("_nothing_is_known")
def test_what_is_known_for_a_secret_is_shown_by_nobody_any_more() -> None:
    text = "the word sesame-open-9 is in sesame-open-9-and-more, and so is sesame"
    assert for_people(text) == text
    errors.conceal(["sesame", "sesame-open-9"])
    errors.conceal(["sesame-open-9-and-more"])  # the longest first, or its rest would be shown
    errors.conceal(["sesame"])
    errors.conceal(["zebra-zebra", "a-zebra-zebra-b"])
    assert for_people("a-zebra-zebra-b") == "***"
    assert for_people(text) == "the word *** is in ***, and so is ***"
    assert paragraphs(text) == for_people(text)


@pytest.mark.usefixtures("_nothing_is_known")
def test_a_short_secret_is_no_part_of_another_word() -> None:
    errors.conceal(["pass", "+x", "y+", "sesame1", "sesame12"])
    assert for_people("to pass a compass, or a+x, +x, y+, y+a") == "to *** a compass, or a***, ***, ***, ***a"
    assert for_people("the passage") == "the passage"
    assert for_people("a sesame1 xsesame1y") == "a *** xsesame1y"
    assert for_people("xsesame12y") == "x***y"


@pytest.mark.usefixtures("_nothing_is_known")
def test_no_secret_at_all_conceals_nothing() -> None:
    errors.conceal(["", "sesame-open"])
    assert for_people("the word sesame-open") == "the word ***"


def test_paragraphs_keep_their_lines_and_their_length_and_nothing_else() -> None:
    text = f"at \x1b[31mhttps://u:{CANARY}@h/\x1b[0m\n  line\t2\u202e\n" + "x" * 5 * MAX_TEXT
    assert paragraphs(text) == "at https://***@h/\n  line 2 \n" + "x" * 5 * MAX_TEXT

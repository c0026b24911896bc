"""What may be shown to a person: no secret, no control character, never too long, and at once."""

from __future__ import annotations

import json
import time
from inspect import get_annotations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from briter_worker import errors, events
from briter_worker.errors import MAX_TEXT, conceal, many_lines, one_line
from briter_worker.git.configuration import find_secrets
from briter_worker.sinks.log import PREFIX, json_line, log_entry

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
    shown = one_line(frame.format(url))
    assert CANARY not in shown
    assert "example.org" in shown or "[::1]" in shown


@given(before=st.text(), url=st.sampled_from(URLS), after=st.text())
def test_a_secret_is_not_shown_whatever_stands_around_it(before: str, url: str, after: str) -> None:
    shown = one_line(f"{before}\n{url}\n{after}")
    assert CANARY not in shown
    assert shown.isprintable()
    assert len(shown) <= MAX_TEXT


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
    assert CANARY not in one_line(f"remote: it says {text} and so on")


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
    assert one_line(text) == shown


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
    assert one_line(text) == text


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
    shown = one_line(text)
    assert CANARY[:4] not in shown


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
    shown = one_line(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 0.2
    assert len(shown) <= MAX_TEXT


def test_control_characters_and_escape_sequences_are_gone() -> None:
    assert one_line("a\x1b[2J\x1b]0;title\x07b\r\nc\u202ed\x00") == "ab c d"


@pytest.fixture
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_concealed", set())


@pytest.mark.usefixtures("_nothing_is_known")
def test_what_is_known_for_a_secret_is_shown_by_nobody_any_more() -> None:
    text = "the word sesame-open-9 is in sesame-open-9-and-more, and so is sesame"
    assert one_line(text) == text
    conceal(["sesame", "sesame-open-9"])
    conceal(["sesame-open-9-and-more"])  # the longest first, or its rest would be shown
    conceal(["sesame"])
    conceal(["zebra-zebra", "a-zebra-zebra-b"])
    assert one_line("a-zebra-zebra-b") == "***"
    assert one_line(text) == "the word *** is in ***, and so is ***"
    assert many_lines(text) == one_line(text)


@pytest.mark.usefixtures("_nothing_is_known")
def test_a_short_secret_is_no_part_of_another_word() -> None:
    conceal(["pass", "+x", "y+", "sesame1", "sesame12"])
    assert one_line("to pass a compass, or a+x, +x, y+, y+a") == "to *** a compass, or a***, ***, ***, ***a"
    assert one_line("the passage") == "the passage"
    assert one_line("a sesame1 xsesame1y") == "a *** xsesame1y"
    assert one_line("xsesame12y") == "x***y"


def test_paragraphs_keep_their_lines_and_their_length_and_nothing_else() -> None:
    text = f"at \x1b[31mhttps://u:{CANARY}@h/\x1b[0m\n  line\t2\u202e\n" + "x" * 5 * MAX_TEXT
    assert many_lines(text) == "at https://***@h/\n  line 2 \n" + "x" * 5 * MAX_TEXT


@pytest.mark.parametrize(
    "url",
    [
        "git@example.org:acme/site.git",
        "alice@example.org:acme/site.git",
        "ssh://git@example.org:22/acme/site.git",
        "https://example.org/acme/site.git",
        "https://example.org:8443/acme/website-2026.git",
        "https://example.org/@someone/site.git",
        "https://[::1]:8443/acme/site.git",
        "https://gitserver/acme/site.git",
        "https://git@example.org/acme/site.git",
        "/srv/a0123456789abcdef0123/site.git",
        "file:///srv/a0123456789abcdef0123/site.git",
        "../site.git",
        "C:/sites/site.git",
        "",
    ],
)
def test_what_opens_nothing_is_no_secret(url: str) -> None:
    assert find_secrets([("remote.origin.url", url)]) == frozenset()


# Lines of the log


NOW = 1769850000.4125
HOSTILE = "a\x1b[31mred\x1b[0m\nb\r\x9b2J\u202ec\ud800 https://me:hunter2@example.org/x"
SAMPLES: dict[str, Any] = {
    "str": "text",
    "str | None": "text",
    "bool | None": True,
    "int": 7,
    "int | None": 7,
    "float": NOW,
    "float | None": NOW,
    "bool": False,
    "JobStarted | None": None,
    "DeclaredSave | None": None,
    "tuple[str, ...]": ("one", "two"),
    "tuple[FileChange, ...]": (events.FileChange("one", 1, 0),),
}


def every_event() -> list[events.Event]:
    """One of each event that has a name."""
    kinds = [
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, events.Event) and "name" in vars(value)
    ]
    found = []
    for kind in kinds:
        types = {name: text for base in kind.__mro__ for name, text in get_annotations(base).items()}
        found.append(kind(**{name: SAMPLES[types[name]] for name in kind.fields}))
    return found


@pytest.mark.parametrize("event", every_event(), ids=lambda event: event.name)
def test_no_text_of_any_event_can_forge_a_line_or_show_a_secret(event: events.Event) -> None:
    fields = {name: getattr(event, name) for name in event.fields}
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = HOSTILE
        elif isinstance(value, tuple):
            fields[name] = (HOSTILE,)

    text = json_line(log_entry(type(event)(**fields), NOW))

    assert text.isprintable()
    assert "hunter2" not in text
    assert json.loads(text.encode().decode().removeprefix(PREFIX))["event"] == event.name

"""What of git's configuration is a secret, and what is only an address."""

from __future__ import annotations

import pytest

from briter_worker.git.environment import find_secrets


def of(url: str) -> frozenset[str]:
    return find_secrets([("remote.origin.url", url)])


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
    assert of(url) == frozenset()


def test_a_uuid_in_a_path_is_drawn_and_a_name_is_named() -> None:
    found = of(
        "https://example.org/9f3c1e8a-7b2d-4c5e-8f10-2a3b4c5d6e7f/a-long-name-of-several-words/site.git"
    )
    assert found == {"9f3c1e8a-7b2d-4c5e-8f10-2a3b4c5d6e7f"}


def test_a_password_too_short_to_be_hidden_alone_is_hidden_with_its_user() -> None:
    assert of("https://worker:abc@example.org/") >= {"worker:abc"}
    assert "abc" not in of("https://worker:abc@example.org/")


def test_every_usual_spelling_is_known() -> None:
    assert {"a&b c", "a%26b%20c", "a&amp;b c"} <= of("https://user:a%26b%20c@example.org/")
    assert "dXNlcjphJmIgYw" in of("https://user:a%26b%20c@example.org/")

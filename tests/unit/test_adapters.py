"""The folders that each kind of site publishes."""

from __future__ import annotations

import pytest

from briter_worker import adapters
from briter_worker.allowlist import Allowlist, PathRefusedError
from briter_worker.errors import UsageError

CONTRACT = "local-mdx git-target hugo jekyll astro eleventy mkdocs kirby grav statamic custom"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(adapters, "_FOLDERS", dict(adapters._FOLDERS))  # noqa: SLF001 - there is no `unregister`


def test_every_adapter_of_the_contract_is_there() -> None:
    assert adapters.names() == tuple(CONTRACT.split())


@pytest.mark.parametrize("name", CONTRACT.split())
def test_every_ready_made_folder_is_one_that_could_be_registered(name: str) -> None:
    assert Allowlist(adapters.folders_for(name)).folders == adapters.folders_for(name)


def test_the_first_two_have_the_folders_of_the_contract() -> None:
    assert adapters.folders_for("local-mdx") == ("content",)
    assert adapters.folders_for("git-target") == ("content", "public/uploads")
    assert adapters.folders_for("custom") == ()


POSTS = """
    hugo content/posts/a/index.md, hugo static/images/a.png, jekyll _posts/2026-01-31-a.md,
    jekyll _drafts/a.md, jekyll assets/img/a.png, astro src/content/blog/a.md, astro public/a.png,
    eleventy content/blog/a.md, eleventy src/posts/a.md, mkdocs docs/a.md, kirby content/1_notes/note.txt,
    grav user/pages/01.blog/a/item.md, statamic content/collections/blog/a.md, statamic public/assets/a.png
"""


@pytest.mark.parametrize(("name", "path"), [post.split() for post in POSTS.split(",")])
def test_authors_may_publish_what_they_write(name: str, path: str) -> None:
    assert Allowlist(adapters.folders_for(name)).resolve(path) == path


DEVELOPERS = """
    .github/workflows/build.yml package.json Makefile netlify.toml Gemfile hugo.toml config/_default/hugo.toml
    layouts/index.html themes/a/layouts/index.html archetypes/default.md assets/js/build.js
    _config.yml _layouts/default.html _includes/head.html _plugins/a.rb
    astro.config.mjs src/pages/index.astro src/layouts/a.astro src/components/a.tsx src/content.config.ts
    eleventy.config.js .eleventy.js _data/site.js src/_data/site.js mkdocs.yml overrides/main.html
    site/config/config.php site/plugins/a/index.php site/accounts/a/index.php
    user/config/system.yaml user/accounts/a.yaml user/plugins/a/a.php user/themes/a/a.php
    users/a.yaml resources/views/a.blade.php config/statamic/git.php public/index.php
"""
# What is code in one kind of site is content in another.
CONTENT_HERE = {
    ("jekyll", "_data/site.js"),
    ("jekyll", "assets/js/build.js"),
    ("astro", "public/index.php"),
    ("eleventy", "public/index.php"),
}


@pytest.mark.parametrize("path", DEVELOPERS.split())
@pytest.mark.parametrize("name", CONTRACT.split())
def test_configuration_templates_and_code_are_in_no_authors_folder(name: str, path: str) -> None:
    allowlist = Allowlist(adapters.folders_for(name))
    if (name, path) in CONTENT_HERE:
        assert allowlist.resolve(path)
        return
    with pytest.raises(PathRefusedError):
        allowlist.resolve(path)


@pytest.mark.parametrize("name", ["wordpress", "", "Hugo", "hugo ", "a\nb"])
def test_an_unknown_adapter_is_answered_with_the_accepted_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"local-mdx, git-target, hugo, .*, custom$") as refused:
        adapters.folders_for(name)
    assert str(refused.value).isprintable()


@pytest.mark.usefixtures("registry")
def test_a_new_adapter_can_be_registered() -> None:
    adapters.register("my-site", ["pages/", "media"])
    assert adapters.folders_for("my-site") == ("pages", "media")
    assert adapters.names()[-1] == "my-site"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "folders", "word"),
    [
        ("hugo", ["layouts"], "already"),
        ("custom", ["a"], "already"),
        ("My Site", ["a"], "cannot name an adapter"),
        ("a\x1b", ["a"], "cannot name an adapter"),
        ("mine", [], "no folders"),
        ("mine", [".git"], "cannot be an allowed folder"),
        ("mine", ["../other"], "cannot be an allowed folder"),
        ("mine", ["."], "cannot be an allowed folder"),
    ],
)
def test_an_adapter_that_would_open_too_much_is_not_registered(
    name: str, folders: list[str], word: str
) -> None:
    before = adapters.names()
    with pytest.raises(UsageError, match=word):
        adapters.register(name, folders)
    assert adapters.names() == before

"""The folders that each kind of site publishes."""

from __future__ import annotations

import pytest

from briter_worker.allowlist import (
    ADAPTER_EXCLUDED,
    EXCLUDED,
    FOLDERS,
    Allowlist,
    PathRefusedError,
    compile_patterns,
)

CONTRACT = "local-mdx git-target hugo jekyll astro eleventy mkdocs kirby grav statamic custom"


def test_every_adapter_of_the_contract_is_there() -> None:
    assert tuple(FOLDERS) == tuple(CONTRACT.split())


@pytest.mark.parametrize("name", CONTRACT.split())
def test_every_ready_made_folder_is_an_allowed_folder(name: str) -> None:
    assert Allowlist(FOLDERS[name]).folders == FOLDERS[name]


def test_the_first_two_have_the_folders_of_the_contract() -> None:
    assert FOLDERS["local-mdx"] == ("content",)
    assert FOLDERS["git-target"] == ("content", "public/uploads")
    assert FOLDERS["custom"] == ()


def test_the_patterns_of_adapters_are_patterns() -> None:
    assert ADAPTER_EXCLUDED.keys() <= FOLDERS.keys()
    every = (*EXCLUDED, *(pattern for patterns in ADAPTER_EXCLUDED.values() for pattern in patterns))
    assert len(compile_patterns(every).patterns) == len(every)


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
    allowlist = Allowlist(FOLDERS[name])
    if (name, path) in CONTENT_HERE:
        assert allowlist.resolve(path)
        return
    with pytest.raises(PathRefusedError):
        allowlist.resolve(path)

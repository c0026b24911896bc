"""The folders that each kind of site publishes: those of posts, pages, data and media.

Configuration, templates, themes, plugins, user accounts and build scripts belong to developers and are in
none. Some generators run code that lies among the posts (MDX, Eleventy's `*.11tydata.js`, Astro's older
`src/content/config.ts`): a producer of jobs can then run code in that site's build. `custom` can name
narrower folders.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist
from briter_worker.errors import UsageError
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

CUSTOM = "custom"
"""Adapter without folders: BRITER_ALLOWED_PATHS names them all."""

_FOLDERS: dict[str, tuple[str, ...]] = {
    "local-mdx": ("content",),
    "git-target": ("content", "public/uploads"),
    # Not layouts, archetypes or config; of assets, which also holds scripts for the build, the images.
    "hugo": ("content", "data", "static", "assets/images"),
    # Not _includes, _layouts, _plugins or _sass.
    "jekyll": ("_posts", "_drafts", "_pages", "_data", "assets"),
    # Not src/pages: its .astro and .ts files are code.
    "astro": ("src/content", "src/assets", "public"),
    # Not _data or _includes: their .js files run in the build.
    "eleventy": ("content", "posts", "src/content", "src/posts", "public", "img"),
    # Not overrides (the theme) or mkdocs.yml.
    "mkdocs": ("docs",),
    # Not site (blueprints, plugins, accounts); media is generated.
    "kirby": ("content",),
    # Not user/accounts, user/config, user/plugins or user/themes.
    "grav": ("user/pages", "user/images", "user/media"),
    # Not users, resources or config.
    "statamic": ("content", "public/assets"),
    CUSTOM: (),
}
_NAME = r"[a-z0-9]+(?:-[a-z0-9]+)*"


def names() -> tuple[str, ...]:
    """Return the adapters that BRITER_ADAPTER accepts."""
    return tuple(_FOLDERS)


def folders_for(name: str) -> tuple[str, ...]:
    """Return the folders of an adapter, without trailing slashes. Raises UsageError if it is unknown."""
    try:
        return _FOLDERS[name]
    except KeyError:
        raise UsageError(f"there is no adapter {one_line(name)!r}; accepted: {', '.join(names())}") from None


def register(name: str, folders: Iterable[str]) -> None:
    """Add an adapter. Raises UsageError if the name is taken or a folder can never be published from."""
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"{one_line(name)!r} cannot name an adapter", "use lower-case letters, digits and single hyphens"
        )
    if name in _FOLDERS:
        raise UsageError(f"there is an adapter {name!r} already", "use another name")
    if not (safe := Allowlist(folders).folders):
        raise UsageError(f"the adapter {name!r} has no folders", "name at least one folder")
    _FOLDERS[name] = safe

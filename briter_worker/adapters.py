"""What each kind of site lets its authors publish: folders, everything under them.

The folders are those that hold posts, pages, data and media. Configuration, templates, themes, plugins,
user accounts and build scripts are the developers' and are in none. Where a generator runs code that lies
among the posts (MDX, Eleventy's `*.11tydata.js`, Astro's older `src/content/config.ts`), who may write
jobs may run code in that site's build: `custom` can name narrower folders.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Iterable

CUSTOM = "custom"
"""No folders of its own: only those that BRITER_ALLOWED_PATHS adds."""

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
    """The adapters that BRITER_ADAPTER accepts."""
    return tuple(_FOLDERS)


def folders_for(name: str) -> tuple[str, ...]:
    """The folders of an adapter, without trailing slashes. Raises UsageError when there is no such one."""
    try:
        return _FOLDERS[name]
    except KeyError:
        raise UsageError(f"no adapter {for_people(name)!r}: accepted are {', '.join(names())}") from None


def register(name: str, folders: Iterable[str]) -> None:
    """Add an adapter. Raises UsageError when the name is taken or a folder could never be published from."""
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"{for_people(name)!r} cannot name an adapter: use lower-case letters, digits and single hyphens"
        )
    if name in _FOLDERS:
        raise UsageError(f"there is an adapter {name!r} already: use another name")
    if not (safe := Allowlist(folders).folders):
        raise UsageError(f"the adapter {name!r} has no folders: name one at least")
    _FOLDERS[name] = safe

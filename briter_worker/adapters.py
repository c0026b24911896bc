"""The folders that each kind of site publishes: those of posts, pages, data and media.

Configuration, templates, themes, plugins, user accounts and build scripts belong to developers and are in
none. Some generators run code that lies among the posts (MDX, Eleventy's `*.11tydata.js`, Astro's older
`src/content/config.ts`): a producer of jobs can then run code in that site's build. `custom` can name
narrower folders.
"""

from __future__ import annotations

CUSTOM = "custom"
"""Adapter without folders: BRITER_ALLOWED_PATHS names them all."""

FOLDERS: dict[str, tuple[str, ...]] = {
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

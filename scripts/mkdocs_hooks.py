"""Hooks of the documentation site: pages from outside docs/, and nothing loaded from other hosts."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TOP_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'self\'; '
    "script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "worker-src 'self' blob:\">"
)


def on_config(config: MkDocsConfig) -> None:
    """Draw the diagrams with the local copy of mermaid; without one, show them as text."""
    mermaid = os.environ.get("BRITER_DOCS_MERMAID")
    if not mermaid:
        config.mdx_configs["pymdownx.superfences"] = {}


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that lie at the top of the project, and mermaid."""
    for name in TOP_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    if mermaid := os.environ.get("BRITER_DOCS_MERMAID"):
        files.append(File.generated(config, "assets/mermaid.js", abs_src_path=mermaid))
        config.extra_javascript.append("assets/mermaid.js")


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links to the pages at the top to their place on the site; unlink other files of the project.

    Guides come first in a search: who searches has something to do.
    """
    folder = page.file.src_uri.partition("/")[0]
    page.meta["search"] = {"boost": {"how-to": 4, "tutorial": 2, "reference": 2}.get(folder, 1)}
    is_top = page.file.src_uri in TOP_PAGES
    folder = "" if is_top else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def placed(link: re.Match[str]) -> str:
        target, hash_, anchor = link[2].partition("#")
        if "://" in target or not target:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/") and not is_top:
            return link[0]
        if path.startswith("docs/") or path in TOP_PAGES:
            there = path.removeprefix("docs/")
            here = posixpath.dirname(page.file.src_uri) or "."
            return f"[{link[1]}]({posixpath.relpath(there, here)}{hash_}{anchor})"
        return link[1]

    return re.sub(r"\[([^]]*)\]\(([^)\s]+)\)", placed, markdown)


def on_post_page(output: str, **_: object) -> str:
    """Forbid the browser to load anything from another host."""
    return output.replace("<head>", f"<head>{POLICY}", 1)

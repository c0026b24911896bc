"""The folders that may be published, and which declared paths are in them: decided from their text alone.

A path that passes is relative, stays below an allowed folder and names nothing that git treats specially, on
whichever system the site is checked out. Staging checks what the text cannot tell: symlinks, special files,
nested repositories, ignored files.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from functools import cached_property, lru_cache
from posixpath import normpath
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator

    from pathspec import GitIgnoreSpec

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
    # BRITER_ALLOWED_PATHS names them all.
    "custom": (),
}
"""The folders that each kind of site publishes: those of posts, pages, data and media.

Configuration, templates, themes, plugins, user accounts and build scripts belong to developers and are in
none. Some generators run code that lies among the posts (MDX, Eleventy's `*.11tydata.js`, Astro's older
`src/content/config.ts`): a producer of jobs can then run code in that site's build. `custom` can name
narrower folders.
"""

EXCLUDED = (
    ".DS_Store", "._*", "Thumbs.db", "desktop.ini", ".nfs*", ".fuse_hidden*",  # systems
    "*~", ".*.sw?", ".#*", r"\#*#", "~$*", ".~lock.*#", ".goutputstream-*",  # editors
)  # fmt: skip
"""Patterns of files that no kind of site publishes: they are backups, locks and notes of programs."""
ADAPTER_EXCLUDED = {"kirby": ("_changes/", ".lock")}
"""Patterns for one kind of site: Kirby keeps unpublished edits and its locks inside a page's folder."""

MAX_PATH_BYTES = 4096
MAX_PARTS = 64
MAX_PART_BYTES = 255
"""The limit of Linux: a longer name could not have been saved."""


class Refusal(NamedTuple):
    """Why a path may not be published, and what to do about this one. The fix has no text of the job's."""

    text: str
    fix: str

    def __str__(self) -> str:
        return f"{self.text}: {self.fix}"


class PathRefusedError(Exception):
    """Refuse to publish a path. `reason` is one line that says why, and what to do."""

    def __init__(self, path: str, text: str, fix: str) -> None:
        self.path = path
        self.refusal = Refusal(one_line(text), fix)
        self.reason = str(self.refusal)
        super().__init__(self.reason)


class Allowlist:
    """The folders of a site from which jobs may publish."""

    def __init__(
        self,
        folders: Iterable[str],
        *,
        excluded: Iterable[str] = (),
        private: Iterable[str] = (),
        more: Callable[[], Iterable[str]] = tuple,
        adapter: str = "",
        root: str = "",
    ) -> None:
        """`excluded` has patterns as in `.gitignore`, of which the last that matches decides.

        `private` has folders inside the repository that are never published: the worker's storage.
        `more` is called for the folders of plugins when they are first needed. `root` is the site's folder,
        if the site has one: an absolute path inside it is told from one outside.
        """
        self._root = root
        self.adapter = adapter
        """The setting that the folders come from, for messages."""
        self._private = tuple(private)
        self._excluded = tuple(excluded)
        self._matching = lru_cache(maxsize=1_000)(self._match)
        self._more = more
        try:
            self._own = tuple(_check(folder) for folder in folders)
        except PathRefusedError as refused:
            text, fix = refused.refusal
            raise UsageError(f"{refused.path!r} cannot be an allowed folder: {text}", fix) from None

    @cached_property
    def folders(self) -> tuple[str, ...]:
        """The allowed folders, each once."""
        return tuple(dict.fromkeys((*self._own, *self._more())))

    def resolve(self, declared: str) -> str:
        """Return the path to stage: as declared, without a trailing slash.

        Raises PathRefusedError when it is not safe, or outside every allowed folder.
        """
        path = _check(declared, self._root)
        if not any(is_inside(folder, path) for folder in self.folders):
            allowed = ", ".join(f"{folder}/" for folder in self.folders) or "none"
            text = f"it is under none of the allowed folders ({allowed})"
            raise PathRefusedError(declared, text, self._folders_fix(allowed))
        if any(is_inside(folder, path) for folder in self._private):
            text = "it is in the worker's storage, which holds queue and settings"
            raise PathRefusedError(declared, text, "keep BRITER_STORAGE_ROOT out of the allowed folders")
        if excluded := self.exclusion(declared):
            raise PathRefusedError(declared, *excluded)
        return path

    def _folders_fix(self, allowed: str) -> str:
        fix = "allow its folder with BRITER_ALLOWED_PATHS"
        if self.folders:
            fix = f"declare a file under {allowed}, or {fix}"
        if self.adapter:
            fix += f", or set BRITER_ADAPTER, which is {self.adapter}, to the site's kind"
        return fix

    def exclusion(self, path: str) -> Refusal | None:
        """Return the refusal if a pattern excludes the path (a folder ends with a slash) or one above it."""
        above = (self._matching(f"{folder}/") for folder in parents(path))
        pattern = next(filter(None, above), None) or self._matching(path)
        if pattern is None:
            return None
        fix = f"rename the file, or lift the pattern: BRITER_EXCLUDED_PATHS=!{pattern}"
        return Refusal(f"the pattern {pattern} excludes it", fix)

    def _match(self, path: str) -> str | None:
        if not self._excluded:
            return None
        found = self._spec.check_file(path)
        return self._excluded[found.index] if found.include and found.index is not None else None

    @cached_property
    def _spec(self) -> GitIgnoreSpec:
        return compile_patterns(self._excluded)


@lru_cache(maxsize=16)
def compile_patterns(patterns: tuple[str, ...]) -> GitIgnoreSpec:
    """Return the matcher of patterns as in `.gitignore`. Raises ValueError for what is none."""
    from pathspec import GitIgnoreSpec  # noqa: PLC0415 - an idle worker matches nothing

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python would read `[[:alpha:]]` as another set
        try:
            spec = GitIgnoreSpec.from_lines(map(_with_two_stars, patterns), backend="simple")
        except (ValueError, re.error, FutureWarning) as error:
            raise ValueError(str(error)) from None
    if len(spec.patterns) != len(patterns) or any(each.include is None for each in spec.patterns):
        raise ValueError("an empty pattern, or a comment")
    return spec


def _with_two_stars(pattern: str) -> str:
    """Return the pattern with more than two stars in a row as two, which is how git reads them."""
    return re.sub(r"(\\.)|\*{3,}", lambda found: found[1] or "**", pattern)


def normalized(path: str) -> str:
    """Return the plain spelling of a declared path, to be compared."""
    return normpath(f"/{path}").strip("/")


def is_inside(folder: str, path: str) -> bool:
    """Return True if `path` is `folder` or below it: `content2/a` is not inside `content`."""
    return path == folder or path.startswith(f"{folder}/")


def parents(path: str) -> Iterator[str]:
    """Yield the folders above a path, topmost first."""
    return (path[:i] for i, c in enumerate(path) if c == "/")


def nearest(path: str, places: Container[str]) -> str | None:
    """Return the path, or the nearest folder above it, that is one of the places; None if none of them is."""
    for each in (path, *reversed([*parents(path)])):
        if each in places:
            return each
    return None


def is_safe_to_check_out(path: str) -> bool:
    """Return True if git itself would write this path of a remote into a work tree, on any system."""
    parts = path.split("/")
    return all(part not in {"", ".", ".."} and not _DOT_GIT.fullmatch(_folded(part)) for part in parts)


_CONTROL = r"[\x00-\x1f\x7f-\x9f]"


def _check(declared: str, root: str = "") -> str:
    """Return the path without a trailing slash. Raises PathRefusedError when it is not safe."""
    objection = objection_to(declared, root)
    if objection is not None:
        raise PathRefusedError(declared, *objection)
    return declared.removesuffix("/")


def objection_to(declared: str, root: str = "") -> Refusal | None:
    """Return why no path may have this name, whatever is allowed and excluded; None if it may."""
    return (
        _objection_to_text(declared)
        or _objection_to_place(declared, root)
        or next(filter(None, map(_objection, declared.removesuffix("/").split("/"))), None)
    )


def _objection_to_text(declared: str) -> Refusal | None:
    """Return why no path may be this text, if so."""
    try:
        size = len(declared.encode())
    except UnicodeEncodeError:
        return Refusal("it is not valid Unicode", "rename the file")
    if size > MAX_PATH_BYTES:
        return Refusal(f"it has {size} bytes, and a path has at most {MAX_PATH_BYTES}", "shorten it")
    if control := re.search(_CONTROL, declared):
        return Refusal(f"it has a control character in it (U+{ord(control[0]):04X})", "rename the file")
    if "\\" in declared:
        return Refusal("it has a backslash in it", "write / in its place, between the parts of a path")
    if not declared:
        return Refusal("it is empty", "name a file or a folder, relative to the site's repository")
    return None


def _objection_to_place(declared: str, root: str) -> Refusal | None:
    """Return why the path is not one below the site's folder, if so."""
    number = declared.removesuffix("/").count("/") + 1
    outside = "move the file into the site, and declare it from there"
    if declared.startswith("/"):
        if not root:
            return Refusal("it is absolute", "write it relative to the site's repository")
        if is_inside(root, declared):
            return Refusal("it is absolute", f"leave {root}/ out")
        return Refusal(f"it is outside the site, which is {root}", outside)
    if is_inside("..", normpath(declared)):
        return Refusal("it leads out of the site", outside)
    if number > MAX_PARTS:
        return Refusal(f"it has {number} parts, and a path has at most {MAX_PARTS}", "move it up")
    return None


def _objection(part: str) -> Refusal | None:
    """Return why no path may have this part, if so."""
    if not part:
        return Refusal("it has an empty part (//)", "write one / between parts")
    if part in {".", ".."}:
        return Refusal(f"it has a part {part!r}", "write it in full, relative to the site's repository")
    if len(part.encode()) > MAX_PART_BYTES:
        return Refusal(f"it has a part of more than {MAX_PART_BYTES} bytes", "shorten it")
    name = _folded(part)
    if not name and not part.startswith(":"):  # no file system reads that as a folder; some only lack it
        text = f"some systems drop the part {part!r} or read it as another folder"
        return Refusal(text, "use another name")
    if _OWN_FILES.fullmatch(name):
        return Refusal(f"{part!r} can name a file of git's own", "use another name")
    return None


# Three file systems open git's own files under other names, so a checkout there would let a post configure
# git or run code. Git has the same three tests (`is_ntfs_dotgit`, `is_ntfs_dot_generic`, `is_hfs_dotgit`);
# these refuse at least what those refuse.
#  - NTFS drops trailing dots and spaces, and what follows a colon names a stream of the same file.
#  - NTFS and FAT give each file a short name: GIT~1, GITMOD~1, or from the fifth on, a hash: GI7EBA~1.
#  - HFS+ and APFS ignore case, and characters that have no shape, such as a zero-width joiner.
_DOT_GIT = re.compile(r"\.git|git~\d+")
_OWN_FILES = re.compile(
    r"\.git(?:modules|attributes)?|git(?:mod|att)?~\d+"
    r"|(?=.{8}$)(?:g|gi|gi7|gi7e|gi7eb|gi7eba|gi7d|gi7d2|gi7d29)?~[1-9]\d*"
)
# Characters without a shape of their own: formats, marks that go onto another one, fillers, tags.
_SHAPELESS = {"Cf", "Mn"}
_FILLERS = "[\u115f\u1160\u3164\uffa0\U000e0000-\U000e0fff]"


def _folded(part: str) -> str:
    """Return the name as the most tolerant file system reads it; empty when nothing is left."""
    if not part.isascii():
        kept = re.sub(_FILLERS, "", part)
        part = "".join(c for c in kept if unicodedata.category(c) not in _SHAPELESS)
    return part.partition(":")[0].rstrip(" .").casefold()

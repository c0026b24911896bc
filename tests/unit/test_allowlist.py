"""Which declared paths may be published."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from briter_worker.allowlist import FOLDERS, Allowlist, PathRefusedError

if TYPE_CHECKING:
    from pathlib import Path


SITE = Allowlist(["content/", "public/uploads"])


def refusal(path: str) -> str:
    with pytest.raises(PathRefusedError) as refused:
        SITE.resolve(path)
    assert refused.value.path == path
    reason = refused.value.reason
    assert reason == str(refused.value)
    assert reason
    assert reason.isprintable()
    return reason


KEPT = [
    *("content/a.md", "content/notes/2026/été.md", "content/notes/e\u0301te\u0301.md", "content/a b.md"),
    *("content/-rf", "content/*.md", "content/:(glob)a", "content/10:30.md", "content/日本語/👩‍👩‍👧.md"),
    *("content/.hidden", "content/.gitignore", "content/.gitkeep", "content/.github/x", "content/git"),
    *("content/.gitx", "content/x.git", "content/git~/a", "content/git~x", "content/gitmod~x"),
    *("content/gi7eba~0", "content/gi7eba~12", "content/backup~1", "content/post.md~", "content/..a"),
    *("content/a..", "public/uploads/a.png", "content/.gitX", "content/gitmodu~1", "content/" + "a" * 255),
    "content/" + "/".join(["a" * 255] * 15) + "/" + "a" * 248,  # 4096 bytes
    "content/" + "/".join("a" * 63),  # 64 parts
]


@pytest.mark.parametrize("path", KEPT)
def test_a_path_in_an_allowed_folder_is_kept_to_the_letter(path: str) -> None:
    assert SITE.resolve(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "content2/a",
        "contents",
        "conten",
        "public/a",
        "public",
        "public/uploads2/a",
        "Content/a",
        "a",
        "a/content/b",
    ],
)
def test_a_path_outside_every_allowed_folder_is_refused(path: str) -> None:
    reason = refusal(path)
    assert "content/, public/uploads/" in reason
    assert "BRITER_ALLOWED_PATHS" in reason


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("", "it is empty: name a file or a folder, relative to the site's repository"),
        ("/etc/passwd", "it is absolute: write it relative to the site's repository"),
        ("//content/a", "absolute"),
        ("content//a", "it has an empty part (//): write one / between parts"),
        ("content//", "empty part"),
        (".", "'.': write it in full"),
        ("./content/a", "'.': write it in full"),
        ("content/./a", "'.': write it in full"),
        ("content/.", "'.': write it in full"),
        ("..", "it leads out of the site: move the file into the site"),
        ("../content/a", "it leads out of the site"),
        ("..a/../../b", "it leads out of the site"),
        ("content/..", "'..': write it in full"),
        ("content/../secret", "'..': write it in full"),
        ("content/a/../../secret", "'..': write it in full"),
        ("content/../content/a", "'..': write it in full"),
        ("content/...", "some systems"),
        ("content/.. /a", "some systems"),
        ("content/. ./a", "some systems"),
        ("content/.\u200d./a", "some systems"),
        ("content/\u200b/a", "some systems"),
        ("content/ /a", "some systems"),
        ("content/..::$INDEX_ALLOCATION/a", "some systems"),
        ("content\\a", "it has a backslash in it: write / in its place"),
        ("content/..\\..\\secret", "backslash"),
        ("content/a\x00b", "U+0000"),
        ("content/a\nb", "U+000A"),
        ("content/a\x1b[2Jb", "U+001B"),
        ("content/a\x7fb", "U+007F"),
        ("content/a\x9bb", "U+009B"),
        ("content/\ud800", "it is not valid Unicode: rename the file"),
        ("content/" + "a" * 256, "it has a part of more than 255 bytes: shorten it"),
        ("content/" + "é" * 128, "255 bytes"),
        ("content/" + "a" * 4089, "it has 4097 bytes, and a path has at most 4096: shorten it"),
        ("content/" + "/".join("a" * 64), "it has 65 parts, and a path has at most 64: move it up"),
    ],
)
def test_an_unsafe_path_is_refused_with_its_reason(path: str, word: str) -> None:
    assert word in refusal(path)


SPELLINGS = [
    *(".git", ".GIT", ".gIt", ".git.", ".git ", ".git . .", ".git::$INDEX_ALLOCATION", ".git:stream"),
    *(".git ::$INDEX_ALLOCATION", "git~1", "GIT~2", "git~10", "git~1.", ".g\u200cit", ".gi\u200dt"),
    *(".git\u200e", "\u202e.git", "\ufeff.git", ".g\u206ait", ".gi\ufe0ft", ".g\u00adit", "\u0356.git"),
    *(".g\u0301it", "\u3164.git", ".git\u200c."),
    *(".gitmodules", ".GitModules ", ".gitmodules::$DATA", ".gitmodule\u017f", "gitmod~1", "GITMOD~4"),
    *("gi7eba~1", "GI7EBA~9", "gi7eb~10", "g~100000", "~1000000", ".git\u200cmodules"),
    *(".gitattributes", ".GITATTRIBUTES", "gitatt~1", "gi7d29~1", "gi7d2~99 ."),
]


@pytest.mark.parametrize("part", SPELLINGS)
@pytest.mark.parametrize(
    "shape", ["content/{}", "content/{}/", "content/{}/hooks/post-commit", "{}", "{}/config"]
)
def test_gits_own_files_are_refused_in_every_spelling(part: str, shape: str) -> None:
    assert "a file of git's own" in refusal(shape.format(part))


def _accepts(path: str) -> bool:
    try:
        SITE.resolve(path)
    except PathRefusedError:
        return False
    return True


TRICKY = st.text(st.sampled_from("./\\ ac~:\u200d\x00\n-"), max_size=12)
PATHS = st.one_of(
    st.text(max_size=40),
    st.tuples(st.sampled_from(["content", "content/", "public/uploads/", "public/", ""]), TRICKY).map(
        "".join
    ),
    st.lists(st.sampled_from(["content", "public", "uploads", "..", ".", "", "a", ".git"]), max_size=6).map(
        "/".join
    ),
)


@settings(max_examples=500)
@given(path=PATHS)
@example(path="content/../../etc")
def test_no_accepted_path_escapes_the_allowed_folders(path: str) -> None:
    if not _accepts(path):
        return
    safe = SITE.resolve(path)
    assert safe in {path, path[:-1]}
    assert SITE.resolve(safe) == safe
    where = os.path.normpath(f"/site/{safe}")
    assert where == f"/site/{safe}"
    assert any(
        where == f"/site/{f}" or where.startswith(f"/site/{f}/") for f in ("content", "public/uploads")
    )


_SEEDS = [".git", ".gitmodules", ".gitattributes", "git~1", "gitmod~1", "gitmod~4", "gitatt~2"]
_SEEDS += ["gi7eba~1", "gi7d29~1", "gi7eb~12", "gi7d2~12", "gi~12345", "~1234567", ".", ".."]
_IGNORED_BY_HFS = (
    "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"
)


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """Names as somebody would write them who wants git's own files under another name."""
    letters = []
    for letter in draw(st.sampled_from(_SEEDS)):
        letters.append(letter.upper() if draw(st.booleans()) else letter)
        if draw(st.integers(0, 9)) == 0:
            letters.append(draw(st.sampled_from(_IGNORED_BY_HFS)))
    return "".join(letters) + draw(
        st.sampled_from(["", "", "", ".", " ", " . ", ":", "::$INDEX_ALLOCATION", "x"])
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "-q", "--bare", tmp_path], check=True)
    return tmp_path


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(spellings(), min_size=50, max_size=200))
@example(names=set(_SEEDS))
def test_what_git_itself_calls_dangerous_is_never_accepted(names: set[str], repository: Path) -> None:
    def git(*args: str, stdin: bytes = b"") -> str:
        command = ["git", "-C", str(repository), *args]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
        return (done.stdout + done.stderr).decode(errors="replace")

    # `fsck` knows all three file systems, wherever it runs: one tree per name, each with a symlink in it
    # (as only that is worth a complaint for a .gitmodules), and the complaints name the trees.
    blob = git("hash-object", "-w", "--stdin", stdin=b"target").strip()
    asked = sorted(names)
    entries = b"\0\0".join(f"120000 blob {blob}\t{name}".encode() for name in asked)
    trees = git("mktree", "-z", "--batch", stdin=entries + b"\0\0").split()
    assert len(trees) == len(asked)
    complaints = git("fsck", "--strict", "--no-dangling")
    for name, tree in zip(asked, trees, strict=True):
        if tree in complaints:
            assert not _accepts(f"content/{name}"), (name, complaints)
    if names == set(_SEEDS):
        assert complaints.count(" in tree ") >= len(_SEEDS)


# The folders that each kind of site publishes


CONTRACT = "local-mdx git-target hugo jekyll astro eleventy mkdocs kirby grav statamic custom"


def test_every_adapter_of_the_contract_is_there() -> None:
    assert tuple(FOLDERS) == tuple(CONTRACT.split())


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


@pytest.mark.parametrize(
    ("path", "text", "fix"),
    [
        ("/srv/site/content/a.md", "it is absolute", "leave /srv/site/ out"),
        (
            "/srv/site2/content/a.md",
            "it is outside the site, which is /srv/site",
            "move the file into the site",
        ),
        ("content\\a.md", "it has a backslash in it", "write / in its place"),
        ("../content/a.md", "it leads out of the site", "move the file into the site"),
        (
            "drafts/a.md",
            "it is under none of the allowed folders (content/)",
            "BRITER_ADAPTER, which is hugo",
        ),
        ("content/a.bak", "the pattern *.bak excludes it", "BRITER_EXCLUDED_PATHS=!*.bak"),
    ],
)
def test_each_mistake_in_a_path_has_the_fix_for_this_one(path: str, text: str, fix: str) -> None:
    site = Allowlist(["content"], excluded=["*.bak"], adapter="hugo", root="/srv/site")
    with pytest.raises(PathRefusedError) as refused:
        site.resolve(path)
    assert refused.value.refusal.text == text
    assert fix in refused.value.refusal.fix
    assert path not in refused.value.refusal.fix, "a fix has no text of the job's"


@pytest.mark.parametrize(
    "pattern",
    ["***/a", "****/x.md", "***", "a***", "a***b", "content/***/b", "***/***", r"\***", r"\\***/a"],
)
def test_more_than_two_stars_exclude_what_git_excludes(tmp_path: Path, pattern: str) -> None:
    paths = [
        "a",
        "a/b",
        "a/x/b",
        "x/a",
        "x/y/a",
        "x.md",
        "x/x.md",
        "axb",
        "content/b",
        "content/x/y/b",
        "*",
        "***",
    ]
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".git/info/exclude").write_text(f"{pattern}\n")
    command = ["git", "-C", str(tmp_path), "check-ignore", "--no-index", "-z", "--stdin"]
    done = subprocess.run(command, input="\0".join(paths).encode(), capture_output=True, check=False)
    site = Allowlist(["content"], excluded=[pattern])
    assert {path for path in paths if site.exclusion(path)} == set(done.stdout.decode().split("\0")) - {""}

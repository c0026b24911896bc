"""The documentation says what the program does."""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
import tomllib
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from briter_worker.allowlist import FOLDERS, Allowlist
from briter_worker.errors import FailureCode

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "storage" / "README.md"])
HOW_TO = ROOT / "docs" / "how-to"
PACKAGE = ROOT / "briter_worker"


def _dotted(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_reference_is_what_the_models_say_and_the_site_has_no_broken_link_or_foreign_script() -> None:
    made = subprocess.run(
        [str(ROOT / "scripts" / "docs"), "--check"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.parametrize("page", PAGES, ids=_dotted)
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{_dotted(page)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
            slugs = {
                re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            }
            assert anchor in slugs, f"{_dotted(page)} links to {target}"


def test_every_block_of_shell_and_python_parses() -> None:
    for page in PAGES:
        for language, block in re.findall(
            r"```(sh|shell|python)\n(.*?)```", page.read_text(), flags=re.DOTALL
        ):
            if language == "python":
                compile(textwrap.dedent(block), page.name, "exec")
            else:
                parsed = subprocess.run(
                    ["bash", "-n"], input=block, capture_output=True, text=True, check=False
                )
                assert parsed.returncode == 0, f"{_dotted(page)}: {parsed.stderr}"


def test_every_picture_is_shown_and_is_there() -> None:
    pictures = ROOT / "docs" / "images"
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"""(?:!\[[^]]*\]\(|src="|srcset=")([^)"]+)""", page.read_text())
    }
    assert shown == set(pictures.iterdir())


def test_only_settings_that_exist_are_named() -> None:
    listed = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    known = set(re.findall(r"^\| `(BRITER_\w+)`", listed, flags=re.MULTILINE))
    assert known
    containers = [ROOT / "Dockerfile", *ROOT.glob("docker-compose*.yml")]
    for page in [*PAGES, *containers, *HOW_TO.glob("crontab"), *HOW_TO.glob("*.service")]:
        named = set(re.findall(r"\bBRITER_[A-Z_]*[A-Z]\b", page.read_text()))
        assert named <= known, _dotted(page)


def test_only_commands_that_exist_are_named() -> None:
    listed = (ROOT / "docs" / "reference" / "commands.md").read_text()
    known = set(re.findall(r"^## `briter-worker ([a-z]+)", listed, flags=re.MULTILINE))
    assert known
    for page in [*PAGES, *HOW_TO.glob("crontab"), *HOW_TO.glob("*.service")]:
        named = set(
            re.findall(r"(?:^|[`$/] ?|worker=)briter-worker ([a-z]+)\b", page.read_text(), re.MULTILINE)
        )
        assert named <= known, _dotted(page)


def test_every_word_of_a_failure_that_is_named_exists() -> None:
    text = (HOW_TO / "failed-posts.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `failed`: ")]
    words = {word for row in rows for word in re.findall(r"`([a-z-]+)`", row.split("|")[1])} - {"failed"}
    assert rows
    assert words <= {code.value for code in FailureCode}


def test_the_example_of_each_kind_of_site_may_be_published() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (HOW_TO / "sites.md").read_text().splitlines()
        if line.startswith("|") and "`" in line.split("|")[2]
    ]
    shown: dict[str, list[str]] = {}
    for _, adapter, _, declared in rows:
        name = re.findall(r"`([\w-]+)`", adapter)[0]
        shown[name] = re.findall(r"`([^`]+/[^`]+)`", declared)
    del shown["BRITER_ADAPTER"]
    assert set(shown) == set(FOLDERS)
    for name, paths in shown.items():
        for path in paths:
            assert Allowlist(FOLDERS[name]).resolve(path)


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    wanted += [line for extra in project["optional-dependencies"].values() for line in extra]
    # As a word: `psycopg` has no reason because `psycopg-binary` has one.
    text = (ROOT / "docs" / "dependencies.md").read_text()
    said = {word.strip(",") for word in text.split()}
    missing = [name for name in (re.split(r"[><=\[; ]", line)[0] for line in wanted) if name not in said]
    assert not missing


def test_every_dependency_is_pinned_by_name_and_version_only() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in pins)
    pinned = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    wanted += [line for extra in pyproject["project"]["optional-dependencies"].values() for line in extra]
    assert {re.split(r"[><=\[ ]", line)[0].replace("_", "-").lower() for line in wanted} <= pinned


def test_what_is_pinned_runs_with_the_first_python_3_11() -> None:
    """Debian 12 has 3.11.2, where the newest version of a package may not be had any more."""
    needs = {each.name: each.metadata["Requires-Python"] or "" for each in distributions()}
    assert [name for name, python in needs.items() if "3.11.0" not in SpecifierSet(python)] == []


def test_the_crontab_in_the_text_is_the_one_in_the_file() -> None:
    lines = [line for line in (HOW_TO / "crontab").read_text().splitlines() if not line.startswith("#")]
    assert "\n".join(lines) in (HOW_TO / "cron.md").read_text()


def test_the_log_of_cron_is_rotated_where_the_crontab_writes_it() -> None:
    rules = (HOW_TO / "logrotate").read_text()
    written = re.findall(r">>(\S+)", (HOW_TO / "crontab").read_text())
    assert written
    assert all(f"\n{log} {{" in rules for log in written)


def test_the_unit_lets_a_running_push_end_and_does_not_repeat_a_wrong_setting() -> None:
    unit = (HOW_TO / "briter-worker.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line and line[0] != "#")
    assert settings["KillMode"] == "mixed"
    assert int(settings["TimeoutStopSec"]) > 300
    assert (settings["Restart"], settings["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert settings["ExecStart"].endswith("/briter-worker run")


def test_the_figures_in_readme_and_docs_are_those_of_the_last_run_of_the_benchmarks() -> None:
    checked = subprocess.run(
        [str(ROOT / "scripts" / "bench"), "show", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_design_names_files_and_functions_that_exist() -> None:
    text = (ROOT / "docs/explanation/design.md").read_text()
    for names, file in re.findall(r"((?:`[\w.]+`(?:, | and )?)+) (?:in|of) `([\w./]+\.py)`", text):
        module = next(folder / file for folder in (PACKAGE, ROOT) if (folder / file).exists())
        assert set(re.findall(r"`([\w.]+)`", names)) <= names_in(module), file
    modules = [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    known = frozenset().union(*map(names_in, modules))
    words = {word for file in modules for word in re.findall(r"\w+", f"{file.name} {file.read_text()}")}
    for name in re.findall(r"`([\w./]+)`", text):
        if name.endswith((".py", ".toml")):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
        elif "/" not in name:
            assert name in (known if "." in name else words), name


def test_the_readme_begins_with_the_two_commands() -> None:
    first = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[0]
    commands = [line.split()[0] for line in first.splitlines()]
    assert commands == ["scripts/demo", "scripts/test"]
    for command in [*commands, "scripts/lint", "scripts/setup", "scripts/pin", "scripts/docs", ".ci/run"]:
        assert (ROOT / command).stat().st_mode & 0o111, f"{command} has no run bit"


def test_neither_a_folder_of_a_machine_nor_a_registry_is_named() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "-c", "safe.directory=*", "ls-files", "-z"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    hosts = [
        ".".join(parts) for parts in (("files", "pythonhosted"), ("registry", "npmjs"), ("deb", "debian"))
    ]
    places = [f"/{'work'}/main", f"/{'root'}/", "pypi.org" + "/simple", *hosts]
    for name in filter(None, listed.split("\0")):
        text = (ROOT / name).read_bytes().decode(errors="replace")
        assert not [place for place in places if place in text], name


# The page on faults names tests: each of them exists, and no line is without one


PAGE = ROOT / "docs" / "explanation" / "faults.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[tuple[str, str]]:
    """What happens, and the cell of tests that show what comes of it."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in {"what happens", "by"}:
            assert len(cells) == 3, line
            found.append((cells[0].lstrip("| "), cells[2]))
    return found


@cache
def names_in(file: Path) -> frozenset[str]:
    """What a file defines, the members of its classes as `Class.member`."""
    body = ast.parse(file.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    for prefix, nodes in [("", body), *((f"{each.name}.", each.body) for each in classes)]:
        for node in nodes:
            for each in getattr(node, "targets", [getattr(node, "target", node)]):
                found.add(f"{prefix}{getattr(each, 'name', getattr(each, 'id', ''))}")
    return frozenset(found)


def test_the_page_has_every_row_of_the_table() -> None:
    assert len(rows()) >= 45


@pytest.mark.parametrize(("what", "shown"), rows(), ids=[what for what, _ in rows()])
def test_every_fault_is_shown_by_tests_that_exist(what: str, shown: str) -> None:
    named = _NAMED.findall(shown)
    assert named, f"nothing shows what comes of: {what}"
    assert not _NAMED.sub("", shown).strip(), "only tests are named here"
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert test, f"{file}: name the test"
        assert test in names_in(ROOT / file), f"{file} has no {test}"

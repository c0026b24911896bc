"""Run mutmut in a copy of the project, and look again at what survived: mutate.py [MODULE...].

mutmut runs, for each mutant, the tests in which it saw the function called. It cannot see a call in a
process that a test has started, nor change what ran at import. So what survives there is tried again, in a
process of its own, with all tests of its module.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = "briter_worker"
FLOOR = 90
"""The least score, in percent."""
UNIT = "tests/unit/test_{}.py"
TESTS = {
    "allowlist": [UNIT.format("allowlist")],
    "drain": [UNIT.format("drain")],
    "errors": [UNIT.format("errors")],
    "lock": [UNIT.format("lock")],
}
"""For each module, the tests that have to notice."""
AT_ONCE = 2
SURVIVED, UNSEEN = 0, {5, 33}
"""How mutmut notes them: no test failed, and no test was seen to call it."""
PATIENCE = 300


def configure(modules: list[str]) -> None:
    """Tell mutmut what to change, and which tests to look at."""
    settings = {
        "source_paths": [PACKAGE],
        "only_mutate": [f"{PACKAGE}/{module}.py" for module in modules],
        "pytest_add_cli_args_test_selection": sorted({test for name in modules for test in TESTS[name]}),
        "also_copy": ["tests"],
    }
    with Path("pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("\n[tool.mutmut]\n")
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def exit_codes(module: str) -> dict[str, int | None]:
    """What mutmut noted of each mutant."""
    noted = json.loads(Path(f"mutants/{PACKAGE}/{module}.py.meta").read_text(encoding="utf-8"))
    codes: dict[str, int | None] = noted["exit_code_by_key"]
    if missing := [name for name, code in codes.items() if code is None]:
        sys.exit(f"error: mutmut did not try {len(missing)} mutants of {module}, {missing[0]} first")
    return codes


def survives(module: str, mutant: str) -> bool:
    """Whether all tests of the module pass with it, in a process of their own."""
    environment = os.environ | {"MUTANT_UNDER_TEST": mutant, "PYTHONDONTWRITEBYTECODE": "1"}
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS[module]]
    try:
        tried = subprocess.run(
            pytest, cwd="mutants", env=environment, capture_output=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0


def changes(module: str, mutants: list[str]) -> dict[str, str]:
    """For each mutant, the lines that it changes."""
    text = Path(f"mutants/{PACKAGE}/{module}.py").read_text(encoding="utf-8")
    bodies = {
        node.name: (ast.get_source_segment(text, node) or "").splitlines()[1:]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    found = {}
    for mutant in mutants:
        name = mutant.rpartition(".")[2]
        original = bodies[name.rpartition("_")[0] + "_orig"]
        lines = difflib.unified_diff(original, bodies[name], lineterm="", n=0)
        found[mutant] = "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))
    return found


def main() -> int:
    """Print the score of each module and the change of each survivor; 1 when a module is below the floor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(TESTS)}")
    modules = parser.parse_args().modules or list(TESTS)
    if unknown := sorted(set(modules) - set(TESTS)):
        parser.error(f"no tests are named for {', '.join(unknown)}; there are {', '.join(TESTS)}")
    configure(modules)
    # Its own account of the run is one line that is written over a thousand times.
    run = subprocess.run(
        [sys.executable, "-m", "mutmut", "run", "--max-children", str(AT_ONCE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if run.returncode != 0:
        sys.exit(f"error: mutmut could not run:\n{run.stdout.decode(errors='replace')[-4000:]}")
    worst = 100.0
    table = ["| module | mutants | killed | survived | score |", "|---|---|---|---|---|"]
    for module in modules:
        codes = exit_codes(module)
        left = [name for name, code in codes.items() if code == SURVIVED or code in UNSEEN]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            again = list(pool.map(lambda mutant: survives(module, mutant), left))  # noqa: B023 - used at once
        alive = [mutant for mutant, lives in zip(left, again, strict=True) if lives]
        score = 100 * (1 - len(alive) / len(codes))
        worst = min(worst, score)
        table.append(
            f"| {module} | {len(codes)} | {len(codes) - len(alive)} | {len(alive)} | {score:.1f} % |"
        )
        for change, times in Counter(changes(module, alive).values()).items():
            print(f"{module}{f' ({times} times)' if times > 1 else ''}\n{change}\n")
    print("\n".join(table))
    return int(worst < FLOOR)


if __name__ == "__main__":
    sys.exit(main())

"""Known vulnerabilities of what a constraints file pins: audit.py CONSTRAINTS.

The floor under GitPython holds always. pip-audit asks a service that is not reachable from everywhere;
where it is not, that is said, and is no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

GITPYTHON_FLOOR = Version("3.1.62")
"""Older ones have advisories through which a job or a remote could run programs."""


def pinned(constraints: Path) -> dict[str, Version]:
    """Name (lower case) and version of each line."""
    lines = (line.split("#")[0].strip() for line in constraints.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {name.lower(): Version(version) for name, version in pairs}


def findings(constraints: Path) -> tuple[list[str], int]:
    """One line per vulnerability, and how many packages the service knew anything about."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(constraints)]
    command += ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        packages = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return [], 0
    audited = [package for package in packages if "vulns" in package]
    found = [
        f"{package['name']} {package['version']}: {vuln['id']}, fixed in {vuln['fix_versions'] or 'none'}"
        for package in audited
        for vuln in package["vulns"]
    ]
    return found, len(audited)


def main() -> int:
    """Exit 1 when something pinned must not be used."""
    constraints = Path(sys.argv[1])
    versions = pinned(constraints)
    if versions["gitpython"] < GITPYTHON_FLOOR:
        print(f"GitPython {versions['gitpython']} is older than {GITPYTHON_FLOOR}: raise it in {constraints}")
        return 1
    found, audited = findings(constraints)
    if not audited:
        print("skipped: the vulnerability service is not reachable from here; GitPython's floor holds")
        return 0
    print(*found, f"{audited} of {len(versions)} packages audited, {len(found)} findings", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

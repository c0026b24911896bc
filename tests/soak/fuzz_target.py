"""`python -m soak.fuzz_target TARGET FOLDER [libFuzzer's options]`: one process of `fuzz`.

`FOLDER` is for the corpus, which begins with our seeds, and for the input that broke a promise (`found-*`).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Fuzz until the runs are made; the process ends inside."""
    atheris: Any = importlib.import_module("atheris")  # it has no types, and is not everywhere
    with atheris.instrument_imports(include=["briter_worker"], enable_loader_override=False):
        checks: Any = importlib.import_module("soak.fuzz_checks")
    checks.dice_of = atheris.FuzzedDataProvider
    name, folder, *options = sys.argv[1:]
    place = Path(folder)
    longest, seeds = checks.TARGETS[name]
    corpus = place / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    words = place / "words"
    words.write_text("".join(f'"{word}"\n' for word in checks.WORDS), encoding="utf-8")
    options += [f"-max_len={longest}", "-timeout=20", "-rss_limit_mb=1024", f"-dict={words}"]
    options += [f"-artifact_prefix={place}/found-", str(corpus)]
    atheris.Setup([sys.argv[0], *options], checks.check_of(name, place))
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Lists the test files, and what only each of them can find. `python tests/promises.py quick` prints the quick files.

A quick file is one that `make check` runs: it needs few processes and little time.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

PROMISES: dict[str, tuple[str, str]] = {}


def main(tier: str) -> None:
    for name, (of, _) in PROMISES.items():
        if of == tier:
            print(HERE / name)


if __name__ == "__main__":
    main(*sys.argv[1:])

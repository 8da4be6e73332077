"""Times each collective of table.py for several sizes, numbers of ranks and kinds of memory.

Run it with `pytest bench/ --benchmark-only`. Each row of the report is one combination. To compare runs, use
pytest-benchmark's --benchmark-save and --benchmark-compare.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Ranks
from follower import ROWS

SIZES = {"8B": 8, "4KiB": 4 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20}


# With the decorators in this order, the ranks are started only once for each n.
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "barrier"])
@pytest.mark.parametrize("n", [2, 4], ids=lambda n: f"n{n}")
def test_collective(benchmark: Any, ranks: Ranks, n: int, name: str, size: int, shared: bool) -> None:
    benchmark.group = f"{name} n={n} {size} B"
    ranks.measure(benchmark, name, size, shared)


@pytest.mark.parametrize("n", [2, 4], ids=lambda n: f"n{n}")
def test_barrier(benchmark: Any, ranks: Ranks, n: int) -> None:
    benchmark.group = f"barrier n={n}"
    ranks.measure(benchmark, "barrier", 0, False)

"""What to measure: the checked options of `mscomm bench`. Every rank makes the same plan from the same options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mscomm.arrays.numpy import dtype_by_name
from mscomm.bench.table import COLLECTIVES, Case

BUCKETS = "buckets"
TUNE = "tune"
ROUNDS_WITH_PEERS = 5  # fewer rounds give unreliable results on a machine that also does other work

WARMUP_CALLS = 5  # the smallest number of warm-up calls in a round, unless the user sets the number
_WARMUP_US = 50e3
_ROUND_US = 100e3

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# nccl-tests' dtype names -> NumPy's dtype names.
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "char": "int8",
    "int": "int32",
    "uint": "uint32",
}


class Plan(NamedTuple):
    """The checked options of `mscomm bench`, converted to values."""

    collective: str
    sizes: tuple[int, ...]
    dtype: str
    op: str
    root: int
    iterations: int | None  # None: calls() computes this number from the time of a call
    warmup: int | None  # None: calls() computes this number, too
    rounds: int
    check: bool
    shared: bool
    peers: tuple[str, ...]
    prefixes: dict[str, Path]  # the name of an MPI peer -> the folder where this MPI is installed
    json: Path | None
    plot: Path | None

    def case(self, rank: int, ranks: int) -> Case:
        return Case(COLLECTIVES[self.collective], dtype_of(self.dtype), self.op, self.root, ranks, rank)

    def counts(self, case: Case) -> list[int]:
        """Return the number of elements in a part for each size. Leave out duplicate numbers."""
        return list(dict.fromkeys(case.count(size) for size in self.sizes))

    def calls(self, us: float) -> tuple[int, int]:
        """Return how many warm-up calls and timed calls a contender makes in one round. us: the time of a call.

        A round must be long, because the previous contender affects the first calls of a round. For example, the caches
        still hold the previous contender's data, and the kernel may have placed some ranks on the same CPU.
        """
        warmup = max(WARMUP_CALLS, int(_WARMUP_US / us)) if self.warmup is None else self.warmup
        iterations = min(1000, max(5, int(_ROUND_US / us))) if self.iterations is None else self.iterations
        return warmup, iterations

    @property
    def least_warmup(self) -> int:
        """The number of warm-up calls for code that does not use calls()."""
        return WARMUP_CALLS if self.warmup is None else self.warmup

    def modes(self, case: Case) -> tuple[bool, ...]:
        """Return which forms to measure: True is in place, False is out of place.

        If there are peers, measure only one form. All contenders support the in-place form, so measure the in-place
        form if the collective has one, and otherwise the out-of-place form.
        """
        if self.peers:
            return (case.row.in_place,)
        return (False, True) if case.row.in_place else (False,)


def size_of(text: str) -> int:
    """Return the number of bytes that a text such as "64K" (65536) means. Raise ValueError if it is not a size."""
    found = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.ASCII | re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not a size: give bytes, or a number with K, M or G, such as 64M")
    return int(found[1]) * _UNITS[found[2].upper()]


def sizes(smallest: int, largest: int, factor: int | None, step: int | None) -> tuple[int, ...]:
    """Return the sizes from smallest to largest. Each is `factor` times the previous size, or `step` bytes more.

    The last size is always `largest`.
    """
    if largest < smallest:
        raise ValueError(f"the largest size, {largest}, is less than the smallest, {smallest}")
    if step is None and (factor or 2) < 2:
        raise ValueError(f"the factor between sizes is {factor}; it must be 2 or more")
    if step is not None and step < 1:
        raise ValueError(f"the step between sizes is {step}; it must be 1 or more")
    found = [max(smallest, 1)]
    while (following := found[-1] + step if step else found[-1] * (factor or 2)) <= largest:
        found.append(following)
    return (*found, largest) if found[-1] < largest else tuple(found)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype with this name in NumPy or nccl-tests.

    Raise ValueError for an unknown name, and ImportError for bfloat16 if ml_dtypes is not installed.
    """
    name = _DTYPES.get(name, name)
    try:
        if name.startswith("float8"):  # cannot be reduced, and does not have all values of Contents
            raise TypeError
        return dtype_by_name(name)
    except TypeError as error:
        if name == "bfloat16":
            raise ImportError("bfloat16 needs ml_dtypes: pip install ml-dtypes") from error
        raise ValueError(
            f"{name!r} is not a dtype; give one of float32, float64, float16, bfloat16, int32, ..."
        ) from error

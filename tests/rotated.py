"""rotated(): test a few cases of a product of parameters in each run, and all of them in `make test-all`.

    @pytest.mark.parametrize(("algorithm", "n"), rotated(itertools.product(ALGORITHMS, [1, 2, 3, 5]), few=4))

    @sometimes
    def test_a_rare_case_of_something():

Which cases a run tests depends on a seed, which pytest prints at the end of its output. MSCOMM_TEST_SEED=SEED repeats
the choice.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import pytest

SEED = "MSCOMM_TEST_SEED"


def seed() -> str:
    """Return the seed of this run. The first process of a run chooses it, and the others inherit it."""
    return os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))


def chance(name: str, share: float) -> bool:
    """Return True for this share of all names."""
    return random.Random(f"{seed()} {name}").random() < share


def sometimes(test: Any) -> Any:
    """Let half of the runs of `make test` run the test, and `make test-all` always.

    Use it for a costly test that is similar to others that always run.
    """
    return test if chance(test.__qualname__, 0.5) else pytest.mark.long(test)


def rotated(product: Iterable[Any], few: int, always: Iterable[Any] = ()) -> list[Any]:
    """Return the product as parameters for pytest.mark.parametrize. A run of `make test` has the cases in `always`, and
    `few` of the others. The rest are marked `long`.

    A case is a tuple of values, or one value if there is only one parameter.
    """
    every, kept = list(product), list(always)
    assert every, "an empty product would test nothing"
    assert all(case in every for case in kept), f"not in the product: {[case for case in kept if case not in every]}"
    others = [case for case in every if case not in kept]
    kept += random.Random(f"{seed()} {others}").sample(others, min(few, len(others)))
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.long)
        for case in every
    ]

"""drawn(): test a property with a few examples of Hypothesis, and with many in `make test-all`.

    @drawn(st.binary())
    def test_any_bytes_are_refused(data):
        ...

Each run has other examples. They depend on the seed of the run (rotated.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rotated
from hypothesis import given, seed, settings


def drawn(*strategies: Any, few: int = 60, many: int = 300) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    def decorate(holds: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.long)])
        def test(examples: int) -> None:
            seed(int(rotated.seed()))(
                settings(max_examples=examples, deadline=None, database=None)(given(*strategies)(holds))
            )()

        return test

    return decorate

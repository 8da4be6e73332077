"""The operation TypeCast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mscomm.arrays.numpy import dtype_named
from mscomm.dataset.operation import Array, Operation


class TypeCast(Operation):
    """Converts an array of any shape to another dtype. As in NumPy, a cast to integers truncates fractions.

    output_type: a NumPy dtype or its name, or a dtype from mscomm.dtype, MindSpore or PyTorch. Raises TypeError for
    anything else.

    >>> TypeCast("int32")(np.float32(2.75))
    array(2, dtype=int32)
    """

    def __init__(self, output_type: Any) -> None:
        try:
            if output_type is None:  # NumPy would treat None as float64
                raise TypeError
            self._dtype = dtype_named(output_type)
        except TypeError:
            raise TypeError(
                f"TypeCast: output_type={output_type!r} is not a dtype; expected np.int32, mscomm.int32, ..."
            ) from None

    def __call__(self, x: Any) -> Array:
        return np.asarray(x).astype(self._dtype)

    def on_rows(self, rows: Array, draws: Sequence[int] = ()) -> Array:
        return self(rows)

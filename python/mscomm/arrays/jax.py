"""JAX arrays on the CPU. They cannot be written, so each result is a new array over memory that the core has filled.

Call mscomm only outside of functions that JAX compiles (jit). In compiled code, the compiler chooses the order of the
calls, and the order may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def memory(x: jax.Array) -> np.ndarray[Any, Any]:
    if isinstance(x, jax.core.Tracer):
        raise TypeError("is traced by jax.jit or a transformation; call mscomm outside of it, on its result")
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"has dtype {x.dtype}, which mscomm does not move; use jax.random.key_data(x)")
    if not x.is_fully_addressable:
        raise TypeError("is an array of which this process has only a part; pass x.addressable_data(0)")
    there = np.asarray(x)  # waits until x has been computed; copies nothing on the CPU
    there.flags.writeable = False
    return there


def of_numpy(numbers: np.ndarray[Any, Any]) -> jax.Array:
    made = jax.numpy.asarray(numbers)
    if made.dtype != numbers.dtype:
        raise TypeError(
            f"JAX has {numbers.dtype} disabled here; enable it with jax.config.update('jax_enable_x64', True)"
        )
    return made


def new(x: jax.Array, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Callable[[], jax.Array]]:
    filled = np.empty(shape, x.dtype)
    if not getattr(x, "committed", True):  # JAX may move an uncommitted array, so let it move the result as well
        return filled, lambda: jax.device_put(filled)
    where = x.sharding if shape == x.shape else next(iter(x.devices()))
    return filled, lambda: jax.device_put(filled, where)

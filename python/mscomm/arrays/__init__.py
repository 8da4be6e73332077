"""Array libraries: one module each, found by the name of the module that an array's type comes from.

A library module has `view(x)` -> a C-contiguous numpy.ndarray over x's memory (a copy only if x is strided),
`into(out)` -> the array to write to and a function to call afterwards, and `like(x, shape)` -> a new array of x's
type, dtype and device.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

LIBRARIES = ("numpy",)

_found: dict[type, ModuleType] = {}


def library(x: Any, argument: str, function: str) -> ModuleType:
    """The module for x's array library; TypeError, naming the function and its argument, if there is none."""
    try:
        return _found[type(x)]
    except KeyError:
        pass
    for kind in type(x).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in LIBRARIES:
            module = importlib.import_module(f"mscomm.arrays.{name}")
            if module.is_array(x):
                return _found.setdefault(type(x), module)
    raise TypeError(
        f"{function}: {argument} is a {type(x).__name__}, not an array; give it as np.asarray({argument})"
        f" (known libraries: {', '.join(LIBRARIES)})"
    )

"""mscomm: collective communication and data-parallel training for Python.

>>> import numpy as np, mscomm
>>> mscomm.init()
>>> mscomm.all_reduce(np.ones(3))
array([1., 1., 1.])

A submodule is imported only when one of its names is first used, so `import mscomm`, the command line and the scheduler
start fast. Type checkers cannot follow such imports, so they read the names from __init__.pyi.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from mscomm.version import VERSION

__version__ = VERSION

# The stub for type checkers also says which module defines each name.
_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
# Submodules that can be used after a bare `import mscomm`, as in MindSpore.
_MODULES = re.findall(r"^from mscomm import (\w+)", _STUB, re.M)
_MODULE_OF = {name: module for module, name in re.findall(r"^from (mscomm\.\S+) import (\w+)", _STUB, re.M)}

# Omitted from `from mscomm import *`, which must work without torch.
_NEEDS_TORCH = {"DistributedDataParallel", "Parameter", "ParameterTuple", "Tensor"}

__all__ = ["__version__", *sorted(_MODULE_OF.keys() - _NEEDS_TORCH)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mscomm.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mscomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_MODULES, *_MODULE_OF]

"""Defines MindSpore's names for dtypes, which TypeCast and some operators accept. Each name is a NumPy dtype.

Scripts usually import this module with `from mscomm import dtype as mstype`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy import bool_ as bool_
from numpy import complex64 as complex64
from numpy import complex128 as complex128
from numpy import float16 as float16
from numpy import float32 as float32
from numpy import float64 as float64
from numpy import int8 as int8
from numpy import int16 as int16
from numpy import int32 as int32
from numpy import int64 as int64
from numpy import uint8 as uint8
from numpy import uint16 as uint16
from numpy import uint32 as uint32
from numpy import uint64 as uint64

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name != "bfloat16":
            raise AttributeError(f"module 'mscomm.dtype' has no attribute {name!r}")
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            raise AttributeError("mscomm.dtype.bfloat16 needs ml-dtypes: pip install ml-dtypes") from None
        return bfloat16

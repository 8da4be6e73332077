"""MindSpore's path to the dtypes: import mscomm.common.dtype as mstype."""

from __future__ import annotations

from mscomm.common import dtype as dtype

"""Provides the dtypes at MindSpore's import path: import mscomm.common.dtype as mstype."""

from __future__ import annotations

from mscomm.common import dtype as dtype

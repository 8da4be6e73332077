"""The names of mscomm.dtype, under the path of MindSpore's module common.dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mscomm.dtype import *  # noqa: F403

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from mscomm import dtype

        return getattr(dtype, name)

"""Provides the names of mscomm.dtype at the path of MindSpore's module common.dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mscomm.dtype import *  # noqa: F403

if not TYPE_CHECKING:
    from mscomm.dtype import __getattr__ as __getattr__

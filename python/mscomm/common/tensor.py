"""Provides Tensor at MindSpore's import path."""

from __future__ import annotations

from mscomm.tensor import Tensor as Tensor

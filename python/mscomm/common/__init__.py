"""Provides names at the paths of MindSpore's package mindspore.common.

`dtype` needs only NumPy. `tensor`, `parameter` and `initializer` need PyTorch, so they are imported by name:
`from mscomm.common.initializer import initializer`.
"""

from __future__ import annotations

from mscomm.common import dtype as dtype

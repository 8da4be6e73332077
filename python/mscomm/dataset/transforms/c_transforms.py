"""The same operations under MindSpore's older path: import mscomm.dataset.transforms.c_transforms as C."""

from __future__ import annotations

from mscomm.dataset.transforms import TypeCast as TypeCast

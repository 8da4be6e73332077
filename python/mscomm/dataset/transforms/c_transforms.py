"""MindSpore's older path for mscomm.dataset.transforms: import mscomm.dataset.transforms.c_transforms as C."""

from __future__ import annotations

from mscomm.dataset.transforms import TypeCast as TypeCast

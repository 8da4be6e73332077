"""MindSpore's older path for mscomm.dataset.vision: import mscomm.dataset.vision.c_transforms as vision."""

from __future__ import annotations

from mscomm.dataset.vision import *  # noqa: F403

"""The operations of mscomm.dataset.transforms, under the name that older MindSpore scripts import."""

from __future__ import annotations

from mscomm.dataset.transforms import TypeCast as TypeCast

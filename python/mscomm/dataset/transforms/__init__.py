"""Operations on columns of any kind, under MindSpore's names: import mscomm.dataset.transforms as transforms."""

from __future__ import annotations

from mscomm.dataset.transforms.type_cast import TypeCast as TypeCast

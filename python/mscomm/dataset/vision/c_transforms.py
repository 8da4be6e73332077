"""The operations of mscomm.dataset.vision, under the name that older MindSpore scripts import."""

from __future__ import annotations

from mscomm.dataset.vision import HWC2CHW as HWC2CHW
from mscomm.dataset.vision import Border as Border
from mscomm.dataset.vision import Inter as Inter
from mscomm.dataset.vision import Normalize as Normalize
from mscomm.dataset.vision import RandomCrop as RandomCrop
from mscomm.dataset.vision import RandomHorizontalFlip as RandomHorizontalFlip
from mscomm.dataset.vision import Rescale as Rescale
from mscomm.dataset.vision import Resize as Resize

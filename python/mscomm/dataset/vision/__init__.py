"""Operations on images, under MindSpore's names: import mscomm.dataset.vision as vision.

An image is a NumPy array of shape (height, width, channels) or (height, width). HWC2CHW moves the channels to the
front.
"""

from __future__ import annotations

from mscomm.dataset.vision.crop import Border as Border
from mscomm.dataset.vision.crop import RandomCrop as RandomCrop
from mscomm.dataset.vision.flip import RandomHorizontalFlip as RandomHorizontalFlip
from mscomm.dataset.vision.resize import Inter as Inter
from mscomm.dataset.vision.resize import Resize as Resize
from mscomm.dataset.vision.values import HWC2CHW as HWC2CHW
from mscomm.dataset.vision.values import Normalize as Normalize
from mscomm.dataset.vision.values import Rescale as Rescale

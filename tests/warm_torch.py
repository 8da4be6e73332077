"""What warm.py's interpreter imports if the scripts import PyTorch."""

import torch
import torch._dynamo  # otherwise, each rank imports it, in DistributedDataParallel or in its first optimizer step
from warm import launcher, rank_of_torchrun

__all__ = ["launcher", "rank_of_torchrun", "torch"]

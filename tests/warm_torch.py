"""What warm.py's interpreter imports if the scripts import PyTorch."""

import gc

import torch
import torch._dynamo  # otherwise, each rank imports it, in DistributedDataParallel or in its first optimizer step
from warm import launcher, rank_of_torchrun

__all__ = ["launcher", "rank_of_torchrun", "torch"]

gc.freeze()  # a collection in a rank would copy the memory that it shares with the interpreter

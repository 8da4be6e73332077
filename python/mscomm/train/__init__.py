"""Data-parallel training: every rank computes the gradients of its part of the batch, and all take the same step."""

from mscomm.train.reducer import GradientReducer, broadcast_parameters

__all__ = ["GradientReducer", "broadcast_parameters"]

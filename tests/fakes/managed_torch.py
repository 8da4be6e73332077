"""Lets PyTorch use a stand-in's device, without a GPU. The tensors are CPU tensors in managed memory, and mscomm treats
them as device tensors.

A rank of tests/devices.py that imports this module replaces functions of mscomm.arrays.torch with the functions below.
From then on, mscomm treats a tensor in managed memory as a tensor on this rank's device, and any other tensor as a CPU
tensor. So PyTorch's own modules, autograd and optimizers work on device memory.

PyTorch computes on the host right away, but a GPU's kernels would wait for their turn in the stream. So a test must
call settle() before PyTorch reads the results of enqueued work, and before PyTorch overwrites memory that enqueued work
still reads. If PyTorch computes a tensor from a managed tensor, the result is on the CPU. tensor() and module() copy
tensors to the device.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fakes import device_array, library
from ranks import before_joining

from mscomm import arrays
from mscomm.arrays import torch as real
from mscomm.arrays.device import OnDevice, on_device
from mscomm.arrays.numpy import dtype_of
from mscomm.train import GradientReducer
from mscomm.train.autograd import Autograd
from mscomm.train.device_buckets import DeviceBucket


class _Managed:
    """Owns an allocation that NumPy can use as the memory of an array. The array keeps the allocation alive."""

    def __init__(self, nbytes: int) -> None:
        self._memory = device_array._Memory(max(nbytes, 1), device(), managed=True)
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self._memory.pointer, False),
        }


def device() -> int:
    """Return the number of this rank's device."""
    return int(os.environ["MSCOMM_RANK"])


def settle() -> None:
    """Wait until the device has done all work on the current stream."""
    device_array.synchronize(device())


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape, dtype=np.int64))
    if not count:
        return torch.empty(shape, dtype=dtype)  # an empty tensor has no address, so it cannot be recognised as managed
    return torch.from_numpy(np.asarray(_Managed(count * dtype.itemsize))).view(dtype).reshape(shape)


def tensor(x: Any) -> torch.Tensor:
    """Copy an array, a tensor or numbers to this rank's device. A tensor without gaps keeps its strides."""
    if isinstance(x, torch.Tensor):
        settle()
        x = x.detach()
    else:
        x = torch.as_tensor(x)
    flat = empty((x.numel(),), x.dtype)
    strides = torch.empty_like(x).stride()  # the strides that PyTorch would give a copy
    return (flat.as_strided(x.shape, strides) if x.numel() else flat.reshape(x.shape)).copy_(x)


def module(made: torch.nn.Module) -> torch.nn.Module:
    """Move the module's parameters, buffers and gradients to this rank's device, as made.cuda() would. Return the
    module.
    """
    made._apply(tensor)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.register_hook(tensor)
    return made


def is_managed(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and _device_of(x) >= 0


def _device_of(x: torch.Tensor) -> int:
    if x.device.type != "cpu" or not x.numel():
        return -1
    return int(device_array.runtime().library.fake_managed(ctypes.c_uint64(x.data_ptr())))


# -- the functions of mscomm.arrays.torch, for tensors on the device


def memory(x: torch.Tensor) -> OnDevice:
    if x.is_conj() or x.is_neg():
        raise TypeError("is only marked as conjugated or negated; use x.resolve_conj().resolve_neg()")
    x = x.detach()
    dtype = dtype_of(real._CODES[x.dtype])
    return on_device(
        x,
        x.data_ptr(),
        tuple(x.shape),
        dtype,
        None if x.is_contiguous() else tuple(stride * dtype.itemsize for stride in x.stride()),
        _device_of(x),
        device_array.current_stream,
        backend=library.BACKEND,
        writable=not real.repeats(x),
    )


def new(x: torch.Tensor, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Callable[[], torch.Tensor]]:
    made = empty(shape, x.dtype)
    return arrays.library(made, "x", "new").memory(made), lambda: made


def packed(x: torch.Tensor) -> torch.Tensor:
    settle()
    return empty(tuple(x.shape), x.dtype).copy_(x.detach())


def assign(out: torch.Tensor, made: torch.Tensor) -> None:
    settle()
    out.detach().copy_(made)


def on_host(x: torch.Tensor) -> np.ndarray[Any, Any]:
    settle()
    return real.memory(x.detach().clone())


def from_host(x: torch.Tensor, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return tensor(real.over(numbers.copy()))


def register() -> None:
    """Let mscomm use the functions above for tensors on the device, and its own functions for all other tensors."""
    real.plain = None  # `plain` is a fast path that would treat all tensors as CPU tensors
    for mine in (memory, new, packed, assign, on_host, from_host):
        setattr(real, mine.__name__, _either(mine, getattr(real, mine.__name__)))

    # In these functions, PyTorch computes on the host immediately, so the device must have finished its work before.
    for name in ("scale", "_widen", "_narrow"):
        setattr(DeviceBucket, name, _settled(getattr(DeviceBucket, name), before=True))
    Autograd._copy_out = _settled(Autograd._copy_out, before=True)  # type: ignore[method-assign]


def settle_in_steps() -> None:
    """Make GradientReducer wait for the work that it enqueues.

    Tests of Model need this, because they cannot call settle() inside Model's loop.
    """
    for name in ("wait", "zero_grad"):
        setattr(GradientReducer, name, _settled(getattr(GradientReducer, name), before=False))


def _settled(function: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def late(*given: Any) -> Any:
        if before:
            settle()
        result = function(*given)
        if not before:
            settle()
        return result

    return late


def _either(managed: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(others)
    def one(x: Any, *more: Any) -> Any:
        return (managed if is_managed(x) else others)(x, *more)

    return one


if "MSCOMM_RANK" in os.environ:  # this process is a rank
    register()
else:
    before_joining.append(register)

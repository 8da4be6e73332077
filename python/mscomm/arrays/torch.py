"""PyTorch tensors. Their memory is used without a copy; results are tensors that do not require a gradient.

Calls on GPU tensors are enqueued on PyTorch's current stream for that GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mscomm.arrays import numpy
from mscomm.arrays.described import in_memory
from mscomm.arrays.device import OnDevice, on_device
from mscomm.arrays.numpy import DTYPES, OF_ML_DTYPES, described_dtype, known_code

namespace = torch

_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}
_KINDS = {code: kind for kind, code in _CODES.items()}

PLAIN = {torch.Tensor: "nccl", torch.nn.Parameter: "nccl"}
plain = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # PyTorch has this from 2.10 on
held = torch.Tensor.detach


def _is_not(kind: torch.dtype) -> Callable[[torch.Tensor], bool]:
    return lambda x: x.dtype is not kind


# DLPack describes PyTorch's integers of 1 to 7 bits as integers of 8 bits, although they must not be summed as such.
pending: dict[int, tuple[Callable[[torch.Tensor], bool], ...]] = {
    code: (torch.Tensor.is_neg, torch.Tensor.is_conj) if kind.is_complex else (torch.Tensor.is_neg,)
    for kind, code in _CODES.items()
    if kind.is_complex or kind.is_floating_point
} | {_CODES[kind]: (_is_not(kind),) for kind in (torch.int8, torch.uint8)}


def _by_object(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# A function that returns the handle of a device's current stream. PyTorch's own function for this is not public, but is
# unlikely to disappear, because the code that PyTorch's compiler generates calls it.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _by_object)


def is_array(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def memory(x: torch.Tensor) -> np.ndarray[Any, Any]:
    if x.is_nested:
        raise TypeError("is a nested tensor; pass its parts, x.unbind()")
    if x.layout is not torch.strided:
        raise TypeError(f"is a tensor of layout {x.layout}; use x.to_dense()")
    if x.device.type == "cuda" and (x.is_conj() or x.is_neg()):
        raise TypeError("is only marked as conjugated or negated; use x.resolve_conj().resolve_neg()")
    if x.is_conj() or x.is_neg():  # the memory of x does not hold the values of x
        resolved = memory(x.detach().resolve_conj().resolve_neg())
        resolved.flags.writeable = False
        return resolved
    x = x.detach()  # keeps the storage alive, even if the user assigns another storage to the original tensor
    if x.device.type == "cuda":
        return _on_cuda(x)
    if x.device.type != "cpu":
        raise TypeError(f"is on {x.device}; mscomm moves tensors on the CPU and on NVIDIA GPUs: use x.cpu()")
    if repeats(x):
        expanded = memory(x.contiguous())
        expanded.flags.writeable = False
        return expanded
    return _on_cpu(x)


def _on_cpu(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the memory of a CPU tensor. Use its address, because x.numpy() would keep PyTorch from resizing x."""
    dtype = described_dtype(code_of(x))
    try:
        address, storage = x.data_ptr(), x.untyped_storage()
        there = storage.nbytes() if storage.data_ptr() or not storage.nbytes() else None
    except (RuntimeError, NotImplementedError):
        address, there = 0, None
    if x.numel():
        if there is None:
            raise TypeError(f"is a {type(x).__name__} without memory of its own; pass the tensor that it wraps")
        last = x.storage_offset() + sum(step * (extent - 1) for step, extent in zip(x.stride(), x.shape, strict=True))
        needed = (last + 1) * dtype.itemsize
        if there < needed:
            raise TypeError(f"needs {needed} bytes of its storage, which was resized to {there}; resize it back first")
    return in_memory(x, address, tuple(x.shape), dtype, tuple(step * dtype.itemsize for step in x.stride()))


def code_of(x: torch.Tensor) -> int:
    try:
        return _CODES[x.dtype]
    except KeyError:
        raise TypeError(f"has dtype {x.dtype}, which mscomm does not move; it knows {', '.join(DTYPES)}") from None


def _on_cuda(x: torch.Tensor) -> OnDevice:
    dtype, index = described_dtype(code_of(x)), x.get_device()
    return on_device(
        x,
        x.data_ptr(),
        tuple(x.shape),
        dtype,
        None if x.is_contiguous() else tuple(stride * dtype.itemsize for stride in x.stride()),
        index,
        lambda: int(_current_stream(index)),
        writable=not repeats(x),
    )


def repeats(x: torch.Tensor) -> bool:
    """Return whether several elements of x share one place in memory, as after expand() or unfold()."""
    return not x.is_contiguous() and numpy.repeats(x.shape, x.stride())


def empty(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def new(x: torch.Tensor, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], Callable[[], torch.Tensor]]:
    made = empty(x, shape)
    return memory(made), lambda: made


def over(memory: np.ndarray[Any, Any]) -> torch.Tensor:
    code = known_code(memory.dtype)
    if code is None or DTYPES[code] not in OF_ML_DTYPES:
        return torch.from_numpy(memory)
    return torch.from_numpy(memory.view(f"u{memory.itemsize}")).view(_KINDS[code])


def of_numpy(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor over the memory of `numbers`, or over a copy if `numbers` is strided or read-only.

    PyTorch does not support negative strides, and warns about read-only memory.
    """
    return over(numbers if numbers.flags.carray else np.array(numbers, order="C"))


def packed(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous()


def assign(out: torch.Tensor, made: torch.Tensor) -> None:
    out.detach().copy_(made)


def used(x: torch.Tensor) -> None:
    if x.is_cuda:
        x.record_stream(torch.cuda.current_stream(x.device))


def on_host(x: torch.Tensor) -> np.ndarray[Any, Any]:
    return memory(x.detach().cpu())


def from_host(x: torch.Tensor, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
    return of_numpy(numbers).to(x.device)


def warn_if_differentiated(x: torch.Tensor) -> None:
    """Warn in a backward pass that computes the gradient of x, whose values a call overwrites.

    torch.distributed warns at this time, too. A leaf, such as a parameter, only gets new values, so its gradient is
    right.
    """
    if x.grad_fn is not None and torch.is_grad_enabled():
        x.register_hook(_warn)


def _warn(_gradient: torch.Tensor) -> None:
    warnings.warn(
        "mscomm: this backward pass computes the gradient of a tensor that a call of mscomm or torch.distributed has"
        " overwritten. Autograd does not know what the call did, so the gradient may be wrong. Pass x.detach() to the"
        " call, or call a function that autograd knows, such as those of torch.distributed.nn.functional",
        stacklevel=2,
    )


def _increment_version(tensors: tuple[torch.Tensor]) -> None:
    if not tensors[0].is_inference():
        torch.autograd.graph.increment_version(tensors[0])


# A function that tells autograd that tensors were written, as in-place operations do. A backward pass that needs the
# old values then raises an error. PyTorch's own function for this is not public. mscomm uses it from PyTorch 2.10 on;
# in earlier versions, that function does not skip inference-mode tensors.
written_untracked: Callable[[tuple[torch.Tensor]], None] = (
    getattr(torch._C, "_increment_version", _increment_version) if plain else _increment_version
)
TRACKED = "requires_grad"


def written(tensors: tuple[torch.Tensor]) -> None:
    warn_if_differentiated(tensors[0])
    written_untracked(tensors)

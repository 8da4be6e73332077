"""Tensor, Parameter and ParameterTuple: PyTorch's tensors with MindSpore's constructors and printed form.

These classes need PyTorch. A Tensor is a torch.Tensor, and a Parameter is a torch.nn.Parameter, so all functions of
PyTorch accept them. `x.dtype` is a dtype of PyTorch, not of mscomm.dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError(
        f"mscomm.Tensor, mscomm.nn and the computing operators of mscomm.ops need PyTorch: pip install torch ({error})"
    ) from error
from torch.overrides import get_default_nowrap_functions

from mscomm import context, job
from mscomm.arrays.numpy import dtype_named
from mscomm.arrays.torch import of_numpy

_KEPT = get_default_nowrap_functions()  # these return an object that PyTorch itself keeps, such as x.grad


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return PyTorch's dtype for a dtype of mscomm.dtype, NumPy, MindSpore or PyTorch. Raise TypeError for others."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype if isinstance(dtype, str) else dtype_named(dtype).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"PyTorch has no dtype {name}")
    return found


def device() -> torch.device:
    """Return where new tensors are created: on this rank's GPU after init("nccl"), otherwise on the CPU.

    Before init(), set_context(device_target="GPU") also chooses the GPU.
    """
    on_gpu = job.get_backend() == "nccl" if job.is_initialized() else context.given("device_target") == "GPU"
    if not on_gpu:
        return torch.device("cpu")
    chosen = None if job.is_initialized() else context.given("device_id")
    return torch.device("cuda", torch.cuda.current_device() if chosen is None else chosen)


def data_of(given: Any, dtype: Any = None) -> torch.Tensor:
    """Return a new torch.Tensor with a copy of the given numbers.

    given: a tensor, a NumPy array, a number, or numbers in nested lists. Python's floats become float32, as in
    MindSpore.
    """
    kind = None if dtype is None else torch_dtype(dtype)
    if isinstance(given, torch.Tensor):
        source = given.detach().as_subclass(torch.Tensor)
        return source.to(device(), source.dtype if kind is None else kind, copy=True)
    numbers = np.array(given)
    if kind is None and numbers.dtype == np.float64 and not isinstance(given, np.ndarray | np.generic):
        kind = torch.float32
    if numbers.dtype.kind not in "biufc":
        raise TypeError(
            f"Tensor: input_data is a {type(given).__name__}; expected an array, a number, or lists of them"
        )
    return of_numpy(numbers).to(device(), kind)


class Tensor(torch.Tensor):
    """A torch.Tensor that is created and printed as in MindSpore.

    input_data: a NumPy array, a tensor, a number, or numbers in nested lists; they are copied. dtype: a dtype of
    mscomm.dtype, NumPy or PyTorch. Without it, Python's floats become float32, and arrays keep their dtype. Raise
    TypeError if there are no numbers in input_data.

    Functions of PyTorch return a Tensor if an argument is one, and so do the operators of mscomm.ops. All other methods
    are PyTorch's: size() is a method, std() and var() divide by n - 1, and repeat() repeats the whole tensor.

    >>> print(mscomm.Tensor(np.array([[0.0], [1.0]]), mscomm.float32))
    [[0.],
     [1.]]
    """

    @staticmethod
    def __new__(cls, input_data: Any, dtype: Any = None) -> Tensor:
        return data_of(input_data, dtype).as_subclass(cls)

    def __init__(self, input_data: Any, dtype: Any = None) -> None:
        """Does nothing, because __new__ has made the tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(one, torch.nn.Parameter) or issubclass(cls, one) for one in types):
            return NotImplemented  # the other class decides
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result if func in _KEPT else _as_tensors(result)

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return the numbers as a NumPy array. A tensor on the CPU shares its memory with the array."""
        return self.detach().cpu().as_subclass(torch.Tensor).numpy()

    def astype(self, dtype: Any) -> Tensor:
        """Return the numbers with another dtype."""
        return self.to(torch_dtype(dtype))

    def __str__(self) -> str:
        return _text(self)

    def __repr__(self, **_: Any) -> str:
        kind = str(self.dtype).removeprefix("torch.").capitalize()
        return f"Tensor(shape={list(self.shape)}, dtype={kind}, value=\n{_text(self)})"

    def __format__(self, how: str) -> str:
        return format(self.item() if self.ndim == 0 else str(self), how)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _tensor, (self.detach().as_subclass(torch.Tensor),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return made


def like(x: Any, result: Any) -> Any:
    """Return the result as a Tensor if x is one."""
    return _as_tensors(result) if isinstance(x, Tensor) else result


def _as_tensors(result: Any) -> Any:
    if type(result) is torch.Tensor:
        return result.as_subclass(Tensor)
    if isinstance(result, tuple | list):
        made = [_as_tensors(one) for one in result]
        return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
    return result


def _text(x: torch.Tensor) -> str:
    numbers = x.detach().as_subclass(torch.Tensor).cpu()
    if numbers.dtype is torch.bfloat16:  # NumPy has no such dtype
        numbers = numbers.float()
    return np.array2string(numbers.numpy(), separator=", ")


class Parameter(torch.nn.Parameter):
    """A torch.nn.Parameter with a name.

    default_input: as input_data of Tensor, and also what initializer() returns. name: used in messages and in
    `trainable_params()`; without a name, a Cell gives the parameter the name of the attribute. requires_grad: whether
    it is trained. layerwise_parallel: if True, each rank keeps this parameter for itself in data-parallel training: its
    gradient is not combined, and it may differ between ranks.

    >>> weight = mscomm.Parameter(mscomm.Tensor(np.full((4, 8), 0.1, np.float32)), name="fc_weight")
    """

    @staticmethod
    def __new__(
        cls, default_input: Any, name: str | None = None, requires_grad: bool = True, layerwise_parallel: bool = False
    ) -> Parameter:
        if not (name is None or isinstance(name, str)):
            raise TypeError(f"Parameter: name is a {type(name).__name__}; expected a str")
        data = data_of(default_input)
        if requires_grad and not (data.is_floating_point() or data.is_complex()):
            raise TypeError(f"Parameter: a parameter of dtype {data.dtype} has no gradient; pass requires_grad=False")
        made: Parameter = torch.Tensor._make_subclass(cls, data, requires_grad)
        return made

    def __init__(
        self, default_input: Any, name: str | None = None, requires_grad: bool = True, layerwise_parallel: bool = False
    ) -> None:
        self._name = name
        self.layerwise_parallel = layerwise_parallel

    @property
    def name(self) -> str:
        """The name; it may be changed."""
        return self._name or "Parameter"

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    @property
    def is_named(self) -> bool:
        """Whether the parameter has been given a name."""
        return self._name is not None

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return the numbers as a NumPy array. A parameter on the CPU shares its memory with the array."""
        return self.detach().cpu().numpy()

    def set_data(self, data: Any) -> Parameter:
        """Replace the numbers by others of the same shape. Raise ValueError if the shapes differ."""
        new = data_of(data, self.dtype).to(self.device)
        if new.shape != self.shape:
            raise ValueError(f"Parameter {self.name}: set_data got the shape {list(new.shape)}, not {list(self.shape)}")
        with torch.no_grad():
            self.copy_(new)
        return self

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.").capitalize()
        return (
            f"Parameter (name={self.name}, shape={tuple(self.shape)}, dtype={kind}, requires_grad={self.requires_grad})"
        )

    __str__ = __repr__

    def astype(self, dtype: Any) -> torch.Tensor:
        """Return the numbers with another dtype."""
        return self.to(torch_dtype(dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        data = self.detach().clone().as_subclass(torch.Tensor)
        made = memo[id(self)] = _parameter(data, self._name, self.requires_grad, self.layerwise_parallel)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        data = self.detach().as_subclass(torch.Tensor)
        return _parameter, (data, self._name, self.requires_grad, self.layerwise_parallel)


def _parameter(data: torch.Tensor, name: str | None, requires_grad: bool, layerwise_parallel: bool) -> Parameter:
    """Return a Parameter with this data, on its device."""
    made: Parameter = torch.Tensor._make_subclass(Parameter, data, requires_grad)
    made._name, made.layerwise_parallel = name, layerwise_parallel
    return made


def _tensor(data: torch.Tensor) -> Tensor:
    return data.as_subclass(Tensor)


torch.serialization.add_safe_globals([_parameter, _tensor])  # so that torch.load(weights_only=True) accepts them


class ParameterTuple(tuple[Parameter, ...]):
    """A tuple of parameters."""

    def __new__(cls, parameters: Iterable[Parameter]) -> ParameterTuple:
        found = tuple(parameters)
        for one in found:
            if not isinstance(one, torch.nn.Parameter):
                raise TypeError(f"ParameterTuple: an item is a {type(one).__name__}; expected a Parameter")
        return super().__new__(cls, found)

    def clone(self, prefix: str, init: str = "same") -> ParameterTuple:
        """Return new parameters with the names `prefix.name`. init: "same" copies the numbers; "zeros" and "ones" do
        not. Raise ValueError for another init."""
        if init not in ("same", "zeros", "ones"):
            raise ValueError(f'ParameterTuple.clone: init={init!r}; expected "same", "zeros" or "ones"')
        made = []
        for number, one in enumerate(self):
            data = one.detach() if init == "same" else getattr(torch, f"{init}_like")(one.detach())
            name = getattr(one, "name", None) or f"{number}"
            own = bool(getattr(one, "layerwise_parallel", False))
            made.append(Parameter(data, f"{prefix}.{name}", one.requires_grad, own))
        return ParameterTuple(made)

"""MindSpore's computing operators over PyTorch: one function for each operator.

The positional parameters of a function are the inputs of the operator; the keyword-only parameters are the arguments of
its constructor. For example, `MatMul(transpose_b=True)(x, y)` calls MatMul's function with x, y and transpose_b=True.
Gradients flow as in PyTorch. Where nothing else is said, an operator raises what PyTorch's function raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from mscomm.ops.operator import Operator, operator
from mscomm.tensor import Tensor, data_of, device, torch_dtype

Axes = int | Sequence[int]

# -- functions of one tensor


@operator
def Abs(x: Any) -> Any:
    """Returns the absolute values."""
    return torch.abs(x)


@operator
def Exp(x: Any) -> Any:
    """Returns e to the power of x."""
    return torch.exp(x)


@operator
def Log(x: Any) -> Any:
    """Returns the natural logarithm."""
    return torch.log(x)


@operator
def Neg(x: Any) -> Any:
    """Returns -x."""
    return torch.neg(x)


@operator
def Reciprocal(x: Any) -> Any:
    """Returns 1/x."""
    return torch.reciprocal(x)


@operator
def Rsqrt(x: Any) -> Any:
    """Returns 1/sqrt(x)."""
    return torch.rsqrt(x)


@operator
def Sqrt(x: Any) -> Any:
    """Returns the square root."""
    return torch.sqrt(x)


@operator
def Square(x: Any) -> Any:
    """Returns x * x."""
    return torch.square(x)


@operator
def Sin(x: Any) -> Any:
    """Returns the sine."""
    return torch.sin(x)


@operator
def Cos(x: Any) -> Any:
    """Returns the cosine."""
    return torch.cos(x)


@operator
def Erf(x: Any) -> Any:
    """Returns the error function."""
    return torch.erf(x)


@operator
def Tanh(input_x: Any) -> Any:
    """Returns the hyperbolic tangent."""
    return torch.tanh(input_x)


@operator
def Sigmoid(input_x: Any) -> Any:
    """Returns 1 / (1 + exp(-x))."""
    return torch.sigmoid(input_x)


@operator
def ReLU(input_x: Any) -> Any:
    """Returns the larger of x and 0."""
    return functional.relu(input_x)


@operator
def GeLU(x: Any) -> Any:
    """Returns 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): Hendrycks and Gimpel, Gaussian Error Linear Units
    (2016)."""
    return functional.gelu(x, approximate="tanh")


@operator
def Softmax(logits: Any, *, axis: int = -1) -> Any:
    """Returns exp(x) / sum(exp(x)) along the axis."""
    return torch.softmax(logits, axis)


@operator
def LogSoftmax(logits: Any, *, axis: int = -1) -> Any:
    """Returns the logarithm of the softmax along the axis."""
    return torch.log_softmax(logits, axis)


@operator
def Identity(x: Any) -> Any:
    """Returns x."""
    return x


@operator
def LogicalNot(x: Any) -> Any:
    """Returns whether x is False."""
    return torch.logical_not(x)


# -- functions of two tensors, which are broadcast; one of the two may be a number


@operator
def Add(x: Any, y: Any) -> Any:
    """Returns x + y."""
    return x + y


@operator
def Sub(x: Any, y: Any) -> Any:
    """Returns x - y."""
    return x - y


@operator
def Mul(x: Any, y: Any) -> Any:
    """Returns x * y."""
    return x * y


@operator
def Div(x: Any, y: Any) -> Any:
    """Returns x / y."""
    return x / y


@operator
def RealDiv(x: Any, y: Any) -> Any:
    """Returns x / y."""
    return x / y


@operator
def FloorDiv(x: Any, y: Any) -> Any:
    """Returns x / y, rounded down."""
    return x // y


@operator
def Pow(x: Any, y: Any) -> Any:
    """Returns x to the power of y."""
    return x**y


@operator
def Maximum(x: Any, y: Any) -> Any:
    """Returns the larger of the two."""
    return torch.maximum(*_tensors(x, y))


@operator
def Minimum(x: Any, y: Any) -> Any:
    """Returns the smaller of the two."""
    return torch.minimum(*_tensors(x, y))


@operator
def Equal(x: Any, y: Any) -> Any:
    """Returns whether x equals y, element by element."""
    return torch.eq(*_tensors(x, y))


@operator
def NotEqual(x: Any, y: Any) -> Any:
    """Returns whether x and y differ, element by element."""
    return torch.ne(*_tensors(x, y))


@operator
def Greater(x: Any, y: Any) -> Any:
    """Returns whether x > y, element by element."""
    return torch.gt(*_tensors(x, y))


@operator
def GreaterEqual(x: Any, y: Any) -> Any:
    """Returns whether x >= y, element by element."""
    return torch.ge(*_tensors(x, y))


@operator
def Less(x: Any, y: Any) -> Any:
    """Returns whether x < y, element by element."""
    return torch.lt(*_tensors(x, y))


@operator
def LessEqual(x: Any, y: Any) -> Any:
    """Returns whether x <= y, element by element."""
    return torch.le(*_tensors(x, y))


@operator
def LogicalAnd(x: Any, y: Any) -> Any:
    """Returns whether both are True, element by element."""
    return torch.logical_and(*_tensors(x, y))


@operator
def LogicalOr(x: Any, y: Any) -> Any:
    """Returns whether x or y is True, element by element."""
    return torch.logical_or(*_tensors(x, y))


def _tensors(x: Any, y: Any) -> tuple[Any, Any]:
    """Return both as tensors. A number gets the dtype of the tensor, if this dtype can hold it."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x, y
    if not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor):
        return Tensor(x), Tensor(y)
    kind, there = torch.result_type(x, y), (x if isinstance(x, torch.Tensor) else y).device
    return tuple(
        one if isinstance(one, torch.Tensor) else torch.as_tensor(one, dtype=kind, device=there) for one in (x, y)
    )


# -- matrices


@operator
def MatMul(x: Any, y: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """Returns the product of two matrices. Raises ValueError if one of the two is not a matrix."""
    for name, one in (("x", x), ("y", y)):
        if one.ndim != 2:
            raise ValueError(f"MatMul: {name} has {one.ndim} dimensions; expected 2. BatchMatMul multiplies batches")
    return torch.matmul(x.t() if transpose_a else x, y.t() if transpose_b else y)


@operator
def BatchMatMul(x: Any, y: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """Returns the products of the matrices in the last two dimensions."""
    return torch.matmul(x.mT if transpose_a else x, y.mT if transpose_b else y)


@operator
def BiasAdd(x: Any, bias: Any) -> Any:
    """Adds bias[i] to all elements whose index in dimension 1 is i."""
    return x + bias.reshape(1, -1, *[1] * (x.ndim - 2))


# -- reductions over one axis, several axes, or all (axis=())


@operator
def ReduceSum(x: Any, axis: Axes = (), *, keep_dims: bool = False, skip_mode: bool = False) -> Any:
    """Returns the sum. With skip_mode=True, axis=() means no axis instead of all."""
    if skip_mode and not isinstance(axis, int) and not axis:
        return x
    return torch.sum(x, _axes(x, axis), keepdim=keep_dims, dtype=x.dtype)


@operator
def ReduceMean(x: Any, axis: Axes = (), *, keep_dims: bool = False) -> Any:
    """Returns the mean."""
    return torch.mean(x, _axes(x, axis), keepdim=keep_dims)


@operator
def ReduceMax(x: Any, axis: Axes = (), *, keep_dims: bool = False) -> Any:
    """Returns the largest element. Elements that are equally large get equal parts of the gradient."""
    return torch.amax(x, _axes(x, axis), keepdim=keep_dims)


@operator
def ReduceMin(x: Any, axis: Axes = (), *, keep_dims: bool = False) -> Any:
    """Returns the smallest element. Elements that are equally small get equal parts of the gradient."""
    return torch.amin(x, _axes(x, axis), keepdim=keep_dims)


@operator
def ReduceProd(x: Any, axis: Axes = (), *, keep_dims: bool = False) -> Any:
    """Returns the product."""
    for one in sorted(_axes(x, axis), reverse=True):
        x = torch.prod(x, one, keepdim=keep_dims, dtype=x.dtype)
    return x


@operator
def ReduceAll(x: Any, axis: Axes = (), *, keep_dims: bool = False) -> Any:
    """Returns whether all elements are True."""
    return torch.all(x, _axes(x, axis), keepdim=keep_dims)


@operator
def ReduceAny(x: Any, axis: Axes = (), *, keep_dims: bool = False) -> Any:
    """Returns whether an element is True."""
    return torch.any(x, _axes(x, axis), keepdim=keep_dims)


@operator
def Argmax(x: Any, *, axis: int = -1, output_type: Any = "int32") -> Any:
    """Returns the index of the largest element along the axis."""
    return torch.argmax(x, axis).to(torch_dtype(output_type))


@operator
def ArgMaxWithValue(x: Any, *, axis: int = 0, keep_dims: bool = False) -> Any:
    """Returns (index, value) of the largest element along the axis."""
    value, index = torch.max(x, axis, keepdim=keep_dims)
    return index.to(torch.int32), value


@operator
def TopK(input_x: Any, k: int, *, sorted: bool = True) -> Any:
    """Returns (values, indices) of the k largest elements along the last axis."""
    values, indices = torch.topk(input_x, k, sorted=sorted)
    return values, indices.to(torch.int32)


def _axes(x: torch.Tensor, axis: Axes) -> list[int]:
    """Return the axes as numbers from 0."""
    given = [axis] if isinstance(axis, int) else list(axis) or list(range(x.ndim))
    if x.ndim == 0 and all(one in (0, -1) for one in given):
        return []
    for one in given:
        if not -x.ndim <= one < x.ndim:
            raise ValueError(f"axis {one} of a tensor with {x.ndim} dimensions; expected {-x.ndim} to {x.ndim - 1}")
    return [one % x.ndim for one in given]


# -- shapes and dtypes


@operator
def Shape(x: Any) -> Any:
    """Returns the shape, a tuple."""
    return tuple(x.shape)


@operator
def Rank(x: Any) -> Any:
    """Returns the number of dimensions."""
    return x.ndim


@operator
def Size(x: Any) -> Any:
    """Returns the number of elements."""
    return x.numel()


@operator
def DType(x: Any) -> Any:
    """Returns the dtype, which is a dtype of PyTorch."""
    return x.dtype


@operator
def Cast(x: Any, dtype: Any) -> Any:
    """Returns x with another dtype. x may be a number."""
    return x.to(torch_dtype(dtype)) if isinstance(x, torch.Tensor) else Tensor(x, dtype)


@operator
def Reshape(x: Any, shape: Sequence[int]) -> Any:
    """Returns x with another shape, in which one number may be -1."""
    return torch.reshape(x, tuple(shape))


@operator
def Flatten(x: Any) -> Any:
    """Joins all dimensions but the first."""
    return torch.flatten(x, 1)


@operator
def Transpose(x: Any, perm: Sequence[int]) -> Any:
    """Returns x with its dimensions in the order of perm."""
    return torch.permute(x, tuple(perm))


@operator
def ExpandDims(x: Any, axis: int) -> Any:
    """Adds a dimension of size 1."""
    return torch.unsqueeze(x, axis)


@operator
def Squeeze(x: Any, *, axis: Axes = ()) -> Any:
    """Removes dimensions of size 1: the given ones, or all. Raises ValueError if a given one has another size."""
    if not isinstance(axis, int) and not axis:
        return torch.squeeze(x)
    for one in _axes(x, axis):
        if x.shape[one] != 1:
            raise ValueError(f"Squeeze: axis {one} has the size {x.shape[one]}; only an axis of size 1 can be removed")
    return torch.squeeze(x, tuple(_axes(x, axis)))


@operator
def Tile(x: Any, multiples: Sequence[int]) -> Any:
    """Repeats x along each dimension."""
    return torch.tile(x, tuple(multiples))


@operator
def Concat(x: Any, *, axis: int = 0) -> Any:
    """Joins a tuple or list of tensors along the axis."""
    return torch.cat(list(x), axis)


@operator
def Stack(x: Any, *, axis: int = 0) -> Any:
    """Joins a tuple or list of tensors along a new axis."""
    return torch.stack(list(x), axis)


@operator
def Split(x: Any, *, axis: int = 0, output_num: int = 1) -> Any:
    """Returns a tuple of output_num equal parts. Raises ValueError if the parts would not be equal."""
    if x.shape[axis] % output_num:
        raise ValueError(f"Split: axis {axis} of {list(x.shape)} cannot be divided into {output_num} equal parts")
    return tuple(torch.split(x, x.shape[axis] // output_num, axis))


@operator
def StridedSlice(x: Any, begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> Any:
    """Returns x[begin[0]:end[0]:strides[0], begin[1]:end[1]:strides[1], ...]. The strides must be above 0."""
    return x[tuple(slice(*one) for one in zip(begin, end, strides, strict=True))]


@operator
def Gather(input_params: Any, input_indices: Any, axis: int) -> Any:
    """Returns the slices with these indices along the axis. Raises IndexError if an index is out of range."""
    axis = _axes(input_params, axis)[0]
    chosen = torch.index_select(input_params, axis, input_indices.reshape(-1))
    shape = input_params.shape
    return chosen.reshape(shape[:axis] + input_indices.shape + shape[axis + 1 :])


@operator
def OneHot(indices: Any, depth: int, on_value: Any, off_value: Any, *, axis: int = -1) -> Any:
    """Returns a tensor with a new axis of size depth, which has on_value at the index and off_value elsewhere.

    An index that is not in 0..depth-1 gives off_value everywhere. The dtype is that of on_value.
    """
    numbers = torch.arange(depth, device=indices.device)
    place = axis % (indices.ndim + 1)
    hot = torch.unsqueeze(indices, place) == numbers.reshape(-1, *[1] * (indices.ndim - place))
    on, off = (
        one if isinstance(one, torch.Tensor) else data_of(one).to(indices.device) for one in (on_value, off_value)
    )
    return torch.where(hot, on, off.to(on.dtype))


@operator
def Select(condition: Any, x: Any, y: Any) -> Any:
    """Returns x where the condition is True, and y elsewhere."""
    return torch.where(condition, x, y)


@operator
def Fill(type: Any, shape: Sequence[int], value: float) -> Any:
    """Returns a tensor of this dtype and shape, in which all elements are the value."""
    return torch.full(tuple(shape), value, dtype=torch_dtype(type), device=device()).as_subclass(Tensor)


@operator
def Zeros(shape: Any, type: Any) -> Any:
    """Returns zeros."""
    return torch.zeros(shape, dtype=torch_dtype(type), device=device()).as_subclass(Tensor)


@operator
def Ones(shape: Any, type: Any) -> Any:
    """Returns ones."""
    return torch.ones(shape, dtype=torch_dtype(type), device=device()).as_subclass(Tensor)


@operator
def ZerosLike(x: Any) -> Any:
    """Returns zeros of the shape and dtype of x."""
    return torch.zeros_like(x)


@operator
def OnesLike(x: Any) -> Any:
    """Returns ones of the shape and dtype of x."""
    return torch.ones_like(x)


# -- losses


@operator
def SoftmaxCrossEntropyWithLogits(logits: Any, labels: Any) -> Any:
    """Returns (loss, gradient): for each row, -sum(labels * log_softmax(logits)), and softmax(logits) - labels."""
    loss = -torch.sum(labels * torch.log_softmax(logits, -1), -1)
    return loss, torch.softmax(logits, -1).detach() - labels


# -- assignments, which change a Parameter or Tensor in place, without a gradient


@operator
def Assign(variable: Any, value: Any) -> Any:
    """Writes the value into the variable, and returns the variable."""
    with torch.no_grad():
        return variable.copy_(value)


@operator
def AssignAdd(variable: Any, value: Any) -> Any:
    """Adds the value to the variable, and returns the variable."""
    with torch.no_grad():
        return variable.add_(value)


@operator
def AssignSub(variable: Any, value: Any) -> Any:
    """Subtracts the value from the variable, and returns the variable."""
    with torch.no_grad():
        return variable.sub_(value)


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Operator)]
__all__.remove("Operator")

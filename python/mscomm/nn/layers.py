"""Layers with MindSpore's arguments and defaults, over PyTorch's functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from mscomm.common.initializer import HeUniform, Uniform, initializer
from mscomm.nn.cell import Cell
from mscomm.tensor import Parameter

Size = int | tuple[int, int]


class Dense(Cell):
    """Computes x @ weight.T + bias. The weight has the shape (out_channels, in_channels).

    weight_init, bias_init: what initializer() takes; by default uniform within 1/sqrt(in_channels). activation: a cell
    or function that is applied to the result, or the name of a function of PyTorch, such as "relu".
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        weight_init: Any = None,
        bias_init: Any = None,
        has_bias: bool = True,
        activation: Callable[[Any], Any] | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = Parameter(_weight(weight_init, (out_channels, in_channels)), "weight")
        self.bias = Parameter(_bias(bias_init, out_channels, in_channels), "bias") if has_bias else None
        self.activation = getattr(torch, activation) if isinstance(activation, str) else activation

    def construct(self, x: Any) -> Any:
        x = functional.linear(x, self.weight, self.bias)
        return x if self.activation is None else self.activation(x)


class Conv2d(Cell):
    """Two-dimensional convolution of (batch, channels, height, width).

    pad_mode: "same", the default, pads so that the height and width of the result are those of x divided by the stride,
    rounded up; if the padding is odd, one row and column more is added at the end. "valid" does not pad. "pad" pads by
    `padding` on each side. has_bias: False by default.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        pad_mode: str = "same",
        padding: Size = 0,
        dilation: Size = 1,
        group: int = 1,
        has_bias: bool = False,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.dilation = map(_pair, (kernel_size, stride, dilation))
        self.pad_mode, self.padding, self.group = _mode("Conv2d", pad_mode, padding), _pair(padding), group
        shape = (out_channels, in_channels // group, *self.kernel_size)
        fan_in = math.prod(shape[1:])
        self.weight = Parameter(_weight(weight_init, shape), "weight")
        self.bias = Parameter(_bias(bias_init, out_channels, fan_in), "bias") if has_bias else None

    def construct(self, x: Any) -> Any:
        padding = self.padding
        if self.pad_mode == "same":
            x, padding = _padded(x, self.kernel_size, self.stride, self.dilation, 0.0)
        return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.group)


class MaxPool2d(Cell):
    """The largest value in each window of (batch, channels, height, width). pad_mode: as in Conv2d, but "valid" by
    default."""

    def __init__(self, kernel_size: Size = 1, stride: Size = 1, pad_mode: str = "valid", padding: Size = 0) -> None:
        super().__init__()
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.pad_mode, self.padding = _mode(type(self).__name__, pad_mode, padding), _pair(padding)

    def construct(self, x: Any) -> Any:
        padding = self.padding
        if self.pad_mode == "same":
            x, padding = _padded(x, self.kernel_size, self.stride, (1, 1), -math.inf)
        return functional.max_pool2d(x, self.kernel_size, self.stride, padding)


class AvgPool2d(MaxPool2d):
    """The mean of each window. pad_mode: "valid" by default, or "pad"; padding counts as zeros."""

    def __init__(self, kernel_size: Size = 1, stride: Size = 1, pad_mode: str = "valid", padding: Size = 0) -> None:
        super().__init__(kernel_size, stride, pad_mode, padding)
        if pad_mode == "same":
            raise NotImplementedError('AvgPool2d: pad_mode="same" is not in mscomm; use "valid" or "pad"')

    def construct(self, x: Any) -> Any:
        return functional.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class BatchNorm2d(Cell):
    """Batch normalization of (batch, channels, height, width): Ioffe and Szegedy (2015).

    In training mode, the means and variances are those of this rank's batch, and the moving means and variances become
    momentum * old + (1 - momentum) * new. In evaluation mode, the moving means and variances are used.
    use_batch_statistics: True or False, regardless of the mode.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.9,
        affine: bool = True,
        gamma_init: Any = "ones",
        beta_init: Any = "zeros",
        moving_mean_init: Any = "zeros",
        moving_var_init: Any = "ones",
        use_batch_statistics: bool | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.momentum, self.use_batch_statistics = eps, momentum, use_batch_statistics
        self.gamma = Parameter(initializer(gamma_init, num_features), "gamma", affine)
        self.beta = Parameter(initializer(beta_init, num_features), "beta", affine)
        for name, init in (("moving_mean", moving_mean_init), ("moving_variance", moving_var_init)):
            self.register_buffer(name, initializer(init, num_features).as_subclass(torch.Tensor))

    def construct(self, x: Any) -> Any:
        batch = self.training if self.use_batch_statistics is None else self.use_batch_statistics
        return functional.batch_norm(
            x, self.moving_mean, self.moving_variance, self.gamma, self.beta, batch, 1 - self.momentum, self.eps
        )


class Flatten(Cell):
    """Joins the dimensions from start_dim to end_dim; by default all but the first."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim, self.end_dim = start_dim, end_dim

    def construct(self, x: Any) -> Any:
        return torch.flatten(x, self.start_dim, self.end_dim)


class Dropout(Cell):
    """In training mode, sets elements to 0 with probability p, and divides the others by 1 - p. Or pass keep_prob,
    which is 1 - p."""

    def __init__(self, keep_prob: float = 0.5, p: float | None = None) -> None:
        super().__init__()
        self.p = 1 - keep_prob if p is None else p
        if not 0 <= self.p < 1:
            raise ValueError(f"Dropout: p={self.p}; expected 0 or more, and less than 1")

    def construct(self, x: Any) -> Any:
        return functional.dropout(x, self.p, self.training)


class ReLU(Cell):
    """The larger of x and 0."""

    def construct(self, x: Any) -> Any:
        return functional.relu(x)


class Sigmoid(Cell):
    """1 / (1 + exp(-x))."""

    def construct(self, x: Any) -> Any:
        return torch.sigmoid(x)


class Tanh(Cell):
    """The hyperbolic tangent."""

    def construct(self, x: Any) -> Any:
        return torch.tanh(x)


class GELU(Cell):
    """x times the distribution function of the normal distribution at x; by default approximated, see ops.GeLU."""

    def __init__(self, approximate: bool = True) -> None:
        super().__init__()
        self.approximate = "tanh" if approximate else "none"

    def construct(self, x: Any) -> Any:
        return functional.gelu(x, approximate=self.approximate)


class Softmax(Cell):
    """exp(x) / sum(exp(x)) along the axis."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def construct(self, x: Any) -> Any:
        return torch.softmax(x, self.axis)


def _pair(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _mode(layer: str, mode: str, padding: Size) -> str:
    if mode not in ("same", "valid", "pad"):
        raise ValueError(f'{layer}: pad_mode={mode!r}; expected "same", "valid" or "pad"')
    if mode != "pad" and _pair(padding) != (0, 0):
        raise ValueError(f'{layer}: padding={padding!r} needs pad_mode="pad", not {mode!r}')
    return mode


def _padded(x: Any, kernel: Any, stride: Any, dilation: Any, value: float) -> tuple[Any, tuple[int, int]]:
    """Return (x, padding) for the mode "same". x is padded here only if its sides get different padding."""
    sides = []
    for size, width, step, spread in zip(x.shape[-2:], kernel, stride, dilation, strict=True):
        needed = max((math.ceil(size / step) - 1) * step + (width - 1) * spread + 1 - size, 0)
        sides.append((needed // 2, needed - needed // 2))
    (top, bottom), (left, right) = sides
    if top == bottom and left == right:
        return x, (top, left)
    return functional.pad(x, (left, right, top, bottom), value=value), (0, 0)


def _weight(init: Any, shape: tuple[int, ...]) -> Any:
    return initializer(HeUniform(math.sqrt(5)) if init is None else init, shape)


def _bias(init: Any, size: int, fan_in: int) -> Any:
    return initializer(Uniform(1 / math.sqrt(fan_in)) if init is None else init, size)

"""The initial values of parameters, with MindSpore's names: initializer("normal", [32, 16]).

All ranks draw the same numbers if they call initializer() for the same shapes in the same order, so they begin with the
same weights. mscomm.set_seed() chooses other numbers. MindSpore has other generators, and therefore other numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from mscomm.common.seed import next_seed
from mscomm.tensor import Tensor, device, torch_dtype


class Initializer:
    """The base class: `fill(x, generator)` writes the initial values into a float32 tensor."""

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        raise NotImplementedError(f"{type(self).__name__}.fill")


class Constant(Initializer):
    """Gives every element the same value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        x.fill_(self.value)


class Zero(Constant):
    """Gives every element the value 0."""

    def __init__(self) -> None:
        super().__init__(0)


class One(Constant):
    """Gives every element the value 1."""

    def __init__(self) -> None:
        super().__init__(1)


class Normal(Initializer):
    """Draws from a normal distribution with the given standard deviation and mean."""

    def __init__(self, sigma: float = 0.01, mean: float = 0.0) -> None:
        self.sigma, self.mean = sigma, mean

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        x.normal_(self.mean, self.sigma, generator=generator)


class TruncatedNormal(Initializer):
    """Draws from a normal distribution, without the values outside of a to b."""

    def __init__(self, sigma: float = 0.01, mean: float = 0.0, a: float = -2.0, b: float = 2.0) -> None:
        self.sigma, self.mean, self.a, self.b = sigma, mean, a, b

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        torch.nn.init.trunc_normal_(x, self.mean, self.sigma, self.a, self.b, generator=generator)


class Uniform(Initializer):
    """Draws from the interval of -scale to scale."""

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        x.uniform_(-self.scale, self.scale, generator=generator)


class XavierUniform(Initializer):
    """Draws from -b to b, with b = gain sqrt(6 / (fan_in + fan_out)): Glorot and Bengio, Understanding the difficulty
    of training deep feedforward neural networks (2010)."""

    def __init__(self, gain: float = 1) -> None:
        self.gain = gain

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        torch.nn.init.xavier_uniform_(x, self.gain, generator=generator)


class XavierNormal(XavierUniform):
    """Draws from a normal distribution with the standard deviation gain sqrt(2 / (fan_in + fan_out))."""

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        torch.nn.init.xavier_normal_(x, self.gain, generator=generator)


class HeUniform(Initializer):
    """Draws from -b to b, with b = gain sqrt(3 / fan): He et al., Delving Deep into Rectifiers (2015). fan is fan_in or
    fan_out, see mode; the gain follows from the nonlinearity."""

    def __init__(self, negative_slope: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> None:
        self.negative_slope, self.mode, self.nonlinearity = negative_slope, mode, nonlinearity

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        torch.nn.init.kaiming_uniform_(x, self.negative_slope, self.mode, self.nonlinearity, generator=generator)


class HeNormal(HeUniform):
    """Draws from a normal distribution with the standard deviation gain / sqrt(fan)."""

    def fill(self, x: torch.Tensor, generator: torch.Generator) -> None:
        torch.nn.init.kaiming_normal_(x, self.negative_slope, self.mode, self.nonlinearity, generator=generator)


_NAMED = {
    "normal": Normal,
    "truncatednormal": TruncatedNormal,
    "uniform": Uniform,
    "zeros": Zero,
    "zero": Zero,
    "ones": One,
    "one": One,
    "xavier_uniform": XavierUniform,
    "xavieruniform": XavierUniform,
    "xavier_normal": XavierNormal,
    "xaviernormal": XavierNormal,
    "he_uniform": HeUniform,
    "heuniform": HeUniform,
    "he_normal": HeNormal,
    "henormal": HeNormal,
}


def initializer(init: str | float | Initializer | torch.Tensor, shape: Any = None, dtype: Any = None) -> Tensor:
    """Return a new Tensor with initial values.

    init: the name of an initializer, such as "normal" (standard deviation 0.01), "uniform" (-0.07 to 0.07), "zeros",
    "ones", "xavier_uniform" or "he_normal"; an Initializer; a number; or a tensor of the given shape, which is copied.
    shape: an int or a sequence of ints. dtype: float32 by default. Raise ValueError for an unknown name or an invalid
    shape, and TypeError for an argument of another type.

    >>> initializer("normal", [32, 16]).shape
    torch.Size([32, 16])
    """
    try:
        given = () if shape is None else shape if isinstance(shape, Iterable) else (shape,)
        sizes = [operator.index(size) for size in given]
    except TypeError:
        raise TypeError(f"initializer: shape={shape!r}; expected an int or a sequence of ints") from None
    if not all(size > 0 for size in sizes):
        raise ValueError(f"initializer: shape={shape!r}; expected sizes above 0")
    if shape is None and not isinstance(init, torch.Tensor):
        raise TypeError("initializer: shape is None; only a tensor has a shape of its own")
    kind = torch.float32 if dtype is None else torch_dtype(dtype)
    if isinstance(init, torch.Tensor):
        if shape is not None and list(init.shape) != sizes:
            raise ValueError(f"initializer: the tensor has the shape {list(init.shape)}, not {sizes}")
        return Tensor(init, dtype)
    if isinstance(init, str):
        if init.lower() not in _NAMED:
            raise ValueError(f"initializer: {init!r} is not one of {', '.join(_NAMED)}")
        init = _NAMED[init.lower()]()
    elif isinstance(init, int | float):
        init = Constant(init)
    if not isinstance(init, Initializer):
        raise TypeError(f"initializer: init is a {type(init).__name__}; expected a name, a number or an Initializer")
    x = torch.empty(sizes, dtype=torch.float32)
    # Drawn on the CPU, so that the numbers do not depend on the device.
    init.fill(x, torch.Generator().manual_seed(next_seed()))
    return x.to(device(), kind).as_subclass(Tensor)

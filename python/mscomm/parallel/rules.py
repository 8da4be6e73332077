"""How each function and operator may be divided among ranks.

A rule names the dimensions of the inputs and outputs by letters, as an einsum does: a matrix product is "mk,kn->mn".
If a letter is divided into parts, each rank computes with its parts of the inputs, and gets its part of the outputs. If
the letter is not in the outputs, the ranks' results have to be summed: the outputs are partial. A dimension without a
letter (".") is never divided. A function without a rule gets whole inputs on every rank, which is always right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn import functional
from torch.utils import _pytree as tree

from mscomm.parallel.tracing import Node, Value

Letters = tuple[str, ...]  # one for each dimension; "." for a dimension that is never divided


class Context(Protocol):
    """What a rule needs to compute a rank's part."""

    def parts(self, letters: Sequence[str]) -> int:
        """Return the number of parts into which these letters are divided together."""

    def total(self, x: torch.Tensor, letters: Sequence[str]) -> torch.Tensor:
        """Return the sum of x over the ranks along these letters. Gradients flow through it."""


@dataclass
class Rule:
    """inputs: the letters of each input of the node; outputs: those of each output. sizes: the size of a letter, if it
    is not the size of its dimensions. compute(context, tensors) computes a rank's outputs; None means to call the
    node's function. sums(parts): the sums within the computation, as (letter, number of elements). flops:
    floating-point operations on one rank, if nothing is divided."""

    inputs: list[Letters]
    outputs: list[Letters]
    flops: float
    compute: Callable[[Context, list[torch.Tensor]], Any] | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    sums: Callable[[Callable[[Sequence[str]], int]], list[tuple[str, int]]] | None = None

    def letters(self, node: Node) -> dict[str, int]:
        """Return the size of each letter that may be divided, in the order of the inputs."""
        found: dict[str, int] = {}
        for letters, value in zip(self.inputs + self.outputs, node.inputs + node.outputs, strict=True):
            for letter, size in zip(letters, value.shape, strict=True):
                if letter != ".":
                    found[letter] = math.gcd(found.get(letter, 0), self.sizes.get(letter, size))
        return found


def call(node: Node, tensors: Sequence[Any]) -> Any:
    """Call the node's function with these tensors in place of its inputs."""
    left = iter(tensors)
    args, kwargs = tree.tree_map(lambda one: next(left) if isinstance(one, Value) else one, (node.args, node.kwargs))
    return node.function(*args, **kwargs)


def rule_of(node: Node) -> Rule:
    """Return the node's rule."""
    by_name = any(isinstance(one, Value) for one in tree.tree_leaves(node.kwargs))
    if by_name and node.name != "scaled_dot_product_attention":
        return _whole(node)  # the rules expect the tensors by position
    make = _RULES.get(node.name)
    made = None if make is None else make(node)
    return _whole(node) if made is None else made


def is_known(name: str) -> bool:
    """Return whether there is a rule for an operator of mscomm.ops."""
    return name in _RULES


def _whole(node: Node) -> Rule:
    return Rule(
        [(".",) * len(value.shape) for value in node.inputs],
        [(".",) * len(value.shape) for value in node.outputs],
        _elements(node),
    )


def _elements(node: Node) -> float:
    return float(sum(math.prod(value.shape) for value in node.outputs))


def _names(count: int, taken: str = "") -> str:
    """Return this many letters: a, b, c, ..."""
    return "".join(letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in taken)[:count]


def _argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """Return an argument of a function, given by position, by name, or by NumPy's name."""
    if len(node.args) > place:
        return node.args[place]
    other = {"dim": "axis", "keepdim": "keepdims"}.get(name, name)
    return node.kwargs.get(name, node.kwargs.get(other, default))


def _attribute(node: Node, name: str) -> Any:
    return node.operator.attributes[name] if node.operator is not None else None


# -- element by element


def _aligned(shape: Sequence[int], out: Sequence[int], letters: Sequence[str]) -> Letters:
    """Return the letters of an input that is broadcast to the shape of the output."""
    shift = len(out) - len(shape)
    return tuple(
        letters[place + shift] if size == out[place + shift] and size != 1 else "." for place, size in enumerate(shape)
    )


def _pointwise(node: Node) -> Rule:
    out = node.outputs[0].shape
    letters = _aligned(out, out, _names(len(out)))
    return Rule([_aligned(value.shape, out, letters) for value in node.inputs], [letters], _elements(node))


def _first_only(node: Node) -> Rule:
    """A function that works element by element on its first argument; the others give a dtype or a device."""
    rule = _pointwise(node)
    rule.inputs[1:] = [(".",) * len(value.shape) for value in node.inputs[1:]]
    return rule


# -- products


def _matmul(node: Node) -> Rule | None:
    first, second = node.inputs
    if len(first.shape) < 2 or len(second.shape) < 2:
        return None
    transposed = (bool(_attribute(node, "transpose_a")), bool(_attribute(node, "transpose_b")))
    out = node.outputs[0].shape
    batch = _aligned(out[:-2], out[:-2], _names(len(out) - 2, "mkn"))
    left, right = ("km" if transposed[0] else "mk"), ("nk" if transposed[1] else "kn")
    if node.name == "rmatmul":  # y.__rmatmul__(x) is x @ y
        left, right = "kn", "mk"
    k = first.shape[-2 if left[0] == "k" else -1]
    return Rule(
        [
            (*_aligned(first.shape[:-2], out[:-2], batch), *left),
            (*_aligned(second.shape[:-2], out[:-2], batch), *right),
        ],
        [(*batch, "m", "n")],
        2.0 * _elements(node) * k,
    )


def _linear(node: Node) -> Rule | None:
    x, weight, *bias = node.inputs
    if len(weight.shape) != 2:
        return None
    batch = tuple(_names(len(x.shape) - 1, "kn"))
    rule = Rule([(*batch, "k"), ("n", "k")], [(*batch, "n")], 2.0 * _elements(node) * weight.shape[1])
    if bias:  # each rank along k adds its share of the bias
        rule.inputs.append(("n",))
        rule.compute = lambda context, given: functional.linear(given[0], given[1], given[2] / context.parts("k"))
    return rule


def _conv2d(node: Node) -> Rule | None:
    x, weight, *bias = node.inputs
    if len(x.shape) != 4:
        return None
    stride, padding, dilation = (
        _argument(node, *one) for one in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    groups = _argument(node, 6, "groups", 1)
    channels, filters = ("c", "o") if groups == 1 else (".", ".")

    def compute(context: Context, given: list[torch.Tensor]) -> torch.Tensor:
        share = given[2] / context.parts("c") if bias else None
        return functional.conv2d(given[0], given[1], share, stride, padding, dilation, groups)

    return Rule(
        [("a", channels, ".", "."), (filters, channels, ".", "."), *([(filters,)] if bias else [])],
        [("a", filters, ".", ".")],
        2.0 * _elements(node) * math.prod(weight.shape[1:]),
        compute,
    )


def _attention(node: Node) -> Rule:
    """scaled_dot_product_attention: only the dimensions before the last two are divided."""
    out = node.outputs[0].shape
    if node.kwargs.get("enable_gqa") or any(len(value.shape) < 2 for value in node.inputs):
        return _whole(node)
    batch = _names(len(out) - 2)
    letters = [(*_aligned(value.shape[:-2], out[:-2], batch), ".", ".") for value in node.inputs]
    keys = node.inputs[1].shape
    return Rule(letters, [(*batch, ".", ".")], 4.0 * _elements(node) * keys[-2])


def _embedding(node: Node) -> Rule | None:
    if len(node.inputs) != 2 or _argument(node, 3, "max_norm") is not None:
        return None
    if _argument(node, 5, "scale_grad_by_freq", False) or _argument(node, 6, "sparse", False):
        raise NotImplementedError(
            f"mscomm.parallel: {node.label}: scale_grad_by_freq and sparse are not in this release"
        )
    indices = _names(len(node.inputs[0].shape), "d")
    return Rule([tuple(indices), (".", "d")], [(*indices, "d")], _elements(node))


# -- reductions


def _reduction(node: Node) -> Rule | None:
    x = node.inputs[0]
    if len(node.inputs) != 1:
        return None
    rank = len(x.shape)
    dim = _argument(node, 1, "axis" if node.operator is not None else "dim")
    if dim is None or (not isinstance(dim, int) and not tuple(dim)):
        dims = list(range(rank))
        if node.name == "ReduceSum" and _attribute(node, "skip_mode"):
            return _pointwise(node)
    else:
        dims = [one % rank for one in ([dim] if isinstance(dim, int) else dim)]
    kind = {"ReduceSum": "sum", "ReduceMean": "mean"}.get(node.name, node.name)
    letters = list(_names(rank))
    if kind not in ("sum", "mean"):  # a largest element of parts is no sum
        letters = ["." if place in dims else letter for place, letter in enumerate(letters)]
    keeps = len(node.outputs[0].shape) == rank
    out = ["." if place in dims else letter for place, letter in enumerate(letters) if keeps or place not in dims]
    rule = Rule([tuple(letters)], [tuple(out)], float(math.prod(x.shape)))
    if kind == "mean":
        reduced = [letters[place] for place in dims]
        rule.compute = lambda context, given: call(node, given) / context.parts(reduced)
    return rule


def _along_one_dim(node: Node) -> Rule:
    """A function that needs the whole of one dimension, such as softmax."""
    x = node.inputs[0]
    dim = _attribute(node, "axis") if node.operator is not None else _argument(node, 1, "dim")
    if dim is None:
        return _whole(node)
    letters = [letter if place != dim % len(x.shape) else "." for place, letter in enumerate(_names(len(x.shape)))]
    return Rule([tuple(letters)], [tuple(letters)], 5 * _elements(node))


def _layer_norm(node: Node) -> Rule:
    x = node.inputs[0]
    normalized = len(_argument(node, 1, "normalized_shape"))
    letters = (*_names(len(x.shape) - normalized), *["."] * normalized)
    others = [(".",) * len(value.shape) for value in node.inputs[1:]]
    return Rule([letters, *others], [letters], 5 * _elements(node))


def _batch_norm(node: Node) -> Rule | None:
    x = node.inputs[0]
    mean, variance, weight, bias = (_argument(node, *one) for one in ((1, ""), (2, ""), (3, "weight"), (4, "bias")))
    training, momentum, eps = (
        _argument(node, *one) for one in ((5, "training", False), (6, "momentum", 0.1), (7, "eps", 1e-5))
    )
    if not all(isinstance(one, Value) for one in (mean, variance, weight, bias)) or len(node.inputs) != 5:
        return None
    if momentum is None:
        return None
    letters = ("a", "c", *["."] * (len(x.shape) - 2))
    rule = Rule([letters, *[("c",)] * 4], [letters], 10 * _elements(node))
    if not training:
        return rule

    def compute(context: Context, given: list[torch.Tensor]) -> torch.Tensor:
        if context.parts("a") == 1:
            return call(node, given)
        return _synchronized(context, given, momentum, eps)

    def sums(parts: Callable[[Sequence[str]], int]) -> list[tuple[str, int]]:
        return [("a", x.shape[1] // parts("c"))] * 2 if parts("a") > 1 else []

    rule.compute, rule.sums = compute, sums
    return rule


def _synchronized(context: Context, given: list[torch.Tensor], momentum: float, eps: float) -> torch.Tensor:
    """Batch normalization whose means and variances are those of all ranks' parts of the batch."""
    given_x, moving_mean, moving_variance, weight, bias = given
    x = given_x.float() if given_x.dtype in (torch.float16, torch.bfloat16) else given_x
    dims = [0, *range(2, x.ndim)]
    count = x.numel() // x.shape[1] * context.parts("a")
    mean = context.total(x.sum(dims) / count, "a")
    centred = x - mean.reshape(1, -1, *[1] * (x.ndim - 2))
    variance = context.total(centred.square().sum(dims) / count, "a")
    with torch.no_grad():
        moving_mean.lerp_(mean.to(moving_mean.dtype), momentum)
        moving_variance.lerp_((variance * (count / max(count - 1, 1))).to(moving_variance.dtype), momentum)
    scale = (weight * torch.rsqrt(variance + eps)).reshape(1, -1, *[1] * (x.ndim - 2))
    return (centred * scale + bias.reshape(1, -1, *[1] * (x.ndim - 2))).to(given_x.dtype)


# -- losses


def _cross_entropy(node: Node) -> Rule | None:
    logits, labels = node.inputs[:2]
    reduction, ignored = _argument(node, 6, "reduction", "mean"), _argument(node, 4, "ignore_index", -100)
    smoothing = _argument(node, 7, "label_smoothing", 0.0)
    if _argument(node, 3, "size_average") is not None or _argument(node, 5, "reduce") is not None:
        return None
    if len(node.inputs) != 2 or len(logits.shape) != 2 or labels.dtype.is_floating_point or smoothing:
        return None
    out: Letters = ("a",) if reduction == "none" else ()

    def compute(context: Context, given: list[torch.Tensor]) -> torch.Tensor:
        if reduction != "mean" or context.parts("a") == 1:
            return call(node, given)
        count = context.total((given[1] != ignored).sum().to(given[0].dtype), "a")
        return functional.cross_entropy(given[0], given[1], ignore_index=ignored, reduction="sum") / count

    def sums(parts: Callable[[Sequence[str]], int]) -> list[tuple[str, int]]:
        return [("a", 1)] if reduction == "mean" and parts("a") > 1 else []

    return Rule([("a", "."), ("a",)], [out], 5.0 * math.prod(logits.shape), compute, sums=sums)


def _mse_loss(node: Node) -> Rule | None:
    if node.inputs[0].shape != node.inputs[1].shape or len(node.inputs) != 2:
        return None
    reduction = _argument(node, 4, "reduction", "mean")
    if _argument(node, 2, "size_average") is not None or _argument(node, 3, "reduce") is not None:
        return None
    letters = tuple(_names(len(node.inputs[0].shape)))
    rule = Rule([letters, letters], [letters if reduction == "none" else ()], 3.0 * math.prod(node.inputs[0].shape))
    if reduction == "mean":
        rule.compute = lambda context, given: call(node, given) / context.parts(letters)
    return rule


def _softmax_cross_entropy(node: Node) -> Rule:
    """The operator SoftmaxCrossEntropyWithLogits: (loss of each row, gradient)."""
    return Rule([("a", "."), ("a", ".")], [("a",), ("a", ".")], 10.0 * math.prod(node.inputs[0].shape))


def _one_hot(node: Node) -> Rule:
    indices = node.inputs[0]
    letters = list(_names(len(indices.shape)))
    axis = _attribute(node, "axis") % (len(indices.shape) + 1)
    return Rule(
        [tuple(letters), *[(".",) * len(value.shape) for value in node.inputs[1:]]],
        [(*letters[:axis], ".", *letters[axis:])],
        _elements(node),
    )


# -- shapes


def _pool(node: Node) -> Rule | None:
    x, out = node.inputs[0].shape, node.outputs[0].shape
    if len(x) != 4 or len(node.outputs) != 1:
        return None
    return Rule([("a", "c", ".", ".")], [("a", "c", ".", ".")], float(math.prod(x)) + math.prod(out))


def _pad(node: Node) -> Rule | None:
    x = node.inputs[0]
    padding = _argument(node, 1, "pad")
    padded = len(padding) // 2
    if len(node.inputs) != 1 or _argument(node, 2, "mode", "constant") != "constant":
        return None
    letters = (*_names(len(x.shape) - padded), *["."] * padded)
    return Rule([letters], [letters], _elements(node))


def _permuted(node: Node) -> Rule | None:
    """transpose, permute and t: find the new place of each dimension by its effect on a tensor of another shape."""
    rank = len(node.inputs[0].shape)
    probe = torch.empty(*range(2, 2 + rank), device="meta")
    letters = _names(rank)
    out = tuple(letters[size - 2] for size in call(node, [probe]).shape)
    return Rule([tuple(letters)], [out], 0.0)


def _reshaped(node: Node) -> Rule | None:
    """reshape, view, flatten, squeeze, unsqueeze: dimensions that are joined or divided keep the letter of the first.

    Both shapes are divided into the shortest runs of dimensions that have the same number of elements.
    """
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if len(node.inputs) != 1 or node.inputs[0].dtype != node.outputs[0].dtype:
        return None
    letters = _names(len(before))
    ins, outs, sizes = ["."] * len(before), ["."] * len(after), {}
    i = j = 0
    while i < len(before) and j < len(after):
        first, second, left, right = i, j, before[i], after[j]
        while left != right:
            if left < right:
                i += 1
                left *= before[i]
            else:
                j += 1
                right *= after[j]
        while first < i and before[first] == 1:
            first += 1
        while second < j and after[second] == 1:
            second += 1
        if before[first] > 1:
            ins[first] = outs[second] = letters[first]
            sizes[letters[first]] = math.gcd(before[first], after[second])
        i, j = i + 1, j + 1

    def compute(context: Context, given: list[torch.Tensor]) -> torch.Tensor:
        shape = [
            size // context.parts(letter) if letter != "." else size for size, letter in zip(after, outs, strict=True)
        ]
        return given[0].reshape(shape)

    return Rule([tuple(ins)], [tuple(outs)], 0.0, compute, sizes)


def _untouched(node: Node) -> Rule | None:
    """Functions that work along one dimension and leave the others as they are: cat, split, chunk."""
    dim = (
        _attribute(node, "axis")
        if node.operator is not None
        else _argument(node, 1 if node.name in ("cat", "concat") else 2, "dim", 0)
    )
    rank = len(node.outputs[0].shape)
    if any(len(value.shape) != rank for value in node.inputs):
        return None
    letters = tuple(letter if place != dim % rank else "." for place, letter in enumerate(_names(rank)))
    return Rule([letters] * len(node.inputs), [letters] * len(node.outputs), 0.0)


_POINTWISE = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "div", "truediv", "rtruediv", "true_divide", "pow", "rpow", "neg"),
    *("abs", "exp", "log", "sqrt", "rsqrt", "square", "sin", "cos", "erf", "reciprocal", "relu", "gelu", "silu"),
    *("sigmoid", "tanh", "softplus", "leaky_relu", "elu", "hardtanh", "relu6", "clamp", "where", "maximum", "minimum"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "float", "double", "half"),
    *("bfloat16", "contiguous", "clone", "detach", "data", "dropout", "zeros_like", "ones_like"),
    *("floor_divide", "floordiv", "Abs", "Exp", "Log", "Neg", "Reciprocal", "Rsqrt", "Sqrt", "Square", "Sin", "Cos"),
    *("Erf", "Tanh", "Sigmoid", "ReLU", "GeLU", "Identity", "LogicalNot", "Add", "Sub", "Mul", "Div", "RealDiv"),
    *("FloorDiv", "Pow", "Maximum", "Minimum", "Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"),
    *("LogicalAnd", "LogicalOr", "Select", "ZerosLike", "OnesLike", "Cast"),
)
_RULES: dict[str, Callable[[Node], Rule | None]] = {
    **dict.fromkeys(_POINTWISE, _pointwise),
    **dict.fromkeys(("type_as", "to", "type"), _first_only),
    **dict.fromkeys(("matmul", "mm", "bmm", "rmatmul", "MatMul", "BatchMatMul"), _matmul),
    "linear": _linear,
    "conv2d": _conv2d,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    **dict.fromkeys(("sum", "mean", "amax", "amin", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"), _reduction),
    **dict.fromkeys(("softmax", "log_softmax", "Softmax", "LogSoftmax"), _along_one_dim),
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "cross_entropy": _cross_entropy,
    "mse_loss": _mse_loss,
    "SoftmaxCrossEntropyWithLogits": _softmax_cross_entropy,
    "OneHot": _one_hot,
    "pad": _pad,
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"), _pool),
    **dict.fromkeys(("transpose", "permute", "t", "T", "mT", "swapaxes", "Transpose"), _permuted),
    **dict.fromkeys(
        ("reshape", "view", "flatten", "squeeze", "unsqueeze", "Reshape", "Flatten", "Squeeze", "ExpandDims"), _reshaped
    ),
    **dict.fromkeys(("cat", "concat", "split", "chunk", "Concat", "Split"), _untouched),
}

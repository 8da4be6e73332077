"""mscomm.Tensor, mscomm.nn, the computing operators of mscomm.ops, and initializers: MindSpore's names over PyTorch.

Expected numbers are computed with NumPy or PyTorch, or follow from MindSpore's documentation.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm

torch = pytest.importorskip("torch")

from mscomm import Parameter, ParameterTuple, Tensor, nn, ops  # noqa: E402
from mscomm.common import initializer as init  # noqa: E402
from mscomm.common.initializer import initializer  # noqa: E402


@pytest.fixture(autouse=True)
def modes() -> Any:
    yield
    mscomm.reset_auto_parallel_context()


def numbers(*shape: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- Tensor and Parameter


def test_a_tensor_is_printed_as_in_the_tutorial() -> None:
    x = Tensor(np.array([[0], [1]]).astype(np.float32))
    assert str(x) == "[[0.],\n [1.]]"
    assert repr(x) == "Tensor(shape=[2, 1], dtype=Float32, value=\n[[0.],\n [1.]])"
    assert f"{Tensor(2.5):.2f}" == "2.50"
    assert str(Tensor([1.5], "bfloat16")) == "[1.5]"


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        (1.0, None, torch.float32),
        ([1.0, 2.0], None, torch.float32),
        (3, None, torch.int64),
        (True, None, torch.bool),
        (np.float64(1), None, torch.float64),
        (np.zeros(2, np.float16), None, torch.float16),
        (np.zeros(2), mscomm.float32, torch.float32),
        (torch.zeros(2), mscomm.int32, torch.int32),
        ([1, 2], torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_of_a_tensor(given: Any, dtype: Any, expected: Any) -> None:
    assert Tensor(given, dtype).dtype is expected


def test_a_tensor_has_a_copy_of_the_numbers() -> None:
    x = np.zeros(2, np.float32)
    made = Tensor(x)
    x[0] = 1
    assert made.asnumpy().tolist() == [0, 0]
    made.asnumpy()[1] = 2
    assert made.tolist() == [0, 2]


@pytest.mark.parametrize("given", ["text", None, [object()]])
def test_a_tensor_of_no_numbers_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="input_data is a"):
        Tensor(given)


def test_functions_of_pytorch_return_a_tensor_for_a_tensor() -> None:
    x = Tensor([1.0, 4.0])
    for made in (x + 1, torch.sqrt(x), x.sum(), x.astype("float64"), *torch.max(x, 0), x.clone(), 2 * x):
        assert type(made) is Tensor
    assert type(copy.deepcopy(x)) is type(pickle.loads(pickle.dumps(x))) is Tensor  # noqa: S301
    leaf = Tensor([1.0]).requires_grad_()
    (leaf * 3).sum().backward()
    assert leaf.grad is leaf.grad and leaf.grad.tolist() == [3.0]


def test_saved_tensors_and_parameters_are_loaded_again(tmp_path: Any) -> None:
    torch.save({"x": Tensor([1.0]), "w": Parameter(2.0, "w"), **nn.BatchNorm2d(1).state_dict()}, tmp_path / "file")
    found = torch.load(tmp_path / "file")
    assert type(found["x"]) is Tensor and found["w"].name == "w"


def test_a_parameter_keeps_its_name_and_attributes() -> None:
    weight = Parameter(Tensor(np.full((2, 3), 0.5, np.float32)), name="fc_weight", layerwise_parallel=True)
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    for one in (weight, copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):  # noqa: S301
        assert (one.name, one.layerwise_parallel, one.asnumpy().tolist()) == ("fc_weight", True, [[0.5] * 3] * 2)
    assert str(weight) == "Parameter (name=fc_weight, shape=(2, 3), dtype=Float32, requires_grad=True)"
    assert weight.set_data(np.ones((2, 3))) is weight and weight.sum() == 6
    with pytest.raises(ValueError, match=r"set_data got the shape \[3\], not \[2, 3\]"):
        weight.set_data(np.ones(3))
    with pytest.raises(TypeError, match=r"dtype torch.int64 has no gradient"):
        Parameter(3)
    assert not Parameter(3, requires_grad=False).requires_grad
    both = ParameterTuple([weight, Parameter(1.0, "b")]).clone("sum", "zeros")
    assert [(one.name, one.sum().item()) for one in both] == [("sum.fc_weight", 0), ("sum.b", 0)]
    with pytest.raises(TypeError, match="an item is a Tensor"):
        ParameterTuple([Tensor(1.0)])


# -- initializers


def test_initializers_draw_what_their_names_say() -> None:
    mscomm.set_seed(5)
    assert initializer("zeros", 3).tolist() == [0, 0, 0] and initializer(2, [2]).tolist() == [2, 2]
    assert initializer(init.One(), [1], "int32").dtype is torch.int32
    x = initializer("normal", [100, 100])
    assert x.std() == pytest.approx(0.01, rel=0.1) and abs(x.mean()) < 1e-3
    bounded = initializer(init.TruncatedNormal(1.0, 0.5, -0.25, 1.5), [1000])
    assert -0.25 <= bounded.min() < 0 and 1 < bounded.max() <= 1.5
    assert 0.06 < initializer("uniform", 1000).abs().max() <= 0.07
    assert 0.19 < initializer("XavierUniform", [100, 50]).max() <= (6 / 150) ** 0.5
    assert initializer("he_normal", [200, 100]).std() == pytest.approx((2 / 100) ** 0.5, rel=0.1)
    assert 0.24 < initializer("he_uniform", [200, 100]).max() <= (6 / 100) ** 0.5
    assert initializer("xavier_normal", [200, 100]).std() == pytest.approx((2 / 300) ** 0.5, rel=0.1)
    given = Tensor([1.0])
    assert initializer(given, [1]).tolist() == [1.0]
    for bad, error in (("no such", ValueError), (None, TypeError)):
        with pytest.raises(error, match="initializer: "):
            initializer(bad, [1])
    for shape in ([0], [-1]):
        with pytest.raises(ValueError, match="expected sizes above 0"):
            initializer("zeros", shape)
    for shape in (["1"], 1.5, None):
        with pytest.raises(TypeError, match="initializer: shape"):
            initializer("zeros", shape)
    assert initializer("zeros", np.array([3, 4])).shape == (3, 4) and initializer("zeros", np.int64(3)).shape == (3,)


def test_all_draws_follow_from_the_seed() -> None:
    def drawn(seed: int) -> list[Any]:
        mscomm.set_seed(seed)
        return [initializer("normal", 2).tolist(), initializer("normal", 2).tolist(), np.random.rand(), torch.rand(1)]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert first == again and first[0] != first[1] and first[0] != other[0] and mscomm.get_seed() == 2
    with pytest.raises(TypeError, match="set_seed: seed is a str"):
        mscomm.set_seed("1")  # type: ignore[arg-type]


def test_two_processes_without_a_seed_begin_with_the_same_weights() -> None:
    program = "from mscomm import nn; print(nn.Dense(3, 2).weight.tolist())"
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1] and b"[[" in runs[0]


# -- operators

X, Y = numbers(3, 4), numbers(3, 4, seed=2)
MATRIX = numbers(4, 5)
LOGITS, CLASSES = numbers(6, 10), np.arange(6)
ONE_HOT = np.eye(10, dtype=np.float32)


def softmax(x: Any) -> Any:
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


# (operator, inputs, expected)
CASES: list[tuple[Any, tuple[Any, ...], Any]] = [
    (ops.Abs(), (X,), np.abs(X)),
    (ops.Exp(), (X,), np.exp(X)),
    (ops.Log(), (np.abs(X),), np.log(np.abs(X))),
    (ops.Neg(), (X,), -X),
    (ops.Reciprocal(), (X,), 1 / X),
    (ops.Rsqrt(), (np.abs(X),), np.abs(X) ** -0.5),
    (ops.Sqrt(), (np.abs(X),), np.abs(X) ** 0.5),
    (ops.Square(), (X,), X * X),
    (ops.Sin(), (X,), np.sin(X)),
    (ops.Cos(), (X,), np.cos(X)),
    (ops.Erf(), (np.float32([0.5]),), [0.5204999]),
    (ops.Tanh(), (X,), np.tanh(X)),
    (ops.Sigmoid(), (X,), 1 / (1 + np.exp(-X))),
    (ops.ReLU(), (X,), np.maximum(X, 0)),
    (ops.GeLU(), (np.float32([1.0]),), [0.841192]),
    (ops.Softmax(), (X,), softmax(X)),
    (ops.Softmax(0), (X,), softmax(X.T).T),
    (ops.LogSoftmax(), (X,), np.log(softmax(X))),
    (ops.Identity(), (X,), X),
    (ops.LogicalNot(), (X > 0,), X <= 0),
    (ops.Add(), (X, Y), X + Y),
    (ops.Add(), (X, 2), X + 2),
    (ops.Sub(), (X, Y), X - Y),
    (ops.Mul(), (2.0, X), 2 * X),
    (ops.Div(), (X, Y), X / Y),
    (ops.RealDiv(), (X, Y), X / Y),
    (ops.FloorDiv(), (X, Y), X // Y),
    (ops.Pow(), (X, 2), X**2),
    (ops.Maximum(), (X, Y), np.maximum(X, Y)),
    (ops.Maximum(), (X, 0.5), np.maximum(X, np.float32(0.5))),
    (ops.Minimum(), (X, Y), np.minimum(X, Y)),
    (ops.Equal(), (np.int32([1, 2]), np.int32([1, 3])), [True, False]),
    (ops.Equal(), (np.int32([1, 2]), 1.5), [False, False]),
    (ops.NotEqual(), (np.int32([1, 2]), 1), [False, True]),
    (ops.Greater(), (X, Y), X > Y),
    (ops.GreaterEqual(), (X, Y), X >= Y),
    (ops.Less(), (X, Y), X < Y),
    (ops.LessEqual(), (X, X), X <= X),
    (ops.LogicalAnd(), (X > 0, Y > 0), (X > 0) & (Y > 0)),
    (ops.LogicalOr(), (X > 0, Y > 0), (X > 0) | (Y > 0)),
    (ops.MatMul(), (X, MATRIX), X @ MATRIX),
    (ops.MatMul(True, True), (X, numbers(5, 3)), X.T @ numbers(5, 3).T),
    (ops.BatchMatMul(transpose_b=True), (numbers(2, 3, 4), numbers(2, 5, 4)),
     numbers(2, 3, 4) @ numbers(2, 5, 4).swapaxes(1, 2)),
    (ops.BiasAdd(), (numbers(2, 3, 4), np.float32([1, 2, 3])), numbers(2, 3, 4) + np.float32([[1], [2], [3]])),
    (ops.ReduceSum(), (X,), X.sum()),
    (ops.ReduceSum(keep_dims=True), (X, -1), X.sum(-1, keepdims=True)),
    (ops.ReduceSum(), (np.int32([2, 3]),), np.int32(5)),
    (ops.ReduceSum(skip_mode=True), (X,), X),
    (ops.ReduceMean(), (X,), X.mean()),
    (ops.ReduceMean(), (X, (0, 1)), X.mean()),
    (ops.ReduceMax(keep_dims=True), (X, -1), X.max(-1, keepdims=True)),
    (ops.ReduceMin(), (X, 0), X.min(0)),
    (ops.ReduceProd(), (X, [0, 1]), X.prod()),
    (ops.ReduceAll(), (X > 0,), False),
    (ops.ReduceAny(), (X > 0, 1), (X > 0).any(1)),
    (ops.Argmax(), (X,), X.argmax(-1)),
    (ops.ArgMaxWithValue(axis=1), (X,), (X.argmax(1), X.max(1))),
    (ops.TopK(), (np.float32([3, 1, 2]), 2), ([3, 2], [0, 2])),
    (ops.Cast(), (X, mscomm.float64), X.astype(np.float64)),
    (ops.Cast(), (3, mscomm.float32), 3.0),
    (ops.Reshape(), (X, (2, -1)), X.reshape(2, -1)),
    (ops.Flatten(), (numbers(2, 3, 4),), numbers(2, 12)),
    (ops.Transpose(), (X, (1, 0)), X.T),
    (ops.ExpandDims(), (X, 1), X[:, None]),
    (ops.Squeeze(), (X[:, None],), X),
    (ops.Squeeze(1), (X[:, None],), X),
    (ops.Tile(), (X, (2, 1)), np.tile(X, (2, 1))),
    (ops.Stack(1), ([X, Y],), np.stack([X, Y], 1)),
    (ops.Concat(1), ((X, Y),), np.concatenate([X, Y], 1)),
    (ops.Split(1, 2), (X,), (X[:, :2], X[:, 2:])),
    (ops.StridedSlice(), (X, (0, 1), (2, 4), (1, 2)), X[0:2, 1:4:2]),
    (ops.Gather(), (X, np.int32([[2, 0]]), 0), X[[[2, 0]]]),
    (ops.Gather(), (X, np.int32([3]), -1), X[:, [3]]),
    (ops.OneHot(), (CLASSES, 10, 1.0, 0.0), ONE_HOT[:6]),
    (ops.OneHot(), (np.int32([7, -1]), 3, np.float32(1), np.float32(0)), np.zeros((2, 3))),
    (ops.OneHot(axis=0), (np.int32([2, 0]), 3, 5.0, 1.0), [[1, 5], [1, 1], [5, 1]]),
    (ops.OneHot(axis=1), (np.int32([[1, 0]]), 2, 1.0, 0.0), [[[0, 1], [1, 0]]]),
    (ops.Select(), (X > 0, X, Y), np.where(X > 0, X, Y)),
    (ops.Fill(), (mscomm.int32, (2, 2), 7), [[7, 7], [7, 7]]),
    (ops.Zeros(), ((2,), mscomm.float32), [0, 0]),
    (ops.Ones(), (2, mscomm.float32), [1, 1]),
    (ops.ZerosLike(), (X,), X * 0),
    (ops.OnesLike(), (X,), X * 0 + 1),
    (ops.SoftmaxCrossEntropyWithLogits(), (LOGITS, ONE_HOT[:6]),
     (-np.log(softmax(LOGITS))[CLASSES, CLASSES], softmax(LOGITS) - ONE_HOT[:6])),
]  # fmt: skip


def of_tensors(x: Any) -> Any:
    if isinstance(x, tuple | list) and any(isinstance(one, np.ndarray) for one in x):
        return type(x)(map(of_tensors, x))
    return Tensor(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
def test_an_operator_computes_what_its_name_says(case: tuple[Any, tuple[Any, ...], Any]) -> None:
    operator, inputs, expected = case
    results = operator(*map(of_tensors, inputs))
    results, expected = (results, expected) if isinstance(results, tuple) else ((results,), (expected,))
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert type(result) is Tensor
        np.testing.assert_allclose(result.asnumpy(), wanted, rtol=2e-6, atol=1e-6)


def test_every_operator_has_a_case() -> None:
    from mscomm.ops import computing

    others = {"Shape", "Rank", "Size", "DType", "Assign", "AssignAdd", "AssignSub"}
    assert {type(operator).__name__ for operator, *_ in CASES} | others == set(computing.__all__)
    assert all(getattr(ops, name).__doc__ for name in computing.__all__)


def test_facts_and_assignments() -> None:
    x = Tensor(X)
    assert (ops.Shape()(x), ops.Rank()(x), ops.Size()(x), ops.DType()(x)) == ((3, 4), 2, 12, torch.float32)
    assert (ops.shape(x), ops.rank(x), ops.size(x), ops.dtype(x)) == ((3, 4), 2, 12, torch.float32)
    w = Parameter(1.0)
    assert ops.AssignAdd()(w, 2.0) is w and w == 3
    assert ops.AssignSub()(w, Tensor(1.0)) is w and w == 2
    assert ops.Assign()(w, 5.0) is w and ops.assign(w, 6.0) is w and w == 6 and w.grad_fn is None
    assert ops.scalar_to_array(-1.0).dtype is torch.float32 and ops.scalar_to_array(-1.0).shape == ()
    assert ops.scalar_to_tensor(1, mscomm.int32).dtype is torch.int32
    assert ops.cast(1, "float16").dtype is ops.cast(x, "float16").dtype is torch.float16
    assert ops.depend(1, None) == 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ops.MatMul(transpose_c=True), TypeError, "MatMul: got an unexpected keyword argument 'transpose_c'"),
        (lambda: ops.MatMul()(Tensor(X)), TypeError, r"MatMul\(\) missing 1 required positional argument: 'y'"),
        (lambda: ops.MatMul()(Tensor(X), Tensor([1.0])), ValueError, "MatMul: y has 1 dimensions; expected 2"),
        (lambda: ops.ReduceSum()(Tensor(X), 2), ValueError, "axis 2 of a tensor with 2 dimensions"),
        (lambda: ops.Squeeze(0)(Tensor(X)), ValueError, "axis 0 has the size 3"),
        (lambda: ops.Split(0, 2)(Tensor(X)), ValueError, "cannot be divided into 2 equal parts"),
        (lambda: ops.Conv3D, AttributeError, "PyTorch has torch.conv3d, which accepts .*/mindspore.ops.Conv3D.html"),
        (
            lambda: ops.NoSuchName,
            AttributeError,
            "has no 'NoSuchName'. What PyTorch has instead: .*pytorch_api_mapping",
        ),
        (lambda: nn.Conv3d, AttributeError, "PyTorch has torch.nn.Conv3d, which"),
    ],
)
def test_what_is_wrong_or_missing_is_said(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_the_loss_of_the_tutorials_and_its_gradient() -> None:
    """SoftmaxCrossEntropyExpand, in the tutorials' steps, equals PyTorch's cross entropy."""
    logit = Tensor(LOGITS).requires_grad_()
    shifted = ops.Sub()(logit, ops.ReduceMax(keep_dims=True)(logit, -1))
    exp = ops.Exp()(shifted)
    softmaxed = ops.RealDiv()(exp, ops.ReduceSum(keep_dims=True)(exp, -1))
    label = ops.OneHot()(Tensor(CLASSES), ops.shape(logit)[1], Tensor(1.0, mscomm.float32), Tensor(0.0, mscomm.float32))
    loss = ops.ReduceSum(keep_dims=False)(ops.Mul()(ops.Log()(softmaxed), label), -1)
    loss = ops.ReduceMean(keep_dims=False)(ops.Mul()(ops.scalar_to_array(-1.0), loss), -1)
    loss.backward()
    x = torch.tensor(LOGITS, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(x, torch.tensor(CLASSES))
    expected.backward()
    np.testing.assert_allclose(loss.asnumpy(), expected.detach(), rtol=1e-6)
    np.testing.assert_allclose(logit.grad, x.grad, rtol=1e-5, atol=1e-7)


# -- shard


def test_shard_keeps_a_strategy_and_warns_where_it_has_no_effect(capfd: pytest.CaptureFixture[str]) -> None:
    matmul = ops.MatMul()
    assert matmul.shard(((2, 4), (4, 1))) is matmul
    assert matmul.in_strategy == ((2, 4), (4, 1))
    matmul(Tensor(X), Tensor(MATRIX))
    assert "MatMul(transpose_a=False, transpose_b=False): shard() has no effect" in capfd.readouterr().err
    for bad, error in (([(1, 1)], TypeError), ((1, 1), TypeError), (((1.0,),), TypeError), (((0, 1),), ValueError)):
        with pytest.raises(error, match=r"MatMul.shard: in_strategy="):
            matmul.shard(bad)  # type: ignore[arg-type]


# -- functions of functions


def test_grad_operation() -> None:
    net = nn.Dense(3, 1, has_bias=False)
    x = Tensor(numbers(2, 3))
    by_x = ops.GradOperation()(net)(x)
    np.testing.assert_allclose(by_x.detach(), np.tile(net.weight.asnumpy(), (2, 1)), rtol=1e-6)
    by_w = ops.GradOperation(get_by_list=True)(net, net.trainable_params())(x)
    np.testing.assert_allclose(by_w[0].detach(), x.asnumpy().sum(0, keepdims=True), rtol=1e-6)
    both = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)(net, net.weight)(x, torch.zeros(2, 1))
    assert [both[0][0].abs().sum(), both[1].abs().sum()] == [0, 0] and len(both[0]) == 1
    with pytest.raises(ValueError, match="needs the weights"):
        ops.GradOperation(get_by_list=True)(net)


def test_gradients_of_gradients() -> None:
    cube = ops.GradOperation()(lambda x: x**3)
    again = ops.GradOperation()(lambda x: cube(x) + x)
    assert again(Tensor(2.0)).item() == 13
    assert ops.GradOperation()(lambda x: (x * 2, x * 3))(Tensor(1.0)).item() == 5
    assert ops.GradOperation(get_all=True)(lambda x, n: x * n)(Tensor(1.0), 4)[0].item() == 4
    assert ops.GradOperation()(lambda x: Tensor(1.0))(Tensor(2.0)).item() == 0

    class Penalty(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = Parameter(3.0, "w")

        def construct(self, x: Any) -> Any:
            slope = ops.GradOperation()(lambda x: self.w * x * x)(x)
            return (slope**2).sum()

    net = Penalty()
    nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 1.0))(Tensor(1.0))
    assert net.w.item() == 3 - 2 * (2 * 3 * 1) * 2  # the derivative of (2 w x)^2 by w


def test_hyper_map_and_functions_of_several_types() -> None:
    add = ops.MultitypeFuncGraph("add")

    @add.register("Tensor", "Tensor")
    def _tensors(x: Any, y: Any) -> Any:
        return x + y

    @add.register("Number", "Tensor")
    def _number(x: Any, y: Any) -> Any:
        return y * x

    one, two = Tensor(1.0), Tensor(2.0)
    assert ops.HyperMap()(add, (one, (two,)), (two, (two,))) == (3, (4,))
    assert ops.HyperMap(add)((one,), (two,)) == (3,)
    assert ops.HyperMap()(ops.partial(add, 3), (one, two)) == (3, 6)
    with pytest.raises(TypeError, match=r"add: no implementation is registered for \(bool, Tensor\)"):
        add(True, one)
    with pytest.raises(ValueError, match="equally long"):
        ops.HyperMap(add)((one,), (one, two))
    with pytest.raises(ValueError, match="'Tensr' is not one of"):
        add.register("Tensr")


# -- cells


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(initializer("normal", [3, 4]), "w")
        self.matmul = ops.MatMul()
        self.layers = nn.SequentialCell(nn.ReLU(), nn.Dense(4, 2))
        self.free = Parameter(Tensor(1.0), requires_grad=False)

    def construct(self, x: Any) -> Any:
        return self.layers(self.matmul(x, self.weight)) * self.free


def test_a_cell_is_a_module_with_mindspores_methods() -> None:
    net = Net()
    assert [one.name for one in net.get_parameters()] == ["w", "free", "layers.1.weight", "layers.1.bias"]
    assert [one.name for one in net.trainable_params()] == ["w", "layers.1.weight", "layers.1.bias"]
    assert [one.name for one in net.untrainable_params()] == ["free"]
    assert list(net.parameters_dict()) == [name for name, _ in net.parameters_and_names()] == list(net.state_dict())
    assert net.matmul.instance_name == "matmul"
    assert (net.training, net.set_train().training, net.layers[1].training) == (False, True, True)
    assert net.set_train(False).set_grad().add_flags(defer_inline=True).defer_inline
    assert net(Tensor(numbers(5, 3))).shape == (5, 2)
    assert dict(net.name_cells()) == {"layers": net.layers} and list(net.cells()) == [net.layers]
    assert [name for name, _ in net.cells_and_names()] == ["", "layers", "layers.0", "layers.1"]
    net.insert_child_to_cell("extra", nn.Flatten())
    net.insert_param_to_cell("more", Parameter(1.0))
    assert net.more.name == "more" and "extra" in net.name_cells()
    with pytest.raises(NotImplementedError, match=r"Cell does not define construct\(\)"):
        nn.Cell()(1)
    relu, dropout = nn.ReLU(), torch.nn.Dropout(0.5)
    twice = nn.SequentialCell(relu, nn.Dense(1, 1, init.One(), init.Constant(-3), activation="neg"), relu)
    assert twice(Tensor([[2.0]])).item() == 1 and twice[2] is relu and len(twice[:2]) == len(list(twice[:2])) == 2
    assert not nn.SequentialCell({"only": dropout}).only.training
    for wrong in ((ops.ReLU(),), ([relu, ops.ReLU()],)):
        with pytest.raises(TypeError, match="is a ReLU; expected a cell"):
            nn.SequentialCell(*wrong)
    cells = nn.CellList([nn.ReLU(), nn.ReLU()]).append(nn.Tanh())
    assert len(cells) == len(list(cells)) == 3
    with pytest.raises(NotImplementedError, match="not the list"):
        cells(1)


@pytest.mark.parametrize(("size", "kernel", "stride"), [(7, 3, 2), (8, 3, 2), (8, 2, 1), (9, 5, 3), (6, 1, 2)])
def test_the_mode_same_pads_to_the_size_divided_by_the_stride(size: int, kernel: int, stride: int) -> None:
    """The values are those of the definition: padding is split, and an odd row is added at the end."""
    x = torch.tensor(numbers(2, 3, size, size))
    needed = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    sides = (needed // 2, needed - needed // 2) * 2
    conv = nn.Conv2d(3, 4, kernel, stride, has_bias=True)
    expected = torch.nn.functional.conv2d(torch.nn.functional.pad(x, sides), conv.weight, conv.bias, stride)
    assert expected.shape[-1] == -(-size // stride)
    torch.testing.assert_close(conv(x), expected)
    padded = torch.nn.functional.pad(x, sides, value=-torch.inf)
    torch.testing.assert_close(
        nn.MaxPool2d(kernel, stride, "same")(x), torch.nn.functional.max_pool2d(padded, kernel, stride)
    )


def test_other_layers_against_pytorchs() -> None:
    x = torch.tensor(numbers(4, 3, 8, 8))
    conv = nn.Conv2d(3, 6, 3, 1, "pad", 1, group=3)
    torch.testing.assert_close(conv(x), torch.nn.functional.conv2d(x, conv.weight, padding=1, groups=3))
    assert nn.Conv2d(3, 6, 3, pad_mode="valid")(x).shape == (4, 6, 6, 6)
    torch.testing.assert_close(nn.AvgPool2d(2, 2)(x), torch.nn.functional.avg_pool2d(x, 2, 2))
    ours, theirs = nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
    torch.testing.assert_close(ours.set_train()(x), theirs(x))
    torch.testing.assert_close(ours.moving_mean, theirs.running_mean)
    torch.testing.assert_close(ours.moving_variance, theirs.running_var)
    torch.testing.assert_close(ours.set_train(False)(x), theirs.eval()(x))
    assert nn.BatchNorm2d(3, use_batch_statistics=True)(x).mean().abs() < 1e-6
    assert nn.Flatten()(x).shape == (4, 192)
    for cell, function in ((nn.ReLU, torch.relu), (nn.Sigmoid, torch.sigmoid), (nn.Tanh, torch.tanh)):
        torch.testing.assert_close(cell()(x), function(x))
    torch.testing.assert_close(nn.Softmax(1)(x), torch.softmax(x, 1))
    torch.testing.assert_close(nn.GELU(False)(x), torch.nn.functional.gelu(x))
    dense = nn.Dense(8, 2, activation=nn.ReLU())
    torch.testing.assert_close(dense(x), torch.relu(torch.nn.functional.linear(x, dense.weight, dense.bias)))
    dropout = nn.Dropout(keep_prob=0.25)
    assert torch.equal(dropout(x), x) and (dropout.set_train()(x) == 0).float().mean() == pytest.approx(0.75, abs=0.1)
    for make, text in (
        (lambda: nn.Conv2d(1, 1, 1, pad_mode="full"), 'expected "same", "valid" or "pad"'),
        (lambda: nn.MaxPool2d(2, 2, padding=1), 'padding=1 needs pad_mode="pad"'),
        (lambda: nn.Dropout(0), "p=1; expected"),
    ):
        with pytest.raises(ValueError, match=text):
            make()


def test_losses() -> None:
    x, y = Tensor(X), Tensor(Y)
    assert nn.MSELoss()(x, y).item() == pytest.approx(((X - Y) ** 2).mean(), rel=1e-6)
    assert nn.L1Loss("sum")(x, y).item() == pytest.approx(np.abs(X - Y).sum(), rel=1e-6)
    for sparse, labels in ((True, Tensor(CLASSES.astype(np.int32))), (False, Tensor(ONE_HOT[:6]))):
        losses = nn.SoftmaxCrossEntropyWithLogits(sparse)(Tensor(LOGITS), labels)
        np.testing.assert_allclose(losses.asnumpy(), -np.log(softmax(LOGITS))[CLASSES, CLASSES], rtol=1e-5)
    with pytest.raises(ValueError, match=r"MSELoss: logits have the shape \[3, 4\], labels \[3\]"):
        nn.MSELoss()(x, Tensor([1.0, 2, 3]))
    with pytest.raises(ValueError, match="reduction='max'; expected"):
        nn.MSELoss("max")


# -- optimizers


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda p: nn.Momentum(p, 0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (lambda p: nn.Momentum(p, 0.1, 0.9, use_nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
        (lambda p: nn.SGD(p, weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
        (lambda p: nn.Adam(p), lambda p: torch.optim.Adam(p)),
    ],
    ids=["momentum", "nesterov", "sgd", "adam"],
)
def test_an_optimizer_called_with_gradients_steps_as_pytorchs(ours: Any, theirs: Any) -> None:
    mine, other = Parameter(Tensor(X), "w"), torch.nn.Parameter(torch.tensor(X))
    optimizer, reference = ours(iter([mine])), theirs([other])
    for seed in range(3):
        gradient = torch.tensor(numbers(3, 4, seed=seed))
        assert optimizer((gradient,))
        other.grad = gradient
        reference.step()
    torch.testing.assert_close(mine.detach().as_subclass(torch.Tensor), other.detach())
    with pytest.raises(ValueError, match="got 2 gradients for 1 parameters"):
        optimizer((gradient, gradient))


def test_a_learning_rate_for_each_step_is_resumed() -> None:
    def steps(optimizer: Any, w: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer((torch.ones(1),))
            found.append(round(w.item(), 4))
        return found

    w = Parameter(Tensor([0.0]), "w")
    optimizer = nn.Momentum([w], Tensor([0.1, 0.2, 0.3]), 0.0)
    assert steps(optimizer, w, 2) == [-0.1, -0.3]
    other = nn.Momentum([w], [0.1, 0.2, 0.3], 0.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps(other, w, 2) == [-0.6, -0.9]


def test_weight_decay_leaves_out_gamma_and_beta() -> None:
    net = nn.SequentialCell(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    decayed, other = nn.Momentum(net.trainable_params(), 0.1, 0.9, weight_decay=0.5).param_groups
    assert [one.name for one in decayed["params"]] == ["0.weight"] and decayed["weight_decay"] == 0.5
    assert [one.name for one in other["params"]] == ["1.gamma", "1.beta"] and other["weight_decay"] == 0
    groups = nn.SGD([{"params": [net[0].weight], "lr": 0.5}, {"params": [net[1].gamma]}], 0.25, weight_decay=0.1)
    assert [(group["lr"], group["weight_decay"]) for group in groups.param_groups] == [(0.5, 0.1), (0.25, 0.1)]


def test_gradients_belong_to_the_parameters_in_the_order_in_which_these_were_given() -> None:
    gamma, w = Parameter(Tensor([1.0]), "gamma"), Parameter(Tensor([1.0]), "w")
    for params in ([gamma, w], [{"params": [w]}, {"params": [gamma]}, {"order_params": [gamma, w]}]):
        gamma.set_data([1.0]), w.set_data([1.0])
        optimizer = nn.Momentum(params, 1.0, 0.0, weight_decay=0.5 if params[0] is gamma else 0.0)
        assert list(optimizer.parameters) == [gamma, w]
        optimizer((torch.ones(1), torch.full((1,), 5.0)))
        assert (gamma.item(), w.item()) == (0.0, -4.5 if params[0] is gamma else -4.0)
    schedule = nn.SGD([{"params": [w], "lr": 0.5}, {"params": [gamma]}], [0.1, 0.2])
    for _ in range(2):
        schedule((torch.zeros(1), torch.zeros(1)))
    assert [group["lr"] for group in schedule.param_groups] == [0.5, 0.2]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p: nn.Momentum([], 0.1, 0.9), ValueError, "there are no parameters"),
        (lambda p: nn.Momentum(p, -1, 0.9), ValueError, "expected numbers from 0"),
        (lambda p: nn.Momentum(p, None, 0.9), TypeError, "learning_rate is a NoneType"),
        (lambda p: nn.Momentum(p, 0.1, 0.9, loss_scale=2.0), NotImplementedError, "only 1.0 is in mscomm"),
    ],
)
def test_invalid_arguments_of_an_optimizer(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make([Parameter(1.0)])


# -- training


def trained_by(mode: str) -> list[float]:
    """Train on two batches, by Model or by TrainOneStepCell. Return the weights."""
    mscomm.set_seed(3)
    net = Net()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    batches = [(numbers(4, 3, seed=i), numbers(4, 2, seed=i + 9)) for i in range(2)]
    if mode == "Model":
        mscomm.Model(net, nn.MSELoss(), optimizer).train(1, batches)
    else:
        step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
        losses = [step(Tensor(x), Tensor(y)) for x, y in batches]
        assert len(losses) == 2 and step.network.backbone_network is net
    return [round(x, 6) for one in net.parameters() for x in one.flatten().tolist()]


def test_model_and_the_training_cell_take_the_same_steps() -> None:
    assert trained_by("Model") == trained_by("cell")


@ranks(2)
def test_two_ranks_train_one_model_by_the_training_cell(rank, group):
    mscomm.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = nn.Dense(3, 1)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.1, 0.9))
    x, y = numbers(4, 3), numbers(4, 1, seed=2)
    for _ in range(3):
        step(Tensor(np.split(x, 2)[rank]), Tensor(np.split(y, 2)[rank]))
    mine = mscomm.all_gather(net.weight.detach())
    assert torch.equal(mine[0], mine[1])


@ranks(2)
def test_model_keeps_layerwise_parallel_parameters_for_each_rank(rank, group):
    class Both(nn.Cell):
        def __init__(self):
            super().__init__()
            self.shared = Parameter(Tensor(np.ones((3, 1), np.float32)), "shared")
            self.own = Parameter(Tensor(np.full((3, 1), rank, np.float32)), "own", layerwise_parallel=True)

        def construct(self, x):
            return ops.MatMul()(x, self.shared) + ops.MatMul()(x, self.own)

    mscomm.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    net = Both()
    model = mscomm.Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9))
    batches = [(numbers(4, 3, seed=rank), numbers(4, 1, seed=rank + 5))]
    model.train(2, batches)
    model.train(3, batches, initial_epoch=2)  # the optimizer has a state, of which each rank keeps a part for itself
    shared = mscomm.all_gather(net.shared.detach().reshape(1, 3))
    own = mscomm.all_gather(net.own.detach().reshape(1, 3))
    assert torch.equal(shared[0], shared[1]) and not torch.equal(own[0], own[1])
    assert not torch.equal(own[rank], torch.full((3,), float(rank)))  # it was trained, by this rank's gradients


@ranks(2)
def test_hybrid_parallel_trains_a_network_that_divides_a_layer_itself(rank, group):
    """Each rank has half of the columns of the first layer and half of the rows of the second one."""

    class Halves(nn.Cell):
        def __init__(self, up, down, size):
            super().__init__()
            half = slice(rank * 4, rank * 4 + 4) if size == 2 else slice(None)
            self.up = Parameter(Tensor(up[:, half]), "up", layerwise_parallel=size == 2)
            self.down = Parameter(Tensor(down[half]), "down", layerwise_parallel=size == 2)
            self.out = Parameter(Tensor(np.ones((3, 1), np.float32)), "out")
            self.matmul = ops.MatMul()
            self.sum = ops.AllReduce() if size == 2 else ops.Identity()

        def construct(self, x):
            hidden = self.matmul(ops.ReLU()(self.matmul(x, self.up)), self.down)
            return self.matmul(self.sum(hidden), self.out)

    up, down, batches = (
        numbers(3, 8),
        numbers(8, 3),
        [(numbers(4, 3, seed=i), numbers(4, 1, seed=i + 9)) for i in range(3)],
    )
    nets = []
    for mode, size in (("stand_alone", 1), ("hybrid_parallel", 2)):
        mscomm.set_auto_parallel_context(parallel_mode=mode, gradients_mean=True)
        net = Halves(up, down, size)
        # Both ranks have the same loss, and the gradient of AllReduce is the sum over both: half of the rate fits.
        rate = 0.1 if size == 1 else 0.05
        groups = [{"params": [net.up, net.down], "lr": rate}, {"params": [net.out]}]
        mscomm.Model(net, nn.MSELoss(), nn.SGD(groups, 0.1)).train(2, batches)
        mscomm.reset_auto_parallel_context()
        nets.append(net)
    whole, parts = nets
    half = slice(rank * 4, rank * 4 + 4)
    np.testing.assert_allclose(parts.up.asnumpy(), whole.up.asnumpy()[:, half], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts.down.asnumpy(), whole.down.asnumpy()[half], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts.out.asnumpy(), whole.out.asnumpy(), rtol=1e-4, atol=1e-6)


# -- communication operators in cells


@ranks(2)
def test_gradients_flow_through_communication_operators(rank, group):
    def gradient(operator, size=2, weights=None):
        x = Tensor(np.arange(size, dtype=np.float32) + rank).requires_grad_()
        result = operator(x)
        assert type(result) is Tensor
        scale = torch.arange(1.0, result.numel() + 1).reshape(result.shape) * (rank + 1)
        (result * scale).sum().backward()
        return x.grad.tolist()

    assert gradient(ops.AllReduce()) == [3, 6]  # the sum of [1, 2] and [2, 4]
    assert gradient(ops.AllReduce("avg")) == [1.5, 3]
    assert gradient(ops.AllReduce("max")) == ([0, 0] if rank == 0 else [3, 6])  # rank 1 has the larger numbers
    assert gradient(ops.AllGather()) == ([3, 6] if rank == 0 else [9, 12])
    assert gradient(ops.ReduceScatter()) == [1, 2]  # each element goes to one rank, whose factor is its rank + 1
    assert gradient(ops.ReduceScatter("avg")) == [0.5, 1]
    assert gradient(ops.AlltoAll(2, 0, 0)) == ([1, 2] if rank == 0 else [2, 4])
    with pytest.raises(NotImplementedError, match="Broadcast: no gradient flows through this operator"):
        gradient(ops.Broadcast(0))
    with pytest.raises(NotImplementedError, match=r"AllReduce\('prod'\): no gradient"):
        gradient(ops.AllReduce("prod"))
    x = Tensor([1.0]).requires_grad_()
    (first,) = torch.autograd.grad(ops.AllReduce()(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|once_differentiable|does not require grad"):
        first.sum().backward()
    assert all(one.requires_grad for one in (ops.AllReduce()(x), ops.AllGather()(x)))
    with pytest.raises(NotImplementedError, match="Broadcast: no gradient"):
        ops.Broadcast(0)((x,))[0].sum().backward()
    with torch.no_grad():
        assert not ops.AllReduce()(Tensor([1.0]).requires_grad_()).requires_grad


def test_without_torch_the_message_says_what_to_install() -> None:
    program = """
import sys
sys.modules["torch"] = None
import mscomm, mscomm.ops
assert mscomm.ops.AllReduce().op == "sum"
for of, name in ((mscomm, "Tensor"), (mscomm, "nn"), (mscomm.ops, "MatMul")):
    try:
        getattr(of, name)
    except ImportError as error:
        assert "need PyTorch: pip install torch" in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_training_cells_refuse() -> None:
    net = nn.Dense(1, 1)
    optimizer = nn.SGD(net.trainable_params())
    with pytest.raises(ValueError, match="sens=0"):
        nn.TrainOneStepCell(net, optimizer, 0)
    mscomm.set_auto_parallel_context(parallel_mode="auto_parallel")
    with pytest.raises(NotImplementedError, match="TrainOneStepCell: not in the parallel mode auto_parallel"):
        nn.TrainOneStepCell(net, optimizer)
    mscomm.reset_auto_parallel_context()
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True)
    with pytest.raises(ValueError, match=r"the loss has the shape \[2\]; it must be one number"):
        mscomm.Model(net, loss, optimizer).train(1, [(np.ones((2, 1), np.float32), np.zeros(2, np.int32))])
    with pytest.raises(ValueError, match=r"logits and labels \[2, 1\] and \[2, 1\]; expected \(N, C\) and \(N\)"):
        loss(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(NotImplementedError, match=r"ReLU\.shard: out_strategy is not in this release"):
        ops.ReLU().shard(((1,),), ((1,),))

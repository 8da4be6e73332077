"""MindSpore's names in mscomm (operators, functions, module paths): results, arguments, and what a name refers to."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import context, ops
from mscomm.communication import GlobalComm, comm_func, management
from mscomm.job import resolve
from mscomm.ops import ReduceOp


def rows(rank: int, count: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3) + 100 * rank


# --- operators ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_all_reduce_combines(rank, group):
    x = np.float32([1, 2]) + rank
    assert (ops.AllReduce()(x) == [3, 5]).all()
    for op, expected in {
        ReduceOp.SUM: [3, 5],
        ReduceOp.MAX: [2, 3],
        ReduceOp.MIN: [1, 2],
        ReduceOp.PROD: [2, 6],
        ReduceOp.AVG: [1.5, 2.5],
    }.items():
        assert (ops.AllReduce(op=op, group="hccl_world_group")(x) == expected).all()
    assert (ops.AllReduce(ReduceOp.BXOR)(np.array([6]) + rank) == [6 ^ 7]).all()


@ranks(2)
def test_all_gather_joins(rank, group):
    assert np.array_equal(ops.AllGather()(rows(rank)), np.concatenate([rows(0), rows(1)]))


@ranks(2)
def test_broadcast_takes_a_tuple_or_an_array(rank, group):
    operator = ops.Broadcast(root_rank=1)
    assert np.array_equal(operator(rows(rank)), rows(1))
    came = operator((rows(rank), np.array([rank])))
    assert isinstance(came, tuple)
    assert np.array_equal(came[0], rows(1))
    assert came[1] == [1]
    assert operator(()) == ()


@ranks(2)
def test_barrier_is_a_call_of_every_rank(rank, group):
    before = resolve(None).core.where()[0]
    assert ops.Barrier()() is None
    assert resolve(None).core.where()[0] == before + 1


@ranks(2)
def test_reduce_scatter_divides_axis_0(rank, group):
    assert np.array_equal(ops.ReduceScatter(ReduceOp.SUM)(rows(rank)), (rows(0) + rows(1))[2 * rank : 2 * rank + 2])
    with pytest.raises(ValueError, match="reduce_scatter"):
        ops.ReduceScatter()(rows(rank, 3))


@ranks(2)
def test_reduce_gives_the_result_to_one_rank(rank, group):
    came = ops.Reduce(1, op=ReduceOp.MAX)(rows(rank))
    assert np.array_equal(came, rows(1)) if rank == 1 else came is None


@ranks(2)
def test_collective_gather_gives_all_rows_to_one_rank(rank, group):
    came = ops.CollectiveGather(dest_rank=0)(rows(rank))
    assert np.array_equal(came, np.concatenate([rows(0), rows(1)])) if rank == 0 else came is None


@ranks(2)
def test_collective_scatter_deals_the_rows_of_one_rank(rank, group):
    assert np.array_equal(ops.CollectiveScatter(src_rank=1)(rows(rank)), rows(1)[2 * rank : 2 * rank + 2])


@ranks(2)
def test_all_to_all_splits_one_axis_and_joins_another(rank, group):
    def x(rank: int) -> np.ndarray[Any, Any]:
        return np.arange(2 * 4 * 6).reshape(2, 4, 6) + 1000 * rank

    for split_dim in range(3):
        for concat_dim in range(3):
            came = ops.AlltoAll(2, split_dim, concat_dim)(x(rank))
            expected = [np.split(x(source), 2, split_dim)[rank] for source in range(2)]
            assert np.array_equal(came, np.concatenate(expected, concat_dim)), (split_dim, concat_dim)


@ranks(2)
def test_all_to_all_refuses_what_does_not_fit_before_anything_is_sent(rank, group):
    before = resolve(None).core.where()[0]
    for operator, shape, message in [
        (ops.AlltoAll(3, 0, 0), (6,), "split_count is 3, the group has 2 ranks"),
        (ops.AlltoAll(2, 1, 0), (6,), "split_dim is 1"),
        (ops.AlltoAll(2, 0, 2), (6, 2), "concat_dim is 2"),
        (ops.AlltoAll(2, -1, 0), (6,), "split_dim is -1"),
        (ops.AlltoAll(2, 1, 0), (2, 3), r"axis 1 of \(2, 3\) cannot be divided"),
    ]:
        with pytest.raises(ValueError, match=message):
            operator(np.zeros(shape))
    with pytest.raises(TypeError, match=r"AlltoAll: x is a list.*np\.asarray"):
        ops.AlltoAll(2, 0, 0)([1, 2])
    assert resolve(None).core.where()[0] == before


@ranks(2)
def test_send_and_receive_match_by_tag(rank, group):
    if rank == 0:
        ops.Send(sr_tag=7, dest_rank=1)(rows(0))
    else:
        came = ops.Receive(sr_tag=7, src_rank=0, shape=[4, 3], dtype=np.float32)()
        assert np.array_equal(came, rows(0))


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(name), reason="not installed"))
        for name in ("mindspore", "torch")
    ],
)
@ranks(2)
def test_receive_takes_a_dtype_of_another_library(rank, group, library):
    if rank == 0:
        ops.Send(sr_tag=0, dest_rank=1)(np.arange(3, dtype=np.float16))
    else:
        dtype = importlib.import_module(library).float16
        came = ops.Receive(sr_tag=0, src_rank=0, shape=[3], dtype=dtype)()
        assert came.dtype == np.float16 and came.tolist() == [0, 1, 2]


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: ops.AllReduce(op=1), TypeError, "AllReduce: op is a int; expected one of sum, max, min, prod"),
        (lambda: ops.AllReduce("total"), ValueError, "AllReduce: op 'total' is not one of sum, max"),
        (lambda: ops.ReduceScatter(op=None), TypeError, "ReduceScatter: op is a NoneType"),
        (lambda: ops.Reduce(0, "total"), ValueError, "Reduce: op 'total' is not one of"),
        (lambda: ops.AllGather(group=1), TypeError, "AllGather: group is a int; expected the name of a group"),
        (lambda: ops.Barrier(group=[0, 1]), TypeError, "Barrier: group is a list"),
        (lambda: ops.Broadcast("0"), TypeError, "Broadcast: root_rank is a str; expected an int"),
        (lambda: ops.Broadcast(True), TypeError, "Broadcast: root_rank is a bool"),
        (lambda: ops.Reduce(1.0), TypeError, "Reduce: dest_rank is a float"),
        (lambda: ops.CollectiveGather(None), TypeError, "CollectiveGather: dest_rank is a NoneType"),
        (lambda: ops.CollectiveScatter("0"), TypeError, "CollectiveScatter: src_rank is a str"),
        (lambda: ops.AlltoAll(2.0, 0, 0), TypeError, "AlltoAll: split_count is a float"),
        (lambda: ops.AlltoAll(2, "0", 0), TypeError, "AlltoAll: split_dim is a str"),
        (lambda: ops.AlltoAll(2, 0, None), TypeError, "AlltoAll: concat_dim is a NoneType"),
        (lambda: ops.Send("7", 1), TypeError, "Send: sr_tag is a str"),
        (lambda: ops.Send(7, 1, group_back=3), TypeError, "Send: group_back is a int"),
        (lambda: ops.Receive(0, 0, 4, np.float32), TypeError, "Receive: shape is a int"),
        (lambda: ops.Receive(0, 0, [2.5], np.float32), TypeError, "Receive: an element of shape is a float"),
    ],
)
def test_wrong_arguments_are_refused_where_the_operator_is_made(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_operators_can_be_made_before_init_and_say_then_what_to_do():
    operator = ops.AllGather()
    with pytest.raises(RuntimeError, match=r"mscomm\.init\(\)"):
        operator(np.ones(1))


def test_what_an_operator_was_made_with_can_be_read():
    operator = ops.AllReduce(ReduceOp.MAX, "nccl_world_group")
    assert (operator.op, operator.group) == ("max", "nccl_world_group")


# --- functions ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_comm_func_returns_the_result(rank, group):
    assert np.array_equal(comm_func.all_reduce(rows(rank), ReduceOp.SUM), rows(0) + rows(1))
    assert np.array_equal(comm_func.all_gather_into_tensor(rows(rank)), np.concatenate([rows(0), rows(1)]))
    assert np.array_equal(comm_func.broadcast(rows(rank), src=1), rows(1))
    assert comm_func.barrier() is None


@ranks(2)
def test_comm_func_refuses_ranks_that_are_not_in_the_group(rank, group):
    with pytest.raises(ValueError, match=r"broadcast: src=2 is not in group world, which has the ranks 0, 1 of the"):
        comm_func.broadcast(rows(rank), src=2)
    with pytest.raises(TypeError, match="broadcast: src is a str"):
        comm_func.broadcast(rows(rank), src="0")


@ranks(2)
def test_comm_func_has_the_rooted_functions(rank, group):
    own, both = slice(2 * rank, 2 * rank + 2), np.concatenate([rows(0), rows(1)])
    assert np.array_equal(comm_func.reduce_scatter_tensor(rows(rank)), (rows(0) + rows(1))[own])
    assert np.array_equal(comm_func.scatter_tensor(rows(rank), src=1), rows(1)[own])
    reduced, gathered = comm_func.reduce(rows(rank), 1), comm_func.gather_into_tensor(rows(rank), 1)
    if rank == 1:
        assert np.array_equal(reduced, rows(0) + rows(1))
        assert np.array_equal(gathered, both)
    else:
        assert reduced is gathered is None


@ranks(2)
def test_comm_func_sends_and_receives(rank, group):
    if rank == 0:
        comm_func.send(rows(0), dst=1, tag=3)
    else:
        assert np.array_equal(comm_func.recv(np.empty((4, 3), np.float32), src=0, tag=3), rows(0))


@ranks(3)
def test_comm_func_counts_ranks_in_the_world_and_operators_in_the_group(rank, group):
    if rank > 0:
        mscomm.create_group("upper", [1, 2])
        assert np.array_equal(comm_func.broadcast(rows(rank), src=2, group="upper"), rows(2))
        assert np.array_equal(ops.Broadcast(1, group="upper")(rows(rank)), rows(2))
        with pytest.raises(ValueError, match="src=0 is not in group upper"):
            comm_func.broadcast(rows(rank), src=0, group="upper")
        mscomm.destroy_group("upper")


# --- module paths ---------------------------------------------------------------------------------------------------

HANDED_ON = [name for name, value in vars(management).items() if inspect.isfunction(value) and name[0] != "_"]


def test_what_is_handed_on_is_what_mindspore_has_there():
    assert {"init", "release", "get_rank", "create_group", "destroy_group", "get_process_group_ranks"} <= {*HANDED_ON}


@pytest.mark.parametrize("path", ["mscomm.communication", "mscomm.communication.management"])
@pytest.mark.parametrize("name", HANDED_ON)
def test_a_name_under_mindspores_path_is_the_same_object(path, name):
    assert getattr(importlib.import_module(path), name) is getattr(mscomm, name)


@pytest.mark.parametrize("name", ["set_context", "get_context", "set_ps_context", "GRAPH_MODE", "PYNATIVE_MODE"])
def test_the_context_is_that_of_mscomm(name):
    assert getattr(context, name) is getattr(mscomm, name)


@pytest.mark.parametrize("path", ["mscomm.communication", "mscomm.communication.management"])
def test_a_name_that_is_not_there_is_an_attribute_error(path):
    with pytest.raises(AttributeError, match="get_rnak"):
        _ = importlib.import_module(path).get_rnak


def test_the_modules_are_there_after_a_bare_import():
    for name in ("ops", "communication", "context"):
        assert getattr(mscomm, name) is importlib.import_module(f"mscomm.{name}")
        assert name in dir(mscomm)


def test_every_name_of_the_world_is_the_world():
    mscomm.init()
    try:
        for name in ("HCCL_WORLD_COMM_GROUP", "NCCL_WORLD_COMM_GROUP", "MCCL_WORLD_COMM_GROUP"):
            assert resolve(getattr(management, name)) is resolve(None)
        assert resolve(GlobalComm.WORLD_COMM_GROUP) is resolve(None)
    finally:
        mscomm.release()


def test_global_comm_says_how_it_is_now():
    assert GlobalComm.INITED is False
    with pytest.raises(RuntimeError, match=r"mscomm\.init\(\)"):
        _ = GlobalComm.BACKEND
    mscomm.init()
    try:
        assert GlobalComm.INITED is True
        assert mscomm.get_backend() == GlobalComm.BACKEND
    finally:
        mscomm.release()
    with pytest.raises(AttributeError):
        GlobalComm.INITED = True


@pytest.mark.parametrize("module", [ops, comm_func])
def test_every_operator_and_function_says_what_it_is(module):
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_"):
            words = inspect.getdoc(value)
            # For a dataclass without a docstring, Python makes a docstring that begins with the class's name and "(".
            assert words and not words.startswith(f"{name}(")


# --- context --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_context(monkeypatch):
    monkeypatch.setattr(context, "_context", dict(context._context))
    context.reset_ps_context()
    yield
    context.reset_ps_context()


def test_context_takes_what_the_tutorials_set(fresh_context):
    context.set_context(mode=context.PYNATIVE_MODE, device_target="CPU", device_id=3, save_graphs=2)
    assert (context.get_context("mode"), context.get_context("device_id")) == (context.PYNATIVE_MODE, 3)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": 2}, "mode=2 is neither GRAPH_MODE nor PYNATIVE_MODE"),
        ({"colour": 1}, "'colour' is not one of mode, device_target"),
        ({"device_target": "TPU"}, "device_target='TPU' is not one of CPU, GPU, Ascend"),
    ],
)
def test_a_wrong_option_is_refused_and_nothing_is_set(fresh_context, option, message):
    with pytest.raises((ValueError, mscomm.BackendUnavailable), match=message):
        context.set_context(device_id=5, **option)
    assert context.get_context("device_id") == 0


def test_only_an_explicit_false_permits_plain_links(fresh_context):
    context.set_ps_context(client_password="123456")
    assert not context.protection().permit_plain
    context.reset_ps_context()
    context.set_ps_context(enable_ssl=False)
    assert context.protection().permit_plain


# -- MindSpore's compiler ----------------------------------------------------------------------------------------------


def test_an_operator_in_a_cell_that_is_compiled_says_what_to_do(tmp_path: Path) -> None:
    """Run in a new process, because graph mode applies to the whole process."""
    pytest.importorskip("mindspore")
    program = """
import mindspore as ms, mscomm, numpy as np
mscomm.init()
class Net(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        self.reduce = mscomm.ops.AllReduce()
    def construct(self, x):
        return self.reduce(x) + 1
ms.set_context(mode=ms.PYNATIVE_MODE)
print(Net()(ms.Tensor(np.ones(3, np.float32))))
ms.set_context(mode=ms.GRAPH_MODE)
print(Net()(ms.Tensor(np.ones(3, np.float32))))
"""
    (tmp_path / "cell.py").write_text(program)  # MindSpore compiles only code from a file
    done = subprocess.run([sys.executable, "cell.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[2. 2. 2.]\n" and done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: mscomm.ops.AllReduce is called in a cell that MindSpore compiles"), (
        done.stderr
    )
    assert "set_context(mode=PYNATIVE_MODE)" in last and "GradientReducer" in last

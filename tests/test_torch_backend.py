"""mscomm as a backend of torch.distributed: the same programs give the same tensors as over gloo."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import clean_environment

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not hasattr(torch.distributed, "all_gather_single"):
    pytest.skip("needs torch.distributed of PyTorch 2.13 or later", allow_module_level=True)

import warm  # noqa: E402
from warm import torchrun, with_torchrun  # noqa: E402

HERE = Path(__file__).parent

# With 2 ranks, both backends add the same two numbers. With more ranks, they add in different orders, so that sums of
# float32 differ in the last bits. 4 training steps make that at most this much, relative or absolute.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
# bfloat16 and float16 have 8 and 11 bits.
CLOSE_HALF = {"rtol": 1e-2, "atol": 1e-2}


@pytest.mark.long
@pytest.mark.timeout(1300)  # the compiler takes a minute
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_programs_give_the_same_tensors(size: int, tmp_path: Path) -> None:
    results = {}
    script = shutil.copy(HERE / "torch_cases.py", tmp_path)
    for backend in ("gloo", "mscomm"):
        done = with_torchrun(size, Path(script), backend, tmp_path / backend)
        assert done.returncode == 0, done.stderr[-6000:]
        results[backend] = [torch.load(f"{tmp_path / backend}.{rank}") for rank in range(size)]
    for rank in range(size):
        theirs, ours = results["gloo"][rank], results["mscomm"][rank]
        assert list(theirs) == list(ours)
        for case in theirs:
            for expected, got in zip(theirs[case], ours[case], strict=True):
                half = expected.dtype in (torch.bfloat16, torch.float16) or "fp16" in case
                limits = {"rtol": 0, "atol": 0} if size == 2 else CLOSE_HALF if half else CLOSE
                where = f"{case}, rank {rank}: "
                torch.testing.assert_close(got, expected, **limits, msg=where.__add__)


SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
{body}
"""


def run(
    size: int, tmp_path: Path, body: str, by: Callable[..., subprocess.CompletedProcess[str]] = torchrun
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body=body))
    return by(size, script)


def test_import_torch_registers_the_backend(tmp_path: Path) -> None:
    body = """
assert "mscomm" in dist.Backend.backend_list and "mscomm.torch.process_group" not in sys.modules
for turn in range(2):  # a group can be made again
    dist.init_process_group("mscomm")
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2, 2] and dist.get_backend() == "mscomm"
    dist.destroy_process_group()
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body, with_torchrun)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def with_mscomm_run(size: int, script: Path, *words: object, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    options = ["-n", size, "--max-restarts", restarts]
    return warm.mscomm_run(*options, script, *words, file=warm.WITH_TORCH)


def test_a_ddp_script_runs_under_both_launchers(tmp_path: Path) -> None:
    """Not over gloo, too: at the end, a ProcessGroupGloo sometimes waits for its thread, which waits for the GIL."""
    script = Path(shutil.copy(HERE.parent / "examples/torch_ddp.py", tmp_path))
    losses = []
    for launch in (torchrun, with_mscomm_run):
        done = launch(2, script)
        assert done.returncode == 0, done.stderr
        losses.append(re.findall(r"epoch \d: loss (\S+)", done.stdout))
    assert losses[0] == losses[1] and len(losses[0]) == 5 and float(losses[0][4]) < 0.5 * float(losses[0][0]), losses


def test_the_ranks_of_a_ddp_script_are_restarted_by_mscomm_run(tmp_path: Path) -> None:
    """The ranks meet again at the same port, also if rank 1 is restarted long before rank 0 fails."""
    body = f"""
life = int(os.environ["MSCOMM_RESTART_COUNT"])
if (rank, life) == (1, 1):
    open({str(tmp_path / "again")!r}, "w").close()
dist.init_process_group("mscomm")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(4):
    if (rank, life, step) == (1, 0, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    while (rank, life, step) == (0, 0, 2) and not os.path.exists({str(tmp_path / "again")!r}):
        time.sleep(0.01)
    model(torch.ones(1, 2)).sum().backward()
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(2, tmp_path, body, functools.partial(with_mscomm_run, restarts=3))
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr
    assert "rank 1 is started again" in done.stderr and "rank 0 is started again" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("first", "autoload"), [("import torch", "0"), ("import mscomm.torch", "0"), ("import mscomm.torch", "1")]
)
def test_either_can_be_imported_first_and_without_autoload(first: str, autoload: str) -> None:
    code = f"{first}; import mscomm.torch, torch.distributed as dist; assert 'mscomm' in dist.Backend.backend_list"
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_time_limit_says_timed_out_and_names_the_rank(tmp_path: Path) -> None:
    body = """
from datetime import timedelta
dist.init_process_group("mscomm", timeout=timedelta(seconds=120))
groups = dist.new_group(timeout=timedelta(seconds=1)), dist.new_group()
groups[1].set_timeout(timedelta(seconds=1))
try:
    groups[1].set_timeout(timedelta(0))
except ValueError as error:
    assert "is not more than 0 seconds" in str(error), error
else:
    raise AssertionError
for group in groups if rank == 0 else ():
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        sys.stdout.write(f"{error}\\n")
dist.barrier()
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r" Timed out .*waiting for rank 1 ", done.stdout)) == 2, done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_trainings_that_lose_a_rank() -> None:
    """In a few trials of soak_torch.py, the other ranks name the killed rank, and end by themselves."""
    seed = os.environ.get("MSCOMM_SOAK_SEED", str(int.from_bytes(os.urandom(3), "little")))
    command = [sys.executable, str(HERE / "soak_torch.py"), "--ddp", "4", "--fsdp", "2", "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


def test_a_backward_pass_through_an_overwritten_tensor_warns(tmp_path: Path) -> None:
    body = """
import warnings
dist.init_process_group("mscomm")
def warned(call):
    x = torch.ones(2, requires_grad=True)
    y = x * 3
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(y)
        y.sum().backward()
    return [str(one.message) for one in seen]
for call in (dist.all_reduce, lambda y: dist.broadcast(y, 0), lambda y: dist.all_reduce(y, async_op=True).wait()):
    assert any("gradient of a tensor that a call of mscomm or torch.distributed" in text for text in warned(call))
assert not warned(lambda y: dist.all_reduce(y.detach()))
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
x = torch.ones(4)
for call, words in (
    (lambda: dist.all_to_all_single(torch.empty(3), x), "cannot share equally"),
    (lambda: dist.all_gather([torch.empty(4)], x), "1 tensors for 2 ranks"),
    (lambda: dist.all_reduce(torch.empty(2, device="meta")), "is on meta"),
    (lambda: dist.all_reduce(torch.ones(2).to_sparse(), op=dist.ReduceOp.MAX), "only be summed"),
):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
dist.all_reduce(x)  # the group still works
sys.stdout.write(f"{x.tolist()}\\n")
dist.destroy_process_group()
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("[2.0, 2.0, 2.0, 2.0]") == 2, done.stderr


def test_large_lists_and_strided_complex_tensors(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
n, ranks = 10007, range(2)  # more than 16 KiB, and no whole number of pages
parts = [torch.arange(n) * (i + 1) + rank for i in ranks]
for kind in (torch.float32, torch.int64):
    xs = [part.to(kind) for part in parts]
    out = [torch.empty(n, dtype=kind) for _ in ranks]
    dist.all_gather(out, xs[0])
    assert all(torch.equal(out[i], (torch.arange(n) + i).to(kind)) for i in ranks)
    dist.gather(xs[1], out if rank == 1 else None, 1)
    assert rank == 0 or all(torch.equal(out[i], (torch.arange(n) * 2 + i).to(kind)) for i in ranks)
    dist.reduce_scatter(out[0], xs)
    assert torch.equal(out[0], (torch.arange(n) * 2 * (rank + 1) + 1).to(kind))
    dist.scatter(out[0], xs if rank == 1 else None, 1)
    assert torch.equal(out[0], (torch.arange(n) * (rank + 1) + 1).to(kind))
    work = dist.all_to_all(out, xs, async_op=True)
    work.wait()
    assert all(torch.equal(out[i], (torch.arange(n) * (rank + 1) + i).to(kind)) for i in ranks)
for kind in (torch.complex64, torch.complex128):
    z = torch.complex(torch.arange(6.0), torch.ones(6)).to(kind).view(2, 3)
    for view in (z.t(), z.conj()):
        dist.group.WORLD.allreduce([view]).wait()
    assert torch.equal(z, torch.complex(torch.arange(6.0), torch.ones(6)).to(kind).view(2, 3) * 4)
    z = torch.full((2, 3), rank + 1j, dtype=kind)
    # Rank 0's tensor is contiguous, and the call has options, as torch's own calls do. Such a call stays in C++.
    dist.group.WORLD.allreduce([z.t() if rank else z.view(3, 2)], dist.AllreduceOptions()).wait()
    assert z.eq(1 + 2j).all()
x = dist.group.WORLD.allocate_tensor(n, dtype=torch.bfloat16, device=torch.device("cpu"))
x.fill_(rank + 1)
dist.all_reduce(x)
assert x.shape == (n,) and x.eq(3).all()
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0, done.stderr


def test_a_scatter_of_another_size_is_a_mismatch(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
try:
    dist.scatter(torch.empty(3 + rank), [torch.ones(3), torch.ones(3)] if rank == 0 else None)
    assert rank == 0  # the root may leave the call before the other rank arrives
    dist.barrier()
except RuntimeError as error:
    sys.stdout.write(f"{error}\\n")
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("rank 1 called scatter #1 (float32[4], root 0)") == 2, done.stdout + done.stderr


def test_lists_of_other_sizes_are_a_mismatch(tmp_path: Path) -> None:
    """The lists of the ranks agree in the number of elements in total, and in that of the rank itself."""
    body = """
dist.init_process_group("mscomm")
sizes = [1, 2, 3]
out = [torch.empty(n) for n in sizes]
dist.all_gather(out, torch.full((rank + 1,), float(rank)))
assert [x.tolist() for x in out] == [[i] * n for i, n in enumerate(sizes)]
dist.all_gather(out, torch.full((rank + 1,), 7.0), async_op=True).wait()
assert all(x.eq(7).all() for x in out)
try:
    dist.all_gather([torch.empty(n) for n in ([1, 3, 2] if rank == 0 else sizes)], torch.ones(rank + 1))
except RuntimeError as error:
    sys.stdout.write(f"{type(error).__name__} {error}\\n")
"""
    done = run(3, tmp_path, body)
    assert done.stdout.count("Mismatch") == 3, done.stdout + done.stderr


def test_a_script_that_does_not_destroy_the_group_ends_well(tmp_path: Path) -> None:
    body = 'dist.init_process_group("mscomm")\nwork = dist.all_reduce(torch.ones(1), async_op=True)'
    done = run(2, tmp_path, body, with_torchrun)
    assert done.returncode == 0, done.stderr
    assert signal.SIGKILL.name not in done.stderr


def test_groups_beside_a_default_group_of_another_backend(tmp_path: Path) -> None:
    body = """
dist.init_process_group("gloo")
for ranks in ([0, 1], [1, 2], [2, 0, 1]):
    group = dist.new_group(ranks, backend="mscomm")
    if rank in ranks:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        assert x.item() == sum(ranks), (ranks, x)
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(3, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 3, done.stderr


def test_a_work_that_is_polled_or_dropped_fills_its_tensors(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
x, polled, dropped = torch.ones(2, 2).t(), [torch.zeros(2, 2) for _ in range(2)], torch.zeros(2, 4)[:, ::2]
work = dist.all_gather(polled, x, async_op=True)
while not work.is_completed():
    time.sleep(0.001)
assert all(part.sum() == 4 for part in polled)
dropped.fill_(1)
dist.all_reduce(dropped, async_op=True)
until = time.monotonic() + 60
while dropped.sum() != 8:
    assert time.monotonic() < until
    time.sleep(0.001)
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_methods_of_the_group_take_no_options(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
group, x = dist.group.WORLD, torch.ones(2)
y, parts = torch.zeros(4), [torch.zeros(2), torch.zeros(2)]
mine = [[torch.ones(2), torch.ones(2)]] if rank == 0 else []
assert group.allreduce([x.clone()]).result()[0].tolist() == [2, 2]
for work, outputs in (
    (group.broadcast([x]), [x]), (group.allgather([parts], [x]), parts), (group.all_gather_single(y, x), [y]),
    (group.reduce([x.clone()]), []), (group.gather([parts] if rank == 0 else [], [x]), []),
    (group.scatter([x], mine), [x]), (group.reduce_scatter([torch.zeros(2)], [[x, x]]), []),
    (group.reduce_scatter_single(torch.zeros(1), x), []), (group.all_to_all_single(torch.zeros(2), x, [], []), []),
    (group.alltoall(parts, [x, x]), parts), (group.barrier(), []),
):
    work.wait()
    assert all((output == 1).all() for output in outputs)
if rank == 0:
    for call in (lambda: group.scatter([x], [[torch.ones(1), torch.ones(3)]]), lambda: group.gather([[y, y]], [x])):
        try:
            call()
        except ValueError as error:
            assert "elements, expected 2" in str(error)
        else:
            raise AssertionError
group.barrier().wait()
if rank == 0:
    dist.send(x, 1)
else:
    received = dist.irecv(y[:2], 0)
    received.wait()
    assert received.source_rank() == 0
backend = group._get_backend(torch.device("cpu"))
assert not any(getattr(backend, name) for name in dir(backend) if name.startswith("supports_") and "alloc" not in name)
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr


def test_callbacks_that_wait_for_their_future_at_exit_are_called(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
for _ in range(20):
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.then(lambda done: (time.sleep(0.05), sys.stdout.write("called\\n")))
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("called") == 40


def test_what_only_some_works_and_groups_have(tmp_path: Path) -> None:
    """What does not exist says so: the source of a call that is not a recv, and hooks of torch's dispatcher."""
    body = """
from mscomm.torch import mixed
dist.init_process_group("mscomm")
group, x = dist.group.WORLD, torch.ones(2)
sent = dist.isend(x, 1 - rank)
for work in (dist.all_reduce(x.clone(), async_op=True), dist.irecv(torch.empty(2), 1 - rank)):
    work.wait()
    try:
        assert work._source_rank() == 1 - rank
    except RuntimeError as error:
        assert "source" in str(error), error
        sys.stdout.write("no source\\n")
out = torch.empty(2, 2).t()
group.gather_single(out if rank == 0 else None, torch.tensor([1.0, 2.0]) + rank).wait()
assert rank or out.tolist() == [[1, 2], [2, 3]], out
if hasattr(dist, "gather_single"):
    out = torch.empty(4) if rank else None
    dist.gather_single(torch.tensor([1.0, 2.0]) + rank, out, dst=1, async_op=True).wait()
    assert out is None or out.tolist() == [1, 2, 2, 3]
for register in (group.register_pre_hook, group.register_post_hook):
    try:
        register(1, print)
    except RuntimeError as error:
        assert "do not pass" in str(error)
    else:
        raise AssertionError
assert not group.supports_abort_hooks
dist.destroy_process_group()
os.environ["TORCH_DIST_NAN_CHECK"] = "1"
dist.init_process_group("mscomm")
if mixed._in_use:  # PyTorch 2.14.1 and later
    try:
        dist.all_reduce(torch.tensor([1.0, float("nan")]) if rank else x)
        dist.barrier()
    except RuntimeError as error:
        sys.stdout.write(f"done {error}\\n")
    os._exit(0)
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stderr
    assert done.stdout.count("no source") == 2, done.stdout  # that of all_reduce
    if "done\n" not in done.stdout:
        assert "NaN" in done.stdout, done.stdout


def test_a_compiled_function_with_a_call_of_mscomm_does_not_warn(tmp_path: Path) -> None:
    body = """
import warnings, mscomm
mscomm.init()
with warnings.catch_warnings(record=True) as seen:  # keeps the filters
    total = torch.compile(lambda x: mscomm.all_reduce(2 * x) + 1, backend="eager")(torch.ones(2))
assert total.tolist() == [5, 5]
sys.stdout.write(f"{[str(one.message) for one in seen if 'trace' in str(one.message)]}\\n")
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("[]") == 2, done.stdout + done.stderr


def test_mscomm_beside_another_backend(tmp_path: Path) -> None:
    """The string names a backend for each device. Before PyTorch 2.14.1, mscomm says that only mscomm is created."""
    body = """
import warnings, mscomm.torch
from torch._C._distributed_c10d import Backend, ProcessGroupGloo
from torch.nn.parallel import DistributedDataParallel
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    dist.init_process_group("cpu:mscomm,cuda:gloo")
    pair = dist.new_group()
    dist.new_group(backend="cpu:mscomm")
try:
    Backend(0, 1)
    mixed = True
except TypeError:
    mixed = False
said = [str(one.message) for one in seen if "creates no backend beside mscomm" in str(one.message)]
assert len(said) == (0 if mixed else 2) and all('"cpu:mscomm,cuda:gloo"' in text for text in said), said
for group in (dist.group.WORLD, pair):
    if mixed:
        assert isinstance(group._get_backend(torch.device("cuda")), ProcessGroupGloo)
    x = torch.ones(2, 3)
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, group=group, async_op=True).wait()
    (y,) = dist.all_reduce(x, group=group, async_op=True).get_future().wait()
    assert x.eq(8).all() and y.data_ptr() == x.data_ptr()
    parts = [torch.empty(2), torch.empty(2)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    assert torch.cat(parts).tolist() == [0, 0, 1, 1]
    out = torch.empty(1)
    dist.reduce_scatter_single(out, torch.tensor([1.0, 2.0]), group=group)
    assert out.item() == 2 * (rank + 1)
    dist.all_to_all_single(x[0, :2], torch.tensor([1.0, 2.0]) * (rank + 1), group=group)
    assert x[0, :2].tolist() == [1 + rank, 2 + 2 * rank]
    dist.broadcast(x, 1, group=group)
    assert x[0, :2].tolist() == [2, 4]
    if rank:
        dist.send(x, 0, group=group)
    else:
        dist.recv(x, 1, group=group)
    dist.barrier(group)
    assert mscomm.all_reduce(torch.ones(1), group=mscomm.torch.group(group)).item() == 2
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    model.register_comm_hook(*mscomm.torch.ddp_hook(model))
    model(torch.ones(1, 2) * (rank + 1)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
try:
    dist.all_reduce(torch.ones(1 + rank))
except mscomm.Mismatch as error:
    sys.stdout.write(f"{error} done\\n")
dist.destroy_process_group()
from mscomm.torch import mixed
assert not mixed._in_use
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("float32[2], sum") == 2, done.stderr


def test_a_forked_child_can_make_a_group_of_its_own() -> None:
    code = """
import os, torch, torch.distributed as dist
def use():
    dist.init_process_group("mscomm", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0] == 1
use()
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    dist.all_reduce(torch.ones(1))
else:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert "was forked from a rank" in str(error)
    dist.destroy_process_group()
    use()
"""
    env = clean_environment()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr


def test_averages_of_integers_are_rounded_towards_zero_as_with_nccl(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
avg = dist.ReduceOp.AVG
for kind in (torch.int8, torch.int16, torch.int32, torch.int64):
    x = torch.tensor([3, -3, 0, 7], dtype=kind) + rank
    expected = torch.tensor([3, -2, 0, 7], dtype=kind)  # (3 + 4) / 2, (-3 - 2) / 2, (0 + 1) / 2, (7 + 8) / 2
    y = x.clone()
    dist.all_reduce(y, avg)
    assert torch.equal(y, expected), y
    strided = torch.stack([x, x], 1)[:, 0]
    dist.all_reduce(strided, avg, async_op=True).wait()
    assert torch.equal(strided, expected), strided
    y = x.clone()
    dist.reduce(y, 0, avg)
    assert torch.equal(y, x if rank else expected), y
    part = torch.empty(2, dtype=kind)
    dist.reduce_scatter_tensor(part, x, avg)
    assert torch.equal(part, expected.split(2)[rank]), part
    parts = list(x.split([1, 3]))
    out = torch.empty_like(parts[rank])
    dist.reduce_scatter(out, parts, avg)
    assert torch.equal(out, expected.split([1, 3])[rank]), out
small = torch.tensor([200, 255], dtype=torch.uint8)
dist.all_reduce(halves := small // 2, avg)
assert halves.tolist() == [100, 127], halves
both = [torch.tensor([1, 2]) + rank, torch.tensor([1.0, 2.0]) + rank]
for x in both:
    dist.all_reduce(x, avg)
assert both[0].tolist() == [1, 2] and both[1].tolist() == [1.5, 2.5], both
try:
    dist.all_reduce(torch.tensor([True]), avg)
except TypeError as error:
    assert "bool" in str(error), error
else:
    raise AssertionError
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "dist.distributed_c10d._abort_process_group()"])
def test_a_process_that_joins_again_and_again_keeps_nothing(end: str, tmp_path: Path) -> None:
    body = f"""
import collections, contextlib, gc, tempfile, threading, mscomm
import psutil
from pathlib import Path
from mscomm.cluster import security
tempfile.tempdir = {str(tmp_path)!r}
folder = Path(security.key_path("x")).parent
def link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{{fd}}").partition(":[")[0]  # without the number of a socket
    except OSError:  # that of listdir() itself
        return ""
def hubs():
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.status() != "zombie" and "hub_process" in str(child.cmdline()):
                found.append(child.pid)
    return found
def held():
    gc.collect()
    fds = collections.Counter(filter(None, map(link, os.listdir("/proc/self/fd"))))
    threads = collections.Counter(thread.name for thread in threading.enumerate())
    keys = [] if rank else sorted(folder.glob("*.key"))  # rank 0 writes and removes the file
    return fds, threads, hubs() + keys
for turn in range(8):
    dist.init_process_group("mscomm")
    dist.all_reduce(torch.ones(1 << 18))
    assert rank or len(hubs()) == 1
    try:
        dist.barrier()
    except mscomm.Aborted:  # the other rank was faster
        assert "abort" in {end!r}
    {end}
    if turn < 2:
        first = (*held()[:2], [])  # with what is imported or started once
    until = time.monotonic() + 60
    while not all(now <= then for now, then in zip(held(), first)):  # the hub and threads may still be ending
        assert time.monotonic() < until, (first, held())
        time.sleep(0.01)
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


def test_complex_numbers_are_multiplied_as_such_and_have_no_minimum(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
z, out = torch.tensor([1 + 1j, 2j]), torch.empty(1, dtype=torch.complex64)
prod, low = dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN
dist.reduce_scatter_single(out, z, op=prod)
assert out.tolist() == [[2j], [-4 + 0j]][rank], out
dist.reduce_scatter(out, list(z.split(1)), op=prod)
assert out.tolist() == [[2j], [-4 + 0j]][rank], out
reduced = z.clone()
dist.reduce(reduced, 0, op=prod)
assert rank or reduced.tolist() == [2j, -4 + 0j], reduced
for call in (lambda: dist.reduce(z, 0, op=low), lambda: dist.reduce_scatter_single(out, z, op=low)):
    try:
        call()
    except TypeError as error:
        assert "complex64" in str(error), error
    else:
        raise AssertionError
dist.barrier()
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


def test_both_forms_of_arguments(tmp_path: Path) -> None:
    body = """
import datetime
dist.init_process_group("mscomm")
group, op, limit = dist.group.WORLD, dist.ReduceOp, datetime.timedelta(seconds=60)
x = lambda: torch.tensor([1.0 + rank, 5.0])
def is_now(tensor, *values):
    assert tensor.tolist() == list(values), (tensor, values)
for given in ((x(), op.MAX), ([x()], op.MAX), (x(), op.MAX, limit)):
    tensor = given[0][0] if isinstance(given[0], list) else given[0]
    group.allreduce(*given).wait()
    is_now(tensor, 2, 5)
a, b, c = x(), x(), x()
group.allreduce(a, op=op.MIN, timeout=limit).wait()
is_now(a, 1, 5)
group.broadcast(b, 1, limit).wait()
is_now(b, 2, 5)
group.reduce(c, root=1, op=op.PRODUCT).wait()
is_now(c, *([1, 5] if rank == 0 else [2, 25]))
parts = [torch.empty(2), torch.empty(2)]
group.allgather(parts, x(), limit).wait()
is_now(torch.cat(parts), 1, 5, 2, 5)
parts = [torch.empty(2), torch.empty(2)]
group.gather(parts if rank == 1 else [], x(), 1).wait()
assert rank == 0 or torch.cat(parts).tolist() == [1, 5, 2, 5]
group.scatter(a, parts if rank == 1 else [], 1).wait()
is_now(a, *([1, 5] if rank == 0 else [2, 5]))
group.reduce_scatter(a, [x(), x()], op.MAX).wait()
is_now(a, 2, 5)
group.all_to_all_single(a, x(), [], [], limit).wait()
is_now(a, *([1, 2] if rank == 0 else [5, 5]))
group.barrier(timeout=limit).wait()
for wrong in (lambda: group.broadcast(a, 0, limit, 1), lambda: group.reduce(a, tag=1)):
    try:
        wrong()
    except TypeError as error:
        assert "unexpected arguments" in str(error)
    else:
        raise AssertionError
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


def test_tensors_of_special_kinds(tmp_path: Path) -> None:
    """Results of functional collectives, emptied storages, repeated elements, and 16 bits without ml-dtypes."""
    body = """
sys.modules["ml_dtypes"] = None
import torch.distributed._functional_collectives as functional
dist.init_process_group("mscomm")
def waited():
    return functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
out = torch.empty(2)
dist.all_to_all_single(out, waited())
assert out.tolist() == [2, 2]
x = waited()
dist.all_reduce(x)
assert x.tolist() == [4, 4]
out = waited()
dist.scatter(out, [torch.full((2,), 7.0)] * 2 if rank == 0 else None)
assert out.tolist() == [7, 7]
for kind in (torch.bfloat16, torch.float8_e4m3fn):
    half, parts = torch.ones(2).to(kind), [torch.empty(i + 1).to(kind) for i in range(2)]
    dist.all_to_all_single(half, torch.full((2,), 3.0).to(kind))
    dist.all_gather(parts, half[: rank + 1])
    dist.scatter(half, parts[1:] * 2 if rank == 0 else None)
    assert half.float().tolist() == [3, 3] and torch.cat(parts).float().eq(3).all()
parts = [torch.empty(1), torch.empty(2)]
gone, gone2 = torch.ones(rank + 1), torch.ones(2)
for emptied in (gone, gone2):
    emptied.untyped_storage().resize_(0)
for call, words in (
    (lambda: dist.all_to_all_single(torch.empty(2), gone2), "its storage, which was resized"),
    (lambda: dist.all_gather(parts, gone), "its storage, which was resized"),
    (lambda: dist.broadcast(torch.ones(1).expand(4), 1 - rank), "share memory"),
    (lambda: dist.all_reduce(torch.ones(1).expand(4)), "share memory"),
    (lambda: dist.all_reduce(torch.zeros(8).as_strided((3, 4), (1, 1))), "share memory"),
    (lambda: dist.all_reduce(torch.zeros(8).unfold(0, 3, 2)), "share memory"),
):
    try:
        call()
    except (TypeError, ValueError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
try:
    dist.all_reduce(torch.ones(4 + rank).to_sparse())
except ValueError as error:
    assert "has a sparse tensor of shape" in str(error)
else:
    raise AssertionError
strided = torch.arange(8.0).view(4, 2).t()
work = dist.broadcast(strided, 0, async_op=True)
if rank == 0:
    strided.fill_(9)  # the root's tensor is not written
work.wait()
assert rank or strided.eq(9).all()
dist.barrier()
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


def test_all_reduce_is_the_same_call_in_c_and_in_python(tmp_path: Path) -> None:
    """Rank 0 passes tensors that usual_all_reduce takes, and rank 1 such that it leaves to Python."""
    body = """
from torch.profiler import profile
dist.init_process_group("mscomm")
def ours(shape, kind):
    whole = torch.ones(*shape, 2).to(kind)
    return whole.flatten()[: whole.numel() // 2] if rank == 0 else whole[..., 0]
for kind in (torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.complex128):
    for shape in ((6,), (2, 3), (3, 1, 2), (0,)):
        x = ours(shape, kind)
        dist.all_reduce(x)
        late = dist.all_reduce(x, async_op=True)
        late.wait()
        (result,) = dist.all_reduce(x, async_op=True).get_future().wait()
        assert result is x or x.is_complex()  # which torch passes as a view of real numbers
        assert x.to(torch.complex64).eq(8).all(), (x, kind, shape)
from mscomm.torch import group, process_group
def in_c(x, op=dist.ReduceOp.SUM):
    opts = dist.AllreduceOptions()
    opts.reduceOp, opts.asyncOp = op, False
    return process_group._usual_all_reduce(group().core, [x], opts) is x
assert in_c(torch.ones(2, 3)) and in_c(torch.ones(()))
assert not any(map(in_c, (torch.ones(2, 3).t(), torch.ones(2, dtype=torch.complex64), torch.ones(2).to_sparse())))
assert not in_c(torch.ones(2), dist.ReduceOp.MAX)
with profile():
    assert not in_c(torch.ones(2))

x = torch.ones(2)
before = x._version
dist.all_reduce(x)
assert x._version == before  # as with gloo: a backward pass does not see that the call has written x
try:
    dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))
except TypeError as error:
    assert "sum is not defined on float8_e4m3fn" in str(error), error
else:
    raise AssertionError
with profile() as recorded:
    if rank: dist.all_reduce(x)
if rank == 0: dist.all_reduce(x)
assert rank == 0 or "mscomm:all_reduce" in {event.name for event in recorded.events()}
dist.barrier()
sys.stdout.write("done\\n")
dist.destroy_process_group()
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


def test_after_a_barrier_or_the_end_all_tensors_are_filled(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
def begin(i):
    outs = [torch.full((20000,), -1.0) for _ in range(2)]
    return outs, dist.all_gather(outs, torch.full((20000,), float(i)), group=group, async_op=True)
for i in range(30):
    group = None
    (outs, work), (others, _) = begin(i), begin(i)
    del _  # drops the Work
    dist.barrier()
    assert all(out.eq(i).all() for out in outs + others), i
    del work
    group = dist.new_group()
    (outs, work), (others, _) = begin(i), begin(i)
    del _
    dist.destroy_process_group(group)
    assert all(out.eq(i).all() for out in outs + others), i
later = torch.zeros(2, 2).t()
work = dist.irecv(later, 1 - rank)  # a barrier does not wait for messages
dist.barrier()
dist.send(torch.ones(2, 2), 1 - rank)
work.wait()
assert later.eq(1).all()
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


def test_a_monitored_barrier_waits_in_a_later_job_too(tmp_path: Path) -> None:
    body = """
for turn in range(2):
    dist.init_process_group("mscomm")
    comes = f"{__file__}.{turn}"
    if rank == 0:
        time.sleep(1)
        open(comes, "w").close()
    dist.group.WORLD.monitored_barrier()
    assert os.path.exists(comes), turn
    dist.destroy_process_group()
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.stdout.count("done") == 2, done.stdout + done.stderr


def test_an_invalid_tensor_in_a_coalesced_call_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    body = """
dist.init_process_group("mscomm")
x, began = torch.ones(2), time.monotonic()
try:
    with dist._coalescing_manager():
        dist.all_gather_single(torch.empty(4), x)
        dist.all_gather_single(torch.empty(4 - (rank == 0)), x)
except (RuntimeError, ValueError) as error:
    assert time.monotonic() - began < 60
    sys.stdout.write(f"{type(error).__name__} {error}\\n")
os._exit(0)
"""
    done = run(2, tmp_path, body)
    assert "Aborted rank 0" in done.stdout and "ValueError" in done.stdout, done.stdout + done.stderr


def test_a_profiler_that_ends_right_after_wait_has_all_events(tmp_path: Path) -> None:
    body = """
from torch.autograd import profiler
dist.init_process_group("mscomm")
x, y = torch.ones(4), torch.empty(4)
for _ in range(300):
    with profiler.profile() as seen:
        works = [dist.isend(x, 1 - rank), dist.irecv(y, 1 - rank), dist.all_reduce(y.clone(), async_op=True)]
        for work in works:
            work.wait()
    names = sorted(event.key for event in seen.key_averages() if event.key.startswith("mscomm:"))
    assert names == ["mscomm:all_reduce", "mscomm:recv", "mscomm:send"], names
    del seen
sys.stdout.write("done\\n")
"""
    done = run(2, tmp_path, body)
    assert done.returncode == 0 and done.stdout.count("done") == 2, done.stdout + done.stderr

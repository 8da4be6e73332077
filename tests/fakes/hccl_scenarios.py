"""Runs one rank of a scenario of tests/test_fakes_hccl.py: python -m fakes.hccl_scenarios NAME RANK SIZE ARGUMENTS."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from fakes import device_array as da
from fakes.device_array import DeviceArray, compute
from fakes.hccl_calls import OPERATORS, TYPES, Hccl, HcclError, Item
from fakes.scenarios import dtype_of, source


class Rank:
    def __init__(self, rank: int, size: int, arguments: dict):
        self.rank, self.size, self.arguments = rank, size, arguments
        self.acl = da.use(arguments["acl"], da.Acl)
        self.hccl = Hccl(*arguments["hccl"])
        self.device = arguments.get("device", rank)

    def __enter__(self):
        self.acl.call("aclrtSetDevice", ctypes.c_int(self.device))
        self.stream = da.new_stream(self.device)
        self.current = da.stream(self.stream)
        self.current.__enter__()
        return self

    def __exit__(self, *_):
        self.current.__exit__(*_)
        da.destroy_stream(self.stream, self.device)
        self.acl.call("aclrtResetDevice", ctypes.c_int(self.device))

    def info(self) -> bytes:
        """Return rank 0's root info. The other ranks get it through a file in the test's folder."""
        path = Path(os.environ["FAKE_DIR"]) / "info"
        if self.rank == 0:
            path.with_suffix(".part").write_bytes(self.hccl.root_info())
            path.with_suffix(".part").rename(path)
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.002)
        return path.read_bytes()

    def init(self) -> int:
        return self.hccl.init(self.size, self.info(), self.rank)

    def array(self, data) -> DeviceArray:
        return DeviceArray.from_numpy(np.asarray(data), self.device)

    def empty(self, shape, dtype=np.float32) -> DeviceArray:
        return DeviceArray.empty(shape, dtype, self.device)

    def all_reduce(self, x: DeviceArray, comm: int, op: str = "sum") -> int:
        return self.hccl.code("AllReduce", x.ptr, x.ptr, x.size, TYPES[x.dtype.name], OPERATORS[op], comm, self.stream)

    def wait(self, milliseconds: int) -> int:
        return self.acl.library.aclrtSynchronizeStreamWithTimeout(
            ctypes.c_uint64(self.stream), ctypes.c_int(milliseconds)
        )


scenarios = {}


def scenario(body):
    @functools.wraps(body)
    def run(rank: Rank):
        with rank:
            value = body(rank)
            gc.collect()
            if rank.arguments.get("settle", True):
                da.synchronize(rank.device, rank.stream)
        return {"value": value, "counters": da.counters()}

    scenarios[body.__name__] = run
    return run


@scenario
def collectives(r: Rank):
    n, me, hccl, count, s = r.size, r.rank, r.hccl, 1001, r.stream
    comm = r.init()
    f, root, bad = TYPES["float32"], n - 1, []
    inputs = [source(q, count, np.float32) for q in range(n)]
    wide = [source(q, count * n, np.float32) for q in range(n)]
    total, part = sum(inputs), slice(me * count, (me + 1) * count)

    def check(what, out: DeviceArray, expected):
        if not np.array_equal(out.to_numpy(), expected):
            bad.append(what)

    x, out, w, wide_out = r.array(inputs[me]), r.empty(count), r.array(wide[me]), r.empty(count * n)
    hccl.AllReduce(x.ptr, out.ptr, count, f, 0, comm, s)
    check("all_reduce", out, total)
    hccl.Reduce(x.ptr, out.ptr, count, f, 2, root, comm, s)
    check("reduce", out, np.max(inputs, axis=0) if me == root else total)
    y = x.copy()
    hccl.Broadcast(y.ptr, count, f, root, comm, s)
    check("broadcast", y, inputs[root])
    hccl.AllGather(x.ptr, wide_out.ptr, count, f, comm, s)
    check("all_gather", wide_out, np.concatenate(inputs))
    hccl.ReduceScatter(w.ptr, out.ptr, count, f, 0, comm, s)
    check("reduce_scatter", out, sum(wide)[part])
    ring = (Item * 2)(Item(0, x.ptr, count, f, (me + 1) % n), Item(1, out.ptr, count, f, (me - 1) % n))
    hccl.BatchSendRecv(ring, 2, comm, s)
    check("batch_send_recv", out, inputs[(me - 1) % n])
    for name in TYPES:
        z = r.array(source(root, 33, dtype_of(name)))
        hccl.Broadcast(z.ptr, 33, TYPES[name], root, comm, s)
        check(name, z, source(root, 33, dtype_of(name)))
    hccl.CommDestroy(comm)
    return bad


@scenario
def reductions(r: Rank):
    """Return the result of a reduction for each type and operator: an error code, "right" or "wrong"."""
    comm, found = r.init(), {}
    for name in TYPES:
        dtype = dtype_of(name)
        data = [source(q, 40, dtype) for q in range(r.size)]
        for op in OPERATORS:
            x = r.array(data[r.rank])
            code = r.all_reduce(x, comm, op)
            if code == 0:
                fold = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(op, np.add)
                expected = functools.reduce(lambda a, b, fold=fold: fold(a, b).astype(dtype), data)
                code = "right" if x.to_numpy().tobytes() == expected.tobytes() else "wrong"
            found[f"{name} {op}"] = code
    kept = r.empty(4)
    found["no bfloat16"] = r.hccl.code("Broadcast", kept.ptr, 2, TYPES["bfloat16"], 0, comm, r.stream)
    found["fp8"] = r.hccl.code("Broadcast", kept.ptr, 2, 14, 0, comm, r.stream)
    r.hccl.CommDestroy(comm)
    return found


@scenario
def init_code(r: Rank):
    try:
        comm = r.init()
    except HcclError as error:
        return error.code
    r.hccl.CommDestroy(comm)
    return 0


@scenario
def runtime(r: Rank):
    """Check what AscendCL itself promises, in one process."""
    library, found = r.acl.library, {}
    i32, handle = ctypes.c_int, ctypes.c_uint64
    found["twice"] = library.aclInit(None)
    found["device"] = library.aclrtSetDevice(i32(99))
    x = r.array(np.zeros(8, np.float32))
    da.synchronize(r.device)
    status, event = i32(-1), handle()
    with compute.hold(r.device):
        compute.add(x, 1.0)
        r.acl.call("aclrtStreamQuery", handle(r.stream), ctypes.byref(status))
        found["stream"] = [status.value]
        r.acl.call("aclrtCreateEventWithFlag", ctypes.byref(event), ctypes.c_uint(1))
        r.acl.call("aclrtRecordEvent", event, handle(r.stream))
        r.acl.call("aclrtQueryEventStatus", event, ctypes.byref(status))
        found["event"] = [status.value]
        found["timeout"] = r.wait(1)
    da.synchronize(r.device)
    r.acl.call("aclrtQueryEventStatus", event, ctypes.byref(status))
    found["event"].append(status.value)
    r.acl.call("aclrtStreamQuery", handle(r.stream), ctypes.byref(status))
    found["stream"].append(status.value)
    r.acl.call("aclrtDestroyEvent", event)
    found["value"] = float(x.to_numpy()[0])
    host = np.zeros(8, np.float32)
    size, here, there = ctypes.c_size_t, ctypes.c_void_p(host.ctypes.data), ctypes.c_void_p(x.ptr)
    found["room"] = library.aclrtMemcpyAsync(here, size(4), there, size(8), i32(2), handle(r.stream))
    found["kind"] = library.aclrtMemcpyAsync(here, size(8), there, size(8), i32(1), handle(r.stream))
    found["no interface"] = not hasattr(x, "__cuda_array_interface__")
    other = handle()
    with r.acl.on(1):
        found["elsewhere"] = library.aclrtSynchronizeStream(handle(r.stream))
    library.aclrtGetCurrentContext(ctypes.byref(other))
    found["context"] = library.aclrtSetCurrentContext(other)
    return found


@scenario
def hang(r: Rank):
    """Make ranks disagree, die or hang. Then suspend and destroy the communicator."""
    comm = r.init()
    x = r.array(np.ones(8, np.float32))
    da.synchronize(r.device)
    first = r.all_reduce(x, comm)
    before = r.wait(60_000)
    what = r.arguments["what"]
    if what == "count":
        r.all_reduce(x[: 7 if r.rank else 8], comm)
    else:
        r.all_reduce(x, comm)
    waited = r.wait(400)
    end = time.monotonic() + 60
    while what == "remote" and not r.hccl.state(comm) and time.monotonic() < end:
        time.sleep(0.01)
    state = r.hccl.state(comm)
    r.hccl.CommSuspend(comm)
    after = r.wait(60_000)
    later = r.all_reduce(x, comm)
    r.hccl.CommDestroy(comm)
    return {"first": [first, before], "waited": waited, "state": state, "after": after, "later": later}


@scenario
def injected(r: Rank):
    comm = r.init()
    x = r.array(np.ones(8, np.float32))
    da.synchronize(r.device)
    codes = [r.all_reduce(x, comm), r.all_reduce(x, comm)]
    end = time.monotonic() + 60
    while r.arguments.get("until_error") and not r.hccl.state(comm) and time.monotonic() < end:
        time.sleep(0.01)
    state = r.hccl.state(comm)
    waited = r.wait(400)
    r.hccl.CommSuspend(comm)
    r.wait(60_000)
    r.hccl.CommDestroy(comm)
    return {"codes": codes, "state": state, "waited": waited}


def main() -> None:
    result = scenarios[sys.argv[1]](Rank(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

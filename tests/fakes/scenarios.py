"""Runs one rank of a scenario of tests/test_fakes.py: python -m fakes.scenarios NAME RANK SIZE ARGUMENTS.

A scenario is called with a Rank and returns what it has found. main() prints this value and the counters as JSON.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import sys
import threading
import time

import numpy as np
from fakes import device_array as da
from fakes.device_array import DeviceArray, compute
from fakes.nccl_calls import OPERATORS, TYPES, Nccl, config

try:
    import ml_dtypes

    EXTRA = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
except ImportError:
    EXTRA = {}


def dtype_of(name: str) -> np.dtype:
    return EXTRA.get(name) or np.dtype(name)


class Rank:
    def __init__(self, rank: int, size: int, arguments: dict):
        self.rank, self.size, self.arguments = rank, size, arguments
        self.cuda = da.use(arguments["cuda"])
        self.nccl = Nccl(arguments["nccl"][rank % len(arguments["nccl"])])
        self.ids = [bytes.fromhex(one) for one in arguments["ids"]]
        self.device = arguments.get("device", rank)

    def __enter__(self):
        self.context = self.cuda.on(self.device)
        self.context.__enter__()
        self.stream = da.new_stream(self.device)
        self.current = da.stream(self.stream)
        self.current.__enter__()
        return self

    def __exit__(self, *_):
        self.current.__exit__(*_)
        da.destroy_stream(self.stream, self.device)
        self.context.__exit__(*_)

    def init(self, which: int = 0, given=None) -> int:
        return self.nccl.init(self.size, self.ids[which], self.rank, given)

    def array(self, data) -> DeviceArray:
        return DeviceArray.from_numpy(np.asarray(data), self.device)

    def empty(self, shape, dtype=np.float32) -> DeviceArray:
        return DeviceArray.empty(shape, dtype, self.device)

    def all_reduce(self, x: DeviceArray, comm: int, op: str = "sum", out: DeviceArray | None = None) -> int:
        kind = TYPES[x.dtype.name]
        return self.nccl.AllReduce(x.ptr, (out or x).ptr, x.size, kind, OPERATORS[op], comm, da.current_stream())

    def done(self, stream: int | None = None) -> bool:
        return self.cuda.library.cuStreamQuery(ctypes.c_uint64(self.stream if stream is None else stream)) == 0

    def done_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True


scenarios = {}


def scenario(body):
    """Register a scenario. It runs on the rank's device and stream, and returns its value and the counters."""

    @functools.wraps(body)
    def run(rank: Rank):
        with rank:
            value = body(rank)
            if rank.arguments.get("settle", True):
                gc.collect()
                da.synchronize(rank.device, rank.stream)
        return {"value": value, "counters": da.counters()}

    scenarios[body.__name__] = run
    return run


def source(rank: int, count: int, dtype) -> np.ndarray:
    return (np.arange(count) % 13 + rank * 3 + 1).astype(dtype)


@scenario
def collectives(r: Rank):
    """Compare each collective, in place and out of place, with NumPy."""
    n, me, count, nccl, comm = r.size, r.rank, r.arguments.get("count", 1001), r.nccl, r.init()
    f32, f, s = np.float32, TYPES["float32"], r.stream
    inputs = [source(q, count, f32) for q in range(n)]
    wide = [source(q, count * n, f32) for q in range(n)]
    total, wide_total = sum(inputs), sum(wide)
    part = slice(me * count, (me + 1) * count)
    root = n - 1
    bad = []

    def check(what, out: DeviceArray, expected):
        if not np.array_equal(out.to_numpy(), expected):
            bad.append(what)

    x, out, w, wide_out = r.array(inputs[me]), r.empty(count), r.array(wide[me]), r.empty(count * n)
    nccl.AllReduce(x.ptr, out.ptr, count, f, 0, comm, s)
    check("all_reduce", out, total)
    y = x.copy()
    nccl.AllReduce(y.ptr, y.ptr, count, f, 0, comm, s)
    check("all_reduce in place", y, total)
    nccl.Reduce(x.ptr, out.ptr if me == root else 0, count, f, 2, root, comm, s)
    check("reduce", out, np.max(inputs, axis=0) if me == root else total)
    nccl.Broadcast(x.ptr if me == root else 0, out.ptr, count, f, root, comm, s)
    check("broadcast", out, inputs[root])
    nccl.AllGather(x.ptr, wide_out.ptr, count, f, comm, s)
    check("all_gather", wide_out, np.concatenate(inputs))
    y = r.empty(count * n)
    y[part].copy_(x)
    nccl.AllGather(y[part].ptr, y.ptr, count, f, comm, s)
    check("all_gather in place", y, np.concatenate(inputs))
    nccl.ReduceScatter(w.ptr, out.ptr, count, f, 0, comm, s)
    check("reduce_scatter", out, wide_total[part])
    y = w.copy()
    nccl.ReduceScatter(y.ptr, y[part].ptr, count, f, 0, comm, s)
    check("reduce_scatter in place", y[part], wide_total[part])
    nccl.GroupStart()
    nccl.Send(x.ptr, count, f, (me + 1) % n, comm, s)
    nccl.Recv(out.ptr, count, f, (me - 1) % n, comm, s)
    nccl.GroupEnd()
    check("ring", out, inputs[(me - 1) % n])
    nccl.CommFinalize(comm)
    nccl.CommDestroy(comm)
    return {"bad": bad, "version": nccl.version()}


@scenario
def dtypes(r: Rank):
    """Check every type and operator. A result must be computed in rank order, and rounded to the type at each step."""
    comm, bad = r.init(), []
    rng = np.random.default_rng(1)
    for name in TYPES:
        if name not in EXTRA and not hasattr(np, name):
            continue
        dtype = dtype_of(name)
        if dtype.kind in "iu":
            data = [rng.integers(-7 if dtype.kind == "i" else 0, 100, 257).astype(dtype) for _ in range(r.size)]
        else:
            data = [(rng.standard_normal(257) * 3).astype(dtype) for _ in range(r.size)]
        for op in OPERATORS:
            x = r.array(data[r.rank])
            r.all_reduce(x, comm, op)
            with np.errstate(all="ignore"):
                # For avg, floats are scaled before the sum, as in NCCL. Integers are divided after the sum.
                share = dtype.type(1.0 / r.size) if dtype.kind not in "iu" else None
                inputs = [(one * share).astype(dtype) for one in data] if op == "avg" and share is not None else data
                fold = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(op, np.add)
                expected = inputs[0]
                for one in inputs[1:]:
                    expected = fold(expected, one).astype(dtype)
                if op == "avg" and share is None:
                    expected = (np.sign(expected) * (abs(expected.astype(object)) // r.size)).astype(dtype)
            got = x.to_numpy()
            if got.tobytes() != expected.tobytes() and not (
                name.startswith("float8")
                and np.allclose(*(np.nan_to_num(a.astype(np.float32)) for a in (got, expected)))
            ):
                bad.append((name, op))
    r.nccl.CommDestroy(comm)
    return bad


@scenario
def is_late(r: Rank):
    """Read the result twice: when the call has returned, which is too early, and when the stream has done its work."""
    comm = r.init()
    x = r.array(np.ones(10, np.float32))
    da.synchronize(r.device)
    side = da.new_stream(r.device)
    seen = None
    if r.arguments["held"]:
        with compute.hold(r.device):
            r.all_reduce(x, comm)
            early = r.done()
            with da.stream(side):
                seen = float(x.to_numpy()[0])
    else:
        r.all_reduce(x, comm)
        early = r.done()
    later = float(x.to_numpy()[0])
    da.destroy_stream(side, r.device)
    r.nccl.CommDestroy(comm)
    return {"early": early, "seen": seen, "later": later}


@scenario
def late_producer(r: Rank):
    """Enqueue a slow kernel. An operation on another stream does not wait for the kernel, and reads the old values."""
    comm = r.init()
    x = r.array(np.zeros(4, np.float32))
    da.synchronize(r.device)
    other = da.new_stream(r.device)
    out = r.empty(4)
    with compute.hold(r.device):
        compute.add(x, 1.0)
        with da.stream(other):
            r.all_reduce(x, comm, out=out)
            unordered = float(out.to_numpy()[0])
    r.all_reduce(x, comm, out=out)
    ordered = float(out.to_numpy()[0])
    da.destroy_stream(other, r.device)
    r.nccl.CommDestroy(comm)
    return {"unordered": unordered, "ordered": ordered}


@scenario
def reads_device_memory(r: Rank):
    ctypes.string_at(r.array(np.ones(4)).ptr, 8)


@scenario
def managed(r: Rank):
    """Check that host and device can use managed memory until it is freed. Memory next to it is not managed."""
    r.array(np.ones(1))  # uses less than a page of device memory in front of the managed memory
    memory = da._Memory(20, r.device, managed=True)
    values = (ctypes.c_float * 5).from_address(memory.pointer)
    values[:] = [1, 2, 3, 4, 5]
    x = DeviceArray(memory, 0, (5,), (4,), np.dtype(np.float32))
    with compute.hold(r.device):
        compute.add(x, 1.0)
        early = list(values)
    da.synchronize(r.device)
    kind = ctypes.c_uint()
    r.cuda.call("cuPointerGetAttribute", ctypes.byref(kind), ctypes.c_int(8), ctypes.c_uint64(x[2:].ptr))
    library = r.cuda.library
    inside = [library.fake_managed(ctypes.c_uint64(memory.pointer + at)) for at in (-1, 0, 19, 20)]
    found = {"early": early, "later": list(values), "managed": kind.value, "inside": inside}
    if r.arguments["freed"]:
        del memory, x
        da.synchronize(r.device)
        ctypes.string_at(ctypes.addressof(values), 1)
    return found


@scenario
def mismatches(r: Rank):
    """Let rank 1's call differ in one respect at a time. All ranks hang until they abort. Then the stream continues."""
    f32, f64 = np.float32, np.float64
    me, odd = r.nccl, r.rank == 1
    cases = {
        "count": lambda x, c: r.all_reduce(x[: 7 if odd else 8], c),
        "type": lambda x, c: r.all_reduce(x if odd else r.array(np.ones(8, f64)), c),
        "operator": lambda x, c: r.all_reduce(x, c, "max" if odd else "sum"),
        "root": lambda x, c: me.Broadcast(x.ptr, x.ptr, 8, 7, 1 if odd else 0, c, r.stream),
        "kind": lambda x, c: (
            me.Broadcast(x.ptr, x.ptr, 8, 7, 0, c, r.stream)
            if odd
            else me.Reduce(x.ptr, x.ptr, 8, 7, 0, 0, c, r.stream)
        ),
        "message": lambda x, c: (
            me.Send(x.ptr, 8, 7, 0, c, r.stream) if odd else me.Recv(x.ptr, 7, 7, 1, c, r.stream) if r.rank == 0 else 0
        ),
    }
    hung = {}
    kept = []
    for i, (what, case) in enumerate(cases.items()):
        comm = r.init(i)
        x = r.array(np.ones(8, f32))
        da.synchronize(r.device)
        kept.append(x)
        case(x, comm)
        hung[what] = not r.done_within(0.3)
        state = me.state(comm)
        me.CommAbort(comm)
        hung[what] = hung[what] and state == 0 and r.done_within(60)
    return hung


@scenario
def dies(r: Rank):
    """Call all_reduce twice. FAKE_DIE kills rank 1 in the second call. Return what the other ranks observe."""
    comm = r.init()
    x = r.array(np.ones(8, np.float32))
    r.all_reduce(x, comm)
    x.to_numpy()
    r.all_reduce(x, comm)
    hung = not r.done_within(0.5)
    state = r.nccl.state(comm)
    if r.arguments.get("remote"):
        end = time.monotonic() + 60
        while not (state := r.nccl.state(comm)) and time.monotonic() < end:
            time.sleep(0.01)
    r.nccl.CommAbort(comm)
    return {"hung": hung, "state": state, "free": r.done_within(60)}


@scenario
def non_blocking(r: Rank):
    nccl = r.nccl
    comm = r.init(given=config(blocking=0))
    first = nccl.state(comm)
    x = r.array(np.ones(8, np.float32))
    too_soon = nccl.code("AllReduce", x.ptr, x.ptr, 8, 7, 0, comm, r.stream)
    made = nccl.wait(comm)
    called = r.all_reduce(x, comm)
    twice = nccl.code("AllReduce", x.ptr, x.ptr, 8, 7, 0, comm, r.stream)
    enqueued = nccl.wait(comm)
    value = float(x.to_numpy()[0])
    finalized = [nccl.CommFinalize(comm), nccl.wait(comm)]
    nccl.CommDestroy(comm)
    return {
        "first": first,
        "too_soon": too_soon,
        "made": made,
        "called": called,
        "twice": twice,
        "enqueued": enqueued,
        "value": value,
        "finalized": finalized,
    }


@scenario
def somebody_is_missing(r: Rank):
    """Join a communicator that another rank never joins. Return its state and the number of files in FAKE_DIR."""
    comm = r.init(given=config(blocking=0))
    state = r.nccl.wait(comm, 0.5)
    files = [name for name in os.listdir(os.environ["FAKE_DIR"]) if name.startswith("mscomm-fake-")]
    if r.arguments.get("killed"):
        os.kill(os.getpid(), 9)
    r.nccl.CommAbort(comm)
    return {"state": state, "files": len(files)}


@scenario
def init_codes(r: Rank):
    """Return the code and the error text of init, for a blocking or a non-blocking communicator."""
    given = config(blocking=0) if r.arguments.get("non_blocking") else None
    comm = ctypes.c_uint64(1)
    which = r.arguments.get("which")
    try:
        comm.value = r.init(given=given)
        code = r.nccl.wait(comm.value)
        text = r.nccl.last_error()
        if code:
            r.nccl.CommAbort(comm)
        else:
            if which != "no operation":
                x = r.array(np.ones(8, np.float32))
                r.all_reduce(x, comm.value)
                x.to_numpy()
            r.nccl.CommDestroy(comm)
    except RuntimeError as error:
        code, text = error.code, error.text
    return {"code": code, "text": text}


@scenario
def groups(r: Rank):
    nccl, me, n, s = r.nccl, r.rank, r.size, r.stream
    comm = r.init()
    f = TYPES["float32"]
    x, out = r.array(np.full(8, me + 1, np.float32)), r.array(np.zeros(8, np.float32))
    da.synchronize(r.device)
    found = {}
    nccl.GroupStart()
    r.all_reduce(x, comm, out=out)
    nccl.GroupStart()
    nccl.GroupEnd()
    time.sleep(0.1)
    found["before"] = float(out.to_numpy()[0])
    nccl.GroupEnd()
    found["after"] = float(out.to_numpy()[0]) == n * (n + 1) / 2
    # Send to all ranks and receive from all ranks. Before NCCL 2.28, this is the only way to do an all-to-all.
    w, o = r.array(np.arange(n * 3, dtype=np.float32) + 100 * me), r.empty(n * 3)
    nccl.GroupStart()
    for peer in range(n):
        nccl.Send(w[peer * 3 :].ptr, 3, f, peer, comm, s)
        nccl.Recv(o[peer * 3 :].ptr, 3, f, peer, comm, s)
    nccl.GroupEnd()
    found["all_to_all"] = np.array_equal(
        o.to_numpy(), np.concatenate([np.arange(me * 3, me * 3 + 3) + 100 * q for q in range(n)]).astype(np.float32)
    )
    # In a group with two streams, the operations wait for the earlier work of both streams.
    other = da.new_stream(r.device)
    with da.stream(other):
        compute.add(x, 10.0, delay=0.2)
    y = r.array(np.zeros(8, np.float32))
    da.synchronize(r.device)
    nccl.GroupStart()
    nccl.AllReduce(y.ptr, y.ptr, 8, f, 0, comm, other)
    nccl.AllReduce(x.ptr, out.ptr, 8, f, 0, comm, s)
    nccl.GroupEnd()
    found["joined"] = float(out.to_numpy()[0]) == n * (n + 1) / 2 + 10 * n
    da.synchronize(r.device, other)
    # If one call of a group returns an error, GroupEnd also returns this error, and no call of the group runs.
    nccl.GroupStart()
    found["member"] = nccl.code("AllReduce", x.ptr, out.ptr, 8, 99, 0, comm, s)
    nccl.AllReduce(x.ptr, out.ptr, 8, f, 0, comm, s)
    found["group"] = nccl.code("GroupEnd")
    found["end_alone"] = nccl.code("GroupEnd")
    nccl.GroupStart()
    nccl.Send(x.ptr, 8, f, me, comm, s)
    found["to_itself"] = nccl.code("GroupEnd")
    found["usable"] = r.all_reduce(x, comm)
    x.to_numpy()
    da.destroy_stream(other, r.device)
    nccl.CommDestroy(comm)
    return found


@scenario
def exchange_without_group(r: Rank):
    """Let both ranks send first. Each send waits for the receive of the other rank, so neither receive begins."""
    comm = r.init()
    x, out = r.array(np.ones(8, np.float32)), r.empty(8)
    r.nccl.Send(x.ptr, 8, 7, 1 - r.rank, comm, r.stream)
    r.nccl.Recv(out.ptr, 8, 7, 1 - r.rank, comm, r.stream)
    hung = not r.done_within(0.5)
    r.nccl.CommAbort(comm)
    return {"hung": hung, "free": r.done_within(60)}


@scenario
def two_all_reduces(r: Rank):
    """Call all_reduce twice. The tests make the second call fail or hang."""
    comm = r.init()
    x = r.array(np.ones(8, np.float32))
    r.all_reduce(x, comm)
    first = float(x.to_numpy()[0])
    found = {"first": first, "code": r.nccl.code("AllReduce", x.ptr, x.ptr, 8, 7, 0, comm, r.stream)}
    found["text"] = r.nccl.last_error()
    found["done"] = r.done_within(0.5)
    end = time.monotonic() + 60
    while r.arguments.get("until_error") and not r.nccl.state(comm) and time.monotonic() < end:
        time.sleep(0.01)
    found["state"] = r.nccl.state(comm)
    r.nccl.CommAbort(comm)
    found["free"] = r.done_within(60)
    return found


@scenario
def configurations(r: Rank):
    """Return the error code of init for each configuration, or 0. The tests run this scenario with one rank."""
    tries = {
        "good": config(),
        "magic": config(magic=1),
        "header": config(size=8),
        "blocking": config(blocking=2),
        "ctas": config(minCTAs=8, maxCTAs=4),
        "zero": config(minCTAs=0),
        "old": config(size=24, version=21403, minCTAs=0),
        "later": config(version=22809, maxP2pPeers=5),
    }
    found = {}
    for i, (name, one) in enumerate(tries.items()):
        try:
            r.nccl.CommDestroy(r.init(i, one))
            found[name] = 0
        except RuntimeError as error:
            found[name] = error.code
    return found


@scenario
def two_communicators(r: Rank):
    """Call all_reduce on two communicators. Rank 1 makes the two calls in reverse order. Return whether both end."""
    comms, streams = [r.init(0), r.init(1)], [r.stream, da.new_stream(r.device)]
    x = r.array(np.ones(8, np.float32))
    da.synchronize(r.device)
    for i in (0, 1) if r.rank == 0 else (1, 0):
        r.nccl.AllReduce(x.ptr, x.ptr, 8, TYPES["float32"], 2, comms[i], streams[i])
    end = time.monotonic() + 0.5
    while not (done := all(r.done(one) for one in streams)) and time.monotonic() < end:
        time.sleep(0.002)
    for comm in comms:
        r.nccl.CommAbort(comm)
    da.synchronize(r.device, streams[1])
    da.destroy_stream(streams[1], r.device)
    return done


@scenario
def grouped_communicators(r: Rank):
    """Call several communicators in one group, on one stream. All ranks must run the calls in the same order."""
    comms = [r.init(i, config(blocking=0)) for i in range(3)]
    for comm in comms:
        r.nccl.wait(comm)
    xs = [r.array(np.full(8, r.rank + 1, np.float32)) for _ in comms]
    for _ in range(30):
        r.nccl.GroupStart()
        for comm, x in zip(comms, xs, strict=True):
            r.all_reduce(x, comm, "max")
        code = r.nccl.GroupEnd()
        for comm in comms:
            r.nccl.wait(comm)
    values = [float(x.to_numpy()[0]) for x in xs]
    for comm in comms:
        r.nccl.CommDestroy(comm)
    return [code, *values]


@scenario
def misuse(r: Rank):
    """Make the mistake that the argument `what` names. Only a stand-in reports such a mistake."""
    nccl, comm = r.nccl, r.init()
    what = r.arguments["what"]
    if what == "threads":
        # One thread is in a call that waits for the stream. Meanwhile another thread makes calls on the same
        # communicator.
        x = r.array(np.ones(8, np.float32))
        da.synchronize(r.device)
        with compute.hold(r.device):
            r.all_reduce(x, comm)
            thread = threading.Thread(target=nccl.CommFinalize, args=(comm,))
            thread.start()
            end = time.monotonic() + 60
            while not da.counters()["violations"] and time.monotonic() < end:
                nccl.code("AllReduce", x.ptr, x.ptr, 8, 7, 2, comm, r.stream)
        thread.join()
    elif what == "grouped":
        # One thread has begun a group. Meanwhile another thread makes a call on the same communicator.
        x = r.array(np.ones(8, np.float32))
        da.synchronize(r.device)
        nccl.GroupStart()
        r.all_reduce(x, comm)
        thread = threading.Thread(target=nccl.AllReduce, args=(x.ptr, x.ptr, 8, 7, 2, comm, r.stream))
        thread.start()
        thread.join()
        nccl.GroupEnd()
    elif what == "freed":
        x = r.array(np.ones(8, np.float32))
        da.synchronize(r.device)
        with compute.hold(r.device):
            r.all_reduce(x, comm)
            r.cuda.call("cuMemFree_v2", ctypes.c_uint64(x.ptr))
            x._memory.pointer = 0
    elif what == "host":
        x = np.ones(8, np.float32)
        nccl.AllReduce(x.ctypes.data, x.ctypes.data, 8, 7, 0, comm, r.stream)
    elif what == "too long":
        x = r.array(np.ones(8, np.float32))
        nccl.AllReduce(x.ptr, x.ptr, 9, 7, 0, comm, r.stream)
    elif what == "destroyed":
        nccl.CommDestroy(comm)
        return [nccl.code("CommFinalize", comm)]
    elif what == "overlap":
        x = r.array(np.ones(9, np.float32))
        nccl.AllReduce(x.ptr, x[1:].ptr, 8, 7, 0, comm, r.stream)
    elif what == "old symbol":
        return [r.cuda.library.cuMemAlloc(ctypes.byref(ctypes.c_uint()), ctypes.c_uint(8))]
    code = r.cuda.library.cuStreamSynchronize(ctypes.c_uint64(r.stream))
    state = nccl.state(comm)
    nccl.CommAbort(comm)
    return [code, state]


@scenario
def captured(r: Rank):
    """Capture one collective in a graph, and launch the graph three times."""
    comm = r.init()
    library, s = r.cuda.library, ctypes.c_uint64(r.stream)
    x = r.array(np.ones(4, np.float32))
    da.synchronize(r.device)
    status, graph = ctypes.c_int(), ctypes.c_uint64()
    r.cuda.call("cuStreamBeginCapture_v2", s, ctypes.c_int(0))
    r.cuda.call("cuStreamIsCapturing", s, ctypes.byref(status))
    r.all_reduce(x, comm)
    refused = [library.cuStreamSynchronize(s), library.cuStreamQuery(s)]
    r.cuda.call("cuStreamEndCapture", s, ctypes.byref(graph))
    before = float(x.to_numpy()[0])
    for _ in range(3):
        r.cuda.call("cuGraphLaunch", graph, s)
    after = float(x.to_numpy()[0])
    r.cuda.call("cuGraphExecDestroy", graph)
    r.nccl.CommDestroy(comm)
    return {"status": status.value, "refused": refused, "before": before, "after": after}


@scenario
def driver(r: Rank):
    """Check what the driver itself promises, in one process."""
    library, found = r.cuda.library, {}
    u64, i32 = ctypes.c_uint64, ctypes.c_int

    def code(name, *arguments):
        return getattr(library, name)(*arguments)

    pointer, other = u64(), u64()
    r.cuda.call("cuCtxPopCurrent_v2", ctypes.byref(other))
    found["no context"] = code("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(8))
    r.cuda.call("cuCtxPushCurrent_v2", other)
    found["no stream"] = code("cuStreamSynchronize", u64(12345))
    found["no event"] = code("cuEventQuery", u64(12345))
    found["no device"] = code("cuDeviceGet", ctypes.byref(i32()), i32(99))
    found["no context there"] = code("cuCtxPushCurrent_v2", u64(4711))
    found["kernel"] = code("cuModuleLoadData", ctypes.byref(u64()), b"\x7fELF")
    found["library"] = library.cuLibraryLoadData(
        ctypes.byref(u64()), b"\x7fELF", None, None, ctypes.c_uint(0), None, None, ctypes.c_uint(0)
    )
    found["bad free"] = code("cuMemFree_v2", u64(4711))
    x = r.array(np.arange(10, dtype=np.float32))
    kind, ordinal, start = ctypes.c_uint(), i32(-1), u64()
    inside = u64(x.ptr + 12)
    found["kind"] = [code("cuPointerGetAttribute", ctypes.byref(kind), i32(2), inside), kind.value]
    found["ordinal"] = [code("cuPointerGetAttribute", ctypes.byref(ordinal), i32(9), inside), ordinal.value]
    found["start"] = [code("cuPointerGetAttribute", ctypes.byref(start), i32(11), inside), start.value == x.ptr]
    host = np.ones(3)
    found["host"] = code("cuPointerGetAttribute", ctypes.byref(kind), i32(2), u64(host.ctypes.data))
    event = u64()
    r.cuda.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2))
    found["unrecorded"] = code("cuEventQuery", event)
    side = da.new_stream(r.device)
    with compute.hold(r.device):
        r.cuda.call("cuEventRecord", event, u64(r.stream))
        found["recorded"] = code("cuEventQuery", event)
        r.cuda.call("cuStreamWaitEvent", u64(side), event, ctypes.c_uint(0))
        found["side"] = code("cuStreamQuery", u64(side))
    r.cuda.call("cuStreamSynchronize", u64(side))
    found["then"] = code("cuEventQuery", event)
    r.cuda.call("cuEventDestroy_v2", event)
    # The legacy default stream waits for the other streams, except for non-blocking ones.
    polite = da.new_stream(r.device, blocking=True)
    y = r.array(np.zeros(4, np.float32))
    da.synchronize(r.device)
    with da.stream(polite), compute.hold(r.device):
        compute.add(y, 1.0, delay=0.1)
        with da.stream(side):
            found["beside"] = float(y.to_numpy()[0])
    with da.stream(da.LEGACY):
        found["legacy"] = float(y.to_numpy()[0])
    with da.stream(da.PER_THREAD):
        compute.add(y, 1.0, delay=0.1)
        found["own"] = float(y.to_numpy()[0])
    for handle in (side, polite):
        da.destroy_stream(handle, r.device)
    child = os.fork()
    if not child:
        os._exit(library.cuDeviceGetCount(ctypes.byref(i32())))
    found["forked"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return found


@scenario
def arrays(r: Rank):
    """Compare DeviceArray with NumPy."""
    a = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    x = r.array(a)
    bad = []

    def check(what, got: DeviceArray, expected):
        if got.shape != expected.shape or not np.array_equal(got.to_numpy(), expected):
            bad.append(what)

    check("whole", x, a)
    check("step", x[::2, 1:, ::-2], a[::2, 1:, ::-2])
    check("index", x[1, :, 2], a[1, :, 2])
    check("transpose", x.T, a.T)
    check("reshape", x.reshape(12, -1), a.reshape(12, -1))
    check("reshape of a transpose", x.T.reshape(60), a.T.reshape(60))
    y = r.array(np.zeros_like(a))
    y[:, ::2] = x[:, ::2]
    expected = np.zeros_like(a)
    expected[:, ::2] = a[:, ::2]
    check("assigned", y, expected)
    check("scalar", r.array(np.float32(4)), np.array(4, np.float32))
    check("empty", r.array(np.zeros((0, 3))), np.zeros((0, 3)))
    for name in EXTRA:
        b = np.arange(6).astype(EXTRA[name])
        check(name, r.array(b), b)
    described = x[::2].__cuda_array_interface__
    with da.stream(da.LEGACY):
        plain = x.__cuda_array_interface__
    side, filled = da.new_stream(r.device), r.array(np.ones(3))
    da.synchronize(r.device)
    with compute.hold(r.device):
        compute.fill(filled, 7.0)
        with da.stream(side):
            early = float(filled.to_numpy()[0])
    da.destroy_stream(side, r.device)
    return {
        "bad": bad,
        "strides": [described["strides"], plain["strides"]],
        "stream": [described["stream"] == r.stream, plain["stream"]],
        "typestr": [plain["typestr"], r.array(np.ones(1, EXTRA["bfloat16"])).__cuda_array_interface__["typestr"]]
        if EXTRA
        else None,
        "fill": [early, float(filled.to_numpy()[0])],
    }


@scenario
def dlpack(r: Rank):
    """Check that a capsule describes the array and keeps it alive, and that the consumer waits for the array's data."""
    x = r.array(np.arange(12, dtype=EXTRA.get("bfloat16", np.float16)).reshape(3, 4))[:, ::2]
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    get = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    found = {"device": x.__dlpack_device__()}
    capsule = x.__dlpack__(stream=-1)
    tensor = da._Managed.from_address(get(capsule, b"dltensor")).tensor
    found["told"] = [tensor.data == x.ptr, tensor.device_type, tensor.ndim, tensor.code, tensor.bits, tensor.lanes]
    found["layout"] = [*tensor.shape[:2], *tensor.strides[:2]]
    held = len(da._managed)
    del capsule, tensor
    found["held"] = [held, len(da._managed)]
    capsule = x.__dlpack__(stream=-1, max_version=(1, 0))
    found["major"] = da._ManagedVersioned.from_address(get(capsule, b"dltensor_versioned")).major
    del capsule
    y = r.array(np.zeros(4, np.float32))
    compute.add(y, 1.0, delay=0.2)
    side = da.new_stream(r.device)
    y.__dlpack__(stream=side)
    with da.stream(side):
        found["ordered"] = float(y.to_numpy()[0])
    da.destroy_stream(side, r.device)
    return found


@scenario
def together(r: Rank):
    """Let one thread make the calls of all ranks in one group. Each rank has its own device."""
    n, nccl = 3, r.nccl
    comms, places = [], [ctypes.c_uint64() for _ in range(n)]
    from fakes.nccl_calls import UniqueId

    nccl.GroupStart()
    for rank in range(n):
        with r.cuda.on(rank):
            nccl.CommInitRank(ctypes.byref(places[rank]), n, UniqueId.from_buffer_copy(r.ids[0]), rank)
    nccl.GroupEnd()
    comms = [place.value for place in places]
    streams = [da.new_stream(rank) for rank in range(n)]
    xs = [DeviceArray.from_numpy(np.full(9, rank + 1, np.float32), rank, streams[rank]) for rank in range(n)]
    nccl.GroupStart()
    for rank in range(n):
        nccl.AllReduce(xs[rank].ptr, xs[rank].ptr, 9, 7, 0, comms[rank], streams[rank])
    nccl.GroupEnd()
    values = []
    for rank in range(n):
        with da.stream(streams[rank]):
            values.append(float(xs[rank].to_numpy()[0]))
    threads = [threading.Thread(target=nccl.CommDestroy, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, stream in enumerate(streams):
        da.destroy_stream(stream, rank)
    return values


def main() -> None:
    name, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    result = scenarios[name](Rank(rank, size, json.loads(sys.argv[4])))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

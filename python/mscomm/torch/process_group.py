"""The ProcessGroup of torch.distributed over a group of mscomm."""

from __future__ import annotations

import collections
import functools
import time
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.autograd import profiler

import mscomm
from mscomm import _core
from mscomm.arrays.described import in_memory
from mscomm.arrays.numpy import described_dtype
from mscomm.arrays.torch import code_of, memory, repeats, warn_if_differentiated
from mscomm.collectives import FUNCTION, digest_of
from mscomm.job import resolve
from mscomm.torch.works import Finish, Pending, Work, timed_out, uncompiled

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}

_LINEAR = {"sum", "avg"}  # for these, a complex number is two real numbers
_NO_LIMIT = timedelta(0)
# The options of messages, which have none in torch. They may end after the method has returned.
_BESIDE = types.SimpleNamespace(asyncOp=True, timeout=_NO_LIMIT)
# From this number of bytes on, the core reads and writes shared memory directly; see mscomm.empty.
_SHARED_FROM = 16 << 10
_usual_all_reduce = _core.usual_all_reduce(dist.AllreduceOptions, dist.ReduceOp.SUM, profiler)

Call = Callable[..., Any]  # makes a call of mscomm; the arguments are group, timeout and async_op


class _Job:
    """A job, and how many process groups use it."""

    def __init__(self, job: mscomm.Job) -> None:
        self.job = job
        self.users = 0
        self.monitored: collections.Counter[str] = collections.Counter()  # by group: see monitored_barrier


_job: _Job | None = None  # of the default process group; the other process groups are groups of this job


def create(options: Any) -> ProcessGroup:
    """Create the ProcessGroup for one that torch creates. options: torch's _DistributedBackendOptions.

    If the default process group has another backend, each process group is a job of its own.
    """
    global _job
    limit = options.timeout
    ranks = list(options.global_ranks_in_group)  # empty for the default process group
    try:
        if _job is None or not ranks:
            joined = mscomm.join(
                "gloo",
                init_method=options.store,
                rank=options.group_rank,
                world_size=options.group_size,
                timeout=limit,
                join_timeout=limit,
            )
            job, group = _Job(joined), joined.world
            if not ranks:
                _job = job
        else:
            job, group = _job, mscomm.create_group(f"torch {options.group_id}", ranks, timeout=limit, job=_job.job)
    except mscomm.CollectiveTimeout as error:
        raise timed_out(error) from error
    return ProcessGroup(options.store, job, group)


def group(process_group: dist.ProcessGroup | None = None) -> mscomm.Group:
    """Return the Group of mscomm whose calls the process group makes. mscomm's own calls take it as `group`.

    process_group: a process group of the backend mscomm; None means torch's default process group. Calls through torch
    and mscomm's own calls are calls of one group, so all ranks must make them in the same order.

    >>> dist.init_process_group("mscomm")
    >>> rows, counts = mscomm.all_gather_v(x, group=mscomm.torch.group())

    Raise ValueError if the process group has another backend, if this rank is not in it, or if torch.distributed is not
    initialized. Raise TypeError if process_group is not a process group.
    """
    found = dist.group.WORLD if process_group is None else process_group
    if found is None:
        raise ValueError('group: torch.distributed is not initialized; call init_process_group("mscomm") first')
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this rank is not in the process group; call group only on the ranks that are in it")
    if not isinstance(found, dist.ProcessGroup):
        raise TypeError(f"group: process_group is a {type(found).__name__}, expected a process group of torch")
    ours = on_cpu(found)
    if ours is None:
        raise ValueError(
            f"group: the process group has the backend {dist.get_backend(found)}; create it with the backend mscomm, or"
            " join a job with mscomm.init()"
        )
    return ours._group


def on_cpu(process_group: dist.ProcessGroup) -> ProcessGroup | None:
    """Return the ProcessGroup of mscomm that makes the calls on CPU tensors of a process group, if there is one."""
    if isinstance(process_group, ProcessGroup):
        return process_group
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has no backend for the CPU
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    group = getattr(backend, "group", None)  # see mixed.Backend
    return group if isinstance(group, ProcessGroup) else None


_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def _two_forms(options: type, count: int, *words: str, listed: bool = True) -> Callable[[Any], Any]:
    """Let a method take its arguments in both forms that torch has.

    In the first form, the first `count` arguments are tensors, mostly in lists, and an object of the class `options`
    follows. In the second form, values for `words` and a time limit follow. If `listed`, the second form may have a
    tensor in place of a list; every argument is then put into a list of one element.
    """

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def either(self: Any, *given: Any, **named: Any) -> Any:
            tensors, rest = given[:count], given[count:]
            opts = rest[0] if rest else named.get("opts")
            if isinstance(opts, options):
                return method(self, *tensors, opts)
            known = (*words, "timeout")
            if len(rest) > len(known) or not named.keys() <= {*known, "opts"}:
                raise TypeError(
                    f"{method.__name__}: unexpected arguments; after the tensors, it takes {', '.join(known)}"
                )
            made = options()
            for word, value in {**dict(zip(known, rest, strict=False)), **named}.items():
                if value is not None:
                    setattr(made, _FIELDS[word], value)
            if listed and any(isinstance(one, torch.Tensor) for one in tensors):
                tensors = tuple([one] for one in tensors)
            return method(self, *tensors, made)

        return either

    return decorate


class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc, unused-ignore]
    """A process group whose calls mscomm makes. torch.distributed's functions call its methods; see there."""

    def __init__(self, store: Any, job: _Job, group: mscomm.Group) -> None:
        super().__init__(group.rank, group.size)
        self._store = store
        self._job = job
        self._group = group
        self._name = self._desc = ""
        self._is_down = False
        self._unfinished: set[Finish] = set()
        job.users += 1

    # -- what torch asks about the group

    def getBackendName(self) -> str:
        return "mscomm"

    def getRank(self) -> int:
        return self._group.rank

    def getSize(self) -> int:
        return self._group.size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    _get_backend = get_backend  # the name before torch 2.14
    # What torch asks a backend. get_backend() returns this group, because there is no backend in C++.
    supports_coalescing = supports_reconfigure = supports_shrinking = False
    supports_splitting = supports_time_estimate = supports_window = False
    supports_abort_hooks = supports_completion_hooks = _supports_time_estimate = False

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of the group; none until torch has registered it.

        From 2.15 on, torch attaches its flight recorder to a new group that has devices, and needs a backend in C++ for
        that. It has no recorder for groups like this one.
        """
        registered = self in dist.distributed_c10d._world.pg_map
        return [torch.device("cpu")] if registered else []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return bool(device.type == "cpu")

    def allocate_tensor(self, size: int, *, dtype: Any, device: torch.device) -> Any:
        """Return a tensor in memory that the ranks share. FSDP2 asks for it if the program says so."""
        return self._staging(size, torch.empty(0, dtype=dtype, device=device))

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        raise RuntimeError(
            "mscomm: torch calls hooks in its dispatcher, which the calls of this process group do not pass. A process"
            ' group with several backends has hooks: init_process_group("cpu:mscomm,cuda:gloo")'
        )

    register_post_hook = register_pre_hook

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # -- the end of the group

    def abort(self) -> None:
        """Break the group on all ranks, and leave it, as torch does not use the group afterwards."""
        if self._group.job is None or self._is_down:
            return
        self._group.abort(f"rank {self._group.rank} aborted the process group {self._name}")
        if self._job.users == 1:  # shutdown() leaves the job, and would wait for the calls of its other groups
            self._job.job.abort(f"its process group {self._name} was aborted")
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group. When the last process group of the job has been shut down, leave the job."""
        global _job
        job = self._job
        if self._group.job is None or self._is_down:
            return
        self._is_down = True
        job.users -= 1
        if job.users == 0:
            if _job is job:
                _job = None
            job.job.release()
        elif self._group is not job.job.world:
            mscomm.destroy_group(self._group)
        for finish in tuple(self._unfinished):
            finish.call_unless_failed()

    # -- collectives

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, **named: Any) -> Work:
        # Most calls are of the usual kind. In C++, they take half the time that _allreduce takes.
        try:
            made = _usual_all_reduce(resolve(self._group).core, tensors, opts)
        except mscomm.CollectiveTimeout as error:
            raise timed_out(error) from error
        if made is None:
            work: Work = self._allreduce(tensors, opts, *rest, **named)
            return work
        return Pending(tensors, [made]) if opts.asyncOp else Work(tensors)

    @_two_forms(dist.AllreduceOptions, 1, "op")
    def _allreduce(self, tensors: list[Any], opts: Any) -> Work:
        if tensors and tensors[0].layout is torch.sparse_coo:
            return self._sparse(tensors, opts)
        return self._reduced(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Work:
        return self._reduced(tensors, opts or dist.AllreduceCoalescedOptions())

    def _reduced(self, tensors: list[Any], opts: Any) -> Work:
        op, scale = _op(opts)
        flats, finish = _flats(tensors, op in _LINEAR)
        if scale is not None:
            for flat in flats:
                flat.mul_(scale)
        calls = [functools.partial(mscomm.all_reduce_, flat, _summed(op, flat)) for flat in flats]
        return self._made("all_reduce", calls, opts, tensors, self._averaged(op, flats, finish))

    def _sparse(self, tensors: list[Any], opts: Any) -> Work:
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError("allreduce: sparse tensors can only be summed")
        for tensor in tensors:
            mine = tensor.detach().coalesce()
            self._check_shapes(mine, opts)
            gathers = [
                functools.partial(mscomm.all_gather_v, x.contiguous()) for x in (mine.indices().t(), mine.values())
            ]
            (places, _), (values, _) = self._called(gathers, opts, False)
            total = torch.sparse_coo_tensor(places.t(), values, tensor.shape).coalesce()
            with torch.no_grad():
                tensor.copy_(total)
        return Work(tensors)

    def _check_shapes(self, sparse: Any, opts: Any) -> None:
        """Raise ValueError on all ranks if the sparse tensors differ in shape or in the number of sparse dimensions."""
        mine = torch.tensor([sparse.sparse_dim(), *sparse.shape])
        (shapes,) = self._called([functools.partial(mscomm.all_gather, mine[None])], opts, False)
        for rank, (dims, *shape) in enumerate(shapes.tolist()):
            if [dims, *shape] != mine.tolist():
                other = f"rank {rank} has a sparse tensor of shape {tuple(shape)} ({dims} sparse dimensions)"
                ours = f"rank {self._group.rank} one of shape {tuple(sparse.shape)} ({sparse.sparse_dim()})"
                raise ValueError(f"allreduce: {other}, and {ours}")

    @_two_forms(dist.BroadcastOptions, 1, "root")
    def broadcast(self, tensors: list[Any], opts: Any) -> Work:
        flats, finish = _flats(tensors)
        calls = [functools.partial(mscomm.broadcast_, flat, opts.rootRank) for flat in flats]
        return self._made("broadcast", calls, opts, tensors, None if self._group.rank == opts.rootRank else finish)

    @_two_forms(dist.ReduceOptions, 1, "root", "op")
    def reduce(self, tensors: list[Any], opts: Any) -> Work:
        op, scale = _op(opts)
        at_root = self._group.rank == opts.rootRank
        flats, finish = _flats(tensors, op in _LINEAR)
        calls = []
        for flat in flats:
            x = flat if scale is None else flat * scale
            out = flat if at_root else None
            calls.append(functools.partial(mscomm.reduce, x, opts.rootRank, _summed(op, flat), out=out))
        return self._made("reduce", calls, opts, tensors, self._averaged(op, flats, finish) if at_root else None)

    def all_gather_single(self, output: Any, mine: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs: list[Any], mine: list[Any], opts: Any = None) -> Work:
        opts = opts or AllgatherOptions()
        flats, finish = _flats(outputs)
        calls = [functools.partial(mscomm.all_gather, _flat(x), out=flat) for x, flat in zip(mine, flats, strict=True)]
        return self._made("all_gather", calls, opts, outputs, finish)

    @_two_forms(AllgatherOptions, 2)
    def allgather(self, outputs: list[list[Any]], mine: list[Any], opts: Any) -> Work:
        calls, ends = [], []
        for parts, x in zip(outputs, mine, strict=True):
            flat = _flat(x)
            _check_list("allgather", parts, self._group.size)
            _check_list("allgather", [parts[self._group.rank]], 1, flat)
            counts = [part.numel() for part in parts]
            whole = self._staging(sum(counts), flat)
            if counts == [flat.numel()] * len(counts):
                calls.append(functools.partial(mscomm.all_gather, flat, out=whole))
            else:
                calls.append(functools.partial(_all_gather_v, flat, counts, whole))
            ends.append((whole, parts))
        written = [part for parts in outputs for part in parts]
        return self._made("all_gather", calls, opts, written, lambda: _scattered(ends))

    def allgather_coalesced(self, outputs: list[list[Any]], mine: list[Any], opts: Any = None) -> Work:
        by_input = [[ranks[i] for ranks in outputs] for i in range(len(mine))]
        work: Work = self.allgather(by_input, mine, opts)
        return work

    @_two_forms(dist.GatherOptions, 2, "root")
    def gather(self, outputs: list[list[Any]], mine: list[Any], opts: Any) -> Work:
        calls, ends = [], []
        for i, x in enumerate(mine):
            flat, whole = _flat(x), None
            if self._group.rank == opts.rootRank:
                _check_list("gather", outputs[i], self._group.size, flat)
                whole = self._staging(self._group.size * flat.numel(), flat)
                ends.append((whole, outputs[i]))
            calls.append(functools.partial(mscomm.gather, flat, opts.rootRank, out=whole))
        written = [part for parts in outputs for part in parts]
        return self._made("gather", calls, opts, written, lambda: _scattered(ends))

    def gather_single(self, output: Any, x: Any, opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        outputs = [output] if self._group.rank == opts.rootRank else []
        flats, finish = _flats(outputs)
        call = functools.partial(mscomm.gather, _flat(x), opts.rootRank, out=flats[0] if flats else None)
        return self._made("gather", [call], opts, outputs, finish)

    gather_into_tensor = gather_single

    @_two_forms(dist.ScatterOptions, 2, "root")
    def scatter(self, outputs: list[Any], parts: list[list[Any]], opts: Any) -> Work:
        flats, finish = _flats(outputs)
        calls = []
        for i, flat in enumerate(flats):
            others = None
            if self._group.rank == opts.rootRank:
                _check_list("scatter", parts[i], self._group.size, flat)
                every = [_flat(part) for part in parts[i]]
                mine = every.pop(opts.rootRank)
                others = every[0] if len(every) == 1 else self._joined(every or [flat[:0]])
                if mine.data_ptr() != flat.data_ptr():
                    flat.copy_(mine)
            calls.append(functools.partial(_scatter, others, opts.rootRank, flat))
        return self._made("scatter", calls, opts, outputs, finish)

    def reduce_scatter_single(self, output: Any, x: Any, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], xs: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        op, scale = _op(opts)
        flats, finish = _flats(outputs, op in _LINEAR)
        calls = []
        for x, out in zip(xs, flats, strict=True):
            flat = _flat(x, op in _LINEAR)
            flat = flat if scale is None else flat * scale
            calls.append(functools.partial(mscomm.reduce_scatter, flat, _summed(op, out), out=out))
        return self._made("reduce_scatter", calls, opts, outputs, self._averaged(op, flats, finish))

    @_two_forms(dist.ReduceScatterOptions, 2, "op")
    def reduce_scatter(self, outputs: list[Any], xs: list[list[Any]], opts: Any) -> Work:
        op, scale = _op(opts)
        outs, finish = _flats(outputs, op in _LINEAR)
        calls = []
        for parts, out in zip(xs, outs, strict=True):
            _check_list("reduce_scatter", parts, self._group.size)
            flats = [_flat(part, op in _LINEAR) for part in parts]
            whole = self._joined(flats)
            if scale is not None:
                whole.mul_(scale)
            counts, how = [flat.numel() for flat in flats], _summed(op, out)
            if len(set(counts)) == 1:
                calls.append(functools.partial(mscomm.reduce_scatter, whole, how, out=out))
            else:
                calls.append(functools.partial(mscomm.reduce_scatter_v, whole, counts, how, out=out))
        return self._made("reduce_scatter", calls, opts, outputs, self._averaged(op, outs, finish))

    @_two_forms(dist.AllToAllOptions, 4, listed=False)
    def all_to_all_single(
        self, output: Any, x: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any
    ) -> Work:
        (out,), finish = _flats([output])
        counts = self._counts("input", x, input_splits)
        received = self._counts("output", output, output_splits)
        return self._exchanged(_flat(x), counts, out, received, opts, [output], finish)

    @_two_forms(dist.AllToAllOptions, 2)
    def alltoall(self, outputs: list[Any], xs: list[Any], opts: Any) -> Work:
        _check_list("alltoall", outputs, self._group.size)
        _check_list("alltoall", xs, self._group.size)
        flats = [_flat(x) for x in xs]
        received = [output.numel() for output in outputs]
        whole = self._staging(sum(received), flats[0])
        counts = [flat.numel() for flat in flats]
        end = [(whole, outputs)]
        return self._exchanged(self._joined(flats), counts, whole, received, opts, outputs, lambda: _scattered(end))

    def _exchanged(
        self,
        flat: Any,
        counts: list[int],
        out: Any,
        received: list[int],
        opts: Any,
        outputs: list[Any],
        finish: Callable[[], object] | None,
    ) -> Work:
        # A rank whose parts are equal does not know whether those of the other ranks are, so all make the uneven call.
        call = functools.partial(mscomm.all_to_all_v, _array(flat), counts, recv_counts=received, out=_array(out))
        return self._made("all_to_all", [call], opts, outputs, finish)

    def _counts(self, what: str, tensor: Any, splits: Sequence[int]) -> list[int]:
        """Return how many elements of the tensor belong to each rank."""
        size = self._group.size
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise ValueError(
                    f"all_to_all_single: the {what} has {rows} rows, which {size} ranks cannot share equally"
                )
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"all_to_all_single: the {what} splits {list(splits)} do not fit {size} ranks and {rows} rows"
            )
        width = tensor.numel() // rows if rows else 0
        return [count * width for count in splits]

    @_two_forms(dist.BarrierOptions, 0)
    def barrier(self, opts: Any) -> Work:
        """Wait for all ranks. The asynchronous calls that this rank has made before have then filled their tensors."""
        before = tuple(self._unfinished)

        def finish() -> None:
            for one in before:
                one.wait()

        return self._made("barrier", [mscomm.barrier], opts, [], finish if before else None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait in rank 0 for each other rank, and name those that do not come. The group can be used afterwards.

        The ranks meet in the store, because a collective call that times out would break the group. The texts of the
        errors are those of gloo.
        """
        # Torch's store may still have the keys of an earlier job, or of an earlier group of this name.
        name, run = self._group.name, self._group.epoch.run
        self._job.monitored[name] += 1
        limit_s = self._group.timeout_s if timeout is None else timeout.total_seconds()
        prefix, until = f"monitored {run.hex()} {name} {self._job.monitored[name]}", time.monotonic() + limit_s
        me, size = self._group.rank, self._group.size
        what = f"monitoredBarrier in {limit_s * 1000:.0f} ms"
        if me:
            self._store.set(f"{prefix} {me}", "here")
            if not self._appears(f"{prefix} end", until) or self._store.get(f"{prefix} end") != b"all":
                raise RuntimeError(
                    f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                    "from rank 0. Please check rank 0 logs for faulty rank."
                )
            return
        missing = []
        for rank in range(1, size):
            if limit_s <= 0:
                text = f"Rank 0 timed out in {what}"
            elif not self._appears(f"{prefix} {rank}", until):
                missing.append(rank)
                text = f"Rank {rank} failed to pass {what}"
                if wait_all_ranks:
                    continue
            else:
                continue
            self._store.set(f"{prefix} end", "failed")
            raise RuntimeError(text)
        self._store.set(f"{prefix} end", "failed" if missing else "all")
        if missing:
            raise RuntimeError(f"Ranks {', '.join(map(str, missing))} failed to pass {what}")

    def _appears(self, key: str, until: float) -> bool:
        """Wait for the key in the store. Return whether it is there."""
        while not self._store.check([key]):  # wait() prints lines if it times out
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    # torch 2.11 and 2.12 call these names
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- messages

    def send(self, tensors: list[Any], dst: int, tag: int = 0) -> Work:
        calls = [functools.partial(mscomm.send, _flat(tensor), dst, tag) for tensor in tensors]
        return self._made("send", calls, _BESIDE, [], None)

    def recv(self, tensors: list[Any], src: Any, tag: int = 0) -> Work:
        flats, finish = _flats(tensors)
        calls = [functools.partial(mscomm.recv, flat, src, tag) for flat in flats]
        return self._made("recv", calls, _BESIDE, tensors, finish)

    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> Work:
        return self.recv(tensors, mscomm.ANY_SOURCE, tag)

    # -- making calls

    def _made(
        self, name: str, calls: Sequence[Call], opts: Any, tensors: list[Any], finish: Callable[[], object] | None
    ) -> Work:
        """Make the calls. With opts.asyncOp, return before they end. While a profiler records, this is an event, which
        ends when the calls end.

        tensors: the tensors that the calls write.
        """
        for tensor in tensors:
            if tensor.requires_grad:
                warn_if_differentiated(tensor)
        if not profiler._is_profiler_enabled:
            return self._begun(calls, opts, tensors, finish)
        with profiler.record_function(f"mscomm:{name}") as event:
            work = self._begun(calls, opts, tensors, finish)
            if isinstance(work, Pending):
                work.end_with(event)
        return work

    def _begun(self, calls: Sequence[Call], opts: Any, tensors: list[Any], finish: Callable[[], object] | None) -> Work:
        if opts.asyncOp:
            parts = self._called(calls, opts, True)
            # A barrier does not wait for messages.
            unfinished = set() if opts is _BESIDE else self._unfinished
            return Pending(tensors, parts, None if finish is None else Finish(parts, finish, unfinished))
        self._called(calls, opts, False)
        if finish is not None:
            finish()
        return Work(tensors)

    def _called(self, calls: Sequence[Call], opts: Any, beside: bool) -> list[Any]:
        how = {"group": self._group, "timeout": self._limit(opts), "async_op": beside}
        try:
            made = [call(**how) for call in calls[:1]]
            if len(calls) > 1:
                # The other ranks may have begun the next call. An invalid argument must not let them wait for it.
                with self._group.committed("a call on several tensors"):
                    made += [call(**how) for call in calls[1:]]
            return made
        except mscomm.CollectiveTimeout as error:
            raise timed_out(error) from error

    def _averaged(self, op: str, flats: list[Any], finish: Callable[[], object] | None) -> Callable[[], object] | None:
        """Return a function that divides sums of integers if `op` is "avg", and then calls `finish`."""
        sums = [flat for flat in flats if _summed(op, flat) != op]
        if not sums:
            return finish

        def end() -> None:
            for flat in sums:
                _divide(_array(flat), self._group.size)
            if finish is not None:
                finish()

        return end

    def _limit(self, opts: Any) -> Any:
        """Return the time limit of a call with these options, as an argument of mscomm's functions."""
        limit = opts.timeout
        return limit if limit > _NO_LIMIT else self._group.timeout_s

    def _staging(self, count: int, like: Any) -> Any:
        """Return an uninitialised tensor of one dimension. If it is large, it is in memory that the ranks share."""
        memory = shared_memory(self._group, count * like.element_size())
        return like.new_empty(count) if memory is None else memory.view(like.dtype)

    def _joined(self, flats: list[Any]) -> Any:
        return torch.cat(flats, out=self._staging(sum(flat.numel() for flat in flats), flats[0]))


uncompiled(*vars(ProcessGroup).values())


def shared_memory(group: mscomm.Group, size: int) -> Any:
    """Return `size` uninitialised bytes of memory that the ranks of this host share, as a tensor.

    Return None if the job has no other rank on this host, if that memory is full, or if the bytes are so few that
    sharing gains nothing. Raise MemoryError if the host does not have enough memory.
    """
    heap = group.epoch.heap
    memory = heap.allocate(size) if heap is not None and size >= _SHARED_FROM else None
    return None if memory is None else torch.from_numpy(memory[:size])


def _unwrapped(tensor: Any) -> Any:
    """Return the tensor itself, or the result of a functional collective for which the tensor stands."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "trigger_wait"):
        return tensor
    return tensor.trigger_wait()


def _flat(tensor: Any, real: bool = False) -> Any:
    """Return the elements of a tensor as a tensor of one dimension.

    The result shares the memory of the tensor if that is in C order. `data` has a version counter of its own: autograd
    must not see that a call has written the tensor, as with gloo. real: whether complex numbers are seen as twice as
    many real numbers, as sums are.
    """
    tensor = _unwrapped(tensor)
    if not tensor.is_cpu:
        raise ValueError(
            f"mscomm: a tensor is on {tensor.device}; this process group is for tensors on the CPU. Make another with"
            ' torch.distributed.new_group(backend="nccl")'
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"mscomm: a tensor has the layout {tensor.layout}; expected a dense tensor")
    flat = tensor.data
    if flat.is_neg() or flat.is_conj() or not flat.is_contiguous():
        flat = flat.resolve_conj().resolve_neg().contiguous()
    if flat.dim() != 1:
        flat = flat.view(-1)
    return torch.view_as_real(flat).view(-1) if real and flat.is_complex() else flat


def _flats(tensors: Sequence[Any], real: bool = False) -> tuple[list[Any], Callable[[], object] | None]:
    """Return _flat() of tensors that a call writes, and a function that copies back those that share no memory."""
    flats, copies = [], []
    for tensor in map(_unwrapped, tensors):
        flat = _flat(tensor, real)
        flats.append(flat)
        if flat.data_ptr() != tensor.data_ptr():
            if repeats(tensor):
                raise ValueError("mscomm: several elements of a tensor that the call writes share memory; use clone()")
            copies.append((tensor, flat))
    return flats, functools.partial(_put_back, copies) if copies else None


def _put_back(copies: list[tuple[Any, Any]]) -> None:
    for tensor, flat in copies:
        tensor.data.copy_(flat.view(tensor.dtype).view(tensor.shape))


def _array(flat: Any) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor of one dimension, faster than mscomm.arrays.torch.memory does.

    flat.numpy() would keep PyTorch from resizing the tensor.
    """
    count, storage = flat.numel(), flat.untyped_storage()
    end = (flat.storage_offset() + count) * flat.element_size()
    if count and (storage.nbytes() < end or not storage.data_ptr()):
        try:
            return memory(flat)
        except TypeError as error:
            raise TypeError(f"mscomm: a tensor {error}") from None
    return in_memory(flat, flat.data_ptr(), (count,), _dtype(flat.dtype), None)


@functools.cache
def _dtype(kind: Any) -> np.dtype[Any]:
    return described_dtype(code_of(torch.empty(0, dtype=kind)))


def _scatter(others: Any, root: int, out: Any, *, group: mscomm.Group, timeout: Any, async_op: bool) -> Any:
    """Do the same as mscomm.scatter, but do not send the shape first: `out` tells it to every rank.

    others: at the root, the parts of all other ranks. The root has its own part already.
    """
    x = None if others is None else _array(others)
    counts = [0 if rank == root else out.numel() for rank in range(group.size)]
    target = _array(out[:0] if group.rank == root else out)
    told = ((sum(counts),), code_of(out))
    call = group.core.prepare(FUNCTION["scatter"], x, target, root=root, rows=counts, told=told)
    return _started(call, group, timeout, async_op)


def _all_gather_v(flat: Any, counts: list[int], out: Any, *, group: mscomm.Group, timeout: Any, async_op: bool) -> Any:
    """Do the same as mscomm.all_gather_v, but do not send the counts first: every rank's list tells them. The ranks
    compare the digests of their counts.
    """
    number, what = FUNCTION["all_gather_v"], FUNCTION["all_gather"]
    call = group.core.prepare(number, _array(flat), _array(out), what=what, rows=counts, digest=digest_of(counts))
    return _started(call, group, timeout, async_op)


def _started(call: Any, group: mscomm.Group, timeout: Any, async_op: bool) -> Any:
    seconds = group.seconds(timeout, _core.functions[call.function])
    return group.start(call, seconds) if async_op else group.run(call, seconds)


def _op(opts: Any) -> tuple[str, Any]:
    """Return the name of the reduction, and a factor for x or None."""
    given = opts.reduceOp
    for op, name in _OPS.items():
        if given == op:
            return name, None
    if given == dist.ReduceOp.RedOpType.PREMUL_SUM:
        return "sum", given.factor
    raise ValueError(f"mscomm: {given} is not supported; use one of {', '.join(_OPS.values())}")


def _summed(op: str, flat: Any) -> str:
    """Return "sum" for the average of integers, and otherwise `op`.

    As NCCL does, a call sums the integers, and then divides the sum. Lightning averages integers with every backend
    that is not named gloo.
    """
    integers = not (flat.is_floating_point() or flat.is_complex() or flat.dtype == torch.bool)
    return "sum" if op == "avg" and integers else op


def _divide(sums: np.ndarray[Any, Any], size: int) -> None:
    """Divide integers in place, and round towards zero."""
    wide = sums.astype(np.int64) if sums.itemsize < 8 else sums  # `size` may be too large for a small dtype
    wide -= np.fmod(wide, size)
    wide //= size
    if wide is not sums:
        sums[...] = wide


def _check_list(function: str, tensors: Sequence[Any], size: int, like: Any = None) -> None:
    """Raise ValueError unless the list has a tensor for each rank, all of one dtype. like: whose size they have."""
    if len(tensors) != size:
        raise ValueError(f"{function}: the list has {len(tensors)} tensors for {size} ranks")
    first = tensors[0] if like is None else like
    for tensor in tensors:
        if tensor.dtype != first.dtype:
            raise ValueError(f"{function}: the list has a tensor of {tensor.dtype}, expected {first.dtype}")
        if like is not None and tensor.numel() != like.numel():
            raise ValueError(f"{function}: the list has a tensor of {tensor.numel()} elements, expected {like.numel()}")


def _scattered(ends: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Copy each whole tensor to its parts."""
    for whole, parts in ends:
        for part, flat in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
            part.data.copy_(flat if part.dim() == 1 else flat.view(part.shape))

"""The ProcessGroup of torch.distributed over a group of mscomm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import mscomm
from mscomm.torch.works import Work, telling

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

Call = Callable[[bool], Any]  # makes a call of mscomm; the argument says whether with async_op


class _Job:
    """The job of the default process group. Its other process groups are groups of this job."""

    def __init__(self, job: mscomm.Job) -> None:
        self.job = job
        self.users = 0


_job: _Job | None = None


def create(options: Any) -> ProcessGroup:
    """Create the ProcessGroup that torch asks for. options: torch's _DistributedBackendOptions."""
    global _job
    limit = options.timeout
    ranks = list(options.global_ranks_in_group)
    with telling():
        if _job is None or not ranks:
            job = mscomm.join(
                "gloo",
                init_method=options.store,
                rank=options.group_rank,
                world_size=options.group_size,
                timeout=limit,
                join_timeout=limit,
            )
            _job, group = _Job(job), job.world
        else:
            group = mscomm.create_group(f"torch {options.group_id}", ranks, timeout=limit, job=_job.job)
    return ProcessGroup(options.store, _job, group)


class ProcessGroup(dist.ProcessGroup):  # type: ignore[misc, unused-ignore]
    """A process group whose calls mscomm makes. torch.distributed's functions call its methods; see there."""

    supports_tensor_alloc = False

    def __init__(self, store: Any, job: _Job, group: mscomm.Group) -> None:
        super().__init__(group.rank, group.size)
        self._store = store
        self._job = job
        self._group = group
        self._name = self._desc = ""
        self._monitored = 0  # how many monitored barriers this rank has entered
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

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    def get_group_store(self) -> Any:
        return self._store

    def _set_default_timeout(self, timeout: Any) -> None:
        self._group.timeout_s = timeout.total_seconds()

    # -- the end of the group

    def abort(self) -> None:
        self._group.abort(f"rank {self._group.rank} aborted the process group {self._name}")

    def shutdown(self) -> None:
        """Leave the group. When the last process group of the job has been shut down, leave the job."""
        global _job
        job = self._job
        if self._group.job is None:
            return
        job.users -= 1
        if job.users == 0:
            if _job is job:
                _job = None
            job.job.release()
        elif self._group is not job.job.world:
            mscomm.destroy_group(self._group)

    # -- collectives

    def allreduce(self, tensors: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        if any(tensor.layout == torch.sparse_coo for tensor in tensors):
            return self._sparse(tensors, opts)
        return self._reduced(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Work:
        return self._reduced(tensors, opts or dist.AllreduceCoalescedOptions())

    def _reduced(self, tensors: list[Any], opts: Any) -> Work:
        op, scale = _op(opts)
        places = [_Place(tensor, real=True) for tensor in tensors]
        for place in places:
            if scale is not None:
                place.flat.mul_(scale)
        calls = [self._calling(mscomm.all_reduce_, place.flat, op, opts=opts) for place in places]
        return self._made(calls, opts, tensors, _put_back(places))

    def _sparse(self, tensors: list[Any], opts: Any) -> Work:
        if opts.reduceOp != dist.ReduceOp.SUM:
            raise ValueError("allreduce: sparse tensors can only be summed")
        for tensor in tensors:
            mine = tensor.detach().coalesce()
            with telling():
                places, values = (
                    mscomm.all_gather_v(x.contiguous(), group=self._group, timeout=self._limit(opts))[0]
                    for x in (mine.indices().t(), mine.values())
                )
            total = torch.sparse_coo_tensor(places.t(), values, tensor.shape).coalesce()
            with torch.no_grad():
                tensor.copy_(total)
        return Work((), None, tensors)

    def broadcast(self, tensors: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        places = [_Place(tensor) for tensor in tensors]
        calls = [self._calling(mscomm.broadcast_, place.flat, opts.rootRank, opts=opts) for place in places]
        return self._made(calls, opts, tensors, _put_back(places))

    def reduce(self, tensors: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.ReduceOptions()
        op, scale = _op(opts)
        places = [_Place(tensor, real=True) for tensor in tensors]
        calls = []
        for place in places:
            x = place.flat if scale is None else place.flat * scale
            out = place.flat if self._group.rank == opts.rootRank else None
            calls.append(self._calling(mscomm.reduce, x, opts.rootRank, op, out=out, opts=opts))
        return self._made(calls, opts, tensors, _put_back(places))

    def all_gather_single(self, output: Any, mine: Any, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(self, outputs: list[Any], mine: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.AllgatherOptions()
        places = [_Place(output) for output in outputs]
        calls = [
            self._calling(mscomm.all_gather, _Place(x).flat, out=place.flat, opts=opts)
            for x, place in zip(mine, places, strict=True)
        ]
        return self._made(calls, opts, outputs, _put_back(places))

    def allgather(self, outputs: list[list[Any]], mine: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.AllgatherOptions()
        calls, ends = [], []
        for parts, x in zip(outputs, mine, strict=True):
            _check_count("allgather", parts, self._group.size)
            flat = _Place(x).flat
            if all(part.numel() == flat.numel() for part in parts):
                whole = flat.new_empty(len(parts) * flat.numel())
                calls.append(self._calling(mscomm.all_gather, flat, out=whole, opts=opts))
            else:
                whole = flat.new_empty(sum(part.numel() for part in parts))
                calls.append(self._calling(mscomm.all_gather_v, flat, out=whole, opts=opts))
            ends.append((whole, parts))
        return self._made(calls, opts, [part for parts in outputs for part in parts], lambda: _scattered(ends))

    def allgather_coalesced(self, outputs: list[list[Any]], mine: list[Any], opts: Any = None) -> Work:
        by_input = [[ranks[i] for ranks in outputs] for i in range(len(mine))]
        return self.allgather(by_input, mine, opts)

    def gather(self, outputs: list[list[Any]], mine: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.GatherOptions()
        calls, ends = [], []
        for i, x in enumerate(mine):
            flat, whole = _Place(x).flat, None
            if self._group.rank == opts.rootRank:
                _check_count("gather", outputs[i], self._group.size)
                whole = flat.new_empty(self._group.size * flat.numel())
                ends.append((whole, outputs[i]))
            calls.append(self._calling(mscomm.gather, flat, opts.rootRank, out=whole, opts=opts))
        return self._made(calls, opts, [part for parts in outputs for part in parts], lambda: _scattered(ends))

    def scatter(self, outputs: list[Any], parts: list[list[Any]], opts: Any = None) -> Work:
        opts = opts or dist.ScatterOptions()
        calls, places = [], [_Place(output) for output in outputs]
        for i, place in enumerate(places):
            whole = None
            if self._group.rank == opts.rootRank:
                _check_count("scatter", parts[i], self._group.size)
                whole = _joined(parts[i])
            calls.append(self._calling(mscomm.scatter, whole, opts.rootRank, out=place.flat, opts=opts))
        return self._made(calls, opts, outputs, _put_back(places))

    def reduce_scatter_single(self, output: Any, x: Any, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Any], xs: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        op, scale = _op(opts)
        places = [_Place(output, real=True) for output in outputs]
        calls = []
        for x, place in zip(xs, places, strict=True):
            flat = _Place(x, real=True).flat
            flat = flat if scale is None else flat * scale
            calls.append(self._calling(mscomm.reduce_scatter, flat, op, out=place.flat, opts=opts))
        return self._made(calls, opts, outputs, _put_back(places))

    def reduce_scatter(self, outputs: list[Any], xs: list[list[Any]], opts: Any = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        op, scale = _op(opts)
        places = [_Place(output, real=True) for output in outputs]
        calls = []
        for parts, place in zip(xs, places, strict=True):
            _check_count("reduce_scatter", parts, self._group.size)
            flats = [_Place(part, real=True).flat for part in parts]
            whole = torch.cat(flats)
            if scale is not None:
                whole.mul_(scale)
            counts = [flat.numel() for flat in flats]
            call, more = (mscomm.reduce_scatter, ()) if len(set(counts)) == 1 else (mscomm.reduce_scatter_v, (counts,))
            calls.append(self._calling(call, whole, *more, op, out=place.flat, opts=opts))
        return self._made(calls, opts, outputs, _put_back(places))

    def all_to_all_single(
        self, output: Any, x: Any, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Work:
        opts = opts or dist.AllToAllOptions()
        place, flat = _Place(output), _Place(x).flat
        counts = self._counts("input", x, input_splits)
        received = self._counts("output", output, output_splits)
        return self._exchanged(flat, counts, place.flat, received, opts, [output], _put_back([place]))

    def alltoall(self, outputs: list[Any], xs: list[Any], opts: Any = None) -> Work:
        opts = opts or dist.AllToAllOptions()
        _check_count("alltoall", outputs, self._group.size)
        _check_count("alltoall", xs, self._group.size)
        flats = [_Place(x).flat for x in xs]
        received = [output.numel() for output in outputs]
        whole = flats[0].new_empty(sum(received))
        counts = [flat.numel() for flat in flats]
        end = [(whole, outputs)]
        return self._exchanged(torch.cat(flats), counts, whole, received, opts, outputs, lambda: _scattered(end))

    def _exchanged(
        self,
        flat: Any,
        counts: list[int],
        out: Any,
        received: list[int],
        opts: Any,
        outputs: list[Any],
        finish: Callable[[], None],
    ) -> Work:
        # A rank whose parts are equal does not know whether those of the other ranks are, so all make the uneven call.
        call = self._calling(mscomm.all_to_all_v, flat, counts, recv_counts=received, out=out, opts=opts)
        return self._made([call], opts, outputs, finish)

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

    def barrier(self, opts: Any = None) -> Work:
        opts = opts or dist.BarrierOptions()
        return self._made([self._calling(mscomm.barrier, opts=opts)], opts, [], None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait in rank 0 for each other rank, and name those that do not come. The group can be used afterwards.

        The ranks meet in the store, because a collective call that times out would break the group. The texts of the
        errors are those of gloo.
        """
        self._monitored += 1
        limit_s = self._group.timeout_s if timeout is None else timeout.total_seconds()
        prefix, until = f"monitored {self._monitored}", time.monotonic() + limit_s
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
        with telling():
            parts = [mscomm.send(_Place(x).flat, dst, tag, group=self._group, async_op=True) for x in tensors]
        return Work(parts, None, tensors)

    def recv(self, tensors: list[Any], src: int, tag: int = 0) -> Work:
        return self._received(tensors, src, tag)

    def recv_anysource(self, tensors: list[Any], tag: int = 0) -> Work:
        return self._received(tensors, mscomm.ANY_SOURCE, tag)

    def _received(self, tensors: list[Any], src: Any, tag: int) -> Work:
        status = mscomm.Status()
        places = [_Place(tensor) for tensor in tensors]
        with telling():
            parts = [
                mscomm.recv(place.flat, src, tag, status=status, group=self._group, async_op=True) for place in places
            ]
        return Work(parts, _put_back(places), tensors, status)

    # -- making calls

    def _limit(self, opts: Any) -> float | None:
        """Return the time limit of one call in seconds; None for that of the group."""
        seconds = opts.timeout.total_seconds() if hasattr(opts, "timeout") else 0.0
        return seconds if seconds > 0 else None

    def _calling(self, function: Callable[..., Any], *args: Any, opts: Any, **options: Any) -> Call:
        limit = self._limit(opts)
        return lambda beside: function(*args, **options, group=self._group, timeout=limit, async_op=beside)

    def _made(self, calls: list[Call], opts: Any, tensors: list[Any], finish: Callable[[], None] | None) -> Work:
        """Make the calls. With opts.asyncOp, return before they end."""
        with telling():
            if getattr(opts, "asyncOp", True):
                return Work([call(True) for call in calls], finish, tensors)
            for call in calls:
                call(False)
        if finish is not None:
            finish()
        return Work((), None, tensors)


class _Place:
    """The memory of a tensor, as a tensor of one dimension.

    flat: shares the memory of the tensor if that is in C order; otherwise, put_back() copies flat to the tensor. `data`
    has a version counter of its own: autograd must not see that a call has written the tensor, as with gloo. real:
    whether a complex tensor is seen as twice as many real numbers, as sums are.
    """

    def __init__(self, tensor: Any, real: bool = False) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(f"mscomm: a tensor is on {tensor.device}; this process group is for tensors on the CPU")
        if tensor.layout != torch.strided:
            raise ValueError(f"mscomm: a tensor has the layout {tensor.layout}; expected a dense tensor")
        self._target = tensor.data
        whole = self._target.resolve_conj().resolve_neg().contiguous()
        self._copied = whole.data_ptr() != self._target.data_ptr()
        self._whole = whole
        flat = whole.view(-1)
        self.flat = torch.view_as_real(flat).view(-1) if real and flat.is_complex() else flat

    def put_back(self) -> None:
        if self._copied:
            self._target.copy_(self._whole)


def _put_back(places: list[_Place]) -> Callable[[], None]:
    def put() -> None:
        for place in places:
            place.put_back()

    return put


def _op(opts: Any) -> tuple[str, Any]:
    """Return the name of the reduction, and a factor for x or None."""
    for op, name in _OPS.items():
        if opts.reduceOp == op:
            return name, None
    if opts.reduceOp == dist.ReduceOp.RedOpType.PREMUL_SUM:
        return "sum", opts.reduceOp.factor
    raise ValueError(f"mscomm: {opts.reduceOp} is not supported; use one of {', '.join(_OPS.values())}")


def _check_count(function: str, tensors: Sequence[Any], size: int) -> None:
    if len(tensors) != size:
        raise ValueError(f"{function}: the list has {len(tensors)} tensors for {size} ranks")


def _joined(parts: Sequence[Any]) -> Any:
    return torch.cat([_Place(part).flat for part in parts])


def _scattered(ends: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Copy each whole tensor to its parts."""
    for whole, parts in ends:
        begin = 0
        for part in parts:
            part.data.copy_(whole[begin : begin + part.numel()].view(part.shape))
            begin += part.numel()

"""Measures the calls of torch.distributed over mscomm and over gloo.

    python bench/torch_calls.py results.json --plot picture.svg
    python bench/torch_calls.py results.json --read

Each rank is in two process groups, one of each backend. In every round, the ranks make some calls with one backend and
then some with the other. A time is the median over rounds of the slowest rank's mean time of a call. At each size, the
tensors that the two backends return are compared once.

A size is the number of bytes that one rank sends in total or receives in total, whichever is larger, and every part of
a tensor has at least one element. "send, recv" and "isend, irecv" are there and back, between two ranks; of four ranks,
two pairs do so at once. "batch_isend_irecv" sends to the next rank and receives from the previous one. "async_op" waits
with Work.wait(), and "future" waits for Work.get_future(), which is what DistributedDataParallel asks for.

The script writes the times to the file, in the format of `mscomm bench --json`, one document for each call and number
of ranks. It prints gloo's times divided by those of mscomm, and the sizes at which a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ratio import Ratio, interval, ratio

LIBRARIES = ("gloo", "mscomm")
SIZES = (8, *(4 << 10 << shift for shift in range(0, 15, 2)))  # 8 B, then 4 KiB to 64 MiB
ROUNDS = range(3, 12)  # a cell has fewer rounds if its calls take long
MOST_CALLS = 1000  # of one backend in a round
PLOTTED = ("all_reduce", "all_gather", "reduce_scatter_single", "send, recv")


class Case:
    """The tensors of one call in one backend. size: of the call, in bytes. each: elements of a part; whole: of all."""

    def __init__(self, group: Any, size: int, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.partner = self.rank ^ 1
        self.count = max(1, size // dtype.itemsize)
        self.each = max(1, self.count // self.ranks)
        self.whole = self.each * self.ranks
        self.tensors: list[Any] = []

    def full(self, count: int) -> Any:
        """Return a tensor whose elements tell the rank and the position. Sums of them are exact, also in bfloat16."""
        x = (torch.arange(count) % 13 + self.rank).to(self.dtype)
        self.tensors.append(x)
        return x

    def parts(self) -> list[Any]:
        return [self.full(self.each) for _ in range(self.ranks)]


Prepared = tuple[Callable[[], object], list[Any]]  # the call, and the tensors that it returns in this rank


def all_reduce(case: Case) -> Prepared:
    x = case.full(case.count)
    return lambda: dist.all_reduce(x, group=case.group), [x]


def all_reduce_async(case: Case) -> Prepared:
    x = case.full(case.count)
    return lambda: dist.all_reduce(x, group=case.group, async_op=True).wait(), [x]


def all_reduce_future(case: Case) -> Prepared:
    x = case.full(case.count)
    return lambda: dist.all_reduce(x, group=case.group, async_op=True).get_future().wait(), [x]


def broadcast(case: Case) -> Prepared:
    x = case.full(case.count)
    return lambda: dist.broadcast(x, 0, group=case.group), [x]


def reduce(case: Case) -> Prepared:
    x = case.full(case.count)
    return lambda: dist.reduce(x, 0, group=case.group), [x] if case.rank == 0 else []


def all_gather(case: Case) -> Prepared:
    x, out = case.full(case.each), case.parts()
    return lambda: dist.all_gather(out, x, group=case.group), out


def all_gather_single(case: Case) -> Prepared:
    x, out = case.full(case.each), case.full(case.whole)
    return lambda: dist.all_gather_single(out, x, group=case.group), [out]


def reduce_scatter(case: Case) -> Prepared:
    x, out = case.parts(), case.full(case.each)
    return lambda: dist.reduce_scatter(out, x, group=case.group), [out]


def reduce_scatter_single(case: Case) -> Prepared:
    x, out = case.full(case.whole), case.full(case.each)
    return lambda: dist.reduce_scatter_single(out, x, group=case.group), [out]


def all_to_all_single(case: Case) -> Prepared:
    x, out = case.full(case.whole), case.full(case.whole)
    return lambda: dist.all_to_all_single(out, x, group=case.group), [out]


def scatter(case: Case) -> Prepared:
    x, out = case.parts() if case.rank == 0 else None, case.full(case.each)
    return lambda: dist.scatter(out, x, 0, group=case.group), [out]


def gather(case: Case) -> Prepared:
    x, out = case.full(case.each), case.parts() if case.rank == 0 else None
    return lambda: dist.gather(x, out, 0, group=case.group), out or []


def barrier(case: Case) -> Prepared:
    return lambda: dist.barrier(group=case.group), []


def send_recv(case: Case) -> Prepared:
    x = case.full(case.count)

    def ping() -> None:
        for sends in (case.rank < case.partner, case.rank > case.partner):
            (dist.send if sends else dist.recv)(x, case.partner, group=case.group)

    return ping, [x]


def isend_irecv(case: Case) -> Prepared:
    x = case.full(case.count)

    def ping() -> None:
        for sends in (case.rank < case.partner, case.rank > case.partner):
            (dist.isend if sends else dist.irecv)(x, case.partner, group=case.group).wait()

    return ping, [x]


def batch_isend_irecv(case: Case) -> Prepared:
    x, out = case.full(case.count), case.full(case.count)
    right, left = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, x, right, case.group), dist.P2POp(dist.irecv, out, left, case.group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return exchange, [out]


CALLS: dict[str, tuple[Callable[[Case], Prepared], torch.dtype]] = {
    "all_reduce": (all_reduce, torch.float32),
    "all_reduce, bfloat16": (all_reduce, torch.bfloat16),
    "all_reduce, async_op": (all_reduce_async, torch.float32),
    "all_reduce, future": (all_reduce_future, torch.float32),
    "broadcast": (broadcast, torch.float32),
    "reduce": (reduce, torch.float32),
    "all_gather": (all_gather, torch.float32),
    "all_gather_single": (all_gather_single, torch.float32),
    "reduce_scatter": (reduce_scatter, torch.float32),
    "reduce_scatter_single": (reduce_scatter_single, torch.float32),
    "all_to_all_single": (all_to_all_single, torch.float32),
    "scatter": (scatter, torch.float32),
    "gather": (gather, torch.float32),
    "send, recv": (send_recv, torch.float32),
    "isend, irecv": (isend_irecv, torch.float32),
    "batch_isend_irecv": (batch_isend_irecv, torch.float32),
    "barrier": (barrier, torch.float32),
}


def goal(call: str, size: int) -> float:
    """Return how many times as fast as gloo the call should be."""
    if call == "all_reduce" and size <= 64 << 10:
        return 20
    return 2 if call == "send, recv" and size <= 1 << 20 else 1


def sizes_of(call: str, largest: int) -> list[int]:
    return [0] if call == "barrier" else [size for size in SIZES if size <= largest]


# -- in a rank


def be_a_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("mscomm")
    groups = {"gloo": dist.new_group(backend="gloo"), "mscomm": dist.group.WORLD}
    ends = time.perf_counter() + options.seconds
    cells = [(call, size) for call in options.calls for size in sizes_of(call, options.largest)]
    rows: dict[str, list[Any]] = {}
    for done, (call, size) in enumerate(cells):
        rounds = measured(call, size, groups, (ends - time.perf_counter()) / (len(cells) - done))
        results = {
            f"torch-{library}": {"out_of_place": {"us": float(torch.tensor(us).median()), "rounds_us": us}}
            for library, us in rounds.items()
        }
        rows.setdefault(call, []).append({"size": size, "results": results})
    if dist.get_rank() == 0:
        environment = {"ranks": dist.get_world_size(), "cpus": os.cpu_count(), "torch": torch.__version__}
        documents = [
            {"plan": {"collective": call, "shared": False}, "environment": environment, "rows": found}
            for call, found in rows.items()
        ]
        options.file.write_text(json.dumps(documents))
    dist.destroy_process_group()


def measured(call: str, size: int, groups: dict[str, Any], seconds: float) -> dict[str, list[float]]:
    """Return the slowest rank's time in each round, in microseconds. seconds: how long the rounds should take."""
    prepare, dtype = CALLS[call]
    functions, results = {}, []
    tensors = []
    for library in LIBRARIES:
        case = Case(groups[library], size, dtype)
        functions[library], out = prepare(case)
        functions[library]()
        results.append([x.clone() for x in out])
        tensors += case.tensors
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    for x in tensors:
        x.zero_()  # so that repeated sums in place do not overflow
    del results

    def times(turns: int, calls: dict[str, int]) -> Any:
        took = torch.empty(turns, len(LIBRARIES), dtype=torch.float64)
        for turn in range(turns):
            for library in LIBRARIES[:: 1 if turn % 2 else -1]:
                dist.barrier()
                began = time.perf_counter()
                for _ in range(calls[library]):
                    functions[library]()
                took[turn, LIBRARIES.index(library)] = (time.perf_counter() - began) / calls[library]
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took

    first = times(2, dict.fromkeys(LIBRARIES, 1)).amin(0)
    left = torch.tensor(seconds)
    dist.broadcast(left, 0)
    turns = min(max(int(left / first.sum()), ROUNDS[0]), ROUNDS[-1])
    calls = [min(max(int(left / turns / len(LIBRARIES) / one), 1), MOST_CALLS) for one in first]
    took = times(turns, dict(zip(LIBRARIES, calls, strict=True)))
    return {library: (took[:, i] * 1e6).tolist() for i, library in enumerate(LIBRARIES)}


# -- the report


def size_text(size: int) -> str:
    if size >= 1 << 20:
        return f"{size >> 20} MiB"
    return f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def found_in(row: dict[str, Any]) -> tuple[Ratio, float, float]:
    """Return gloo's time divided by that of mscomm, and the times of gloo and mscomm in microseconds."""
    gloo, ours = (row["results"][f"torch-{library}"]["out_of_place"] for library in LIBRARIES)
    return ratio(gloo["rounds_us"], ours["rounds_us"]), gloo["us"], ours["us"]


def report(documents: list[Any]) -> Iterator[str]:
    sizes = sorted({row["size"] for document in documents for row in document["rows"]} - {0})
    yield f"| call | ranks | {' | '.join(map(size_text, sizes))} |"
    yield "|" + "---|" * (len(sizes) + 2)
    missed, fewest = [], ROUNDS[-1]
    for document in documents:
        call, ranks = document["plan"]["collective"], document["environment"]["ranks"]
        texts = []
        for row in document["rows"]:
            times_as_fast, gloo, ours = found_in(row)
            texts.append(f"{times_as_fast.value:.1f}")
            fewest = min(fewest, len(row["results"]["torch-gloo"]["out_of_place"]["rounds_us"]))
            if times_as_fast.value < goal(call, row["size"]):
                where = f"{call}, {ranks} ranks, {size_text(row['size'])}"
                missed.append(f"* {where}: {times_as_fast}, goal {goal(call, row['size'])}: {ours:.1f}, {gloo:.1f} us")
        texts += [""] * (len(sizes) - len(texts))
        yield f"| {call} | {ranks} | {' | '.join(texts)} |"
    yield ""
    yield f"Goals missed (mscomm's time, gloo's time; in brackets: {interval(fewest)}): {len(missed) or 'none'}"
    yield from missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="where the times are written")
    parser.add_argument("-n", dest="ranks", type=_numbers, default=[2, 4], help="numbers of ranks (2,4)")
    parser.add_argument("--calls", type=_calls, default=list(CALLS), help='some calls, such as "barrier;send, recv"')
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="the largest size in bytes (64 MiB)")
    parser.add_argument("--seconds", type=float, default=480, help="how long the calls of all sizes take in all (480)")
    parser.add_argument("--plot", type=Path, help="a picture to draw: time by size, of some calls")
    parser.add_argument("--read", action="store_true", help="measure nothing: report on what the file has")
    options = parser.parse_args()
    if "RANK" in os.environ:
        be_a_rank(options)
        return
    if not options.read:
        options.file.write_text(json.dumps(measure(options)))
    documents = json.loads(options.file.read_text())
    print("\n".join(report(documents)))
    if options.plot:
        from mscomm.bench import plot

        chosen = [document for document in documents if document["plan"]["collective"] in PLOTTED]
        plot.draw(chosen, options.plot)


def measure(options: argparse.Namespace) -> list[Any]:
    documents = []
    with tempfile.TemporaryDirectory() as scratch:
        for ranks in options.ranks:
            part = Path(scratch, f"{ranks}.json")
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            words = ["--calls", ";".join(options.calls), "--largest", str(options.largest)]
            words += ["--seconds", str(options.seconds / len(options.ranks))]
            environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
            subprocess.run([*torchrun, __file__, str(part), *words], check=True, env=environment)
            documents += json.loads(part.read_text())
    return sorted(documents, key=lambda one: list(CALLS).index(one["plan"]["collective"]))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _calls(text: str) -> list[str]:
    names = text.split(";")
    if strangers := [name for name in names if name not in CALLS]:
        raise argparse.ArgumentTypeError(f"{strangers[0]!r} is not one of {'; '.join(CALLS)}")
    return names


if __name__ == "__main__":
    main()

"""Threads that make batches beside each other, and the order that they keep.

NumPy and Pillow release the GIL in their loops, so threads carry as far as the arrays are large. They see one memory
(nothing is pickled or copied between them), need no fork, and the program's functions run where they always did.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, NamedTuple

from mscomm.dataset.prefetch import IN_A_CHILD, ended_at_exit

_LOOK_S = 1.0  # how often a reader that waits for a batch checks that the threads are alive


def checked(step: str, number: Any) -> int | None:
    """num_parallel_workers, if it is one: as in MindSpore 1 to the number of CPUs, or None. TypeError, ValueError."""
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{step}: num_parallel_workers is a {type(number).__name__}; expected an int")
    most = os.cpu_count() or 1
    if not 1 <= number <= most:
        raise ValueError(f"{step}: num_parallel_workers={number}; expected 1 to {most}, the number of CPUs")
    return number


class Gate:
    """Lets at most `width` batches at once into a step, and with width 1 in their order; each enters once.

    So a function with a state, which was written for one thread, sees the rows in the same order however many threads
    there are. Batch k may enter when all before k - width + 1 have left; they were begun before it, so they will.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._news = threading.Condition()  # guards what is below
        self._left: set[int] = set()  # those that left before an earlier one did
        self._first = 0  # all before this one have left

    def enter(self, number: int) -> None:
        with self._news:
            self._news.wait_for(lambda: number < self._first + self._width)

    def leave(self, number: int) -> None:
        """May be called again, and without having entered."""
        with self._news:
            if number >= self._first:
                self._left.add(number)
            while self._first in self._left:
                self._left.remove(self._first)
                self._first += 1
            self._news.notify_all()


class Turn(NamedTuple):
    """What `load` is told beside the tickets: whose random numbers, and which batch of the pass this is."""

    seed: int
    number: int = 0
    gates: Mapping[int, Gate] = {}  # by the place of the step; none with one thread

    def at(self, place: int) -> AbstractContextManager[None]:
        """Hold while the step at this place works on the batch."""
        gate = self.gates.get(place)
        return contextlib.nullcontext() if gate is None else self._inside(gate)

    @contextlib.contextmanager
    def _inside(self, gate: Gate) -> Generator[None, None, None]:
        gate.enter(self.number)
        try:
            yield
        finally:
            gate.leave(self.number)

    def over(self) -> None:
        """The batch is made, or failed on the way: those behind it wait for it no longer."""
        for gate in self.gates.values():
            gate.leave(self.number)


def in_order(
    make: Callable[[Turn, Any], Any], seed: int, tickets: Iterable[Any], threads: int, widths: Mapping[int, int]
) -> Generator[Any, None, None]:
    """make(turn, ticket) for each of the tickets, in so many threads; the results in the order of the tickets.

    tickets is read by the caller's thread alone, at most threads + 1 ahead. What make raises is raised in its place.
    With one thread that is the caller's. widths: how many batches may be in which step at once. When this generator is
    closed the threads end what they are in the middle of; it waits for that.
    """
    if threads == 1:
        for ticket in tickets:
            yield make(Turn(seed), ticket)
        return
    pid = os.getpid()
    gates = {place: Gate(width) for place, width in widths.items() if width < threads}
    tasks: SimpleQueue[tuple[Future[Any], Turn, Any] | None] = SimpleQueue()
    pool = [
        threading.Thread(target=_work, args=(make, tasks), name=f"mscomm-data-{number}", daemon=True)
        for number in range(threads)
    ]

    def stop() -> None:
        for _ in pool:
            tasks.put(None)

    for thread in pool:
        ended_at_exit(thread, stop)
        thread.start()
    begun: deque[Future[Any]] = deque()
    try:
        for number, ticket in enumerate(tickets):
            task: Future[Any] = Future()
            tasks.put((task, Turn(seed, number, gates), ticket))
            begun.append(task)
            if len(begun) > threads:
                yield _result(begun.popleft(), pool)
                _same_process(pid)
        while begun:
            yield _result(begun.popleft(), pool)
            _same_process(pid)
    finally:
        if os.getpid() == pid:  # a forked child has no threads, and the queue's lock may be held for ever
            for task in begun:
                task.cancel()
            stop()
            for thread in pool:
                thread.join()


def _result(task: Future[Any], pool: Sequence[threading.Thread]) -> Any:
    """What the task gave. At the end of the process its threads may have ended before they came to it."""
    while not task.done() and not wait([task], _LOOK_S).done:
        if not any(thread.is_alive() for thread in pool):
            raise RuntimeError("the threads that make the batches have ended")
    return task.result()


def _same_process(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError(IN_A_CHILD)


def _work(make: Callable[[Turn, Any], Any], tasks: SimpleQueue[tuple[Future[Any], Turn, Any] | None]) -> None:
    """A thread of the pool."""
    while (job := tasks.get()) is not None:
        task, turn, ticket = job
        try:
            if task.set_running_or_notify_cancel():
                task.set_result(make(turn, ticket))
        except BaseException as error:  # for the one who takes the batches; here nobody would see it
            task.set_exception(error)
        finally:
            turn.over()
        del job, task, turn, ticket  # they hold a batch

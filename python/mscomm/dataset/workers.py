"""Makes batches in parallel, in several threads, and returns them in order.

NumPy and Pillow release the GIL in their loops, so threads help if the arrays are large. Threads share memory, so
nothing is pickled or copied between them. No process is forked, so a program's functions run in its own process.
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

from mscomm.dataset.config import whole
from mscomm.dataset.prefetch import IN_A_CHILD, ended_at_exit
from mscomm.threads import start_thread

_LOOK_S = 1.0  # the interval at which a caller that waits for a batch checks that the threads are alive


def checked(step: str, number: Any) -> int | None:
    """Return num_parallel_workers if it is valid: None or, as in MindSpore, from 1 to the number of CPUs. Otherwise
    raise TypeError or ValueError."""
    if number is None:
        return None
    given = whole(step, "num_parallel_workers", number)
    most = os.cpu_count() or 1
    if not 1 <= given <= most:
        raise ValueError(f"{step}: num_parallel_workers={given}; expected 1 to {most}, the number of CPUs")
    return given


class Gate:
    """Lets at most `width` batches into a pipeline step at once. With width 1, batches enter in order.

    Each batch enters once. With width 1, a function that keeps a state sees the rows in the same order for any number
    of threads. Batch k may enter when all batches before batch k - width + 1 have left. The threads begin batches in
    order, so they have already begun the batches that batch k waits for. Therefore, there is no deadlock.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._news = threading.Condition()  # guards the fields below
        self._left: set[int] = set()  # batches that have left although an earlier batch has not left yet
        self._first = 0  # all batches before this one have left

    def enter(self, number: int) -> None:
        with self._news:
            self._news.wait_for(lambda: number < self._first + self._width)

    def leave(self, number: int) -> None:
        """Record that this batch no longer needs the step. leave() may be called twice, and without enter()."""
        with self._news:
            if number >= self._first:
                self._left.add(number)
            while self._first in self._left:
                self._left.remove(self._first)
                self._first += 1
            self._news.notify_all()


class Turn(NamedTuple):
    """An argument of `load`: the seed of the random numbers, the number of the batch in its pass, and the gates."""

    seed: int
    number: int = 0
    gates: Mapping[int, Gate] = {}  # the gates of the steps that need one, keyed by the steps' places

    def at(self, place: int) -> AbstractContextManager[None]:
        """Return a context in which the step at this place works on the batch. On entry, the context waits until the
        batch may enter the step."""
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
        """Leave all gates. Call this when the batch is complete or has failed, so that no later batch waits for it."""
        for gate in self.gates.values():
            gate.leave(self.number)


def in_order(
    make: Callable[[Turn, Any], Any], seed: int, tickets: Iterable[Any], threads: int, widths: Mapping[int, int]
) -> Generator[Any, None, None]:
    """Call make(turn, ticket) for each ticket, in several threads, and yield the results in the order of the tickets.

    Only the caller's thread reads tickets. It reads at most threads + 1 tickets in advance. If make raises an
    exception, the generator raises it in place of the result. With threads=1, make runs in the caller's thread. widths:
    a dict from a step's place to how many batches may be in the step at once. When the generator is closed, it waits
    until each thread has finished its current batch.
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
        start_thread(thread)
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
        if os.getpid() == pid:  # a forked child has no threads, and its copy of the queue may be locked forever
            for task in begun:
                task.cancel()
            stop()
            for thread in pool:
                thread.join()


def _result(task: Future[Any], pool: Sequence[threading.Thread]) -> Any:
    """Wait for the task's result and return it.

    Raise RuntimeError if the threads end first, as they do when the process exits.
    """
    while not task.done() and not wait([task], _LOOK_S).done:
        if not any(thread.is_alive() for thread in pool):
            raise RuntimeError("the threads that make the batches have ended")
    return task.result()


def _same_process(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError(IN_A_CHILD)


def _work(make: Callable[[Turn, Any], Any], tasks: SimpleQueue[tuple[Future[Any], Turn, Any] | None]) -> None:
    """The function that each thread of the pool runs."""
    while (job := tasks.get()) is not None:
        task, turn, ticket = job
        try:
            if task.set_running_or_notify_cancel():
                task.set_result(make(turn, ticket))
        except BaseException as error:  # _result raises it again, because the user would not see it in this thread
            task.set_exception(error)
        finally:
            turn.over()
        del job, task, turn, ticket  # release the batch before waiting for the next task

"""Makes items in advance: a thread puts them into a bounded queue, from which the consumer takes them.

The thread references the queue and the generator that makes the items, but not the consumer's Prefetch object. So the
Prefetch object can be garbage-collected, and its finalizer then ends the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from mscomm.threads import start_thread

_LOOK_S = 1.0  # how often a waiting consumer checks that the thread is alive; a new item wakes the consumer immediately
_EXIT_S = 5.0  # how long the process waits at exit for the threads to finish their current items
IN_A_CHILD = "this iterator belongs to the parent process, where a thread fills it; create a new one here"


class _Queue:
    """The items and flags that the thread and the consumer share."""

    def __init__(self, room: int) -> None:
        self.pid = os.getpid()
        self.room = room
        # This condition guards the fields below. Both the thread and the consumer wait on it. Its lock is reentrant,
        # because the garbage collector may run `stop` in a thread that holds the lock.
        self.news = threading.Condition()
        self.items: deque[Any] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self.stopped = False

    def stop(self) -> None:
        """Tell the thread that the consumer takes no more items."""
        if self.pid != os.getpid():  # a forked child has no thread, and its copy of the lock may be locked forever
            return
        with self.news:
            self.stopped = True
            self.items.clear()
            self.news.notify_all()


class Prefetch:
    """An iterator over the items of `source`. A thread makes up to `room` items in advance.

    If source raises an exception, the iterator raises this exception in place of the item, and ends. close() ends the
    thread and waits until the thread has finished its current item. The thread is also ended when the process exits,
    but then the wait takes at most a few seconds. If this object is garbage-collected, the thread ends by itself. A
    forked child has no thread, so the iterator raises RuntimeError there.
    """

    def __init__(self, source: Generator[Any, None, None], room: int) -> None:
        self._queue = _Queue(room)
        self._thread = threading.Thread(target=_fill, args=(self._queue, source), name="mscomm-data", daemon=True)
        ended_at_exit(self._thread, self._queue.stop)
        start_thread(self._thread)
        self._finalizer = weakref.finalize(self, self._queue.stop)
        self._finalizer.atexit = False  # at exit, _end_all calls stop

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        queue = self._queue
        if queue.pid != os.getpid():
            raise RuntimeError(IN_A_CHILD)
        with queue.news:
            while not queue.items and not queue.ended and not queue.stopped:
                if not queue.news.wait(_LOOK_S) and not self._thread.is_alive() and not queue.ended:
                    raise RuntimeError("the thread that makes the batches has ended without an error")
            if queue.items:
                item = queue.items.popleft()
                queue.news.notify_all()
                return item
            error, queue.error = queue.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # avoid a reference cycle: the error's traceback references this frame
        raise StopIteration

    def close(self) -> None:
        """End the thread, and wait until it has ended. Calling close() twice is allowed.

        The generator `source` runs in this thread, so it must not call close().
        """
        self._finalizer()
        if self._queue.pid == os.getpid():
            self._thread.join()


_running: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_running.clear)


def ended_at_exit(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """Register a thread. At exit, the process calls stop(), and waits at most a few seconds for the thread to end."""
    _running[thread] = stop


def _fill(queue: _Queue, source: Generator[Any, None, None]) -> None:
    """The function that the thread runs. It returns when source ends or raises an exception, or after stop()."""
    error: BaseException | None = None
    try:
        with contextlib.closing(source):
            for item in source:
                with queue.news:
                    while len(queue.items) >= queue.room and not queue.stopped:
                        queue.news.wait()
                    if queue.stopped:
                        return
                    queue.items.append(item)
                    queue.news.notify_all()
    except BaseException as raised:  # the consumer raises it again, because the user would not see it in this thread
        error = raised
    finally:
        with queue.news:
            queue.ended, queue.error = True, error
            queue.news.notify_all()
        del error


@atexit.register
def _end_all() -> None:
    threads = list(_running.items())
    for _, stop in threads:
        stop()
    until = time.monotonic() + _EXIT_S
    for thread, _ in threads:
        thread.join(max(0.0, until - time.monotonic()))

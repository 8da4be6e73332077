"""Starts threads, or says at once that the system has no memory for one."""

from __future__ import annotations

import errno
import mmap
import resource
import threading

# What a new thread needs before it can run Python code, besides its stack: one of Python's arenas (1 MiB), its frames,
# and what malloc and the libraries keep for each thread. This is several times as much.
_FIRST_BYTES = 4 << 20
_STACK_BYTES = 2 << 20  # the stack on x86-64 if `ulimit -s` sets no limit, see pthread_create(3)


def start_thread(thread: threading.Thread) -> None:
    """Start the thread. Raise RuntimeError if the system has no memory for it.

    Thread.start() alone would wait for ever for a thread that has its stack, but no memory for its first Python objects
    (https://github.com/python/cpython/issues/140746).
    """
    if not memory_for_one():
        raise RuntimeError("can't start new thread: the system or ulimit -v or -d leaves no memory for it")
    thread.start()


def memory_for_one() -> bool:
    """Return whether this process may allocate what a new thread needs at first."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = threading.stack_size() or (_STACK_BYTES if limit == resource.RLIM_INFINITY else limit)
    try:
        mmap.mmap(-1, stack + _FIRST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return False
    return True

"""The functions that the ranks of tests/test_launching.py call. The ranks import this file, so it imports no more than
it needs.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import mscomm


@dataclasses.dataclass
class Answer:
    rank: int
    total: object


class Unusual(Exception):
    """An exception that cannot be unpickled: the constructor takes two arguments, but `args` has only one text."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def total(x):
    import numpy as np

    mscomm.init()
    print("hello from", mscomm.get_rank())
    return Answer(mscomm.get_rank(), mscomm.all_reduce(np.full(2, x + mscomm.get_rank())))


def fails(rank, error):
    mscomm.init()
    if mscomm.get_rank() == rank:
        raise error
    mscomm.barrier()


def differs():
    import numpy as np

    mscomm.init()
    mscomm.all_reduce(np.ones(3 + mscomm.get_rank()))


def dies():
    mscomm.init()
    if mscomm.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    mscomm.barrier()


def sleeps(folder):
    rank = os.environ["MSCOMM_RANK"]
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    if rank != "0":
        time.sleep(1000)
    while not all(Path(folder, f"pid{other}").exists() for other in (1, 2)):
        time.sleep(0.01)


def fails_early():
    if os.environ["MSCOMM_RANK"] == "1":
        raise ValueError("early")
    time.sleep(1000)


def leaves():
    sys.exit(0)


def stops():
    breakpoint()


class NotMadeAgain(Exception):
    """An exception that can be pickled, but not unpickled, because `args` does not have the argument `two`."""

    def __init__(self, one, *, two):
        super().__init__(one)


def returns_what_is_not_made_again():
    return NotMadeAgain("a", two="b")


def greets(seconds):
    print("h\u00e9")
    time.sleep(seconds)


def one():
    return 1


def launches():
    return mscomm.launch(one, 1)


def big(x):
    return x, [os.environ["MSCOMM_RANK"], sys.stdin.read()]


def fails_and_ends_slowly():
    atexit.register(time.sleep, 1)
    raise KeyError("price")


def raises_unusual():
    raise Unusual("a", "b")

"""A store of torch.distributed, such as the store of torchrun's agents, as a kvs.Store.

A store outlives a join and a restart of the ranks, and so do the entries of the join before. Therefore, rank 0 begins
with a random text, the name of this join, which is a part of the other entries' names. A rank that has read an old name
reads it again while it waits. Each rank puts its text with a random token, and the answer is under this token. So
nobody takes an old entry for a new one.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from mscomm.bootstrap.invitation import Seat
from mscomm.cluster.deadline import Deadline
from mscomm.errors import BackendUnavailable, CollectiveTimeout

_PAUSES_S = (0.005, 0.1)  # the first and the longest pause between two looks at an entry
_LOOK_S = 0.1  # how long a rank waits for its answer before it looks whether rank 0 has begun another join


def connected(launcher: str, host: str, port: int, deadline: Deadline) -> Any:
    """Return torch's TCPStore at this address.

    Raise BackendUnavailable if it cannot be reached, and CollectiveTimeout if importing torch takes until the deadline.
    """
    from torch.distributed import TCPStore  # takes seconds on a busy machine

    if deadline.passed:
        raise CollectiveTimeout(
            f"{launcher}: importing torch took longer than MS_TOPO_TIMEOUT, which is {deadline.seconds:g} s. "
            "Increase it, or import torch before mscomm.init()"
        )
    with _telling(launcher, _where(host, port)):
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline.left()))


def _where(host: str, port: int) -> str:
    return f"torch's store at {host}, port {port}"


def name_of(store: Any) -> str:
    """Return the name of the store in error messages."""
    inner = store
    while hasattr(inner, "underlying_store"):  # a PrefixStore
        inner = inner.underlying_store
    if hasattr(inner, "host") and hasattr(inner, "port"):
        return _where(inner.host, inner.port)
    return f"the {type(inner).__name__}"


class TorchStore:
    """A kvs.Store in torch's store. prefix: begins the names of all entries; each join has its own."""

    def __init__(self, launcher: str, store: Any, prefix: str, seat: Seat) -> None:
        self._launcher, self._store, self._prefix, self._seat = launcher, store, prefix, seat
        self._where = name_of(store)
        self._name = secrets.token_hex(8)  # on rank 0, of this join
        self._tokens: list[str] = []  # on rank 0, of the ranks 1, 2, ...

    def ask(self, text: str, deadline: Deadline) -> str:
        token = secrets.token_hex(8)
        while not deadline.passed:
            name = self._get(deadline, "start")
            if not re.fullmatch("[0-9a-f]{16}", name):
                break
            with _telling(self._launcher, self._where):
                self._store.set(f"{self._prefix}/{name}/{self._seat.rank}", f"{token} {text}")
            if answer := self._get(deadline.within(_LOOK_S), f"{name}/to/{token}"):
                return answer
        raise CollectiveTimeout(
            f"{self._launcher}: rank 0 has put no answer into {self._where} within {deadline.seconds:g} s: it has "
            "ended, never calls mscomm.init(), or has a key file or certificates, which this rank does not have",
            waiting_for=(0,),
        )

    def collect(self, deadline: Deadline, wanted: bool) -> Sequence[str]:
        """Return the texts even if they are not wanted, because answer() needs the tokens."""
        with _telling(self._launcher, self._where):
            self._store.set(f"{self._prefix}/start", self._name)
        texts = []
        for rank in range(1, self._seat.size):
            token, _, text = self._get(deadline, f"{self._name}/{rank}").partition(" ")
            if not token:
                raise CollectiveTimeout(
                    f"{self._launcher}: rank {rank} has put nothing into {self._where} within "
                    f"{deadline.seconds:g} s: it has ended, never calls mscomm.init(), or has a key file or "
                    "certificates, which rank 0 does not have",
                    waiting_for=(rank,),
                )
            self._tokens.append(token)
            texts.append(text)
        return texts

    def answer(self, texts: Sequence[str], deadline: Deadline) -> None:
        # If rank 0 has failed in collect(), only the ranks that have come get an answer.
        with _telling(self._launcher, self._where):
            for token, text in zip(self._tokens, texts[1:], strict=False):
                self._store.set(f"{self._prefix}/{self._name}/to/{token}", text)

    def _get(self, deadline: Deadline, name: str) -> str:
        """Wait for the entry, and return its text; "" at the deadline."""
        key, pause_s = f"{self._prefix}/{name}", _PAUSES_S[0]
        with _telling(self._launcher, self._where):
            while not self._has(key):
                if deadline.passed:
                    return ""
                time.sleep(min(pause_s, deadline.left()))
                pause_s = min(2 * pause_s, _PAUSES_S[1])
            return bytes(self._store.get(key)).decode("ascii", "replace")

    def _has(self, key: str) -> bool:
        if hasattr(self._store, "check"):
            return bool(self._store.check([key]))  # torch's wait() prints lines at its deadline
        try:
            self._store.wait([key], timedelta(milliseconds=1))
        except (RuntimeError, TimeoutError):  # it is not there yet
            return False
        return True


@contextmanager
def _telling(launcher: str, where: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError, LookupError) as error:  # RuntimeError: all errors of torch's stores
        raise BackendUnavailable(f"{launcher}: {where}: {error}") from error

"""The store of torchrun's agents, through which a job on several hosts without a key file gets its key (sealed_key.py).

The store outlives a restart of the ranks, and so do the entries of the start before. Therefore, rank 0 begins with a
random text, the name of this start, which is a part of the other entries' names. A rank that has read an old name reads
it again while it waits. The answer to a rank has this rank's text in its name, which is a new public key in each start.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from mscomm.bootstrap.invitation import Seat
from mscomm.cluster.deadline import Deadline
from mscomm.errors import BackendUnavailable, CollectiveTimeout

_PAUSES_S = (0.005, 0.1)  # the first and the longest pause between two looks at an entry
_LOOK_S = 0.5  # how long a rank waits for its answer before it looks whether another start has begun


class TorchStore:
    """A kvs.Store in torch's TCPStore at this address. turn: how many joins of this process came before this one."""

    def __init__(self, launcher: str, host: str, port: int, turn: int, seat: Seat, deadline: Deadline) -> None:
        self._launcher, self._where = launcher, f"torch's store at {host}, port {port}"
        self._prefix, self._seat = f"mscomm/{turn}", seat
        self._name = secrets.token_hex(8)  # on rank 0, of this start
        self._asks: list[str] = []
        with self._telling():
            from torch.distributed import TCPStore  # slow to import

            self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline.left()))

    def ask(self, text: str, deadline: Deadline) -> str:
        while not deadline.passed:
            name = self._get("start", deadline)
            if not re.fullmatch("[0-9a-f]{16}", name):
                break
            with self._telling():
                self._store.set(f"{self._prefix}/{name}/{self._seat.rank}", text)
            if answer := self._get(f"{name}/to/{text}", deadline.within(_LOOK_S)):
                return answer
        raise CollectiveTimeout(
            f"{self._launcher}: rank 0 has put no key into {self._where} within {deadline.seconds:g} s: it has ended, "
            "never calls mscomm.init(), or has a key file or certificates, which this rank does not have",
            waiting_for=(0,),
        )

    def collect(self, deadline: Deadline, wanted: bool) -> Sequence[str]:
        with self._telling():
            self._store.set(f"{self._prefix}/start", self._name)
        if wanted:
            for rank in range(1, self._seat.size):
                self._asks.append(self._get(f"{self._name}/{rank}", deadline))
                if not self._asks[-1]:
                    raise CollectiveTimeout(
                        f"{self._launcher}: rank {rank} has put nothing into {self._where} within "
                        f"{deadline.seconds:g} s: it has ended, never calls mscomm.init(), or has a key file or "
                        "certificates, which rank 0 does not have",
                        waiting_for=(rank,),
                    )
        return self._asks

    def answer(self, texts: Sequence[str], deadline: Deadline) -> None:
        # If rank 0 gives up before all ranks have asked, torchrun ends the others.
        with self._telling():
            for ask, text in zip(self._asks, texts[1:], strict=False):
                self._store.set(f"{self._prefix}/{self._name}/to/{ask}", text)

    def _get(self, name: str, deadline: Deadline) -> str:
        """Wait for the entry, and return its text; "" at the deadline."""
        key, pause_s = f"{self._prefix}/{name}", _PAUSES_S[0]
        with self._telling():
            while not self._store.check([key]):  # torch's wait() prints lines at its deadline
                if deadline.passed:
                    return ""
                time.sleep(min(pause_s, deadline.left()))
                pause_s = min(2 * pause_s, _PAUSES_S[1])
            return bytes(self._store.get(key)).decode("ascii", "replace")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # all errors of torch's store
            raise BackendUnavailable(f"{self._launcher}: {self._where}: {error}") from error

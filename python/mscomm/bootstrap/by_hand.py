"""Joins the job that init(init_method=...) describes: its ranks meet at tcp://host:port, or share an MPI communicator
or a store of torch.distributed.

A communicator is any object that has rank, size, Bcast and Allgather for plain buffers, as in mpi4py. A store is any
object that has set, get, add and wait, as in torch. This module imports neither MPI nor torch.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from mscomm.bootstrap import kvs
from mscomm.bootstrap.invitation import Invitation, Launcher, Seat
from mscomm.bootstrap.rendezvous import Meeting, Spot
from mscomm.bootstrap.torch_store import TorchStore, name_of
from mscomm.cluster.assemble import host_id
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable

_TCP = re.compile(r"tcp://(?:\[(?P<v6>[^]/]+)\]|(?P<host>[^]/:[]+)):(?P<port>\d{1,5})/?")
_TEXT_BYTES = 256  # no text is longer


def launcher(init_method: Any, rank: int | None, world_size: int | None) -> Launcher | None:
    """Return the launcher that init's arguments describe; None for a job of one rank.

    Raise TypeError or ValueError if an argument is invalid.
    """
    if all(hasattr(init_method, name) for name in ("rank", "size", "Bcast", "Allgather")):
        for name, given, own in (("rank", rank, init_method.rank), ("world_size", world_size, init_method.size)):
            if given not in (None, own):
                raise ValueError(f"init: {name}={given}, but the communicator says {own}; leave {name} out")
        return _Communicator(init_method) if init_method.size > 1 else None
    if all(callable(getattr(init_method, name, None)) for name in ("set", "get", "add", "wait")):
        place = _place("a store", rank, world_size)
        return _Stored(init_method, *place) if world_size != 1 else None
    if not isinstance(init_method, str):
        raise TypeError(
            f"init: init_method is a {type(init_method).__name__}; expected 'tcp://host:port', an MPI communicator or "
            "a store of torch.distributed" + (", because rank or world_size was given" if init_method is None else "")
        )
    fields = _TCP.fullmatch(init_method)
    if not fields or not 0 < int(fields["port"]) < 1 << 16:
        raise ValueError(
            f"init: init_method={init_method!r}: expected tcp://host:port, or tcp://[address]:port for IPv6"
        )
    host, port = fields["v6"] or fields["host"], int(fields["port"])
    place = _place(repr(init_method), rank, world_size)
    return _Tcp(host, port, *place) if world_size != 1 else None


def _place(method: str, rank: Any, size: Any) -> tuple[int, int]:
    if not isinstance(rank, int) or not isinstance(size, int) or not 0 <= rank < size:
        raise ValueError(
            f"init: init_method={method} needs rank and world_size, 0 <= rank < world_size; "
            f"got rank={rank!r}, world_size={size!r}"
        )
    return rank, size


class _Tcp:
    """Rank 0 listens at the address, and the others connect to it."""

    NAME = "init_method"
    _used: ClassVar[set[tuple[str, int]]] = set()

    def __init__(self, host: str, port: int, rank: int, size: int) -> None:
        if (host, port) in self._used:
            # The hub of the previous job may still listen at this address, and would take us for a rank of that job.
            raise ValueError(f"init: this process has used {host}, port {port} for a job before; use another port")
        self._used.add((host, port))
        self._place = Seat(rank, size, None, one_host=False)
        self._spot = Spot("init_method", host, (port,))

    def accept(self, env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
        advice = "init() on rank 0 must run on the host of that address, with the same init_method and world_size"
        return Meeting(self.NAME, self._place, self._spot, env, deadline, protection, advice).invitation()


class _Communicator:
    """The ranks pass each other texts with Allgather and Bcast.

    Both have no timeout, so init() hangs unless all ranks of the communicator call it.
    """

    NAME = "MPI communicator"

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def accept(self, env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
        rank, size = int(self._comm.rank), int(self._comm.size)
        mine = hashlib.sha256(host_id().encode()).digest()
        hosts = _all_gather(self._comm, mine)
        place = Seat(rank, size, hosts[:rank].count(mine), one_host=len(set(hosts)) == 1)
        return kvs.Join(self.NAME, place, _Store(self._comm, place), env, deadline, protection).invitation()


class _Store(NamedTuple):
    comm: Any
    seat: Seat

    def ask(self, text: str, deadline: Deadline) -> str:
        if text:
            _all_gather(self.comm, _padded(text))
        count, mine = (1, 0) if self.seat.one_host else (self.seat.size, self.seat.rank)
        answers = bytearray(count * _TEXT_BYTES)
        self.comm.Bcast(answers, root=0)
        return _text(answers[mine * _TEXT_BYTES :][:_TEXT_BYTES])

    def collect(self, deadline: Deadline, wanted: bool) -> list[str]:
        return [_text(ask) for ask in _all_gather(self.comm, _padded(""))[1:]]

    def answer(self, texts: Sequence[str], deadline: Deadline) -> None:
        self.comm.Bcast(bytearray(b"".join(map(_padded, texts))), root=0)


class _Stored:
    """The ranks pass each other texts through a store; see torch_store.py.

    First, rank 0 learns which ranks are on its host. If all are, they meet at a unix socket with a random name, and the
    key is in a file: other users of this host can read the entries of a TCPStore. Otherwise, see kvs.Join.
    """

    NAME = "store"
    _ANSWER = re.compile(r"(?P<local>\d{1,9}) (?P<several>several|[0-9a-f]{32})", re.ASCII)

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def accept(self, env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
        seat = Seat(self._rank, self._size, None, one_host=False)
        answer = self._hosts(TorchStore(self.NAME, self._store, "mscomm/hosts", seat), deadline)
        fields = self._ANSWER.fullmatch(answer)
        if not fields:
            raise BackendUnavailable(
                f"{self.NAME}: rank 0 has put {answer[:40]!r} into {name_of(self._store)}. Do all ranks run the same "
                "mscomm?"
            )
        seat = seat._replace(local_rank=int(fields["local"]), one_host=fields["several"] != "several")
        if seat.one_host:
            advice = "Has rank 0 ended?"
            spot = Spot(f"store {fields['several']}")
            return Meeting(self.NAME, seat, spot, env, deadline, protection, advice).invitation()
        store = TorchStore(self.NAME, self._store, "mscomm/hub", seat)
        return kvs.Join(self.NAME, seat, store, env, deadline, protection).invitation()

    def _hosts(self, store: TorchStore, deadline: Deadline) -> str:
        """Return this rank's number on its host, and a random name if all ranks are on one host."""
        mine = hashlib.sha256(host_id().encode()).hexdigest()
        if self._rank > 0:
            return store.ask(mine, deadline)
        hosts = [mine, *store.collect(deadline, wanted=True)]
        several = secrets.token_hex(16) if len(set(hosts)) == 1 else "several"
        answers = [f"{hosts[:rank].count(host)} {several}" for rank, host in enumerate(hosts)]
        store.answer(answers, deadline)
        return answers[0]


def _all_gather(comm: Any, mine: bytes) -> list[bytes]:
    everybody = bytearray(int(comm.size) * len(mine))
    comm.Allgather(bytearray(mine), everybody)
    return [bytes(everybody[at : at + len(mine)]) for at in range(0, len(everybody), len(mine))]


def _padded(text: str) -> bytes:
    return text.encode("ascii").ljust(_TEXT_BYTES, b"\0")


def _text(padded: bytes | bytearray) -> str:
    return padded.rstrip(b"\0").decode("ascii", errors="replace")

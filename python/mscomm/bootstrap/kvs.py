"""Joins through a launcher's key-value store: rank 0 starts the hub and publishes its address, and the others connect.

The modules for PMI-1, PMIx, MPI communicators and torchrun share this code. If all ranks are on one host, rank 0
publishes one text, `mscomm1,unix,NAME,KEY`, with the name of an abstract unix socket and the job's key in hex.

On several hosts, the store may send its entries over the network in plain text. First, each of the other ranks puts a
text for rank 0 into the store: `own` if it has a key file or certificates or permits plain links; otherwise its public
key for sealed_key.py, or `lacking` without the package `cryptography`. Then rank 0 puts a text for each of the other
ranks into the store, `mscomm1,tcp,ADDRESS,PORT`. If rank 0 has no protection of its own either, it makes a new key, and
appends `,PUBLIC,SEALED` to each text: rank 0's public key, and the job's key, encrypted for this rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from mscomm import environment
from mscomm.bootstrap import sealed_key
from mscomm.bootstrap.invitation import Invitation, Seat
from mscomm.cluster import hub_process, interfaces, links, security
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import CONTROL
from mscomm.cluster.plan import named
from mscomm.cluster.protection import Protection
from mscomm.errors import AuthenticationError, BackendUnavailable, Error

INSTEAD = "Start the ranks with `mscomm run -n N script.py`, which needs no other launcher."

_PUBLISHED = re.compile(
    r"mscomm1,(?:unix,(?P<name>mscomm-[0-9a-f]{32}),(?P<key>[0-9a-f]{64})"
    r"|(?P<address>tcp,(?P<host>[0-9a-f.:]{2,45}),(?P<port>\d{1,5}))"
    r"(?:,(?P<public>[0-9a-f]{64}),(?P<sealed>[0-9a-f]{96}))?)",
    re.ASCII,
)
_FAILED = "mscomm1,failed"
_OWN, _LACKING = "own", "lacking"


class Names(NamedTuple):
    """The variables that tell a rank its place in the job. In each tuple, the first variable that is set is used."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]  # not always a number: for two hosts with four ranks each, Slurm writes "4(x2)"


class Store(Protocol):
    """The launcher's key-value store. Rank 0 calls `answer`, on several hosts after `collect`. Other ranks call `ask`.

    All functions give up at the deadline, except in the store of by_hand.py. That store calls the functions of an MPI
    communicator, which have no timeout.
    """

    def ask(self, text: str, deadline: Deadline) -> str:
        """Put this rank's text for rank 0 into the store, and return rank 0's answer. On one host, `text` is ""."""

    def collect(self, deadline: Deadline, wanted: bool) -> Sequence[str]:
        """Return the texts of the ranks 1, 2, ... If they are not `wanted`, the result may be empty."""

    def answer(self, texts: Sequence[str], deadline: Deadline) -> None:
        """Put the answers into the store: one for all ranks of one host, or one for each rank 0, 1, ... of several."""


def lacks_key(env: Mapping[str, str], protection: Protection) -> bool:
    """Return whether the user gives no key file and no certificates, and does not permit plain links either."""
    return protection.uses_keys and not environment.read("MSCOMM_JOB_KEY_FILE", env)


def entry(key: str, seat: Seat, rank: int) -> str:
    """Return under which key of the store rank 0's answer to `rank` is."""
    return key if seat.one_host else f"{key}-{rank}"


def place(env: Mapping[str, str], names: Names, launcher: str) -> Seat:
    """Read this process's place in the job from the variables; raise BackendUnavailable if they are invalid."""
    rank, size, local_rank, local_size = (_first(env, group) for group in names)
    if rank is None or size is None or not 0 <= rank < size:
        said = ", ".join(f"{name}={env.get(name)}" for group in names[:2] for name in group)
        raise BackendUnavailable(f"{launcher}: the environment has no rank and size that fit ({said}). {INSTEAD}")
    return Seat(rank, size, local_rank or 0, one_host=local_size == size)


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the value of the first variable that is set; None if no variable is set or the value is not a number."""
    text = next((env[name] for name in names if name in env), "")
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else None


class Join(NamedTuple):
    """How this rank joins its job through the launcher's store."""

    launcher: str
    seat: Seat
    store: Store
    env: Mapping[str, str]
    deadline: Deadline
    protection: Protection

    def invitation(self) -> Invitation:
        """Connect to this job's hub, which rank 0 starts."""
        launcher, rank, one_host = self.launcher, self.seat.rank, self.seat.one_host
        keyless = not one_host and lacks_key(self.env, self.protection)
        pair = sealed_key.KeyPair() if keyless and sealed_key.possible() else None
        mine = pair.public if pair else _LACKING if keyless else _OWN
        if rank == 0:
            return self._host(mine, pair)
        answer = self.store.ask("" if one_host else mine, self.deadline)
        if answer == _FAILED:
            if mine == _LACKING:
                raise self._refusal([rank])
            raise BackendUnavailable(f"{launcher}: rank 0 could not open the job; its own error says why")
        fields = _PUBLISHED.fullmatch(answer)
        fits = fields and bool(fields["name"]) == one_host  # on several hosts, nobody may offer a unix socket
        if not fields or not fits or int(fields["port"] or 1) not in range(1, 1 << 16):
            raise BackendUnavailable(
                f"{launcher}: rank 0 published {answer[:12]!r}..., no address. Do all ranks run the same mscomm?"
            )
        if fields["key"]:
            return self._connect(f"\0{fields['name']}", bytes.fromhex(fields["key"]))
        try:
            host = interfaces.dial_address(fields["host"], env=self.env)
        except ValueError as error:
            said = f"rank 0 published {fields['host']!r}, which is not an address"
            raise BackendUnavailable(f"{launcher}: {said}") from error
        port = int(fields["port"])
        if keyless and not fields["sealed"]:
            raise self._differ([0], [rank])
        if pair:
            key = pair.open(fields["sealed"], fields["public"], rank, fields["address"])
        else:
            key = security.job_key(self.env, host, port, self.protection)
        return self._connect((host, port), key)

    def _host(self, mine: str, pair: sealed_key.KeyPair | None) -> Invitation:
        """Do rank 0's part of invitation(): start the hub, publish its address, and connect to it.

        The other ranks may connect before the hub process runs. Their connections then wait in the listener's backlog.
        """
        one_host = self.seat.one_host
        try:
            asks = [] if one_host else self.store.collect(self.deadline, wanted=pair is not None)
            if mine == _LACKING:
                raise self._refusal([0])
            if pair:
                self._check(asks)
            process, address, key, answers = self._open(pair, asks)
        except Exception:
            # Otherwise, the other ranks would wait for an address until the deadline. If the store fails too, the user
            # gets the first error.
            with contextlib.suppress(Error):
                self.store.answer([_FAILED] * (1 if one_host else self.seat.size), self.deadline)
            raise
        with hub_process.connecting(process):
            self.store.answer(answers, self.deadline)
            return self._connect(address, key)

    def _check(self, asks: Sequence[str]) -> None:
        """Raise an Error that names the ranks for which rank 0 cannot encrypt a new key, if there are any."""
        if len(asks) != self.seat.size - 1:
            raise BackendUnavailable(f"{self.launcher}: {len(asks)} entries of {self.seat.size - 1} ranks in the store")
        if lacking := [rank for rank, ask in enumerate(asks, 1) if ask == _LACKING]:
            raise self._refusal(lacking)
        if own := [rank for rank, ask in enumerate(asks, 1) if ask == _OWN]:
            raise self._differ(own, [0])

    def _refusal(self, lacking: Sequence[int]) -> AuthenticationError:
        ways = security.ways_to_start(self.protection)
        return AuthenticationError(
            f"{self.launcher}: the ranks are on several hosts and the job has no key. To make one by itself, mscomm "
            f"needs the package cryptography, 42 or later, which {named(lacking)} cannot use. Either install it on "
            f"every host:\n    pip install 'cryptography>=42'\nor give the job a key everywhere:\n{ways}"
        )

    def _differ(self, protected: Sequence[int], keyless: Sequence[int]) -> AuthenticationError:
        return AuthenticationError(
            f"{self.launcher}: only some ranks have a key file or certificates, or permit plain links: "
            f"{named(protected)}, but not {named(keyless)}. Set MSCOMM_JOB_KEY_FILE or MSCOMM_SSL_CONFIG_FILE for all "
            "ranks or for none, or call set_ps_context(enable_ssl=False) on all of them. Open MPI passes a variable to "
            "other hosts only with -x NAME"
        )

    def _open(
        self, pair: sealed_key.KeyPair | None, publics: Sequence[str]
    ) -> tuple[hub_process.Process, links.Address, bytes, list[str]]:
        """Start a hub. Return its process, its address, the job's key, and the answers to the ranks.

        pair: encrypts a new key for the other ranks, whose public keys are `publics`. None if the key is not new.
        """
        env, size = self.env, self.seat.size
        with self._listen() as listener:
            address = links.address_of(listener)
            if not isinstance(address, tuple):
                key = security.new_key()
                answers = [f"mscomm1,unix,{os.fsdecode(address)[1:]},{key.hex()}"]
            else:
                host, port = address
                text = f"tcp,{host.partition('%')[0]},{port}"
                answers = [f"mscomm1,{text}"] * size
                if pair:
                    key = security.new_key()
                    for rank, public in enumerate(publics, 1):
                        answers[rank] += f",{pair.public},{pair.seal(key, public, rank, text)}"
                else:
                    key = security.job_key(env, host, port, self.protection)
            job = links.job_of(env)
            process = hub_process.spawn(listener, size, key, self.deadline.rest(), job, self.protection)
            return process, address, key, answers

    def _listen(self) -> socket.socket:
        if self.seat.one_host:
            return links.unix_listener(self.seat.size + 64)
        try:
            address = interfaces.host_address(self.env)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"{self.launcher}: the ranks are on several hosts: {error}") from error
        return links.listen(address, self.seat.size + 64, self.env)

    def _connect(self, address: links.Address, key: bytes) -> Invitation:
        launcher, seat = self.launcher, self.seat
        where = interfaces.endpoint(*address) if isinstance(address, tuple) else "a unix socket of this host"
        admission = security.admission_key(key, CONTROL)
        try:
            mine = links.newcomer(self.env, seat.rank)
            stream = links.open_link(address, admission, CONTROL, mine, self.deadline, self.protection)
        except Error:  # an AuthenticationError is an OSError, too
            raise
        except OSError as error:
            raise BackendUnavailable(
                f"{launcher}: rank {seat.rank} cannot reach the hub that rank 0 started at {where}: {error}. "
                "Has rank 0 ended, or does a firewall or a container's network lie between the ranks?"
            ) from error
        return Invitation(launcher, seat, stream, admission, f"the hub that rank 0 started at {where}")

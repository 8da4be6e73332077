"""Joins through a launcher's key-value store: rank 0 starts the hub and publishes its address, and the others connect.

The modules for PMI-1, PMIx and MPI communicators share this code. Rank 0 publishes one string. If all ranks are on one
host, the string is `mscomm1,unix,NAME,KEY`, with the name of an abstract unix socket and the job's key in hex.
Otherwise, the string is `mscomm1,tcp,ADDRESS,PORT`. This string does not contain the key, because a store on several
hosts may send the string over the network. Each rank gets the key from security.job_key() instead.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mscomm.bootstrap.invitation import Invitation, Seat
from mscomm.cluster import hub_process, interfaces, links, security
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import CONTROL
from mscomm.cluster.protection import Protection
from mscomm.errors import BackendUnavailable, on_failure

INSTEAD = "Start the ranks with `mscomm run -n N script.py`, which needs no other launcher."

_PUBLISHED = re.compile(
    r"mscomm1,(?:unix,(?P<name>mscomm-[0-9a-f]{32}),(?P<key>[0-9a-f]{64})"
    r"|tcp,(?P<host>[0-9a-f.:]{2,45}),(?P<port>\d{1,5}))",
    re.ASCII,
)
_FAILED = "mscomm1,failed"


class Names(NamedTuple):
    """The variables that tell a rank its place in the job. In each tuple, the first variable that is set is used."""

    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]  # not always a number: for two hosts with four ranks each, Slurm writes "4(x2)"


class Store(NamedTuple):
    """One entry of the launcher's key-value store. Rank 0 calls `publish`, and the other ranks call `fetch`.

    Both functions give up at the deadline, except in the store of by_hand.py. That store calls an MPI communicator's
    Bcast, which has no timeout.
    """

    publish: Callable[[str, Deadline], object]
    fetch: Callable[[Deadline], str]


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


def join(
    launcher: str, seat: Seat, store: Store, env: Mapping[str, str], deadline: Deadline, protection: Protection
) -> Invitation:
    """Connect to this job's hub, which rank 0 starts."""
    if seat.rank == 0:
        return _host(launcher, seat, store, env, deadline, protection)
    published = store.fetch(deadline)
    if published == _FAILED:
        raise BackendUnavailable(f"{launcher}: rank 0 could not open the job; its own error says why")
    fields = _PUBLISHED.fullmatch(published)
    if not fields or int(fields["port"] or 1) not in range(1, 1 << 16):
        raise BackendUnavailable(
            f"{launcher}: rank 0 published {published[:12]!r}..., no address. Do all ranks run the same mscomm?"
        )
    if fields["key"]:
        return _connect(launcher, seat, f"\0{fields['name']}", bytes.fromhex(fields["key"]), env, deadline, protection)
    try:
        host = interfaces.dial_address(fields["host"], env=env)
    except ValueError as error:
        raise BackendUnavailable(f"{launcher}: rank 0 published {fields['host']!r}, which is not an address") from error
    port = int(fields["port"])
    key = security.job_key(env, host, port, protection)
    return _connect(launcher, seat, (host, port), key, env, deadline, protection)


def _host(
    launcher: str, seat: Seat, store: Store, env: Mapping[str, str], deadline: Deadline, protection: Protection
) -> Invitation:
    """Do rank 0's part of join(): start the hub, publish its address, and connect to it.

    The other ranks may connect before the hub process runs. Their connections then wait in the listener's backlog.
    """
    try:
        process, address, key, text = _open(launcher, seat, env, deadline, protection)
    except Exception:
        store.publish(_FAILED, deadline)  # otherwise, the other ranks would wait for an address until the deadline
        raise
    with on_failure(hub_process.end, process):
        store.publish(text, deadline)
        return _connect(launcher, seat, address, key, env, deadline, protection, process)


def _open(
    launcher: str, seat: Seat, env: Mapping[str, str], deadline: Deadline, protection: Protection
) -> tuple[subprocess.Popen[bytes], links.Address, bytes, str]:
    """Start a hub. Return its process, its address, the job's key, and the text to publish."""
    with _listen(launcher, seat, env) as listener:
        address = links.address_of(listener)
        if isinstance(address, tuple):
            host, port = address
            key = security.job_key(env, host, port, protection)
            text = f"mscomm1,tcp,{host.partition('%')[0]},{port}"
        else:
            key = security.new_key()
            text = f"mscomm1,unix,{os.fsdecode(address)[1:]},{key.hex()}"
        process = hub_process.spawn(listener, seat.size, key, deadline.rest(), links.job_of(env), protection)
        return process, address, key, text


def _listen(launcher: str, seat: Seat, env: Mapping[str, str]) -> socket.socket:
    if seat.one_host:
        return links.unix_listener(seat.size + 64)
    try:
        address = interfaces.host_address(env)
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{launcher}: the ranks are on several hosts: {error}") from error
    return links.listen(address, seat.size + 64, env)


def _connect(
    launcher: str,
    seat: Seat,
    address: links.Address,
    key: bytes,
    env: Mapping[str, str],
    deadline: Deadline,
    protection: Protection,
    process: subprocess.Popen[bytes] | None = None,
) -> Invitation:
    where = interfaces.endpoint(*address) if isinstance(address, tuple) else "a unix socket of this host"
    admission = security.admission_key(key, CONTROL)
    try:
        mine = links.newcomer(env, seat.rank)
        stream = links.open_link(address, admission, CONTROL, mine, deadline, protection)
    except OSError as error:
        raise BackendUnavailable(
            f"{launcher}: rank {seat.rank} cannot reach the hub that rank 0 started at {where}: {error}. "
            "Has rank 0 ended, or does a firewall or a container's network lie between the ranks?"
        ) from error
    return Invitation(launcher, seat, stream, admission, f"the hub that rank 0 started at {where}", hub=process)

"""Joins with Ascend's rank table: reads RANK_TABLE_FILE, RANK_ID and, if they are set, RANK_SIZE and DEVICE_ID.

With one server, the ranks meet at a unix socket, and server_id is not used. With several servers, they meet on rank 0's
server, at MSCOMM_PORT or at one of eight ports that are derived from the table. The server_id of rank 0's server must
then be an address, or a name that the other servers can resolve. accept() raises ValueError for an error in the table
or in these variables, and BackendUnavailable if the ranks do not meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mscomm.bootstrap.invitation import Invitation, Seat, turn
from mscomm.bootstrap.rank_table_file import Table, load
from mscomm.bootstrap.rendezvous import Meeting, Spot, meeting_ports, port_range
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection

NAME = "rank table"
PLACE = (("RANK_ID",), ("RANK_SIZE",))
_FILES = ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH")  # the current name, and an older one


def detect(env: Mapping[str, str]) -> bool:
    """Return whether a variable names a rank table, or RANK_ID and RANK_SIZE require one.

    They require one if both are set and RANK_SIZE is not 1. If a table is required but no variable names one, accept()
    raises ValueError. A job of one rank needs no table, because MindSpore's scripts for one device set RANK_ID=0 and
    RANK_SIZE=1 without a table.
    """
    return bool(_path(env)[1]) or (bool(_text(env, "RANK_ID")) and _text(env, "RANK_SIZE") not in ("", "1"))


def accept(env: Mapping[str, str], deadline: Deadline, protection: Protection) -> Invitation:
    table, rank = read(env)
    servers = [seat.server for seat in table.seats]
    ports = meeting_ports(table.digest, env)
    advice = (
        f"Rank 0 must run on {servers[0]}, its server_id in {_path(env)[1]}, the others must reach its "
        f"{port_range(ports)}, and the table must be the same on every server"
    )
    seat = Seat(rank, len(servers), servers[:rank].count(servers[rank]), one_host=len(table.servers) == 1)
    spot = Spot(f"rank table {table.digest} {turn(NAME)}", servers[0], ports)
    invitation = Meeting(NAME, seat, spot, env, deadline, protection, advice).invitation()
    return replace(invitation, device=table.seats[rank].device)


def read(env: Mapping[str, str]) -> tuple[Table, int]:
    """Return the table that the environment names, and this process's rank in it.

    Raise ValueError if a variable is missing or does not fit the table, or if the table has an error.
    """
    name, path = _path(env)
    if not path:
        raise ValueError(
            f"RANK_ID={_text(env, 'RANK_ID')} and RANK_SIZE={_text(env, 'RANK_SIZE')} are set, and RANK_TABLE_FILE is "
            "not; it names the rank table of the job. `mscomm ranktable make` writes one"
        )
    table = load(path, name)
    size = len(table.seats)
    expected_size = _text(env, "RANK_SIZE")
    if expected_size and expected_size != str(size):
        raise ValueError(f"RANK_SIZE={expected_size}: {path} has {size} devices; give both the same number")
    rank = _rank(env, name, path, size)
    seat = table.seats[rank]
    device = _text(env, "DEVICE_ID")
    if device and device != str(seat.device):
        raise ValueError(
            f"DEVICE_ID={device}: rank {rank} has device_id {seat.device} of server {seat.server} in {path}; "
            "give both the same"
        )
    return table, rank


def _rank(env: Mapping[str, str], name: str, path: str, size: int) -> int:
    text = _text(env, "RANK_ID")
    if not text:
        raise ValueError(
            f"{name}={path} is set, and RANK_ID is not; give each process its rank, 0 to {size - 1}, or unset {name} "
            "for a job of one rank"
        )
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < size):
        raise ValueError(f"RANK_ID={text!r}: expected one of the ranks of {path}, 0 to {size - 1}")
    return int(text)


def _path(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that names the table, and its value; ("", "") if none is set."""
    return next(((name, _text(env, name)) for name in _FILES if _text(env, name)), ("", ""))


def _text(env: Mapping[str, str], name: str) -> str:
    return env.get(name, "").strip()

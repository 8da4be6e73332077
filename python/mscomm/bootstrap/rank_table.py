"""Ascend's rank table: RANK_TABLE_FILE, RANK_ID and RANK_SIZE. The server of rank 0 hosts the meeting.

A server_id is the server's address (or a name that can be resolved). With one server alone it is never looked at.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from mscomm.bootstrap import Invitation
from mscomm.bootstrap.rendezvous import Place, Spot, meet, number
from mscomm.cluster.deadline import Deadline

NAME = "rank table"
_FIRST_PORT, _PORTS = 61440, 4088  # above the ephemeral ports, which begin at 32768 and end at 60999
_calls = itertools.count()


class Seat(NamedTuple):
    """One rank's line of the table."""

    rank: int
    server: str


def detect(env: Mapping[str, str]) -> bool:
    return bool(env.get("RANK_TABLE_FILE")) and "RANK_ID" in env


def accept(env: Mapping[str, str], deadline: Deadline, permit_plain: bool) -> Invitation:
    path = env["RANK_TABLE_FILE"]
    with open(path, "rb") as file:
        content = file.read()
    seats = read(content, path)
    size = len(seats)
    if env.get("RANK_SIZE") and number(NAME, env, "RANK_SIZE", 1) != size:
        raise ValueError(f"RANK_SIZE={env['RANK_SIZE']}: {path} has {size} devices; give both the same number")
    rank = number(NAME, env, "RANK_ID", 0, size - 1)
    servers = [seat.server for seat in seats]
    job = hashlib.sha256(content).hexdigest()
    first = _FIRST_PORT + int(job[:8], 16) % _PORTS
    advice = (
        f"Rank 0 must run on {servers[0]}, its server_id in {path}, and the others must reach its ports "
        f"{first} to {first + 7}"
    )
    return meet(
        NAME,
        Place(rank, size, servers[:rank].count(servers[rank]), one_host=len(set(servers)) == 1),
        Spot(f"rank table {job} {next(_calls)}", servers[0], range(first, first + 8)),
        env,
        deadline,
        permit_plain,
        advice,
    )


def read(content: bytes, path: str) -> list[Seat]:
    """The seats by rank; ValueError with the place in the file if it is no rank table of version 1.0 or later."""

    def wrong(where: str, what: str) -> ValueError:
        return ValueError(f"{path}: {where}: {what}")

    try:
        table = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(table, dict) or not isinstance(table.get("server_list"), list):
        raise wrong("server_list", "there is no such list; expected a rank table of version 1.0")
    if table.get("status", "completed") != "completed":
        raise wrong("status", f"it is {table['status']!r}, not 'completed': the table is not ready yet")
    seats: dict[int, Seat] = {}
    for i, server in enumerate(table["server_list"]):
        at = f"server_list[{i}]"
        name = server.get("server_id") if isinstance(server, dict) else None
        if not isinstance(name, str) or not name:
            raise wrong(f"{at}.server_id", f"it is {name!r}; expected the server's address")
        devices = server.get("device")
        if not isinstance(devices, list):
            raise wrong(f"{at}.device", "there is no such list")
        for j, device in enumerate(devices):
            text = device.get("rank_id") if isinstance(device, dict) else None
            if not _is_number(text):
                raise wrong(f"{at}.device[{j}].rank_id", f"it is {text!r}; expected a number as text")
            rank = int(str(text))
            if rank in seats:
                raise wrong(f"{at}.device[{j}].rank_id", f"rank {rank} is there twice")
            seats[rank] = Seat(rank, name)
    missing = [rank for rank in range(len(seats)) if rank not in seats]
    if missing or not seats:
        raise wrong(
            "rank_id", f"{len(seats)} devices must have the ranks 0 to {len(seats) - 1}; missing: {missing[:8]}"
        )
    return [seats[rank] for rank in range(len(seats))]


def _is_number(text: Any) -> bool:
    return isinstance(text, (str, int)) and str(text).isascii() and str(text).isdecimal()

"""Reads and writes Ascend's rank table, a JSON file that says which rank runs on which server and device.

The reader is strict on every backend. Contradictions are errors, and so are values that the HCCL documentation does not
allow. Examples are a field that is missing or has the wrong type, a number that is out of range, and a rank, device or
address that occurs twice. The error message gives the place of the error. HCCL also refuses some tables that the CPU
core can use, for example a table with the servers in the wrong order, or without the addresses of network cards. The
reader accepts such a table, and adds a remark to it. `unfit_for_910` finds what HCCL allows but Atlas 910 servers
cannot run. Unknown fields are ignored.

    >>> from mscomm.bootstrap.rank_table_file import Server, make, parse
    >>> text = make([Server("10.0.0.1", [0, 1]), Server("10.0.0.2", [0, 1])])
    >>> parse(text.encode(), "table.json").seats[2]
    Seat(rank=2, server='10.0.0.2', device=0, device_ip='')
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import ipaddress
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

LARGEST_BYTES = 16 << 20  # enough for about 100,000 ranks
LONGEST_SERVER_ID = 63  # characters
MOST_DEVICES = 1024  # on one server
VERSIONS = ("1.0", "1.2")
MOST_PROBLEMS = 100  # report at most this many errors; a file that is not a rank table may have an error in every line
# HCCL's other kinds of tables, recognised by the key that holds their servers.
_OTHER_KINDS = {
    "group_list": "this is the older template, with group_list",
    "cluster_list": "this is a table of several clusters",
    "server_group_list": "this is a table of several groups of servers",
}


class Seat(NamedTuple):
    """One rank's entry in the table."""

    rank: int
    server: str  # server_id: an address or a name
    device: int  # the device's physical number on that server
    device_ip: str  # the address of the device's network card; "" if the table has none


class Problem(NamedTuple):
    """One error and its place, such as server_list[0].device[1].rank_id; the place "" means the whole file."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class Table(NamedTuple):
    """A table without errors. `digest`: a hash that ignores white space and the order of keys in the file."""

    version: str
    seats: list[Seat]  # in the order of the ranks
    remarks: list[Problem]  # what HCCL refuses and mscomm accepts
    digest: str

    @property
    def servers(self) -> list[str]:
        """The server_ids without duplicates, ordered by the lowest rank of each server."""
        return list(dict.fromkeys(seat.server for seat in self.seats))


class InvalidTable(ValueError):
    """Raised if a table has errors. The message shows the first of `problems` and how many more there are."""

    def __init__(self, path: str, problems: Sequence[Problem]) -> None:
        more = f" (and {len(problems) - 1} more: mscomm ranktable check {path})" if len(problems) > 1 else ""
        super().__init__(f"{path}: {problems[0]}{more}")
        self.problems = list(problems)


def load(path: str, named_by: str = "") -> Table:
    """Read a table. Raise InvalidTable, a ValueError, if the file cannot be read or the table has an error.

    named_by: the variable that names the file. If the file cannot be read, the error message mentions this variable.
    """
    try:
        content = _content(path)
    except OSError as error:
        by = f", which {named_by} names," if named_by else ""
        raise InvalidTable(path, [Problem("", f"the rank table{by} cannot be read: {error.strerror}")]) from error
    return parse(content, path)


def parse(content: bytes, path: str) -> Table:
    """Parse the content of a file. Raise InvalidTable if the content has an error. path: used in error messages."""
    document, digest = _document(content, path)
    walk = _Walk()
    with contextlib.suppress(_EnoughError):
        walk.table(document)
    if walk.errors:
        raise InvalidTable(path, walk.errors)
    seats = sorted(walk.seats)
    return Table(document["version"], seats, _remarks(seats, document["version"], walk.unquoted), digest)


# -- reading the file --------------------------------------------------------------------------------------------------


def _content(path: str) -> bytes:
    """Return the content of a regular file. Do not block on a FIFO.

    Return at most LARGEST_BYTES + 1 bytes. The extra byte shows _document() that the file is too long.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise InvalidTable(path, [Problem("", "it is not a regular file, so not all ranks can read it")])
        return file.read(LARGEST_BYTES + 1)


class _Object(dict[str, Any]):
    """A JSON object that knows its duplicate keys. Python's JSON parser keeps only the last value of such a key."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = collections.Counter(key for key, _ in pairs)
        self.twice = [key for key, count in counts.items() if count > 1]


def _document(content: bytes, path: str) -> tuple[Any, str]:
    """Return the file's JSON value and a digest of it."""

    def fail(where: str, what: str) -> NoReturn:
        raise InvalidTable(path, [Problem(where, what)]) from None

    def no_value(word: str) -> NoReturn:
        fail("", f"it has the value {word}, which JSON does not have")

    if len(content) > LARGEST_BYTES:
        fail("", f"it has more than {LARGEST_BYTES >> 20} MiB; no rank table is that long")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        fail("", "it is in UTF-16; save it as UTF-8")
    try:
        text = content.decode("utf-8-sig")  # editors on Windows write a byte order mark, which HCCL accepts too
    except UnicodeDecodeError as error:
        fail(f"byte {error.start}", f"it is not UTF-8: {error.reason}; save it as UTF-8")
    if not text.strip():
        fail("", "it is empty; `mscomm ranktable make` writes a rank table")
    try:
        document = json.loads(text, object_pairs_hook=_Object, parse_int=_integer, parse_constant=no_value)
        canonical = json.dumps(document, sort_keys=True)
    except json.JSONDecodeError as error:
        fail(f"line {error.lineno} column {error.colno}", f"this is not JSON: {_why(text, error)}")
    except RecursionError:
        fail("", "lists and objects are nested too deeply for a rank table")
    return document, hashlib.sha256(canonical.encode()).hexdigest()


def _integer(text: str) -> int | str:
    """Return the number, or its text if it is very long.

    int() refuses thousands of digits, and its error would not say where in the table the number is.
    """
    return int(text) if len(text) < 20 else text


def _why(text: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos : error.pos + 200].lstrip()
    if not rest:
        return "the file ends in the middle"
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments; delete this one"
    return f"{error.msg[:1].lower()}{error.msg[1:]}, but found {_shown(rest[:12])}"


# -- checking the table ------------------------------------------------------------------------------------------------


class _EnoughError(Exception):
    """Raised when MOST_PROBLEMS errors have been found."""


class _Walk:
    """One pass over a table. It collects the ranks and, in the order of the file, the errors."""

    def __init__(self) -> None:
        self.errors: list[Problem] = []
        self.unquoted: list[str] = []  # the places of numbers that should be in quotes
        self.seats: list[Seat] = []
        self._size = 0
        self._several = False
        self._places: dict[tuple[str, Any], str] = {}  # the first place of each value that must be unique

    def error(self, where: str, what: str) -> None:
        self.errors.append(Problem(where, what))
        if len(self.errors) == MOST_PROBLEMS:
            raise _EnoughError

    def table(self, table: Any) -> None:
        if not self._is_object(table, "", "a rank table, an object with server_list"):
            return
        for key, what in _OTHER_KINDS.items():
            if key in table and "server_list" not in table:
                self.error(key, f"{what}, which mscomm does not read; give it one with a server_list")
                return
        version = self._get(table, "", "version", (str,), 'the text "1.0" or "1.2"')
        if version is not None and version not in VERSIONS:
            self.error("version", f'it is {_shown(version)}; mscomm reads "1.0" and "1.2"')
        status = self._get(table, "", "status", (str,), 'the text "completed"')
        if status is not None and status != "completed":
            self.error("status", f"it is {_shown(status)}, not 'completed': the table is not ready yet")
        servers = self._get(table, "", "server_list", (list,), "a list of servers")
        if servers is not None:
            self._servers(servers)
            self._server_count(table, len(servers))
        if version == "1.2" and "super_pod_list" in table:
            self._super_pods(table)

    def _server_count(self, table: _Object, servers: int) -> None:
        if "server_count" not in table and table.get("version") == "1.2":  # version 1.2 does not need server_count
            return
        count = self._number(table, "", "server_count", 1, 1 << 20, "the number of servers")
        if count is not None and count != servers:
            self.error("server_count", f"it is {count}, and server_list has {servers}; give both the same")

    def _servers(self, servers: list[Any]) -> None:
        if not servers:
            self.error("server_list", "it is empty; expected at least one server")
        self._several = len(servers) > 1
        devices = [server.get("device") for server in servers if isinstance(server, dict)]
        self._size = sum(len(some) for some in devices if isinstance(some, list))
        for i, server in enumerate(servers):
            self._server(server, f"server_list[{i}]")

    def _server(self, server: Any, at: str) -> None:
        if not self._is_object(server, at, "a server, an object with server_id and device"):
            return
        name = self._server_id(server, at)
        self._optional(server, at)
        devices = self._get(server, at, "device", (list,), "a list of devices")
        if devices is None:
            return
        if not 1 <= len(devices) <= MOST_DEVICES:
            self.error(f"{at}.device", f"it has {len(devices)} devices; expected 1 to {MOST_DEVICES}")
            return
        for j, device in enumerate(devices):
            self._device(device, f"{at}.device[{j}]", name, at)

    def _server_id(self, server: _Object, at: str) -> str:
        name = self._get(server, at, "server_id", (str,), "the server's address or name")
        place = f"{at}.server_id"
        if name is None:
            return ""
        if not name:
            self.error(place, "it is ''; expected the server's address or name")
        elif len(name) > LONGEST_SERVER_ID:
            self.error(place, f"it has {len(name)} characters; expected at most {LONGEST_SERVER_ID}")
        elif not re.fullmatch(r"[!-~]+", name):
            self.error(place, f"it is {_shown(name)}; expected an address or a name, without spaces")
        elif self._several and not is_host(name):
            self.error(
                place, f"it is {_shown(name)}, neither an address nor a host name, so the ranks cannot connect to it"
            )
        else:
            self._once("server", name, place, f"server_id {_shown(name)}")
        return str(name)

    def _device(self, device: Any, at: str, server: str, server_at: str) -> None:
        if not self._is_object(device, at, "a device, an object with device_id and rank_id"):
            return
        number = self._number(device, at, "device_id", 0, MOST_DEVICES - 1, "the device's number on its server")
        if number is not None:
            self._once(f"device of {server_at}", number, f"{at}.device_id", f"device {number} of this server")
        ip = self._address(device, at, "device_ip", "the address of the device's network card") or ""
        if ip:
            self._once("device_ip", ipaddress.ip_address(ip), f"{at}.device_ip", f"device_ip {ip}")
        self._optional(device, at)
        why = f" (there are {self._size} devices)"
        rank = self._number(device, at, "rank_id", 0, self._size - 1, "a rank", why)
        if rank is not None and self._once("rank", rank, f"{at}.rank_id", f"rank {rank}"):
            self.seats.append(Seat(rank, server, -1 if number is None else number, ip))

    def _optional(self, holder: _Object, at: str) -> None:
        """Check the optional fields, which mscomm does not use."""
        for key, what in _ADDRESSES.items():
            if not (key == "host_nic_ip" and holder.get(key) == "reserve"):
                self._address(holder, at, key, what)
        for key in _PORTS.intersection(holder):
            self._number(holder, at, key, 1, 65535, "a port")
        if "super_device_id" in holder:
            self._number(holder, at, "super_device_id", 0, (1 << 32) - 1, "the device's number in its super pod")

    def _super_pods(self, table: _Object) -> None:
        pods = self._get(table, "", "super_pod_list", (list,), "a list of super pods") or []
        for i, pod in enumerate(pods):
            at = f"super_pod_list[{i}]"
            if not self._is_object(pod, at, "a super pod, an object with super_pod_id and server_list"):
                continue
            name = self._get(pod, at, "super_pod_id", (str,), "the super pod's name, as text")
            if name is not None:
                self._once("pod", name, f"{at}.super_pod_id", f"super_pod_id {_shown(name)}")
            for j, member in enumerate(self._get(pod, at, "server_list", (list,), "a list of servers") or []):
                self._member(member, f"{at}.server_list[{j}]")
        for kind, name in self._places:
            if pods and kind == "server" and ("member", name) not in self._places:
                self.error("super_pod_list", f"server {_shown(name)} is in none of the super pods")

    def _member(self, member: Any, at: str) -> None:
        """Check one server of a super pod."""
        if not self._is_object(member, at, "an object with server_id"):
            return
        name = self._get(member, at, "server_id", (str,), "a server_id of the table's server_list")
        if name is None:
            return
        if ("server", name) not in self._places:
            self.error(f"{at}.server_id", f"no server of the table's server_list has the server_id {_shown(name)}")
        self._once("member", name, f"{at}.server_id", f"server {_shown(name)}")

    # -- checks of one field

    def _is_object(self, value: Any, at: str, expected: str) -> bool:
        if not isinstance(value, _Object):
            self.error(at, f"it is {_shown(value)}; expected {expected}")
            return False
        for key in value.twice:
            self.error(at, f"the key {_shown(key)} occurs more than once; JSON parsers use the last one; keep only one")
        return True

    def _get(self, holder: _Object, at: str, key: str, kinds: tuple[type, ...], expected: str) -> Any:
        """Return holder[key] if its type is one of `kinds`; otherwise record an error and return None."""
        where = f"{at}.{key}".lstrip(".")
        if key not in holder:
            there = ", ".join(_shown(other) for other in list(holder)[:8])
            self.error(where, f"it is missing{f' (there is {there})' if there else ''}; expected {expected}")
        elif type(holder[key]) not in kinds:  # not isinstance(), because a bool is an instance of int
            self.error(where, f"it is {_shown(holder[key])}; expected {expected}")
        else:
            return holder[key]
        return None

    def _number(self, holder: _Object, at: str, key: str, low: int, high: int, what: str, why: str = "") -> int | None:
        """Return the number in the field, or None after an error.

        A number that is not in quotes is accepted with a remark.
        """
        expected = f"{what} from {low} to {high}, as text{why}"
        value = self._get(holder, at, key, (str, int), expected)
        if value is None:
            return None
        where, text = f"{at}.{key}".lstrip("."), str(value)
        if not (text.isascii() and text.isdecimal()):
            self.error(where, f"it is {_shown(value)}; expected {expected}")
        elif text != "0" and text.startswith("0"):
            self.error(where, f"it is {_shown(value)}, with a leading zero; expected {expected}")
        elif len(text) > 19 or not low <= int(text) <= high:
            self.error(where, f"it is {_shown(value)}, out of range; expected {expected}")
        else:
            if isinstance(value, int):
                self.unquoted.append(where)
            return int(text)
        return None

    def _address(self, holder: _Object, at: str, key: str, what: str) -> str | None:
        """Return the IP address in an optional field; None if the field is missing or invalid."""
        if key not in holder:
            return None
        expected = f"{what}, an IP address, or no {key} at all"
        value = self._get(holder, at, key, (str,), expected)
        if value is None or is_address(value):
            return None if value is None else str(value)
        self.error(f"{at}.{key}", f"it is {_shown(value)}; expected {expected}")
        return None

    def _once(self, kind: str, value: Any, where: str, name: str) -> bool:
        """Return whether this is the first place that has this value of this kind. If not, record an error."""
        first = self._places.setdefault((kind, value), where)
        if first != where:
            self.error(where, f"{name} occurs twice; it is also at {first}")
        return first == where


_ADDRESSES = {
    "host_nic_ip": "'reserve', or the address of the server's network card",
    "host_ip": "the server's address",
    "backup_device_ip": "the address of another device's network card",
}
_PORTS = frozenset({"device_port", "backup_device_port", "host_port"})


def is_address(text: str) -> bool:
    """Return whether the text is an IP address, of version 4 or 6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return re.fullmatch(r"[\w:.%-]+", text, re.ASCII) is not None  # ipaddress accepts any characters as a scope


def is_host(text: str) -> bool:
    """Return whether the text is an address or a possible host name; 10.0.0.300 is neither."""
    name = re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?", text)
    return is_address(text) or bool(name and not re.fullmatch(r"[0-9.]+", text))


def _shown(value: Any) -> str:
    """Return the value as text for error messages: null, true and false as in JSON, and long text shortened."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else f"{value[:40]}...")
    names = {None: "null", True: "true", False: "false"}
    return names[value] if value is None or isinstance(value, bool) else f"the number {value}"


# -- what HCCL refuses -------------------------------------------------------------------------------------------------


def _remarks(seats: list[Seat], version: str, unquoted: list[str]) -> list[Problem]:
    remarks = []
    if unquoted:
        more = f", and so are {len(unquoted) - 1} others" if len(unquoted) > 1 else ""
        remarks.append(Problem(unquoted[0], f"the number is not in quotes{more}; HCCL reads only text"))
    servers = list(dict.fromkeys(seat.server for seat in seats))
    changes = sum(seat.server != before.server for before, seat in itertools.pairwise(seats))
    if changes >= len(servers):
        remarks.append(Problem("rank_id", "the ranks of a server are not consecutive; HCCL requires that they are"))
    elif servers != sorted(servers):
        first = next(name for name, right in zip(servers, sorted(servers), strict=True) if name != right)
        what = f"the ranks are not in the alphabetical order of server_id, in which {min(servers)!r} comes first"
        remarks.append(Problem(f"server_id {first!r}", f"{what}; HCCL requires this order"))
    if not is_host(servers[0]):
        remarks.append(Problem("server_id", f"{servers[0]!r} is neither an address nor a name: write the server's"))
    without = [seat.rank for seat in seats if not seat.device_ip]
    if without and len(servers) > 1 and version == "1.0":
        what = f"rank {without[0]} has none, but HCCL needs it for several servers; look it up in /etc/hccn.conf"
        remarks.append(Problem("device_ip", what))
    return remarks


def unfit_for_910(seats: Sequence[Seat]) -> list[Problem]:
    """Return the reasons why Atlas 910 servers cannot run these ranks; none if they can.

    In such a server, devices 0 to 3 and devices 4 to 7 are on separate networks.
    """
    devices: dict[str, list[int]] = {}
    for seat in seats:
        devices.setdefault(seat.server, []).append(seat.device)
    found = []
    for name, numbers in devices.items():
        where = f"server_id {name!r}"
        if max(numbers) > 7:
            found.append(Problem(where, f"there is no device {max(numbers)}; Atlas 910 servers have 0 to 7"))
        if len(devices) > 1 and len(numbers) != 8:
            found.append(
                Problem(where, f"it has {len(numbers)} devices; with several Atlas 910 servers, each must use all 8")
            )
        elif len(numbers) not in (1, 2, 4, 8):
            found.append(Problem(where, f"it has {len(numbers)} devices; one Atlas 910 server runs 1, 2, 4 or 8"))
        elif len(numbers) in (2, 4) and min(numbers) < 4 <= max(numbers):
            found.append(
                Problem(
                    where, f"devices {sorted(numbers)} are on two networks, 0 to 3 and 4 to 7; use devices of only one"
                )
            )
    return found


# -- writing a table ---------------------------------------------------------------------------------------------------


class Server(NamedTuple):
    """What `make` needs to know about a server."""

    server_id: str
    devices: Sequence[int]
    device_ips: Mapping[int, str] = {}


def make(servers: Iterable[Server]) -> str:
    """Return the text of a version 1.0 table. Servers are sorted as HCCL requires; ranks are numbered in that order.
    Raise InvalidTable if the servers do not form a valid table, for example if a server_id occurs twice.
    """
    ranked = sorted(servers, key=lambda server: server.server_id)
    ranks = itertools.count()
    listed = ",\n".join(_server(server, ranks) for server in ranked)
    text = (
        "{\n"
        '    "version": "1.0",\n'
        f'    "server_count": "{len(ranked)}",\n'
        f'    "server_list": [\n{listed}\n    ],\n'
        '    "status": "completed"\n'
        "}\n"
    )
    parse(text.encode(), "the table")
    return text


def _server(server: Server, ranks: Iterator[int]) -> str:
    devices = ",\n".join(" " * 16 + _device(device, server.device_ips, next(ranks)) for device in server.devices)
    return (
        "        {\n"
        f'            "server_id": {json.dumps(server.server_id)},\n'
        f'            "device": [\n{devices}\n            ],\n'
        '            "host_nic_ip": "reserve"\n'
        "        }"
    )


def _device(device: int, device_ips: Mapping[int, str], rank: int) -> str:
    ip = {"device_ip": device_ips[device]} if device in device_ips else {}
    return json.dumps({"device_id": str(device), **ip, "rank_id": str(rank)})

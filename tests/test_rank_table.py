"""Rank tables: what is refused and with which messages, and jobs whose ranks find each other through a rank table."""

from __future__ import annotations

import copy
import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn import drawn
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sessions import clean_environment
from test_launchers import TWICE, by_variables

from mscomm import bootstrap
from mscomm.bootstrap import rank_table, rank_table_file
from mscomm.bootstrap.rank_table_file import (
    LARGEST_BYTES,
    MOST_PROBLEMS,
    InvalidTable,
    Seat,
    Server,
    load,
    make,
    parse,
    unfit_for_910,
)

settings.register_profile("mscomm", database=None, deadline=None, derandomize=True, max_examples=300)
settings.load_profile("mscomm")

Change = Callable[[Any], object]


def table(servers: int = 2, devices: int = 2) -> dict[str, Any]:
    """Return a table without errors or remarks."""
    return {
        "version": "1.0",
        "server_count": str(servers),
        "server_list": [
            {
                "server_id": f"10.0.0.{i + 1}",
                "device": [
                    {"device_id": str(j), "device_ip": f"192.{j + 1}.27.{i + 6}", "rank_id": str(devices * i + j)}
                    for j in range(devices)
                ],
                "host_nic_ip": "reserve",
            }
            for i in range(servers)
        ],
        "status": "completed",
    }


def super_pods() -> dict[str, Any]:
    """Return a table of version 1.2 as in HCCL's documents, with fields that mscomm does not use."""
    found = table()
    found["version"] = "1.2"
    del found["server_count"]
    for i, server in enumerate(found["server_list"]):
        server["host_ip"] = f"172.16.0.10{i}"
        for j, device in enumerate(server["device"]):
            more = {"super_device_id": str(2 * i + j), "device_port": "16666", "host_port": str(16665 + j)}
            device.update(more, backup_device_ip=f"192.{2 - j}.27.{i + 6}", backup_device_port="16667")
    found["super_pod_list"] = [
        {"super_pod_id": str(i), "server_list": [{"server_id": f"10.0.0.{i + 1}"}]} for i in range(2)
    ]
    return found


def changed(change: Change, of: Callable[[], dict[str, Any]] = table) -> bytes:
    found = of()
    change(found)
    return json.dumps(found).encode()


def refused(content: bytes, path: str = "table.json") -> InvalidTable:
    with pytest.raises(InvalidTable) as caught:
        parse(content, path)
    assert str(caught.value).startswith(f"{path}: ")
    return caught.value


def put(*path: Any, to: Any) -> Change:
    """Return a change that sets the value at this path. If the path ends with a new key, the change adds the key."""

    def change(found: Any) -> None:
        for step in path[:-1]:
            found = found[step]
        found[path[-1]] = to

    return change


def drop(*path: Any) -> Change:
    def change(found: Any) -> None:
        for step in path[:-1]:
            found = found[step]
        del found[path[-1]]

    return change


SERVER, DEVICE = ("server_list", 0), ("server_list", 0, "device", 1)
AT, AT_DEVICE = "server_list[0]", "server_list[0].device[1]"
A_RANK = "expected a rank from 0 to 3, as text (there are 4 devices)"
AN_ID = "expected the device's number on its server from 0 to 1023, as text"


def twice(content: bytes, key: str) -> bytes:
    """Return the content with the key twice: a pair `key: "7"` is inserted before the first pair with that key."""
    return content.replace(f'"{key}":'.encode(), f'"{key}": "7", "{key}":'.encode(), 1)


WHOLE = json.dumps(table()).encode()

# For each mistake: the content of the file, and the full text that follows the file's name in the first error.
FILES = {
    "empty": (b" \n", "it is empty; `mscomm ranktable make` writes a rank table"),
    "too long": (b" " * (LARGEST_BYTES + 1), "it has more than 16 MiB; no rank table is that long"),
    "utf-16": (WHOLE.decode().encode("utf-16"), "it is in UTF-16; save it as UTF-8"),
    "not utf-8": (
        WHOLE.replace(b"10.0", b"\xff0.0", 1),
        "byte 71: it is not UTF-8: invalid start byte; save it as UTF-8",
    ),
    "cut off": (WHOLE[:19], "line 1 column 20: this is not JSON: the file ends in the middle"),
    "comment": (
        WHOLE.replace(b'"1.0", ', b'"1.0",\n // of the template\n'),
        "line 2 column 2: this is not JSON: JSON has no comments; delete this one",
    ),
    "no comma": (
        WHOLE.replace(b'"1.0",', b'"1.0"'),
        "line 1 column 19: this is not JSON: expecting ',' delimiter, but found '\"server_coun'",
    ),
    "two values": (WHOLE + b"{}", f"line 1 column {len(WHOLE) + 1}: this is not JSON: extra data, but found '{{}}'"),
    "nan": (WHOLE.replace(b'"1.0"', b"NaN"), "it has the value NaN, which JSON does not have"),
    "infinity": (WHOLE.replace(b'"1.0"', b"-Infinity"), "it has the value -Infinity, which JSON does not have"),
    "too deep": (b"[" * 100_000, "lists and objects are nested too deeply for a rank table"),
    "no object": (b"[]", "it is a list; expected a rank table, an object with server_list"),
    "key twice": (
        twice(WHOLE, "rank_id"),
        "server_list[0].device[0]: the key 'rank_id' occurs more than once; JSON parsers use the last one; keep only "
        "one",
    ),
}
TABLES = {
    "older template": (
        lambda t: (t.pop("server_list"), t.update(group_list=[])),
        "group_list: this is the older template, with group_list, which mscomm does not read; give it one with a "
        "server_list",
    ),
    "several clusters": (
        lambda t: t.update(cluster_list=[t.pop("server_list")]),
        "cluster_list: this is a table of several clusters, which mscomm does not read; give it one with a server_list",
    ),
    "no version": (
        drop("version"),
        "version: it is missing (there is 'server_count', 'server_list', 'status'); expected the text \"1.0\" or "
        '"1.2"',
    ),
    "version a number": (put("version", to=1.0), 'version: it is the number 1.0; expected the text "1.0" or "1.2"'),
    "other version": (put("version", to="2.0"), 'version: it is \'2.0\'; mscomm reads "1.0" and "1.2"'),
    "not ready": (
        put("status", to="initializing"),
        "status: it is 'initializing', not 'completed': the table is not ready yet",
    ),
    "status true": (put("status", to=True), 'status: it is true; expected the text "completed"'),
    "servers an object": (put("server_list", to={}), "server_list: it is an object; expected a list of servers"),
    "no server": (put("server_list", to=[]), "server_list: it is empty; expected at least one server"),
    "server_count": (
        put("server_count", to="3"),
        "server_count: it is 3, and server_list has 2; give both the same",
    ),
    "server_count zero": (
        put("server_count", to="0"),
        "server_count: it is '0', out of range; expected the number of servers from 1 to 1048576, as text",
    ),
    "server a text": (
        put(*SERVER, to="10.0.0.1"),
        f"{AT}: it is '10.0.0.1'; expected a server, an object with server_id and device",
    ),
    "server_id null": (
        put(*SERVER, "server_id", to=None),
        f"{AT}.server_id: it is null; expected the server's address or name",
    ),
    "server_id empty": (
        put(*SERVER, "server_id", to=""),
        f"{AT}.server_id: it is ''; expected the server's address or name",
    ),
    "server_id long": (
        put(*SERVER, "server_id", to="s" * 64),
        f"{AT}.server_id: it has 64 characters; expected at most 63",
    ),
    "server_id with a line's end": (
        put(*SERVER, "server_id", to="10.0.0.1\n"),
        f"{AT}.server_id: it is '10.0.0.1\\n'; expected an address or a name, without spaces",
    ),
    "server_id of the tutorial": (
        put(*SERVER, "server_id", to="10.*.*.*"),
        f"{AT}.server_id: it is '10.*.*.*', neither an address nor a host name, so the ranks cannot connect to it",
    ),
    "server_id twice": (
        put("server_list", 1, "server_id", to="10.0.0.1"),
        f"server_list[1].server_id: server_id '10.0.0.1' occurs twice; it is also at {AT}.server_id",
    ),
    "host_nic_ip": (
        put(*SERVER, "host_nic_ip", to="eth0"),
        f"{AT}.host_nic_ip: it is 'eth0'; expected 'reserve', or the address of the server's network card, an IP "
        "address, or no host_nic_ip at all",
    ),
    "no devices": (
        drop(*SERVER, "device"),
        f"{AT}.device: it is missing (there is 'server_id', 'host_nic_ip'); expected a list of devices",
    ),
    "devices empty": (put(*SERVER, "device", to=[]), f"{AT}.device: it has 0 devices; expected 1 to 1024"),
    "too many devices": (
        put(*SERVER, "device", to=[{}] * 1025),
        f"{AT}.device: it has 1025 devices; expected 1 to 1024",
    ),
    "device a number": (
        put(*DEVICE, to=1),
        f"{AT_DEVICE}: it is the number 1; expected a device, an object with device_id and rank_id",
    ),
    "device_id misspelt": (
        lambda t: t["server_list"][0]["device"][1].update(deviceid=t["server_list"][0]["device"][1].pop("device_id")),
        f"{AT_DEVICE}.device_id: it is missing (there is 'device_ip', 'rank_id', 'deviceid'); {AN_ID}",
    ),
    "device_id twice": (
        put(*DEVICE, "device_id", to="0"),
        f"{AT_DEVICE}.device_id: device 0 of this server occurs twice; it is also at {AT}.device[0].device_id",
    ),
    "device_id absurd": (
        put(*DEVICE, "device_id", to="1024"),
        f"{AT_DEVICE}.device_id: it is '1024', out of range; {AN_ID}",
    ),
    "device_ip no address": (
        put(*DEVICE, "device_ip", to="192.2.27"),
        f"{AT_DEVICE}.device_ip: it is '192.2.27'; expected the address of the device's network card, an IP address, "
        "or no device_ip at all",
    ),
    "device_ip twice": (
        put("server_list", 1, "device", 0, "device_ip", to="192.1.27.6"),
        "server_list[1].device[0].device_ip: device_ip 192.1.27.6 occurs twice; it is also at "
        f"{AT}.device[0].device_ip",
    ),
    "device_port": (
        put(*DEVICE, "device_port", to="65536"),
        f"{AT_DEVICE}.device_port: it is '65536', out of range; expected a port from 1 to 65535, as text",
    ),
    "rank_id true": (put(*DEVICE, "rank_id", to=True), f"{AT_DEVICE}.rank_id: it is true; {A_RANK}"),
    "rank_id a float": (put(*DEVICE, "rank_id", to=1.0), f"{AT_DEVICE}.rank_id: it is the number 1.0; {A_RANK}"),
    "rank_id a list": (put(*DEVICE, "rank_id", to=["1"]), f"{AT_DEVICE}.rank_id: it is a list; {A_RANK}"),
    "rank_id empty": (put(*DEVICE, "rank_id", to=""), f"{AT_DEVICE}.rank_id: it is ''; {A_RANK}"),
    "rank_id negative": (put(*DEVICE, "rank_id", to=-1), f"{AT_DEVICE}.rank_id: it is the number -1; {A_RANK}"),
    "rank_id of other digits": (put(*DEVICE, "rank_id", to="\u0661"), f"{AT_DEVICE}.rank_id: it is '\u0661'; {A_RANK}"),
    "rank_id with zeros": (
        put(*DEVICE, "rank_id", to="01"),
        f"{AT_DEVICE}.rank_id: it is '01', with a leading zero; {A_RANK}",
    ),
    "rank_id of thousands of digits": (
        put(*DEVICE, "rank_id", to="1" * 5000),
        f"{AT_DEVICE}.rank_id: it is '{'1' * 40}...', out of range; {A_RANK}",
    ),
    "rank_id twice": (
        put(*DEVICE, "rank_id", to="0"),
        f"{AT_DEVICE}.rank_id: rank 0 occurs twice; it is also at {AT}.device[0].rank_id",
    ),
    "ranks from 1": (
        lambda t: [d.update(rank_id=str(int(d["rank_id"]) + 1)) for s in t["server_list"] for d in s["device"]],
        f"server_list[1].device[1].rank_id: it is '4', out of range; {A_RANK}",
    ),
}
SUPER_PODS = {
    "pod without a name": (
        drop("super_pod_list", 0, "super_pod_id"),
        "super_pod_list[0].super_pod_id: it is missing (there is 'server_list'); expected the super pod's name, as "
        "text",
    ),
    "pod twice": (
        put("super_pod_list", 1, "super_pod_id", to="0"),
        "super_pod_list[1].super_pod_id: super_pod_id '0' occurs twice; it is also at super_pod_list[0].super_pod_id",
    ),
    "pod of a stranger": (
        put("super_pod_list", 1, "server_list", 0, "server_id", to="10.0.0.3"),
        "super_pod_list[1].server_list[0].server_id: no server of the table's server_list has the server_id '10.0.0.3'",
    ),
    "server in two pods": (
        put("super_pod_list", 1, "server_list", 0, "server_id", to="10.0.0.1"),
        "super_pod_list[1].server_list[0].server_id: server '10.0.0.1' occurs twice; it is also at "
        "super_pod_list[0].server_list[0].server_id",
    ),
    "server in no pod": (
        lambda t: t["super_pod_list"].pop(),
        "super_pod_list: server '10.0.0.2' is in none of the super pods",
    ),
    "super_device_id": (
        put(*DEVICE, "super_device_id", to="0x10"),
        f"{AT_DEVICE}.super_device_id: it is '0x10'; expected the device's number in its super pod from 0 to "
        "4294967295, as text",
    ),
}
BAD = {
    **FILES,
    **{name: (changed(change), text) for name, (change, text) in TABLES.items()},
    **{name: (changed(change, super_pods), text) for name, (change, text) in SUPER_PODS.items()},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table_has_an_error_of_its_own_with_its_place(name: str) -> None:
    content, text = BAD[name]
    error = refused(content)
    assert str(error.problems[0]) == text
    assert re.fullmatch(
        re.escape(f"table.json: {text}") + r"( \(and \d+ more: mscomm ranktable check table.json\))?", str(error)
    )


def test_the_kinds_of_bad_tables_are_told_apart_by_their_words() -> None:
    assert len(BAD) >= 25 and len({text for _, text in BAD.values()}) == len(BAD)


@pytest.mark.parametrize(
    ("name", "make_it", "why"),
    [
        ("nowhere.json", lambda path: None, "cannot be read: No such file or directory"),
        ("folder", Path.mkdir, "cannot be read: Is a directory"),
        ("fifo", os.mkfifo, "it is not a regular file, so not all ranks can read it"),
        ("loop", lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
        ("private", lambda path: path.touch(0), "cannot be read: Permission denied"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_the_reason(
    name: str, make_it: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    make_it(path)
    root = os.geteuid() == 0
    if name == "private" and root:  # root may read every file, so become another user
        tmp_path.chmod(0o755)
        os.seteuid(65534)
    try:
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{why}$"):
            load(str(path))
    finally:
        if root:
            os.seteuid(0)


def test_all_problems_are_told_in_the_order_of_the_file() -> None:
    found = table()
    found["server_list"][0]["device"][0]["device_id"] = "x"
    found["server_list"][1]["device"][1]["rank_id"] = "9"
    found["server_count"] = "5"
    error = refused(json.dumps(found).encode())
    places = ["server_list[0].device[0].device_id", "server_list[1].device[1].rank_id", "server_count"]
    assert [problem.where for problem in error.problems] == places
    assert str(error).endswith("(and 2 more: mscomm ranktable check table.json)")


def test_a_file_of_something_else_has_no_endless_list_of_problems() -> None:
    content = json.dumps({"version": "1.0", "status": "completed", "server_list": [0] * 1_000_000}).encode()
    assert len(refused(content).problems) == MOST_PROBLEMS


# -- what is accepted


def test_a_table_gives_each_rank_its_server_device_and_address() -> None:
    found = parse(WHOLE, "table.json")
    assert (found.version, found.servers, found.remarks) == ("1.0", ["10.0.0.1", "10.0.0.2"], [])
    assert found.seats == [
        Seat(0, "10.0.0.1", 0, "192.1.27.6"),
        Seat(1, "10.0.0.1", 1, "192.2.27.6"),
        Seat(2, "10.0.0.2", 0, "192.1.27.7"),
        Seat(3, "10.0.0.2", 1, "192.2.27.7"),
    ]


def test_super_pods_are_read() -> None:
    found = parse(json.dumps(super_pods()).encode(), "table.json")
    assert found.version == "1.2" and found.seats == parse(WHOLE, "table.json").seats and found.remarks == []


def test_the_table_of_the_tutorial_is_taken_as_it_stands() -> None:
    """If there is only one server, its address is not used. The tutorial has a placeholder for the address."""
    content = changed(put(*SERVER, "server_id", to="10.*.*.*"), lambda: table(1, 8))
    found = parse(content, "table.json")
    assert [seat.device for seat in found.seats] == list(range(8))
    assert [str(remark) for remark in found.remarks] == [
        "server_id: '10.*.*.*' is neither an address nor a name: write the server's"
    ]


def test_the_examples_of_the_module_are_true() -> None:
    assert doctest.testmod(rank_table_file) == (0, 3)


def test_unknown_fields_and_a_byte_order_mark_do_no_harm() -> None:
    content = changed(lambda t: (t.update(description=["x"]), t["server_list"][0].update(pod_ip="10.1.1.1")))
    assert parse(b"\xef\xbb\xbf" + content, "table.json").seats == parse(WHOLE, "table.json").seats


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (put(*DEVICE, "rank_id", to=1), f"{AT_DEVICE}.rank_id: the number is not in quotes; HCCL reads only text"),
        (
            put("server_list", 0, "server_id", to="10.0.0.9"),
            "server_id '10.0.0.9': the ranks are not in the alphabetical order of server_id, in which '10.0.0.2' "
            "comes first; HCCL requires this order",
        ),
        (
            lambda t: [t["server_list"][i]["device"][0].update(rank_id=str(2 - 2 * i)) for i in range(2)],
            "rank_id: the ranks of a server are not consecutive; HCCL requires that they are",
        ),
        (
            drop("server_list", 1, "device", 0, "device_ip"),
            "device_ip: rank 2 has none, but HCCL needs it for several servers; look it up in /etc/hccn.conf",
        ),
    ],
    ids=["number", "order", "mixed", "no device_ip"],
)
def test_what_hccl_alone_refuses_is_a_remark(change: Change, remark: str) -> None:
    assert [str(one) for one in parse(changed(change), "table.json").remarks] == [remark]


@pytest.mark.parametrize(
    ("servers", "devices", "found"),
    [
        (1, [0], []),
        (1, [0, 1], []),
        (1, [4, 5, 6, 7], []),
        (2, list(range(8)), []),
        (1, [0, 1, 2], ["server_id 's0': it has 3 devices; one Atlas 910 server runs 1, 2, 4 or 8"]),
        (1, [3, 4], ["server_id 's0': devices [3, 4] are on two networks, 0 to 3 and 4 to 7; use devices of only one"]),
        (1, [8], ["server_id 's0': there is no device 8; Atlas 910 servers have 0 to 7"]),
        (
            2,
            [0, 1, 2, 3],
            [
                f"server_id 's{i}': it has 4 devices; with several Atlas 910 servers, each must use all 8"
                for i in range(2)
            ],
        ),
    ],
)
def test_the_limits_of_atlas_910(servers: int, devices: list[int], found: list[str]) -> None:
    seats = parse(make([Server(f"s{i}", devices) for i in range(servers)]).encode(), "table.json").seats
    assert [str(problem) for problem in unfit_for_910(seats)] == found


# -- files with arbitrary bytes


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*at, key))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=80),
    st.sampled_from(["0", "1", "2", "-0", "1e0", "0x1", " 1", "10.0.0.1", "\ud800", "1" * 30, [], {}, [[]], {"a": 1}]),
)


def assert_told_or_taken(content: bytes) -> None:
    try:
        found = parse(content, "the/table.json")
    except ValueError as error:
        assert type(error) is InvalidTable and str(error).startswith("the/table.json: ")
        assert str(error).isprintable() and len(str(error)) < 1000
    else:
        assert [seat.rank for seat in found.seats] == list(range(len(found.seats)))


# tests/fuzz/rank_table_fuzz.py tries many more examples.
@drawn(st.data(), st.sampled_from([table, super_pods]))
def test_a_table_with_odd_values_is_told_or_taken(data: st.DataObject, of: Callable[[], dict[str, Any]]) -> None:
    found = of()
    for _ in range(data.draw(st.integers(1, 4))):
        *before, last = data.draw(st.sampled_from([place for place in places(found) if place]))
        holder = found
        for step in before:
            holder = holder[step]
        if data.draw(st.booleans()):
            holder[last] = copy.deepcopy(data.draw(ODD))  # a later step may change it
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        else:
            del holder[last]
    assert_told_or_taken(json.dumps(found, allow_nan=True).encode())


@drawn(st.data())
def test_damaged_bytes_are_told_or_taken(data: st.DataObject) -> None:
    damaged = bytearray(json.dumps(super_pods()).encode())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    assert_told_or_taken(bytes(damaged))


@given(st.binary(max_size=200))
@example(b'{"a":' * 900 + b"1" + b"}" * 900)
@example(b'{"version":' + b"9" * 5000 + b"}")
@example(b'{"\x1b[31m": 1, "\x1b[31m": 1}')
def test_any_bytes_are_told_or_taken(content: bytes) -> None:
    assert_told_or_taken(content)


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": "' + b'\\"' * (LARGEST_BYTES // 2 - 10),
        b'{"server_list": [' + b'{"device": [' + b"0," * (LARGEST_BYTES // 2 - 40) + b"0]}]}",
        b"{" + b'"a":1,' * (LARGEST_BYTES // 6 - 10) + b'"b":1}',
    ],
    ids=["quotes", "devices", "keys"],
)
def test_the_longest_files_are_told_before_the_time_limit_of_the_tests(content: bytes) -> None:
    assert len(content) <= LARGEST_BYTES
    refused(content)


# -- environment variables that name the table and the rank


@pytest.fixture
def path(tmp_path: Path) -> str:
    found = tmp_path / "table.json"
    found.write_bytes(WHOLE)
    return str(found)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"RANK_TABLE_FILE": "/nowhere/table.json", "RANK_ID": "0"},
            "/nowhere/table.json: the rank table, which RANK_TABLE_FILE names, cannot be read: No such file or "
            "directory",
        ),
        (
            {"MINDSPORE_HCCL_CONFIG_PATH": "/nowhere/table.json", "RANK_ID": "0"},
            "/nowhere/table.json: the rank table, which MINDSPORE_HCCL_CONFIG_PATH names, cannot be read: No such file "
            "or directory",
        ),
        (
            {"RANK_TABLE_FILE": "%", "RANK_SIZE": "4"},
            "RANK_TABLE_FILE=% is set, and RANK_ID is not; give each process its rank, 0 to 3, or unset "
            "RANK_TABLE_FILE for a job of one rank",
        ),
        (
            {"RANK_ID": "1", "RANK_SIZE": "4"},
            "RANK_ID=1 and RANK_SIZE=4 are set, and RANK_TABLE_FILE is not; it names the rank table of the job. "
            "`mscomm ranktable make` writes one",
        ),
        (
            {"RANK_TABLE_FILE": "%", "RANK_ID": "4"},
            "RANK_ID='4': expected one of the ranks of %, 0 to 3",
        ),
        (
            {"RANK_TABLE_FILE": "%", "RANK_ID": "first"},
            "RANK_ID='first': expected one of the ranks of %, 0 to 3",
        ),
        (
            {"RANK_TABLE_FILE": "%", "RANK_ID": "1", "RANK_SIZE": "8"},
            "RANK_SIZE=8: % has 4 devices; give both the same number",
        ),
        (
            {"RANK_TABLE_FILE": "%", "RANK_ID": "3", "DEVICE_ID": "3"},
            "DEVICE_ID=3: rank 3 has device_id 1 of server 10.0.0.2 in %; give both the same",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_variables_that_do_not_fit_are_named(variables: dict[str, str], text: str, path: str) -> None:
    env = {name: value.replace("%", path) for name, value in variables.items()}
    launcher = bootstrap.find(env)
    assert launcher is not None and launcher.NAME == "rank table"
    with pytest.raises(ValueError) as caught:
        rank_table.read(env)
    assert str(caught.value) == text.replace("%", path).replace(f"RANK_{path}_FILE", "RANK_TABLE_FILE")


def test_half_of_the_variables_make_no_job_of_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import mscomm; mscomm.init()"],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(RANK_ID="0", RANK_SIZE="2"),
    )
    assert done.returncode == 1 and "ValueError: RANK_ID=0 and RANK_SIZE=2 are set, and RANK_TABLE" in done.stderr


@pytest.mark.parametrize(
    "env", [{"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "0"}, {"RANK_ID": "0"}, {"RANK_TABLE_FILE": " "}]
)
def test_a_script_for_one_device_is_a_job_of_one(env: dict[str, str]) -> None:
    assert bootstrap.find(env) is None


@pytest.mark.parametrize(
    "more", [{}, {"RANK_SIZE": "4", "DEVICE_ID": "1"}, {"MINDSPORE_HCCL_CONFIG_PATH": "/nowhere"}, {"RANK_ID": " 3\n"}]
)
def test_what_may_be_left_out(more: dict[str, str], path: str) -> None:
    found, rank = rank_table.read({"RANK_TABLE_FILE": path, "RANK_ID": "3", **more})
    assert rank == 3 and found.seats[rank] == Seat(3, "10.0.0.2", 1, "192.2.27.7")


# -- jobs; jobs on several hosts are in test_hosts.py


def test_a_rank_that_is_alone_says_whom_it_has_looked_for(path: str, tmp_path: Path) -> None:
    one = tmp_path / "one.json"
    one.write_text(json.dumps({**table(1, 2), "description": str(tmp_path)}))
    done = subprocess.run(
        [sys.executable, "-c", "import mscomm; mscomm.init()"],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environment(RANK_TABLE_FILE=str(one), RANK_ID="1", MS_TOPO_TIMEOUT="1"),
    )
    assert done.returncode == 1 and "BackendUnavailable: rank table: rank 1 finds no hub of rank 0 at" in done.stderr
    assert f"its server_id in {one}" in done.stderr


def test_the_ranks_of_one_server_meet_by_the_older_name_with_device_ids(tmp_path: Path) -> None:
    """Each rank has its own copy of the table, with different whitespace and a different order of keys."""
    (tmp_path / "twice.py").write_text(TWICE)
    content = {**table(1, 2), "description": str(tmp_path)}
    for rank in range(2):
        copied = dict(reversed(content.items())) if rank else content
        (tmp_path / f"table{rank}.json").write_text(json.dumps(copied, indent=4 * rank))
    env = {"MINDSPORE_HCCL_CONFIG_PATH": f"{tmp_path}/table%.json", "RANK_ID": "%", "DEVICE_ID": "%"}
    for rank, (code, out, err) in enumerate(by_variables(tmp_path / "twice.py", env, 2)):
        assert (code, out) == (0, f"rank table: {rank} of 2\n"), err

"""The commands `mscomm ranktable make`, `check` and `ranks`."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console
from sessions import invoke
from test_rank_table import A_RANK, AT_DEVICE, DEVICE, WHOLE, changed, drop, put, table

from mscomm.bootstrap.rank_table_file import Seat, Server, load, make, parse
from mscomm.cli import ranktable


@pytest.fixture
def path(tmp_path: Path) -> str:
    found = tmp_path / "table.json"
    found.write_bytes(WHOLE)
    return str(found)


called = partial(invoke, ranktable.command)


@pytest.fixture(autouse=True)
def no_hccn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Pretend that the machine has no Ascend driver. Return the path where the driver's file would be."""
    monkeypatch.setattr(ranktable, "HCCN", tmp_path / "hccn.conf")
    return tmp_path / "hccn.conf"


def test_make_writes_a_table_of_several_servers(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    ips = [f"192.{j + 1}.27.{i + 6}" for i in range(2) for j in range(2)]
    words = [word for ip in ips for word in ("--device-ip", ip)]
    done = called("make", "--server", "10.0.0.1", "--server", "10.0.0.2", "--devices", "2", *words, "--output", out)
    assert (done.exit_code, done.output) == (0, f"{out}: 2 server(s), 4 ranks\n")
    assert json.loads(out.read_text()) == table()
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.parametrize(
    ("text", "devices"), [("3", [0, 1, 2]), ("4-7", [4, 5, 6, 7]), ("0,2", [0, 2]), ("1-2,5", [1, 2, 5])]
)
def test_make_takes_a_number_of_devices_or_which(text: str, devices: list[int]) -> None:
    done = called("make", "--server", "node_0", "--devices", text)
    assert [seat.device for seat in parse(done.stdout.encode(), "stdout").seats] == devices


def test_make_puts_the_servers_in_the_order_that_hccl_wants_with_their_addresses() -> None:
    words = ["--device-ip", "192.1.27.9", "--device-ip", "192.1.27.10"]
    done = called("make", "--server", "10.0.0.9", "--server", "10.0.0.10", "--devices", "1", *words)
    found = parse(done.stdout.encode(), "stdout")
    assert found.seats == [Seat(0, "10.0.0.10", 0, "192.1.27.10"), Seat(1, "10.0.0.9", 0, "192.1.27.9")]
    assert found.remarks == [] and "rank 0 is on 10.0.0.10" in done.stderr


def test_make_reads_the_addresses_of_the_driver(no_hccn: Path, tmp_path: Path) -> None:
    lines = ["address_0=192.1.27.6", "netmask_0=255.255.0.0", "address_10 = 192.9.9.9", "address_1=192.2.27.6"]
    no_hccn.write_text("\n".join(lines))
    alone = parse(called("make", "--server", "10.0.0.1", "--devices", "2").stdout.encode(), "stdout")
    assert [seat.device_ip for seat in alone.seats] == ["192.1.27.6", "192.2.27.6"]
    other = tmp_path / "other.conf"
    other.write_text("address_0=192.1.27.7\naddress_1=192.2.27.7\n")
    words = ["--server", "10.0.0.1", "--server", "10.0.0.2", "--devices", "2", "--hccn", no_hccn, "--hccn", other]
    assert json.loads(called("make", *words).stdout) == table()


def test_make_never_replaces_a_file_without_force(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    out.write_text("mine")
    done = called("make", "--server", "a", "-o", out)
    assert done.exit_code == 1 and f"{out} exists already; --force replaces it" in done.output
    assert out.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    assert called("make", "--server", "a", "-o", out, "--force").exit_code == 0
    assert len(load(str(out)).seats) == 8 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--server", "a", "--server", "a"], "server_list[1].server_id: server_id 'a' occurs twice"),
        (["--server", "a b"], "it is 'a b'; expected an address or a name"),
        (["--server", "a", "--devices", "7-4"], "'7-4': expected 1 to 1024 devices"),
        (["--server", "a", "--devices", "0"], "'0': expected 1 to 1024 devices"),
        (
            ["--server", "a", "--devices", "all"],
            "'all': give the number of devices, such as 8, or a list, such as 4-7 or 0,2",
        ),
        (
            ["--server", "a", "--device-ip", "1.1.1.1"],
            "--device-ip was given 1 times; give it once for each of the 8 devices",
        ),
        (["--server", "a", "--device-ip", "x", "--devices", "1"], "device_ip: it is 'x'; expected the address"),
        (["--server", "a", "--device-ip", "1.1.1.1", "--hccn", "f"], "with either --device-ip or --hccn"),
        (
            ["--server", "a", "--server", "b", "--hccn", "f"],
            "--hccn was given 1 times; give it once for each of the 2 servers",
        ),
        (["--server", "a", "--hccn", "/nowhere"], "/nowhere: No such file or directory"),
        (["--server", "a", "--hccn", "/dev/null"], "/dev/null has no address_0; expected the address of device 0"),
        (["--server", "a", "-o", "/nowhere/table.json"], "/nowhere/table.json: No such file or directory"),
        ([], "Missing option '--server'"),
    ],
)
def test_make_says_what_does_not_fit(words: list[str], text: str) -> None:
    done = called("make", *words)
    assert done.exit_code in (1, 2) and text in done.output


def test_check_shows_the_ranks(path: str) -> None:
    done = called("check", path)
    assert (done.exit_code, done.output.splitlines()) == (
        0,
        [
            f"{path}: version 1.0, 2 server(s), 4 ranks",
            "rank 0: server 10.0.0.1, device 0 192.1.27.6",
            "rank 1: server 10.0.0.1, device 1 192.2.27.6",
            "rank 2: server 10.0.0.2, device 0 192.1.27.7",
            "rank 3: server 10.0.0.2, device 1 192.2.27.7",
        ],
    )


def test_check_shows_a_table_on_a_terminal(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    assert called("check", path).exit_code == 0
    rows = [re.findall(r"[\w.]+", line) for line in console.export_text().splitlines() if "│" in line]
    assert rows[3] == ["3", "10.0.0.2", "1", "192.2.27.7"] and len(rows) == 4


def test_check_tells_all_problems_of_all_files(path: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(changed(lambda t: (t.update(status="initializing"), put(*DEVICE, "rank_id", to="x")(t))))
    done = called("check", bad, path)
    assert done.exit_code == 1
    assert done.output.splitlines()[:3] == [
        f"{bad}: status: it is 'initializing', not 'completed': the table is not ready yet",
        f"{bad}: {AT_DEVICE}.rank_id: it is 'x'; {A_RANK}",
        f"{path}: version 1.0, 2 server(s), 4 ranks",
    ]
    assert f"1 of 2 rank table(s) cannot be used: {bad}" in done.output


def test_what_hccl_refuses_is_a_warning_and_for_a_product_an_error(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.json"
    mixed.write_bytes(changed(drop("server_list", 1, "device", 0, "device_ip")))
    remark = "device_ip: rank 2 has none, but HCCL needs it for several servers; look it up in /etc/hccn.conf"
    done = called("check", mixed)
    assert done.exit_code == 0 and f"{mixed}: WARNING: {remark}" in done.output
    done = called("check", "--product", "910", mixed)
    assert done.exit_code == 1 and f"{mixed}: {remark}" in done.output
    assert f"{mixed}: server_id '10.0.0.1': it has 2 devices; with several Atlas 910" in done.output


def test_ranks_are_those_of_this_host(path: str, tmp_path: Path) -> None:
    assert called("ranks", path, "--server", "10.0.0.2").output == "2 0\n3 1\n"
    done = called("ranks", path)
    assert done.exit_code == 1 and "no server_id is an address or name of this host; say which with --server: 10" in (
        done.output
    )
    done = called("ranks", path, "--server", "10.0.0.2", "--size", "8")
    assert done.exit_code == 1 and f"{path} has 4 devices, not 8; name the table of this job" in done.output
    done = called("ranks", path, "--server", "10.0.0.3")
    assert done.exit_code == 1 and "no server has the server_id 10.0.0.3" in done.output
    own = tmp_path / "own.json"
    own.write_text(make([Server("10.255.255.1", [0, 1]), Server("127.0.0.1", [4, 5])]))
    assert called("ranks", own).output == "2 4\n3 5\n"
    own.write_text(make([Server("elsewhere", [0, 1])]))
    assert called("ranks", own).output == "0 0\n1 1\n"  # with only one server, its name does not matter
    own.write_text(make([Server("127.0.0.1", [0]), Server("::1", [0])]))
    done = called("ranks", own)
    assert done.exit_code == 1 and "several server_ids are addresses of this host, 127.0.0.1, ::1" in done.output

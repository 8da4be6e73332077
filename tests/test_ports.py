"""MSCOMM_PORTS: mscomm's TCP listeners use only ports in this range, unless the user specifies a port."""

from __future__ import annotations

import random
import re
import socket
import subprocess
from pathlib import Path

import pytest
from control import soon
from sessions import mscomm_run

from mscomm import errors
from mscomm.bootstrap import kvs, rendezvous, torchrun
from mscomm.cluster import links
from mscomm.cluster.protection import Protection

# Each rank counts as a separate host, so the ranks are linked by TCP. Each rank prints the ports at which it listens.
BODY = """
import os, socket
rank = os.environ["MSCOMM_RANK"]
os.environ["MSCOMM_HOST_ID"] = rank
listen = socket.socket.listen
def spy(sock, *args):
    listen(sock, *args)
    if sock.family == socket.AF_INET:
        print(sock.getsockname()[1])
socket.socket.listen = spy
import numpy as np, mscomm
mscomm.init()
x = np.ones(3)
assert mscomm.all_reduce(x)[0] == 3
if rank == "0":
    mscomm.send(x, 2)
elif rank == "2":
    mscomm.recv(x, 0)
"""


def job(tmp_path: Path, ports: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(BODY)
    return mscomm_run("-n", 3, script, env={"MSCOMM_PORTS": ports})


def test_ranks_of_several_hosts_listen_at_these_ports_alone(tmp_path: Path, port: int) -> None:
    low = min(port, 65500)
    done = job(tmp_path, f"{low}-{low + 30}")
    assert done.returncode == 0, done.stderr
    ports = [int(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert len(ports) >= 3 and all(low <= one <= low + 30 for one in ports), ports


def test_a_range_that_is_taken_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = job(tmp_path, f"{port}-{port}")
    assert done.returncode == 1
    assert f"MSCOMM_PORTS={port}-{port}: all 1 ports are taken at 127.0.0.1" in done.stderr
    # Ranks with the same error share a line.
    ended = re.findall(r"^\[([\d,-]+)\] \S+: .*ports are taken", done.stderr, flags=re.M)
    assert sorted(",".join(ended).replace("0-2", "0,1,2").split(",")) == ["0", "1", "2"], done.stderr


def test_hubs_that_rank_0_starts_listen_at_these_ports(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    low = min(port, 65500)
    env = {"MSCOMM_PORTS": f"{low}-{low + 30}"}
    allowed = range(low, low + 31)
    monkeypatch.setattr(kvs.interfaces, "host_address", lambda env: "127.0.0.1")
    seat = rendezvous.Seat(0, 2, 0, one_host=False)
    with kvs.Join("mpirun", seat, None, env, soon(), Protection())._listen() as hub:
        assert hub.getsockname()[1] in allowed
    neighbours = [set(rendezvous.ports_instead(port, {})) for port in (29500, 29501)]
    assert all(len(ports) == 8 and min(ports) > 61439 for ports in neighbours)
    assert not neighbours[0] & neighbours[1]  # two jobs of one user
    for ports in (rendezvous.ports_instead(29500, env), rendezvous.meeting_ports("a job", env)):
        assert len(ports) == 8 and set(ports) <= set(allowed)
    assert len(rendezvous.meeting_ports("a job", {"MSCOMM_PORTS": "20000-20001"})) == 2
    assert list(rendezvous.ports_instead(20001, {"MSCOMM_PORTS": "20000-20002"})) == [20000, 20002]
    assert list(rendezvous.ports_instead(20001, {"MSCOMM_PORTS": "20001-20001"})) == [20001]
    torch = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "203.0.113.7", **env}
    meetings: list[rendezvous.Meeting] = []
    monkeypatch.setattr(rendezvous.Meeting, "invitation", lambda self: meetings.append(self))
    torchrun.accept(torch, soon(), Protection())
    torchrun.accept({**torch, "MASTER_PORT": "20001", "MSCOMM_PORTS": "20001-20001"}, soon(), Protection())
    assert set(meetings[0].spot.ports) <= set(allowed)
    assert "one more port" not in meetings[0].advice and meetings[1].advice.endswith("give mscomm one more port")


def test_looking_for_a_port_leaves_the_programs_random_numbers_alone(port: int) -> None:
    low = min(port, 65500)
    before = random.getstate()
    links.listen("127.0.0.1", 1, {"MSCOMM_PORTS": f"{low}-{low + 30}"}).close()
    assert random.getstate() == before  # otherwise ranks with the same seed would draw different numbers from here on


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_published_port_that_does_not_exist_is_no_address(port):
    class Store:
        def ask(self, text: str, deadline: object) -> str:
            return f"mscomm1,tcp,127.0.0.1,{port}"

    with pytest.raises(errors.BackendUnavailable, match="no address"):
        kvs.Join("mpirun", rendezvous.Seat(1, 2, 0, one_host=False), Store(), {}, soon(), Protection()).invitation()

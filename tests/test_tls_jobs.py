"""Jobs that use TLS, under each kind of launcher, between network namespaces."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, Hosts
from rotated import rotated
from sessions import MSCOMM
from test_hosts import finished, mpirun, new_key

from mscomm import _core

PASSWORD = "123456"  # of seed 001
# As the tutorial prints it, with the stray blank in the first name.
CONFIG = """{
  "server_cert_path": "server.p12",
  "crl_path": "",
  "client_cert_path": "client.p12",
  "ca_cert_path": "ca.crt",
  "cipher_list": "ECDHE-R SA-AES128-GCM-SHA256:ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384:\
ECDHE-ECDSA-AES256-GCM-SHA384:DHE-RSA-AES128-GCM-SHA256:DHE-DSS-AES128-GCM-SHA256:DHE-RSA-AES256-GCM-SHA384:\
DHE-DSS-AES256-GCM-SHA384:DHE-PSK-AES128-GCM-SHA256:DHE-PSK-AES256-GCM-SHA384:DHE-PSK-CHACHA20-POLY1305:\
ECDHE-RSA-CHACHA20-POLY1305:ECDHE-PSK-CHACHA20-POLY1305:DHE-RSA-AES128-CCM:DHE-RSA-AES256-CCM:\
DHE-RSA-CHACHA20-POLY1305:DHE-PSK-AES128-CCM:DHE-PSK-AES256-CCM:ECDHE-ECDSA-AES128-CCM:ECDHE-ECDSA-AES256-CCM:\
ECDHE-ECDSA-CHACHA20-POLY1305",
  "cert_expire_warning_time_in_day": 90
}
"""
# What each rank does: collectives, messages and objects between the hosts. All its arrays hold the marker.
MARKER = b"plain array bytes of rank"
BODY = f"""
import sys
import numpy as np
marker = np.frombuffer({MARKER!r} * 4000, np.uint8)
rank, size = mscomm.get_rank(), mscomm.get_group_size()
for _ in range(3):
    assert (mscomm.all_gather(marker).reshape(size, -1) == marker).all()
    assert (mscomm.all_reduce(marker, op="max") == marker).all()
assert (mscomm.sendrecv(marker, (rank + 1) % size, np.empty_like(marker), (rank - 1) % size) == marker).all()
assert mscomm.all_gather_object({{rank: {MARKER!r} * 50}}) == [{{r: {MARKER!r} * 50}} for r in range(size)]
mscomm.release()
sys.stdout.write(f"rank {{rank}} of {{size}}\\n")  # torchrun's ranks share a pipe without buffers: in one write
"""


class Capture:
    """Records every byte that the first host sends or receives."""

    def __init__(self, hosts: Hosts) -> None:
        words = ["ip", "netns", "exec", hosts._switch, sys.executable, "-c", SNIFFER]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._bytes = bytearray()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout
        while piece := self._process.stdout.read1(1 << 16):
            self._bytes += piece

    def stop(self) -> bytes:
        assert self._process.stdin
        self._process.stdin.close()
        self._thread.join(60)
        self._process.wait(60)
        assert self._process.stdout
        self._process.stdout.close()
        return bytes(self._bytes)


SNIFFER = """
import select, socket, sys
sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
SO_RCVBUFFORCE = 33  # not limited by net.core.rmem_max; a small buffer loses packets on a busy machine
sniffer.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
sniffer.bind(("port0-0", 0))
sys.stdout.buffer.write(b"ready")
sys.stdout.flush()
while not select.select([sys.stdin], [], [], 0)[0]:
    if select.select([sniffer, sys.stdin], [], [])[0] == [sys.stdin]:
        break
    sys.stdout.buffer.write(sniffer.recv(1 << 17))
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(2, tmp_path) as hosts:
        yield hosts


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    """Make certificates with `mscomm certs make`, and replace its config.json by the tutorial's."""
    password = tmp_path / "password"
    password.touch(0o600)
    password.write_text(PASSWORD)
    folder = tmp_path / "certs"
    subprocess.run(
        [*MSCOMM, "certs", "make", "--dir", folder, "--password-file", password], check=True, capture_output=True
    )
    (folder / "config.json").write_text(CONFIG)
    return folder


def by_environment(certs: Path) -> dict[str, str]:
    return {
        "MSCOMM_SSL_CONFIG_FILE": str(certs / "config.json"),
        "MSCOMM_SSL_SERVER_PASSWORD": PASSWORD,
        "MSCOMM_SSL_CLIENT_PASSWORD": PASSWORD,
    }


def test_seed_001_with_its_config_runs_and_nothing_of_it_is_readable(two: Hosts, certs: Path) -> None:
    """The commands of the tutorial: a scheduler and workers, with set_ps_context in the script and no key file."""
    script = f"""
import mscomm
mscomm.set_context(mode=mscomm.GRAPH_MODE)
mscomm.set_ps_context(config_file_path={str(certs / "config.json")!r}, enable_ssl=True,
                      client_password={PASSWORD!r}, server_password={PASSWORD!r})
mscomm.init("gloo")
{BODY}"""
    env = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": two[0].address, "MS_SCHED_PORT": "8118"}
    capture = Capture(two)

    def start(host: Host, role: str, **more: str) -> subprocess.Popen[str]:
        return host.start([sys.executable, "-c", script], {**env, "MS_ROLE": role, **more})

    scheduler = start(two[0], "MS_SCHED")
    workers = [start(two[i % 2], "MS_WORKER", MS_NODE_ID=str(i)) for i in range(4)]
    for number, worker in enumerate(workers):
        code, out, err = finished(worker)
        assert (code, out) == (0, f"rank {number} of 4\n"), err
    code, out, err = finished(scheduler)
    assert code == 0 and "all 4 workers have left" in out, err
    seen = capture.stop()
    assert len(seen) > 1_000_000
    assert MARKER not in seen and PASSWORD.encode() not in seen


@pytest.mark.parametrize("plain", rotated(["scheduler", "worker", ""], few=1, always=[""]))
def test_a_job_with_a_key_is_encrypted_unless_somebody_wants_plain_links(
    two: Hosts, tmp_path: Path, plain: str
) -> None:
    env = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": two[0].address, "MS_SCHED_PORT": "8118"}
    env["MSCOMM_JOB_KEY_FILE"] = new_key(tmp_path / "job.key")
    capture = Capture(two)
    wants = {"scheduler": "'MS_SCHED'", "worker": "'MS_WORKER'"}.get(plain, "''")
    code = f"""
import os, mscomm
if os.environ["MS_ROLE"] == {wants}:
    mscomm.set_ps_context(enable_ssl=False)
mscomm.init()
{BODY}"""
    script = [sys.executable, "-c", code]
    scheduler = two[0].start(script, {**env, "MS_ROLE": "MS_SCHED"})
    told = ""
    for worker in [host.start(script, {**env, "MS_ROLE": "MS_WORKER"}) for host in two]:
        code, _, err = finished(worker)
        assert code == 0, err
        told += err
    code, out, _ = finished(scheduler)
    seen = capture.stop()
    assert code == 0
    assert (MARKER in seen) == bool(plain)
    assert told.count("WARN the links between hosts are not encrypted") == bool(plain)
    assert ("links between hosts are not encrypted" in out) == bool(plain)
    assert Path(env["MSCOMM_JOB_KEY_FILE"]).read_bytes() not in seen


@pytest.mark.parametrize("lacking", rotated(["one rank", "every process"], few=1))
def test_a_process_that_cannot_encrypt_ends_the_start_on_every_rank(two: Hosts, tmp_path: Path, lacking: str) -> None:
    """The trouble is that of a container image without OpenSSL. Rank 0 starts the hub."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": two[0].address, "MASTER_PORT": "8118"}
    env["MSCOMM_JOB_KEY_FILE"] = new_key(tmp_path / "job.key")
    script = [sys.executable, "-c", "import mscomm; mscomm.init(); print('joined')"]
    hidden = ["unshare", "-m", "bash", "-c", f'mount --bind /dev/null {_openssl()}; exec "$@"', "bash"]
    ranks = []
    for rank, host in enumerate(two):
        lacks = hidden if rank == 1 or lacking == "every process" else []
        ranks.append(host.start([*lacks, *script], {**env, "RANK": str(rank)}))
    for code, out, err in map(finished, ranks):
        assert code == 1 and not out, err
        assert "the links between hosts must be encrypted, but " in err and "rank 1 (pid " in err, err
        assert ("rank 0 (pid" in err) == (lacking == "every process"), err
        assert "Install OpenSSL 3" in err and "mscomm.set_ps_context(enable_ssl=False)" in err, err


def _openssl() -> str:
    """Return the path of the OpenSSL library that this process uses."""
    _core.tls_version()
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if "libssl.so.3" in line)


def test_mscomm_run_on_two_nodes(two: Hosts, certs: Path) -> None:
    words = [*MSCOMM, "run", "-n", "1", "--nnodes", "2", "--master-addr", two[0].address, "--node-rank"]
    script = ["-c", f"import mscomm\nmscomm.init()\n{BODY}"]
    program = certs / "job.py"
    program.write_text(script[1])
    nodes = [host.start([*words, str(i), program], by_environment(certs)) for i, host in enumerate(two)]
    lines = []
    for node in nodes:
        code, out, err = finished(node)
        assert code == 0, err
        lines += [re.sub(r"^\[\d\] ", "", line) for line in out.splitlines()]
    assert sorted(lines) == ["rank 0 of 2", "rank 1 of 2"]


def test_mpirun_on_two_hosts(two: Hosts, certs: Path) -> None:
    """Rank 0 starts the hub, and passes it the password of the server's key through a pipe."""
    variables = by_environment(certs)
    passed = [word for name in variables for word in ("-x", name)]
    where = f"{two[0].address}:2,{two[1].address}:2"
    script = ["-c", f"import mscomm\nmscomm.init()\n{BODY}"]
    done = mpirun(two, "-H", where, *passed, sys.executable, *script, **variables)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4" for rank in range(4)]


def test_a_wrong_password_is_named_before_anything_starts(two: Hosts, certs: Path) -> None:
    env = {"MS_WORKER_NUM": "1", "MS_SCHED_HOST": two[0].address, "MS_SCHED_PORT": "8118", "MS_ROLE": "MS_SCHED"}
    env |= by_environment(certs) | {"MSCOMM_SSL_SERVER_PASSWORD": "wrong-password"}
    code, _, err = finished(two[0].start([*MSCOMM, "sched"], env))
    assert code == 1
    assert re.search(r"server\.p12: .*the server password is wrong or missing", err), err
    assert "wrong-password" not in err

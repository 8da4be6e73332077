"""Attacks on a job: nobody who does not belong to it gets in, no honest rank fails, and each refusal is one clear line.

The job has a scheduler and two workers, on loopback, or on two hosts with the attacker on a third. Each attack happens
twice: while the job waits for its second worker, and while it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from certificates import CLIENT, PASSWORD, SERVER, Authority, write_config, write_pem
from control import VERSION, eventually, soon
from hosts import Host, Hosts

from mscomm import errors, packing, train
from mscomm.cluster import links, security
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import CONTROL, DATA, LAUNCHER, WIRE, Hello, Identity, named
from mscomm.cluster.tls import TlsStream
from mscomm.errors import on_failure

PORT = 8117
_CLONE_NEWNET = 0x40000000

# The workers calculate until the file exists, and check each sum.
WORKER = """
import sys
from pathlib import Path
import numpy as np
import mscomm
mscomm.init()
steps, over = 0, False
while not over:
    total = mscomm.all_reduce(np.full(20000, mscomm.get_rank() + 1.0))
    assert (total == 3).all(), total
    over = bool(mscomm.all_reduce(np.float64([Path(sys.argv[1]).exists()]))[0])
    steps += 1
print("steps", steps, flush=True)
"""


class Certificates:
    """The certificates of a job, and some that must be refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.revoked = self.authority.issue("revoked", CLIENT)
        self.authority.revoke(folder / "crl.pem", self.revoked[1])
        self.config = write_config(folder, self.authority, crl_path="crl.pem")
        for side in ("server", "client"):
            file = folder / f"{side}.password"
            file.touch(0o600)
            file.write_text(PASSWORD)

    def variables(self) -> dict[str, str]:
        files = {side: str(self.folder / f"{side}.password") for side in ("server", "client")}
        return {
            "MSCOMM_SSL_CONFIG_FILE": self.config,
            "MSCOMM_SSL_SERVER_PASSWORD_FILE": files["server"],
            "MSCOMM_SSL_CLIENT_PASSWORD_FILE": files["client"],
        }

    def context(self, kind: str) -> ssl.SSLContext:
        """Return the attacker's context: it trusts the CA of the job, and has a certificate of this kind."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        self.authority.write(self.folder / "ca.pem")
        context.load_verify_locations(self.folder / "ca.pem")
        certificates = {
            "wrong CA": lambda: Authority().issue("client", CLIENT),
            "self-signed": lambda: (lambda ca: (ca.key, ca.certificate))(Authority("myself")),
            "expired": lambda: self.authority.issue("client", CLIENT, days=(-20, -10)),
            "not yet valid": lambda: self.authority.issue("client", CLIENT, days=(10, 20)),
            "revoked": lambda: self.revoked,
            "wrong role": lambda: self.authority.issue("client", SERVER),
            "wrong job": lambda: self.authority.issue("client", CLIENT, uri="mscomm://another/worker"),
            "old protocol": lambda: self.authority.issue("client", CLIENT),
        }
        if kind in certificates:
            context.load_cert_chain(write_pem(self.folder / "attacker.pem", *certificates[kind](), password=""))
        if kind == "old protocol":
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        return context


class Victim:
    """A job that is attacked, and the attacker. They are on this host or on three hosts, of which the attacker has the
    last. tls: the certificates of the job, if it uses TLS.
    """

    worker = WORKER

    def __init__(self, folder: Path, hosts: Hosts | None, port: int, tls: Certificates | None = None) -> None:
        self.hosts = hosts
        self.tls = tls
        self.over = folder / "over"
        self.key = os.urandom(32)
        file = folder / "job.key"
        file.touch(0o600)
        file.write_bytes(self.key)
        self.address = (hosts[0].address if hosts else "127.0.0.1", port)
        self.env = {
            "MS_SCHED_HOST": self.address[0],
            "MS_SCHED_PORT": str(port),
            "MS_WORKER_NUM": "2",
            "MSCOMM_JOB_KEY_FILE": str(file),
            "OMP_NUM_THREADS": "1",
            **(tls.variables() if tls else {}),
        }
        self.log: list[str] = []
        self.reads = threading.Event()  # while this is set, somebody reads the scheduler's log
        self.reads.set()
        self.workers: list[subprocess.Popen[str]] = []

    def start(self, host: int, words: list[str], **env: str) -> subprocess.Popen[str]:
        if self.hosts:
            return self.hosts[host].start([sys.executable, *words], {**self.env, **env})
        return subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.env, **env, "MSCOMM_HOST_ID": f"host-{host}"},
        )

    def __enter__(self) -> Victim:
        self.scheduler = self.start(0, ["-m", "mscomm", "sched"])
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.logged("waiting at")
        self.work()
        self.logged("joined, 1 of 2")
        return self

    def _read(self) -> None:
        assert self.scheduler.stdout
        while line := self.scheduler.stdout.readline():
            self.log.append(line)
            self.reads.wait()

    def work(self) -> None:
        """Start one more worker."""
        number = len(self.workers)
        script = ["-c", self.worker, str(self.over)]
        self.workers.append(self.start(number, script, MS_ROLE="MS_WORKER", MS_NODE_ID=str(number)))

    def logged(self, text: str) -> list[str]:
        """Wait until the scheduler has printed a line that matches. Return all such lines."""
        try:
            eventually(lambda: any(re.search(text, line) for line in list(self.log)), 20)
        except AssertionError:
            pytest.fail(f"the scheduler has not printed {text!r}: {''.join(self.log)}")
        return [line for line in self.log if re.search(text, line)]

    def finish(self) -> None:
        """Let the workers end. No honest process may have failed."""
        self.over.touch()
        for worker in self.workers:
            out, err = worker.communicate(timeout=60)
            assert worker.returncode == 0, err + "".join(self.log)
            assert int(out.split()[1]) >= 1
        assert self.scheduler.wait(30) == 0, self.log
        self._reader.join(10)
        assert "the job ended well" in self.log[-1]

    def __exit__(self, *_: object) -> None:
        self.reads.set()
        for process in (self.scheduler, *self.workers):
            process.kill()
        self._reader.join(10)  # before communicate(), which would read from the same pipe
        for process in (self.scheduler, *self.workers):
            process.communicate()


@pytest.fixture(params=["loopback", "namespaces"])
def place(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> Iterator[tuple[Path, Hosts | None, int]]:
    """Yield the first arguments of Victim()."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3, tmp_path)) if request.param == "namespaces" else None
        yield tmp_path, hosts, PORT if hosts else port


@pytest.fixture
def victim(place: tuple[Path, Hosts | None, int]) -> Iterator[Victim]:
    with Victim(*place) as victim:
        yield victim


@pytest.fixture
def tls_victim(place: tuple[Path, Hosts | None, int]) -> Iterator[Victim]:
    with Victim(*place, Certificates(place[0])) as victim:
        yield victim


def from_host(host: Host | None, attack: Callable[[], None]) -> None:
    """Call the function in a thread whose sockets are on the host."""

    def enter() -> None:
        if host:
            libc = ctypes.CDLL(None, use_errno=True)
            with open(f"/run/netns/{host.space}") as space:
                assert libc.setns(space.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        attack()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(enter).result()


def attacked(victim: Victim, attack: Callable[[], None], refusal: str) -> None:
    """Attack the job twice, let it end, and check that it says once why the attacker was refused."""
    attacker = victim.hosts[2] if victim.hosts else None
    from_host(attacker, attack)
    lines = victim.logged(refusal)
    victim.work()
    victim.logged("all 2 workers are ready")
    from_host(attacker, attack)
    victim.finish()
    assert len(lines) == 1, victim.log  # later refusals of this kind are counted, and told in one line
    assert sum("of this kind since the last line" in line for line in victim.log) <= 2


def dial(victim: Victim) -> socket.socket:
    return socket.create_connection(victim.address, timeout=20)


def greet(victim: Victim, purpose: int = CONTROL, key: bytes = b"", **change: object) -> ByteStream:
    """Run a hello with the real admission key, or with another key."""
    identity = Identity(version=VERSION)._replace(**change)
    sock = dial(victim)
    with on_failure(sock.close):
        return links.greet(sock, key or security.admission_key(victim.key, purpose), purpose, identity, soon())


def said(stream: ByteStream) -> list[dict[str, object]]:
    """Return the frames that the scheduler sends until it ends the link."""
    frames, found = Frames(stream), []
    with contextlib.suppress(ConnectionError):
        while (frame := frames.receive(soon())) is not None:
            found.append(frame)
    stream.close()
    return found


# -- hellos


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        pytest.param({"key": os.urandom(32)}, "could not prove that it knows the key of this job", id="no key"),
        pytest.param({"job": named("B")}, "refused a connection: it serves another job", id="wrong job"),
        pytest.param({"purpose": LAUNCHER}, "could not prove that it knows the key", id="wrong role"),
        pytest.param({"purpose": DATA}, "a connection for purpose 3 came where only purpose", id="no such role"),
        pytest.param({"run": os.urandom(16)}, "belongs to another start of the job", id="earlier start"),
        pytest.param({"epoch": 7}, "epoch 7 is not the current one", id="old epoch"),
        pytest.param({"to": 1}, "the link is for rank 1 of another group", id="wrong rank"),
        pytest.param({"version": "0.0.1"}, "another version of mscomm than 0.0.1", id="other version"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(victim: Victim, change: dict[str, object], refusal: str) -> None:
    change = {"key": security.admission_key(victim.key, CONTROL), **change}

    def attack() -> None:
        with pytest.raises(errors.Error):
            greet(victim, **change)

    attacked(victim, attack, refusal)


def test_a_replayed_hello_is_refused(victim: Victim) -> None:
    """The attacker has recorded what an honest worker sent."""

    def attack() -> None:
        admission = security.admission_key(victim.key, CONTROL)
        hello = Hello.connector(admission, CONTROL, Identity(version=VERSION))
        with dial(victim) as honest:
            first = hello.feed(b"")
            honest.sendall(first)
            third = hello.feed(honest.recv(72, socket.MSG_WAITALL))
            honest.sendall(third)
            assert honest.recv(1) == b"\0"  # the verdict: welcome
        with dial(victim) as replay:
            replay.sendall(first)
            assert len(replay.recv(72, socket.MSG_WAITALL)) == 72
            replay.sendall(third)
            assert replay.recv(100) == bytes([8]) + bytes(39)  # the verdict: another key

    attacked(victim, attack, "could not prove that it knows the key of this job")


def test_a_hello_of_an_older_version_is_refused(victim: Victim) -> None:
    """A downgrade: the attacker hopes that the scheduler falls back to what version 1 checked."""

    def attack() -> None:
        with dial(victim) as sock:
            sock.sendall(b"MSCM\1\0\1\0" + os.urandom(32))
            assert sock.recv(8) == b"MSCM" + bytes([WIRE, 0, 1, 0])
            assert len(sock.recv(100)) == 64 and sock.recv(1) == b""

    attacked(victim, attack, f"a connection speaks wire version 1, this mscomm speaks {WIRE}")


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), id="tls to a plain port"),
        pytest.param(os.urandom(100_000), id="random"),
    ],
)
def test_garbage_is_refused(victim: Victim, garbage: bytes) -> None:
    def attack() -> None:
        with dial(victim) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(garbage)
            assert sock.recv(1) == b""

    attacked(victim, attack, "which does not begin a hello")


def test_half_open_and_slow_connections_are_dropped(victim: Victim) -> None:
    def attack() -> None:
        with dial(victim) as silent, dial(victim) as slow:
            began = time.monotonic()
            with contextlib.suppress(ConnectionError):
                for byte in b"MSCM\2\0\1\0" + bytes(40):
                    slow.send(bytes([byte]))
                    time.sleep(0.25)
            with contextlib.suppress(ConnectionError):
                assert silent.recv(1) == b""
            assert 4 < time.monotonic() - began < 60

    attacked(victim, attack, "did not finish its hello in time")


# -- with the admission key


def test_an_extra_worker_and_a_stolen_node_id_are_refused(victim: Victim) -> None:
    def join(node_id: str) -> list[dict[str, object]]:
        stream = greet(victim)
        Frames(stream).send({"t": "join", "rank": None, "node_id": node_id, "facts": {}}, soon())
        return said(stream)

    attacker = victim.hosts[2] if victim.hosts else None

    def steal() -> None:
        assert "0" in str(join("0")[0]["why"])

    from_host(attacker, steal)
    assert len(victim.logged("refused .*MS_NODE_ID")) == 1
    victim.work()
    victim.logged("all 2 workers are ready")

    def intrude() -> None:
        assert "already has its 2 workers" in str(join("7")[0]["why"])

    from_host(attacker, intrude)
    victim.finish()


@pytest.mark.parametrize(
    ("frame", "refusal"),
    [
        pytest.param(b"\xff\xff\xff\xff" + bytes(1000), "4294967295 bytes", id="length"),
        pytest.param(b"\x05\0\0\0\xdd\xff\xff\xff\xff", "4294967295 exceeds max_array_len", id="a list of 2^32"),
        pytest.param(b"\x03\0\0\0\x81\xa1t", "incomplete input", id="cut off"),
    ],
)
def test_oversized_lengths_end_only_that_link(victim: Victim, frame: bytes, refusal: str) -> None:
    def attack() -> None:
        stream = greet(victim)
        stream.send_all(frame, soon())
        assert all(answer["t"] == "refused" for answer in said(stream))

    attacker = victim.hosts[2] if victim.hosts else None
    from_host(attacker, attack)
    victim.work()
    victim.logged("all 2 workers are ready")
    from_host(attacker, attack)
    victim.finish()
    lines = victim.logged(f"a process that had not joined sent invalid data on its control link .*({refusal})")
    assert len(lines) == 2  # one for each attack


def test_a_hello_that_is_closed_at_once_costs_nothing(victim: Victim) -> None:
    attacker = victim.hosts[2] if victim.hosts else None

    def attack() -> None:
        for rank in (-1, 0, 1):
            greet(victim, rank=rank).close()

    from_host(attacker, attack)
    victim.work()
    from_host(attacker, attack)
    victim.finish()


# -- floods


def test_a_flood_of_silent_connections_does_not_stop_the_start(victim: Victim) -> None:
    """A thousand connections a second, from before the second worker starts until after it has joined."""
    over = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                held.append(dial(victim))
            if len(held) > 300:
                held.pop(0).close()
            time.sleep(0.001)
        for sock in held:
            sock.close()

    flooding = threading.Thread(target=from_host, args=(victim.hosts[2] if victim.hosts else None, flood))
    flooding.start()
    try:
        victim.logged("more than 64 connections are in their hello")
        victim.work()
        victim.logged("all 2 workers are ready")
    finally:
        over.set()
        flooding.join()
    victim.finish()
    assert sum("more than 64 connections" in line for line in victim.log) < 10


def test_a_port_scan_is_not_noticed_by_the_ranks(victim: Victim) -> None:
    def scan() -> None:
        host, port = victim.address
        for number in [*range(port - 50, port + 50), *[port] * 100]:
            with contextlib.suppress(OSError), socket.create_connection((host, number), 5):
                pass

    attacked(victim, scan, "it closed during the hello")


def test_a_scheduler_with_64_descriptors_survives_a_flood(victim: Victim) -> None:
    resource.prlimit(victim.scheduler.pid, resource.RLIMIT_NOFILE, (64, 64))
    attacker = victim.hosts[2] if victim.hosts else None

    def flood() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                with contextlib.suppress(ConnectionError):  # the scheduler has dropped it already
                    stack.enter_context(dial(victim))
            victim.work()
            victim.logged("joined, 2 of 2")

    from_host(attacker, flood)
    victim.logged("cannot accept a connection: .*Too many open files")
    victim.finish()


# Another local user fills the backlogs of the job's unix sockets, which have no file that could protect them.
FLOOD = """
import os, socket, sys, time
os.setuid(65534)
print("flooding", flush=True)
held = []
while True:
    with open("/proc/net/unix") as table:
        names = {line.split()[-1] for line in table if "@mscomm-" in line}
    for name in names:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(chr(0) + name[1:])
            held.append(sock)
        except OSError:
            sock.close()
    del held[:-2000]
    time.sleep(0.001)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_who_fills_the_backlog_of_unix_sockets_stops_nobody(tmp_path: Path, port: int) -> None:
    over = tmp_path / "over"
    torch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env = {**os.environ, **torch, "TORCHELASTIC_RUN_ID": tmp_path.name, "OMP_NUM_THREADS": "1"}

    def start(rank: int) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", WORKER, str(over)]
        mine = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.Popen(words, env=mine, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with subprocess.Popen([sys.executable, "-c", FLOOD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as flood:
        try:
            assert flood.stdout and flood.stdout.readline() == b"flooding\n"
            ranks = [start(0)]
            time.sleep(1)
            ranks.append(start(1))
            over.touch()
            for rank in ranks:
                out, err = rank.communicate(timeout=60)
                assert rank.returncode == 0 and out.startswith("steps"), err
            assert flood.poll() is None
        finally:
            flood.kill()


def test_a_scheduler_whose_log_nobody_reads_goes_on(victim: Victim) -> None:
    """Its pipe is full, and extra workers make it log more."""
    assert victim.scheduler.stdout
    fcntl.fcntl(victim.scheduler.stdout, fcntl.F_SETPIPE_SZ, 4096)
    victim.reads.clear()

    def fill() -> None:
        for number in range(100):
            stream = greet(victim)
            Frames(stream).send({"t": "join", "rank": None, "node_id": "0", "facts": {}}, soon())
            assert "0" in str(said(stream)[0]["why"]), number

    from_host(victim.hosts[2] if victim.hosts else None, fill)
    victim.work()
    victim.over.touch()
    for worker in victim.workers:
        assert worker.wait(60) == 0, worker.communicate()
    assert victim.scheduler.wait(30) == 0
    victim.reads.set()


# -- what a rank reads


def test_a_poisoned_checkpoint_is_an_error(tmp_path: Path) -> None:
    train.save_checkpoint({"w": np.zeros((3, 4), np.float32)}, tmp_path / "good.ckpt")
    good = (tmp_path / "good.ckpt").read_bytes()
    poisoned = tmp_path / "poisoned.ckpt"
    for place in range(0, len(good), 3):
        for byte in (0, 0x7F, 0xFF):
            poisoned.write_bytes(good[:place] + bytes([byte]) + good[place + 1 :])
            with contextlib.suppress(errors.Error, ValueError):
                weights = train.load_checkpoint(poisoned)
                assert all(isinstance(array, np.ndarray) for array in weights.values())


def test_a_poisoned_object_is_an_error() -> None:
    good = packing.pack({"a": [1, 2.5, "x", np.arange(4), {3, 4}], ("k",): None})
    for place in range(len(good)):
        for byte in (0, 0x7F, 0x91, 0xC7, 0xDD, 0xFF):
            with contextlib.suppress(errors.Error, ValueError, TypeError):
                packing.unpack(good[:place] + bytes([byte]) + good[place + 1 :])


# -- TLS. The attacker has the job key in each of these tests.


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [
        ("none", "the other end has sent no certificate"),
        ("wrong CA", "the other end's certificate has a wrong signature"),
        ("self-signed", "the other end's certificate is not signed by the CA in ca_cert_path"),
        ("expired", "the other end's certificate has expired"),
        ("not yet valid", "the other end's certificate is not valid yet"),
        ("revoked", "the other end's certificate is revoked"),
        ("wrong role", "the other end's certificate is not for its role"),
        ("wrong job", "the other end's certificate is for mscomm://another/worker"),
        ("old protocol", "no cipher suite or TLS version in common"),
    ],
)
def test_a_certificate_that_does_not_fit_is_refused(tls_victim: Victim, kind: str, refusal: str) -> None:
    assert tls_victim.tls
    context = tls_victim.tls.context(kind)

    def attack() -> None:
        stream = TlsStream(dial(tls_victim), context, server_side=False)
        hello = Hello.connector(security.admission_key(tls_victim.key, CONTROL), CONTROL, Identity(version=VERSION))
        with contextlib.closing(stream), pytest.raises((OSError, errors.Error)):
            stream.send_all(hello.feed(b""), soon())
            while True:
                stream.await_bytes(soon())
                received = stream.receive(hello.needs)
                if received == b"":
                    raise ConnectionResetError
                stream.send_all(hello.feed(received or b""), soon())
                assert not hello.done or kind == "wrong job"  # which is checked last
                if hello.done:
                    stream.await_bytes(soon())
                    assert stream.receive(1) == b""
                    raise ConnectionResetError

    attacked(tls_victim, attack, refusal)


def test_plain_bytes_to_a_tls_port_are_refused(tls_victim: Victim) -> None:
    def attack() -> None:
        with pytest.raises(errors.Error, match=r"it expects TLS; call set_ps_context\(enable_ssl=True"):
            greet(tls_victim)

    attacked(tls_victim, attack, "the other end sent bytes that are not TLS")


def test_a_worker_with_tls_says_that_the_scheduler_may_not_use_it(victim: Victim) -> None:
    certificates = Certificates(victim.over.parent)
    env = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "7", **certificates.variables()}
    worker = victim.start(1, ["-c", WORKER, str(victim.over)], **env)
    assert "This process uses TLS (MSCOMM_SSL_CONFIG_FILE); does the other one?" in worker.communicate(timeout=60)[1]
    assert worker.returncode == 1
    victim.work()
    victim.finish()


# The worker with rank 1 reaches the other worker through a relay, which changes one byte of the data.
RELAYED = (
    """
import os, socket, threading
from mscomm.cluster import links

def relay(source, sink, changes):
    count = 0
    while piece := source.recv(1 << 16):
        if changes and count <= 100_000 < count + len(piece):
            at = 100_000 - count
            piece = piece[:at] + bytes([piece[at] ^ 0x40]) + piece[at + 1:]
        count += len(piece)
        sink.sendall(piece)
    sink.shutdown(socket.SHUT_WR)

def connect(address, deadline, **options):
    if not isinstance(address, tuple) or address[1] == int(os.environ["MS_SCHED_PORT"]):
        return plain(address, deadline, **options)
    target = plain(address, deadline, **options)
    target.setblocking(True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = plain(listener.getsockname(), deadline)
        theirs, _ = listener.accept()
    for source, sink, changes in ((theirs, target, True), (target, theirs, False)):
        threading.Thread(target=relay, args=(source, sink, changes), daemon=True).start()
    return ours

plain, links.connect = links.connect, connect
"""
    + WORKER
)


@pytest.mark.parametrize("certified", [False, True])
def test_a_relay_that_alters_a_payload_is_noticed_with_tls(
    place: tuple[Path, Hosts | None, int], certified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On loopback, a job without certificates has no TLS: only the assertion in the script notices the wrong sum."""
    monkeypatch.setattr(Victim, "worker", RELAYED)
    tls = certified or place[1] is not None
    with Victim(*place, Certificates(place[0]) if certified else None) as victim:
        victim.work()
        texts = [worker.communicate(timeout=60)[1] for worker in victim.workers]
        assert all(worker.returncode for worker in victim.workers)
        assert any("AssertionError" in text for text in texts) != tls
        if tls:
            assert all("TLS: cannot decrypt" in text for text in texts), texts

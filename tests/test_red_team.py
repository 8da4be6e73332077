"""Attacks on a job: nobody who does not belong to it gets in, no honest rank fails, and each refusal is one clear line.

The job has a scheduler and two workers, on loopback, or on two hosts with the attacker on a third. Each attack happens
twice: while the job waits for its second worker, and while it runs. All attacks of a test are on one job.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from certificates import CLIENT, PASSWORD, SERVER, Authority, write_config, write_pem
from control import VERSION, eventually, soon
from hosts import Host, Hosts
from rotated import rotated

from mscomm import errors, packing, train
from mscomm.cluster import links, security
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.frames import Frames
from mscomm.cluster.hello import CONTROL, DATA, LAUNCHER, WIRE, Hello, Identity, named
from mscomm.cluster.tls import TlsStream
from mscomm.errors import on_failure

PORT = 8117
_CLONE_NEWNET = 0x40000000

# A scheduler that logs each refusal at once, and not only the first of its kind within 10 s, so that a test can see the
# refusal of each attack. It waits for a hello only this long.
HELLO_S = 2.0
SCHEDULER = f"""
from mscomm.cli import main
from mscomm.cluster import links
links._COMPLAIN_EVERY_S, links.HELLO_S = 0.0, {HELLO_S}
main(["sched"])
"""

# The workers calculate until the file exists, and check each sum.
WORKER = """
import sys, time
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
    time.sleep(0.001)  # leave some CPU time to the attacker
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

    scheduled = ("-m", "mscomm", "sched")
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
        self.scheduler = self.start(0, list(self.scheduled))
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

    def lines(self, text: str) -> list[str]:
        """Return the lines that the scheduler has printed and that match."""
        return [line for line in list(self.log) if re.search(text, line)]

    def logged(self, text: str, count: int = 1) -> None:
        """Wait until the scheduler has printed this many lines that match."""
        try:
            eventually(lambda: len(self.lines(text)) >= count)
        except AssertionError:
            pytest.fail(f"the scheduler has not printed {text!r} {count} times: {''.join(self.log)}")

    def finish(self) -> None:
        """Let the workers end. No honest process may have failed."""
        self.over.touch()
        for worker in self.workers:
            out, err = worker.communicate(timeout=60)
            assert worker.returncode == 0, err + "".join(self.log)
            assert int(out.split()[1]) >= 1
        assert self.scheduler.wait(60) == 0, self.log
        self._reader.join(60)
        assert "the job ended well" in self.log[-1]

    def __exit__(self, *_: object) -> None:
        self.reads.set()
        for process in (self.scheduler, *self.workers):
            process.kill()
        self._reader.join(60)  # before communicate(), which would read from the same pipe
        for process in (self.scheduler, *self.workers):
            process.communicate()


PLACES = ["loopback", "namespaces"]
# Only root can make namespaces, so for other users, the one place is always loopback.
one_place = pytest.mark.parametrize(
    "place", rotated(PLACES, few=1) if os.getuid() == 0 else rotated(PLACES, 0, PLACES[:1]), indirect=True
)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> Iterator[tuple[Path, Hosts | None, int]]:
    """Yield the first arguments of Victim()."""
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(3, tmp_path)) if request.param == "namespaces" else None
        yield tmp_path, hosts, PORT if hosts else port


class TellingVictim(Victim):
    """Its scheduler logs each refusal."""

    scheduled = ("-c", SCHEDULER)


@pytest.fixture
def victim(place: tuple[Path, Hosts | None, int]) -> Iterator[Victim]:
    with Victim(*place) as victim:
        yield victim


@pytest.fixture
def telling_victim(place: tuple[Path, Hosts | None, int]) -> Iterator[Victim]:
    with TellingVictim(*place) as victim:
        yield victim


@pytest.fixture
def tls_victim(place: tuple[Path, Hosts | None, int]) -> Iterator[Victim]:
    with TellingVictim(*place, Certificates(place[0])) as victim:
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


def attacked(victim: Victim, attacks: Mapping[str, tuple[Callable[[], None], list[str]]]) -> None:
    """Make each attack twice, and let the job end. For each connection of an attack, the scheduler must print one line,
    which says why the connection was refused.
    """
    attacker = victim.hosts[2] if victim.hosts else None
    expected: Counter[str] = Counter()

    def make_all() -> None:
        for name, (attack, refusals) in attacks.items():
            print("attack:", name)
            from_host(attacker, attack)
            expected.update(refusals)
            for refusal in refusals:
                victim.logged(refusal, expected[refusal])

    make_all()
    victim.work()
    victim.logged("all 2 workers are ready")
    make_all()
    victim.finish()
    assert {refusal: len(victim.lines(refusal)) for refusal in expected} == expected


def dial(victim: Victim) -> socket.socket:
    return socket.create_connection(victim.address, timeout=60)


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


WRONG_HELLOS: dict[str, tuple[dict[str, object], str]] = {
    "no key": ({"key": os.urandom(32)}, "could not prove that it knows the key of this job"),
    "wrong job": ({"job": named("B")}, "refused a connection: it serves another job"),
    "wrong role": ({"purpose": LAUNCHER}, "could not prove that it knows the key of this job"),
    "no such role": ({"purpose": DATA}, "a connection for purpose 3 came where only purpose"),
    "earlier start": ({"run": os.urandom(16)}, "belongs to another start of the job"),
    "old epoch": ({"epoch": 7}, "epoch 7 is not the current one"),
    "wrong rank": ({"to": 1}, "the link is for rank 1 of another group"),
    "other version": ({"version": "0.0.1"}, "another version of mscomm than 0.0.1"),
}
GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "tls to a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "random": b"\xff" + os.urandom(100_000),
}


def test_a_hello_that_does_not_fit_is_refused(telling_victim: Victim) -> None:
    victim = telling_victim
    admission = security.admission_key(victim.key, CONTROL)

    def misfit(change: dict[str, object]) -> None:
        with pytest.raises(errors.Error):
            greet(victim, **{"key": admission, **change})

    def replay() -> None:
        """The attacker has recorded what an honest worker sent."""
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

    def downgrade() -> None:
        """The attacker hopes that the scheduler falls back to what version 1 checked."""
        with dial(victim) as sock:
            sock.sendall(b"MSCM\1\0\1\0" + os.urandom(32))
            assert sock.recv(8) == b"MSCM" + bytes([WIRE, 0, 1, 0])
            assert len(sock.recv(100)) == 64 and sock.recv(1) == b""

    def send(garbage: bytes) -> None:
        with dial(victim) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(garbage)
            assert sock.recv(1) == b""

    attacked(
        victim,
        {
            **{name: (partial(misfit, change), [refusal]) for name, (change, refusal) in WRONG_HELLOS.items()},
            "replay": (replay, ["could not prove that it knows the key of this job"]),
            "older version": (downgrade, [f"a connection speaks wire version 1, this mscomm speaks {WIRE}"]),
            **{name: (partial(send, text), ["which does not begin a hello"]) for name, text in GARBAGE.items()},
        },
    )


@one_place
def test_connections_without_a_hello_are_dropped_and_not_noticed_by_the_ranks(telling_victim: Victim) -> None:
    victim = telling_victim

    def wait() -> None:
        """One connection is silent, and one is so slow that it needs much longer than HELLO_S."""
        with dial(victim) as silent, dial(victim) as slow:
            with contextlib.suppress(ConnectionError):
                for byte in b"MSCM\2\0\1\0" + bytes(40):
                    slow.send(bytes([byte]))
                    time.sleep(HELLO_S / 10)
            with contextlib.suppress(ConnectionError):
                assert silent.recv(1) == b""

    def scan() -> None:
        host, port = victim.address
        for number in range(port - 50, port + 50):
            with contextlib.suppress(OSError), socket.create_connection((host, number), 60):
                pass

    attacked(
        victim,
        {
            "half-open and slow": (wait, 2 * ["did not finish its hello in time"]),
            "port scan": (scan, ["it closed during the hello"]),
        },
    )


# -- with the admission key


FRAMES = {
    "length": (b"\xff\xff\xff\xff" + bytes(1000), "4294967295 bytes"),
    "a list of 2^32": (b"\x05\0\0\0\xdd\xff\xff\xff\xff", "4294967295 exceeds max_array_len"),
    "cut off": (b"\x03\0\0\0\x81\xa1t", "incomplete input"),
}


def test_who_knows_the_admission_key_ends_only_its_own_link(victim: Victim) -> None:
    """Frames with impossible lengths, hellos that are closed at once, a stolen node id, and an extra worker. Between
    the attacks, a thousand silent connections a second arrive, from before the second worker starts until after it has
    joined.
    """
    attacker = victim.hosts[2] if victim.hosts else None
    over = threading.Event()

    def join(node_id: str) -> list[dict[str, object]]:
        stream = greet(victim)
        Frames(stream).send({"t": "join", "rank": None, "node_id": node_id, "facts": {}}, soon())
        return said(stream)

    def attack(node_id: str, why: str) -> None:
        for frame, _ in FRAMES.values():
            stream = greet(victim)
            stream.send_all(frame, soon())
            assert all(answer["t"] == "refused" for answer in said(stream))
        for rank in (-1, 0, 1):
            greet(victim, rank=rank).close()
        assert why in str(join(node_id)[0]["why"])

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

    from_host(attacker, partial(attack, "0", "0"))
    victim.logged("refused .*MS_NODE_ID")
    assert len(victim.lines("refused .*MS_NODE_ID")) == 1
    flooding = threading.Thread(target=from_host, args=(attacker, flood))
    flooding.start()
    try:
        victim.logged("more than 64 connections are in their hello")
        victim.work()
        victim.logged("all 2 workers are ready")
    finally:
        over.set()
        flooding.join()
    from_host(attacker, partial(attack, "7", "already has its 2 workers"))
    victim.finish()
    assert len(victim.lines("more than 64 connections")) < 10  # later refusals of this kind are counted
    for _, refusal in FRAMES.values():  # one line for each attack
        assert len(victim.lines(f"that had not joined sent invalid data on its control link .*({refusal})")) == 2


# -- floods


@one_place
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
            time.sleep(1)  # by then, rank 0 is probably waiting; if not, the test must pass too
            ranks.append(start(1))
            over.touch()
            for rank in ranks:
                out, err = rank.communicate(timeout=60)
                assert rank.returncode == 0 and out.startswith("steps"), err
            assert flood.poll() is None
        finally:
            flood.kill()


@one_place
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
    assert victim.scheduler.wait(60) == 0
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
        for byte in (*range(20), 0x7F, 0xFF):
            with contextlib.suppress(errors.Error, ValueError, TypeError):
                packing.unpack(good[:place] + bytes([byte]) + good[place + 1 :])


# -- TLS. The attacker has the job key in each of these tests.


WRONG_CERTIFICATES = {
    "none": "the other end has sent no certificate",
    "wrong CA": "the other end's certificate has a wrong signature",
    "self-signed": "the other end's certificate is not signed by the CA in ca_cert_path",
    "expired": "the other end's certificate has expired",
    "not yet valid": "the other end's certificate is not valid yet",
    "revoked": "the other end's certificate is revoked",
    "wrong role": "the other end's certificate is not for its role",
    "wrong job": "the other end's certificate is for mscomm://another/worker",
    "old protocol": "no cipher suite or TLS version in common",
}


def test_a_certificate_that_does_not_fit_is_refused(tls_victim: Victim) -> None:
    assert tls_victim.tls

    def connect(kind: str, context: ssl.SSLContext) -> None:
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

    def plain() -> None:
        with pytest.raises(errors.Error, match=r"it expects TLS; call set_ps_context\(enable_ssl=True"):
            greet(tls_victim)

    attacked(
        tls_victim,
        {
            **{
                kind: (partial(connect, kind, tls_victim.tls.context(kind)), [refusal])
                for kind, refusal in WRONG_CERTIFICATES.items()
            },
            "plain bytes": (plain, ["the other end sent bytes that are not TLS"]),
        },
    )


@one_place
def test_a_worker_with_tls_says_that_the_scheduler_may_not_use_it(victim: Victim) -> None:
    certificates = Certificates(victim.over.parent)
    env = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "7", **certificates.variables()}
    impatient = "from mscomm.cluster import links; links.CUT_S = 0.5\n"  # how long it tries again
    worker = victim.start(1, ["-c", impatient + WORKER, str(victim.over)], **env)
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


@pytest.mark.parametrize(
    ("place", "certified"), rotated(itertools.product(PLACES, [False, True]), few=2), indirect=["place"]
)
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

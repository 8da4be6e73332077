"""A job on several hosts without a key: rank 0 makes a key, which goes through the launcher's store encrypted."""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from control import soon
from hosts import Hosts
from rotated import rotated
from test_hosts import mpirun, new_key, one_network, two  # noqa: F401
from test_launchers import Environment, mpich  # noqa: F401
from test_tls_jobs import BODY, MARKER, Capture

from mscomm import errors
from mscomm.bootstrap import kvs, pmi, sealed_key
from mscomm.bootstrap.invitation import Invitation, Seat
from mscomm.bootstrap.sealed_key import KeyPair
from mscomm.cluster import hub_process, security
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.protection import Protection

KEY = bytes(range(32))
HUB = "tcp,10.0.0.1,4000"
RANK_0 = Seat(0, 3, 0, one_host=False)


# -- what passes through the store


def test_only_the_rank_for_which_the_key_was_sealed_can_open_it() -> None:
    rank_0, rank_1, rank_2 = KeyPair(), KeyPair(), KeyPair()
    sealed = rank_0.seal(KEY, rank_1.public, 1, HUB)
    assert rank_1.open(sealed, rank_0.public, 1, HUB) == KEY
    assert KEY.hex() not in sealed
    for pair, public, rank, hub in (
        (rank_2, rank_0.public, 1, HUB),  # another rank has read the text
        (rank_1, rank_2.public, 1, HUB),  # the text does not come from rank 0
        (rank_1, rank_0.public, 2, HUB),
        (rank_1, rank_0.public, 1, HUB.replace("4000", "4001")),
    ):
        with pytest.raises(errors.AuthenticationError, match=f"rank {rank} cannot decrypt the job's key"):
            pair.open(sealed, public, rank, hub)


@pytest.mark.parametrize("place", [0, 40, 95])
def test_a_changed_text_is_refused(place: int) -> None:
    rank_0, rank_1 = KeyPair(), KeyPair()
    sealed = rank_0.seal(KEY, rank_1.public, 1, HUB)
    changed = sealed[:place] + f"{int(sealed[place], 16) ^ 1:x}" + sealed[place + 1 :]
    with pytest.raises(errors.AuthenticationError, match="somebody has changed it"):
        rank_1.open(changed, rank_0.public, 1, HUB)


@pytest.mark.parametrize("public", ["", "no hex", "00" * 31, "00" * 33, "00" * 32], ids=repr)
def test_what_is_no_public_key_is_refused_by_the_name_of_its_rank(public: str) -> None:
    with pytest.raises(errors.AuthenticationError, match=r"the public key of rank 7 .* is not an X25519 key"):
        KeyPair().seal(KEY, public, 7, HUB)


@pytest.mark.parametrize("lacks", ["public_bytes_raw", "exchange"])
def test_a_package_that_is_too_old_counts_as_lacking(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    assert sealed_key.possible()
    x25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.x25519")

    class Old:
        def public_key(self) -> Old:
            return self

        def public_bytes_raw(self) -> bytes:
            if lacks == "public_bytes_raw":
                raise AttributeError(lacks)
            return bytes(range(32))

    monkeypatch.setattr(x25519.X25519PrivateKey, "generate", Old)
    assert not sealed_key.possible()


# -- ranks that join through a store in this process


class Store:
    """The store as one rank sees it. `change` may change a text before the rank for which it is reads it."""

    def __init__(self, shared: Store | None, rank: int, size: int, change: Callable[[str], str] = str) -> None:
        self.rank, self.size, self.change = rank, size, change
        self.texts: dict[object, str] = shared.texts if shared else {}
        self.changed: threading.Condition = shared.changed if shared else threading.Condition()

    def put(self, texts: dict[object, str]) -> None:
        with self.changed:
            self.texts |= texts
            self.changed.notify_all()

    def get(self, *names: object) -> list[str]:
        with self.changed:
            assert self.changed.wait_for(lambda: set(names) <= set(self.texts), 20)
            return [self.change(self.texts[name]) for name in names]

    def ask(self, text: str, deadline: Deadline) -> str:
        self.put({("ask", self.rank): text})
        return self.get(self.rank)[0]

    def collect(self, deadline: Deadline, wanted: bool) -> list[str]:
        return self.get(*(("ask", rank) for rank in range(1, self.size)))

    def answer(self, texts: Sequence[str], deadline: Deadline) -> None:
        self.put(dict(enumerate(texts)))


Ended = Invitation | errors.Error


class Joining:
    """Three ranks that join at the same time. env, lacking, protection and change: for some of the ranks."""

    size = 3

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kvs.interfaces, "host_address", lambda env: "127.0.0.1")
        monkeypatch.setattr(security, "is_loopback", lambda host: False)
        monkeypatch.setattr(sealed_key, "possible", lambda: int(threading.current_thread().name) not in self.lacking)
        self.lacking: set[int] = set()
        self.env: dict[int, dict[str, str]] = {}
        self.protection: dict[int, Protection] = {}
        self.change: dict[int, Callable[[str], str]] = {}
        self.store = Store(None, 0, self.size)
        self.opened: list[Invitation] = []

    def start(self) -> list[Ended]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(self._join, range(self.size)))

    def _join(self, rank: int) -> Ended:
        threading.current_thread().name = str(rank)
        store = Store(self.store, rank, self.size, self.change.get(rank, str))
        seat = Seat(rank, self.size, 0, one_host=False)
        protection = self.protection.get(rank, Protection())
        try:
            joined = kvs.Join("mpirun", seat, store, self.env.get(rank, {}), soon(), protection)
            self.opened.append(joined.invitation())
            return self.opened[-1]
        except errors.Error as error:
            return error

    def close(self) -> None:
        for invitation in self.opened:
            invitation.stream.sock.close()
        for process in hub_process._spawned:
            hub_process.end(process)


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    joining = Joining(monkeypatch)
    yield joining
    joining.close()


def test_ranks_without_a_key_get_one_that_the_store_does_not_show(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "new_key", lambda: KEY)
    ends = joining.start()
    assert [one.key for one in ends if isinstance(one, Invitation)] == [security.admission_key(KEY, 1)] * 3, ends
    texts = "\n".join(joining.store.texts.values())
    assert texts.count("mscomm1,tcp,127.0.0.1,") == 3 and KEY.hex() not in texts


def words(ends: list[Ended]) -> list[str]:
    assert all(isinstance(one, errors.Error) for one in ends), ends
    return [str(one) for one in ends]


def test_ranks_that_lack_cryptography_are_named_with_all_three_ways_out(joining: Joining) -> None:
    joining.lacking = {1, 2}
    ends = words(joining.start())
    assert "the package cryptography, 42 or later, which ranks 1, 2 cannot use" in ends[0]
    assert "which rank 1 cannot use" in ends[1] and "which rank 2 cannot use" in ends[2]
    for text in ends:
        assert "pip install 'cryptography>=42'" in text
        assert "export MSCOMM_JOB_KEY_FILE=" in text and "set_ps_context(enable_ssl=False)" in text


def test_a_rank_0_that_lacks_cryptography_tells_the_others(joining: Joining) -> None:
    joining.lacking = {0}
    ends = words(joining.start())
    assert "which rank 0 cannot use" in ends[0]
    assert all("rank 0 could not open the job; its own error says why" in text for text in ends[1:])


@pytest.mark.parametrize("what", ["key file", "plain"])
@pytest.mark.parametrize(
    ("protected", "said"), [({0}, "rank 0, but not rank 2"), ({1, 2}, "ranks 1, 2, but not rank 0")]
)
def test_ranks_of_which_only_some_have_their_own_protection_are_named(
    joining: Joining, tmp_path: Path, what: str, protected: set[int], said: str
) -> None:
    for rank in protected:
        if what == "plain":
            joining.protection[rank] = Protection(permit_plain=True)
        else:
            joining.env[rank] = {"MSCOMM_JOB_KEY_FILE": new_key(tmp_path / "job.key")}
    ends = joining.start()
    told = str(ends[2 if 0 in protected else 0])
    assert f"only some ranks have a key file or certificates, or permit plain links: {said}." in told
    assert "-x NAME" in told


def test_a_text_that_was_changed_in_the_store_is_refused(joining: Joining) -> None:
    joining.change[1] = lambda text: text[:-1] + f"{int(text[-1], 16) ^ 1:x}"
    ends = joining.start()
    assert "rank 1 cannot decrypt the job's key in the launcher's store" in str(ends[1])
    assert isinstance(ends[0], Invitation) and isinstance(ends[2], Invitation)


def test_nobody_can_offer_a_unix_socket_to_ranks_on_several_hosts(joining: Joining, tmp_path: Path) -> None:
    for rank in range(3):
        joining.env[rank] = {"MSCOMM_JOB_KEY_FILE": new_key(tmp_path / f"{rank}.key")}
    joining.change[1] = lambda text: f"mscomm1,unix,mscomm-{'0' * 32},{KEY.hex()}"
    assert "rank 0 published 'mscomm1,unix'..., no address" in str(joining.start()[1])


def test_a_rank_0_that_gives_up_tells_the_others_and_raises_the_first_error(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> list[str]:
        raise errors.CollectiveTimeout("not all ranks came")

    told: list[Sequence[str]] = []

    def broken(texts: Sequence[str], _: Deadline) -> None:
        told.append(texts)
        raise errors.BackendUnavailable("mpirun has ended")

    monkeypatch.setattr(joining.store, "collect", late)
    monkeypatch.setattr(joining.store, "answer", broken)
    monkeypatch.setattr(sealed_key, "possible", lambda: True)
    with pytest.raises(errors.CollectiveTimeout, match="not all ranks came"):
        kvs.Join("mpirun", RANK_0, joining.store, {}, soon(), Protection()).invitation()
    assert told == [["mscomm1,failed"] * 3]


def test_a_pmi_store_that_has_timed_out_asks_for_nothing_more() -> None:
    ours, mpirun = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each line is a packet
    with ours, mpirun:
        for line in (
            b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n",
            b"cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n",
            b"cmd=my_kvsname kvsname=kvs_1\n",
        ):
            mpirun.send(line)
        store = pmi._Store(ours.fileno(), RANK_0, soon())
        with pytest.raises(errors.CollectiveTimeout, match="not all 3 ranks called"):
            store.collect(Deadline(0.1), wanted=True)
        store.answer(["mscomm1,failed"] * 3, soon())
        ours.shutdown(socket.SHUT_WR)
        asked = [line.split()[0] for line in iter(lambda: mpirun.recv(4096), b"")]
    assert asked == [b"cmd=init", b"cmd=get_maxes", b"cmd=get_my_kvsname", b"cmd=barrier_in"]


@pytest.mark.parametrize("number", [1, 3])
def test_a_store_with_another_number_of_entries_is_refused(
    joining: Joining, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(joining.store, "collect", lambda *_, **__: [KeyPair().public] * number)
    monkeypatch.setattr(sealed_key, "possible", lambda: True)
    with pytest.raises(errors.BackendUnavailable, match=f"{number} entries of 2 ranks in the store"):
        kvs.Join("mpirun", RANK_0, joining.store, {}, soon(), Protection()).invitation()


def test_a_public_key_that_is_none_ends_the_job_on_every_rank(joining: Joining) -> None:
    joining.change[0] = lambda text: text[:-2]
    ends = words(joining.start())
    assert "the public key of rank 1 in the launcher's store is not an X25519 key" in ends[0]
    assert all("rank 0 could not open the job" in text for text in ends[1:])


# -- real launchers, over two hosts


class Launch:
    """Starts a script on four ranks, two on each host, with one kind of mpirun."""

    def __init__(self, hosts: Hosts, folder: Path, other: Environment | None) -> None:
        self.hosts, self.folder, self.mpich = hosts, folder, other

    def __call__(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        # The script is in a file, because mpirun sends its arguments over the network, and the script has the marker.
        # MPICH gives the first host's MSCOMM_HOST_ID to all ranks.
        path = self.folder / "job.py"
        path.write_text(f"import os\nos.environ['MSCOMM_HOST_ID'] = os.uname().nodename\n{script}")
        where = ",".join(f"{host.address}:2" for host in self.hosts)
        if self.mpich is None:
            exported = [word for name in env for word in ("-x", name)]
            return mpirun(self.hosts, "-H", where, *exported, sys.executable, path, **env)
        options = ["-launcher", "ssh", "-launcher-exec", self.hosts.agent(), "-hosts", where, "-n", "4"]
        return self.hosts[0].run([self.mpich.mpirun, *options, self.mpich.python, path], env)


@pytest.fixture(params=rotated(["Open MPI", "MPICH"], few=1))
def launch(two: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Launch:  # noqa: F811
    return Launch(two, tmp_path, request.getfixturevalue("mpich") if request.param == "MPICH" else None)


HOW = list(itertools.product(["Open MPI", "MPICH"], ["by variables", "by hand"]))


@pytest.mark.parametrize(
    ("launch", "how"),
    rotated(HOW, few=1, always=[case for case in HOW if case[1] == "by variables"]),
    indirect=["launch"],
)
def test_mpirun_without_a_key_is_encrypted(two: Hosts, launch: Launch, how: str, tmp_path: Path) -> None:  # noqa: F811
    """Rank 0 writes each new key to a file, for this test. The ranks join twice.

    If the launcher's variables describe the job, the second job derives its key from that of the first.
    """
    init = "init_method=MPI.COMM_WORLD" if how == "by hand" else ""
    code = f"""
import mscomm
from mscomm.cluster import security
made = security.new_key
def noted():
    with open({str(tmp_path / "keys")!r}, "ab") as file:
        file.write(key := made())
    return key
security.new_key = noted
{"from mpi4py import MPI" if init else ""}
mscomm.init({init})
mscomm.release()
mscomm.init({init})
{BODY}"""
    capture = Capture(two)
    done = launch(code)
    seen = capture.stop()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 4" for rank in range(4)]
    assert len(seen) > 1_000_000 and MARKER not in seen
    assert init or b"mscomm1,tcp," in seen  # the store's traffic, too; MPI may have its own encoding
    keys = (tmp_path / "keys").read_bytes()
    made = [keys[at : at + 32] for at in range(0, len(keys), 32)]
    assert len(made) == len(set(made)) == (2 if init else 1)
    for key in made:
        assert key not in seen and key.hex().encode() not in seen


@pytest.fixture
def no_cryptography(tmp_path: Path) -> str:
    """Return a folder for PYTHONPATH in which the package `cryptography` cannot be imported."""
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking/cryptography.py").write_text("raise ImportError('not installed in this test')")
    return str(tmp_path / "lacking")


def test_mpirun_without_a_key_or_cryptography_is_refused_with_the_fix(launch: Launch, no_cryptography: str) -> None:
    done = launch("import mscomm; mscomm.init()", PYTHONPATH=no_cryptography)
    assert done.returncode != 0
    assert "AuthenticationError" in done.stderr and "pip install 'cryptography>=42'" in done.stderr
    assert "export MSCOMM_JOB_KEY_FILE=" in done.stderr and "set_ps_context(enable_ssl=False)" in done.stderr


def test_a_host_without_cryptography_is_named(launch: Launch, no_cryptography: str) -> None:
    code = f"import sys\nif os.uname().nodename == 'host-1': sys.path.insert(0, {no_cryptography!r})\n"
    done = launch(code + "import mscomm; mscomm.init()")
    assert done.returncode != 0 and "which ranks 2, 3 cannot use" in done.stderr, done.stderr


def test_a_key_file_on_one_host_alone_is_named(launch: Launch, tmp_path: Path) -> None:
    key = new_key(tmp_path / "job.key")
    code = f"if os.uname().nodename == 'host-1': os.environ['MSCOMM_JOB_KEY_FILE'] = {key!r}\n"
    done = launch(code + "import mscomm; mscomm.init()")
    assert done.returncode != 0 and "ranks 2, 3, but not rank 0. Set MSCOMM_JOB_KEY_FILE" in done.stderr, done.stderr


def test_a_rank_that_never_joins_is_named_where_the_store_knows_it(launch: Launch, tmp_path: Path) -> None:
    """The other ranks call init() at the same time. The last rank ends when init() has failed on one of them."""
    code = f"""
import pathlib, time
import numpy, mscomm
rank = os.environ.get("PMIX_RANK") or os.environ["PMI_RANK"]
def wait_for(*names):
    while not all(pathlib.Path({str(tmp_path)!r}, name).exists() for name in names):
        time.sleep(0.01)
if rank == "3":
    wait_for("failed")
else:
    pathlib.Path({str(tmp_path)!r}, rank).touch()
    wait_for("0", "1", "2")
    try:
        mscomm.init()
    finally:
        pathlib.Path({str(tmp_path)!r}, "failed").touch()
"""
    done = launch(code, MS_TOPO_TIMEOUT="3")
    assert done.returncode != 0
    assert re.search(
        r"PMIx: rank 3 did not call mscomm.init\(\) within 3 s|PMI: not all 4 ranks called mscomm.init\(\)", done.stderr
    ), done.stderr

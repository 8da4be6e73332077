"""Groups whose links are encrypted. In these tests, each rank believes that it is on a host of its own, so that the
links are TCP connections. These tests give the keys to the core; test_tls_jobs.py tests how a job agrees on keys.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import ranks

import mscomm
from mscomm import _core
from mscomm.cluster.assemble import Epoch
from mscomm.cluster.bytestream import ByteStream

HOSTS = {"MSCOMM_HOST_ID": "{rank}"}
Secret = tuple[bytes, bool] | None


def key_of(a: int, b: int) -> bytes:
    return hashlib.sha256(f"{min(a, b)} and {max(a, b)}".encode()).digest()


def agreed(me: int, peer: int) -> Secret:
    return (key_of(me, peer), me > peer)


def encrypt(rank: int, secret: Callable[[int, int], Secret] = agreed) -> None:
    """From now on, let the core use secret(rank, peer) for each new link of this process."""
    create, add = _core.Group, _core.Group.add_link

    def group(*, ranks: list[int], links: list[int], secrets: object, **others: Any) -> _core.Group:
        secrets = [secret(rank, peer) if fd >= 0 else None for peer, fd in zip(ranks, links, strict=True)]
        return create(ranks=ranks, links=links, secrets=secrets, **others)

    def add_link(core: _core.Group, sends: bool, peer: int, fd: int, _: object) -> None:
        add(core, sends, peer, fd, secret(rank, peer))

    create.add_link = add_link  # type: ignore[method-assign]
    _core.Group = group  # type: ignore[assignment,misc]


def uses_openssl() -> bool:
    return "libssl.so.3" in Path("/proc/self/maps").read_text()


@ranks(3, env=HOSTS)
def test_collectives_over_encrypted_links(rank, group):
    encrypt(rank)
    all_ranks = mscomm.create_group("encrypted", [0, 1, 2])
    for count in (1, 1000, 1 << 20):
        x = np.arange(count, dtype=np.float64) + rank
        assert (mscomm.all_reduce(x, group=all_ranks) == 3 * np.arange(count) + 3).all()
        rows = mscomm.all_gather(np.full(count, rank, np.int32), group=all_ranks).reshape(3, count)
        assert (rows == np.arange(3)[:, None]).all()
    assert mscomm.broadcast(np.full(5, rank), root=2, group=all_ranks)[0] == 2
    mscomm.barrier(group=all_ranks)
    assert uses_openssl()


@ranks(2, env=HOSTS)
def test_messages_over_encrypted_links(rank, group):
    encrypt(rank)
    both = mscomm.create_group("encrypted", [0, 1])
    x, other = np.arange(1 << 20) + rank, 1 - rank
    # A small message needs no recv that waits for it, even if it is the first message on its link.
    mscomm.send(x[:10], other, group=both)
    mscomm.barrier(group=both)
    out = np.empty(10, x.dtype)
    mscomm.recv(out, other, group=both)
    assert (out == np.arange(10) + other).all()
    out = np.empty_like(x)
    mscomm.sendrecv(x, other, out, other, group=both)
    assert (out == np.arange(1 << 20) + other).all()


@ranks(2, env=HOSTS)
def test_another_key_ends_the_group(rank, group):
    encrypt(rank, lambda me, peer: (key_of(me, me), me > peer))
    both = mscomm.create_group("encrypted", [0, 1])
    with pytest.raises(mscomm.PeerLost, match=r"ended: TLS: the handshake failed: .*\. Both sides need the same key"):
        mscomm.all_reduce(np.ones(3), group=both)


@ranks(2, env=HOSTS)
def test_a_peer_that_does_not_encrypt_ends_the_group(rank, group):
    encrypt(rank, lambda me, peer: agreed(me, peer) if me == 0 else None)
    both = mscomm.create_group("half encrypted", [0, 1])
    with pytest.raises(mscomm.PeerLost, match=r"TLS: the handshake failed"):
        mscomm.all_reduce(np.ones(3), group=both)


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
@ranks(2, env=HOSTS)
def test_a_server_with_a_certificate_is_refused(rank, group):
    if rank == 0:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.NamedTemporaryFile(suffix=".pem") as pem:
            made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
            made += ["-subj", "/CN=any", "-keyout", pem.name, "-out", pem.name]
            subprocess.run(made, check=True, capture_output=True)
            context.load_cert_chain(pem.name)
        connect = Epoch._connect
        refused = []

        def serve(sock: socket.socket) -> None:
            sock.setblocking(True)
            try:
                context.wrap_socket(sock, server_side=True).recv(1)
            except ssl.SSLError as error:
                refused.append(str(error))

        serving = []

        def take_over(*words: Any) -> list[ByteStream | None]:
            streams = connect(*words)
            assert streams[1]
            serving.append(threading.Thread(target=serve, args=[streams[1].sock]))
            serving[0].start()
            return [None, ByteStream(socket.socketpair()[0])]

        Epoch._connect = take_over  # type: ignore[method-assign]
    encrypt(rank, lambda me, peer: agreed(me, peer) if me == 1 else None)
    both = mscomm.create_group("impersonated", [0, 1])
    with pytest.raises(mscomm.PeerLost, match="certificate verify failed" if rank == 1 else "rank"):
        mscomm.all_reduce(np.ones(3), group=both)
    if rank == 0:
        serving[0].join()
        assert re.search("unknown ca", refused[0], re.I)


@ranks(2, env=HOSTS)
def test_wrong_keys_are_refused(rank, group):
    for key in (b"", bytes(31), bytes(33)):
        core = _core.Group
        encrypt(rank, lambda me, peer, key=key: (key, me > peer))
        # A rank that still waits for the other one's answer hears of its error.
        with pytest.raises((ValueError, mscomm.Aborted), match=rf"secret: the key has {len(key)} bytes, but it must"):
            mscomm.create_group(f"short {len(key)}", [0, 1])
        _core.Group = core  # type: ignore[misc]


def test_the_version_is_that_of_openssl_3():
    assert re.match(r"OpenSSL 3\.\d+", _core.tls_version())


def test_a_missing_library_is_named(tmp_path):
    # A file that is no library, under the name of OpenSSL's
    (tmp_path / "libssl.so.3").write_text("")
    program = (
        "from mscomm import _core, errors\ntry: _core.tls_version()\nexcept errors.BackendUnavailable as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "TLS: cannot open OpenSSL 3" in done.stdout, done.stderr
    assert "libssl3" in done.stdout

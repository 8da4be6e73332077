"""The TLS stream: bytes in both directions, its limits, and the text of each refusal."""

from __future__ import annotations

import os
import select
import selectors
import socket
import ssl
import threading

import control
import pytest
from certificates import CLIENT, SERVER, Authority, write_config, write_pem
from control import WORLD, Waits, eventually, soon

from mscomm import errors
from mscomm.cluster import credentials as tls_credentials
from mscomm.cluster import hub, tls
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.credentials import SCHEDULER, WORKER, Credentials
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.tls import TlsStream
from mscomm.errors import AuthenticationError

PASSWORDS = {SCHEDULER: "correct horse", WORKER: "correct horse"}


def credentials(folder, *arguments, **settings):
    folder.mkdir(exist_ok=True)
    return Credentials(write_config(folder, *arguments, **settings), PASSWORDS)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    made = credentials(tmp_path_factory.mktemp("good"))
    return made.server(), made.client()


def connected(server, client, tcp=False):
    """Return a server's and a client's stream over a new connection, before the handshake."""
    if tcp:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
    else:
        ours, theirs = socket.socketpair()
    return TlsStream(ours, server, True), TlsStream(theirs, client, False)


def shake(*ends):
    """Do the handshake in one thread, which waits for what the streams ask for."""
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, end.events(sending=False))
        deadline = soon()
        while not all(end.shaken for end in ends):
            assert not deadline.passed
            for key, _ in selector.select(1):
                assert key.fileobj.receive(100) is None
            for end in ends:
                selector.modify(end, end.events(sending=False))


@pytest.fixture
def ends(good):
    ours, theirs = connected(*good)
    shake(ours, theirs)
    yield ours, theirs
    ours.close()
    theirs.close()


def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


# -- moving bytes


def test_a_selector_loop_does_the_handshake(ends):
    ours, theirs = ends
    assert ours.peer_certificate()["subject"] == ((("commonName", "client"),),)
    assert theirs.peer_certificate()["subject"] == ((("commonName", "server"),),)


def test_nothing_is_sent_or_received_before_the_handshake(good):
    ours, theirs = connected(*good)
    assert (ours.receive(10), theirs.receive(10), ours.send(b"x"), theirs.events(True)) == (None, None, 0, 1)
    ours.close()
    theirs.close()


def test_the_wire_has_no_plain_bytes(ends):
    ours, theirs = ends
    assert ours.send(b"secret" * 10) == 60
    assert b"secret" not in theirs.sock.recv(1 << 16)


def test_nothing_is_not_the_end(ends):
    ours, theirs = ends
    assert theirs.receive(100) is None
    ours.send_all(b"abc", soon())
    ours.close_for_writing()
    theirs.await_bytes(soon())
    assert (theirs.receive(100), theirs.receive(100), theirs.receive(100)) == (b"abc", b"", b"")
    theirs.send_all(b"still", soon())  # the other direction is open
    ours.await_bytes(soon())
    assert ours.receive(100) == b"still"


def test_closing_for_writing_keeps_what_has_arrived(ends):
    ours, theirs = ends
    theirs.send_all(b"a" * 20000, soon())
    assert ours.receive(5) == b"aaaaa"  # more is decrypted, and more is read ahead
    ours.close_for_writing()
    theirs.send_all(b"b" * 20000, soon())
    theirs.close_for_writing()
    assert theirs.receive(1) == b""
    assert received_all(ours) == b"a" * 19995 + b"b" * 20000


def received_all(stream):
    found = b""
    while True:
        stream.await_bytes(soon())
        piece = stream.receive(1 << 16)
        assert piece is not None
        if not piece:
            return found
        found += piece


def test_a_send_that_nobody_reads_ends_at_the_deadline(ends, monkeypatch):
    monkeypatch.setattr(tls, "_CLOSE_S", 0.1)
    ours, _ = ends
    with pytest.raises(TimeoutError):
        ours.send_all(bytes(1 << 20), Deadline(0.1))
    assert ours.send(b"x") == 0
    assert ours.events(sending=False) == selectors.EVENT_READ | selectors.EVENT_WRITE
    assert ours.unacknowledged()
    with pytest.raises(TimeoutError):
        ours.await_bytes(Deadline(0.1))
    with pytest.raises(TimeoutError):
        ours.close_for_writing()


def test_a_handshake_that_nobody_answers_ends_at_the_deadline(good):
    ours, theirs = connected(*good)
    with pytest.raises(TimeoutError, match=r"the TLS handshake did not end within 0\.2 s"):
        theirs.send_all(b"x", Deadline(0.2))
    with pytest.raises(TimeoutError, match="handshake"):
        theirs.await_bytes(Deadline(0.2))
    ours.close()
    theirs.close()


def test_a_sender_notices_that_another_thread_has_ended_the_handshake(good, monkeypatch):
    ours, theirs = connected(*good)
    real = tls.wait

    def end_the_handshake_first(sock, events, deadline):
        monkeypatch.setattr(tls, "wait", real)
        while not (ours.shaken and theirs.shaken):
            assert (ours.receive(1), theirs.receive(1)) == (None, None)
        real(sock, events, deadline)  # the descriptor has nothing more to announce

    monkeypatch.setattr(tls, "wait", end_the_handshake_first)
    ours.send_all(b"abc", soon())
    assert theirs.receive(10) == b"abc"
    ours.close()
    theirs.close()


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_both_directions_at_once_with_two_threads_each(good, tcp):
    ours, theirs = connected(*good, tcp=tcp)
    for end in (ours, theirs):
        end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = {ours: os.urandom(3 << 20), theirs: os.urandom(3 << 20)}
    found = {}

    def send(end):
        end.send_all(data[end], Deadline(60))
        end.close_for_writing()

    def receive(end):
        found[end] = received_all(end)

    # Four threads begin with a handshake that any of them may continue.
    threads = [in_thread(function, end) for function in (send, receive) for end in (ours, theirs)]
    for thread in threads:
        thread.join(60)
    assert found == {ours: data[theirs], theirs: data[ours]}
    ours.close()
    theirs.close()


def test_what_the_descriptor_does_not_announce_is_pending(ends):
    ours, theirs = ends
    ours.send_all(b"abcdef", soon())
    ours.send_all(b"ghi", soon())
    theirs.await_bytes(soon())
    got = theirs.receive(2)
    while theirs.pending:
        got += theirs.receive(2)
    assert got == b"abcdefghi"
    assert not select.select([theirs], [], [], 0)[0]


def test_a_part_of_a_record_is_pending_at_most_once(ends):
    ours, theirs = ends
    ours.send_all(b"x" * 1000, soon())
    wire = theirs.sock.recv(1 << 16)
    theirs._arrived.write(wire[:500])
    assert (theirs.pending, theirs.receive(2000), theirs.pending) == (True, None, False)
    theirs._arrived.write(wire[500:])
    assert theirs.receive(2000) == b"x" * 1000


def test_a_send_is_counted_when_the_kernel_has_it(ends):
    ours, theirs = ends
    sent = 0
    while count := ours.send(b"y" * (16 << 10)):
        sent += count
    found = b""
    while True:  # the rest of the record that the kernel did not accept leaves when there is room
        piece = theirs.receive(1 << 16)
        found += piece or b""
        if piece is None and ours.receive(1) is None and not ours.unacknowledged():
            break
    assert found.startswith(b"y" * sent)
    found += theirs.receive(1 << 16) or b""
    # It is counted now, and not sent again.
    assert ours.send(b"y" * (16 << 10)) == len(found) - sent == 16 << 10
    assert theirs.receive(1 << 16) is None


def test_another_message_after_one_that_was_given_up_is_not_lost(ends):
    ours, theirs = ends
    sent = 0
    while count := ours.send(b"y" * (16 << 10)):
        sent += count
    thread = in_thread(lambda: (ours.send_all(b"another", soon()), ours.close_for_writing()))
    found = received_all(theirs)
    thread.join()
    assert found == b"y" * (sent + (16 << 10)) + b"another"


# -- how it ends


def test_an_end_without_the_end_of_tls_is_not_an_end_of_data(ends):
    ours, theirs = ends
    ours.send_all(b"abc", soon())
    ours.sock.shutdown(socket.SHUT_WR)  # what an attacker could do, and what the kernel does for a killed process
    assert theirs.receive(100) == b"abc"
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="its connection was cut: TLS was not closed"):
            theirs.receive(100)
    theirs.await_bytes(soon())  # does not wait for what receive() raises at once


def test_a_handshake_that_is_cut_says_so(good):
    ours, theirs = connected(*good)
    ours.close()
    with pytest.raises(ConnectionResetError, match="closed the connection during the TLS handshake"):
        theirs.receive(100)
    theirs.close()


def test_shut_down_wakes_a_waiting_thread(ends):
    ours, _ = ends
    waits = Waits(ours.await_bytes, Deadline(60))
    ours.shut_down()
    waits.ended()
    with pytest.raises(BrokenPipeError):
        ours.send(b"x")


def test_a_record_that_was_changed_is_refused_for_good(ends):
    ours, theirs = ends
    ours.send_all(b"abc" * 100, soon())
    wire = bytearray(theirs.sock.recv(1 << 16))
    wire[40] ^= 1
    ours.sock.send(wire)
    theirs._arrived.write(bytes(wire))
    for function in (theirs.receive, theirs.receive, lambda most: theirs.send(b"x")):
        with pytest.raises(ssl.SSLError, match=r"^TLS: the data was changed on its way"):
            function(100)
    with pytest.raises(OSError, match="TLS"):
        ours.receive(100)


# -- refusals


def outcome(*ends):
    """Run the handshake and exchange a byte. Return the error of each end."""
    errors = [None, None]
    for _ in range(6):
        for index, end in enumerate(ends):
            if errors[index] is None:
                try:
                    end.receive(100)
                    end.send(b"x")
                except OSError as error:
                    errors[index] = error
                    end.sock.shutdown(socket.SHUT_WR)
    for end in ends:
        end.close()
    return [str(error) for error in errors]


def loaded(context, folder, key, certificate):
    """Replace the context's own certificate, without the checks of Credentials."""
    context.load_cert_chain(write_pem(folder / "own.pem", key, certificate, password=""))
    return context


AUTHORITY, OTHER = Authority(), Authority("other CA")
REFUSALS = {
    "unknown": (OTHER.issue("c", CLIENT), "not signed by the CA in ca_cert_path", "its ca_cert_path is another CA"),
    "self-signed": (Authority("s").issue("s", CLIENT), "not signed by the CA", "its ca_cert_path is another CA"),
    "expired": (AUTHORITY.issue("c", CLIENT, (-3, -1)), "has expired; make a new one", "it has expired, or is not"),
    "early": (AUTHORITY.issue("c", CLIENT, (1, 3)), "is not valid yet; compare the clocks", "refuses this process's"),
    "usage": (AUTHORITY.issue("c", SERVER), "is not for its role", "refuses this process's certificate"),
    "forged": (Authority("test CA").issue("c", CLIENT), "the other end's certificate", "refuses this process's"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_server_refuses_a_client(tmp_path, case):
    own, by_server, by_client = REFUSALS[case]
    made = credentials(tmp_path, AUTHORITY)
    server, client = outcome(*connected(made.server(), loaded(made.client(), tmp_path, *own)))
    assert server.startswith("TLS: ") and by_server in server and "\n" not in server
    assert client.startswith("TLS: ") and by_client in client and "\n" not in client


def test_a_sender_learns_why_the_other_end_has_closed(tmp_path):
    made = credentials(tmp_path, AUTHORITY)
    own = AUTHORITY.issue("c", CLIENT, (-3, -1))
    server, client = connected(made.server(), loaded(made.client(), tmp_path, *own))
    assert (server.receive(1), client.receive(1)) == (None, None)
    assert (server.receive(1), client.receive(1), client.shaken) == (None, None, True)
    with pytest.raises(ssl.SSLError):
        server.receive(1)
    server.close()
    with pytest.raises(ssl.SSLError, match="refuses this process's certificate: it has expired"):
        client.send(b"x")  # without more ado, this would be a BrokenPipeError
    client.close()


def test_a_client_refuses_a_server_of_another_ca(tmp_path):
    server = credentials(tmp_path / "a", Authority("other CA")).server()
    client = credentials(tmp_path / "b").client()
    for_server, for_client = outcome(*connected(server, client))
    assert "not signed by the CA in ca_cert_path" in for_client
    assert "its ca_cert_path is another CA" in for_server


def test_a_worker_cannot_pose_as_the_scheduler(tmp_path):
    made = credentials(tmp_path, AUTHORITY)
    server = loaded(made.server(), tmp_path, *AUTHORITY.issue("worker", CLIENT))
    assert "is not for its role" in outcome(*connected(server, made.client()))[1]


def test_a_revoked_client_is_refused(tmp_path):
    revoked = AUTHORITY.issue("revoked", CLIENT)
    AUTHORITY.revoke(tmp_path / "crl.pem", revoked[1])
    made = credentials(tmp_path, AUTHORITY, crl_path="crl.pem")
    server, client = outcome(*connected(made.server(), loaded(made.client(), tmp_path, *revoked)))
    assert server == "TLS: the other end's certificate is revoked"
    assert client == "TLS: the other end refuses this process's certificate: it is revoked"


def test_a_client_that_is_not_revoked_is_admitted(tmp_path):
    AUTHORITY.revoke(tmp_path / "crl.pem", AUTHORITY.issue("revoked", CLIENT)[1])
    made = credentials(tmp_path, AUTHORITY, crl_path="crl.pem")
    ours, theirs = connected(made.server(), made.client())
    shake(ours, theirs)
    ours.close()
    theirs.close()


def bare_client(version=None):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if version:
        context.maximum_version = version
    return context


def test_a_client_without_a_certificate_is_refused(good):
    server, client = outcome(*connected(good[0], bare_client()))
    assert server == "TLS: the other end has sent no certificate"
    assert client == "TLS: the other end asks for a certificate, and this process has sent none"


def test_an_older_version_is_refused(good):
    server, client = outcome(*connected(good[0], bare_client(ssl.TLSVersion.TLSv1_2)))
    for said in (server, client):
        assert said.startswith("TLS: the two ends have no cipher suite or TLS version in common")


def test_without_a_common_suite_the_handshake_fails(tmp_path):
    made = credentials(tmp_path, AUTHORITY, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384")
    client = bare_client(ssl.TLSVersion.TLSv1_2)
    client.set_ciphers("ECDHE-ECDSA-CHACHA20-POLY1305")
    server, client = outcome(*connected(made.server(), client))
    assert "no cipher suite or TLS version in common" in server
    assert "no cipher suite or TLS version in common" in client


def test_tls_1_2_is_used_if_cipher_list_permits_it(tmp_path):
    made = credentials(tmp_path, AUTHORITY, cipher_list="ECDHE-ECDSA-AES256-GCM-SHA384")
    client = made.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    ours, theirs = connected(made.server(), client)
    shake(ours, theirs)
    ours.send_all(b"abc", soon())
    assert theirs.receive(10) == b"abc"
    theirs.close_for_writing()
    assert ours.receive(10) == b""
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "sent",
    [b"mscomm 3" + bytes(100), b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"\xff" * 100, b"SSH-2.0-OpenSSH\r\n"],
)
def test_plain_bytes_to_a_tls_port_are_named(good, sent):
    ours, theirs = socket.socketpair()
    stream, plain = TlsStream(ours, good[0], True), ByteStream(theirs)
    plain.send_all(sent, soon())
    with pytest.raises(ssl.SSLError, match=r"^TLS: the other end sent bytes that are not TLS"):
        stream.receive(100)
    stream.close()
    plain.close()


def test_tls_to_a_plain_port_is_named(good):
    ours, theirs = socket.socketpair()
    stream, plain = TlsStream(ours, good[1], False), ByteStream(theirs)
    plain.send_all(b"mscomm 3" + bytes(100), soon())
    with pytest.raises(ssl.SSLError, match=r"^TLS: the other end sent bytes that are not TLS"):
        stream.receive(100)
    stream.close()
    plain.close()


# -- roles and jobs


@pytest.mark.parametrize(
    ("uri", "job", "refused"),
    [
        ("mscomm://night%20run/worker", "night run", ""),
        (None, "anything", ""),
        ("https://example.org/worker", "a", ""),
        ("mscomm://a/worker", "b", r"is for mscomm://a/worker, not for a worker of this job \(MSCOMM_JOB_ID=b\)"),
        ("mscomm://a/worker", "", r"not for a worker of this job \(no MSCOMM_JOB_ID\)"),
        ("mscomm://a/scheduler", "a", "is for mscomm://a/scheduler, not for a worker of this job"),
    ],
)
def test_a_certificate_that_names_a_job_is_for_that_job_and_role(tmp_path, uri, job, refused, monkeypatch):
    made = credentials(tmp_path, AUTHORITY, None, AUTHORITY.issue("c", CLIENT, uri=uri))
    monkeypatch.setenv("MSCOMM_JOB_ID", job)
    if refused:  # first on the host that has the certificate, ...
        with pytest.raises(AuthenticationError, match=refused):
            made.client()
        monkeypatch.setattr(tls_credentials, "_uris", lambda certificate: [])
    ours, theirs = connected(made.server(), made.client())
    shake(ours, theirs)  # ... then by the scheduler
    if refused:
        with pytest.raises(AuthenticationError, match=refused):
            made.check_peer(ours, WORKER, job)
    else:
        made.check_peer(ours, WORKER, job)
    ours.close()
    theirs.close()


# -- a job


def test_a_job_runs_over_tls(monkeypatch, good):
    monkeypatch.setattr(hub, "ByteStream", lambda sock: TlsStream(sock, good[0], True))
    monkeypatch.setattr(control, "ByteStream", lambda sock: TlsStream(sock, good[1], False))
    with control.Job(3, tcp=True) as job:
        members = job.joined()
        met = Waits(members[0][0].meet, "k", "barrier", [0, 1], {"x": 0}, soon())
        facts = [{"x": 0}, {"x": "y" * 50000}]
        assert members[1][0].meet("k", "barrier", [0, 1], facts[1], soon()).facts == facts
        assert met.ended().result.facts == facts
        members[2][0].leave(4)
        eventually(lambda: members[0][1].departed == [2])
        members[1][0].report(errors.Aborted("rank 1: ValueError: no data", [1]))
        symptom = errors.PeerLost("the link to rank 1 ended", [1])
        assert str(members[0][0].settle(WORLD, symptom, 1)) == "rank 1: ValueError: no data"


def test_a_peer_that_sends_records_without_data_does_not_keep_the_receiver(monkeypatch):
    """For example key updates. The receiver serves other links, too."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        stream = TlsStream(ours, context, server_side=False)
        monkeypatch.setattr(stream, "_shaken", True)
        monkeypatch.setattr(ByteStream, "receive", lambda self, most: b"a record without data")

        class Empty:
            pending = staticmethod(lambda: 0)

            def read(self, most):
                raise ssl.SSLWantReadError

        monkeypatch.setattr(stream, "_tls", Empty())
        assert stream.receive(100) is None

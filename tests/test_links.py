"""Connections: how they are dialled, accepted and authenticated, and how they pass file descriptors."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time

import pytest
from control import JOB, KEY, VERSION, listening, raised, soon
from ranks import no_descriptor_left

from mscomm import errors
from mscomm.cluster import links
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import CONTROL, DATA, Identity


def dial(listener, rank, key=KEY):
    sock = links.connect(listener.getsockname(), soon())
    try:
        links.greet(sock, key, DATA, Identity(JOB, VERSION, rank, 1), soon())
    except BaseException:
        sock.close()
        raise
    return sock


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_accept_all_brings_every_wanted_rank_in(family):
    with listening(family) as listener, contextlib.ExitStack() as stack:
        threads = [
            threading.Thread(target=lambda r=r: stack.enter_context(dial(listener, r)).send(bytes([r])))
            for r in (1, 2, 5)
        ]
        for thread in threads:
            thread.start()
        came = links.accept_all([listener], {1, 2, 5}, KEY, DATA, Identity(JOB, VERSION, 0, 1), soon())
        assert {rank: sock.recv(1) for rank, sock in came.items()} == {1: b"\1", 2: b"\2", 5: b"\5"}
        for sock in came.values():
            assert sock.get_inheritable() is False
            if family == socket.AF_INET:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            sock.close()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "value", [None, "", "here", b"/tmp/a", ["127.0.0.1", 0], ["127.0.0.1", 1 << 16], ["127.0.0.1"], [1, 2], {}, 7]
)
def test_what_is_no_address_is_not_dialled(value):
    assert not links.is_address(value)
    assert links.is_address(["127.0.0.1", 1]) and links.is_address(("::1", 65535)) and links.is_address(b"\0mscomm")


def test_connecting_waits_while_the_backlog_of_a_unix_socket_is_full():
    """Any user of the host can fill the backlog. The kernel then answers connect() with EAGAIN immediately, but mscomm
    must try again until its deadline.
    """
    with listening(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        listener.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                other = stack.enter_context(socket.socket(socket.AF_UNIX))
                other.setblocking(False)
                other.connect(listener.getsockname())
        with pytest.raises(TimeoutError, match="the listener accepts no connection"):
            links.connect(listener.getsockname(), Deadline(0.05))

        def accept():
            time.sleep(0.2)
            for _ in range(3):
                stack.enter_context(listener.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        links.connect(listener.getsockname(), soon()).close()
        thread.join()


@pytest.mark.parametrize("left", [0, 1])
def test_a_rank_without_descriptors_says_so_instead_of_waiting_for_others(left):
    """If one descriptor is left, the first connection gets it. The second connection must not displace the first."""
    with listening() as listener, contextlib.ExitStack() as stack:
        for _ in range(left + 1):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        began = time.process_time()
        mine = Identity(JOB, VERSION, 0, 1)
        lacking = no_descriptor_left()
        entered = []

        def check():  # accept_all calls check() after it has created its selector
            if not entered:
                entered.append(lacking.__enter__())
                for _ in range(left):
                    os.close(entered[0].pop())

        try:
            with pytest.raises(OSError, match="Too many open files"):
                links.accept_all([listener], {1, 2}, KEY, DATA, mine, Deadline(20), check=check)
        finally:
            lacking.__exit__(None, None, None)
        assert time.process_time() - began < 5


def test_descriptors_that_cannot_be_taken_are_a_shortage_of_the_receiver():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        links.send_fds(ours, [0, 1], soon())
        with no_descriptor_left(), pytest.raises(OSError, match="Too many open files: received 0 of 2") as caught:
            links.recv_fds(theirs, 2, soon())
        assert links.is_shortage(caught.value)


def test_a_door_without_descriptors_gives_up_the_oldest_stranger_first():
    dropped = []
    with listening() as listener, selectors.DefaultSelector() as selector:
        mine = Identity(JOB, VERSION, 0, 1)
        door = links.Door(
            selector, KEY, (DATA,), mine, {1}, lambda *_: None, turned_away=lambda *why: dropped.append(why)
        )
        door.listen(listener)
        with socket.create_connection(listener.getsockname()), socket.create_connection(listener.getsockname()):
            for ready, _ in selector.select(5):
                ready.data()
            with no_descriptor_left():
                for ready, _ in selector.select(5):
                    ready.data()
            assert len(dropped) == 1 and "needed for a newer connection" in dropped[0][1]
        door.close()


def test_a_door_without_descriptors_rests_and_opens_again():
    """The hub accepts connections through a Door. If no descriptor is left, the hub must neither spin nor end."""
    entered = []
    with listening() as listener, selectors.DefaultSelector() as selector:
        door = links.Door(
            selector, KEY, (DATA,), Identity(JOB, VERSION, 0, 1), {1}, lambda sock, *_: entered.append(sock)
        )
        door.listen(listener)
        with socket.create_connection(listener.getsockname()) as sock:
            with no_descriptor_left():
                for ready, _ in selector.select(5):
                    ready.data()
                assert selector.select(0.01) == [] and door.expire() > 0  # select() finds nothing ready: no spinning
            thread = threading.Thread(target=lambda: links.greet(sock, KEY, DATA, Identity(JOB, VERSION, 1, 1), soon()))
            thread.start()
            until = time.monotonic() + 20
            while not entered and time.monotonic() < until:
                door.expire()
                for ready, _ in selector.select(0.05):
                    ready.data()
            thread.join()
        door.close()
        assert len(entered) == 1
        entered[0].close()


def test_a_flood_of_garbage_silence_and_wrong_keys_does_not_disturb_the_wanted():
    complaints: list[str] = []
    with listening() as listener, contextlib.ExitStack() as stack:
        for i in range(150):
            nuisance = stack.enter_context(socket.create_connection(listener.getsockname()))
            if i % 3 == 0:
                nuisance.send(b"GET / HTTP/1.1\r\n\r\n")
            elif i % 3 == 1:
                nuisance.send(b"MSCM")  # only the beginning of a hello
        outcome: list[BaseException] = []

        def thief():
            try:
                dial(listener, 1, key=b"wrong" + bytes(27)).close()
            except errors.AuthenticationError as error:
                outcome.append(error)

        def rank_1():
            stack.enter_context(dial(listener, 1))

        threads = [threading.Thread(target=thief), threading.Thread(target=rank_1)]
        results = {}
        acceptor = threading.Thread(
            target=lambda: results.update(
                links.accept_all([listener], {1, 2}, KEY, DATA, Identity(JOB, VERSION, 0, 1), soon(), complaints.append)
            )
        )
        started = time.monotonic()
        for thread in (acceptor, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stack.enter_context(dial(listener, 2))
        acceptor.join()
        assert results.keys() == {1, 2}
        assert time.monotonic() - started < 3
        assert len(outcome) == 1
        assert len(complaints) <= 16
        for sock in results.values():
            sock.close()


def test_as_many_as_are_expected_may_be_in_their_hello_at_once():
    wanted = range(1, 101)
    with listening() as listener, contextlib.ExitStack() as stack:
        early = [
            stack.enter_context(links.connect(listener.getsockname(), soon())) for _ in wanted
        ]  # none of these connections sends anything yet
        results = {}
        mine = Identity(JOB, VERSION, 0, 1)
        acceptor = threading.Thread(
            target=lambda: results.update(links.accept_all([listener], wanted, KEY, DATA, mine, Deadline(20)))
        )
        acceptor.start()
        time.sleep(0.3)  # by then, all connections have probably been accepted
        for rank, sock in zip(wanted, early, strict=True):
            links.greet(sock, KEY, DATA, Identity(JOB, VERSION, rank, 1), soon())
        acceptor.join()
        assert results.keys() == set(wanted)
        for sock in results.values():
            sock.close()


def test_a_silent_connection_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(links, "HELLO_S", 0.1)
    with listening() as listener, socket.create_connection(listener.getsockname()) as silent:
        silent.send(b"MSCM")
        silent.settimeout(5)
        thread = threading.Thread(
            target=lambda: raised(
                errors.Error, links.accept_all, [listener], {1}, KEY, DATA, Identity(JOB, VERSION), Deadline(2)
            )
        )
        thread.start()
        started = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
        assert time.monotonic() - started < 1.9
        thread.join()


def test_a_rank_that_is_there_already_cannot_be_taken():
    with listening() as listener:
        results = {}
        acceptor = threading.Thread(
            target=lambda: results.update(
                links.accept_all([listener], {1, 2}, KEY, DATA, Identity(JOB, VERSION, 0, 1), soon())
            )
        )
        acceptor.start()
        with dial(listener, 1):
            with pytest.raises(errors.Error, match="rank 1 is not expected there, or is connected already"):
                dial(listener, 1)
            with dial(listener, 2):
                acceptor.join()
        for sock in results.values():
            sock.close()


def test_accept_all_names_those_that_did_not_come():
    with listening() as listener, pytest.raises(errors.CollectiveTimeout, match=r"rank 4, 7 within 0\.1 s") as caught:
        links.accept_all([listener], {4, 7}, KEY, DATA, Identity(JOB, VERSION, 0, 1), Deadline(0.1))
    assert caught.value.waiting_for == (4, 7)


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.9\r\n", b""])
def test_greet_says_that_the_other_end_is_no_mscomm(words):
    with listening() as listener, links.connect(listener.getsockname(), soon()) as sock:
        other, _ = listener.accept()
        with other:
            other.sendall(words)
            with pytest.raises(links.NotMscomm, match=r"what listens at 127.0.0.1:\d+ is not an mscomm scheduler"):
                links.greet(sock, KEY, CONTROL, Identity(), Deadline(0.2))


def test_more_descriptors_than_one_message_takes_cross_a_unix_socket():
    a, b = socket.socketpair()
    with a, b, open(os.devnull, "rb") as null:
        links.send_fds(a, [null.fileno()] * 300, soon())
        fds = links.recv_fds(b, 300, soon())
        try:
            assert len(set(fds)) == 300
            assert all(os.path.samestat(os.fstat(fd), os.fstat(null.fileno())) for fd in fds)
            assert not any(os.get_inheritable(fd) for fd in fds)
        finally:
            for fd in fds:
                os.close(fd)


def test_a_wrong_number_of_descriptors_leaks_none():
    a, b = socket.socketpair()
    with a, b, open(os.devnull, "rb") as null:
        links.send_fds(a, [null.fileno()] * 3, soon())
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(errors.Error, match=r"received 3 file descriptors where 2|received 2 file"):
            links.recv_fds(b, 2, soon())
        assert len(os.listdir("/proc/self/fd")) == before

"""Connections: how they are dialled, accepted and authenticated, and how they pass file descriptors."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time

import pytest
from control import KEY, RUN, VERSION, listening, soon
from ranks import no_descriptor_left

from mscomm import errors
from mscomm.bootstrap import rendezvous
from mscomm.cluster import links, security
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.hello import CONTROL, DATA, Identity, grouped

GROUP = grouped("0:world")
MINE = Identity(version=VERSION, rank=0, epoch=1, run=RUN, group=GROUP)


def theirs(rank):
    return MINE._replace(rank=rank, to=0)


def dial(listener, rank, key=KEY):
    sock = links.connect(listener.getsockname(), soon())
    try:
        links.greet(sock, key, DATA, theirs(rank), soon())
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
        came = links.accept_all([listener], {1, 2, 5}, KEY, DATA, MINE, soon())
        for thread in threads:
            thread.join()
        assert {rank: stream.receive(1) for rank, stream in came.items()} == {1: b"\1", 2: b"\2", 5: b"\5"}
        for stream in came.values():
            assert stream.sock.get_inheritable() is False
            if family == socket.AF_INET:
                assert stream.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            stream.close()


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
        mine = MINE
        lacking = no_descriptor_left()
        entered = []

        def check():  # accept_all calls check() after it has created its selector
            if not entered:
                entered.append(lacking.__enter__())
                for _ in range(left):
                    os.close(entered[0].pop())

        try:
            with pytest.raises(OSError, match="Too many open files"):
                links.accept_all([listener], {1, 2}, KEY, DATA, mine, soon(), check=check)
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
        mine = MINE
        door = links.Door(
            selector, {DATA: KEY}, mine, {1}, lambda *_: None, turned_away=lambda *why: dropped.append(why)
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
        door = links.Door(selector, {DATA: KEY}, MINE, {1}, lambda sock, *_: entered.append(sock))
        door.listen(listener)
        with socket.create_connection(listener.getsockname()) as sock:
            with no_descriptor_left():
                for ready, _ in selector.select(5):
                    ready.data()
                assert selector.select(0.01) == [] and door.expire() > 0  # select() finds nothing ready: no spinning
            thread = threading.Thread(target=lambda: links.greet(sock, KEY, DATA, theirs(1), soon()))
            thread.start()
            until = soon()
            while not entered and not until.passed:
                door.expire()
                for ready, _ in selector.select(0.05):
                    ready.data()
            thread.join()
        door.close()
        assert len(entered) == 1
        entered[0].close()


def turned(door, selector, until):
    """Turn the door's loop until the condition is true."""
    deadline = soon()
    while not until():
        assert not deadline.passed
        door.expire()
        for ready, _ in selector.select(0.05):
            ready.data()


def silent(stack, listener, source="127.0.0.1"):
    return stack.enter_context(socket.create_connection(listener.getsockname(), source_address=(source, 0)))


def test_a_flood_from_one_host_does_not_push_out_the_connections_of_another():
    dropped = []
    with listening() as listener, selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        door = links.Door(
            selector, {DATA: KEY}, MINE, {1}, lambda *_: None, turned_away=lambda *why: dropped.append(why[0])
        )
        door.listen(listener)
        honest = silent(stack, listener, "127.0.0.2")
        for _ in range(150):
            silent(stack, listener, "127.0.0.3")
        turned(door, selector, lambda: len(dropped) == 87)  # 151 connections, and room for 64
        assert all(name.startswith("127.0.0.3:") for name in dropped)
        door.close()
        with pytest.raises(errors.Error, match=r"just ended"):  # it was still there
            links.greet(honest, KEY, DATA, theirs(1), soon())


def test_an_honest_connection_that_had_to_go_tries_again():
    entered, dropped = [], []
    with listening() as listener, selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        door = links.Door(
            selector,
            {DATA: KEY},
            MINE,
            {1},
            lambda stream, *_: entered.append(stream),
            turned_away=lambda *why: dropped.append(why),
        )
        door.listen(listener)
        tries = []
        plain = links.greet

        def slow_greet(sock, *rest):
            tries.append(sock)
            if len(tries) == 1:  # a flood arrives before this connection has sent anything
                for _ in range(64):
                    silent(stack, listener)
                turned(door, selector, lambda: dropped)
            return plain(sock, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(links, "greet", slow_greet)
            thread = threading.Thread(
                target=lambda: entered.append(links.open_link(listener.getsockname(), KEY, DATA, theirs(1), soon()))
            )
            thread.start()
            while len(tries) < 2:
                time.sleep(0.01)
            turned(door, selector, lambda: len(entered) == 2)
            thread.join()
        assert "more than 64 connections are in their hello" in dropped[0][1]
        assert entered[0].secret == entered[1].secret != b""
        for stream in entered:
            stream.close()
        door.close()


def test_each_kind_of_complaint_is_logged_at_once_and_then_counted(monkeypatch):
    log, now = [], [100.0]
    monkeypatch.setattr(links.time, "monotonic", lambda: now[0])
    complaints = links._Complaints(log.append)
    for i in range(50):
        complaints.add("garbage", f"garbage {i}")
    complaints.add("key", "a wrong key")
    assert log == ["garbage 0", "a wrong key"]
    now[0] += links._COMPLAIN_EVERY_S
    complaints.add("key", "another wrong key")
    complaints.add("garbage", "garbage again")
    more = "of this kind since the last line about it"
    assert log[2:] == ["another wrong key", f"garbage 49 (49 {more})", "garbage again"]
    complaints.add("key", "a third wrong key")
    complaints.close()
    assert log[5:] == [f"a third wrong key (1 {more})"]


def test_a_flood_of_garbage_silence_and_wrong_keys_does_not_disturb_the_wanted(monkeypatch):
    monkeypatch.setattr(links, "HELLO_S", 600.0)  # so the wanted do not come in because the others are dropped in time
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
                links.accept_all([listener], {1, 2}, KEY, DATA, MINE, soon(), complaints.append)
            )
        )
        for thread in (acceptor, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stack.enter_context(dial(listener, 2))
        acceptor.join()
        assert results.keys() == {1, 2}
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
        mine = MINE
        acceptor = threading.Thread(
            target=lambda: results.update(links.accept_all([listener], wanted, KEY, DATA, mine, soon()))
        )
        acceptor.start()
        time.sleep(0.3)  # by then, all connections have probably been accepted
        for rank, sock in zip(wanted, early, strict=True):
            links.greet(sock, KEY, DATA, theirs(rank), soon())
        acceptor.join()
        assert results.keys() == set(wanted)
        for sock in results.values():
            sock.close()


def test_a_silent_connection_is_dropped_in_time(monkeypatch):
    monkeypatch.setattr(links, "HELLO_S", 0.1)
    with listening() as listener, socket.create_connection(listener.getsockname()) as silent:
        silent.send(b"MSCM")
        silent.settimeout(60)
        came = {}
        thread = threading.Thread(
            target=lambda: came.update(links.accept_all([listener], {1}, KEY, DATA, MINE, soon()))
        )
        thread.start()
        with contextlib.suppress(ConnectionResetError):
            assert silent.recv(1) == b""
        monkeypatch.setattr(links, "HELLO_S", 60.0)
        with dial(listener, 1):
            thread.join()
        came[1].close()


def test_a_rank_that_is_there_already_cannot_be_taken():
    with listening() as listener:
        results = {}
        acceptor = threading.Thread(
            target=lambda: results.update(links.accept_all([listener], {1, 2}, KEY, DATA, MINE, soon()))
        )
        acceptor.start()
        with dial(listener, 1):
            with pytest.raises(errors.Error, match="rank 1 is not expected there, or is connected already"):
                dial(listener, 1)
            with dial(listener, 2):
                acceptor.join()
        for sock in results.values():
            sock.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python closes the stranger's socket
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("number", range(4))
def test_a_signal_in_accept_all_stays_the_error(number, before, monkeypatch):
    """A signal handler raises KeyboardInterrupt just before or after a call of the selector."""
    calls = iter(range(1000))

    class Interrupted(selectors.DefaultSelector):
        def register(self, *args):
            return self._interrupted(super().register, *args)

        def unregister(self, *args):
            return self._interrupted(super().unregister, *args)

        def _interrupted(self, function, *args):
            now = next(calls) == number
            if now and before:
                raise KeyboardInterrupt
            result = function(*args)
            if now:
                raise KeyboardInterrupt
            return result

    monkeypatch.setattr(links.selectors, "DefaultSelector", Interrupted)
    with links.listen("127.0.0.1", 8, {}) as listener, socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"no hello")  # is accepted, and then dropped
        with pytest.raises(KeyboardInterrupt):
            links.accept_all([listener], {1}, KEY, DATA, MINE, Deadline(60 if number < 3 else 1))


def test_accept_all_names_those_that_did_not_come():
    with listening() as listener, pytest.raises(errors.CollectiveTimeout, match=r"rank 4, 7 within 0\.1 s") as caught:
        links.accept_all([listener], {4, 7}, KEY, DATA, MINE, Deadline(0.1))
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


def reached(address, deadline):
    key = security.admission_key(KEY, CONTROL)
    return rendezvous.reach([address], deadline, lambda _: key, Identity(version=VERSION), "nobody is there", "Look.")


@pytest.mark.long
def test_a_proxy_whose_scheduler_is_not_there_yet_is_tried_again():
    """Like a container's published port, it accepts each connection and closes it."""
    accepted = 0
    with listening() as listener:

        def closes():
            nonlocal accepted
            with contextlib.suppress(OSError):  # at the end of the test
                while True:
                    listener.accept()[0].close()
                    accepted += 1

        thread = threading.Thread(target=closes)
        thread.start()
        with pytest.raises(errors.BackendUnavailable, match="nobody is there within"):
            reached(listener.getsockname(), Deadline(3))
        assert accepted > 3
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_address_that_swallows_packets_does_not_keep_from_the_next_one(monkeypatch):
    """The name of a host has two addresses. The listener of the first one has a full backlog, so it does not answer."""
    monkeypatch.setattr(links, "_NEXT_ADDRESS_S", 0.2)
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        port = silent.getsockname()[1]
        for _ in range(2):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.2", port))
        names = [(socket.AF_INET, 0, 0, "", (host, port)) for host in ("127.0.0.2", "127.0.0.3")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **options: names)
        with pytest.raises(OSError, match=r"127\.0\.0\.2: its host did not answer for 0\.2 s; 127\.0\.0\.3: .*refused"):
            links.connect(("host", port), soon())
        good = stack.enter_context(socket.create_server(("127.0.0.3", port)))
        stack.enter_context(links.connect(("host", port), soon()))
        good.accept()[0].close()


def test_another_users_process_at_a_unix_socket_is_told_at_once(monkeypatch):
    def refuses(_):
        raise errors.AuthenticationError("process 7 at the other end of a unix socket runs as uid 8, this one as 9")

    monkeypatch.setattr(links, "require_same_user", refuses)
    with listening(socket.AF_UNIX) as listener, pytest.raises(errors.AuthenticationError, match="runs as uid 8"):
        reached(listener.getsockname(), soon())

"""Messages from rank to rank: what arrives and in which order, what may run in the meantime, and what ends a wait."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from concurrent.futures import CancelledError
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from ranks import TOLD, everybody_is_here, no_descriptor_left, ranks, tell, until_told
from rotated import rotated

import mscomm

SPLIT = {"MSCOMM_HOST_ID": "{host}"}
# The number of elements of a large message. Whatever the dtype, the message is announced first, and its data is sent
# after the recv is called.
LARGE = 1 << 20


def links(n):
    """Make a test run twice: with all ranks on one host (unix sockets), and with each rank on its own host (TCP)."""
    return pytest.mark.parametrize("host", [["a"] * n, [f"host {i}" for i in range(n)]], ids=["unix", "tcp"])


def value(source: int, destination: int, size: int) -> np.ndarray:
    return (np.arange(size, dtype=np.int64) * (source + 1) + destination).astype(np.float32)


def in_threads(*bodies) -> None:
    """Run the bodies at the same time, each in a thread. If a body raises an error, raise it here."""
    errors: list[BaseException] = []

    def run(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def wait_until(true) -> None:
    """Wait until true() is true. Only the test's own timeout limits the wait."""
    while not true():
        time.sleep(0.005)


def until_group_breaks() -> None:
    wait_until(lambda: mscomm.job.resolve(None).core.failure() is not None)


# --- what arrives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, LARGE])
@links(2)
@ranks(2, env=SPLIT)
def test_messages_that_nobody_waits_for_move_all_the_same(rank, group, host, size):
    for pause in (0, 0.02, 0.1):  # 0.1: the mailbox's thread sleeps by then
        out = np.zeros(size, np.float32)
        works = [mscomm.recv(out, 1 - rank, async_op=True)]
        works.append(mscomm.send(value(rank, 1 - rank, size), 1 - rank, async_op=True))
        while not all(work.done() for work in works):
            time.sleep(0.001)
        assert (out == value(1 - rank, rank, size)).all()
        time.sleep(pause)


@links(2)
@ranks(2, env=SPLIT)
def test_threads_that_wait_for_works_and_threads_that_do_not(rank, group, host):
    peer = 1 - rank

    def talk(tag, late):
        for size in (1, 5000, LARGE // 8) * 3:
            out = np.zeros(size, np.float32)
            works = [mscomm.recv(out, peer, tag, async_op=True)]
            works.append(mscomm.send(value(rank, peer, size), peer, tag, async_op=True))
            while late and not all(work.done() for work in works):
                time.sleep(0.001)
            for work in works:
                work.wait()
            assert (out == value(peer, rank, size)).all()

    def synchronous():
        for size in (1, LARGE // 8) * 3:
            out = np.zeros(size, np.float32)
            mscomm.sendrecv(value(rank, peer, size), peer, out, peer, send_tag=9, recv_tag=9)
            assert (out == value(peer, rank, size)).all()

    in_threads(synchronous, *(lambda tag=tag: talk(tag, tag % 2) for tag in range(4)))


@ranks(2)
def test_a_message_that_is_waited_for_too_briefly_goes_on(rank, group):
    out = np.zeros(3)
    mscomm.sendrecv(np.ones(3), 1 - rank, out, 1 - rank)
    if rank == 0:
        work = mscomm.recv(out, 1, async_op=True)
        with pytest.raises(TimeoutError, match="it is still running"):
            work.wait(timeout=0.02)
        assert not work.done()
        tell("too brief")
        work.wait()
        assert (out == 7).all()
    else:
        until_told("too brief")
        mscomm.send(np.full(3, 7.0), 0)


@links(2)
@ranks(2, env=SPLIT)
def test_ping_pong(rank, group, host):
    for size in (1, 0, 1000, 5000, LARGE):
        there = value(0, 1, size)
        if rank == 0:
            assert mscomm.send(there, 1, tag=3) is None
            back = mscomm.recv(np.zeros(size, np.float32), 1)
            assert np.array_equal(back, there * 2)
        else:
            out = np.zeros(size, np.float32)
            assert mscomm.recv(out, 0, tag=3) is out
            mscomm.send(out * 2, 0)


@links(4)
@ranks(4, env=SPLIT)
def test_all_pairs_at_once_in_both_directions(rank, group, host):
    others = [peer for peer in range(4) if peer != rank]
    for size in (3, 100_000):
        outs = {peer: np.zeros(size, np.float32) for peer in others}
        sends = [mscomm.send(value(rank, peer, size), peer, async_op=True) for peer in others]
        works = {peer: mscomm.recv(outs[peer], peer, async_op=True) for peer in others}
        for peer in others:
            assert works[peer].wait(60) is outs[peer]
            assert np.array_equal(outs[peer], value(peer, rank, size))
        assert [work.wait(60) for work in sends] == [None] * 3


@ranks(2)
def test_first_sends_to_each_other_at_the_same_moment(rank, group):
    # After the barrier, both ranks call send() at about the same time, and each sets up its own link to the peer. The
    # sends do not deadlock, because send() of a small message does not wait for the recv.
    mscomm.barrier()
    mscomm.send(np.full(3, rank), 1 - rank)
    assert (mscomm.recv(np.zeros(3, int), 1 - rank) == 1 - rank).all()


@ranks(2)
def test_tags_are_received_in_any_order_and_each_keeps_its_own(rank, group):
    for size in (2, 50_000):
        if rank == 0:
            works = [mscomm.send(np.full(size, i), 1, tag=i % 5, async_op=True) for i in range(20)]
            for work in works:
                work.wait()
        else:
            for tag in (4, 0, 3, 2**31 - 1, 1, 2):
                for turn in range(4 if tag < 5 else 0):
                    assert (mscomm.recv(np.zeros(size, int), 0, tag=tag) == tag + 5 * turn).all()
    if rank == 0:
        mscomm.send(np.ones(1), 1, tag=2**31 - 1)
    else:
        mscomm.recv(np.ones(1), 0, tag=2**31 - 1)


@links(2)
@ranks(2, env=SPLIT)
def test_16_MiB_both_ways_at_the_same_time(rank, group, host):
    x, out = np.full(4 << 20, rank, np.float32), np.empty(4 << 20, np.float32)
    work = mscomm.send(x, 1 - rank, async_op=True)
    assert mscomm.recv(out, 1 - rank) is out
    work.wait()
    assert (out == 1 - rank).all()


@ranks(2)
def test_strided_arrays_are_sent_and_received_in_C_order(rank, group):
    x = np.arange(24, dtype=np.int16).reshape(4, 6)
    if rank == 0:
        for view in (x.T, x[::2, 1::2], x[::-1]):
            mscomm.send(view, 1)
    else:
        assert np.array_equal(mscomm.recv(np.zeros((6, 4), np.int16), 0), x.T)
        wide = np.full((2, 6), -1, np.int16)
        out = wide[:, ::2]
        assert mscomm.recv(out, 0) is out
        assert np.array_equal(wide[:, ::2], x[::2, 1::2]) and (wide[:, 1::2] == -1).all()
        wide = np.full((4, 12), -1, np.int16)
        out = wide[:, ::2]
        work = mscomm.recv(out, mscomm.ANY_SOURCE, mscomm.ANY_TAG, async_op=True)
        assert work.wait() is out and work.matched() == (0, 0)
        assert np.array_equal(wide[:, ::2], x[::-1])


@ranks(2)
def test_every_dtype_arrives_as_it_is(rank, group):
    for number, name in enumerate(mscomm._core.dtypes()):
        name = getattr(ml_dtypes, name, name)
        x = np.arange(1, 8).astype(name)
        if rank == 0:
            mscomm.send(x, 1, tag=number)
        else:
            assert np.array_equal(mscomm.recv(np.zeros(7, name), 0, tag=number), x)


@ranks(2)
def test_shapes_of_as_many_elements_fit_and_scalars_too(rank, group):
    if rank == 0:
        mscomm.send(np.arange(6), 1)
        mscomm.send(np.array(2.5), 1)
    else:
        assert mscomm.recv(np.zeros((2, 3), int), 0).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert mscomm.recv(np.zeros(()), 0) == 2.5


@ranks(1)
def test_a_rank_sends_to_itself(rank, group):
    for size in (0, 3, LARGE):
        out = np.zeros(size, np.float32)
        work = mscomm.recv(out, 0, tag=1, async_op=True)
        mscomm.send(value(0, 0, size), 0, tag=1)
        assert work.wait() is out and np.array_equal(out, value(0, 0, size))
        sending = mscomm.send(value(0, 1, size), 0, async_op=True)
        assert np.array_equal(mscomm.recv(out, 0), value(0, 1, size))
        sending.wait()


@ranks(1)
def test_a_send_to_itself_returns_and_keeps_a_copy(rank, group):
    for size in (0, 3, LARGE):
        x = value(0, 0, size)
        mscomm.send(x, 0, tag=2)
        x += 1  # after send() returns, the caller may change x
        mscomm.send(x, 0, tag=1)
        out = np.zeros(size, np.float32)
        assert np.array_equal(mscomm.recv(out, 0, tag=1), value(0, 0, size) + 1)
        assert np.array_equal(mscomm.recv(out, mscomm.ANY_SOURCE, mscomm.ANY_TAG), value(0, 0, size))


@ranks(8)
def test_a_ring_of_eight_shifts_a_thousand_times(rank, group):
    x, out = np.full(16, rank), np.zeros(16, int)
    for _ in range(1000):
        work = mscomm.send(x, (rank + 1) % 8, async_op=True)
        mscomm.recv(out, (rank - 1) % 8)
        work.wait()
        x, out = out, x
    assert (x == rank).all()  # x has gone 125 times around the ring


# --- any source, any tag --------------------------------------------------------------------------------------------


@links(3)
@ranks(3, env=SPLIT)
def test_any_source_and_tag_take_what_comes_and_say_what_it_was(rank, group, host):
    for size in (5, 50_000):
        if rank:
            for tag in (rank, 10, 2**31 - 1):
                mscomm.send(value(rank, tag, size), 0, tag=tag)
        else:
            seen = {1: [], 2: []}
            for _ in range(6):
                status, out = mscomm.Status(), np.zeros(size, np.float32)
                assert mscomm.recv(out, mscomm.ANY_SOURCE, mscomm.ANY_TAG, status=status) is out
                assert np.array_equal(out, value(status.source, status.tag, size)) and status.count == size
                seen[status.source].append(status.tag)
            # Messages from one source arrive in the order in which the source sent them.
            assert seen == {source: [source, 10, 2**31 - 1] for source in (1, 2)}
        mscomm.barrier()


@ranks(3)
def test_the_recv_that_was_called_first_gets_the_first_that_fits(rank, group):
    for size in (1, 50_000):
        outs = [np.zeros(size) for _ in range(5)]
        asked = [(2, 7), (mscomm.ANY_SOURCE, 7), (1, mscomm.ANY_TAG), (mscomm.ANY_SOURCE, mscomm.ANY_TAG), (1, 7)]
        if rank == 0:
            status = [mscomm.Status() for _ in asked]
            works = [
                mscomm.recv(out, source, tag, status=one, async_op=True)
                for out, (source, tag), one in zip(outs, asked, status, strict=True)
            ]
        mscomm.barrier()  # by now all recvs have been called
        if rank == 1:
            for i, tag in enumerate((7, 7, 8, 7)):
                mscomm.send(np.full(size, i + 1.0), 0, tag=tag)
        elif rank == 0:
            for i, expected in ((1, 1), (2, 2), (3, 3), (4, 4)):
                assert (works[i].wait(60) == expected).all() and status[i].source == 1
            assert [one.tag for one in status] == [None, 7, 7, 8, 7]
        mscomm.barrier()
        if rank == 2:
            mscomm.send(np.full(size, 5.0), 0, tag=7)
        elif rank == 0:
            assert (works[0].wait(60) == 5).all() and (status[0].source, status[0].tag) == (2, 7)


@ranks(3)
def test_ranks_that_send_without_end_do_not_starve_the_others(rank, group):
    # As in a task farm, rank 0 receives from any rank. It must also receive from rank 2, although rank 1 keeps sending.
    if rank == 0:
        status, heard = mscomm.Status(), set()
        while heard != {1, 2}:
            mscomm.recv(np.zeros(1), mscomm.ANY_SOURCE, status=status)
            heard.add(status.source)
        mscomm.send(np.zeros(1), 1, tag=1)
        left = mscomm.Status()
        while left.tag != 2:
            mscomm.recv(np.zeros(1), 1, mscomm.ANY_TAG, status=left)
    elif rank == 1:
        stop = mscomm.recv(np.zeros(1), 0, tag=1, async_op=True)
        while not stop.done():
            mscomm.send(np.ones(1), 0)
        mscomm.send(np.ones(1), 0, tag=2)
    else:
        mscomm.send(np.ones(1), 0)
    mscomm.barrier()


@ranks(4)
def test_any_source_of_a_group_is_a_rank_in_the_group(rank, group):
    pair = mscomm.create_group("pair", [3, 1])
    if rank == 1:
        mscomm.send(np.ones(1), 0, tag=5, group="pair")
    elif rank == 3:
        status = mscomm.Status()
        mscomm.recv(np.zeros(1), mscomm.ANY_SOURCE, mscomm.ANY_TAG, status=status, group="pair")
        assert status == mscomm.Status(source=1, tag=5, count=1)
        mscomm.destroy_group(pair)
    mscomm.barrier()


# --- send and receive in one call -----------------------------------------------------------------------------------


@links(3)
@ranks(3, env=SPLIT)
def test_sendrecv_around_a_ring_and_in_pairs(rank, group, host):
    right, left = (rank + 1) % 3, (rank - 1) % 3
    for size in (0, 3, LARGE):
        out = np.zeros(size, np.float32)
        assert mscomm.sendrecv(value(rank, right, size), right, out, left, 4, 4) is out
        assert np.array_equal(out, value(left, rank, size))
        # Each rank first exchanges a message with itself. Then rank 0 calls sendrecv, which sends to rank 1 and
        # receives from any rank. Rank 1 calls recv, and rank 2 calls send.
        status = mscomm.Status()
        mscomm.sendrecv(value(rank, 9, size), rank, out, rank, send_tag=1, recv_tag=1)
        assert np.array_equal(out, value(rank, 9, size))
        if rank == 0:
            mscomm.sendrecv(value(0, 1, size), 1, out, mscomm.ANY_SOURCE, 3, mscomm.ANY_TAG, status=status)
            assert (status.source, status.tag, status.count) == (2, 6, size)
            assert np.array_equal(out, value(2, 0, size))
        elif rank == 1:
            assert np.array_equal(mscomm.recv(out, 0, 3), value(0, 1, size))
        else:
            mscomm.send(value(2, 0, size), 0, 6)


@ranks(2)
def test_sendrecv_of_other_shapes_dtypes_and_strides(rank, group):
    out = np.zeros((4, 2), np.int32)[:, ::2]
    x = np.arange(4, dtype=np.int32).reshape(2, 2).T if rank == 0 else np.ones(3, np.float64)
    got = mscomm.sendrecv(x, 1 - rank, np.zeros(3) if rank == 0 else out, 1 - rank)
    assert got.tolist() == ([1, 1, 1] if rank == 0 else [[0], [2], [1], [3]])


# --- during other calls ---------------------------------------------------------------------------------------------


@links(2)
@ranks(2, env=SPLIT)
def test_one_thread_sends_another_receives_a_third_reduces(rank, group, host):
    def sends():
        for i in range(50):
            mscomm.send(np.full(1 + i * 1000, i), 1 - rank, tag=1)

    def receives():
        for i in range(50):
            assert (mscomm.recv(np.zeros(1 + i * 1000, int), 1 - rank, tag=1) == i).all()

    def reduces():
        for i in range(50):
            assert (mscomm.all_reduce(np.full(1000, rank + i)) == 2 * i + 1).all()

    in_threads(sends, receives, reduces)


@ranks(2)
def test_many_threads_share_a_pair_of_ranks(rank, group):
    def worker(tag):
        for i in range(20):
            if (tag % 2 == 0) == (rank == 0):
                mscomm.send(np.full(1 + 3000 * (i % 3), i), 1 - rank, tag=tag)
            else:
                assert (mscomm.recv(np.zeros(1 + 3000 * (i % 3), int), 1 - rank, tag=tag) == i).all()

    in_threads(*(lambda tag=tag: worker(tag) for tag in range(6)))


@links(4)
@ranks(4, env=SPLIT)
def test_ranks_are_those_in_the_group_and_groups_do_not_mix(rank, group, host):
    pair = mscomm.create_group(f"pair {rank % 2}", [3, 1] if rank % 2 else [2, 0])
    other = 1 - pair.rank
    world = pair.ranks[other]
    # Both groups use the same tag. The world's message is sent first, but received last.
    first = mscomm.send(np.full(3, 100 + rank), world, async_op=True)
    second = mscomm.send(np.full(3, 200 + rank), other, group=pair, async_op=True)
    assert (mscomm.recv(np.zeros(3, int), other, group=pair.name) == 200 + world).all()
    assert (mscomm.recv(np.zeros(3, int), world) == 100 + world).all()
    first.wait()
    second.wait()
    mscomm.destroy_group(pair)
    mscomm.send(np.full(1, rank), world)
    assert mscomm.recv(np.zeros(1, int), world) == world


@links(2)
@ranks(2, env=SPLIT)
def test_what_was_sent_before_release_arrives(rank, group, host):
    # Rank 0 sends and then leaves, perhaps before the link is made. Rank 1 must still receive the message.
    if rank == 0:
        mscomm.send(value(0, 1, 1000), 1)
        return
    assert np.array_equal(mscomm.recv(np.zeros(1000, np.float32), 0), value(0, 1, 1000))
    with pytest.raises(mscomm.PeerLost, match=r"rank 0 .*has left") as caught:
        mscomm.recv(np.zeros(1), 0)
    assert caught.value.ranks == (0,)


@ranks(2)
def test_a_work_says_whether_it_has_ended(rank, group):
    out = np.zeros(3)
    if rank == 1:
        work = mscomm.recv(out, 0, async_op=True)
        assert not work.done() and work.exception() is None
        with pytest.raises(TimeoutError, match="is still running"):
            work.wait(0.05)
        mscomm.barrier()
        assert work.wait(60) is out and work.done() and work.is_completed() and (out == 1).all()
    else:
        mscomm.barrier()
        mscomm.send(np.ones(3), 1, async_op=True).wait()


@ranks(2)
def test_only_a_recv_without_a_message_is_cancelled(rank, group):
    late, came = np.zeros(3), np.zeros(3)
    if rank == 1:
        work = mscomm.recv(late, mscomm.ANY_SOURCE, 7, async_op=True)
        arrived = mscomm.recv(came, 0, 8, async_op=True)
        call = mscomm.barrier(async_op=True)
        call.wait()
        assert work.cancel() and work.done() and not work.cancel()
        for _ in range(2):
            with pytest.raises(CancelledError, match="recv from any rank, tag 7 was cancelled before a message came"):
                work.wait()
        assert isinstance(work.exception(), CancelledError)
        assert not arrived.cancel() and not call.cancel() and (arrived.wait() == 2).all()
        mscomm.barrier()
        assert (mscomm.recv(late, 0, 7) == 1).all()  # the cancelled recv has not taken it
    else:
        sent = mscomm.send(np.full(3, 2.0), 1, 8, async_op=True)
        mscomm.barrier()
        assert not sent.cancel()
        mscomm.barrier()
        mscomm.send(np.ones(3), 1, 7)


@pytest.mark.parametrize("way", ["release", "destroy_group"])
@ranks(2)
def test_recvs_that_nobody_answers_end_when_their_rank_leaves(rank, group, way):
    pair = mscomm.create_group("pair", [0, 1]) if way == "destroy_group" else None
    if rank == 1:
        mscomm.send(np.ones(3), 0, 9, group=pair)
        mscomm.barrier()
        until_told("rank 0 has left")
        return
    out, came = np.zeros(3), np.zeros(3)
    works = [mscomm.recv(out, 1, tag, group=pair, async_op=True) for tag in range(5)]
    arrived = mscomm.recv(came, 1, 9, group=pair, async_op=True)
    mscomm.barrier()
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mscomm.log.warn", told.append)
        mscomm.destroy_group(pair) if pair else mscomm.release()
    tell("rank 0 has left")
    assert (arrived.wait() == 1).all()
    for work in works:
        with pytest.raises(CancelledError):
            work.wait()
    assert (
        "no message had come for recv from rank 1, tag 0; recv from rank 1, tag 1; recv from rank 1, tag 2" in told[0]
    )
    assert "tag 2 and 2 more when this rank left" in told[0]


@ranks(1)
def test_a_signal_ends_the_cancelling_of_recvs(rank, group):
    class Stop(Exception):
        pass

    def handler(*_: object) -> None:
        raise Stop

    alone = mscomm.create_group("alone", [0])
    for tag in range(3):
        mscomm.recv(np.zeros(3), 0, tag, group=alone, async_op=True)
    alone.core.expect_incoming(0)  # as if a link were being set up, for which destroy_group() waits up to 5 s
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    began = time.monotonic()
    with pytest.raises(Stop):
        mscomm.destroy_group(alone)
    assert time.monotonic() - began < 4
    mscomm.abort("enough", alone)  # so that the end of this process does not wait for the link, either


@ranks(2)
def test_a_waiting_recv_uses_no_cpu(rank, group):
    mscomm.barrier()
    if rank == 0:
        time.sleep(2)
        mscomm.send(np.ones(1), 1)
        return
    before = time.process_time()
    mscomm.recv(np.zeros(1), 0)
    assert time.process_time() - before < 0.3


@ranks(2)
def test_a_forked_child_can_neither_send_nor_receive_and_harms_nobody(rank, group):
    other = 1 - rank
    work = mscomm.recv(np.zeros(2), other, tag=1, async_op=True)  # an asynchronous recv starts the mailbox's thread
    mscomm.send(np.ones(1), other)
    mscomm.recv(np.zeros(1), other)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mscomm.send(np.ones(1), other)
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    mscomm.send(np.ones(2), other, tag=1)
    assert (work.wait() == 1).all()


# --- wrong calls ----------------------------------------------------------------------------------------------------


@ranks(2)
def test_wrong_arguments_send_nothing_and_break_nothing(rank, group):
    x, other = np.ones(3), 1 - rank
    read_only = np.ones(3)
    read_only.flags.writeable = False
    wrong = [
        (lambda: mscomm.send(x, 2), ValueError, "send: dst 2 is not a rank of group world, which has the ranks 0 to 1"),
        (lambda: mscomm.send(x, -1), ValueError, "send: dst -1"),
        (lambda: mscomm.recv(x, 2), ValueError, "recv: src 2"),
        (lambda: mscomm.send(x, "1"), TypeError, "send: dst '1' is not an integer"),
        (lambda: mscomm.send(x, other, tag=-1), ValueError, r"send: tag -1 is not in 0 to 2\^31 - 1"),
        (lambda: mscomm.recv(x, other, tag=2**31), ValueError, "recv: tag 2147483648"),
        (lambda: mscomm.recv(x, other, tag=1.5), TypeError, "recv: tag 1.5 is not an integer"),
        # -1 must not mean "any source", because a program may compute it as `rank - 1` on rank 0.
        (lambda: mscomm.recv(x, -1), ValueError, "recv: src -1 is not a rank"),
        (lambda: mscomm.recv(x, other, tag=-1), ValueError, "recv: tag -1"),
        (lambda: mscomm.recv(x, mscomm.ANY_TAG), TypeError, "recv: src mscomm.ANY_TAG is not an integer"),
        (lambda: mscomm.send(x, mscomm.ANY_SOURCE), TypeError, "send: dst mscomm.ANY_SOURCE is not an integer"),
        (lambda: mscomm.send(x, other, mscomm.ANY_TAG), TypeError, "send: tag mscomm.ANY_TAG is not an integer"),
        (lambda: mscomm.recv(x, other, status={}), TypeError, "recv: status is a dict, not an mscomm.Status"),
        (lambda: mscomm.sendrecv(x, other, x, other), ValueError, "sendrecv: x and out overlap"),
        (lambda: mscomm.sendrecv(x, 2, x.copy(), other), ValueError, "sendrecv: dst 2"),
        (lambda: mscomm.sendrecv(x, other, x.copy(), 2), ValueError, "sendrecv: src 2"),
        (lambda: mscomm.sendrecv(x, other, x.copy(), other, -1), ValueError, "sendrecv: send_tag -1"),
        (lambda: mscomm.sendrecv(x, other, x.copy(), other, 0, -1), ValueError, "sendrecv: recv_tag -1"),
        (lambda: mscomm.sendrecv(x, other, read_only, other), TypeError, "sendrecv: out is read-only"),
        (lambda: mscomm.send([1, 2], other), TypeError, "send: x is a list"),
        (lambda: mscomm.recv([1, 2], other), TypeError, "recv: out is a list"),
        (lambda: mscomm.recv(read_only, other), TypeError, "recv: out is read-only"),
        (lambda: mscomm.send(np.ones(3, ">f4"), other), TypeError, "big-endian"),
        (lambda: mscomm.send(np.array(["a"]), other), TypeError, "dtype"),
        (lambda: mscomm.send(x, other, timeout=0), ValueError, "timeout"),
        (lambda: mscomm.recv(x, other, timeout="soon"), TypeError, "timeout"),
        (lambda: mscomm.recv(x, other, group="no such group"), ValueError, "no such group"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()
    mscomm.send(read_only, other)
    assert (mscomm.recv(np.zeros(3), other) == 1).all()


@pytest.mark.parametrize("size", [3, 100_000])
@pytest.mark.parametrize("dtype, more", [("int32", 0), ("float32", 1)])
@ranks(2)
def test_another_dtype_or_size_is_a_mismatch_on_both_that_names_both(rank, group, size, dtype, more):
    words = rf"rank 1 .*recv from rank 0, tag 5: expects {dtype} x {size + more}, rank 0 sent float32 x {size}"
    with pytest.raises(mscomm.Mismatch, match=words):
        if rank == 0:
            mscomm.send(np.ones(size, np.float32), 1, tag=5)
            mscomm.barrier()
        else:
            mscomm.recv(np.ones(size + more, dtype), 0, tag=5)
    with pytest.raises(mscomm.Mismatch, match=words):
        mscomm.send(np.ones(1), 1 - rank)


@pytest.mark.parametrize("size", [3, 100_000])
@ranks(2)
def test_a_mismatch_of_a_recv_from_any_names_what_came(rank, group, size):
    words = rf"rank 1 .*recv from any rank, any tag: expects int8 x 2, rank 0 sent float32 x {size} with tag 5"
    with pytest.raises(mscomm.Mismatch, match=words) as caught:
        if rank == 0:
            mscomm.send(np.ones(size, np.float32), 1, tag=5)
            mscomm.barrier()
        else:
            mscomm.recv(np.ones(2, np.int8), mscomm.ANY_SOURCE, mscomm.ANY_TAG)
    assert caught.value.ranks == (0,)


# --- what ends a wait -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", rotated(["recv", "send", "async recv", "async send"], few=2))
@links(3)
@ranks(3, env=SPLIT)
def test_a_deadline_names_the_peer_and_all_ranks_raise_it(rank, group, how, host):
    x = np.ones(LARGE, np.uint8)
    names = r"rank 0 .*(send to|recv from) rank 2, tag 9 \(1 MiB\) did not end within 1 s: waiting for rank 2 \(pid"
    with pytest.raises(mscomm.CollectiveTimeout, match=names) as caught:
        if rank != 0:
            until_group_breaks()
            mscomm.barrier()
        elif how == "recv":
            mscomm.recv(x, 2, tag=9, timeout=1)
        elif how == "send":
            mscomm.send(x, 2, tag=9, timeout=1)
        elif how == "async recv":
            mscomm.recv(x, 2, tag=9, timeout=1, async_op=True).wait()
        else:
            mscomm.send(x, 2, tag=9, timeout=1, async_op=True).wait()
    assert caught.value.waiting_for == (2,)
    with pytest.raises(mscomm.CollectiveTimeout, match=names):
        mscomm.recv(x, 1, tag=9)


@pytest.mark.parametrize("how", ["send", "async", "sendrecv"])
@ranks(2)
def test_the_time_that_a_link_takes_counts(rank, group, how):
    if rank == 1:
        until_group_breaks()
        return
    x, message_links = np.ones(LARGE, np.uint8), mscomm.job.resolve(None)._links
    reach = message_links.reach

    def slowly(*given):
        reach(*given)
        mscomm.group.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 600)  # for the end of _reach()

    message_links.reach = slowly
    with pytest.raises(mscomm.CollectiveTimeout, match="did not end within 600 s"):
        if how == "send":
            mscomm.send(x, 1, timeout=600)
        elif how == "async":
            mscomm.send(x, 1, timeout=600, async_op=True).wait()
        else:
            mscomm.sendrecv(x, 1, np.empty_like(x), 1, timeout=600)


@pytest.mark.parametrize("how", rotated(["recv", "async", "sendrecv"], few=2))
@ranks(3)
def test_a_deadline_of_a_recv_from_any_names_all_that_could_have_sent(rank, group, how):
    names = r"recv from any rank, tag 9 \(4 B\) did not end within 1 s: waiting for any of rank 1 \(.*, rank 2 \("
    with pytest.raises(mscomm.CollectiveTimeout, match=names) as caught:
        if rank != 0:
            until_group_breaks()
            mscomm.barrier()
        elif how == "recv":
            mscomm.recv(np.zeros(1, np.int32), mscomm.ANY_SOURCE, tag=9, timeout=1)
        elif how == "async":
            mscomm.recv(np.zeros(1, np.int32), mscomm.ANY_SOURCE, tag=9, timeout=1, async_op=True).wait()
        else:
            mscomm.sendrecv(np.ones(1), 1, np.zeros(1, np.int32), mscomm.ANY_SOURCE, 0, 9, timeout=1)
    assert caught.value.waiting_for == (1, 2)


@links(3)
@ranks(3, env=SPLIT)
def test_a_recv_from_any_ends_when_all_others_have_left_and_not_before(rank, group, host):
    if rank == 1:
        mscomm.send(np.full(1, 1), 0)  # rank 1 leaves immediately, perhaps before its message arrives
    if rank:
        if rank == 2:
            mscomm.recv(np.zeros(1), 0, tag=1)
            mscomm.send(np.full(1, 2), 0)
        return
    assert mscomm.recv(np.zeros(1, int), mscomm.ANY_SOURCE) == 1
    work = mscomm.recv(np.zeros(1, int), mscomm.ANY_SOURCE, async_op=True)
    time.sleep(1)  # by then, rank 1 has probably left, but rank 2 can still send
    assert not work.done()
    mscomm.send(np.zeros(1), 2, tag=1)
    assert work.wait(60) == 2
    words = r"has left the job.*recv from any rank, any tag .* from one of them"
    with pytest.raises(mscomm.PeerLost, match=words) as lost:
        mscomm.recv(np.zeros(1), mscomm.ANY_SOURCE, mscomm.ANY_TAG)
    assert lost.value.ranks == (1, 2)


@ranks(3, expect={2: -signal.SIGKILL})
def test_a_killed_rank_ends_a_recv_from_any(rank, group):
    mscomm.barrier()
    everybody_is_here()
    if rank == 2:
        time.sleep(0.3)  # by then, rank 0 is probably waiting
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(mscomm.PeerLost, match="rank 2 ") as caught:
        if rank == 0:
            mscomm.recv(np.zeros(1), mscomm.ANY_SOURCE)
        until_group_breaks()
        mscomm.barrier()
    assert caught.value.ranks == (2,)


@ranks(3)
def test_a_sendrecv_whose_send_fails_does_not_wait_for_its_recv(rank, group):
    if rank == 1:
        mscomm.recv(np.zeros(1), 0)  # makes the link to rank 0; rank 1 then leaves the job
    elif rank == 2:
        until_group_breaks()
    else:
        mscomm.send(np.zeros(1), 1)
        with pytest.raises(mscomm.PeerLost, match="send to rank 1, tag 0") as caught:
            mscomm.sendrecv(np.zeros(LARGE), 1, np.zeros(3), 2, timeout=60)
        assert caught.value.ranks == (1,)


@ranks(1)
def test_a_recv_from_itself_that_nobody_sends_says_so(rank, group):
    words = r"recv from rank 0, tag 3 \(8 B\) did not end within 0.3 s: waiting for rank 0 .* is this rank itself"
    with pytest.raises(mscomm.CollectiveTimeout, match=words):
        mscomm.recv(np.zeros(1), 0, tag=3, timeout=0.3)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("how", ["recv", "send"])
@links(3)
@ranks(3, env=SPLIT, expect={2: -signal.SIGKILL})
def test_a_killed_peer_ends_the_wait_by_its_name(rank, group, how, linked, host):
    x = np.ones(LARGE, np.uint8)
    if linked:
        for peer in {0, 1, 2} - {rank}:
            mscomm.send(x[:1], peer)
        for peer in {0, 1, 2} - {rank}:
            mscomm.recv(x[:1], peer)
    mscomm.barrier()
    everybody_is_here()
    if rank == 2:
        time.sleep(0.3)  # by then, the others are probably waiting
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(mscomm.PeerLost, match="rank 2 ") as caught:
        if rank == 1:
            until_group_breaks()
            mscomm.barrier()
        elif how == "recv":
            mscomm.recv(x, 2)
        else:
            mscomm.send(x, 2)
    assert caught.value.ranks == (2,)


@pytest.mark.parametrize("how", ["recv", "send", "first send"])
@links(2)
@ranks(2, env=SPLIT)
def test_a_peer_that_left_ends_the_wait(rank, group, how, host):
    if how == "send":
        if rank == 1:
            mscomm.recv(np.zeros(1), 0)
        else:
            mscomm.send(np.zeros(1), 1)
    if rank == 1:
        return  # the exit handler calls release()
    with pytest.raises(mscomm.PeerLost, match=r"rank 1 \(pid \d+ on host .*\) has left the job") as caught:
        if how == "recv":
            mscomm.recv(np.zeros(3), 1)
        else:
            mscomm.send(np.zeros(LARGE), 1)
    assert caught.value.ranks == (1,)


@ranks(2)
def test_a_send_into_a_group_that_the_peer_has_destroyed_says_so(rank, group):
    pair = mscomm.create_group("pair", [0, 1])
    if rank == 1:
        mscomm.destroy_group(pair)
    mscomm.barrier()
    if rank == 0:
        with pytest.raises(mscomm.PeerLost, match=r"rank 1 .*has destroyed the group"):
            mscomm.send(np.zeros(3), 1, group=pair)
    mscomm.barrier()  # the world still works


@pytest.mark.parametrize("how", ["recv", "send", "async"])
@ranks(3)
def test_abort_elsewhere_wakes_who_waits(rank, group, how):
    x = np.ones(LARGE, np.uint8)
    mscomm.barrier()
    everybody_is_here()
    if rank == 2:
        time.sleep(0.3)  # by then, the others are probably waiting
        mscomm.abort("no more data")
        return
    with pytest.raises(mscomm.Aborted, match="rank 2 called abort: no more data"):
        if how == "recv":
            mscomm.recv(x, 1 - rank)
        elif how == "send":
            mscomm.send(x, 1 - rank)
        else:
            mscomm.recv(x, 1 - rank, async_op=True).wait()


def until_in_a_message(group: mscomm.Group | None = None) -> None:
    """Wait until a thread has been in a send or recv of the group for 0.2 s."""
    core, seen = mscomm.job.resolve(group).core, 0
    while seen < 20:
        seen = seen + 1 if " and waits in " in core.where()[2] else 0
        time.sleep(0.01)


def interrupt_in_a_message() -> None:
    """Wait until the main thread is waiting in send or recv. Then send SIGINT, as Ctrl-C does."""
    until_in_a_message()
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("how", ["recv", "send"])
@ranks(2)
def test_ctrl_c_ends_a_wait_and_breaks_the_group(rank, group, how):
    x = np.ones(LARGE, np.uint8)
    if rank == 0:
        threading.Thread(target=interrupt_in_a_message, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            mscomm.recv(x, 1) if how == "recv" else mscomm.send(x, 1)
    else:
        until_group_breaks()
    with pytest.raises(mscomm.Aborted, match=r"rank 0 .*interrupted in (send to|recv from) rank 1, tag 0 \(1 MiB\)"):
        mscomm.barrier()


@ranks(2)
def test_a_failed_collective_ends_messages_too(rank, group):
    def receives():
        with pytest.raises(mscomm.Mismatch, match="different calls"):
            mscomm.recv(np.zeros(1), 1 - rank)

    def reduces():
        with pytest.raises(mscomm.Mismatch, match="different calls"):
            mscomm.all_reduce(np.zeros(3 + rank))

    in_threads(receives, reduces)


@ranks(2)
def test_a_failed_message_ends_collectives_too(rank, group):
    mscomm.barrier()
    everybody_is_here()
    if rank == 0:
        with pytest.raises(mscomm.CollectiveTimeout, match="recv from rank 1"):
            mscomm.recv(np.zeros(1), 1, timeout=0.5)
    with pytest.raises(mscomm.CollectiveTimeout, match="recv from rank 1"):
        mscomm.barrier()


@ranks(2)
def test_a_deadline_of_a_collective_says_in_which_message_the_other_one_waits(rank, group):
    mscomm.barrier()
    with pytest.raises(
        mscomm.CollectiveTimeout, match=r"rank 1 .*has ended barrier #1 and waits in recv from rank 0, tag 4"
    ):
        if rank == 0:
            mscomm.barrier(timeout=2)
        else:
            mscomm.recv(np.zeros(3), 0, tag=4)


@ranks(2)
def test_an_error_that_nobody_waited_for_is_told_to_the_others(rank, group):
    if rank == 0:
        mscomm.recv(np.zeros(1), 1, timeout=0.5, async_op=True)
    until_group_breaks()
    with pytest.raises(mscomm.CollectiveTimeout, match=r"rank 0 .*recv from rank 1") as caught:
        mscomm.barrier()
    assert caught.value.waiting_for == (1,)


def stop_until(*what: str, seconds: float = 0) -> None:
    """Stop this process with SIGSTOP. Let it continue the given number of seconds after these texts were told."""
    helper = os.fork()
    if helper == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        until_told(*what)
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.waitpid(helper, 0)


def until_stopped(pid: int) -> None:
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")


@ranks(2)
def test_a_stopped_peer_delays_the_first_send_and_breaks_nothing(rank, group):
    pid = int(mscomm.broadcast(np.array([os.getpid()]), root=1)[0])
    if rank == 1:
        stop_until("rank 0 sends", seconds=2)
        assert (mscomm.recv(np.zeros(5), 0) == 1).all()
    else:
        until_stopped(pid)
        tell("rank 0 sends")
        mscomm.send(np.ones(5), 1)


@ranks(2)
def test_a_deadline_before_there_is_a_link_names_the_peer(rank, group):
    pid = int(mscomm.broadcast(np.array([os.getpid()]), root=1)[0])
    words = r"rank 0 .*send to rank 1, tag 0 \(40 bytes\): no connection came from rank 1 within 1 s"
    if rank == 1:
        stop_until("rank 0 has given up")
        until_group_breaks()
    else:
        until_stopped(pid)
    with pytest.raises(mscomm.CollectiveTimeout, match=words) as caught:
        if rank == 0:
            mscomm.send(np.ones(5), 1, timeout=1)
        else:
            mscomm.barrier()
    tell(f"rank {rank} has given up")
    assert caught.value.waiting_for == (1,)


@ranks(2)
def test_a_group_that_is_destroyed_in_another_thread_ends_a_recv(rank, group):
    pair = mscomm.create_group("pair", [0, 1])
    if rank == 0:

        def receives():
            with pytest.raises(mscomm.Aborted, match="released the group while a call or a message was running"):
                mscomm.recv(np.zeros(1), 1, group=pair)

        def destroys():
            until_in_a_message(pair)
            mscomm.destroy_group(pair)

        in_threads(receives, destroys)
    mscomm.barrier()


@links(2)
@ranks(2, env=SPLIT)
def test_groups_with_links_leave_no_descriptors(rank, group, host):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    for turn in range(12):
        pair = mscomm.create_group(f"pair {turn}", [0, 1])
        if rank == 0:
            mscomm.send(np.ones(3), 1, group=pair)
        else:
            mscomm.recv(np.ones(3), 0, group=pair)
        mscomm.destroy_group(pair)
        mscomm.barrier()
        if turn == 1:
            before = count()
    assert count() <= before


@ranks(2, env={"MSCOMM_TIMEOUT": "100"})
def test_a_receiver_without_descriptors_is_the_one_that_is_named(rank, group):
    if rank == 0:
        until_told("starved")
        with pytest.raises(mscomm.Aborted, match=r"rank 1 .*Too many open files"):
            mscomm.send(np.ones(3), 1)
        tell("failed")
        return
    mscomm.send(np.ones(1), 1)  # a message to itself: imports all modules before the descriptors run out
    mscomm.recv(np.empty(1), 1)
    with no_descriptor_left():
        os.mkdir(f"{os.environ[TOLD]}/starved")  # like tell("starved"), but needs no file descriptor
        with pytest.raises(mscomm.Aborted, match=r"rank 1 .*Too many open files"):
            mscomm.recv(np.empty(3), 0)
    until_told("failed")

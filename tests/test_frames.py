"""Control frames: each frame arrives whole, even if its bytes arrive in pieces, and invalid data is refused."""

from __future__ import annotations

import socket
import struct
import threading
import tracemalloc

import msgpack
import pytest
from control import eventually, soon

from mscomm import errors
from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline
from mscomm.cluster.frames import Frames, Parser, encode


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(errors.Error, match="limit is 1000"):
        Parser(1000).feed(struct.pack("<I", 1001))


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({"t": 5}),
        msgpack.packb({"t": "x"}) + b"\0",
    ],
)
def test_what_is_not_a_message_is_an_error(body):
    with pytest.raises(errors.Error):
        Parser(1000).feed(struct.pack("<I", len(body)) + body)


def test_deep_nesting_and_extensions_are_errors():
    deep = b"\x81\xa1t" + b"\x91" * 5000 + b"\xc0"
    extension = msgpack.packb({"t": "x", "e": msgpack.ExtType(5, b"abc")})
    for body in (deep, extension):
        with pytest.raises(errors.Error):
            Parser(1 << 16).feed(struct.pack("<I", len(body)) + body)


def test_a_frame_needs_little_memory_so_that_a_rank_can_still_say_that_memory_ran_out():
    frame = {"t": "failed", "text": "MemoryError"}
    encode(frame, 1000)  # allocates this thread's packer, which must not count below
    tracemalloc.start()
    encode(frame, 1000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 << 10


def test_frames_cross_a_socket_in_any_pieces():
    a, b = socket.socketpair()
    with a, b:
        receiver = Frames(ByteStream(b))
        data = encode({"t": "one", "x": list(range(100))}, 1 << 16) + encode({"t": "two"}, 1 << 16)
        threading.Thread(target=lambda: [a.send(data[i : i + 7]) for i in range(0, len(data), 7)]).start()
        assert receiver.receive(soon())["x"] == list(range(100))
        assert receiver.receive(soon()) == {"t": "two"}
        a.close()
        assert receiver.receive(soon()) is None


def test_a_frame_that_its_deadline_has_cut_is_finished_before_the_next_one():
    a, b = socket.socketpair()
    with a, b:
        sender, receiver = Frames(ByteStream(a), send_limit=16 << 20), Frames(ByteStream(b))
        for _ in range(2):
            with pytest.raises(TimeoutError):
                sender.send({"t": "big", "x": bytes(8 << 20)}, Deadline(0.1))
        thread = threading.Thread(target=lambda: sender.send({"t": "small"}, soon()))
        thread.start()
        assert len(receiver.receive(soon())["x"]) == 8 << 20
        assert receiver.receive(soon()) == {"t": "small"}
        thread.join()


def test_a_frame_does_not_wait_longer_for_another_one_than_its_deadline():
    a, b = socket.socketpair()
    with a, b:
        sender, receiver = Frames(ByteStream(a), send_limit=16 << 20), Frames(ByteStream(b))
        thread = threading.Thread(target=lambda: sender.send({"t": "big", "x": bytes(8 << 20)}, soon()))
        thread.start()
        eventually(sender._sending.locked)
        with pytest.raises(TimeoutError, match="another frame was being sent"):
            sender.send({"t": "small"}, Deadline(0.1))
        assert receiver.receive(soon())["t"] == "big"
        thread.join()


def test_a_send_to_somebody_who_does_not_read_ends_at_the_deadline():
    a, b = socket.socketpair()
    with a, b, pytest.raises(TimeoutError):
        Frames(ByteStream(a), send_limit=16 << 20).send({"t": "big", "x": bytes(8 << 20)}, Deadline(0.1))

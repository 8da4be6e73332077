"""Control frames: each frame arrives whole, even if its bytes arrive in pieces, and invalid data is refused."""

from __future__ import annotations

import socket
import struct
import threading
import tracemalloc

import msgpack
import pytest
from control import soon

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


def test_a_send_to_somebody_who_does_not_read_ends_at_the_deadline():
    a, b = socket.socketpair()
    with a, b, pytest.raises(TimeoutError):
        Frames(ByteStream(a), send_limit=16 << 20).send({"t": "big", "x": bytes(8 << 20)}, Deadline(0.1))

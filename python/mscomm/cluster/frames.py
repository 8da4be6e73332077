"""Control frames. Each consists of a u32 length and a msgpack map. Received frames are checked before they are used."""

from __future__ import annotations

import struct
import threading
from typing import Any

import msgpack

from mscomm.cluster.bytestream import ByteStream
from mscomm.cluster.deadline import Deadline
from mscomm.errors import Error

FROM_MEMBER_BYTES = 64 << 10
FROM_HUB_BYTES = 16 << 20

# A rank that asks the hub which ranks are missing sends a key that says what it waits for: JOIN (all ranks to join),
# READY (all ranks to be ready), or else the key of its meeting or of its rejoin().
JOIN, READY = "join", "ready"

Frame = dict[str, Any]
_LENGTH = struct.Struct("<I")


class _Packers(threading.local):
    """One packer per thread. A packer allocates its buffer, up to 1 MiB, when it is made. If each frame had its own
    packer, a rank that runs out of memory could not tell the other ranks about it.
    """

    def __init__(self) -> None:
        self.packer = msgpack.Packer()


_packers = _Packers()


def encode(frame: Frame, limit: int) -> bytes:
    """Return the control frame as bytes.

    limit: the maximum number of bytes that the other end accepts. Raise Error if the frame is longer.
    """
    body: bytes = _packers.packer.pack(frame)
    if len(body) > limit:
        raise Error(f"control frame {frame.get('t')!r} has {len(body)} bytes, the limit is {limit}")
    return _LENGTH.pack(len(body)) + body


class Parser:
    """Splits a stream into control frames and decodes them.

    It raises Error for a frame that is longer than the limit, or that is not a msgpack map with a string under "t".
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()

    def feed(self, received: bytes) -> list[Frame]:
        self._held += received
        frames = []
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            if length > self._limit:
                raise Error(f"a control frame says it has {length} bytes, the limit is {self._limit}")
            end = _LENGTH.size + length
            if len(self._held) < end:
                break
            frames.append(_decode(bytes(self._held[_LENGTH.size : end])))
            del self._held[:end]
        return frames


def _decode(body: bytes) -> Frame:
    try:
        frame = msgpack.unpackb(body, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, RecursionError) as error:
        raise Error(f"a control frame of {len(body)} bytes is not msgpack: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("t"), str):
        raise Error(f"a control frame of {len(body)} bytes is not a map with a text under 't'")
    return frame


class Frames:
    """Sends and receives frames over one stream, which it owns. One thread can receive while others send."""

    def __init__(self, stream: ByteStream, limit: int = FROM_HUB_BYTES, send_limit: int = FROM_MEMBER_BYTES) -> None:
        self.stream = stream
        self._parser = Parser(limit)
        self._send_limit = send_limit
        self._held: list[Frame] = []  # frames that have arrived and that receive() has not returned yet
        self._sending = threading.Lock()  # held while a frame is sent, so that frames of two threads do not mix

    def send(self, frame: Frame, deadline: Deadline) -> None:
        """Pass the frame to the kernel. Raise OSError if the link has ended, and TimeoutError at the deadline.

        After a TimeoutError, the frame is sent before the next one, or not at all.
        """
        data = encode(frame, self._send_limit)
        if not self._sending.acquire(timeout=deadline.left()):
            raise TimeoutError(f"another frame was being sent for {deadline.seconds:g} s")
        try:
            self.stream.send_all(data, deadline)
        finally:
            self._sending.release()

    def receive(self, deadline: Deadline) -> Frame | None:
        """Return the next frame, or None if the other end has closed.

        An invalid frame closes the link and raises Error.
        """
        while not self._held:
            frames = self.arrived()
            if frames is None:
                return None
            if not frames:
                self.stream.await_bytes(deadline)
            self._held += frames
        return self._held.pop(0)

    def arrived(self) -> list[Frame] | None:
        """Return the list of frames that have arrived, without waiting. Return None if the other end has closed.

        An invalid frame closes the link and raises Error.
        """
        received = self.stream.receive(64 << 10)
        if not received:
            return [] if received is None else None
        try:
            return self._parser.feed(received)
        except Error:
            self.close()
            raise

    def close(self) -> None:
        self.stream.close()

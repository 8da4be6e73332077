"""A rank's control link: what the rank does with frames from the hub. An input is a script: [frame, frame, ...]."""

import socket

import msgpack
from fuzzing import frame, instrumented, mutated_script, run, script

with instrumented():
    from control import Communicator

    from mscomm.cluster.bytestream import ByteStream
    from mscomm.cluster.frames import Frames
    from mscomm.cluster.links import is_address
    from mscomm.cluster.member import Member

WORLD = "0:world"


class Links:
    def dialled(self, rank, purpose, addresses):
        for one in addresses:
            is_address(one)

    def wanted(self, peers):
        raise AssertionError(peers)


def fuzz(data: bytes) -> None:
    frames = read if isinstance(read := script(data), list) else [data]
    ours, hub = socket.socketpair()
    stream = ByteStream(ours)
    stream.secret = bytes(32)
    member = Member(Frames(stream), key=bytes(32), rank=1)
    member.attach(WORLD, Communicator(), Links())
    with hub:
        hub.setblocking(False)
        hub.send(b"".join(map(frame, frames))[: 100 << 10])
        hub.shutdown(socket.SHUT_WR)
        member._read()  # it catches all errors of the hub's, and raises all others
        assert member._ended is not None
    member._disown()


def seeds():
    error = {"kind": "PeerLost", "text": "gone", "ranks": [0], "waiting_for": []}
    key = {"key": bytes(32), "epoch": 0}
    yield msgpack.packb(
        [
            {"t": "facts", "facts": [{"link": "10.0.0.1"}, {"link": ""}]},
            {"t": "welcome", "rank": 1, "size": 2, "run": bytes(16), **key},
            {"t": "go", "epoch": 0},
            {"t": "met", "key": "k", "ranks": [0, 1], "facts": [{}, {}]},
            {"t": "dial", "group": WORLD, "from": 0, "purpose": 3, "addresses": [["10.0.0.1", 4000]]},
            {"t": "dial", "group": "0:early", "from": 0, "purpose": 4, "addresses": ["\0name"]},
            {"t": "where", "group": WORLD, "number": 3},
            {"t": "left", "group": WORLD, "ranks": [0]},
            {"t": "verdict", "group": WORLD, **error},
        ]
    )
    yield msgpack.packb(
        [
            {"t": "unmet", "key": "k", **error},
            {"t": "missing", "key": "k", "text": "rank 0", "ranks": [0], "tells": True},
            {"t": "left", "group": "", "ranks": [0]},
            {"t": "verdict", "group": "", **error},
            {"t": "refused", "why": "no"},
        ]
    )


if __name__ == "__main__":
    run(fuzz, seeds(), mutated_script)

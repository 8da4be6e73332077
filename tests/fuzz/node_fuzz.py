"""The link of another host's launcher: what it does with frames from the hub. An input is a script: [frame, ...]."""

import socket

import msgpack
from fuzzing import frame, instrumented, mutated_script, run, script

with instrumented():
    from mscomm.cluster.bytestream import ByteStream
    from mscomm.cluster.frames import Frames
    from mscomm.cluster.protection import Protection
    from mscomm.errors import Error
    from mscomm.launching.parts import OtherNode


def fuzz(data: bytes) -> None:
    frames = read if isinstance(read := script(data), list) else [data]
    node = OtherNode(4, range(2, 4), "node2", "-n 2", "10.0.0.1", 4000, Protection(), 60.0)
    ours, hub = socket.socketpair()
    node._link, node._where = Frames(ByteStream(ours)), "10.0.0.1:4000"
    with ours, hub:
        hub.setblocking(False)
        hub.send(b"".join(map(frame, frames))[: 100 << 10])
        hub.shutdown(socket.SHUT_WR)
        assert node.over() is None or isinstance(node.over(), Error)
        assert type(node.goes_on()) is bool


def seeds():
    state = {"t": "state", "over": None, "goes_on": False, "only_stopped": True, "complete": 1}
    error = {"kind": "PeerLost", "text": "gone", "ranks": [0], "waiting_for": []}
    yield msgpack.packb([state, {**state, "over": error}, {"t": "end"}])


if __name__ == "__main__":
    run(fuzz, seeds(), mutated_script)

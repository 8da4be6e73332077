"""The hub's handlers: control frames from ranks and from the launcher of another host, over real sockets.

An input is a script: [options, step, step, ...]. A step is [link, frame], or a number of seconds that pass.
"""

import contextlib
import math
import socket
import types

import msgpack
from fuzzing import frame, instrumented, mutated_script, run, script

with instrumented():
    from mscomm.cluster import groups, hub, launchers, waiting
    from mscomm.cluster.bytestream import ByteStream
    from mscomm.cluster.frames import FROM_HUB_BYTES, Parser
    from mscomm.cluster.hello import CONTROL, LAUNCHER, Identity

SIZE = 3
LAUNCHER_LINK = SIZE  # its host has the last rank
KNOWN, WATCHED, RESTARTS = 1, 2, 4  # bits of the options

clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
for module in (groups, hub, launchers, waiting):
    module.time = clock


def fuzz(data: bytes) -> None:
    options, *steps = read if isinstance(read := script(data), list) and read else [0]
    flags = options if isinstance(options, int) else 0
    clock.now = 1000.0
    logged: list[str] = []
    job = hub.Hub(
        SIZE,
        key=bytes(32),
        topo_timeout_s=60.0,
        ranks_known=bool(flags & KNOWN),
        watched=bool(flags & WATCHED),
        restarts=bool(flags & RESTARTS),
        log=logged.append,
        nodes={"node2": range(SIZE - 1, SIZE)},
        layout="-n 2",
    )
    ends = [socket.socketpair() for _ in range(SIZE + 1)]
    for rank, (ours, _) in enumerate(ends):
        identity = Identity(rank=rank if flags & KNOWN and rank < SIZE else -1)
        job._enter(ByteStream(ours), identity, LAUNCHER if rank == LAUNCHER_LINK else CONTROL)
    parsers = [Parser(FROM_HUB_BYTES) for _ in ends]
    for step in steps:
        match step:
            case int() | float() if 0 <= step < math.inf:
                clock.now += min(step, 1e9)
            case [int() as link, value]:
                link = min(max(link, 0), SIZE)
                with contextlib.suppress(OSError):  # the hub has closed this link
                    ends[link][1].send(frame(value), socket.MSG_DONTWAIT)
        _turn(job)
        for (_, end), parser in zip(ends, parsers, strict=True):
            with contextlib.suppress(OSError):
                parser.feed(end.recv(1 << 20, socket.MSG_DONTWAIT))  # what the hub sends must be frames
        if job._finished():
            break
    for _, end in ends:
        end.close()
    _turn(job)
    job._close()
    faults = [text for text in logged if text.startswith("Traceback")]
    assert not faults, faults[0]


def _turn(job: hub.Hub) -> None:
    """Do what serve() does in one turn of its loop, without waiting."""
    job._sleep_s()
    for ready, _ in job._selector.select(0):
        ready.data()
    job._look()


def _from_each(kind: str, **fields):
    return [[rank, {"t": kind, **fields}] for rank in range(SIZE)]


def seeds():
    join = [[i, {"t": "join", "rank": i, "node_id": None, "facts": {"pid": 1, "size": SIZE}}] for i in range(SIZE)]
    by_id = [[rank, {"t": "join", "rank": None, "node_id": f"w{rank}", "facts": {"host": "a"}}] for rank in range(SIZE)]
    ready = _from_each("ready", epoch=0)
    attend = [[LAUNCHER_LINK, {"t": "attend", "first": SIZE - 1, "end": SIZE, "name": "node2", "layout": "-n 2"}]]
    meet = {"key": "0:pair", "name": "pair", "ranks": [0, 1], "facts": {"a": 1}, "founds": True, "survivors": False}
    error = {"kind": "PeerLost", "text": "gone", "ranks": [1], "waiting_for": []}
    failed = [0, {"t": "failed", **error, "group": "0:world", "number": 3, "call": "barrier #3"}]
    where = {"asked": 3, "call": "", "number": 2, "inside": True, "text": "is in it"}
    here = [1, {"t": "here", "group": "0:world", **where}]
    pair = [
        *([rank, {"t": "meet", **meet}] for rank in (0, 1)),
        [0, {"t": "dial", "group": "0:pair", "to": 1, "purpose": 4, "addresses": [["10.0.0.1", 4000]]}],
        [0, {"t": "compare", "group": "0:pair", "number": 3, "call": "barrier #3"}],
        [1, {"t": "close", "group": "0:pair", "number": 3}],
    ]
    bye = _from_each("bye", number=4, numbers={"0:pair": 2})
    ended = [[LAUNCHER_LINK, {"t": "ended", "rank": SIZE - 1, "how": "exit code 1", "badly": True, "again": True}]]
    shrink = [[rank, {"t": "meet", **meet, "key": "s", "survivors": True, "founds": False}] for rank in (0, 1)]
    refuse = [[0, {"t": "refuse", "key": "0:pair", "name": "pair", "ranks": [0, 1], "why": "no"}]]
    wait = [
        [0, {"t": "waits", "key": "join"}],
        [0, {"t": "waits", "key": "0:pair"}],
        [0, {"t": "meet", **meet}],
        [0, {"t": "unmeet", "key": "0:pair", "seconds": 1.0}],
    ]
    rejoin = _from_each("rejoin", key="rejoin 1", facts={"pid": 2})
    back = [
        [1, {"t": "return", "rank": 1, "epoch": 0, "proof": bytes(32), "facts": {"pid": 1}}],
        [0, {"t": "in group", "group": "0:other", "ranks": [0, 1]}],
        [0, {"t": "saw", "group": "0:other", "kind": "PeerLost", "text": "gone", "ranks": [2], "waiting_for": []}],
    ]
    launcher = [
        [LAUNCHER_LINK, {"t": "stopped", "ranks": [SIZE - 1]}],
        [LAUNCHER_LINK, {"t": "gave up", "name": "node2", "why": "no memory"}],
        [LAUNCHER_LINK, {"t": "rival", "who": "another job", "seconds": 2.0}],
    ]
    for flags in range(8):
        joins = join if flags & KNOWN else by_id
        yield msgpack.packb([flags, *attend, *joins, *ready, *pair, *bye])
        yield msgpack.packb([flags, *joins[:2], *wait, 30, *joins[2:], *wait, *refuse, failed, 0.5, here, 5])
        yield msgpack.packb([flags, *attend, *joins, *ready, failed, *ended, 1, *shrink, *rejoin, *launcher])
        yield msgpack.packb([flags, back[0], *joins[:2], *back, 1])
    by_id[0][1]["node_id"] = "<digits>"
    yield msgpack.packb([0, *by_id[:2], *wait, 100])
    yield msgpack.packb([KNOWN, [0, {"t": "give up", "why": "no"}], [1, {"t": "unrejoin", "seconds": 1.0}], 100])


if __name__ == "__main__":
    run(fuzz, seeds(), mutated_script)

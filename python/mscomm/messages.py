"""Messages from one rank to another, beside the group's collectives and in no order with them.

They match by source and tag, in the order in which they were sent. Each thread of a rank may send and receive while
others do, and while others are in collectives of the same group. Strided arrays are read and written in C order.

Messages are the CPU's. An array of a device is copied to the host when it is sent, after what its library's current
stream has, and from there to a device when it is received; either side may have it on a device, of any backend.

Both raise TypeError or ValueError for wrong arguments, before anything is sent, and PeerLost, CollectiveTimeout,
Mismatch or Aborted (see mscomm.errors) if the message fails. Then the group is broken, as after a failed collective,
and the contents of out are undefined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

from mscomm.arrays import fill, library, memory_anywhere, on_host, written
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import dtype_code, readable, writable
from mscomm.groups import Group, resolve

Timeout = float | timedelta | None

LAST_TAG = 2**31 - 1


def send(
    x: Any,
    dst: int,
    tag: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Send x to rank dst, which receives it by recv with this rank as src and the same tag.

    x: an array of any shape, of a dtype that collectives take, also of no elements. dst: a rank in the group
    (torch.distributed counts it in the world); this rank itself, too, if another thread or an earlier
    `recv(..., async_op=True)` receives. tag: an int from 0 to 2^31 - 1. group: None for all ranks, or a Group or its
    name. timeout: seconds or a timedelta; None takes init's.

    Returns None when x may be used again. That may be before the recv is called, but need not be: do not rely on it,
    and let one of two ranks that exchange arrays receive first, or use async_op. async_op=True: returns a Work at
    once; leave x alone until it has ended. The first send to a rank waits for the connection to it in both forms.

    out on the other side must have x's dtype and as many elements, in any shape: Mismatch on both ranks otherwise.
    CollectiveTimeout, whose `.waiting_for` is dst, if the message has not been taken in time. PeerLost if dst ended or
    left before it took the message.

    As MPI_Send, but without its datatypes and communicators' limits on tags; as torch.distributed.send.

    >>> if mscomm.get_rank() == 0:                                         # on 2 ranks
    ...     mscomm.send(np.arange(3.0), dst=1, tag=7)
    ... else:
    ...     print(mscomm.recv(np.empty(3), src=0, tag=7))
    [0. 1. 2.]
    """
    group = resolve(group)
    source = readable(on_host(x, "x", "send"))
    code, dst, tag = dtype_code(source.dtype), _checked_rank("send", "dst", dst, group), _checked_tag("send", tag)
    seconds = group.seconds(timeout)
    if not async_op:
        group.send(dst, tag, code, source, seconds)
        return None
    return group.watch(source, lambda: None, [lambda: group.start_send(dst, tag, code, source, seconds)])


def recv(
    out: Any,
    src: int,
    tag: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Receive into out the next message that rank src sends here with this tag; return out.

    out: a writable array of the dtype and the number of elements that were sent, in any shape; Mismatch, which names
    both sides, on both ranks otherwise. src: a rank in the group (torch.distributed counts it in the world). tag: an
    int from 0 to 2^31 - 1. There are no wildcards, neither for src nor for tag. group: None for all ranks, or a Group
    or its name. timeout: seconds or a timedelta; None takes init's.

    Messages of one source and tag come in the order in which they were sent; those of other tags may be received
    before. Of several recvs of one source and tag the one that was called first gets the first. async_op=True: returns
    a Work, whose wait() returns out; leave out alone until then.

    CollectiveTimeout, whose `.waiting_for` is src, if no message came in time. PeerLost if src ended or left without
    sending one. After 10 s of waiting a line on stderr says so.

    As MPI_Recv, where a message may also be shorter than the buffer; as torch.distributed.recv, which returns the
    sender's rank.

    >>> out = mscomm.recv(np.empty(3), src=0)                              # on rank 1, while rank 0 sends
    """
    group = resolve(group)
    there = memory_anywhere(out, "out", "recv")
    if not there.flags.writeable:
        raise TypeError("recv: out is read-only")
    code, src, tag = dtype_code(there.dtype), _checked_rank("recv", "src", src, group), _checked_tag("recv", tag)
    target, finish = _on_host_for(out, there) if isinstance(there, OnDevice) else writable(there)
    seconds = group.seconds(timeout)

    def result() -> Any:
        if finish:
            finish()
        written(out)
        return out

    if async_op:
        return group.watch(target, result, [lambda: group.start_recv(src, tag, code, target, seconds)])
    group.recv(src, tag, code, target, seconds)
    return result()


def _on_host_for(out: Any, there: OnDevice) -> tuple[np.ndarray[Any, Any], Callable[[], None]]:
    """Where the numbers for an array of a device come, and what brings them there."""
    if not hasattr(library(out, "out", "recv"), "namespace"):
        kind = type(out).__name__
        raise TypeError(f"recv: out is a {kind}, which mscomm knows by its protocol alone: receive to the CPU")
    target = np.empty(there.shape, there.dtype)
    return target, lambda: fill(out, target, "out", "recv")


def _checked_rank(function: str, argument: str, rank: Any, group: Group) -> int:
    try:
        rank = operator.index(rank)
    except TypeError:
        raise TypeError(f"{function}: {argument} {rank!r} is not an integer") from None
    if not 0 <= rank < group.size:
        raise ValueError(
            f"{function}: {argument} {rank} is no rank of group {group.name}, which has the ranks 0 to {group.size - 1}"
        )
    return int(rank)


def _checked_tag(function: str, tag: Any) -> int:
    try:
        tag = operator.index(tag)
    except TypeError:
        raise TypeError(f"{function}: tag {tag!r} is not an integer") from None
    if not 0 <= tag <= LAST_TAG:
        raise ValueError(f"{function}: tag {tag} is not in 0 to 2^31 - 1")
    return int(tag)

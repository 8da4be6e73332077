"""Messages from one rank to another. There is no order between messages and the group's collective calls.

Messages are matched by source and tag, in the order in which they were sent. Several threads of a rank may send and
receive at once, also while other threads make collective calls on the same group. Strided arrays are read and written
in C order.

Messages travel through the CPU. To send a device array, mscomm waits for the work on the current stream of the array's
library, and copies the array to the host. A message for a device array is received on the host, and then copied to the
device. The sender and the receiver may use devices of different backends.

All functions raise TypeError or ValueError for wrong arguments, before anything is sent. If the message fails, they
raise PeerLost, CollectiveTimeout, Mismatch or Aborted (see mscomm.errors). Then the group is broken, as after a failed
collective call, and the contents of out are undefined.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import numpy as np

from mscomm import _core
from mscomm.arrays import fill, library, memory_anywhere, on_host, written
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import dtype_code, readable, writable
from mscomm.group import Group
from mscomm.job import resolve

Timeout = float | timedelta | None

LAST_TAG = _core.last_tag  # 2^31 - 1


class _Any(enum.Enum):
    """The wildcards. Unlike MPI's wildcards they are not ints, so a wrong rank or tag is never taken for a wildcard."""

    ANY_SOURCE = _core.any_source
    ANY_TAG = _core.any_tag

    def __repr__(self) -> str:
        return f"mscomm.{self.name}"


ANY_SOURCE: Literal[_Any.ANY_SOURCE] = _Any.ANY_SOURCE
ANY_TAG: Literal[_Any.ANY_TAG] = _Any.ANY_TAG


@dataclasses.dataclass
class Status:
    """Describes the message that recv or sendrecv has received. Before that, all fields are None.

    source: the sender's rank in the group. tag: the message's tag. count: its number of elements; 1 for an object.

    >>> status = mscomm.Status()
    >>> mscomm.recv(out, mscomm.ANY_SOURCE, mscomm.ANY_TAG, status=status)
    >>> status.source, status.tag, status.count
    (2, 7, 3)
    """

    source: int | None = None
    tag: int | None = None
    count: int | None = None


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

    x: an array of any shape, also empty, of a dtype that collective calls take. dst: a rank in the group (in
    torch.distributed it is a rank in the world). dst may be this rank itself: the message is then copied, and kept
    until it is received. tag: an int from 0 to 2^31 - 1. group: None for all ranks, or a Group or its name. timeout:
    seconds or a timedelta; None means the timeout given to init().

    Returns None as soon as x may be used again. send may wait until dst has called recv, so two ranks that exchange
    arrays must use sendrecv or async_op. async_op=True: returns a Work at once; do not change x until the Work has
    ended. Even with async_op, the first send to a rank waits until the two ranks are connected.

    The receiver's out must have x's dtype and number of elements, in any shape; otherwise both ranks raise Mismatch.
    Raises CollectiveTimeout, whose `.waiting_for` is dst, if the message was not received in time. Raises PeerLost if
    dst ended or left before it received the message.

    Like MPI_Send, without MPI's datatypes and limits on tags; like torch.distributed.send.

    >>> if mscomm.get_rank() == 0:                                         # on 2 ranks
    ...     mscomm.send(np.arange(3.0), dst=1, tag=7)
    ... else:
    ...     print(mscomm.recv(np.empty(3), src=0, tag=7))
    [0. 1. 2.]
    """
    group = resolve(group)
    sending = _sending("send", x, dst, tag, "tag", group)
    seconds = group.seconds(timeout)
    if not async_op:
        group.send(*sending, seconds)
        return None
    return group.start_send(*sending, seconds)


def recv(
    out: Any,
    src: int | Literal[_Any.ANY_SOURCE],
    tag: int | Literal[_Any.ANY_TAG] = 0,
    *,
    status: Status | None = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Receive the next message that rank src sends to this rank with this tag. Fills and returns out.

    out: a writable array with the dtype and the number of elements that were sent, in any shape; otherwise both ranks
    raise a Mismatch that names both sides. src: a rank in the group (in torch.distributed it is a rank in the world),
    or mscomm.ANY_SOURCE. tag: an int from 0 to 2^31 - 1, or mscomm.ANY_TAG. status: a mscomm.Status, to which recv
    writes the message's source, tag and count. group: None for all ranks, or a Group or its name. timeout: seconds or
    a timedelta; None means the timeout given to init().

    Messages of one source and tag are received in the order in which they were sent. A message with another tag or from
    another source may overtake them. With ANY_SOURCE, messages are received in the order in which they reach this rank.
    If a message fits several recvs, the recv that was called first gets it. async_op=True: returns a Work, whose wait()
    returns out and fills status; do not use `out` before that.

    Raises CollectiveTimeout, whose `.waiting_for` is src, if no message came in time. Raises PeerLost if src ended or
    left without sending a message. With ANY_SOURCE, `.waiting_for` has all ranks that could have sent a message, and
    PeerLost is raised when all of them have left. After 10 s of waiting, recv writes a line to stderr.

    Like MPI_Recv, but MPI_Recv also takes a message that is shorter than the buffer. Like torch.distributed.recv, but
    that function returns the sender's rank.

    >>> out = mscomm.recv(np.empty(3), src=0)                              # on rank 1, while rank 0 sends
    """
    group = resolve(group)
    receiving = _receiving("recv", out, src, tag, "tag", status, group)
    seconds = group.seconds(timeout)
    if not async_op:
        return receiving.result(group.recv(*receiving.message, seconds))
    work = group.start_recv(*receiving.message, seconds)

    def result() -> Any:
        matched = work.matched()
        assert matched is not None
        return receiving.result(matched)

    return group.together([work], result)


def sendrecv(
    x: Any,
    dst: int,
    out: Any,
    src: int | Literal[_Any.ANY_SOURCE],
    send_tag: int = 0,
    recv_tag: int | Literal[_Any.ANY_TAG] = 0,
    *,
    status: Status | None = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
) -> Any:
    """Send x to rank dst, and at the same time receive from rank src into out. Returns out.

    Ranks that exchange arrays by sendrecv in any pattern, in pairs or around a ring, never deadlock, whatever the
    sizes. The other side of each message may be a send, a recv or a sendrecv. dst and src may be the same rank, even
    this rank itself. x and out may differ in shape and dtype, but must not share memory. sendrecv raises ValueError if
    arrays on the CPU share memory. All other arguments and errors are those of send and recv. Like MPI_Sendrecv.

    >>> right, left = (rank + 1) % size, (rank - 1) % size
    >>> mscomm.sendrecv(np.full(3, rank), right, np.empty(3, int), left)   # on rank 1 of 4
    array([0, 0, 0])
    """
    group = resolve(group)
    sending = _sending("sendrecv", x, dst, send_tag, "send_tag", group)
    receiving = _receiving("sendrecv", out, src, recv_tag, "recv_tag", status, group)
    ends = memory_anywhere(x, "x", "sendrecv"), memory_anywhere(out, "out", "sendrecv")
    # Device arrays may overlap: x is copied to the host before anything is received.
    if not any(isinstance(end, OnDevice) for end in ends) and np.shares_memory(*ends):
        raise ValueError("sendrecv: x and out overlap; give out memory of its own, or a copy of x")
    return receiving.result(group.sendrecv(sending, receiving.message, group.seconds(timeout)))


class _Receiving(NamedTuple):
    message: tuple[int, int, int, np.ndarray[Any, Any]]  # source, tag, the dtype's number, the array to receive into
    result: Callable[[tuple[int, int]], Any]  # takes the message's source and tag; returns what the user gets


def _sending(
    function: str, x: Any, dst: Any, tag: Any, tag_argument: str, group: Group
) -> tuple[int, int, int, np.ndarray[Any, Any]]:
    """Check the arguments. Returns the message to send: destination, tag, the dtype's number, and the array."""
    source = readable(on_host(x, "x", function))
    code = dtype_code(source.dtype)
    return checked_rank(function, "dst", dst, group), checked_tag(function, tag_argument, tag), code, source


def _receiving(
    function: str, out: Any, src: Any, tag: Any, tag_argument: str, status: Status | None, group: Group
) -> _Receiving:
    there = memory_anywhere(out, "out", function)
    if not there.flags.writeable:
        raise TypeError(f"{function}: out is read-only")
    code = dtype_code(there.dtype)
    wanted = checked_source(function, src, tag, tag_argument, status, group)
    target, finish = _on_host_for(function, out, there) if isinstance(there, OnDevice) else writable(there)

    def result(matched: tuple[int, int]) -> Any:
        if finish:
            finish()
        written(out)
        if status is not None:
            status.source, status.tag = matched
            status.count = target.size
        return out

    return _Receiving((*wanted, code, target), result)


def checked_source(function: str, src: Any, tag: Any, tag_argument: str, status: Any, group: Group) -> tuple[int, int]:
    """Check the arguments. Returns the source and tag that a message must have, as numbers for the core."""
    if status is not None and not isinstance(status, Status):
        raise TypeError(f"{function}: status is a {type(status).__name__}, not a mscomm.Status")
    source = _core.any_source if src is ANY_SOURCE else checked_rank(function, "src", src, group)
    return source, _core.any_tag if tag is ANY_TAG else checked_tag(function, tag_argument, tag)


def _on_host_for(function: str, out: Any, there: OnDevice) -> tuple[np.ndarray[Any, Any], Callable[[], None]]:
    """A host array to receive into, and a function that copies it to `out`, a device array."""
    if not hasattr(library(out, "out", function), "namespace"):
        kind = type(out).__name__
        raise TypeError(f"{function}: out is a {kind}, which mscomm knows by its protocol alone: receive to the CPU")
    target = np.empty(there.shape, there.dtype)
    return target, lambda: fill(out, target, "out", function)


def checked_rank(function: str, argument: str, rank: Any, group: Group) -> int:
    try:
        rank = operator.index(rank)
    except TypeError:
        raise TypeError(f"{function}: {argument} {rank!r} is not an integer") from None
    if not 0 <= rank < group.size:
        raise ValueError(
            f"{function}: {argument} {rank} is no rank of group {group.name}, which has the ranks 0 to {group.size - 1}"
        )
    return int(rank)


def checked_tag(function: str, argument: str, tag: Any) -> int:
    try:
        tag = operator.index(tag)
    except TypeError:
        raise TypeError(f"{function}: {argument} {tag!r} is not an integer") from None
    if not 0 <= tag <= LAST_TAG:
        raise ValueError(f"{function}: {argument} {tag} is not in 0 to 2^31 - 1")
    return int(tag)

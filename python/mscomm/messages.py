"""Sends messages from one rank to another. Messages are not ordered with respect to the group's collective calls.

Messages are matched by source and tag, in the order in which they were sent. Several threads of a rank may send and
receive at the same time, even while other threads make collective calls on the same group. Strided arrays are read and
written in C order.

Messages travel through host memory. To send a device array, mscomm waits for the work on the current stream of the
array's library, and then copies the array to the host. A message for a device array is received on the host, and then
copied to the device. The sender and the receiver may use devices of different backends.

All functions raise TypeError or ValueError for invalid arguments before they send anything. If the message fails, they
raise PeerLost, CollectiveTimeout, Mismatch or Aborted (see mscomm.errors). The group is then broken, as after a failed
collective call, and the contents of out are undefined.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from mscomm import _core
from mscomm.arguments import checked_int, checked_rank, signature_text
from mscomm.arrays import described_on_host, fill, library, memory_anywhere, written
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import check_out, checked_code, readable, writable
from mscomm.group import Group
from mscomm.job import resolve
from mscomm.works import Timeout

F = TypeVar("F", bound=Callable[..., Any])

LAST_TAG = _core.last_tag  # 2^31 - 1


class _Any(enum.Enum):
    """The wildcards. Unlike MPI's, they are not ints, so an invalid rank or tag is never mistaken for a wildcard."""

    ANY_SOURCE = _core.any_source
    ANY_TAG = _core.any_tag

    def __repr__(self) -> str:
        return f"mscomm.{self.name}"


ANY_SOURCE: Literal[_Any.ANY_SOURCE] = _Any.ANY_SOURCE
ANY_TAG: Literal[_Any.ANY_TAG] = _Any.ANY_TAG


@dataclasses.dataclass
class Status:
    """Describes the message that recv, sendrecv or recv_object received. Before that, all fields are None.

    source: the sender's rank in the group. tag: the tag of the message. count: the number of elements in the message,
    or 1 for an object.

    >>> status = mscomm.Status()
    >>> mscomm.recv(out, mscomm.ANY_SOURCE, mscomm.ANY_TAG, status=status)
    >>> status.source, status.tag, status.count
    (2, 7, 3)
    """

    source: int | None = None
    tag: int | None = None
    count: int | None = None


def _message(function: F) -> F:
    """Let the core's function of the same name, signature and docstring take the usual calls. See src/functions.cc."""
    return _core.message(function.__name__ == "send", function, signature_text(function))


@_message
def send(
    x: Any,
    dst: int,
    tag: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    async_op: bool = False,
) -> Any:
    """Send x to rank dst. To receive it, dst calls recv with this rank as src and with the same tag.

    x: an array of any shape, which may be empty. Its dtype must be one that collective calls accept. dst: a rank in the
    group (in torch.distributed, it is a rank in the world). dst may be this rank itself; the message is then copied,
    and the copy is kept until it is received. tag: an int from 0 to 2^31 - 1. group: a Group, its name, or None for all
    ranks. timeout: seconds or a timedelta; None means the timeout passed to init().

    Return None as soon as x can be changed again. send may block until dst has called recv, so two ranks that exchange
    arrays must use sendrecv or async_op. With async_op=True, return a Work at once; do not change x until the Work has
    completed. Even with async_op, the first send to a rank waits until the two ranks are connected.

    The receiver's out must have the same dtype and number of elements as x, but may have any shape; otherwise both
    ranks raise Mismatch. Raise CollectiveTimeout, whose `.waiting_for` holds dst, if the message was not received in
    time. Raise PeerLost if dst ended or left the job before it received the message.

    This is like torch.distributed.send, and like MPI_Send without datatypes and with tags up to 2^31 - 1.

    >>> if mscomm.get_rank() == 0:                                         # on 2 ranks
    ...     mscomm.send(np.arange(3.0), dst=1, tag=7)
    ... else:
    ...     print(mscomm.recv(np.empty(3), src=0, tag=7))
    [0. 1. 2.]
    """
    group = resolve(group)
    sending = _sending("send", x, dst, tag, "tag", group)
    seconds = group.seconds(timeout, "send")
    if not async_op:
        group.send(*sending, seconds)
        return None
    return group.start_send(*sending, seconds)


@_message
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
    """Receive the next message that rank src sends to this rank with this tag. Store it in `out`, and return `out`.

    out: a writable array of any shape, with the same dtype and number of elements as the array that was sent. If the
    dtype or the number differs, both ranks raise a Mismatch that describes both arrays. src: a rank in the group (in
    torch.distributed, it is a rank in the world), or mscomm.ANY_SOURCE. tag: an int from 0 to 2^31 - 1, or
    mscomm.ANY_TAG. status: an mscomm.Status, in which recv stores the message's source, tag and count. group: a Group,
    its name, or None for all ranks. timeout: seconds or a timedelta; None means the timeout passed to init().

    Messages from one source with one tag are received in the order in which they were sent. A message with another tag
    or from another source can overtake them. With ANY_SOURCE, messages are received in the order in which they reach
    this rank. If a message matches several recvs, the recv that was called first gets it. With async_op=True, return a
    Work. wait(), or done() when it returns True, fills in status; do not use out before that.

    Raise CollectiveTimeout, whose `.waiting_for` holds src, if no message arrived in time. Raise PeerLost if src ended
    or left the job without sending a message. With ANY_SOURCE, `.waiting_for` holds all ranks that could have sent a
    message, and PeerLost is raised when all of them have left. After waiting for 10 s, recv writes a line to stderr.

    This is like MPI_Recv, except that MPI_Recv also accepts a message that is shorter than the buffer. It is like
    torch.distributed.recv, except that torch.distributed.recv returns the sender's rank.

    >>> out = mscomm.recv(np.empty(3), src=0)                              # on rank 1, while rank 0 sends
    """
    group = resolve(group)
    receiving = _receiving("recv", out, src, tag, "tag", status, group)
    seconds = group.seconds(timeout, "recv")
    if not async_op:
        return receiving.result(group.recv(*receiving.message, seconds))
    work = group.start_recv(*receiving.message, seconds)

    def result() -> Any:
        matched = work.matched()
        assert matched is not None
        return receiving.result(matched)

    return group.together([work], result, "recv" if receiving.copies else "")


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
    """Send x to rank dst, and at the same time receive from rank src into out. Return out.

    Ranks can exchange arrays of any size with sendrecv in any pattern, for example in pairs or around a ring, without a
    deadlock. The other side of each message may be a send, a recv or a sendrecv. dst and src may be the same rank, even
    this rank itself. x and out may differ in shape and dtype, but must not share memory; if they are on the CPU and
    share memory, sendrecv raises ValueError. All other arguments and errors are those of send and recv. This is like
    MPI_Sendrecv.

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
        raise ValueError("sendrecv: x and out overlap; pass an out with memory of its own, or a copy of x")
    return receiving.result(group.sendrecv(sending, receiving.message, group.seconds(timeout, "sendrecv")))


class _Receiving(NamedTuple):
    message: tuple[int, int, int, np.ndarray[Any, Any]]  # source, tag, dtype number, array to receive into
    result: Callable[[tuple[int, int]], Any]  # takes the message's source and tag; returns the user's result
    copies: bool  # whether result() copies the message to the user's array


def _sending(
    function: str, x: Any, dst: Any, tag: Any, tag_argument: str, group: Group
) -> tuple[int, int, int, np.ndarray[Any, Any]]:
    """Check the arguments. Return the message to send: its destination, tag, dtype number and array."""
    source = readable(described_on_host(x, "x", function))
    code = checked_code(function, "x", source.dtype)
    return checked_rank(function, "dst", dst, group), checked_tag(function, tag_argument, tag), code, source


def _receiving(
    function: str, out: Any, src: Any, tag: Any, tag_argument: str, status: Status | None, group: Group
) -> _Receiving:
    there = memory_anywhere(out, "out", function)
    check_out(function, "out", there)
    code = checked_code(function, "out", there.dtype)
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

    return _Receiving((*wanted, code, target), result, finish is not None)


def checked_source(function: str, src: Any, tag: Any, tag_argument: str, status: Any, group: Group) -> tuple[int, int]:
    """Check the arguments. Return the source and tag to match, as numbers for the core."""
    if status is not None and not isinstance(status, Status):
        raise TypeError(f"{function}: status is a {type(status).__name__}, not an mscomm.Status")
    source = _core.any_source if src is ANY_SOURCE else checked_rank(function, "src", src, group)
    return source, _core.any_tag if tag is ANY_TAG else checked_tag(function, tag_argument, tag)


def _on_host_for(function: str, out: Any, there: OnDevice) -> tuple[np.ndarray[Any, Any], Callable[[], None]]:
    """Return a host array to receive into, and a function that copies it to the device array `out`."""
    if not hasattr(library(out, "out", function), "namespace"):
        kind = type(out).__name__
        raise TypeError(
            f"{function}: out is a {kind}, which mscomm knows only by its protocol: receive into an array on the CPU"
        )
    target = np.empty(there.shape, there.dtype)
    return target, lambda: fill(out, target, "out", function)


def checked_tag(function: str, argument: str, tag: Any) -> int:
    number = checked_int(function, argument, tag)
    if not 0 <= number <= LAST_TAG:
        raise ValueError(f"{function}: {argument} {number} is not in 0 to 2^31 - 1")
    return number

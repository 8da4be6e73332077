"""Collective calls and messages for Python objects.

The following objects can be sent:

- None, and any bool, int, float, complex, str or bytes
- NumPy arrays and NumPy scalars
- a date, time, datetime, timedelta, timezone or ZoneInfo
- pathlib paths
- PyTorch, JAX and MindSpore tensors on the CPU, which arrive as tensors that do not require a gradient
- objects whose class was registered with register_object
- a list, tuple, set, frozenset, dict or OrderedDict of such objects

Every object keeps its type. For any other object, the call raises a TypeError that says which part of the object cannot
be sent. As with any invalid argument, the error is raised before anything is sent. The error does not use up a call
number, so this rank has not made the call. The other ranks wait until this rank makes the call or ends, or until their
timeout expires.

A rank that cannot read an object, for example because it has not registered the class, raises an Error, and the group
stays usable. If the object contains a tensor of a library that is not installed on the rank, the rank raises TypeError.

With `allow_pickle=True`, the sender pickles what it cannot send otherwise, and the receiver unpickles it. Unpickling
can run arbitrary code chosen by the sender, so use this option only if you trust every rank of the group. A call
without allow_pickle raises an Error if it receives a pickle.

`group`, `root` and `timeout` have the same meaning as in the collectives. `src` and `dst` are ranks in the group.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mscomm import _core
from mscomm.arguments import checked_rank
from mscomm.arrays.numpy import dtype_code
from mscomm.collectives import FUNCTION
from mscomm.group import Group, seconds_left
from mscomm.job import resolve
from mscomm.messages import LAST_TAG, Status, checked_source, checked_tag
from mscomm.packing import Packed, packed, unpack
from mscomm.registry import register_object as register_object
from mscomm.works import Timeout

# send_object sends two messages. The first holds the length of the packed object and the tag of the second message,
# which holds the packed object itself. Each object gets its own tag for the second message, above the range of user
# tags, so that messages from several threads to one rank cannot be mixed up.
_HEADER = struct.Struct("<QQ")
_tags = itertools.count(LAST_TAG + 1)


def all_gather_object(
    obj: Any, *, group: Group | str | None = None, timeout: Timeout = None, allow_pickle: bool = False
) -> list[Any]:
    """Gather every rank's obj. Return a list of new objects, in rank order.

    The objects may have different types and sizes. See help(mscomm.objects) for the objects that can be sent, the
    meaning of allow_pickle, and the errors.

    >>> mscomm.all_gather_object({"rank": mscomm.get_rank()})              # on 2 ranks
    [{'rank': 0}, {'rank': 1}]
    """
    mine = packed(obj, allow_pickle)
    gathered: list[Any] = _gathered("all_gather_object", mine, None, resolve(group), timeout, allow_pickle)
    return gathered


def gather_object(
    obj: Any,
    root: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> list[Any] | None:
    """Gather every rank's obj at the root. The root gets a list of new objects in rank order. The others get None.

    Objects are sent as in all_gather_object.

    >>> mscomm.gather_object(mscomm.get_rank() ** 2)                       # on 3 ranks, at rank 0
    [0, 1, 4]
    """
    group = resolve(group)
    mine = packed(obj, allow_pickle)
    root = checked_rank("gather_object", "root", root, group)
    gathered: list[Any] | None = _gathered("gather_object", mine, root, group, timeout, allow_pickle)
    return gathered


def broadcast_object(
    obj: Any,
    root: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """Send the root's obj to every rank. Return it as a new object, even at the root.

    The other ranks' obj is ignored. The object is sent as in all_gather_object.

    >>> mscomm.broadcast_object({"lr": 0.1} if mscomm.get_rank() == 0 else None)
    {'lr': 0.1}
    """
    group = resolve(group)
    function, what = FUNCTION["broadcast_object"], FUNCTION["broadcast"]
    root = checked_rank("broadcast_object", "root", root, group)
    mine = _bytes_of(packed(obj, allow_pickle)) if root == group.rank else None
    length = np.array([0 if mine is None else mine.size], np.int64)

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        x = np.empty(int(length[0]), np.uint8) if mine is None else mine
        return group.core.prepare(function, x, x, what=what, root=root), lambda: unpack(x, allow_pickle, x.size)

    head = group.core.prepare(function, length, length, what=what, root=root, head=True)
    return group.call_after(head, data, timeout, False)


def scatter_object(
    objs: Sequence[Any] | None = None,
    root: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """Send each rank its item of the root's objs. Return this rank's item as a new object.

    objs: a list or tuple with one object for each rank; only the root reads it. The root raises TypeError if objs
    is not a sequence or is a str or bytes, and ValueError if its length is not the number of ranks. The objects are
    sent as in all_gather_object.

    >>> mscomm.scatter_object(["a", {"b": 1}] if mscomm.get_rank() == 0 else None)   # on 2 ranks: rank 0, rank 1
    'a'
    {'b': 1}
    """
    group = resolve(group)
    function = FUNCTION["scatter_object"]
    root = checked_rank("scatter_object", "root", root, group)
    parts: list[Packed] = []
    if root == group.rank:
        if not isinstance(objs, Sequence) or isinstance(objs, (str, bytes)):
            raise TypeError(
                f"scatter_object: objs is a {type(objs).__name__} at the root; expected a list with one item for each "
                "rank"
            )
        if len(objs) != group.size:
            raise ValueError(f"scatter_object: objs has {len(objs)} items; the group has {group.size} ranks")
        parts = [packed(obj, allow_pickle, f"objs[{i}]") for i, obj in enumerate(objs)]
    lengths = np.array([part.size for part in parts] or [0] * group.size, np.int64)

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        mine = np.empty(lengths[group.rank], np.uint8)
        x = _bytes_of(*parts) if parts else None
        told = ((int(lengths.sum()),), dtype_code(mine.dtype))
        call = group.core.prepare(
            function, x, mine, what=FUNCTION["scatter"], root=root, rows=lengths.tolist(), told=told
        )
        return call, lambda: unpack(mine, allow_pickle, mine.size)

    head = group.core.prepare(function, lengths, lengths, what=FUNCTION["broadcast"], root=root, head=True)
    return group.call_after(head, data, timeout, False)


def send_object(
    obj: Any,
    dst: int,
    tag: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> None:
    """Send obj to rank dst. To receive it, dst calls recv_object with this rank as src and with the same tag.

    dst and tag have the same meaning as in send. Like send, send_object may block until the receiver has called
    recv_object, and it raises the same errors. See help(mscomm.objects) for the objects that can be sent and the
    meaning of allow_pickle. Several threads may send to the same rank with the same tag concurrently. If a send is
    matched by a recv_object, or a send_object by a recv, both ranks raise Mismatch.

    >>> if mscomm.get_rank() == 0:                                         # on 2 ranks
    ...     mscomm.send_object({"step": 7}, dst=1)
    ... else:
    ...     print(mscomm.recv_object(src=0))
    {'step': 7}
    """
    group = resolve(group)
    dst, tag = checked_rank("send_object", "dst", dst, group), checked_tag("send_object", "tag", tag)
    data = _bytes_of(packed(obj, allow_pickle))
    left = seconds_left(group.seconds(timeout, "send_object"))  # both messages share one timeout
    at = next(_tags)
    header = np.frombuffer(_HEADER.pack(data.size, at), np.uint8)
    with group.committed(f"send_object to rank {group.ranks[dst]}"):
        group.send(dst, tag, _core.object_dtype, header, left())
        group.send(dst, at, _core.object_dtype, data, left())


def recv_object(
    src: Any,
    tag: Any = 0,
    *,
    status: Status | None = None,
    group: Group | str | None = None,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """Receive and return the next object that rank src sends to this rank with send_object and this tag.

    src and tag (which may be mscomm.ANY_SOURCE and mscomm.ANY_TAG), status, the errors and the order of messages are as
    in recv. If the object cannot be read, recv_object raises an Error, and the group stays usable.

    >>> obj = mscomm.recv_object(src=0, tag=7)                             # on rank 1, while rank 0 sends
    """
    group = resolve(group)
    wanted = checked_source("recv_object", src, tag, "tag", status, group)
    left = seconds_left(group.seconds(timeout, "recv_object"))
    header = np.empty(_HEADER.size, np.uint8)
    with group.committed("recv_object"):
        source, its_tag = group.recv(*wanted, _core.object_dtype, header, left())
        length, at = _HEADER.unpack(header.tobytes())
        if not (length < 1 << 62 and LAST_TAG < at < 1 << 63):
            raise ValueError(f"rank {group.ranks[source]} sent an invalid object header: {header.tobytes().hex()}")
        data = np.empty(length, np.uint8)
        group.recv(source, at, _core.object_dtype, data, left())
    if status is not None:
        status.source, status.tag, status.count = source, its_tag, 1
    return unpack(data, allow_pickle, data.size)


def _bytes_of(*parts: Packed) -> np.ndarray[Any, Any]:
    data = np.empty(sum(part.size for part in parts), np.uint8)
    end = 0
    for part in parts:
        begin, end = end, end + part.size
        part.write(data[begin:end])
    return data


def _gathered(function: str, mine: Packed, root: int | None, group: Group, timeout: Timeout, allow_pickle: bool) -> Any:
    """Gather every rank's object at every rank, or at the root if root is not None."""
    number = FUNCTION[function]
    lengths, length = np.empty(group.size, np.int64), np.array([mine.size], np.int64)
    head = group.core.prepare(number, length, lengths, what=FUNCTION["all_gather"], root=root, head=True)
    what = FUNCTION["all_gather"] if root is None else FUNCTION["gather"]

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        ends = np.cumsum(lengths).tolist()
        rows = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        gathers = root is None or root == group.rank
        out = np.empty(ends[-1], np.uint8) if gathers else None
        x = np.empty(mine.size, np.uint8) if out is None else out[rows[group.rank]]  # so that the call is in place
        mine.write(x)

        def result() -> list[Any] | None:
            return None if out is None else [unpack(out[row], allow_pickle, out.size) for row in rows]

        return group.core.prepare(number, x, out, what=what, root=root, rows=lengths.tolist()), result

    return group.call_after(head, data, timeout, False)

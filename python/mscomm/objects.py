"""Python objects between ranks: collective calls, and messages from one rank to another.

These objects can be sent: None; a bool, int, float, complex, str or bytes; a NumPy array or a NumPy scalar; a date,
time, datetime or timedelta, with a timezone or a ZoneInfo; a path of pathlib; a CPU tensor of PyTorch, JAX or
MindSpore, which arrives as a tensor that needs no gradient; an object of a class registered by register_object; and a
list, tuple, set, frozenset, dict or OrderedDict of such objects. Every object keeps its type. For anything else, the
call raises a TypeError that says where in the object the fault is. As for any wrong argument, the error is raised
before anything is sent, and uses up no call number. This rank has then not made the call. The other ranks wait until
this rank makes the call or ends, or until their timeout passes.

A rank that cannot read an object, for example because it has not registered the class, raises an Error, and the group
stays usable. It raises TypeError if the object has a tensor of a library that is not installed on this rank.

With `allow_pickle=True` the sender pickles what it cannot send otherwise, and the receiver unpickles it. This can run
any code of the sender's choice, so use it only if you trust every rank of the group. A call without allow_pickle that
receives a pickle raises an Error.

`group`, `root` and `timeout` are as in the collectives; `src` and `dst` are ranks in the group.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from mscomm import _core
from mscomm.arrays.numpy import dtype_code
from mscomm.collectives import FUNCTION, gather_rows
from mscomm.group import Group
from mscomm.job import resolve
from mscomm.messages import LAST_TAG, Status, checked_rank, checked_source, checked_tag
from mscomm.packing import pack, unpack
from mscomm.registry import register_object as register_object

Timeout = float | timedelta | None

# An object is sent as two messages. The first has the length of the object's bytes and the tag of the second message,
# which has the bytes. Each object has a tag of its own, above all tags of users, so that messages of several threads to
# one rank cannot be mixed up.
_HEADER = struct.Struct("<QQ")
_tags = itertools.count(LAST_TAG + 1)


def all_gather_object(
    obj: Any, *, group: Group | str | None = None, timeout: Timeout = None, allow_pickle: bool = False
) -> list[Any]:
    """A list of every rank's obj, in rank order, as new objects. The ranks' objects need not be alike.

    mscomm.objects says what obj may be, what allow_pickle does, and which errors are raised.

    >>> mscomm.all_gather_object({"rank": mscomm.get_rank()})              # on 2 ranks
    [{'rank': 0}, {'rank': 1}]
    """
    mine = _bytes_of(pack(obj, allow_pickle))
    gathered = gather_rows("all_gather_object", mine, None, None, resolve(group), timeout, False)
    return _unpacked(gathered, allow_pickle)


def gather_object(
    obj: Any,
    root: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> list[Any] | None:
    """At the root, a list of every rank's obj, in rank order, as new objects. Other ranks get None.

    Objects are sent as in all_gather_object.

    >>> mscomm.gather_object(mscomm.get_rank() ** 2)                       # on 3 ranks, at rank 0
    [0, 1, 4]
    """
    group = resolve(group)
    mine = _bytes_of(pack(obj, allow_pickle))
    root = group.core.root(FUNCTION["gather_object"], root)
    gathered = gather_rows("gather_object", mine, root, None, group, timeout, False)
    return None if gathered is None else _unpacked(gathered, allow_pickle)


def broadcast_object(
    obj: Any,
    root: int = 0,
    *,
    group: Group | str | None = None,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """The root's obj as a new object, on every rank. Only the root reads obj.

    The object is sent as in all_gather_object.

    >>> mscomm.broadcast_object({"lr": 0.1} if mscomm.get_rank() == 0 else None)
    {'lr': 0.1}
    """
    group = resolve(group)
    function, what = FUNCTION["broadcast_object"], FUNCTION["broadcast"]
    root = group.core.root(function, root)
    at_root = root == group.rank
    mine = np.frombuffer(bytearray(pack(obj, allow_pickle)) if at_root else b"", np.uint8)
    length = np.array([mine.size], np.int64)

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        x = mine if at_root else np.empty(int(length[0]), np.uint8)
        return group.core.prepare(function, x, x, what=what, root=root), lambda: unpack(x, allow_pickle)

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
    """This rank's item of the root's objs, as a new object.

    objs: a list or tuple with one object for each rank; only the root reads it. The root raises TypeError if objs is
    something else, and ValueError if it has another length. The objects are sent as in all_gather_object.

    >>> mscomm.scatter_object(["a", {"b": 1}] if mscomm.get_rank() == 0 else None)   # on 2 ranks: rank 0, rank 1
    'a'
    {'b': 1}
    """
    group = resolve(group)
    function = FUNCTION["scatter_object"]
    root = group.core.root(function, root)
    parts: list[bytes] = []
    if root == group.rank:
        if not isinstance(objs, Sequence) or isinstance(objs, (str, bytes)):
            raise TypeError(
                f"scatter_object: objs is a {type(objs).__name__} at the root; expected a list, an item a rank"
            )
        if len(objs) != group.size:
            raise ValueError(f"scatter_object: objs has {len(objs)} items; the group has {group.size} ranks")
        parts = [pack(obj, allow_pickle, f"objs[{i}]") for i, obj in enumerate(objs)]
    lengths = np.array([len(part) for part in parts] or [0] * group.size, np.int64)

    def data() -> tuple[_core.Call, Callable[[], Any]]:
        mine = np.empty(lengths[group.rank], np.uint8)
        x = _bytes_of(b"".join(parts)) if parts else None
        told = ((int(lengths.sum()),), dtype_code(mine.dtype))
        call = group.core.prepare(
            function, x, mine, what=FUNCTION["scatter"], root=root, rows=lengths.tolist(), told=told
        )
        return call, lambda: unpack(mine, allow_pickle)

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
    """Send obj to rank dst, which receives it by recv_object with this rank as src and the same tag.

    dst, tag, the errors, and the moment of return are as in send. mscomm.objects says what obj may be, and what
    allow_pickle does. Several threads may send to one rank and tag at once. If a recv gets the object, or a recv_object
    gets the message of a send, both ranks raise Mismatch.

    >>> if mscomm.get_rank() == 0:                                         # on 2 ranks
    ...     mscomm.send_object({"step": 7}, dst=1)
    ... else:
    ...     print(mscomm.recv_object(src=0))
    {'step': 7}
    """
    group = resolve(group)
    dst, tag = checked_rank("send_object", "dst", dst, group), checked_tag("send_object", "tag", tag)
    data = _bytes_of(pack(obj, allow_pickle))
    left = _seconds_left(group.seconds(timeout))
    at = next(_tags)
    header = _bytes_of(_HEADER.pack(data.size, at))
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
    """The next object that rank src sends to this rank by send_object with this tag.

    src and tag (also mscomm.ANY_SOURCE and ANY_TAG), status, the errors, and the order of messages are as in recv. If
    the object cannot be read, recv_object raises an Error, and the group stays usable.

    >>> obj = mscomm.recv_object(src=0, tag=7)                             # on rank 1, while rank 0 sends
    """
    group = resolve(group)
    wanted = checked_source("recv_object", src, tag, "tag", status, group)
    left = _seconds_left(group.seconds(timeout))
    header = np.empty(_HEADER.size, np.uint8)
    with group.committed("recv_object"):
        source, its_tag = group.recv(*wanted, _core.object_dtype, header, left())
        length, at = _HEADER.unpack(header.tobytes())
        if not (length < 1 << 62 and LAST_TAG < at < 1 << 63):
            raise ValueError(f"rank {group.ranks[source]} sent a header of no object: {header.tobytes().hex()}")
        data = np.empty(length, np.uint8)
        group.recv(source, at, _core.object_dtype, data, left())
    if status is not None:
        status.source, status.tag, status.count = source, its_tag, 1
    return unpack(data, allow_pickle)


def _bytes_of(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


def _unpacked(gathered: tuple[np.ndarray[Any, Any], list[int]], allow_pickle: bool) -> list[Any]:
    rows, counts = gathered
    ends = np.cumsum(counts).tolist()
    return [unpack(rows[begin:end], allow_pickle) for begin, end in zip([0, *ends], ends, strict=False)]


def _seconds_left(seconds: float) -> Callable[[], float]:
    """A function that returns how many seconds are left of a timeout that begins now.

    The two messages of an object share one timeout.
    """
    until = time.monotonic() + seconds
    return lambda: max(until - time.monotonic(), 0.001)

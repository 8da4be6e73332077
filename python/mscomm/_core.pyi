"""The C++ core: what src/module.cc offers.

The place of a name in collectives, functions, ops and dtypes() is its number in the other functions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, final

import numpy as np

version: str
max_dims: int
any_source: int
any_tag: int
last_tag: int
collectives: list[str]
functions: list[str]
ops: list[str]
object_dtype: int
"""Of messages that are Python objects, beside those of dtypes()."""

def dtypes() -> list[str]: ...
def supports(dtype: int, op: int, /) -> bool: ...
def algorithms() -> list[tuple[str, str, Literal["arena", "mesh", "both"]]]:
    """(collective, name, carrier) of each, in order of preference."""

def select(
    what: int, hosts: Sequence[int], forced: Sequence[str], /
) -> list[tuple[str, Literal["arena", "mesh", "both"]]]:
    """The algorithms, and their carriers, for a collective among ranks on these hosts; forced: by collective, "" to
    choose. With several it depends on the size of the message, see Group.chosen; small ones go by the last.

    ValueError for a forced name that is none, or that these hosts do not allow.
    """

def make_heap(bytes: int, own_tmpfs: bool, /) -> tuple[Heap, int]:
    """A heap and the descriptor by which the peers map it; the caller closes it. own_tmpfs: if the kernel denies memfds
    huge pages, try a tmpfs of this process's own."""

def describe_memory(own_tmpfs: bool, /) -> str:
    """What kind of memory make_heap takes here, and whether it has huge pages.

    Such as "memfd, huge pages (shmem_enabled: advise)". Error where there is none.
    """

@final
class Heap:
    """One rank's shared memory."""

    def allocate(self, bytes: int, /) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """At least that many bytes, in use for as long as an array refers to them; None when there is no room."""

    def in_use(self) -> int:
        """Bytes that arrays refer to, control memory of groups among them."""

    def retire(self) -> None:
        """An epoch is over: nobody else may touch the memory any more; arrays in it keep what they hold."""

    def reserve_control(self, size: int, /) -> int:
        """Memory for the arena of a group of that size; returns its offset, which the group's ranks are told."""

    def release_control(self, control: int, size: int, /) -> None:
        """This rank is done with it; the memory is free when all `size` ranks are. size 0: no rank has used it."""

    def abandon_control(self, control: int, size: int, /) -> None:
        """release_control() by a rank that has founded no group there, although the others may have."""

@final
class Peers:
    """The ranks of a job in one epoch, as every group of it sees them."""

    def __init__(
        self,
        *,
        rank: int,
        names: Sequence[str],
        hosts: Sequence[int],
        pidfds: Sequence[int],
        heap: Heap | None,
        heap_fds: Sequence[int],
    ) -> None:
        """All but heap are by rank; pidfds are taken over, heap_fds stay the caller's; -1: there is none."""

@final
class Runtime:
    """A vendor's library for its devices, as CUDA's driver."""

    def version(self) -> str:
        """Such as "CUDA 13.0 (/usr/lib/x86_64-linux-gnu/libcuda.so.1)"."""

    def devices(self) -> int:
        """How many this process sees."""

    def device_name(self, device: int, /) -> str: ...
    def uuid(self, device: int, /) -> str:
        """Which device it is, whatever number it has in this process."""

    def device_of(self, memory: int, /) -> int:
        """To which device that address belongs; -1 where the library cannot tell."""
    def kernels(self, device: int, /) -> str:
        """Which kernels of ours the device has, or why it has none: "none, " and the reason. Uses the device."""

    def use(self, device: int, /) -> None:
        """Make it the thread's current one."""

@final
class Vendor:
    """A vendor's library for collectives, as NCCL."""

    def name(self) -> str: ...
    def version(self) -> str:
        """Such as "2.28.9"."""

    def path(self) -> str: ...
    def origin(self) -> str:
        """Which of the places it was, by its first word."""

    def refuses(self, dtype: int, op: int, /) -> str:
        """Why it cannot reduce such elements so; "": it can."""

    def make_id(self, runtime: Runtime, device: int, /) -> bytes:
        """For the ranks of a group that is to be; of the device of one of them."""

def open_nccl(places: Sequence[tuple[str, str, str]], /) -> Vendor:
    """The library at the first place (what it is called, path, "usual", "loaded" or "must") that has one.

    BackendUnavailable with what was tried.
    """

def describe_dlpack(capsule: object, /) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, str, int, int, bool]:
    """(address, shape, strides in bytes or None, dtype, device type, device number, read-only) of a DLPack capsule.

    The capsule stays as it is and owns the memory. ValueError for what no array of mscomm's is.
    """

def open_hccl(
    collectives: Sequence[tuple[str, str, str]], communicators: Sequence[tuple[str, str, str]], soc: str, /
) -> Vendor:
    """The same of HCCL. communicators: of the library that newer releases have for them. soc: the device's name."""

def open_acl(places: Sequence[tuple[str, str, str]], visible: Sequence[str], /) -> Runtime:
    """AscendCL; BackendUnavailable, too, if it finds no NPU. visible: the host's numbers of those that it shows."""

def open_cuda(places: Sequence[tuple[str, str, str]], *, image: bytes | None = None) -> Runtime:
    """The same of the driver; BackendUnavailable, too, if it finds no GPU. image: instead of the embedded one."""

def embedded_image() -> tuple[bytes, str]:
    """The kernels for all devices, and which they are ("sm_75 sm_80 ... compute_121"); empty if built without nvcc."""

@final
class Work:
    """A call on its group's worker thread, or on the device. number: its place in the group's order; 0: a message."""

    @property
    def number(self) -> int: ...
    def done(self) -> bool: ...
    def wait(self, timeout_s: float, /) -> bool:
        """Whether it has ended, after at most that long."""

    def check(self) -> None:
        """Raise the error that it ended with, if it did."""

    def matched(self) -> tuple[int, int] | None:
        """Of a recv that has ended well: the message's source and tag."""

@final
class Group:
    """One rank's part of a group: its communicator, transports and recorder."""

    def __init__(
        self,
        *,
        name: str,
        peers: Peers,
        ranks: Sequence[int],
        rank: int,
        epoch: int,
        forced: Sequence[str],
        control: int,
        spin: bool,
        links: Sequence[int],
        news_fd: int,
    ) -> None:
        """ranks: of the job; rank: this one's place among them. links: sockets by place, taken over, -1 for this rank.

        No arena with control -1, no mesh with empty links. news_fd: an eventfd that is written when a call beside
        the callers has failed, and when there are notices; or -1.
        """

    def run(
        self,
        what: int,
        function: int,
        dtype: int,
        op: int,
        root: int,
        x: np.ndarray[Any, Any] | None,
        out: np.ndarray[Any, Any] | None,
        timeout_s: float,
        shape: Sequence[int] | None,
        counts: Sequence[int],
        digest: int,
        head: bool,
        stream: int | None,
        number: int,
        /,
    ) -> None:
        """One collective call on C-contiguous arrays, which the caller has checked. stream: of arrays on the device,
        for which it returns when it is enqueued; None: they are the CPU's. number: reserved, 0: the next."""

    def start(
        self,
        what: int,
        function: int,
        dtype: int,
        op: int,
        root: int,
        x: np.ndarray[Any, Any] | None,
        out: np.ndarray[Any, Any] | None,
        timeout_s: float,
        shape: Sequence[int] | None,
        counts: Sequence[int],
        digest: int,
        head: bool,
        stream: int | None,
        number: int,
        /,
    ) -> Work:
        """The same on the worker's thread, or on a stream of the group's own, after what `stream` has so far; x and out
        must live until it has ended. number: of a call on the device alone."""

    def join_device(
        self, vendor: Vendor, runtime: Runtime, device: int, id: bytes, timeout_s: float, check: Callable[[], object], /
    ) -> None:
        """Before the first call: from now on arrays of that device can be given. All ranks do it with the same id.

        check: called each 50 ms or more often; may raise to end the wait. CollectiveTimeout.
        """

    def order(self, number: int, stream: int, /) -> None:
        """What is enqueued on the stream from now on comes after that call."""

    def pack(
        self,
        bucket: np.ndarray[Any, Any],
        parts: Sequence[np.ndarray[Any, Any]],
        stream: int,
        *,
        scale: float = 1.0,
        begins: Sequence[int] | None = None,
        residual: np.ndarray[Any, Any] | None = None,
        largest: float = ...,
    ) -> None:
        """Bring the parts, all of one dtype, into the bucket, on the device: to where `begins` says, in elements and
        ascending, else one after the other.

        Each element is multiplied by scale, and rounded where the bucket has another dtype. residual: float32, by the
        places of the bucket: it is added before the rounding, and is then what rounding took away (error feedback),
        also what was beyond `largest`. ValueError if they do not fit; RuntimeError for what no kernel of the device
        does: plain copies, the same dtype and scale 1, need none; for the rest see packs.
        """

    def unpack(
        self,
        bucket: np.ndarray[Any, Any],
        parts: Sequence[np.ndarray[Any, Any]],
        stream: int,
        *,
        scale: float = 1.0,
        begins: Sequence[int] | None = None,
    ) -> None:
        """The same back."""

    def clear(self, memory: np.ndarray[Any, Any], stream: int, /) -> None:
        """Every byte of a contiguous array of the device becomes zero."""

    def packs(self, dtype: int, bucket: int, /) -> bool:
        """Whether the device has kernels that pack and unpack parts of that dtype with a scale and, where the bucket's
        is another, with a cast and a residual."""

    def plain_calls(
        self,
        timeout_s: float,
        beside: list[Any],
        failed: Callable[[BaseException], NoReturn],
        libraries: Mapping[type, tuple[Any, ...]],
        device: int,
        /,
    ) -> Callable[[Any, Any, Any, Any, Any], Any]:
        """call(what, x, op, root, out) of plain arrays: NumPy's, and those of the device whose type has a row (plain,
        empty, written) in libraries; it returns NotImplemented for what else it is given, and while there is something
        in beside. An exception of the call is handed to failed, which raises it or another."""

    def reserve(self, count: int, /) -> int:
        """That many call numbers in a row; returns the first."""

    def send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> None:
        """One message to that rank of the group, to which there is a link; spent_s: what has passed of the time."""

    def recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> tuple[int, int]:
        """One message from that rank, or any_source, with that tag, or any_tag; returns its source and tag."""

    def sendrecv(
        self,
        to: int,
        send_tag: int,
        x_dtype: int,
        x: np.ndarray[Any, Any],
        source: int,
        recv_tag: int,
        out_dtype: int,
        out: np.ndarray[Any, Any],
        timeout_s: float,
        spent_s: float,
        /,
    ) -> tuple[int, int]:
        """Both, begun together; returns the source and tag of what came."""
    def start_send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work:
        """The same on the messages' thread; x must live until it has ended."""

    def start_recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work: ...
    def add_outgoing(self, peer: int, fd: int, /) -> None:
        """The link for messages to that rank: a connected socket, taken over."""

    def add_incoming(self, peer: int, fd: int, /) -> None: ...
    def expect_incoming(self, peer: int, /) -> None:
        """A link from that rank is being made: whether it is still there, the end of that link will tell."""

    def check(self, peer: int, /) -> None:
        """Raises if the group is broken, or that rank has left or ended."""

    def abort(self, kind: str, ranks: Sequence[int], waiting_for: Sequence[int], text: str, /) -> None:
        """Break the group with a verdict; from any thread, without waiting."""

    def fail(self, kind: str, ranks: Sequence[int], waiting_for: Sequence[int], text: str, /) -> None:
        """Break the group with what this rank has seen; a verdict may replace it."""

    def left(self, rank: int, /) -> None:
        """rank ended well: a failure only for a call that still needs it."""

    def where(self) -> tuple[int, bool, str]:
        """(number of the last call, whether it is still inside, words)."""

    def called(self, number: int, /) -> str:
        """The call of that number, as Mismatch names it; "" for one that was not made, or long ago."""

    def stuck(self) -> int:
        """The number of a call that has been on the device for more than a second, once; 0: none."""

    def failure(self) -> tuple[str, str, list[int], list[int], bool, int] | None:
        """(kind, text, ranks, waiting_for, whether it is the job's verdict, number of the call) of a broken group.

        number: -1 where no call saw it.
        """

    def notices(self) -> list[str]:
        """Lines for the user since the last time: who has waited long for whom."""

    def calls(self, after: int = 0) -> list[dict[str, Any]]:
        """The last calls, oldest first, those after that number: their number, call, state (inside, done, failed),
        began and took."""

    def last_look(self) -> None:
        """Compare what the peers said last with this rank's own calls; raises Mismatch."""

    def drain(self) -> None:
        """Wait until the device has ended what was enqueued, or the group is broken."""

    def close(self) -> None: ...
    def chosen(self, bytes: int = 0) -> dict[str, str]:
        """Which algorithm runs each collective of a message of so many bytes."""

    def carried(self) -> dict[str, int]:
        """Bytes of x and out of the calls that went by "arena" and by "mesh"."""

    def pulls(self) -> bool:
        """Whether the ranks read each other's private arrays where they are; False until a call has tried it."""

    def partings(self) -> int:
        """How often this rank has left a CPU on which a lower rank of its host ran."""

    def lost_wakes(self) -> int:
        """Sleeps at the gate that only their time limit ended though the gate was open: always 0, and tested to be."""

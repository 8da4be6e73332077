"""The C++ core: what src/module.cc offers.

The place of a name in collectives, functions, ops and dtypes() is its number in the other functions.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, final

import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])

version: str
max_dims: int
any_source: int
any_tag: int
last_tag: int
collectives: list[str]
functions: list[str]
ops: list[str]
object_dtype: int
"""The dtype of messages that are Python objects; dtypes() does not list it."""

def dtypes() -> list[str]: ...
def supports(dtype: int, op: int, /) -> bool: ...
def algorithms() -> list[tuple[str, str, Literal["arena", "mesh", "both"]]]:
    """(collective, name, carrier) of each, in order of preference."""

def select(
    what: int, hosts: Sequence[int], forced: Sequence[str], /
) -> list[tuple[str, Literal["arena", "mesh", "both"]]]:
    """The algorithms, and their carriers, for a collective among ranks on these hosts.

    forced: an algorithm for each collective; "": choose. If there are several algorithms, the size of the message
    decides (see Group.chosen); small messages use the last. ValueError for an unknown forced name, or for one that
    these hosts do not allow.
    """

def make_heap(bytes: int, own_tmpfs: bool, /) -> tuple[Heap, int]:
    """A heap, and the descriptor by which the peers map it, which the caller closes. own_tmpfs: try a tmpfs of this
    process's own if the kernel's default setting gives memfds no huge pages."""

def describe_memory(own_tmpfs: bool, /) -> str:
    """What kind of memory make_heap uses here, and whether it has huge pages.

    For example "memfd, huge pages (shmem_enabled: advise)". Error if no memory can be made.
    """

@final
class Heap:
    """One rank's shared memory."""

    def allocate(self, bytes: int, /) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """An array of that many bytes, which stay in use as long as an array refers to them; None if there is no room,
        or after retire()."""

    def in_use(self) -> int:
        """Bytes that arrays refer to, rounded up, without the control memory of groups."""

    def retire(self) -> None:
        """End an epoch: from now on no array is allocated or shared here. Those that exist stay valid."""

    def reserve_control(self, size: int, /) -> int:
        """Reserve memory for the arena of a group of that size. Returns its offset, which all its ranks must know."""

    def release_control(self, control: int, size: int, /) -> None:
        """Free that memory as soon as all `size` ranks have ended their use of it. size 0: no rank has used it."""

    def abandon_control(self, control: int, size: int, /) -> None:
        """release_control() by a rank that has made no group there, although the others may have."""

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
        """All sequences are by rank. pidfds are taken over; heap_fds stay the caller's. -1: there is none."""

@final
class Runtime:
    """A vendor's library for its devices, such as CUDA's driver."""

    def version(self) -> str:
        """For example "CUDA 13.0 (/usr/lib/x86_64-linux-gnu/libcuda.so.1)"."""

    def devices(self) -> int:
        """How many devices this process sees."""

    def device_name(self, device: int, /) -> str: ...
    def uuid(self, device: int, /) -> str:
        """The device's id, which does not depend on its number in this process."""

    def device_of(self, memory: int, /) -> int:
        """The device that the address belongs to; -1 if the library cannot tell."""
    def kernels(self, device: int, /) -> str:
        """Which of our kernels the device has, or "none, " and the reason. Uses the device."""

    def use(self, device: int, /) -> None:
        """Make it the thread's current device."""

@final
class Vendor:
    """A vendor's library for collectives, such as NCCL."""

    def name(self) -> str: ...
    def version(self) -> str:
        """For example "2.28.9"."""

    def path(self) -> str: ...
    def origin(self) -> str:
        """The name of the place at which the library was found."""

    def refuses(self, dtype: int, op: int, /) -> str:
        """Why it cannot reduce elements of this type by this operation; "": it can."""

    def make_id(self, runtime: Runtime, device: int, /) -> bytes:
        """The id of a new group. One of its ranks makes it, for its device, and gives it to the others."""

def open_nccl(places: Sequence[tuple[str, str, str]], /) -> Vendor:
    """The library at the first place that has one. A place is (name, path, "usual", "loaded" or "must").

    BackendUnavailable, with what was tried, if there is none.
    """

def describe_dlpack(capsule: object, /) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, str, int, int, bool]:
    """(address, shape, strides in bytes or None, dtype, device type, device number, read-only) of a DLPack capsule.

    The capsule stays unused and still owns the memory. ValueError for an array that mscomm cannot take.
    """

def open_hccl(
    collectives: Sequence[tuple[str, str, str]], communicators: Sequence[tuple[str, str, str]], soc: str, /
) -> Vendor:
    """Like open_nccl, for HCCL. communicators: places of the library for communicators, which only newer releases have.
    soc: the device's name."""

def open_acl(places: Sequence[tuple[str, str, str]], visible: Sequence[str], /) -> Runtime:
    """Like open_nccl, for AscendCL. BackendUnavailable also if there is no NPU. visible: the host's numbers of the
    devices that this process sees, if it sees only some of them."""

def open_cuda(places: Sequence[tuple[str, str, str]], *, image: bytes | None = None) -> Runtime:
    """Like open_nccl, for CUDA's driver. BackendUnavailable also if there is no GPU. image: the kernels' image
    to use instead of the embedded one."""

def embedded_image() -> tuple[bytes, str]:
    """The image of the kernels, and the devices it is for ("sm_75 ... compute_121"); empty if built without nvcc."""

class Work:
    """A call that runs beside the caller, from `async_op=True`."""

    def __init__(self) -> None:
        """For a subclass, which has all methods of its own."""

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """The call's result. Raises the call's error; TimeoutError if it has not ended in time: then it goes on.

        timeout: seconds or a timedelta; None waits as long as the call takes.
        """

    def done(self) -> bool:
        """Whether the call has ended, well or not."""

    def is_completed(self) -> bool:
        """The same as done()."""

    def exception(self) -> BaseException | None:
        """The error of a call that has ended; None if it ended well, or has not ended yet."""

    def ends_within(self, seconds: float, /) -> bool:
        """Wait at most that long. Returns whether the call has ended, and raises its error if it has ended with one.

        Signal handlers run meanwhile, and what one raises ends the wait.
        """

    def matched(self) -> tuple[int, int] | None:
        """The source and tag of the message, if this is a recv that has ended without an error."""

@final
class Array:
    """An array that the user gave, as its library describes it."""

    @property
    def given(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> int: ...
    @property
    def on_device(self) -> bool: ...

@final
class Call:
    """A checked call, with the arrays that it reads and writes, which it keeps alive."""

    @property
    def function(self) -> int: ...
    @property
    def source(self) -> np.ndarray[Any, Any]:
        """What is read: the memory of x, or of a copy in C order."""
    @property
    def target(self) -> np.ndarray[Any, Any]:
        """What is written: the memory of out, or of what result() copies there."""
    def result(self) -> Any:
        """What the user gets. To be called once, when the call has ended without an error."""

def collective(what: int, model: _F, signature: str, /) -> _F:
    """The function of that collective, which calls Python only for unusual arguments.

    model: a function with the same name, parameters and docstring. signature: of the model, as text.
    """

def set_world(core: Group | None, /) -> None:
    """Set the group of calls without `group`; None before init and after release."""

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
        """ranks: the group's ranks, as ranks of the job. rank: this rank's place among them.

        control: the offset of the arena's memory; -1: no arena. links: sockets by rank of the group, taken over, -1 for
        this rank; empty: no mesh. news_fd: an eventfd, or -1. It is written when a started call, a started message or a
        call on the device has failed, when stuck() has a number, and when there are notices.
        """

    def run(self, call: Call, timeout_s: float, number: int, /) -> None:
        """Run a call, which on the device is only enqueued when this returns. number: a reserved one; 0: the next."""

    def start(self, call: Call, timeout_s: float, number: int, /) -> Work:
        """Start it on the worker's thread, or on a stream of the group's own, after what the call's stream has so far.

        The group keeps the call until it has ended. number: as for run; only a call on the device has a reserved one.
        """

    def join_python(
        self,
        python: weakref.ref[Any],
        timeout_s: float,
        libraries: Mapping[type, tuple[Any, ...]],
        backend: str,
        device: int,
        noted: bool,
        /,
    ) -> None:
        """To be called before the first call.

        python: the mscomm.Group, of which the core calls methods. libraries: type of array -> arrays.Plain. backend,
        device: what this rank has joined with; "" and -1: nothing. noted: Python numbers each call, and is told of its
        end.
        """

    def array(self, function: int, x: Any, *, argument: str = "x", stream: int | None = None) -> Array:
        """Describe an array that the user gave, and check it as the x of a call.

        TypeError or ValueError if it is no array, or one that this call cannot take.
        """

    def prepare(
        self,
        function: int,
        x: Any,
        out: Any = None,
        *,
        what: int | None = None,
        op: str | None = None,
        root: int | None = None,
        stream: int | None = None,
        rows: Sequence[int] | None = None,
        digest: int = 0,
        head: bool = False,
        told: tuple[tuple[int, ...], int] | None = None,
        out_argument: str = "out",
    ) -> Call:
        """A checked call of the function. TypeError, ValueError: an argument is wrong.

        x: an array as the user gave it, or an Array; None in a barrier, and in a scatter on a rank that is not the
        root. out: None makes a new array like x. what: the collective; None: the one of the function's name. rows: of
        each rank; for all_to_all of each pair, a line for each sender. digest, head: csrc/base/call.h. told: shape and
        dtype of the root's x, where x is None.
        """

    def part(self, function: int, shape: tuple[int, ...], /) -> tuple[int, ...]:
        """The shape of the part that a rank gets of an array that is divided equally; ValueError if it cannot be."""

    def op(self, function: int, op: Any, /) -> int:
        """The number of the operation; ValueError if there is none of that name."""

    def root(self, function: int, root: Any, /) -> int:
        """The root as an int; TypeError, ValueError if it is no rank of the group."""

    def join_device(
        self, vendor: Vendor, runtime: Runtime, device: int, id: bytes, timeout_s: float, check: Callable[[], object], /
    ) -> None:
        """Join a device, so that calls take its arrays. All ranks must do it before the first call, with the same id.

        check: called at least every 50 ms; may raise to end the wait. CollectiveTimeout if a rank is too late.
        """

    def order(self, number: int, stream: int, /) -> None:
        """Make what is enqueued on the stream from now on wait for that call."""

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
        """Copy the parts, all of one dtype, into the bucket, on the device.

        begins: where each part begins in the bucket, in elements, ascending; None: they lie one after the other. Each
        element is multiplied by scale, and rounded if the bucket has another dtype. residual: float32, one for each
        place in the bucket. It is added before the rounding. Afterwards it holds what the rounding, and the limit
        `largest` on the values, have taken away (error feedback). ValueError if the parts do not fit. RuntimeError if
        no kernel of the device can do it (see packs). Plain copies, with the same dtype and scale 1, need no kernel.
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
        """Copy from the bucket into the parts; the arguments as for pack."""

    def clear(self, memory: np.ndarray[Any, Any], stream: int, /) -> None:
        """Set every byte of a contiguous array on the device to zero."""

    def packs(self, dtype: int, bucket: int, /) -> bool:
        """Whether the device has kernels that pack and unpack parts of that dtype with a scale and, if the bucket has
        another dtype, with a cast and a residual."""

    def reserve(self, count: int, /) -> int:
        """Take that many call numbers in a row, and return the first."""

    def send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> None:
        """Send one message to that rank of the group, to which a link must exist. spent_s: how much of timeout_s has
        passed already."""

    def recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> tuple[int, int]:
        """Receive one message from that rank or any_source, with that tag or any_tag. Returns its source and tag."""

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
        """Send and receive, started together. Returns the source and tag of the message received."""
    def start_send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work:
        """Start to send; the mailbox's thread waits for it. The group keeps x until it has ended."""

    def start_recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work: ...
    def add_outgoing(self, peer: int, fd: int, /) -> None:
        """Add the link for messages to that rank: a connected socket, taken over."""

    def add_incoming(self, peer: int, fd: int, /) -> None: ...
    def expect_incoming(self, peer: int, /) -> None:
        """Say that a link from that rank is being made. From now on the end of that link shows that it is gone."""

    def check(self, peer: int, /) -> None:
        """Raise if the group is broken, or that rank has left or ended."""

    def abort(self, kind: str, ranks: Sequence[int], waiting_for: Sequence[int], text: str, /) -> None:
        """Break the group with a verdict; from any thread, without waiting."""

    def fail(self, kind: str, ranks: Sequence[int], waiting_for: Sequence[int], text: str, /) -> None:
        """Break the group with what this rank has seen; a verdict may replace it."""

    def left(self, rank: int, /) -> None:
        """Say that this rank of the job ended well. That is a failure only for a call that still needs it."""

    def where(self) -> tuple[int, bool, str]:
        """(number of the last call, whether it has not ended well, where this rank is in words)."""

    def called(self, number: int, /) -> str:
        """The call of that number, as Mismatch names it; "" if it was not made, or too long ago."""

    def stuck(self) -> int:
        """The number of a call that has been on the device for more than a second. Returns each once; 0: none."""

    def failure(self) -> tuple[str, str, list[int], list[int], bool, int] | None:
        """(kind, text, ranks, waiting_for, whether it is a verdict, number of the call) of a broken group; else None.

        number: -1 if no call saw it.
        """

    def notices(self) -> list[str]:
        """Lines for the user since the last time, such as for which ranks a call has waited long."""

    def calls(self, after: int = 0) -> list[dict[str, Any]]:
        """The last calls with numbers above `after`, oldest first: number, call, state (inside, done, failed),
        began (seconds since 1970) and took (seconds)."""

    def last_look(self) -> None:
        """Compare the last headers from the peers with this rank's own calls; raises Mismatch."""

    def drain(self) -> None:
        """Wait until every started call and what was enqueued on the device have ended, or the group is broken."""

    def close(self) -> None: ...
    def chosen(self, bytes: int = 0) -> dict[str, str]:
        """For each collective, the algorithm that runs it for a message of so many bytes."""

    def carried(self) -> dict[str, int]:
        """Bytes of x and out of all calls so far, by carrier: "arena" and "mesh"."""

    def pulls(self) -> bool:
        """Whether the ranks can read each other's private memory; False until a call has tried it."""

    def partings(self) -> int:
        """How often this rank has left a CPU that it shared with a lower rank of its host."""

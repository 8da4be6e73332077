"""The types of the C++ core, which src/module.cc offers to Python.

The names of collectives, functions, ops and dtypes are given to other functions as numbers: the index of the name in
the list `collectives`, `functions` or `ops`, or in the list that dtypes() returns.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar, final

import numpy as np

from mscomm.errors import Error

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
    """List all algorithms, in order of preference. An algorithm is (collective, name, carrier)."""

def select(
    what: int, hosts: Sequence[int], forced: Sequence[str], /
) -> list[tuple[str, Literal["arena", "mesh", "both"]]]:
    """List the algorithms, with their carriers, that a collective may use among ranks on these hosts.

    A call runs the first of these algorithms that accepts the size of the message, or else the last (see Group.chosen).

    forced: for each collective the name of the only algorithm that it may use, or "". ValueError if there is no
    algorithm of this name, or if these hosts do not allow the algorithm.
    """

def make_heap(bytes: int, own_tmpfs: bool, /) -> tuple[Heap, int]:
    """Make a heap. Returns the heap, and the descriptor by which the peers map it, which the caller must close.

    own_tmpfs: if memfds get no huge pages by the kernel's default setting, try a tmpfs of this process's own.
    """

def describe_memory(own_tmpfs: bool, /) -> str:
    """Say which kind of memory make_heap uses here, and whether this memory has huge pages.

    For example "memfd, huge pages (shmem_enabled: advise)". Raises Error if no memory can be made.
    """

def mismatch(who: str, callers: Sequence[tuple[str, Sequence[int]]], /) -> Error:
    """The Mismatch of ranks that made different calls. callers: each call as text, and the ranks that made it."""

@final
class Failure:
    """Why a group is broken."""

    @property
    def error(self) -> Error: ...
    @property
    def is_verdict(self) -> bool:
        """Whether `error` is the first cause. If not, it is a symptom that this rank has seen."""

    @property
    def number(self) -> int:
        """The number of the call that saw the error; -1: no call did."""

@final
class Heap:
    """The shared memory of one rank."""

    def allocate(self, bytes: int, /) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """Make an array of so many bytes. Its memory stays in use as long as an array refers to it.

        Returns None if there is no room, or after retire().
        """

    def in_use(self) -> int:
        """How many bytes the arrays in the heap have in total, rounded up. Control memory does not count."""

    def retire(self) -> None:
        """End the epoch: no array is allocated or shared in this heap any more. Existing arrays stay valid."""

    def reserve_control(self, size: int, /) -> int:
        """Reserve control memory for a group of so many ranks. Returns its offset, which all these ranks must know."""

    def release_control(self, control: int, size: int, /) -> None:
        """Free the control memory as soon as all ranks have ended their use of it. size 0: no rank has used it."""

    def abandon_control(self, control: int, size: int, /) -> None:
        """Like release_control(), for a rank that made no group with this memory, although the other ranks may have."""

@final
class Peers:
    """The ranks of a job in one epoch. All groups of this rank share this object."""

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
        """Every sequence has one entry for each rank of the job. A descriptor of -1 means that there is none.

        The core takes over pidfds. The caller keeps heap_fds.
        """

@final
class Runtime:
    """A vendor's library for its devices, such as CUDA's driver."""

    def version(self) -> str:
        """For example "CUDA 13.0 (/usr/lib/x86_64-linux-gnu/libcuda.so.1)"."""

    def devices(self) -> int:
        """The number of devices that this process sees."""

    def device_name(self, device: int, /) -> str: ...
    def uuid(self, device: int, /) -> str:
        """The device's id, which is the same in all processes. The number `device` may differ between processes."""

    def device_of(self, memory: int, /) -> int:
        """The number of the device that the address belongs to; -1 if the library cannot tell."""
    def kernels(self, device: int, /) -> str:
        """Which of our kernels run on the device, or "none, " and the reason. Uses the device."""

    def use(self, device: int, /) -> None:
        """Make this device the current device of the thread."""

@final
class Vendor:
    """A vendor's library for collectives, such as NCCL."""

    def name(self) -> str: ...
    def version(self) -> str:
        """The version of the library, for example "2.28.9"."""

    def path(self) -> str: ...
    def origin(self) -> str:
        """The name of the place where the library was found."""

    def refuses(self, dtype: int, op: int, /) -> str:
        """Why the library cannot reduce elements of this dtype with this operation; "" if it can."""

    def make_id(self, runtime: Runtime, device: int, /) -> bytes:
        """Make the id of a new group. One rank calls this, for its device, and gives the id to the other ranks."""

def open_nccl(places: Sequence[tuple[str, str, str]], /) -> Vendor:
    """Open the library at the first place that has one. A place is (name, path, kind).

    The kind is "usual", "loaded" or "must" (see csrc/base/dynlib.h). If no place has the library, raises
    BackendUnavailable with a list of what was tried.
    """

def describe_dlpack(capsule: object, /) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, str, int, int, bool]:
    """Describe the array in a DLPack capsule.

    Returns (address, shape, strides in bytes or None, dtype, device type, device number, read-only). The capsule can
    still be used, and still owns the memory. ValueError for an array that mscomm cannot take.
    """

def open_hccl(
    collectives: Sequence[tuple[str, str, str]], communicators: Sequence[tuple[str, str, str]], soc: str, /
) -> Vendor:
    """Like open_nccl, for HCCL. soc: the device's name.

    communicators: the places of a second library, for communicators, which only newer releases have.
    """

def open_acl(places: Sequence[tuple[str, str, str]], visible: Sequence[str], /) -> Runtime:
    """Like open_nccl, for AscendCL. Also raises BackendUnavailable if there is no NPU.

    visible: if this process sees only some of the host's devices, their numbers on the host.
    """

def open_cuda(places: Sequence[tuple[str, str, str]], *, image: bytes | None = None) -> Runtime:
    """Like open_nccl, for CUDA's driver. Also raises BackendUnavailable if there is no GPU.

    image: an image of the kernels that replaces the embedded image.
    """

def embedded_image() -> tuple[bytes, str]:
    """Returns the image of the kernels, and the devices that the image is for, such as "sm_75 ... compute_121".

    The image is empty if this build was made without nvcc.
    """

class Work:
    """A call that runs beside the caller, from `async_op=True`."""

    def __init__(self) -> None:
        """For a subclass that overrides all methods."""

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Wait for the call, and return its result. Raises the call's error.

        Raises TimeoutError if the call has not ended in time; the call then goes on. timeout: seconds or a timedelta;
        None waits as long as the call takes.
        """

    def done(self) -> bool:
        """Whether the call has ended, with or without an error."""

    def is_completed(self) -> bool:
        """Does the same as done()."""

    def exception(self) -> BaseException | None:
        """The error of a call that has ended with an error. Otherwise None."""

    def _join(self, seconds: float | None, /) -> bool:
        """Wait like wait(), but for at most the given seconds, and make no result. Returns whether the call has ended.

        For a call that is a part of another one.
        """

    def matched(self) -> tuple[int, int] | None:
        """The source and the tag of the message, for a recv that has ended without an error; otherwise None."""

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
    """A checked call. It keeps alive the arrays that it reads and writes."""

    @property
    def function(self) -> int: ...
    @property
    def source(self) -> np.ndarray[Any, Any]:
        """The memory that the call reads: the memory of x, or of a copy of x in C order."""
    @property
    def target(self) -> np.ndarray[Any, Any]:
        """The memory that the call writes: the memory of out, or of an array that result() copies to out."""
    def result(self) -> Any:
        """Return what the user gets. Call this once, after the call has ended without an error."""

def collective(what: int, model: _F, signature: str, /) -> _F:
    """Make the Python function of a collective. It calls Python code only for unusual arguments.

    model: a Python function with the same name, parameters and docstring. signature: the signature of model, as text.
    """

def set_world(core: Group | None, /) -> None:
    """Set the group of all calls without the argument `group`. core is None before init and after release."""

@final
class Group:
    """One rank's part of a group, with its communicator, carriers and recorder."""

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

        control: the offset of the arena's memory; -1: no arena. links: a socket for each rank of the group, and -1 for
        this rank; empty: no mesh. The core takes the sockets over. news_fd: an eventfd, or -1. The core writes to it
        when a started call, a started message or a call on the device has failed, when stuck() has a number, and when
        there are notices.
        """

    def run(self, call: Call, timeout_s: float, number: int, /) -> None:
        """Run a call. A call on the device has only been enqueued when run() returns.

        number: the number that was reserved for the call; 0: the next number.
        """

    def start(self, call: Call, timeout_s: float, number: int, /) -> Work:
        """Start a call on the worker's thread or, for a call on the device, on a stream of the group's own.

        On the device, the call runs after all work that is now on the call's stream. The group keeps the call until it
        has ended. number: as for run(); only a call on the device can have a reserved number.
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
        """Connect the core's group with the Group of Python. Must be called before the first call.

        python: a weak reference to the mscomm.Group, whose methods the core calls. libraries: from a type of array to
        its row, an arrays.Plain. backend, device: the device with which this rank has joined; "" and -1: none. noted:
        whether the core asks Python for the number of each call, and tells Python when the call has ended.
        """

    def array(self, function: int, x: Any, *, argument: str = "x", stream: int | None = None) -> Array:
        """Describe an array that the user gave, and check it as the x of a call.

        TypeError or ValueError if x is no array, or an array that this call cannot take.
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
        """Check the arguments of a call, and prepare it. TypeError or ValueError if an argument is wrong.

        x: an array as the user gave it, or an Array; None in a barrier, and in a scatter on a rank that is not the
        root. out: None makes a new array like x. what: the collective; None takes the one with the function's name.
        rows: the number of rows of each rank, if the numbers differ; for all_to_all a table with a line for each
        sender. digest, head: see Signature in csrc/base/call.h. told: if x is None in a scatter, shape and dtype of the
        root's x.
        """

    def part(self, function: int, shape: tuple[int, ...], /) -> tuple[int, ...]:
        """Divide an array of this shape into equal parts. Returns the shape of one part, or raises ValueError."""

    def op(self, function: int, op: Any, /) -> int:
        """The number of the operation with this name; ValueError if there is none."""

    def root(self, function: int, root: Any, /) -> int:
        """The root as an int. TypeError if it is no integer, ValueError if it is no rank of the group."""

    def join_device(
        self, vendor: Vendor, runtime: Runtime, device: int, id: bytes, timeout_s: float, check: Callable[[], object], /
    ) -> None:
        """Join a device, so that calls accept arrays on it. All ranks must do this before the first call.

        id: the same on all ranks. check: a function that is called at least every 50 ms, and may raise an exception to
        end the wait. CollectiveTimeout if a rank does not come in time.
        """

    def order(self, number: int, stream: int, /) -> None:
        """Make work that is enqueued on the stream from now on wait for the call with this number."""

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
        """Copy the parts, which have one dtype, into the bucket. All arrays are on the device.

        begins: the element of the bucket at which each part begins, in ascending order; None: the parts lie one after
        the other. Each element is multiplied by scale, and rounded if the bucket has another dtype.

        residual: a float32 for each element of the bucket. It is added before the rounding. Afterwards it holds what
        was lost by the rounding and by `largest`, the limit on the values (error feedback).

        ValueError if the parts do not fit. RuntimeError if the device has no kernel for this (see packs). Plain copies,
        with the same dtype and scale 1, need no kernel.
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
        """Copy from the bucket into the parts. The arguments are those of pack."""

    def clear(self, memory: np.ndarray[Any, Any], stream: int, /) -> None:
        """Set every byte of a contiguous array on the device to zero."""

    def packs(self, dtype: int, bucket: int, /) -> bool:
        """Whether the device has kernels that pack and unpack parts of this dtype with a scale.

        bucket: the dtype of the bucket. If it differs from dtype, the kernels must also have casts and a residual.
        """

    def reserve(self, count: int, /) -> int:
        """Reserve `count` consecutive call numbers, and return the first."""

    def send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> None:
        """Send one message to a peer. There must be a link to this peer.

        spent_s: how many of the timeout_s seconds have passed already.
        """

    def recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> tuple[int, int]:
        """Receive one message. Returns its source and tag. peer may be any_source, and tag may be any_tag."""

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
        """Send and receive, started together. Returns the source and tag of the received message."""
    def start_send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work:
        """Start a send. The mailbox's thread waits for it to end, and the group keeps x until then."""

    def start_recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work: ...
    def add_outgoing(self, peer: int, fd: int, /) -> None:
        """Add the link for messages to the peer. fd is a connected socket, which the core takes over."""

    def add_incoming(self, peer: int, fd: int, /) -> None: ...
    def expect_incoming(self, peer: int, /) -> None:
        """Say that a link from the peer is being made.

        From now on, a recv counts the peer as gone only when this link has ended.
        """

    def check(self, peer: int, /) -> None:
        """Raise if the group is broken, if the peer has left the job, or if the peer's process has ended."""

    def abort(self, verdict: Error, /) -> None:
        """Break the group with a verdict. Any thread may call this; it does not wait."""

    def fail(self, symptom: Error, /) -> None:
        """Break the group with a symptom, which is what this rank has seen. A verdict may replace the symptom."""

    def left(self, rank: int, /) -> None:
        """Say that a rank of the job has left without an error. Only calls and messages that wait for it fail."""

    def where(self) -> tuple[int, bool, str]:
        """Say where this rank is: (number of the last call, whether it has not ended well, the place in words)."""

    def called(self, number: int, /) -> str:
        """Describe the call with this number as Mismatch does; "" if it was not made, or too long ago."""

    def stuck(self) -> int:
        """The number of a call that has been on the device for over a second; 0: none. Each number is returned once."""

    def failure(self) -> Failure | None:
        """Why the group is broken; None if it is not."""

    def notices(self) -> list[str]:
        """The new lines for the user since the last time, for example that a call has waited long for some ranks."""

    def calls(self, after: int = 0) -> list[dict[str, Any]]:
        """List the last calls with numbers above `after`, oldest first, as dicts.

        The keys are number, call, state (inside, done, failed), began (seconds since 1970) and took (seconds).
        """

    def last_look(self) -> None:
        """Compare the last headers from the peers with this rank's own calls. Raises Mismatch if they differ."""

    def drain(self) -> None:
        """Wait until all started calls and all work on the device have ended, or until the group is broken."""

    def close(self) -> None: ...
    def chosen(self, bytes: int = 0) -> dict[str, str]:
        """For each collective, the algorithm that runs for a message of so many bytes."""

    def carried(self) -> dict[str, int]:
        """How many bytes of x and out each carrier ("arena", "mesh") has had in all calls so far."""

    def pulls(self) -> bool:
        """Whether the ranks can read each other's private memory. False as long as no call has tried it."""

    def partings(self) -> int:
        """How often this rank has moved to another CPU because a lower rank of its host used the same CPU."""

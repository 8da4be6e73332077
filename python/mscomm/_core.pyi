"""The types of the C++ core, which src/module.cc exposes to Python.

If a collective, a function, an op or a dtype is an int, the int is the index of its name in the list `collectives`,
`functions` or `ops`, or in the list that dtypes() returns.
"""

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from types import ModuleType, TracebackType
from typing import Any, Literal, TypeVar, final

import numpy as np

from mscomm.errors import Error

_F = TypeVar("_F", bound=Callable[..., Any])

version: str
max_dims: int
max_depth: int
"""How deep the containers of an object may be nested."""
any_source: int
any_tag: int
last_tag: int
collectives: list[str]
functions: list[str]
ops: list[str]
object_dtype: int
"""The dtype of messages that are Python objects; dtypes() does not list it."""

def dtypes() -> list[str]: ...
def itemsize(dtype: int, /) -> int: ...
def supports(dtype: int, op: int, /) -> bool: ...
def compress(
    x: np.ndarray[Any, Any], residual: np.ndarray[Any, Any], narrow: np.ndarray[Any, Any], largest: float, /
) -> None:
    """Round x (float32 or float64) to the dtype of narrow (float16 or bfloat16), with error feedback.

    Add the residual to x, limit the sum to values from -largest to largest, and round it. Then set the residual to what
    the limit and the rounding have removed. The arrays must be contiguous and have the same number of elements.
    """

def expand(narrow: np.ndarray[Any, Any], out: np.ndarray[Any, Any], /) -> None:
    """Convert narrow (float16 or bfloat16) to the dtype of out (float32 or float64)."""

def pack_object(obj: Any, converted: Callable[[Any], tuple[Any, ...]], fields: type[dict[str, Any]], /) -> bytes:
    """Return the bytes of an object. The bytes are only for unpack_object.

    converted(part) is called for each part of a type that the core does not know. It returns whether the part stays one
    object if it occurs several times, its kind (below 256), and the values that are sent for it. Only the values of
    kind 0 may contain containers. fields: a subclass of dict whose objects are sent as dicts.
    """

def unpack_object(
    data: memoryview, make: Callable[[int, tuple[Any, ...]], Any], may_be_shared: Callable[[Any], bool], /
) -> Any:
    """Return the object with these bytes. Raise ValueError if they are not the output of pack_object.

    make(kind, values) creates a part from what converted() has returned for it. may_be_shared(part) tells whether a
    part may occur several times.
    """

def algorithms() -> list[tuple[str, str, Literal["arena", "mesh", "both"], bool]]:
    """Return all algorithms, in order of preference, as (collective, name, carrier, own_order).

    own_order: whether the algorithm adds floats in an order of its own. It then runs only if MSCOMM_ALGO names it.
    """

def make_heap(bytes: int, own_tmpfs: bool, /) -> tuple[Heap, int]:
    """Create a heap. Return the heap and its descriptor. The peers need the descriptor to map the heap. The caller must
    close the descriptor.

    own_tmpfs: whether to try a tmpfs of this process's own if the kernel's default setting gives memfds no huge pages.
    """

def describe_memory(own_tmpfs: bool, /) -> str:
    """Describe the kind of memory that make_heap uses here, and say whether it has huge pages.

    An example is "memfd, huge pages (shmem_enabled: advise)". Raise Error if no such memory can be created.
    """

def mismatch(who: str, callers: Sequence[tuple[str, Sequence[int]]], /) -> Error:
    """Return the Mismatch error for ranks that made different calls.

    callers: each call as text, and the ranks that made it.
    """

@final
class Failure:
    """Says why a group is broken."""

    @property
    def error(self) -> Error: ...
    @property
    def is_verdict(self) -> bool:
        """Whether `error` is the first cause. If not, it is a symptom that this rank has seen."""

    @property
    def number(self) -> int:
        """The number of the call that failed with the error, or -1 if the error did not occur in a call."""

@final
class Heap:
    """The shared memory of one rank."""

    def allocate(self, bytes: int, /) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
        """Allocate an array of this many bytes. Its memory stays in use as long as an array refers to it.

        Return None if there is no room, or after retire().
        """

    def in_use(self) -> int:
        """Return the total size in bytes of all arrays in the heap, rounded up. Control memory does not count."""

    def kept(self) -> int:
        """Return the total size in bytes of the released arrays whose memory the heap keeps for new arrays."""

    def retire(self) -> None:
        """End the epoch: no array is allocated or shared in this heap any more. Existing arrays stay valid."""

    def reserve_control(self, size: int, /) -> int:
        """Reserve control memory for a group of `size` ranks. Return its offset, which all these ranks must know."""

    def release_control(self, control: int, size: int, /) -> None:
        """Free the memory at `control` once its `size` ranks no longer use it. Pass size 0 if no rank has used it."""

    def abandon_control(self, control: int, size: int, /) -> None:
        """Call this instead of release_control() if this rank has not created its part of the group.

        Other ranks may have created theirs, so the memory is freed only when they no longer use it.
        """

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
        """Every sequence has one entry for each rank of the job. A missing descriptor is -1.

        The core takes ownership of pidfds. The caller keeps ownership of heap_fds.
        """

@final
class Runtime:
    """A vendor's library for its devices, such as the CUDA driver."""

    def version(self) -> str:
        """Return the version, such as "CUDA 13.0 (/usr/lib/x86_64-linux-gnu/libcuda.so.1)"."""

    def devices(self) -> int:
        """Return the number of devices that this process sees."""

    def device_name(self, device: int, /) -> str: ...
    def uuid(self, device: int, /) -> str:
        """Return the device's id, which is the same in all processes.

        The number `device` may differ between processes.
        """

    def device_of(self, memory: int, /) -> int:
        """Return the number of the device that the address belongs to, or -1 if the library cannot tell."""
    def kernels(self, device: int, /) -> str:
        """Describe which of mscomm's kernels the device can run, or why it can run none. This accesses the device."""

    def use(self, device: int, /) -> None:
        """Make this device the current device of the thread."""

@final
class Vendor:
    """A vendor's collectives library, such as NCCL."""

    def name(self) -> str: ...
    def version(self) -> str:
        """Return the version of the library, for example "2.28.9"."""

    def path(self) -> str: ...
    def origin(self) -> str:
        """Return the name of the place where the library was found."""

    def refuses(self, dtype: int, op: int, /) -> str:
        """Return why the library cannot reduce elements of this dtype with this operation, or "" if it can."""

    def make_id(self, runtime: Runtime, device: int, /) -> bytes:
        """Create the id of a new group. One rank calls this for its device, and sends the id to the other ranks."""

def tls_version() -> str:
    """Open OpenSSL, and return its version as text. Raise BackendUnavailable if OpenSSL 3 cannot be opened."""

def check_certificates(
    *,
    bundle: bytes,
    password: bytes | bytearray,
    authorities: bytes,
    revoked: bytes | None,
    server: bool,
    uri: str,
    key_password: bytes,
) -> tuple[bytes, bytes, int] | None:
    """Check the certificate in a PKCS#12 bundle, and return what ssl.SSLContext needs, or None if anything is wrong.

    authorities, revoked (a revocation list, or None): in PEM form. server: whether the certificate must be for a
    server, else for a client. uri: must be among the certificate's URIs that begin with mscomm://, if it has any.

    The first result has, in PEM form, the private key, encrypted with key_password, and its certificates; the second
    one the authorities and the revocation list. The third one is when the certificate expires, in seconds since 1970.
    Raise BackendUnavailable if OpenSSL 3 cannot be opened.
    """

@final
class Tls:
    """One end of a TLS 1.3 connection over a non-blocking socket, with a key that both ends have.

    No function waits. Those that move bytes raise OSError if the link has ended or the other end's bytes are wrong.
    """

    def __init__(self, fd: int, secret: tuple[bytes, bool], /) -> None:
        """fd: the socket, which the caller owns. secret: the key of 32 bytes, and whether this end connects.

        Raise BackendUnavailable if OpenSSL 3 cannot be opened.
        """

    def shake_hands(self) -> bool:
        """Move the handshake on. Return whether it is complete."""

    def send(self, data: bytes | memoryview, /) -> int:
        """Return how many bytes the kernel has accepted. The next call must begin with the other bytes."""

    def receive(self, most: int, /) -> bytes | None:
        """Return at most `most` bytes; None if no bytes have arrived, and b"" if the other end has closed."""

    @property
    def pending(self) -> bool:
        """Whether receive() may have something to return that the socket does not announce."""

    @property
    def flushed(self) -> bool:
        """Whether the kernel has accepted all encrypted bytes."""

    def close(self) -> bool:
        """Tell the other end that nothing more will come. Return whether the kernel has accepted this."""

def open_nccl(places: Sequence[tuple[str, str, str]], /) -> Vendor:
    """Open NCCL at the first place where it can be opened. A place is (name, path, kind).

    The kind is "usual", "loaded" or "must" (see csrc/base/dynlib.h). If no place has the library, raise
    BackendUnavailable with a list of what was tried.
    """

def describe_dlpack(capsule: object, /) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, str, int, int, bool]:
    """Describe the array in a DLPack capsule.

    Return (address, shape, strides in bytes or None, dtype, device type, device number, read-only). The capsule can
    still be used, and still owns the memory. Raise ValueError for an array that mscomm does not support.
    """

def open_hccl(
    collectives: Sequence[tuple[str, str, str]], communicators: Sequence[tuple[str, str, str]], soc: str, /
) -> Vendor:
    """Open HCCL in the same way as open_nccl. soc: the device's name.

    communicators: the places of libhcomm.so, a second library that only newer releases have.
    """

def open_acl(places: Sequence[tuple[str, str, str]], visible: Sequence[str], /) -> Runtime:
    """Open AscendCL in the same way as open_nccl. Also raise BackendUnavailable if there is no NPU.

    visible: the host's numbers for the devices that this process sees; empty if it sees all devices.
    """

def open_cuda(places: Sequence[tuple[str, str, str]], *, image: bytes | None = None) -> Runtime:
    """Open the CUDA driver in the same way as open_nccl. Also raise BackendUnavailable if there is no GPU.

    image: a kernel image to use in place of the embedded one.
    """

def embedded_image() -> tuple[bytes, str]:
    """Return the embedded kernel image, and the devices that it is for, such as "sm_75 ... compute_121".

    The image is empty if mscomm was built without nvcc.
    """

class Completions:
    """A list of the calls that have completed."""

    def __init__(self) -> None: ...
    @property
    def fd(self) -> int:
        """An eventfd that is readable if the list is not empty."""

    def add(self, token: int, /) -> None:
        """Add a token to the list at once."""

    def take(self) -> list[int]:
        """Return the tokens of the calls that have completed since the last take()."""

class Work:
    """A call that was started with `async_op=True`, and runs while the caller continues."""

    def __init__(self) -> None:
        """Only a subclass that overrides all methods may call this."""

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        """Wait until the call has completed, and return its result. If the call has failed, raise its error.

        Raise TimeoutError if the call has not completed in time; the call then continues. timeout: a number of seconds
        or a timedelta, or 0 to only look; None sets no limit. For a call on the device, wait() without a timeout
        returns at once, and the array library's current stream waits for the call.

        If no thread has begun the call yet, wait() without a timeout runs it. If a signal handler then raises an
        exception, wait() raises this exception when the call has ended. If the call does not end within a second, it
        fails with Aborted.
        """

    def done(self) -> bool:
        """Return whether the call has completed, with or without an error.

        If it has completed without an error, out holds the result.
        """

    def is_completed(self) -> bool:
        """Do the same as done()."""

    def exception(self) -> BaseException | None:
        """Return the error of a call that has failed, otherwise None."""

    def cancel(self) -> bool:
        """Give up a recv for which no message has come yet. Return whether it was given up.

        Then done() is True, wait() raises concurrent.futures.CancelledError, and out is unchanged. The group goes on,
        and a later recv gets the message, if it still comes. A send, a collective call, and a recv whose message has
        come go on, and the result is False: wait for them. cancel() does not wait for other ranks.
        """

    def __await__(self) -> Generator[Any, None, Any]:
        """Let a coroutine of asyncio wait: `result = await work`."""

    def _join(self, seconds: float | None, /) -> bool:
        """Wait for at most `seconds` seconds, without producing a result. Return whether the call has completed.

        A Work that combines several calls uses this method to wait for each of them.
        """

    def _when_ended(self, completions: Completions, token: int, /) -> None:
        """Add token to the list when the call has completed, with or without an error."""

    def _hurry(self) -> None:
        """Begin the call at once in the core's worker thread, unless a thread has begun it."""

    def _failed(self) -> bool:
        """Return whether the call has completed with an error. Unlike exception(), this does not create the error."""

    def matched(self) -> tuple[int, int] | None:
        """Return the source and tag of the received message, or None.

        The result is None unless this is a recv that has completed without an error.
        """

@final
class Array:
    """An array that the user passed, as its library describes it."""

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
    """A call whose arguments have been checked. It keeps the arrays that it reads and writes alive."""

    @property
    def function(self) -> int: ...
    @property
    def source(self) -> np.ndarray[Any, Any]:
        """The memory that the call reads: the memory of x, or of a copy of x in C order."""
    @property
    def target(self) -> np.ndarray[Any, Any]:
        """The memory that the call writes: the memory of out, or of an array that result() copies to out."""
    @property
    def result_fills_out(self) -> bool:
        """Whether the core writes to memory other than out, so that result() must copy the result to out."""
    def result(self) -> Any:
        """Return the result for the user. Call this once, after the call has completed without an error."""

def collective(what: int, model: _F, signature: str, /) -> _F:
    """Create the Python function of a collective. The function runs Python code only for unusual arguments.

    model: a Python function with the same name, parameters and docstring. signature: the signature of model, as text.
    """

def message(sends: bool, model: _F, signature: str, /) -> _F:
    """Create the Python function send (if `sends` is True) or recv. See collective().

    The function also runs the model for the first message to a rank, for strided arrays and for device arrays.
    """

def set_world(core: Group | None, /) -> None:
    """Set the group for calls without the argument `group`. core is None before init and after release."""

def usual_all_reduce(options: type, sum: Any, profiler: ModuleType, /) -> Callable[[Group, Any, Any], Any]:
    """Return a function that carries out the usual calls of ProcessGroup.allreduce in torch.

    These sum one dense tensor on the host, whose elements lie in C order, and for which autograd has nothing to do,
    while no profiler records. The function takes the Group, the list of tensors and torch's options. It returns the
    tensor or, if the call is asynchronous, a Work. For all other calls, it does nothing and returns None.

    options: torch's class AllreduceOptions. sum: ReduceOp.SUM. profiler: the module torch.autograd.profiler.
    """

@final
class Layout:
    """Says on which host each rank of a group runs, and which algorithms and carriers the group therefore uses."""

    def __init__(
        self, *, hosts: Sequence[int], rank: int, forced: Sequence[str], prices: Sequence[float] | None = None
    ) -> None:
        """hosts: for each rank, the number of its host. Hosts are numbered in the order in which they first occur.
        rank: this rank. forced: for each collective, the name of the only algorithm that it may use, or "". prices: the
        fields of mscomm.cluster.prices.Prices. None means the default prices.

        Raise ValueError if a forced algorithm does not exist, or cannot be used on these hosts, or if a price is not a
        number of 0 or more.
        """

    @property
    def rank(self) -> int: ...
    @property
    def at_home(self) -> list[int]:
        """The ranks on this rank's host, including this rank."""

    @property
    def arena(self) -> bool:
        """Whether this rank needs an arena, which it shares with the ranks in at_home."""

    @property
    def mesh(self) -> bool: ...
    @property
    def partners(self) -> list[int]:
        """The ranks to which this rank has links for collective calls from the beginning."""

    def allows(self, carrier: Literal["arena", "mesh", "both"], /) -> bool:
        """Return whether ranks on these hosts can use an algorithm with this carrier."""

    @property
    def prices(self) -> list[float]: ...
    def rows(self, what: int, /) -> list[str]:
        """Return the algorithms that a collective may use."""

    def chosen(self, what: int, bytes: int, /) -> str:
        """Return the algorithm that a collective runs for a message of this many bytes."""

    def cost(self, what: int, algorithm: str, bytes: int, /) -> list[float] | None:
        """Return what a call with this algorithm costs for a message of this many bytes: how often each kind of work
        happens, in the order of the prices. None if the algorithm has no competitor that it must be compared with.
        """

@final
class CallNumbers:
    """Consecutive call numbers, reserved for an operation that consists of several calls.

    If an exception leaves the `with` block, or if the object is deleted, before calls have taken all of the numbers,
    the group breaks: no later call could ever have its turn.
    """

    @property
    def next(self) -> int:
        """The number that the next call takes."""

    def __enter__(self) -> CallNumbers: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

@final
class Group:
    """One rank's part of a group, with its communicator, carriers and recorder."""

    def __init__(
        self,
        *,
        name: str,
        peers: Peers,
        ranks: Sequence[int],
        epoch: int,
        layout: Layout,
        control: int,
        spin: bool,
        links: Sequence[int],
        news_fd: int,
        secrets: Sequence[tuple[bytes, bool] | None] = (),
    ) -> None:
        """ranks: the group's ranks, as ranks of the job. layout: the core copies it. control: if layout.arena, the
        offset of the control memory in the heap of the lowest rank on this host. links: if layout.mesh, a socket for
        each rank of the group, and -1 for this rank; otherwise empty. The core takes ownership of the sockets. news_fd:
        an eventfd, or -1. The core writes to it when an asynchronous call, an asynchronous message or a call on the
        device has failed. The core also writes to it when stuck() or notices() would return something new.

        secrets: empty, or one entry for each link. An entry is None, or the link's key of 32 bytes and whether this
        rank begins the TLS handshake, which the peer then must not do. Such a link is encrypted. The constructor waits
        for at most 5 s until the handshakes are complete; later, they continue in calls. Raises ValueError if a key has
        another length, and BackendUnavailable if OpenSSL 3 cannot be opened.
        """

    @property
    def layout(self) -> Layout: ...
    def run(self, call: Call, timeout_s: float, numbers: CallNumbers | None, /) -> None:
        """Run a call. For a call on the device, run() returns when the call has been enqueued.

        numbers: the call takes the next of these numbers or, if `numbers` is None, the group's next number.
        """

    def start(self, call: Call, timeout_s: float, numbers: CallNumbers | None, part: bool, /) -> Work:
        """Start a call on the worker's thread or, for a call on the device, on the group's own stream.

        On the device, the call runs after all work that is already on the call's stream. The group keeps the call alive
        until it has completed. numbers: as for run(). part: if True, the caller calls call.result() itself, and the
        Work's done() does not call it.
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
        """Connect the core's group with the Python Group. This must happen before the first call.

        python: a weak reference to the mscomm.Group, whose methods the core calls. libraries: maps an array type to its
        row, an arrays.Plain. backend, device: the backend and the number of the device with which this rank has joined
        the job, or "" and -1 if there is none. noted: whether the core tells the Python Group about each call: at the
        start by noted(), and at the end by ended().
        """

    def set_timeout(self, timeout_s: float, /) -> None:
        """Set the time limit of later calls that are passed none. join_python() must have been called."""

    def array(self, function: int, x: Any, *, argument: str = "x", stream: int | None = None) -> Array:
        """Describe an array that the user passed, and check whether it can be the x of a call.

        Raise TypeError or ValueError if x is not an array, or not one that this call accepts.
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
        recv_rows: Sequence[int] | None = None,
        digest: int = 0,
        head: bool = False,
        told: tuple[tuple[int, ...], int] | None = None,
        out_argument: str = "out",
    ) -> Call:
        """Check the arguments of a call, and prepare the call. Raise TypeError or ValueError if an argument is invalid.

        x: an array as the user passed it, or an Array. x is None in a barrier, and may be None in a scatter on a rank
        that is not the root. out: None creates a new array of x's type. what: the collective; None means the collective
        with the function's name. rows: in an uneven call, the number of rows of each rank; in all_to_all_v, the send
        counts of rank 0, then those of rank 1, and so on. recv_rows: in an all_to_all_v in which each rank knows only
        its own counts, the number of rows from each rank; rows then holds only this rank's send counts. digest, head:
        see Signature in csrc/base/call.h. told: if x is None in a scatter, the shape and dtype of the root's x.
        """

    def part(self, function: int, shape: tuple[int, ...], /) -> tuple[int, ...]:
        """Divide an array of this shape into equal parts. Return the shape of one part, or raise ValueError."""

    def op(self, function: int, op: Any, /) -> int:
        """Return the number of the operation with this name. Raise ValueError if there is none."""

    def join_device(
        self, vendor: Vendor, runtime: Runtime, device: int, id: bytes, timeout_s: float, check: Callable[[], object], /
    ) -> None:
        """Join a device, so that calls accept arrays on it. All ranks must do this before the first call.

        id: must be the same on all ranks. check: a function that is called at least every 50 ms, and may raise an
        exception to end the wait. Raise CollectiveTimeout if a rank does not join in time.
        """

    def order(self, number: int, stream: int, /) -> None:
        """Make all work that is later enqueued on the stream wait for the call with this number."""

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
        """Copy the parts, which all have the same dtype, into the bucket. All arrays are on the device.

        begins: the element of the bucket at which each part begins, in ascending order; None means that the parts
        directly follow each other. Each element is multiplied by scale, and rounded if the bucket has a different
        dtype.

        residual: for each element of the bucket, a float32 that is added before the rounding. Afterwards, residual
        holds what was lost by the rounding and by limiting values to `largest` (error feedback).

        Raise ValueError if the parts do not fit, and RuntimeError if the device has no kernel for this (see packs).
        Plain copies, with the same dtype and scale 1, need no kernel.
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
        """Return whether the device has kernels that pack and unpack parts of this dtype with a scale.

        bucket: the dtype of the bucket. If it differs from dtype, the kernels must also support casts and a residual.
        """

    def reserve(self, count: int, /) -> CallNumbers:
        """Reserve `count` consecutive call numbers."""

    def send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> tuple[int, int]:
        """Send one message to a peer. There must be a link to this peer. Return peer and tag, as recv() does.

        spent_s: how many of the timeout_s seconds have already passed.
        """

    def recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> tuple[int, int]:
        """Receive one message. Return its source and tag. peer may be any_source, and tag may be any_tag."""

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
        """Start a send and a recv together, and wait for both. Return the source and tag of the received message."""
    def start_send(
        self, peer: int, tag: int, dtype: int, x: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work:
        """Start a send. The mailbox's thread and Work.wait() complete it. The group keeps x alive until then."""

    def start_recv(
        self, peer: int, tag: int, dtype: int, out: np.ndarray[Any, Any], timeout_s: float, spent_s: float, /
    ) -> Work: ...
    def add_link(self, sends: bool, peer: int, fd: int, secret: tuple[bytes, bool] | None = None) -> None:
        """Add the link for messages to the peer (if `sends` is True), or for messages from the peer.

        fd is a connected socket, of which the core takes ownership. secret: as in `secrets` of the constructor; with
        it, this function waits for at most 5 s until the peer has called add_link, too.
        """

    def wanted_data_links(self) -> list[int]:
        """Return the peers whose links a collective call needs, and that were not returned yet."""

    def expect_data_link(self, peer: int, /) -> None:
        """Record that the link to the peer, for collective calls, is being set up.

        Before that, a call that needs the peer fails when the peer has left or its process has ended.
        """

    def add_data_link(self, peer: int, fd: int, secret: tuple[bytes, bool] | None = None) -> None:
        """Add the link to the peer for collective calls. fd, secret: as in add_link().

        If there is one already, or if the group has ended, close the new one.
        """

    def expect_incoming(self, peer: int, /) -> None:
        """Record that a link from the peer is being set up.

        From now on, a recv considers the peer gone only when this link has ended.
        """

    def check(self, peer: int, /) -> None:
        """Raise an error if the group is broken, if the peer has left the job, or if the peer's process has ended."""

    def abort(self, verdict: Error, /) -> None:
        """Break the group with a verdict. Any thread may call this. It does not wait."""

    def fail(self, symptom: Error, /) -> None:
        """Break the group with a symptom, which is what this rank has seen. A verdict may replace the symptom."""

    def left(self, rank: int, /) -> None:
        """Record that a job rank has left the job or the group without an error.

        Only calls and messages that wait for this rank fail.
        """

    def where(self) -> tuple[int, bool, str]:
        """Return this rank's progress: (number, unfinished, text).

        number: the number of the latest call, or 0. unfinished: whether this call is running or has failed. text: the
        progress in words, for messages.
        """

    def called(self, number: int, /) -> str:
        """Describe the call with this number, in the words that a Mismatch error uses.

        Return "" if the call was not made, or was made too long ago.
        """

    def stuck(self) -> int:
        """Return the number of the oldest call on the device if no call has completed for over a second, otherwise 0.

        After stuck() has returned a number, it returns 0 until the device backend reports a stuck call again.
        """

    def failure(self) -> Failure | None:
        """Return why the group is broken, or None if it is not."""

    def notices(self) -> list[str]:
        """Return the messages for the user that are new since the previous call of notices().

        One such message says that a call has been waiting for some ranks for a long time.
        """

    def calls(self, after: int = 0) -> list[dict[str, Any]]:
        """Return the latest calls with numbers above `after`, oldest first, as dicts.

        The keys are number, call, state (inside, done, failed), began (seconds since 1970) and took (seconds).
        """

    def last_look(self) -> None:
        """Compare the latest headers from the peers with this rank's own calls. Raise Mismatch if they differ."""

    def drain(self) -> list[str]:
        """Cancel each recv that has got no message. Then wait until all started calls and all work on the device have
        completed, or until the group is broken. Return descriptions of the cancelled recvs.
        """

    def close(self) -> None: ...
    def carried(self) -> dict[str, int]:
        """Return how many bytes of x and out each carrier ("arena", "mesh") has carried in all calls so far."""

    def pulls(self) -> bool:
        """Return whether the ranks can read each other's private memory.

        The result is False until a call has tried it.
        """

    def partings(self) -> int:
        """Return how often this rank has moved to another CPU because a lower rank of its host used the same CPU."""

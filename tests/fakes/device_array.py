"""Defines an array in the memory of a stand-in's device. Like the arrays of real frameworks, it is asynchronous and
strided, and the host cannot read it.

use(path) chooses the library. By default, arrays use the library that FAKE_CUDA_LIBRARY names or, if this variable is
not set, the CUDA stand-in that build.py makes. All work is enqueued on the calling thread's current stream, which
`with stream(handle):` sets. A thread begins with the legacy default stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import ml_dtypes
import numpy as np

_runtime: Cuda | Acl | None = None
_lock = threading.Lock()
_here = threading.local()


class DeviceError(RuntimeError):
    def __init__(self, call: str, code: int, name: str):
        super().__init__(f"{call}: {name} ({code})")
        self.code = code


class Cuda:
    """Calls the functions that arrays need from libcuda.so.1."""

    interface = "__cuda_array_interface__"

    def __init__(self, path: str | Path):
        # RTLD_GLOBAL makes this driver visible, as if a framework had loaded it. The library under test then finds the
        # driver by its soname.
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.contexts: dict[int, c_uint64] = {}
        self.call("cuInit", c_uint(0))

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            text = c_char_p()
            self.library.cuGetErrorName(code, byref(text))
            raise DeviceError(name, code, (text.value or b"?").decode())

    def order(self, stream: int, after: int) -> None:
        """Make later work on `stream` wait for all work that is already on the stream `after`."""
        event = c_uint64()
        self.call("cuEventCreate", byref(event), c_uint(2))
        self.call("cuEventRecord", event, c_uint64(after))
        self.call("cuStreamWaitEvent", c_uint64(stream), event, c_uint(0))
        self.call("cuEventDestroy_v2", event)

    @contextlib.contextmanager
    def on(self, device: int):
        with _lock:
            context = self.contexts.get(device)
            if context is None:
                context = c_uint64()
                self.call("cuDevicePrimaryCtxRetain", byref(context), c_int(device))
                self.contexts[device] = context
        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_uint64()))

    def allocate(self, nbytes: int) -> int:
        pointer = c_uint64()
        self.call("cuMemAlloc_v2", byref(pointer), c_size_t(nbytes))
        return pointer.value

    def allocate_managed(self, nbytes: int) -> int:
        pointer = c_uint64()
        self.call("cuMemAllocManaged", byref(pointer), c_size_t(nbytes), c_uint(1))
        return pointer.value

    def free(self, pointer: int, stream: int) -> None:
        try:
            self.call("cuMemFreeAsync", c_uint64(pointer), c_uint64(stream))
        except DeviceError:  # the stream no longer exists
            self.call("cuMemFree_v2", c_uint64(pointer))

    def copy_in(self, pointer: int, data: np.ndarray, stream: int) -> None:
        self.call(
            "cuMemcpyHtoDAsync_v2",
            c_uint64(pointer),
            c_void_p(data.ctypes.data),
            c_size_t(data.nbytes),
            c_uint64(stream),
        )

    def copy_out(self, data: np.ndarray, pointer: int, stream: int) -> None:
        self.call(
            "cuMemcpyDtoHAsync_v2",
            c_void_p(data.ctypes.data),
            c_uint64(pointer),
            c_size_t(data.nbytes),
            c_uint64(stream),
        )

    def copy(self, to: int, pointer: int, nbytes: int, stream: int) -> None:
        self.call("cuMemcpyDtoDAsync_v2", c_uint64(to), c_uint64(pointer), c_size_t(nbytes), c_uint64(stream))

    def synchronize(self, stream: int) -> None:
        self.call("cuStreamSynchronize", c_uint64(stream))

    def new_stream(self, blocking: bool) -> int:
        handle = c_uint64()
        self.call("cuStreamCreate", byref(handle), c_uint(0 if blocking else 1))
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        self.call("cuStreamDestroy_v2", c_uint64(stream))


class Acl:
    """Calls the functions that arrays need from libascendcl.so.

    Arrays on this runtime have no array interface, only the attributes ptr, shape, strides, dtype and device.
    """

    interface = ""
    to_device, to_host, on_device = 1, 2, 3

    def __init__(self, path: str | Path):
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        if self.library.aclInit(None) not in (0, 100002):  # 100002: other code has initialised it already
            raise DeviceError("aclInit", -1, "?")

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise DeviceError(name, code, "aclError")

    def order(self, stream: int, after: int) -> None:
        event = c_uint64()
        self.call("aclrtCreateEventWithFlag", byref(event), c_uint(1))
        self.call("aclrtRecordEvent", event, c_uint64(after))
        self.call("aclrtStreamWaitEvent", c_uint64(stream), event)
        self.call("aclrtDestroyEvent", event)

    @contextlib.contextmanager
    def on(self, device: int):
        before = c_int(-1)
        self.library.aclrtGetDevice(byref(before))
        if before.value != device:
            self.call("aclrtSetDevice", c_int(device))
        try:
            yield
        finally:
            if before.value not in (-1, device):
                self.call("aclrtSetDevice", before)

    def allocate(self, nbytes: int) -> int:
        pointer = c_uint64()
        self.call("aclrtMalloc", byref(pointer), c_size_t(nbytes), c_int(0))
        return pointer.value

    def allocate_managed(self, nbytes: int) -> int:
        pointer = c_uint64()
        self.call("fake_malloc_managed", byref(pointer), c_size_t(nbytes))
        return pointer.value

    def free(self, pointer: int, stream: int) -> None:
        try:
            self.call("fake_free_async", c_uint64(pointer), c_uint64(stream))
        except DeviceError:  # the stream no longer exists
            self.call("aclrtFree", c_uint64(pointer))

    def _copy(self, to, source, nbytes: int, kind: int, stream: int) -> None:
        count = c_size_t(nbytes)
        self.call("aclrtMemcpyAsync", c_void_p(to), count, c_void_p(source), count, c_int(kind), c_uint64(stream))

    def copy_in(self, pointer: int, data: np.ndarray, stream: int) -> None:
        self._copy(pointer, data.ctypes.data, data.nbytes, self.to_device, stream)

    def copy_out(self, data: np.ndarray, pointer: int, stream: int) -> None:
        self._copy(data.ctypes.data, pointer, data.nbytes, self.to_host, stream)

    def copy(self, to: int, pointer: int, nbytes: int, stream: int) -> None:
        self._copy(to, pointer, nbytes, self.on_device, stream)

    def synchronize(self, stream: int) -> None:
        self.call("aclrtSynchronizeStream", c_uint64(stream))

    def new_stream(self, blocking: bool) -> int:
        handle = c_uint64()
        self.call("aclrtCreateStream", byref(handle))
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        self.call("aclrtDestroyStream", c_uint64(stream))


def use(path: str | Path, kind: type[Cuda] | type[Acl] | None = None) -> Cuda | Acl:
    """Use this library for all arrays of the process. Return an object that offers its functions."""
    global _runtime
    _runtime = (kind or (Cuda if Path(path).name.startswith("libcuda") else Acl))(path)
    return _runtime


def runtime() -> Cuda | Acl:
    if _runtime is None:
        path = os.environ.get("FAKE_CUDA_LIBRARY")
        if not path:
            from fakes.build import build

            path = str(build(names=["cuda"])["cuda"])
        use(path)
    assert _runtime is not None
    return _runtime


def counters() -> dict:
    """Return what fake_counters() reports: how many handles of each kind exist, and the violations with their texts."""
    library = runtime().library
    library.fake_counters.restype = c_size_t
    text = ctypes.create_string_buffer(library.fake_counters(None, c_size_t(0)) + 4096)
    library.fake_counters(text, c_size_t(len(text)))
    return json.loads(text.value)


# ---- streams

LEGACY, PER_THREAD = 1, 2


def current_stream() -> int:
    return getattr(_here, "stream", LEGACY)


@contextlib.contextmanager
def stream(handle: int):
    """Make `handle` the current stream of this thread inside the with block."""
    before = current_stream()
    _here.stream = handle
    try:
        yield handle
    finally:
        _here.stream = before


def new_stream(device: int = 0, blocking: bool = False) -> int:
    """Return a new stream. If `blocking`, this stream and the legacy default stream wait for each other, as in CUDA."""
    with runtime().on(device):
        return runtime().new_stream(blocking)


def destroy_stream(handle: int, device: int = 0) -> None:
    with runtime().on(device):
        runtime().destroy_stream(handle)


def synchronize(device: int = 0, handle: int | None = None) -> None:
    with runtime().on(device):
        runtime().synchronize(current_stream() if handle is None else handle)


# ---- arrays


class _Memory:
    """Owns an array's device memory.

    The memory is freed in stream order, on the stream that was current when the memory was allocated.
    """

    def __init__(self, nbytes: int, device: int, managed: bool = False):
        self.runtime = runtime()
        self.device, self.stream, self.pointer = device, current_stream(), 0
        if nbytes:
            with self.runtime.on(device):
                self.pointer = (self.runtime.allocate_managed if managed else self.runtime.allocate)(nbytes)

    def __del__(self):
        if getattr(self, "pointer", 0):
            with contextlib.suppress(Exception), self.runtime.on(self.device):
                self.runtime.free(self.pointer, self.stream)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class DeviceArray:
    read_only = False  # what the protocols say of the array

    def __init__(self, memory: _Memory, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype):
        self._memory, self._offset = memory, offset
        self.shape, self.strides, self.dtype = shape, strides, dtype

    @classmethod
    def from_numpy(cls, array, device: int = 0, stream: int | None = None) -> DeviceArray:
        """Return a copy of array on the device. The copy is only enqueued: code that reads it too early sees junk."""
        # ascontiguousarray cannot be used, because it would change the shape () to (1,).
        array = np.asarray(array, order="C")
        made = cls.empty(array.shape, array.dtype, device)
        if array.nbytes:
            with runtime().on(device):
                runtime().copy_in(
                    made.ptr, array.reshape(-1).view(np.uint8), current_stream() if stream is None else stream
                )
        return made

    @classmethod
    def empty(cls, shape, dtype, device: int = 0) -> DeviceArray:
        shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return cls(_Memory(nbytes, device), 0, shape, _c_strides(shape, dtype.itemsize), dtype)

    @property
    def device(self) -> int:
        return self._memory.device

    @property
    def ptr(self) -> int:
        return self._memory.pointer + self._offset if self.size else 0

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def is_contiguous(self) -> bool:
        expected = _c_strides(self.shape, self.itemsize)
        return not self.size or all(a == b for a, b, n in zip(self.strides, expected, self.shape, strict=True) if n > 1)

    @property
    def __cuda_array_interface__(self) -> dict:
        if not runtime().interface:
            raise AttributeError("an array of an Ascend device has no __cuda_array_interface__")
        # Types like bfloat16 have no typestr of their own, only '<V2'. The array's dtype attribute identifies the type.
        return {
            "shape": self.shape,
            "typestr": self.dtype.str if self.dtype.kind in "biufc" else f"<V{self.itemsize}",
            "data": (self.ptr, self.read_only),
            "version": 3,
            "strides": None if self.is_contiguous() else self.strides,
            "stream": current_stream() or LEGACY,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Return a capsule. Make `stream`, the consumer's stream, wait for the current stream, unless it is -1."""
        if not runtime().interface:
            raise BufferError("an array of an Ascend device has no DLPack device here")
        if copy or (dl_device and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("a view of the same memory alone")
        consumer = LEGACY if stream is None else int(stream)
        if consumer == 0:
            raise ValueError("__dlpack__: stream 0 is ambiguous: 1 is the legacy default stream, 2 that of the thread")
        if consumer != -1 and consumer != current_stream():
            with runtime().on(self.device):
                runtime().order(consumer, after=current_stream())
        return _capsule(self, versioned=bool(max_version and max_version[0] >= 1))

    def _view(self, offset: int, shape, strides) -> DeviceArray:
        return type(self)(self._memory, offset, tuple(shape), tuple(strides), self.dtype)

    def __getitem__(self, key) -> DeviceArray:
        if key is ...:
            return self
        keys = list(key) if isinstance(key, tuple) else [key]
        offset, shape, strides = self._offset, [], []
        for one, extent, step in zip(
            keys + [slice(None)] * (self.ndim - len(keys)), self.shape, self.strides, strict=True
        ):
            if isinstance(one, slice):
                first, last, by = one.indices(extent)
                offset += first * step
                shape.append(len(range(first, last, by)))
                strides.append(step * by)
            else:
                index = range(extent)[one]
                offset += index * step
        return self._view(offset, shape, strides)

    def __setitem__(self, key, value: DeviceArray) -> None:
        target = self[key]
        target.copy_(value if value.dtype == target.dtype else _computed(lambda x: x.astype(target.dtype), value))

    def view(self, dtype) -> DeviceArray:
        """Return the bytes of a contiguous array as a one-dimensional array of dtype."""
        dtype = np.dtype(dtype)
        size = self.nbytes // dtype.itemsize
        return type(self)(self._memory, self._offset, (size,), (dtype.itemsize,), dtype)

    def __add__(self, other) -> DeviceArray:
        return _computed(np.add, self, other)

    def __sub__(self, other) -> DeviceArray:
        return _computed(np.subtract, self, other)

    def __imul__(self, factor: float) -> DeviceArray:
        """Multiply in place. 16-bit numbers are multiplied in float32, as in real array libraries."""
        wide = np.float32 if self.itemsize == 2 else self.dtype.type
        return self.copy_(_computed(lambda x: (x.astype(wide) * wide(factor)).astype(x.dtype), self))

    def reshape(self, *shape) -> DeviceArray:
        """Return a view if the array is contiguous, otherwise a copy."""
        shape = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if -1 in shape:
            rest = -int(np.prod(shape, dtype=np.int64))
            shape = tuple(self.size // max(rest, 1) if n == -1 else n for n in shape)
        if int(np.prod(shape, dtype=np.int64)) != self.size:
            raise ValueError(f"reshape: {self.shape} has {self.size} elements, {shape} not")
        if not self.is_contiguous():
            return self.contiguous().reshape(shape)
        return self._view(self._offset, shape, _c_strides(shape, self.itemsize))

    @property
    def T(self) -> DeviceArray:
        return self._view(self._offset, self.shape[::-1], self.strides[::-1])

    def contiguous(self) -> DeviceArray:
        if self.is_contiguous():
            return self
        return type(self).empty(self.shape, self.dtype, self.device).copy_(self)

    def copy(self) -> DeviceArray:
        return type(self).empty(self.shape, self.dtype, self.device).copy_(self)

    def copy_(self, other: DeviceArray) -> DeviceArray:
        """Copy other into this array, and return this array. The copy is enqueued on the current stream."""
        if self.shape != other.shape or self.dtype != other.dtype:
            raise ValueError(f"copy_: {other.shape} {other.dtype} into {self.shape} {self.dtype}")
        if not self.size:
            return self
        with runtime().on(self.device):
            if self.is_contiguous() and other.is_contiguous():
                runtime().copy(self.ptr, other.ptr, self.nbytes, current_stream())
            else:
                dimensions = c_int64 * self.ndim
                runtime().call(
                    "fake_copy_strided",
                    c_uint64(self.ptr),
                    dimensions(*(s // self.itemsize for s in self.strides)),
                    c_uint64(other.ptr),
                    dimensions(*(s // self.itemsize for s in other.strides)),
                    dimensions(*self.shape),
                    c_int(self.ndim),
                    c_int64(self.itemsize),
                    c_uint64(current_stream()),
                )
        return self

    def to_numpy(self) -> np.ndarray:
        """Wait for all work on the current stream, then return a copy of the array on the host."""
        source = self.contiguous()
        host = np.empty(self.size * self.itemsize, np.uint8)
        with runtime().on(self.device):
            runtime().synchronize(current_stream())
            if self.size:
                runtime().copy_out(host, source.ptr, current_stream())
                runtime().synchronize(current_stream())
        return host.view(self.dtype).reshape(self.shape) if self.size else np.empty(self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"DeviceArray(shape={self.shape}, dtype={self.dtype}, device={self.device}, ptr={self.ptr:#x})"


def _computed(function, *operands) -> DeviceArray:
    """Wait for all work on the current stream, then compute with NumPy. Return the result on the device."""
    arrays = [one for one in operands if isinstance(one, DeviceArray)]
    with np.errstate(all="ignore"):
        made = function(*(one.to_numpy() if isinstance(one, DeviceArray) else one for one in operands))
    return DeviceArray.from_numpy(made, arrays[0].device)


class namespace:
    """Stands for the namespace of an array library, such as cupy. Offers only what the tests need."""

    float16, bfloat16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)

    @staticmethod
    def isfinite(x: DeviceArray) -> DeviceArray:
        return _computed(np.isfinite, x)

    @staticmethod
    def clip(x: DeviceArray, low: float, high: float) -> DeviceArray:
        return _computed(lambda there: np.clip(there, low, high).astype(there.dtype), x)

    @staticmethod
    def where(condition: DeviceArray, x: DeviceArray, y) -> DeviceArray:
        return _computed(lambda *given: np.where(*given).astype(x.dtype), condition, x, y)


# ---- DLPack


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int),
        ("device", c_int),
        ("ndim", c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)
_managed: dict[int, tuple] = {}  # the tensors that consumers hold, keyed by the address that the deleter gets


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", c_void_p),
        ("deleter", _Deleter),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


# Do not set prototypes on the functions of ctypes.pythonapi, because all code in the process shares these functions.
_capsule_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
_capsule_is = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_capsule_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))
# These bytes must stay alive, because a capsule keeps the address of its name.
_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"


@_Deleter
def _delete(address):
    _managed.pop(address, None)


@ctypes.PYFUNCTYPE(None, c_void_p)
def _drop_capsule(capsule):
    # Drop the tensor only if the capsule has not been consumed. A consumer renames the capsule.
    for name in (_NAME, _NAME_VERSIONED):
        if _capsule_is(capsule, name):
            _managed.pop(_capsule_pointer(capsule, name), None)


def _capsule(array: DeviceArray, versioned: bool):
    code = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}.get(array.dtype.kind, 4 if array.dtype.name == "bfloat16" else 3)
    dimensions = c_int64 * max(array.ndim, 1)
    shape, strides = dimensions(*array.shape), dimensions(*(s // array.itemsize for s in array.strides))
    tensor = _Tensor(array.ptr, 2, array.device, array.ndim, code, 8 * array.itemsize, 1, shape, strides, 0)
    flags = int(array.read_only)
    managed = _ManagedVersioned(1, 0, None, _delete, flags, tensor) if versioned else _Managed(tensor, None, _delete)
    address = ctypes.addressof(managed)
    _managed[address] = (managed, array, shape, strides)
    name = _NAME_VERSIONED if versioned else _NAME
    return _capsule_new(address, name, ctypes.cast(_drop_capsule, c_void_p))


class compute:
    """Enqueues what a framework's kernels would do. Code that does not wait for the stream sees old values."""

    @staticmethod
    def sleep(seconds: float, device: int = 0) -> None:
        with runtime().on(device):
            runtime().call("fake_sleep", c_int(int(seconds * 1e6)), c_uint64(current_stream()))

    @staticmethod
    @contextlib.contextmanager
    def hold(device: int = 0):
        """Stall the current stream until the block ends, so that tests need not depend on timing."""
        library = runtime().library
        library.fake_hold.restype = c_int64
        with runtime().on(device):
            gate = library.fake_hold(c_uint64(current_stream()))
        try:
            yield
        finally:
            library.fake_release(c_int64(gate))

    @staticmethod
    def block_driver(device: int = 0) -> None:
        """Block the driver, as cudaFree does, until the device has done the work that is on the current stream now."""
        with runtime().on(device):
            runtime().call("fake_block_driver", c_uint64(current_stream()))

    @staticmethod
    def add(array: DeviceArray, value: float, delay: float = 0) -> DeviceArray:
        """Add value to a contiguous float32 array, in place."""
        if array.dtype != np.float32 or not array.is_contiguous():
            raise TypeError("compute.add: contiguous float32 alone")
        with runtime().on(array.device):
            runtime().call(
                "fake_compute",
                c_uint64(array.ptr),
                c_size_t(array.size),
                c_float(value),
                c_int(int(delay * 1e6)),
                c_uint64(current_stream()),
            )
        return array

    @staticmethod
    def fill(array: DeviceArray, value, delay: float = 0) -> DeviceArray:
        if delay:
            compute.sleep(delay, array.device)
        return array.copy_(DeviceArray.from_numpy(np.full(array.shape, value, array.dtype), array.device))

"""Calls HCCL's functions through ctypes, for the tests of the stand-ins."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

TYPES = {
    "int8": 0,
    "int16": 1,
    "int32": 2,
    "float16": 3,
    "float32": 4,
    "int64": 5,
    "uint64": 6,
    "uint8": 7,
    "uint16": 8,
    "uint32": 9,
    "float64": 10,
    "bfloat16": 11,
}
OPERATORS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
ROOT_INFO_BYTES = 4108


class Item(ctypes.Structure):
    _fields_ = (("kind", c_int), ("data", c_uint64), ("count", c_uint64), ("type", c_int), ("peer", c_uint32))


COMM, STREAM, BUFFER = c_uint64, c_uint64, c_uint64
SIGNATURES = {
    "GetRootInfo": [c_void_p],
    "CommInitRootInfo": [c_uint32, c_void_p, c_uint32, POINTER(COMM)],
    "CommDestroy": [COMM],
    "CommSuspend": [COMM],
    "GetCommAsyncError": [COMM, POINTER(c_int)],
    "AllReduce": [BUFFER, BUFFER, c_uint64, c_int, c_int, COMM, STREAM],
    "Reduce": [BUFFER, BUFFER, c_uint64, c_int, c_int, c_uint32, COMM, STREAM],
    "Broadcast": [BUFFER, c_uint64, c_int, c_uint32, COMM, STREAM],
    "AllGather": [BUFFER, BUFFER, c_uint64, c_int, COMM, STREAM],
    "ReduceScatter": [BUFFER, BUFFER, c_uint64, c_int, c_int, COMM, STREAM],
    "BatchSendRecv": [POINTER(Item), c_uint32, COMM, STREAM],
}


class HcclError(RuntimeError):
    def __init__(self, name: str, code: int):
        super().__init__(f"{name}: {code}")
        self.code = code


class Hccl:
    """Offers each HCCL function under its name without "Hccl": `hccl.AllReduce(...)`. Errors raise HcclError.

    Each function comes from the first of the given libraries that has the function.
    """

    def __init__(self, *paths: str | Path):
        self.libraries = [ctypes.CDLL(str(path)) for path in paths]

    def __getattr__(self, name: str):
        for library in self.libraries:
            function = getattr(library, "Hccl" + name, None)
            if function is not None:
                break
        else:
            raise AttributeError("Hccl" + name)
        function.argtypes = SIGNATURES[name]

        def call(*arguments) -> None:
            code = function(*arguments)
            if code:
                raise HcclError("Hccl" + name, code)

        return call

    def code(self, name: str, *arguments) -> int:
        try:
            getattr(self, name)(*arguments)
        except HcclError as error:
            return error.code
        return 0

    def root_info(self) -> bytes:
        made = (c_uint8 * ROOT_INFO_BYTES)()
        self.GetRootInfo(made)
        return bytes(made)

    def init(self, size: int, info: bytes, rank: int) -> int:
        comm = COMM()
        self.CommInitRootInfo(size, info, rank, byref(comm))
        return comm.value

    def state(self, comm: int) -> int:
        error = c_int(-1)
        self.GetCommAsyncError(comm, byref(error))
        return error.value

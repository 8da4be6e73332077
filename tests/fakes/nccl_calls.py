"""Calls NCCL's functions through ctypes, for the tests of the stand-ins."""

from __future__ import annotations

import ctypes
import time
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64
from pathlib import Path

IN_PROGRESS, INVALID_USAGE = 7, 5
UNDEFINED = -(1 << 31)

TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "float8_e4m3fn": 10,
    "float8_e5m2": 11,
}
OPERATORS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", c_char * 128),)


class Config(ctypes.Structure):
    """Has the layout of ncclConfig_t in NCCL 2.32."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        *((name, c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", c_char_p),
        *((name, c_int) for name in ("splitShare", "trafficClass")),
        ("commName", c_char_p),
        *((name, c_int) for name in ("collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs")),
        *((name, c_int) for name in ("nChannelsPerNetPeer", "nvlinkCentricSched", "graphUsageMode", "numRmaCtx")),
        *((name, c_int) for name in ("maxP2pPeers", "graphStreamOrdering")),
        ("later", c_int * 5),
    )


def config(**fields) -> Config:
    made = Config(size=ctypes.sizeof(Config), magic=0xCAFEBEEF, version=23203)
    for name, kind in Config._fields_:
        if kind is c_int:
            setattr(made, name, UNDEFINED)
    made.later = (c_int * 5)(*[UNDEFINED] * 5)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


COMM, STREAM, BUFFER = c_uint64, c_uint64, c_uint64
SIGNATURES = {
    "ncclGetVersion": [POINTER(c_int)],
    "ncclGetUniqueId": [POINTER(UniqueId)],
    "ncclCommInitRank": [POINTER(COMM), c_int, UniqueId, c_int],
    "ncclCommInitRankConfig": [POINTER(COMM), c_int, UniqueId, c_int, POINTER(Config)],
    "ncclCommFinalize": [COMM],
    "ncclCommDestroy": [COMM],
    "ncclCommAbort": [COMM],
    "ncclCommGetAsyncError": [COMM, POINTER(c_int)],
    "ncclAllReduce": [BUFFER, BUFFER, c_size_t, c_int, c_int, COMM, STREAM],
    "ncclReduce": [BUFFER, BUFFER, c_size_t, c_int, c_int, c_int, COMM, STREAM],
    "ncclBroadcast": [BUFFER, BUFFER, c_size_t, c_int, c_int, COMM, STREAM],
    "ncclAllGather": [BUFFER, BUFFER, c_size_t, c_int, COMM, STREAM],
    "ncclReduceScatter": [BUFFER, BUFFER, c_size_t, c_int, c_int, COMM, STREAM],
    "ncclSend": [BUFFER, c_size_t, c_int, c_int, COMM, STREAM],
    "ncclRecv": [BUFFER, c_size_t, c_int, c_int, COMM, STREAM],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}


class NcclError(RuntimeError):
    def __init__(self, name: str, code: int, text: str):
        super().__init__(f"{name}: {code} ({text})")
        self.code, self.text = code, text


class Nccl:
    """Offers each NCCL function under its name without "nccl": `nccl.AllReduce(...)`. Errors raise NcclError."""

    def __init__(self, path: str | Path):
        self.library = ctypes.CDLL(str(path))
        self.library.ncclGetLastError.restype = c_char_p
        self.library.ncclGetErrorString.restype = c_char_p

    def __getattr__(self, name: str):
        function = getattr(self.library, "nccl" + name)
        function.argtypes = SIGNATURES["nccl" + name]

        def call(*arguments) -> int:
            code = function(*arguments)
            if code not in (0, IN_PROGRESS):
                raise NcclError("nccl" + name, code, self.last_error())
            return code

        return call

    def last_error(self) -> str:
        return self.library.ncclGetLastError(c_uint64(0)).decode()

    def code(self, name: str, *arguments) -> int:
        """Call the function and return its code, even if the code is an error."""
        try:
            return getattr(self, name)(*arguments)
        except NcclError as error:
            return error.code

    def version(self) -> int:
        value = c_int()
        self.GetVersion(byref(value))
        return value.value

    def unique_id(self) -> bytes:
        made = UniqueId()
        self.GetUniqueId(byref(made))
        return bytes(made)

    def init(self, size: int, identifier: bytes, rank: int, given: Config | None = None) -> int:
        comm = COMM()
        which = UniqueId.from_buffer_copy(identifier)
        if given is None:
            self.CommInitRank(byref(comm), size, which, rank)
        else:
            self.CommInitRankConfig(byref(comm), size, which, rank, byref(given))
        return comm.value

    def state(self, comm: int) -> int:
        error = c_int(-1)
        self.CommGetAsyncError(comm, byref(error))
        return error.value

    def wait(self, comm: int, seconds: float = 60) -> int:
        """Poll until the communicator is no longer in progress, or the time is up. Return its state."""
        end = time.monotonic() + seconds
        while (state := self.state(comm)) == IN_PROGRESS and time.monotonic() < end:
            time.sleep(0.002)
        return state

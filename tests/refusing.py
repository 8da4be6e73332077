"""`python refusing.py NUMBERS PROGRAM...` runs a program for which the kernel refuses some system calls with EPERM, as
the seccomp profile of a container does. NUMBERS: the numbers of the system calls on x86-64, separated by commas.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

# From linux/prctl.h, linux/seccomp.h and linux/bpf_common.h.
SET_NO_NEW_PRIVS, SET_SECCOMP, MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO, EPERM = 0x7FFF0000, 0x00050000, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _refuse(numbers: list[int]) -> None:
    lines = [(LOAD_WORD, 0, 0, 0)]
    lines += [(JUMP_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, ERRNO | EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = _Program(len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for words in ((SET_NO_NEW_PRIVS, 1, 0, 0, 0), (SET_SECCOMP, MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*words) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    _refuse([int(number) for number in sys.argv[1].split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])

"""Checkpoints: the content and the names of files in a folder that anybody may have written."""

import atexit
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fuzzing import instrumented, run

with instrumented():
    import numpy as np

    from mscomm import log
    from mscomm.train import serialization, tensorfile

FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
NAME = "net-1_2.safetensors"
log.warn = lambda text: text.encode("utf-8", "backslashreplace")  # as log.py does, but nothing is written


def fuzz(data: bytes) -> None:
    """data: the file's name, a 0, and the content or, after an `h`, the header, a newline and the arrays.

    In the second form, the header's length is added here, because most changes of it only make the file invalid.
    """
    name, _, content = data.partition(b"\0")
    name = name.replace(b"/", b"")[:200].lstrip(b".") or NAME.encode()
    if content[:1] == b"h":
        header, _, arrays = content[1:].partition(b"\n")
        header = header.ljust(-len(header) % 8 + len(header))
        content = len(header).to_bytes(8, "little") + header + arrays
    path = FOLDER / os.fsdecode(name)
    path.write_bytes(content)
    try:
        for read in (tensorfile.read, serialization.load_checkpoint, serialization.load_training, serialization.saved):
            with contextlib.suppress(ValueError):
                read(path)
        for read in (serialization.complete, serialization.load_checkpoint):
            with contextlib.suppress(ValueError, FileNotFoundError):
                read(FOLDER)
    finally:
        path.unlink()


def seeds():
    path = FOLDER / NAME
    weights = {"w": np.ones((2, 2), np.float32), "b": np.zeros(3, np.float16)}
    state = {"epoch": 1, "step": 2, "run": "r", "part": "p", "optimizer": {0: [np.ones(2), (1, None)]}}
    serialization.save_training(path, weights, state, 1e9, first=True)
    training = path.read_bytes()
    serialization.save_checkpoint(weights, path, append_dict={"accuracy": 0.5, "name": "x"})
    for content in (training, path.read_bytes()):
        length = int.from_bytes(content[:8], "little")
        header, arrays = content[8 : 8 + length], content[8 + length :]
        yield NAME.encode() + b"\0" + content
        # A reader does not compare the checksum if the file has none, and so it gets further.
        yield NAME.encode() + b"\0h" + header.replace(b"mscomm.checksum", b"mscomm.chekcsum") + b"\n" + arrays
    for dtype in ("BF16", "F8_E4M3", "F8_E5M2", "F4", "C64", "U16", "BOOL", "I64"):
        yield b'\0h{"x":{"dtype":"%s","shape":[0],"data_offsets":[0,0]}}\n' % dtype.encode()
        yield b'\0h{"x":{"dtype":"%s","shape":[2],"data_offsets":[0,2]}}\n12' % dtype.encode()
    yield b"net.ckpt\0\n1234567"
    path.unlink()


if __name__ == "__main__":
    run(fuzz, seeds())

"""Compiles the kernels of csrc/cuda for the host, so that the stand-in for the CUDA driver can run them (kernels.h)."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from fakes.build import HERE, compiler, default_folder, locked

CSRC, CORE = HERE.parent.parent / "csrc", HERE.parent / "core"
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden"]
FLAGS += ["-ffp-contract=off", "-fno-strict-aliasing"]

# The tests use this image if mscomm was built without nvcc. It begins with the same bytes as an image from nvcc, and
# the stand-in checks only these bytes.
IMAGE = bytes.fromhex("50ed55ba") + b" a stand-in's"


def build_kernels() -> Path:
    """Compile the library if its sources have changed. Return its path, the value for FAKE_CUDA_KERNELS."""
    found = compiler()
    command = [*(found.split() if isinstance(found, str) else found), *FLAGS, f"-I{CSRC}", f"-I{CORE}"]
    sources = [HERE / "device_code.cc", CORE / "cuda_on_cpu.h", *sorted((CSRC / "cuda").glob("*.*"))]
    sources += [CSRC / "device/kernels.h", CSRC / "device/packing.h"]
    key = hashlib.sha256(repr(command).encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    target = default_folder() / f"kernels-{key}.so"
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(target.parent):
        if not target.exists():
            part = target.with_name(f".{target.name}.{os.getpid()}")
            subprocess.run([*command, "-o", str(part), str(sources[0])], check=True)
            part.rename(target)
    return target

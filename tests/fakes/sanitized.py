"""Runs the CUDA and NCCL stand-ins, ranks as threads: python -m fakes.sanitized thread (or address, undefined)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fakes.build import HERE, build, compiler


def run(kind: str) -> int:
    flags = (f"-fsanitize={kind}", "-fno-omit-frame-pointer")
    paths = build(names=("cuda", "nccl-22809"), flags=flags)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "sanitized"
        source = str(HERE / "sanitized.cc")
        command = [*compiler(), "-std=c++20", "-O1", "-g", *flags, source, "-o", str(program), "-pthread", "-ldl"]
        subprocess.run(command, check=True)
        environ = os.environ | {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=0"}
        return subprocess.run([program, paths["cuda"], paths["nccl"]], env=environ).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]))

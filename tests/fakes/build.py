"""Compiles the stand-ins: build(folder) gives a dict of paths."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent

NCCL_VERSIONS = (21803, 22809, 23203)
COMMUNICATION = ("communicator.cc", "meeting.cc")

# By name: the path in the folder, the sources, the definitions.
LIBRARIES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "cuda": ("libcuda.so.1", ("cuda.cc", "kernels.cc", "engine.cc", "tools.cc"), ()),
    **{
        f"nccl-{version}": (
            f"nccl-{version}/libnccl.so.2",
            ("nccl.cc", "tools.cc", *COMMUNICATION),
            (f"FAKE_NCCL_VERSION={version}",),
        )
        for version in NCCL_VERSIONS
    },
}


def compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise RuntimeError(
        "the stand-ins for CUDA, NCCL, CANN and HCCL need a C++20 compiler: none of $CXX, c++, g++, clang++ is there"
    )


def default_folder() -> Path:
    """Of this user and these sources, kept between runs."""
    return Path(tempfile.gettempdir()) / f"mscomm-fakes-{os.getuid()}"


def build(
    folder: str | Path | None = None, names: list[str] | None = None, flags: tuple[str, ...] = ()
) -> dict[str, Path]:
    """Compile what is not there yet; paths by name ("cuda", "nccl-22809", ...), "nccl" the default version.

    Several processes may do so at once: each writes a file of its own name and renames it.
    """
    command = [
        *compiler().split(),
        "-std=c++20",
        "-O2",
        "-g1",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-pthread",
        *flags,
    ]
    command += ["-Wall", "-Wextra", "-Wl,-z,defs"]
    sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.cc")) + sorted(HERE.glob("*.h")))
    key = hashlib.sha256(sources + repr((command, LIBRARIES)).encode()).hexdigest()[:16]
    root = Path(folder or default_folder()) / key
    paths = {}
    running = []
    for name in names or LIBRARIES:
        where, files, definitions = LIBRARIES[name]
        target = paths[name] = root / where
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        arguments = [*command, *(f"-D{one}" for one in definitions), f"-Wl,-soname,{target.name}", "-o", str(part)]
        arguments += [str(HERE / file) for file in files] + ["-ldl"]
        running.append(
            (name, target, part, subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        )
        if len(running) % (os.cpu_count() or 1) == 0:
            running[-1][3].wait()
    failed = []
    for name, target, part, process in running:
        output = process.communicate()[0].decode(errors="replace")
        if process.returncode:
            failed.append(f"{name}:\n{output}")
        else:
            part.rename(target)
    if failed:
        raise RuntimeError("the stand-ins do not compile with " + command[0] + "\n" + "\n".join(failed))
    if "nccl-22809" in paths:
        paths["nccl"] = paths["nccl-22809"]
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    for name, path in build(parser.parse_args().folder).items():
        print(f"{name}={path}")

"""Compiles the stand-ins: build(folder) returns the paths of the libraries by name."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent

NCCL_VERSIONS = (21803, 22809, 23203)
MACHINE = ("engine.cc", "hooks.cc", "tools.cc")
COMMUNICATION = ("communicator.cc", "meeting.cc", "tools.cc")

# Maps each name to the library's path, relative to the build folder, and to its sources. A source can be followed by a
# macro definition for the compiler.
LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "cuda": ("libcuda.so.1", ("cuda.cc", "kernels.cc", *MACHINE)),
    **{
        f"nccl-{version}": (
            f"nccl-{version}/libnccl.so.2",
            (f"nccl_version.cc -DFAKE_NCCL_VERSION={version}", "nccl.cc", *COMMUNICATION),
        )
        for version in NCCL_VERSIONS
    },
    # AscendCL's runtime has an old and a new name.
    "acl": ("libascendcl.so", ("acl.cc", *MACHINE)),
    "acl-rt": ("acl-rt/libacl_rt.so", ("acl.cc", *MACHINE)),
    # Older releases of HCCL are one library. In newer releases, libhcomm.so contains the communicators.
    "hccl": ("hccl/libhccl.so", ("hccl.cc -DFAKE_ONE_LIBRARY", "hcomm.cc", *COMMUNICATION)),
    "hccl-split": ("hccl-split/libhccl.so", ("hccl.cc", "tools.cc")),
    "hcomm": ("hccl-split/libhcomm.so", ("hcomm.cc", *COMMUNICATION)),
}
CUDA = ("cuda", *(f"nccl-{version}" for version in NCCL_VERSIONS))
ASCEND = ("acl", "acl-rt", "hccl", "hccl-split", "hcomm")


def compiler() -> list[str]:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    raise RuntimeError(
        "the stand-ins for CUDA, NCCL, AscendCL and HCCL need a C++20 compiler: no $CXX, c++, g++ or clang++ is there"
    )


def default_folder() -> Path:
    """Return the folder for this user's builds, which is kept between runs."""
    return Path(tempfile.gettempdir()) / f"mscomm-fakes-{os.getuid()}"


@contextlib.contextmanager
def locked(top: Path) -> Iterator[None]:
    """Let only one process at a time compile in this folder. The others wait, and then find what it has compiled."""
    with open(top / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file releases the lock
        yield


def _sweep(top: Path) -> None:
    """Delete builds that are more than a week old."""
    for old in top.iterdir():
        if old.stat().st_mtime < time.time() - 7 * 24 * 3600:
            shutil.rmtree(old, ignore_errors=True)


def _run_all(commands: Iterable[list[str]]) -> None:
    """Run the commands in parallel, at most one per processor."""
    waiting, running, failed = list(commands), [], []
    while waiting or running:
        while waiting and len(running) < len(os.sched_getaffinity(0)):
            running.append(subprocess.Popen(waiting.pop(0), stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        process = running.pop(0)
        output = process.communicate()[0].decode(errors="replace")
        if process.returncode:
            failed.append(f"{' '.join(map(str, process.args))}\n{output}")
    if failed:
        raise RuntimeError("the stand-ins do not compile:\n" + "\n".join(failed))


def _compile(command: list[str], linking: list[str], root: Path, paths: dict[str, Path]) -> None:
    """Compile the libraries of `paths` that do not exist. A library appears at its path when it is finished."""
    missing = [name for name, path in paths.items() if not path.exists()]
    with tempfile.TemporaryDirectory(prefix=".work-", dir=root) as work:
        objects = {
            source: f"{work}/{i}.o"
            for i, source in enumerate(dict.fromkeys(one for name in missing for one in LIBRARIES[name][1]))
        }
        _run_all(
            [*command, "-c", str(HERE / source.split()[0]), *source.split()[1:], "-o", output]
            for source, output in objects.items()
        )
        _run_all(
            [
                *(*command, "-shared", *linking, f"-Wl,-soname,{paths[name].name}", "-o", f"{work}/{name}"),
                *(objects[source] for source in LIBRARIES[name][1]),
                "-ldl",
            ]
            for name in missing
        )
        for name in missing:
            paths[name].parent.mkdir(exist_ok=True)
            os.rename(f"{work}/{name}", paths[name])


def build(
    folder: str | Path | None = None, names: Iterable[str] | None = None, flags: tuple[str, ...] = ()
) -> dict[str, Path]:
    """Compile the libraries that do not exist yet. Return the paths by name: "cuda", "nccl-22809", ...

    "nccl" is the default version of NCCL. Several processes can build at the same time: the first one compiles, and the
    others wait for it.
    """
    command = [*compiler(), "-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-pthread"]
    command += flags
    sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.cc")) + sorted(HERE.glob("*.h")))
    key = hashlib.sha256(sources + repr((command, LIBRARIES)).encode()).hexdigest()[:16]
    top = Path(folder or default_folder()).resolve()
    top.mkdir(mode=0o700, parents=True, exist_ok=True)
    if top.stat().st_uid != os.getuid():
        raise RuntimeError(f"{top} belongs to somebody else: what lies there is not loaded")
    root = top / key
    wanted = tuple(names or LIBRARIES)
    paths = {name: root / LIBRARIES[name][0] for name in wanted}
    if not all(path.exists() for path in paths.values()):
        with locked(top):
            _sweep(top)
            root.mkdir(exist_ok=True)
            _compile(command, [] if flags else ["-Wl,-z,defs"], root, paths)
    if "nccl-22809" in paths:
        paths["nccl"] = paths["nccl-22809"]
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    for name, path in build(parser.parse_args().folder).items():
        print(f"{name}={path}")

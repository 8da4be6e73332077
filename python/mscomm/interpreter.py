"""Helps to start processes: the hub, the ranks of mscomm.launch, and the helper for PMIx.

python_executable() finds the Python interpreter for the hub and for mscomm.launch.

In a frozen program, and in an application that embeds Python, sys.executable is empty or is the program itself. If
mscomm started it, the program would run again, and would start itself again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mscomm.errors import BackendUnavailable

# Set in the environment of a process that mscomm starts, which removes it with own_child(). If it is still there, that
# process runs something other than what mscomm told it to run.
_CHILD_OF = "MSCOMM_CHILD_OF"


def python_executable(purpose: str) -> str:
    """Return the path of an interpreter of this Python version.

    purpose: the process to start, for the text of the error: "the hub". Raise BackendUnavailable if no interpreter is
    found, or if mscomm has started this process as an interpreter, but the process is another program.
    """
    if parent := os.environ.get(_CHILD_OF):
        raise BackendUnavailable(
            f"cannot start {purpose}: process {parent} started this process as a Python interpreter "
            f"({sys.executable!r}), but it runs another program. {_ADVICE}"
        )
    own = "" if is_frozen() else sys.executable or ""
    # The user may have named an interpreter with multiprocessing.set_executable(). By default, it is sys.executable.
    spawn = sys.modules.get("multiprocessing.spawn")
    named = os.fsdecode((spawn and spawn.get_executable()) or "")
    if named and named != sys.executable:
        tried = [named]
    else:
        tried = [own] if os.path.basename(own).startswith(("python", "pypy")) else []
    version = f"python{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
    tried += [os.path.join(prefix, "bin", version) for prefix in dict.fromkeys((sys.prefix, sys.base_prefix))]
    for path in tried:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    program = repr(own) if own else "this frozen program" if is_frozen() else "empty"
    raise BackendUnavailable(
        f"cannot start {purpose}: it needs a Python interpreter, but sys.executable is {program}, and there is no "
        f"{' or '.join(tried)}. {_ADVICE}"
    )


_ADVICE = "Name an interpreter of this Python version with multiprocessing.set_executable(path)"


def is_frozen() -> bool:
    """Return whether PyInstaller or the like has packed this program, its modules and Python into one."""
    return bool(getattr(sys, "frozen", False))


def file_for_errors(name: str) -> int:
    """Return the descriptor of a file for the errors that a process writes. It may be many: a pipe could get full."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:  # a sandbox may refuse it; then the errors are not told
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def child_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` for a process that mscomm starts with python_executable()."""
    return {**env, _CHILD_OF: str(os.getpid())}


def own_child() -> None:
    """Note that this process runs what mscomm told it to run. Its own children are not affected any more."""
    os.environ.pop(_CHILD_OF, None)

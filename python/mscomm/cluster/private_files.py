"""Files that only the current user may be able to read, because they hold a secret or must not be changed."""

from __future__ import annotations

import contextlib
import os
import stat

from mscomm.errors import AuthenticationError

_LIMIT_BYTES = 4096


def read_private(kind: str, path: str, make: str, origin: str = "", most: int = _LIMIT_BYTES) -> bytes:
    """Return the first `most` bytes of a file that only the current user may have permission to read.

    kind: what the file is, for messages. make: the advice for a user who has no such file. origin: who writes it.
    Raise AuthenticationError for any other file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise refused(kind, path, "there is no such file", make, origin) from None
    except OSError as error:
        advice = (
            "name the file itself, not a symbolic link" if os.path.islink(path) else "it must be readable for this user"
        )
        raise refused(kind, path, f"cannot open it: {error.strerror}", advice, origin) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise refused(kind, path, "it is not a regular file", make, origin)
        if status.st_uid != os.getuid():
            whose = f"it belongs to uid {status.st_uid}, this process runs as {os.getuid()}"
            raise refused(kind, path, whose, "use one of your own", origin)
        if status.st_mode & 0o077:
            mode = f"its mode {stat.S_IMODE(status.st_mode):04o} lets others in"
            raise refused(kind, path, mode, f"run: chmod 600 {path}", origin)
        with open(fd, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(fd)


def refused(kind: str, path: str, what: str, advice: str, origin: str = "") -> AuthenticationError:
    """Return an error about the file. what: what is wrong with it. advice: what to do. origin: who writes the file."""
    return AuthenticationError(f"{kind} {path}: {what}; {advice}{f' ({origin})' if origin else ''}")


def replace_private(path: str, content: bytes) -> None:
    """Replace the file by a new one that only the current user can read. No reader ever sees a part of it."""
    draft = f"{path}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)  # left behind by a process that was killed
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(draft, path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # so that the new name survives a power failure, too
    finally:
        os.close(folder)

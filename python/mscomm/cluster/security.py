"""The keys of a job. None of them is ever in argv, in the environment, or in the hello.

The job key only admits: from it come the two admission keys, with which a rank and a launcher of another host prove to
the hub that they belong to the job. For each epoch, the hub makes a session key, with which the ranks of this epoch
prove themselves to each other. A process that has the job key but no seat in the epoch does not get the session key.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping

from mscomm import environment, log
from mscomm.cluster import interfaces
from mscomm.cluster.hello import CONTROL
from mscomm.cluster.private_files import read_private, refused, replace_private
from mscomm.cluster.protection import Protection
from mscomm.errors import AuthenticationError, BackendUnavailable

KEY_BYTES = 32
_DIFFERENT_BYTES = 16  # 32 random bytes practically never have fewer different values


def new_key() -> bytes:
    """Return a random key for one job."""
    return secrets.token_bytes(KEY_BYTES)


def admission_key(key: bytes, purpose: int) -> bytes:
    """Return the key for the hello of links to the hub: from the job key and the link's purpose, CONTROL or LAUNCHER.

    A launcher gives its ranks only the admission key for CONTROL. So a rank cannot speak as a launcher.
    """
    return hmac.new(key, b"mscomm admission %d" % purpose, hashlib.sha256).digest()


def sealed(key: bytes, secret: bytes, what: str) -> bytes:
    """Encrypt a key for one control link, or decrypt it. secret: the secret of that link. what: names this key alone.

    The key is combined (xor) with the HMAC of the name, which is used for this link and this key only. Somebody who
    changes the encrypted key on its way can only make hellos fail.
    """
    pad = hmac.new(secret, f"mscomm {what}".encode(), hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(key, pad, strict=True))


def session_name(epoch: int) -> str:
    """Return the name that sealed() uses for the session key of an epoch."""
    return f"session key {epoch}"


SEAT = "seat"  # the name that sealed() uses for the token of a process


def token(key: bytes, run: bytes, nonce: bytes) -> bytes:
    """Return the secret that only the hub and one process know. key: the job key. nonce: belongs to this process alone.

    With the token, the process proves who it is when it returns after its control link has ended (`proof`). A scheduler
    that was started again computes the same token, and need not keep any secret but the job key.
    """
    return hmac.new(key, b"mscomm seat " + run + nonce, hashlib.sha256).digest()


def proof(token: bytes, secret: bytes) -> bytes:
    """Return what a process sends over its new control link to prove that it has the token. secret: the link's."""
    return hmac.new(token, b"mscomm return " + secret, hashlib.sha256).digest()


def is_loopback(host: str) -> bool:
    """Return whether the numeric address can be reached only from this machine."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def scheduler_key(
    env: Mapping[str, str], host: str, port: int, protection: Protection, kept_in: str = ""
) -> tuple[bytes, KeyFile | None]:
    """Return the key of a scheduler at the numeric address, and the key file if this function has written one.

    kept_in: a file for a copy of a new key, so that a scheduler that is started again has the same key. The caller must
    remove the key file and the copy when the job has ended.
    """
    if path := environment.read("MSCOMM_JOB_KEY_FILE", env):
        return read_key(path), None
    if is_loopback(host):
        kept = read_key(kept_in) if kept_in and os.path.lexists(kept_in) else b""
        file = KeyFile(key_path(_sched_name(host, port)), kept)
        if kept_in and not kept:
            replace_private(kept_in, file.key)
        return file.key, file
    return _open_key(host, port, protection), None


def job_key(env: Mapping[str, str], host: str, port: int, protection: Protection) -> bytes:
    """Return the job key, in a process that connects to the scheduler at the numeric address.

    Call this after connecting. The key file then exists, because the scheduler writes it before it listens.
    """
    if path := environment.read("MSCOMM_JOB_KEY_FILE", env):
        return read_key(path)
    if is_loopback(host):
        return read_key(
            key_path(_sched_name(host, port)), f"the scheduler at {host}:{port} (same user, same TMPDIR) writes it"
        )
    return _open_key(host, port, protection)


def read_key(path: str, origin: str = "") -> bytes:
    """Return the key in the file.

    The file must hold 64 hex digits or at least 32 random bytes, and only the current user may have permission to read
    it. Raise AuthenticationError for any other file.
    """
    make = f"make one with: (umask 077; head -c 32 /dev/urandom > {path})"

    def refuse(what: str) -> AuthenticationError:
        return refused("key file", path, what, make, origin)

    content = read_private("key file", path, "" if origin else make, origin)
    text = content.strip()
    if len(text) == 2 * KEY_BYTES and all(byte in b"0123456789abcdefABCDEF" for byte in text):
        content = bytes.fromhex(text.decode("ascii"))
    elif all(byte in _TEXT for byte in content) and len(content) >= KEY_BYTES:
        raise refuse("it holds text, which can be guessed; a key is random bytes, or 64 hex digits of them")
    if len(content) < KEY_BYTES:
        raise refuse(f"it holds {len(content)} bytes, a key needs at least {KEY_BYTES}")
    if len(set(content)) < _DIFFERENT_BYTES:
        raise refuse(f"it is not random: it has only {len(set(content))} different bytes")
    return content if len(content) == KEY_BYTES else hashlib.sha256(content).digest()


_TEXT = bytes(range(32, 127)) + b"\t\n\r"


def _open_key(host: str, port: int, protection: Protection) -> bytes:
    """Return a key that everybody can compute, for a job without a key file.

    Raise AuthenticationError unless certificates decide who can join, or the user permits everybody to join.
    """
    where = interfaces.endpoint(host, port)
    if not protection.credentials:
        if not protection.permit_plain:
            raise AuthenticationError(
                f"{where} can be reached from other machines and the job has no key. Either give it one everywhere:\n"
                + ways_to_start(protection)
            )
        log.warn(
            f"this job has no key: anybody who can reach {where} can join it. "
            "MSCOMM_JOB_KEY_FILE=/path/to/key gives it one."
        )
    # Hash only the port. The scheduler and the workers may know the host by different names or addresses.
    return hashlib.sha256(f"mscomm, open to all: {port}".encode()).digest()


def ways_to_start(protection: Protection) -> str:
    """Return the end of an error about a job without a key, after "give it one everywhere:"."""
    return (
        "    export MSCOMM_JOB_KEY_FILE=/path/to/key   # (umask 077; head -c 32 /dev/urandom > /path/to/key)\n"
        "or allow anybody who can reach the port to join:\n"
        f"    {protection.permits}"
    )


def derived_key(key: bytes, job: str) -> bytes:
    """Return a key for this job alone. Jobs that share a key file then reject each other's ranks."""
    return hmac.new(key, b"mscomm job " + job.encode(), hashlib.sha256).digest()


# -- key files that one process of a job writes for the others


def key_path(name: str) -> str:
    """Return the path at which all processes of one user on one host look for the key with this name."""
    import tempfile  # imported here because it is slow to import, and the spawned hub never needs it

    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise BackendUnavailable(f"no folder for the job's key: {error.strerror or error}. {_KEY_ADVICE}") from error
    return os.path.join(temporary, f"mscomm-{os.getuid()}", f"{name}{_LOCKED}")


_KEY_ADVICE = (
    "In all processes of the job, set TMPDIR to a folder that you can write to, for example /dev/shm (Slurm: HOME, a "
    "folder that all hosts share), or MSCOMM_JOB_KEY_FILE to a key file"
)


def _sched_name(host: str, port: int) -> str:
    return f"sched-{host}-{port}"


# Only files with this ending are removed. Earlier versions wrote key files that end with just ".key", without a lock.
_LOCKED = ".locked.key"
_FREED_WITHIN_S = 0.5  # how long the kernel may take to free the locks of a process that has been killed
_ALONE_WITHIN_S = 2.0


class KeyFile:
    """A key in a file that only the current user can read, in a folder that only the current user can enter.

    key: the key to write, by default a new one.

    The process holds a lock (flock) on the file until it removes the file or ends. A file that is not locked therefore
    belongs to a process that was killed, and remove_stale() removes it.
    """

    def __init__(self, path: str, key: bytes = b"") -> None:
        self.key = key or new_key()
        self.path = path
        remove_stale()
        try:
            self._write()
        except AuthenticationError:
            raise
        except OSError as error:  # not to be mistaken for an error of the socket, whose key this is
            raise BackendUnavailable(
                f"cannot write the job's key to {path}: {error.strerror or error}. {_KEY_ADVICE}"
            ) from error

    def _write(self) -> None:
        folder = os.path.dirname(self.path)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        _require_private(folder)
        draft = f"{self.path}.{secrets.token_hex(8)}"
        self._fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(self._fd, self.key)
            with contextlib.suppress(OSError):  # without flock, remove_stale() cannot lock the file, and leaves it
                fcntl.flock(self._fd, fcntl.LOCK_EX)
            with _alone_in(folder):
                os.rename(draft, self.path)
        except BaseException:
            os.unlink(draft)
            os.close(self._fd)
            raise

    def remove_at_exit(self) -> None:
        """Remove the file when this process exits, unless that has been done. A forked child does not remove it."""
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.remove()

    def remove(self) -> None:
        """Remove the file, unless a later scheduler has replaced it with its own file. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        # An error means that the file has been removed, or is no longer our key file.
        with contextlib.suppress(AuthenticationError, FileNotFoundError):
            if read_key(self.path) == self.key:
                os.unlink(self.path)
        os.close(fd)
        atexit.unregister(self._at_exit)


def remove_stale(killed: bytes = b"") -> None:
    """Remove the user's key files in TMPDIR that no process has locked: their processes have been killed.

    killed: the admission key of a hub that has perhaps just been killed. Wait for the lock of the hub's key file: the
    kernel may close the connections of a killed process before it frees the locks.
    """
    until = time.monotonic() + _FREED_WITHIN_S
    while _remove_unlocked(killed) and time.monotonic() < until:
        time.sleep(0.01)


def _remove_unlocked(admission: bytes) -> bool:
    """Remove the key files that are not locked. Return whether a locked file has the key of this admission."""
    locked = False
    # An error means that the folder is not there or not ours, or that this process has no descriptors left. The files
    # then stay, and the caller goes on: a rank that closes its link must not fail because of somebody else's file.
    with contextlib.suppress(AuthenticationError, BackendUnavailable, OSError):
        folder = os.path.dirname(key_path(""))
        _require_private(folder)
        with _alone_in(folder) as is_alone:
            for name in os.listdir(folder) if is_alone else ():
                if name.endswith(_LOCKED):
                    path = os.path.join(folder, name)
                    # An error means that another process has removed the file, or that we cannot lock or read it.
                    with contextlib.suppress(AuthenticationError, OSError):
                        try:
                            _remove_unless_locked(path)
                        except BlockingIOError:
                            locked = locked or admission_key(read_key(path), CONTROL) == admission
    return locked


def _remove_unless_locked(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _alone_in(folder: str) -> Iterator[bool]:
    """Let only one process at a time replace or remove key files. Yield whether this process is alone.

    Without this lock, remove_stale() could remove a new file that has just replaced a stale one. Each process holds the
    lock only for a few system calls. Yield False if the file system has no flock, or if another process, which was
    perhaps stopped, holds the lock for _ALONE_WITHIN_S.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    until = time.monotonic() + _ALONE_WITHIN_S
    try:
        is_alone = False
        while not is_alone:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alone = True
            except BlockingIOError:
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
            except OSError:
                break
        yield is_alone
    finally:
        os.close(fd)


def _require_private(path: str) -> None:
    """Raise AuthenticationError unless the folder belongs to the current user and others cannot enter it."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise AuthenticationError(
            f"{path} is not a folder (a symbolic link does not count): remove it, or set TMPDIR to another place"
        )
    if status.st_uid != os.getuid():
        raise AuthenticationError(
            f"{path} belongs to uid {status.st_uid}: somebody else made it; set TMPDIR to a place of your own"
        )
    if status.st_mode & 0o077:
        raise AuthenticationError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, which lets others in; run: chmod 700 {path}"
        )

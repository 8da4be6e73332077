"""The file in which a scheduler keeps the membership of its job, so that it can be started again while the job runs.

The file is in the folder MS_RECOVERY_PATH, and is replaced as a whole at each change. It holds no secret. A MAC with
the job key shows whether another key or another program has written it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
from dataclasses import dataclass
from typing import Any

from mscomm.cluster.private_files import read_private, replace_private
from mscomm.errors import AuthenticationError, BackendUnavailable

NAME = "mscomm-scheduler.json"
KEY_NAME = "mscomm-scheduler.key"
_MOST_BYTES = 64 << 20
_FACTS = ("hostname", "host", "pid", "link")  # the facts of a rank that the file keeps


@dataclass
class Seat:
    """A rank of the job, as an earlier scheduler knew it.

    nonce: see security.token. left: whether the rank has left the job. lost: whether the rank's process has not
    returned to the scheduler that was started again.
    """

    rank: int
    node_id: str | None
    nonce: bytes
    facts: dict[str, Any]
    left: bool
    lost: bool = False


@dataclass
class Membership:
    """What a scheduler must know to take back the workers of its job.

    run: the id of this start of the job. ready: whether all ranks have finished the set-up of the epoch.
    """

    run: bytes
    epoch: int
    ready: bool
    seats: list[Seat]


class RecoveryFile:
    """The recovery file of a scheduler.

    folder: MS_RECOVERY_PATH. job: what must be the same when the scheduler is started again: the port, the number of
    workers, the job id and mscomm's version. `found`: the membership of a job that has not ended, or None.

    Raise BackendUnavailable if the file belongs to another job, or is damaged. Raise AuthenticationError if it was
    written with another key, or if others can read it. The file is not changed.
    """

    def __init__(self, folder: str, job: dict[str, Any], key: bytes) -> None:
        self.path = os.path.join(folder, NAME)
        self._job = job
        self._key = key
        self.found = self._read() if os.path.lexists(self.path) else None

    def write(self, membership: Membership) -> None:
        """Replace the file. Raise OSError if that is not possible; the old file is then unchanged."""
        seats = [
            {
                "rank": seat.rank,
                "node_id": seat.node_id,
                "nonce": seat.nonce.hex(),
                "facts": {name: seat.facts[name] for name in _FACTS if name in seat.facts},
                "left": seat.left,
            }
            for seat in membership.seats
        ]
        head = {"job": self._job, "run": membership.run.hex(), "epoch": membership.epoch}
        state = {**head, "ready": membership.ready, "seats": seats}
        replace_private(self.path, json.dumps({"state": state, "mac": self._mac(state)}).encode())

    def remove(self) -> None:
        """Remove the file and the key beside it, because the job has ended."""
        for path in (self.path, os.path.join(os.path.dirname(self.path), KEY_NAME)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _read(self) -> Membership:
        advice = f"or, to start the job anew, remove {self.path}"
        content = read_private("recovery file", self.path, advice, most=_MOST_BYTES)
        try:
            whole = json.loads(content)
            state, job, mac = whole["state"], whole["state"]["job"], str(whole["mac"])
            theirs, mine = (", ".join(f"{name} {value}" for name, value in one.items()) for one in (job, self._job))
            genuine = hmac.compare_digest(_ascii(mac).encode(), self._mac(state).encode())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BackendUnavailable(
                f"recovery file {self.path}: it is damaged ({type(error).__name__}: {error}); restore it, {advice}"
            ) from error
        if job != self._job:
            raise BackendUnavailable(
                f"recovery file {self.path}: it belongs to another job ({_ascii(theirs)}), and this job has {mine};"
                f" give each job its own MS_RECOVERY_PATH, {advice}"
            )
        if not genuine:
            raise AuthenticationError(
                f"recovery file {self.path}: it was changed, or written with another job key; start the scheduler with"
                f" the key of the job, {advice}"
            )
        seats = [
            Seat(one["rank"], one["node_id"], bytes.fromhex(one["nonce"]), one["facts"], one["left"])
            for one in state["seats"]
        ]
        return Membership(bytes.fromhex(state["run"]), state["epoch"], state["ready"], seats)

    def _mac(self, state: Any) -> str:
        text = json.dumps(state, sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, b"mscomm recovery file " + text.encode(), hashlib.sha256).hexdigest()


def _ascii(text: str) -> str:
    """Escape what is not ASCII: JSON can hold surrogates, which cannot be encoded."""
    return text.encode("ascii", "backslashreplace").decode()


def lock(folder: str) -> int:
    """Make the folder if it does not exist, and lock it. Return a descriptor, which holds the lock until it is closed.

    Raise BackendUnavailable if the folder cannot be used, or if another scheduler uses it.
    """
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BackendUnavailable(f"MS_RECOVERY_PATH={folder}: {error.strerror}; name a folder of your own") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BackendUnavailable(
            f"MS_RECOVERY_PATH={folder}: another scheduler uses this folder; give each job a folder of its own"
        ) from None
    except OSError:  # this file system has no locks
        return fd
    return fd

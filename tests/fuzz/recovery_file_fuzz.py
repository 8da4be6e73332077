"""Recovery files: JSON that an earlier scheduler wrote into a folder, and that anybody may have changed since."""

import os
import tempfile

from fuzzing import instrumented, run

with instrumented():
    from mscomm.cluster.recovery_file import NAME, Membership, RecoveryFile, Seat
    from mscomm.errors import AuthenticationError, BackendUnavailable

_JOB = {"port": 8118, "workers": 2, "id": "one", "version": "0"}
_KEY = bytes(range(32))
_FOLDER = tempfile.mkdtemp()
_PATH = os.path.join(_FOLDER, NAME)


def fuzz(data: bytes) -> None:
    _put(data)
    try:
        found = RecoveryFile(_FOLDER, _JOB, _KEY).found
    except (AuthenticationError, BackendUnavailable) as error:
        str(error).encode()  # a user sees this text
        return
    assert found is not None
    assert [seat.rank for seat in found.seats] == [0, 1]  # only the file of the seeds has the MAC of this key


def _put(data: bytes) -> None:
    with open(os.open(_PATH, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _written(key: bytes) -> bytes:
    if os.path.exists(_PATH):
        os.unlink(_PATH)
    seats = [Seat(rank, None if rank else "7", bytes(16), {"hostname": "a", "pid": 1}, bool(rank)) for rank in (0, 1)]
    RecoveryFile(_FOLDER, _JOB, key).write(Membership(bytes(16), 3, True, seats))
    with open(_PATH, "rb") as file:
        return file.read()


def seeds():
    good = _written(_KEY)
    yield good
    yield _written(bytes(32))
    yield good.replace(b'"one"', b'"two"')
    yield good.replace(b'"mac": "', b'"mac": "\\ud800')
    yield good.replace(b'"id"', b'"\\ud800"')
    yield good[: len(good) // 2]
    yield b'{"state": {"job": {}, "x": [1e999, NaN, -0]}, "mac": 7}'


if __name__ == "__main__":
    run(fuzz, seeds())

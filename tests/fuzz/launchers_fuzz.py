"""What launchers say: the answers of a PMI-1 process manager, and the text that rank 0 has published in a store."""

import contextlib
import socket

from fuzzing import instrumented, run

with instrumented():
    from mscomm.bootstrap import kvs, pmi, sealed_key
    from mscomm.bootstrap.invitation import Seat
    from mscomm.cluster.deadline import Deadline
    from mscomm.cluster.links import is_address
    from mscomm.cluster.protection import Protection
    from mscomm.errors import AuthenticationError, BackendUnavailable, CollectiveTimeout

ENV = {"MSCOMM_JOB_KEY_FILE": "/nonexistent"}
SEAT = Seat(1, 2, 1, one_host=False)
RANK_0 = sealed_key.KeyPair()


def connect(self, address, key, process=None):
    """Stands in for Join._connect: check what it would be called with."""
    assert is_address(list(address) if isinstance(address, tuple) else address), address
    assert len(key) == 32


kvs.Join._connect = connect
kvs.security.job_key = lambda *_: bytes(32)


class Store:
    """A launcher's store with one text, which is rank 0's answer or a rank's public key."""

    def __init__(self, text):
        self.text = text

    def ask(self, text, deadline):
        return self.text


def fuzz(data: bytes) -> None:
    """data: a published text or, if it begins with a newline, the answers of a process manager, each after a 0."""
    with contextlib.suppress(BackendUnavailable, CollectiveTimeout, AuthenticationError):
        if not data.startswith(b"\n"):
            text = data.decode("ascii", "replace")
            for env in (ENV, {}):  # with a key file, and with a key from rank 0
                with contextlib.suppress(BackendUnavailable, AuthenticationError):
                    kvs.Join("PMIx", SEAT, Store(text), env, Deadline(1), Protection()).invitation()
            RANK_0.seal(bytes(32), text, 1, "tcp,10.0.0.1,4000")
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # each answer is a packet
        with ours, theirs:
            for answer in data[1:].split(b"\0")[:6]:
                if answer:
                    theirs.send(answer[:8192])
            theirs.shutdown(socket.SHUT_WR)
            first = pmi._ask(ours.fileno(), "cmd=initack pmiid=1", "initack", Deadline(1), lines=4)
            seat = kvs.place({"PMI_RANK": first.get("rank", ""), "PMI_SIZE": first.get("size", "")}, pmi._NAMES, "PMI")
            store = pmi._Store(ours.fileno(), seat, Deadline(1))
            kvs.Join("PMI", seat._replace(rank=1), store, ENV, Deadline(1), Protection()).invitation()
            store.answer(["mscomm1,failed"], Deadline(1))


def seeds():
    published = (
        b"mscomm1,failed",
        b"mscomm1,unix,mscomm-" + b"0" * 32 + b"," + b"0" * 64,
        b"mscomm1,tcp,10.0.0.1,4000",
        b"mscomm1,tcp,fe80::1,4000",
        b"mscomm1,tcp,10.0.0.1,4000," + b"0" * 64 + b"," + b"0" * 96,
        b"ab" * 32,
    )
    yield from published
    answers = (
        b"cmd=initack rc=0\ncmd=set size=2\ncmd=set rank=1\ncmd=set debug=0\n",
        b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n",
        b"cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024\n",
        b"cmd=my_kvsname kvsname=kvs_1\n",
        b"cmd=barrier_out\n",
    )
    for text in published:
        yield b"\n" + b"\0".join((*answers, b"cmd=get_result rc=0 value=" + text + b"\n"))


if __name__ == "__main__":
    run(fuzz, seeds())

"""The hello, at both ends. The fuzzer's messages are signed with the key, so that it gets behind the signature."""

from fuzzing import instrumented, run

with instrumented():
    from mscomm.cluster import hello
    from mscomm.cluster.hello import CONTROL, DATA, Hello, Identity
    from mscomm.errors import Error

KEY = bytes(range(32))
MINE = Identity(version="1", run=b"r" * 16)
PURPOSES = (CONTROL, DATA)
CONNECTOR, SIGNED, IN_PIECES = 1, 2, 4  # bits of an input's first byte


def fuzz(data: bytes) -> None:
    options, data = data[:1], data[1:]
    flags = options[0] if options else 0
    purpose = PURPOSES[flags >> 3 & 1]
    if flags & CONNECTOR:
        end, label = Hello.connector(KEY, purpose, MINE, True), b"verdict"
    else:
        end, label = Hello.acceptor(dict.fromkeys(PURPOSES, KEY), MINE, range(4), True), b"connector"
    transcript = [sent] if (sent := end.feed(b"")) else []
    try:
        while data and not end.done:
            number = end.needs
            if flags & SIGNED and len(transcript) > 1:  # the second message of the peer carries a signature
                body = data[: number - 32].ljust(number - 32, b"\0")
                message, data = hello._signed(body, KEY, label, *transcript), data[number - 32 :]
            else:
                message, data = data[:number], data[number:]
            pieces = [message[:7], message[7:]] if flags & IN_PIECES else [message]
            transcript += [message, *filter(None, [b"".join(map(end.feed, pieces))])]
    except Error:
        return
    assert not end.done or end.refusal or len(end.secret) == 32
    end.put_off()


def seeds():
    for purpose, bit in zip(PURPOSES, (0, 8), strict=True):
        for flags in (bit, bit | IN_PIECES):
            yield bytes([flags | SIGNED]) + _first(purpose) + _identity()
            yield bytes([flags | CONNECTOR | SIGNED]) + hello._answer(0, MINE.run) + bytes(8)
    yield bytes([CONNECTOR]) + hello._answer(hello._BUSY, MINE.run)


def _first(purpose: int) -> bytes:
    return hello._OPENING.pack(hello.MAGIC, hello.WIRE, purpose, 0, bytes(32))


def _identity() -> bytes:
    return hello._IDENTITY.pack(MINE.job, MINE.run, MINE.group, MINE.version.encode(), 1, MINE.rank, 0, 1)


if __name__ == "__main__":
    run(fuzz, seeds())

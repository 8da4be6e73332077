"""The bytes of a control link, before anything looks at the fields of the frames."""

from fuzzing import frame, instrumented, run

with instrumented():
    from mscomm.cluster.frames import FROM_MEMBER_BYTES, Parser
    from mscomm.errors import Error


def fuzz(data: bytes) -> None:
    parser = Parser(FROM_MEMBER_BYTES)
    try:
        frames = [frame for start in range(0, len(data), 64) for frame in parser.feed(data[start : start + 64])]
    except Error:
        return
    assert all(type(frame["t"]) is str for frame in frames)


def seeds():
    for value in ({"t": "bye", "number": 7, "numbers": {"a": 1}}, {"t": "x", "deep": [[[{"a": [b"b", 1.5, None]}]]]}):
        yield frame(value) * 2
    yield frame({"t": "x", "deep": "<deep>"})


if __name__ == "__main__":
    run(fuzz, seeds())

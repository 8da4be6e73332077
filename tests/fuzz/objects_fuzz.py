"""Python objects that another rank has sent (packing.py)."""

import datetime
import decimal
import random

import atheris
from fuzzing import instrumented, run

with instrumented():
    import numpy as np

    from mscomm import packing
    from mscomm.errors import Error


def fuzz(data: bytes) -> None:
    """Unpack the input: as it is, and as the value of an object."""
    padding = bytes(-(packing._LENGTH.size + len(data)) % 64)
    for whole in (data, packing._LENGTH.pack(len(data)) + data + padding):
        try:
            packing.unpack(whole)
        except Error:
            continue


def value_of(obj) -> bytes:
    whole = packing.pack(obj, allow_pickle=True)
    (length,) = packing._LENGTH.unpack_from(whole)
    return whole[packing._LENGTH.size :][:length]


OBJECTS = (
    [None, True, -1, 300, 1 << 20, 1 << 40, 1 << 70, 1.5, 2j, "text", "\udcff", b"bytes", (1, 2), {1, 2}],
    {"a": [{}], (1,): frozenset({"a"})},
    *(np.zeros((2, 3), dtype) for dtype in ("f4", "i8", "?", "c16", "U3", "S5", "M8[ns]", "m8[3D]", ">u2")),
    np.zeros((0, 5)),
    np.float32(1.5),
    np.datetime64("2026-01-01"),
    datetime.datetime(2026, 1, 1),
    decimal.Decimal("1.5"),
    slice(1, 2),
    range(3),
    set(range(1001)),
    [shared := [1], {"a": shared, "b": np.zeros(20_000)}, shared],
)
VALUES = [*map(value_of, OBJECTS)]


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Put a part of another value into the input, or change single bytes as libFuzzer does."""
    chance = random.Random(seed)
    if chance.random() < 0.7:
        return atheris.Mutate(data, max_size)
    value = chance.choice(VALUES)
    begin, end = sorted(chance.randrange(len(value) + 1) for _ in range(2))
    place = chance.randrange(len(data) + 1)
    return (data[:place] + value[begin:end] + data[place + chance.choice((0, end - begin)) :])[:max_size]


def seeds():
    for obj, value in zip(OBJECTS, VALUES, strict=True):
        yield from (packing.pack(obj, allow_pickle=True), value)


if __name__ == "__main__":
    run(fuzz, seeds(), mutated)

"""Python objects that another rank has sent (packing.py)."""

import datetime
import decimal

from fuzzing import instrumented, mutated_script, run

with instrumented():
    import numpy as np

    from mscomm import packing
    from mscomm.errors import Error


def fuzz(data: bytes) -> None:
    """Unpack the input: as it is, and as a msgpack value with every header that suits it."""
    padding = bytes(-(packing._HEADER.size + len(data)) % 64)
    for flags in (None, 0, packing._HAS_MARKS, packing._HAS_MARKS | packing._OTHER_KEYS):
        whole = data if flags is None else packing._HEADER.pack(len(data), flags) + data + padding
        try:
            packing.unpack(whole)
        except Error:
            continue


def seeds():
    values = (
        [None, True, -1, 1 << 70, 1.5, 2j, "text", b"bytes", (1, 2), {1, 2}, frozenset({"a"}), {"a": [{}], (1,): 2}],
        *(np.zeros((2, 3), dtype) for dtype in ("f4", "i8", "?", "c16", "U3", "S5", "M8[ns]", "m8[3D]", ">u2")),
        np.zeros((0, 5)),
        np.float32(1.5),
        np.datetime64("2026-01-01"),
        datetime.datetime(2026, 1, 1),
        decimal.Decimal("1.5"),
        slice(1, 2),
        range(3),
        [shared := [1], {"a": shared, "b": np.zeros(20_000)}],
    )
    for value in values:
        whole = packing.pack(value, allow_pickle=True)
        length, _ = packing._HEADER.unpack_from(whole)
        yield from (whole, whole[packing._HEADER.size :][:length])


if __name__ == "__main__":
    run(fuzz, seeds(), mutated_script)

"""What the fuzz targets in Python share. Each file *_fuzz.py here is one target; CONTRIBUTING.md says how to run them.

A target is a function that passes libFuzzer's bytes to a parser. It catches the errors that the parser's documentation
names. Any other exception is a finding, and so is an input that needs too much time or memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import atheris
import msgpack

MORE_MEMORY_BYTES = 256 << 20  # a target may map this much address space in addition to what its imports need

Mutator = Callable[[bytes, int, int], bytes]


@contextlib.contextmanager
def instrumented():
    """Import mscomm in this `with` block, so that libFuzzer sees which of its branches an input takes."""
    with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["mscomm"]):
        yield


def run(fuzz: Callable[[bytes], None], seeds: Iterable[bytes], mutator: Mutator | None = None) -> None:
    """Fuzz with the options on the command line, which are libFuzzer's. The seeds go to the first folder among them."""
    for folder in [Path(option) for option in sys.argv[1:] if os.path.isdir(option)][:1]:
        for number, seed in enumerate(seeds):
            (folder / f"seed-{number}").write_bytes(seed)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))  # so that a large allocation is a MemoryError, a finding
    atheris.Setup(sys.argv, fuzz, **({"custom_mutator": mutator} if mutator else {}))
    atheris.Fuzz()


# -- scripts: inputs that are msgpack values ---------------------------------------------------------------------------

# Texts in a script that frame() replaces by values that a short input could not hold, or that msgpack does not write.
_LARGE = {
    "<deep>": b"\x91" * 600 + b"\xc0",  # lists in lists
    "<digits>": b"\xda" + (5000).to_bytes(2, "big") + b"9" * 5000,
    "<long>": b"\xda" + (50_000).to_bytes(2, "big") + b"x" * 50_000,
}
_VALUES = (
    *(None, True, False, 0, 1, 2, -1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)),
    *(
        0.0,
        1.5,
        -1.0,
        float("nan"),
        float("inf"),
        "",
        "x",
        "0",
        "0:world",
        b"",
        b"x" * 32,
        [],
        [0],
        [0, 1],
        {},
        {"": 0},
    ),
    *_LARGE,
)


def script(data: bytes) -> Any:
    """Return the value of an input, or None if the input is not msgpack."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return msgpack.unpackb(data, strict_map_key=False)


def frame(value: Any) -> bytes:
    """Return a control frame with this value. A value of bytes is sent as it is."""
    if isinstance(value, bytes):
        return value
    body = msgpack.packb(value)
    for name, large in _LARGE.items():
        body = body.replace(msgpack.packb(name), large)
    return len(body).to_bytes(4, "little") + body


def mutated_script(data: bytes, max_size: int, seed: int) -> bytes:
    """Change some items of a script. libFuzzer's own mutations, of single bytes, often make invalid msgpack."""
    chance = random.Random(seed)
    value = script(data)
    if isinstance(value, list) and chance.random() < 0.9:
        for _ in range(chance.randint(1, 4)):
            _change(value, chance)
        with contextlib.suppress(ValueError, TypeError, RecursionError):  # too deep for msgpack, for example
            if len(packed := msgpack.packb(value)) <= max_size:
                return packed
    return atheris.Mutate(data, max_size)


def _change(value: list[Any] | dict[Any, Any], chance: random.Random) -> None:
    if not value:
        return
    key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    inner = value[key]
    if isinstance(inner, list | dict) and inner and chance.random() < 0.8:
        return _change(inner, chance)
    how = chance.randrange(6)
    if how == 0:
        del value[key]
    elif how == 1 and isinstance(value, list):
        value.insert(chance.randrange(len(value) + 1), inner)
    elif how == 2 and isinstance(value, list):
        other = chance.randrange(len(value))
        value[key], value[other] = value[other], inner
    elif isinstance(inner, str | bytes) and how == 3:
        value[key] = inner[: chance.randrange(len(inner) + 1)]
    elif isinstance(inner, int) and how in (3, 4):
        value[key] = max(-(1 << 63), min(inner + chance.randint(-3, 3), (1 << 64) - 1))
    else:
        value[key] = chance.choice(_VALUES)

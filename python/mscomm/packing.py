"""Converts Python objects to bytes, and bytes to Python objects.

The bytes are the length of a value, the value, and the memory of large arrays. The core (src/objects.cc) writes and
reads the value. It calls this file only for a part that is neither plain data nor a container: a _Writer says what is
sent for the part, and a _Reader creates the part from that. The bytes cannot name a function for the reader to run: the
reader runs only decode functions that this process has registered (registry.py), and unpickles only if the call allows
it. Before the reader creates anything, it checks that the bytes of its items are there.

An object can take up to 120 times as much memory as its bytes, because an empty set is two bytes. There is no lower
limit. It would refuse objects that programs do send, such as a long list of mostly empty lists (30 times). It would not
protect a rank either, because the sender can send more bytes.

An object that occurs several times is sent once and arrives as one object, unless its hash depends on its items, as
that of a tuple does. If tuples could refer to each other, a few bytes could make a key whose hash takes years.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import pickle
import re
import reprlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mscomm import _core, registry
from mscomm.arrays import packable
from mscomm.arrays.numpy import OF_ML_DTYPES, dtype_by_name
from mscomm.errors import Error

# The kinds of parts for which the core calls this file. Each comment says what is sent. Only the first kind may send
# containers.
_NAMED = 0  # the name of a row of the registry, and the value that the row's encode() returned
_INTEGER = 1  # an int of more than 64 bits: its bytes in little-endian two's complement
_ARRAY = 2  # the dtype, the elements in C order (or, if they come after the value, how many bytes), and the shape
_SCALAR = 3  # the dtype and the element
_PICKLE = 4  # the name of the class and the pickle

_LENGTH = struct.Struct("<Q")  # of the value, which comes next
_INLINE_BYTES = 1 << 16  # the elements of a larger array come after the value
_ALIGNMENT = 64  # of the elements of such an array

_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_DICTS = (dict, registry.Fields)

# Matches the numpy.dtype.str of dtypes that have the same meaning on every machine. bfloat16 and float8 are sent by
# name.
_DTYPE = re.compile(
    r"[|<>](b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,8}|[mM]8(\[([1-9]\d{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_PICKLE_PROTOCOL = 5  # every supported version of Python has this protocol


class Packed:
    """The bytes of an object. Large arrays are copied only by write()."""

    def __init__(self, value: bytes, large: list[np.ndarray[Any, Any]]) -> None:
        self._value = value
        self._large = large
        self.size = sum(map(_aligned, (_LENGTH.size + len(value), *(array.nbytes for array in large))))

    def write(self, into: np.ndarray[Any, Any]) -> None:
        """Write the bytes to `into`, an array of `size` elements of type uint8."""
        at = _LENGTH.size + len(self._value)
        into[: _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(self._value)), np.uint8)
        into[_LENGTH.size : at] = np.frombuffer(self._value, np.uint8)
        for array in self._large:
            begin = _aligned(at)
            into[at:begin] = 0
            at = begin + array.nbytes
            target = into[begin:at].view(array.dtype).reshape(array.shape)
            if array.dtype == np.bool_:
                np.not_equal(array.view(np.uint8), 0, out=target)
            else:
                np.copyto(target, array)
        into[at:] = 0


def packed(obj: Any, allow_pickle: bool = False, called: str = "obj") -> Packed:
    """Convert obj to bytes, from which unpack() creates an equal object of the same type.

    There are two exceptions: unpack() returns arrays in C order, and returns numpy.longlong as the equal numpy.int64.

    allow_pickle: whether to pickle what cannot be sent otherwise. called: the name of the object in error messages.

    Raise TypeError if obj contains something that cannot be sent. Raise ValueError for a container that contains
    itself, and for containers that are nested more than 128 levels deep. (An object of a registered class counts as a
    container with one item, the value that is sent for it.) Each of these errors says which part of obj is at fault.
    Raise RuntimeError if an encode function or a signal handler changes a container while it is converted.
    """
    writer = _Writer(allow_pickle)
    try:
        return Packed(_core.pack_object(obj, writer.converted, registry.Fields), writer.large)
    except (TypeError, ValueError):
        _Search(writer, called).visit(obj)  # raises an error that says which part is at fault
        raise


def pack(obj: Any, allow_pickle: bool = False) -> bytes:
    """Return the bytes of packed(obj, allow_pickle)."""
    made = packed(obj, allow_pickle)
    data = np.empty(made.size, np.uint8)
    made.write(data)
    return data.tobytes()


def unpack(data: Any, allow_pickle: bool = False, given_bytes: int = 0) -> Any:
    """Return the object that packed() converted to `data`, a bytes-like object. Arrays are new and writable.

    given_bytes: if `data` is writable and the caller gives its memory away, the size of the allocation that it is part
    of. Arrays of at least an eighth of this size then stay in this memory. A smaller array is copied, because it would
    keep the whole allocation alive.

    Raise Error if data is not the output of packed(), if it contains a pickle and allow_pickle is False, if the class
    of an object is not registered on this rank, or if an object cannot be decoded. Raise TypeError for a tensor of a
    library that is not installed.
    """
    try:
        return _Reader(memoryview(data), allow_pickle, given_bytes).read()
    except ValueError as error:
        raise Error(f"unpack: {error}") from error


class _Writer:
    """Says what is sent for the parts of one object. Its errors do not say which part is at fault."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self.large: list[np.ndarray[Any, Any]] = []

    def converted(self, obj: Any) -> tuple[Any, ...]:
        """Return whether obj stays one object if it occurs several times, its kind, and what is sent for it."""
        kind = type(obj)
        if kind is np.ndarray:
            return self._array(obj)
        if kind is int:
            return False, _INTEGER, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)
        if issubclass(kind, np.generic):
            return self._scalar(obj)
        row = registry.row_of(obj)
        if row is None:
            return self._unknown(obj)
        try:
            value = row.encode(obj)
        except Exception as error:
            raise TypeError(f"a {row.name} cannot be sent: {error}") from error
        return _may_be_shared(obj), _NAMED, row.name, value

    def _array(self, obj: np.ndarray[Any, Any]) -> tuple[Any, ...]:
        dtype = _name_of_dtype(obj.dtype)
        if dtype is None:
            return self._unknown(obj, f"an array of dtype {obj.dtype} cannot be sent")
        if obj.nbytes > _INLINE_BYTES:
            self.large.append(obj)
            return True, _ARRAY, dtype, obj.nbytes, *obj.shape
        if obj.dtype == np.bool_:
            obj = np.asarray(obj.view(np.uint8) != 0)  # a byte other than 0 and 1 means True
        return True, _ARRAY, dtype, obj.tobytes(), *obj.shape

    def _scalar(self, obj: np.generic) -> tuple[Any, ...]:
        if isinstance(obj, (str, bytes)):  # numpy.str_ and numpy.bytes_, whose trailing NULs an array would lose
            return self._unknown(obj)
        dtype = _name_of_dtype(obj.dtype)
        if dtype is None:
            return self._unknown(obj, f"a scalar of dtype {obj.dtype} cannot be sent")
        return False, _SCALAR, dtype, obj.tobytes()

    def _unknown(self, obj: Any, why: str = "") -> tuple[Any, ...]:
        """Pickle an object that cannot be sent otherwise, or refuse it.

        why: the reason why it cannot be sent; "" if the reason is the object's type.
        """
        if not self._allow_pickle:
            raise TypeError(why or _refusal(obj))
        name = _name_of(obj)
        try:
            return _may_be_shared(obj), _PICKLE, name, pickle.dumps(obj, _PICKLE_PROTOCOL)
        except Exception as error:  # an error of pickle, or any error of the object's own methods
            raise TypeError(f"{_a(name)} cannot be pickled: {error}") from error


class _Search:
    """Looks for the part of an object that cannot be sent. Raises an error that says where it is."""

    def __init__(self, writer: _Writer, called: str) -> None:
        self._writer = writer
        self._called = called
        self._path: list[tuple[str, Any]] = []  # for each container being visited: its current item
        self._entered: dict[int, int] = {}  # the depth of each container that is being visited, by id
        self._done: set[int] = set()
        self._kept: list[Any] = []  # what is sent for parts, because ids are those of living objects

    def visit(self, obj: Any) -> None:
        if id(obj) in self._done:
            return
        parts = self._parts(obj)
        if parts is None:
            return
        outer = self._entered.get(id(obj))
        if outer is not None:
            same = self._where(outer)
            raise ValueError(f"{self._where()}: it contains itself: it is the same object as {same}") from None
        if len(self._path) == _core.max_depth:
            raise ValueError(f"{self._where()}: containers are nested more than {_core.max_depth} deep") from None
        self._entered[id(obj)] = len(self._path)
        self._path.append(("item", None))
        for self._path[-1], part in parts:
            self.visit(part)
        self._path.pop()
        del self._entered[id(obj)]
        self._done.add(id(obj))

    def _parts(self, obj: Any) -> Iterable[tuple[tuple[str, Any], Any]] | None:
        """Return (kind, key) and the part for each part of a container, or None for a value that has no parts."""
        kind = type(obj)
        if kind in (list, tuple):
            return ((("item", i), item) for i, item in enumerate(obj))
        if kind in (set, frozenset):
            return ((("element", None), item) for item in obj)
        if kind in _DICTS:
            return _keys_and_items(obj, "field" if kind is registry.Fields else "item")
        if kind in _PLAIN:
            return None
        try:
            _, kind, *sent = self._writer.converted(obj)
        except TypeError as error:
            raise TypeError(f"{self._where()}: {error}") from error.__cause__
        self._kept.append(sent)
        return [(("whole", None), sent[1])] if kind == _NAMED else None

    def _where(self, depth: int | None = None) -> str:
        """Return the path to the current item, such as obj["model"].lr[3]. depth: the number of levels to show."""
        text = self._called
        for kind, key in self._path[:depth]:
            if kind == "field":
                text += f".{key}"
            elif kind == "item":
                short = reprlib.repr(key)
                text += f'["{short[1:-1]}"]' if type(key) is str and short[0] == "'" else f"[{short}]"
            elif kind != "whole":
                text = f"({kind} of {text})"
        return text


class _Reader:
    """Creates the parts of one object for which the core calls this file."""

    def __init__(self, data: memoryview, allow_pickle: bool, given_bytes: int) -> None:
        self._data = data.cast("B")
        self._allow_pickle = allow_pickle
        self._given_bytes = 0 if data.readonly else given_bytes
        self._at = 0  # where the elements of the next large array begin

    def read(self) -> Any:
        if len(self._data) < _LENGTH.size:
            raise ValueError("the bytes end too early")
        (length,) = _LENGTH.unpack_from(self._data)
        self._at = _aligned(_LENGTH.size + length)
        obj = _core.unpack_object(self._data[_LENGTH.size :][:length], self._made, _may_be_shared)
        if self._at != len(self._data):
            raise ValueError("more or fewer bytes follow the object than its arrays have")
        return obj

    def _made(self, kind: int, parts: tuple[Any, ...]) -> Any:
        """Create a part of an object from what _Writer.converted() has returned for it."""
        if kind >= len(_CREATE):
            raise ValueError(f"unknown kind {kind}")
        return _CREATE[kind](self, parts)

    def _integer(self, parts: tuple[Any, ...]) -> int:
        (digits,) = _checked(parts, bytes)
        return int.from_bytes(digits, "little", signed=True)

    def _array(self, parts: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        if len(parts) < 2:
            raise ValueError(f"{len(parts)} parts of an array")
        dtype, elements, shape = _dtype(parts[0]), parts[1], parts[2:]
        for extent in shape:
            if type(extent) is not int or not 0 <= extent < 1 << 62 or len(shape) > 64:
                raise ValueError("a shape that no array has")
        given = False
        if type(elements) is int and elements > 0:
            given = elements * 8 >= self._given_bytes > 0
            elements = self._data[self._at :][:elements]
            self._at = _aligned(self._at + len(elements))
        elif type(elements) is not bytes:
            raise ValueError(f"{elements!r:.50}, expected a bytes or how many bytes")
        if math.prod(shape) * dtype.itemsize != len(elements):
            raise ValueError(f"{len(elements)} bytes for an array of {dtype} with shape {shape}")
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, elements)
        if not given:
            array = array.copy()
        if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
            raise ValueError("an element that is neither True nor False")
        return array

    def _scalar(self, parts: tuple[Any, ...]) -> np.generic:
        name, element = _checked(parts, str, bytes)
        dtype = _dtype(name)
        if dtype.itemsize != len(element) or dtype.kind in "SU":
            raise ValueError(f"{len(element)} bytes for a scalar of {dtype}")
        scalar: np.generic = np.frombuffer(element, dtype)[0]
        return scalar

    def _named(self, parts: tuple[Any, ...]) -> Any:
        name, value = _checked(parts, str, object)
        row = registry.row_named(name)
        if row is None:
            raise ValueError(
                "received an object of a class that is not registered here,"
                f" {name[:200]!r}: call mscomm.register_object on this rank, too"
            )
        try:
            return row.decode(value)
        except (registry.NotInstalled, MemoryError):
            raise
        except Exception as error:
            raise ValueError(
                f"{_a(name)} cannot be created from the received data: {type(error).__name__}: {error}"
            ) from error

    def _pickled(self, parts: tuple[Any, ...]) -> Any:
        name, data = _checked(parts, str, bytes)
        if not self._allow_pickle:
            raise ValueError(
                f"{_a(name[:200])} was received as a pickle, which can run any code: pass allow_pickle=True if"
                " you trust every rank of the group"
            )
        try:
            return pickle.loads(data)  # noqa: S301  the call asked for it
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(f"the pickle of {_a(name[:200])}: {type(error).__name__}: {error}") from error


def _may_be_shared(obj: Any) -> bool:
    """Return whether obj cannot be hashed, or is hashed without looking at its items."""
    own: Any = type(obj).__hash__
    return own is None or own is object.__hash__ or packable(obj) is not None


def _keys_and_items(obj: dict[Any, Any], kind: str) -> Iterator[tuple[tuple[str, Any], Any]]:
    for key, item in obj.items():
        yield ("key", None), key
        yield (kind, key), item


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _checked(parts: tuple[Any, ...], *kinds: type) -> tuple[Any, ...]:
    """Return the parts. Raise ValueError if their types are not exactly these; `object` stands for any type."""
    if len(parts) != len(kinds):
        raise ValueError(f"{len(parts)} parts, expected {len(kinds)}")
    for part, kind in zip(parts, kinds, strict=True):
        if type(part) is not kind and kind is not object:
            raise ValueError(f"a {type(part).__name__}, expected a {kind.__name__}")
    return parts


def _refusal(obj: Any) -> str:
    kind = type(obj)
    plain = next((known for known in registry.PLAIN if isinstance(obj, known)), None)
    if isinstance(obj, enum.Enum) or dataclasses.is_dataclass(kind):
        way_out = f"register its class on every rank: mscomm.register_object({kind.__qualname__})"
    elif plain is np.ndarray:
        way_out = _PLAIN_ARRAY if not isinstance(obj, np.ma.MaskedArray) else _MASKED_ARRAY
    elif plain is not None:
        way_out = f"make it a plain {plain.__name__}"
    elif hasattr(kind, "detach"):
        way_out = "give it as x.detach()"  # obj is a PyTorch parameter
    else:
        way_out = "see mscomm.register_object"
    return f"{_a(_name_of(obj))} cannot be sent; {way_out}"


_PLAIN_ARRAY = "give it as np.asarray(...)"
_MASKED_ARRAY = "give its parts, as in (x.data, np.ma.getmaskarray(x))"


def _name_of(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _a(name: str) -> str:
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


@functools.lru_cache
def _name_of_dtype(dtype: np.dtype[Any]) -> str | None:
    """Return the name that represents the dtype in the bytes; None if arrays of this dtype cannot be sent."""
    if dtype.name in OF_ML_DTYPES:
        return dtype.name
    return dtype.str if _DTYPE.fullmatch(dtype.str) else None


@functools.lru_cache
def _dtype(name: Any) -> np.dtype[Any]:
    if name in OF_ML_DTYPES:
        try:
            return dtype_by_name(name)
        except TypeError as error:
            raise Error(f"unpack: received an array of {name}: {error}") from None
    if type(name) is not str or not _DTYPE.fullmatch(name):
        raise ValueError(f"an array of dtype {reprlib.repr(name)}, which pack does not write")
    try:
        return np.dtype(name)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an array of dtype {name!r}: {error}") from None


_CREATE = (_Reader._named, _Reader._integer, _Reader._array, _Reader._scalar, _Reader._pickled)  # by kind

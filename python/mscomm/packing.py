"""Converts Python objects to bytes, and bytes to Python objects.

The bytes are one msgpack value. They cannot name a function for the reader to run: the reader runs only decode
functions that this process has registered (registry.py), and unpickles only if the call allows it. A value of a type
that msgpack lacks is written as an array whose first item is an empty extension. The type number of the extension says
what the other items are. Before the reader allocates memory for a container of n items, it checks that enough bytes are
left for n items.

An object can take up to 100 times as much memory as its bytes, because an empty container is one byte. There is no
lower limit. It would refuse objects that programs do send, such as a long list of mostly empty lists (50 times). It
would not protect a rank either, because the sender can send more bytes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgpack
import numpy as np

from mscomm import registry
from mscomm.arrays.numpy import OF_ML_DTYPES, dtype_by_name
from mscomm.errors import Error

DEEPEST = 128  # how deep containers may be nested; each level needs two Python stack frames

# A value of a type that msgpack lacks is written as an array that begins with an extension. These are the extensions'
# type numbers. Each comment says which items follow the extension.
_TUPLE, _SET, _FROZENSET = 1, 2, 3  # followed by the items of the container
_COMPLEX = 4  # followed by the real part and the imaginary part
_INTEGER = 5  # an int of more than 64 bits; followed by its bytes in little-endian two's complement
_ARRAY = 6  # followed by the dtype, the shape, and the elements in C order
_SCALAR = 7  # followed by the dtype and the element
_NAMED = 8  # followed by the name of a row of the registry, and the value that the row's encode() returned
_PICKLE = 9  # followed by the name of the class and the pickle

# Matches the numpy.dtype.str of dtypes that have the same meaning on every machine. bfloat16 and float8 are sent by
# name.
_DTYPE = re.compile(
    r"[|<>](b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,8}|[mM]8(\[([1-9]\d{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_MOST_WITH_ONE_HASH = 1000
_C = TypeVar("_C", dict[Any, Any], set[Any])
_PICKLE_PROTOCOL = 5  # every supported version of Python has this protocol


def pack(obj: Any, allow_pickle: bool = False, called: str = "obj") -> bytes:
    """Convert obj to bytes, from which unpack() creates an equal object of the same type.

    There are two exceptions: unpack() returns arrays in C order, and returns numpy.longlong as the equal numpy.int64.

    allow_pickle: whether to pickle what cannot be sent otherwise. called: the name of the object in error messages.

    Raise TypeError if obj contains something that cannot be sent. Raise ValueError for a container that contains
    itself, for a single value over 4 GiB, and for containers that are nested more than 128 levels deep. (An object of a
    registered class counts as a container with one item, the value that is sent for it.) Each error says which part of
    obj is at fault.
    """
    writer = _Writer(allow_pickle, called)
    writer.write(obj)
    return writer.packer.bytes()  # type: ignore[no-any-return]


def unpack(data: Any, allow_pickle: bool = False) -> Any:
    """Return the object that pack() converted to `data`, a bytes-like object. Arrays are new and writable.

    Raise Error if data is not the output of pack(), if it contains a pickle and allow_pickle is False, if the class of
    an object is not registered on this rank, or if an object cannot be decoded. Raise TypeError for a tensor of a
    library that is not installed.
    """
    reader = _Reader(bytes(memoryview(data)), allow_pickle)
    try:
        obj = reader.read(0)
        if reader.at() != len(reader.data):
            raise ValueError("more bytes follow the object")
    except (ValueError, msgpack.OutOfData) as error:
        reason = "the bytes end too early" if isinstance(error, msgpack.OutOfData) else str(error) or "not msgpack"
        raise Error(f"unpack: at byte {reader.at()} of {len(reader.data)}: {reason}") from error
    return obj


class _Writer:
    """Writes one object. Error messages say which item of the object was being written."""

    def __init__(self, allow_pickle: bool, called: str) -> None:
        self._allow_pickle = allow_pickle
        self._called = called
        self.packer = msgpack.Packer(autoreset=False, unicode_errors="surrogatepass")
        self._path: list[tuple[str, Any]] = []  # for each container being written: its current item
        self._entered: dict[int, int] = {}  # the depth of each container that is being written, by id

    def write(self, obj: Any) -> None:
        write = _WRITERS.get(type(obj))
        if write is not None:
            write(self, obj)
        elif isinstance(obj, np.generic):
            self._scalar(obj)
        elif (row := registry.row_of(obj)) is not None:
            self._named(obj, row)
        else:
            self._unknown(obj)

    def _plain(self, obj: Any) -> None:
        try:
            self.packer.pack(obj)
        except ValueError as error:
            raise ValueError(f"{self._where()}: {error}; a single value may have up to 4 GiB") from None

    def _int(self, obj: int) -> None:
        if -(1 << 63) <= obj < 1 << 64:
            self.packer.pack(obj)
        else:
            self._parts(_INTEGER, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))

    def _complex(self, obj: complex) -> None:
        self._parts(_COMPLEX, obj.real, obj.imag)

    def _list(self, obj: list[Any]) -> None:
        self.packer.pack_array_header(len(obj))
        self._items(obj, "item", enumerate(obj))

    def _tuple(self, obj: tuple[Any, ...]) -> None:
        self._marked(_TUPLE, len(obj))
        self._items(obj, "item", enumerate(obj))

    def _set(self, obj: set[Any] | frozenset[Any]) -> None:
        self._marked(_SET if type(obj) is set else _FROZENSET, len(obj))
        self._items(obj, "element", ((None, item) for item in obj))

    def _dict(self, obj: dict[Any, Any]) -> None:
        kind = "field" if type(obj) is registry.Fields else "item"
        self.packer.pack_map_header(len(obj))
        self._enter(obj)
        for key, item in obj.items():
            self._path[-1] = "key", None
            self.write(key)
            self._path[-1] = kind, key
            self.write(item)
        self._leave(obj)

    def _named(self, obj: Any, row: registry.Row) -> None:
        try:
            value = row.encode(obj)
        except Exception as error:
            raise TypeError(f"{self._where()}: a {row.name} cannot be sent: {error}") from error
        self._marked(_NAMED, 2)
        self.packer.pack(row.name)
        self._items(obj, "whole", [(None, value)])

    def _pickle(self, obj: Any) -> None:
        name = _name_of(obj)
        try:
            data = pickle.dumps(obj, _PICKLE_PROTOCOL)
        except Exception as error:  # an error of pickle, or any error of the object's own methods
            raise TypeError(f"{self._where()}: {_a(name)} cannot be pickled: {error}") from error
        self._parts(_PICKLE, name, data)

    def _array(self, obj: np.ndarray[Any, Any]) -> None:
        dtype = _name_of_dtype(obj.dtype)
        if dtype is None:
            return self._unknown(obj, f"an array of dtype {obj.dtype} cannot be sent")
        elements = np.asarray(obj, order="C").reshape(-1).view(np.uint8)
        self._parts(_ARRAY, dtype, list(obj.shape), elements.data)

    def _scalar(self, obj: np.generic) -> None:
        if isinstance(obj, (str, bytes)):  # numpy.str_ and numpy.bytes_, whose trailing NULs an array would lose
            return self._unknown(obj)
        dtype = _name_of_dtype(obj.dtype)
        if dtype is None:
            return self._unknown(obj, f"a scalar of dtype {obj.dtype} cannot be sent")
        self._parts(_SCALAR, dtype, obj.tobytes())

    def _unknown(self, obj: Any, why: str = "") -> None:
        """Pickle an object that cannot be sent otherwise, or refuse it.

        why: the reason why it cannot be sent; "" if the reason is the object's type.
        """
        if not self._allow_pickle:
            raise TypeError(f"{self._where()}: {why or self._refusal(obj)}")
        self._pickle(obj)

    def _marked(self, code: int, items: int) -> None:
        self.packer.pack_array_header(1 + items)
        self.packer.pack_ext_type(code, b"")

    def _parts(self, code: int, *parts: Any) -> None:
        """Write a value whose parts msgpack can write."""
        self._marked(code, len(parts))
        for part in parts:
            self._plain(part)

    def _items(self, container: Any, kind: str, items: Iterable[tuple[Any, Any]]) -> None:
        self._enter(container)
        for key, item in items:
            self._path[-1] = kind, key
            self.write(item)
        self._leave(container)

    def _enter(self, container: Any) -> None:
        outer = self._entered.get(id(container))
        if outer is not None:
            raise ValueError(f"{self._where()}: it contains itself: it is the same object as {self._where(outer)}")
        if len(self._path) == DEEPEST:
            raise ValueError(f"{self._where()}: containers are nested more than {DEEPEST} deep")
        self._entered[id(container)] = len(self._path)
        self._path.append(("item", None))

    def _leave(self, container: Any) -> None:
        self._path.pop()
        del self._entered[id(container)]

    @staticmethod
    def _refusal(obj: Any) -> str:
        kind = type(obj)
        plain = next((known for known in registry.PLAIN if isinstance(obj, known)), None)
        if isinstance(obj, enum.Enum) or dataclasses.is_dataclass(kind):
            way_out = f"register its class on every rank: mscomm.register_object({kind.__qualname__})"
        elif plain is not None:
            way_out = "give it as np.asarray(...)" if plain is np.ndarray else f"make it a plain {plain.__name__}"
        elif hasattr(kind, "detach"):
            way_out = "give it as x.detach()"  # obj is a PyTorch parameter
        else:
            way_out = "see mscomm.register_object"
        return f"{_a(_name_of(obj))} cannot be sent; {way_out}"

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


_WRITERS: dict[type, Callable[[_Writer, Any], None]] = {
    type(None): _Writer._plain,
    bool: _Writer._plain,
    int: _Writer._int,
    float: _Writer._plain,
    complex: _Writer._complex,
    str: _Writer._plain,
    bytes: _Writer._plain,
    list: _Writer._list,
    tuple: _Writer._tuple,
    set: _Writer._set,
    frozenset: _Writer._set,
    dict: _Writer._dict,
    registry.Fields: _Writer._dict,
    np.ndarray: _Writer._array,
}


class _Reader:
    """Reads one object. Before it uses a size in the data, it compares the size with the number of bytes left."""

    def __init__(self, data: bytes, allow_pickle: bool) -> None:
        self.data = data
        self._allow_pickle = allow_pickle
        self._unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), unicode_errors="surrogatepass")
        self._unpacker.feed(data)
        self.at: Callable[[], int] = self._unpacker.tell

    def read(self, depth: int) -> Any:
        """Read and return the next object, which is nested in `depth` containers."""
        head = self._head()
        if head & 0xF0 == 0x90 or head in (0xDC, 0xDD):
            return self._array(depth + 1)
        if head & 0xF0 == 0x80 or head in (0xDE, 0xDF):
            return self._dict(depth + 1)
        if 0xC7 <= head <= 0xC9 or 0xD4 <= head <= 0xD8:
            raise ValueError("an extension that does not begin an array")
        return self._unpacker.unpack()  # a single value; raises OutOfData if bytes of it are missing

    def _head(self) -> int:
        """Return the byte that says what kind of value comes next."""
        if self.at() == len(self.data):
            raise msgpack.OutOfData
        return self.data[self.at()]

    def _array(self, depth: int) -> Any:
        size = self._checked(self._unpacker.read_array_header(), depth)
        begin = self.data[self.at() : self.at() + 3]
        if size == 0 or begin[:2] != b"\xc7\x00":  # an array that does not begin with an empty extension is a list
            return [self.read(depth) for _ in range(size)]
        self._unpacker.skip()
        code = begin[2] if len(begin) == 3 else 0
        if code not in _READERS:
            raise ValueError(f"unknown extension {code}")
        return _READERS[code](self, size - 1, depth)

    def _dict(self, depth: int) -> dict[Any, Any]:
        size = self._unpacker.read_map_header()
        self._checked(2 * size, depth)
        pairs = [(self.read(depth), self.read(depth)) for _ in range(size)]
        return self._distinct(dict, pairs, [key for key, _ in pairs], "a key")

    def _tuple(self, size: int, depth: int) -> tuple[Any, ...]:
        return tuple([self.read(depth) for _ in range(size)])

    def _set(self, size: int, depth: int) -> set[Any]:
        elements = [self.read(depth) for _ in range(size)]
        return self._distinct(set, elements, elements, "an element")

    def _complex(self, size: int, depth: int) -> complex:
        real, imag = self._parts(size, depth, float, float)
        return complex(real, imag)

    def _integer(self, size: int, depth: int) -> int:
        (digits,) = self._parts(size, depth, bytes)
        return int.from_bytes(digits, "little", signed=True)

    def _ndarray(self, size: int, depth: int) -> np.ndarray[Any, Any]:
        name, shape, elements = self._parts(size, depth, str, list, bytes)
        dtype = _dtype(name)
        if len(shape) > 64 or not all(type(extent) is int and 0 <= extent < 1 << 62 for extent in shape):
            raise ValueError("a shape that no array has")
        if math.prod(shape) * dtype.itemsize != len(elements):
            raise ValueError(f"{len(elements)} bytes for an array of {dtype} with shape {shape}")
        array = np.ndarray(shape, dtype, elements).copy()
        if dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise ValueError("an element that is neither True nor False")
        return array

    def _scalar(self, size: int, depth: int) -> np.generic:
        name, element = self._parts(size, depth, str, bytes)
        dtype = _dtype(name)
        if dtype.itemsize != len(element) or dtype.kind in "SU":
            raise ValueError(f"{len(element)} bytes for a scalar of {dtype}")
        scalar: np.generic = np.frombuffer(element, dtype)[0]
        return scalar

    def _named(self, size: int, depth: int) -> Any:
        name, value = self._parts(size, depth, str, object)
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

    def _pickled(self, size: int, depth: int) -> Any:
        name, data = self._parts(size, depth, str, bytes)
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

    def _parts(self, size: int, depth: int, *kinds: type) -> list[Any]:
        if size != len(kinds):
            raise ValueError(f"{size} parts, expected {len(kinds)}")
        parts = []
        for kind in kinds:
            part = self.read(depth)
            if type(part) is not kind and kind is not object:
                raise ValueError(f"a {type(part).__name__}, expected a {kind.__name__}")
            parts.append(part)
        return parts

    def _checked(self, size: int, depth: int) -> int:
        left = len(self.data) - self.at()
        if size > left:  # each item takes at least one byte
            raise ValueError(f"{size} items in the {left} bytes that are left")
        if depth > DEEPEST + 2:  # 2 more, because a NumPy array and its shape also count as containers in the bytes
            raise ValueError(f"containers are nested more than {DEEPEST} deep")
        return size

    @staticmethod
    def _distinct(make: Callable[[list[Any]], _C], items: list[Any], hashed: list[Any], what: str) -> _C:
        """Create a dict or set from the items. `hashed` holds the keys of the dict, or the items of the set.

        Raise ValueError if two elements of `hashed` are equal, if many have the same hash, or if an element cannot be
        hashed.
        """
        hashes: list[int] = []
        for one in hashed:
            try:
                hashes.append(hash(one))
            except MemoryError:
                raise
            except Exception as error:  # a registered class may raise anything in __hash__
                raise ValueError(f"{what} with a {type(one).__name__}, which cannot be one") from error
        if len(set(hashes)) < len(hashes) and max(Counter(hashes).values()) > _MOST_WITH_ONE_HASH:
            raise ValueError(f"{what} has the same hash as {_MOST_WITH_ONE_HASH} others")
        try:
            made = make(items)
        except MemoryError:
            raise
        except Exception as error:  # a registered class may raise anything in __eq__, too
            raise ValueError(f"{what} that cannot be compared: {type(error).__name__}: {error}") from error
        if len(made) != len(items):
            raise ValueError(f"{what} occurs twice")
        return made


def _name_of(obj: Any) -> str:
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _a(name: str) -> str:
    return f"{'an' if name[:1].lower() in tuple('aeiou') else 'a'} {name}"


def _name_of_dtype(dtype: np.dtype[Any]) -> str | None:
    """Return the name that represents the dtype in the bytes; None if arrays of this dtype cannot be sent."""
    if dtype.name in OF_ML_DTYPES:
        return dtype.name
    return dtype.str if _DTYPE.fullmatch(dtype.str) else None


def _dtype(name: str) -> np.dtype[Any]:
    if name in OF_ML_DTYPES:
        try:
            return dtype_by_name(name)
        except TypeError as error:
            raise Error(f"unpack: received an array of {name}: {error}") from None
    if not _DTYPE.fullmatch(name):
        raise ValueError(f"an array of dtype {name[:30]!r}, which pack does not write")
    try:
        return np.dtype(name)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"an array of dtype {name!r}: {error}") from None


_READERS: dict[int, Callable[[_Reader, int, int], Any]] = {
    _TUPLE: _Reader._tuple,
    _SET: _Reader._set,
    _FROZENSET: lambda reader, size, depth: frozenset(reader._set(size, depth)),
    _COMPLEX: _Reader._complex,
    _INTEGER: _Reader._integer,
    _ARRAY: _Reader._ndarray,
    _SCALAR: _Reader._scalar,
    _NAMED: _Reader._named,
    _PICKLE: _Reader._pickled,
}

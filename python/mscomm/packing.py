"""Converts Python objects to bytes, and bytes to Python objects.

The bytes are a header, one msgpack value, and the memory of large arrays. They cannot name a function for the reader to
run: the reader runs only decode functions that this process has registered (registry.py), and unpickles only if the
call allows it. A value of a type that msgpack lacks is written as an array whose first item, the mark, is an empty
extension. The type number of the mark says what the other items are.

msgpack's code in C does most of the work. To find out what it can write on its own, survey() looks at all objects of
one level and one type together. Before the reader creates anything, it checks that the items of all containers are
there.

An object can take up to 100 times as much memory as its bytes, because an empty container is one byte. There is no
lower limit. It would refuse objects that programs do send, such as a long list of mostly empty lists (50 times). It
would not protect a rank either, because the sender can send more bytes.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgpack
import numpy as np

from mscomm import registry
from mscomm.arrays import packable
from mscomm.arrays.numpy import OF_ML_DTYPES, dtype_by_name
from mscomm.errors import Error

DEEPEST = 128  # how deep containers may be nested; each takes up to 3 of the 511 levels that msgpack writes

# The type numbers of the marks. Each comment says which items follow the mark.
_TUPLE, _SET, _FROZENSET = 1, 2, 3  # the items of the container
_COMPLEX = 4  # the real part and the imaginary part
_INTEGER = 5  # an int of more than 64 bits: its bytes in little-endian two's complement
_ARRAY = 6  # the dtype, the elements in C order (or, if they come after the value, how many bytes), and the shape
_SCALAR = 7  # the dtype and the element
_NAMED = 8  # the name of a row of the registry, and the value that the row's encode() returned
_PICKLE = 9  # the name of the class and the pickle
_SHARED = 10  # a number, and the object that occurs again
_AGAIN = 11  # the number of such an object
_MARKS = {code: msgpack.ExtType(code, b"") for code in range(_TUPLE, _AGAIN + 1)}

_HEADER = struct.Struct("<QB")  # the length of the value; flags, which say how the reader must read the value
_OTHER_KEYS = 1  # a dict has a key that is neither a str nor bytes
_HAS_MARKS = 2
_INLINE_BYTES = 1 << 16  # the elements of a larger array come after the value
_ALIGNMENT = 64  # of the elements of such an array

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))  # msgpack writes them in C, except for large ints
_MARK_OF: dict[type, Any] = {tuple: _MARKS[_TUPLE], set: _MARKS[_SET], frozenset: _MARKS[_FROZENSET]}
_DICTS = (dict, registry.Fields)
_TEXTS = frozenset((str, bytes))

# Matches the numpy.dtype.str of dtypes that have the same meaning on every machine. bfloat16 and float8 are sent by
# name.
_DTYPE = re.compile(
    r"[|<>](b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,8}|[mM]8(\[([1-9]\d{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_MOST_WITH_ONE_HASH = 1000
_C = TypeVar("_C", dict[Any, Any], set[Any])
_PICKLE_PROTOCOL = 5  # every supported version of Python has this protocol


class Packed:
    """The bytes of an object. Large arrays are copied only by write()."""

    def __init__(self, header: bytes, value: memoryview, large: list[np.ndarray[Any, Any]]) -> None:
        self._header = header
        self._value = value
        self._large = large
        self.size = sum(map(_aligned, (len(header) + len(value), *(array.nbytes for array in large))))

    def write(self, into: np.ndarray[Any, Any]) -> None:
        """Write the bytes to `into`, an array of `size` elements of type uint8."""
        at = len(self._header) + len(self._value)
        into[: len(self._header)] = np.frombuffer(self._header, np.uint8)
        into[len(self._header) : at] = np.frombuffer(self._value, np.uint8)
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
    itself, for a single value over 4 GiB that is not an array, and for containers that are nested more than 128 levels
    deep. (An object of a registered class counts as a container with one item, the value that is sent for it.) Each
    error says which part of obj is at fault.
    """
    writer = _Writer(allow_pickle)
    try:
        writer.survey(obj)
        if not writer.may_contain_itself:
            return writer.written(obj)
        fault = None
    except Exception as error:
        fault = error
    _Search(writer, called).visit(obj)  # raises an error that says which part is at fault
    if fault is not None:
        raise fault
    return writer.written(obj)


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
    except msgpack.OutOfData as error:
        raise Error("unpack: the bytes end too early") from error
    except msgpack.StackError as error:
        raise Error("unpack: containers are nested too deep") from error
    except ValueError as error:
        raise Error(f"unpack: {str(error) or 'not msgpack'}") from error


class _Opened(NamedTuple):
    """A list or dict that msgpack must not write on its own, because it may be shared or contain a shared one."""

    container: Any


class _Writer:
    """Writes one object. Its errors do not say which part of the object is at fault."""

    def __init__(self, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._met: set[int] = set()  # the ids of the objects that may be shared
        self._shared: set[int] = set()  # the ids of those that occur several times
        self._numbers: dict[int, int] = {}  # the numbers of those that have been written, by id
        self._converted: dict[int, tuple[Any, list[Any]]] = {}  # by id: an object of another type, and its items
        self._opens = False  # whether a list or dict is shared
        self._flags = 0
        self._large: list[np.ndarray[Any, Any]] = []
        self.may_contain_itself = False

    def survey(self, obj: Any) -> None:
        """Look at all parts of obj, level by level: find the shared objects, and convert objects of other types."""
        level, depth = [obj], 0
        while level:
            below: list[Any] = []
            for kind, some in _by_type(level):
                if kind is np.ndarray:
                    self._meet(some)
                elif not _is_leaf(kind):
                    if depth == DEEPEST:
                        raise ValueError(f"containers are nested more than {DEEPEST} deep")
                    below += self._children(kind, some)
            level, depth = below, depth + 1

    def _children(self, kind: type, level: list[Any]) -> list[Any]:
        """Return the parts of these objects, which all are of one type, or nothing if all parts are plain."""
        if kind in _DICTS:
            level = self._meet(level)
            if _TEXTS.issuperset(map(type, chain.from_iterable(level))):
                return _unless_plain(_values, level)
            self._flags |= _OTHER_KEYS
            return _unless_plain(chain.from_iterable, level) + _unless_plain(_values, level)
        if kind in (list, set):
            return _unless_plain(chain.from_iterable, self._meet(level))
        if kind in (tuple, frozenset):
            return _unless_plain(chain.from_iterable, level)
        if _may_be_shared(level[0]):
            level = self._meet(level)
        return [self.converted(x)[2] for x in level]

    def _meet(self, level: list[Any]) -> list[Any]:
        """Note objects of one type that may be shared. Return those that have not been met before."""
        ids = set(map(id, level))
        if len(ids) < len(level) or not ids.isdisjoint(self._met):
            again = Counter(map(id, level))
            self._shared.update(one for one in ids if again[one] > 1 or one in self._met)
            self._opens |= type(level[0]) in (list, dict)
            self.may_contain_itself |= type(level[0]) is not np.ndarray and packable(level[0]) is None
            level = [*{id(x): x for x in level if id(x) not in self._met}.values()]
        self._met |= ids
        return level

    def converted(self, obj: Any) -> list[Any]:
        """Return [mark, name, value] for an object that is none of the types that this file names."""
        if id(obj) not in self._converted:
            row = registry.row_of(obj)
            if row is None:
                items = self._unknown(obj)
            else:
                try:
                    items = [_MARKS[_NAMED], row.name, row.encode(obj)]
                except Exception as error:
                    raise TypeError(f"a {row.name} cannot be sent: {error}") from error
            self._converted[id(obj)] = obj, items  # also keeps both alive, because ids are those of living objects
        return self._converted[id(obj)][1]

    def written(self, obj: Any) -> Packed:
        self._large.clear()  # items() of a _Search may have added some
        form = self._form if self._shared else self.items
        packer = msgpack.Packer(default=form, strict_types=True, unicode_errors="surrogatepass", autoreset=False)
        packer.pack(self._opened(obj))
        value = packer.getbuffer()
        return Packed(_HEADER.pack(len(value), self._flags), value, self._large)

    def _form(self, obj: Any) -> Any:
        """Return what msgpack writes in the place of an object that it cannot write on its own."""
        if type(obj) is _Opened:
            (obj,) = obj
        if id(obj) not in self._shared:
            return self.items(obj)
        number = self._numbers.get(id(obj))
        if number is not None:
            return [_MARKS[_AGAIN], number]
        number = self._numbers[id(obj)] = len(self._numbers)
        return [_MARKS[_SHARED], number, self.items(obj)]

    def items(self, obj: Any) -> Any:
        self._flags |= _HAS_MARKS
        kind = type(obj)
        mark = _MARK_OF.get(kind)
        if mark is not None:
            return [mark, *map(self._opened, obj)] if self._opens else [mark, *obj]
        if kind is np.ndarray:
            return self._array(obj)
        if kind is list:
            return [*map(self._opened, obj)]
        if kind in _DICTS:
            return {key: self._opened(item) for key, item in obj.items()}
        if kind is complex:
            return [_MARKS[_COMPLEX], obj.real, obj.imag]
        if kind is int:
            return [_MARKS[_INTEGER], obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)]
        if issubclass(kind, np.generic):
            return self._scalar(obj)
        return [*map(self._opened, self.converted(obj))]

    def _opened(self, obj: Any) -> Any:
        return _Opened(obj) if self._opens and type(obj) in (list, dict) else obj

    def _array(self, obj: np.ndarray[Any, Any]) -> list[Any]:
        dtype = _name_of_dtype(obj.dtype)
        if dtype is None:
            return self._unknown(obj, f"an array of dtype {obj.dtype} cannot be sent")
        if obj.nbytes > _INLINE_BYTES:
            self._large.append(obj)
            return [_MARKS[_ARRAY], dtype, obj.nbytes, *obj.shape]
        if obj.dtype == np.bool_:
            obj = np.asarray(obj.view(np.uint8) != 0)  # a byte other than 0 and 1 means True
        return [_MARKS[_ARRAY], dtype, obj.tobytes(), *obj.shape]

    def _scalar(self, obj: np.generic) -> list[Any]:
        if isinstance(obj, (str, bytes)):  # numpy.str_ and numpy.bytes_, whose trailing NULs an array would lose
            return self._unknown(obj)
        dtype = _name_of_dtype(obj.dtype)
        if dtype is None:
            return self._unknown(obj, f"a scalar of dtype {obj.dtype} cannot be sent")
        return [_MARKS[_SCALAR], dtype, obj.tobytes()]

    def _unknown(self, obj: Any, why: str = "") -> list[Any]:
        """Pickle an object that cannot be sent otherwise, or refuse it.

        why: the reason why it cannot be sent; "" if the reason is the object's type.
        """
        if not self._allow_pickle:
            raise TypeError(why or _refusal(obj))
        name = _name_of(obj)
        try:
            return [_MARKS[_PICKLE], name, pickle.dumps(obj, _PICKLE_PROTOCOL)]
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

    def visit(self, obj: Any) -> None:
        if id(obj) in self._done:
            return
        parts = self._parts(obj)
        if parts is None:
            return
        outer = self._entered.get(id(obj))
        if outer is not None:
            raise ValueError(f"{self._where()}: it contains itself: it is the same object as {self._where(outer)}")
        if len(self._path) == DEEPEST:
            raise ValueError(f"{self._where()}: containers are nested more than {DEEPEST} deep")
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
        try:
            if kind in _PLAIN:
                if kind in _TEXTS and len(obj) >= 1 << 30:
                    msgpack.packb(obj, unicode_errors="surrogatepass")
                return None
            items = self._writer.items(obj) if _is_leaf(kind) else self._writer.converted(obj)
        except TypeError as error:
            raise TypeError(f"{self._where()}: {error}") from error.__cause__
        except ValueError as error:
            raise ValueError(f"{self._where()}: {error}; a single value may have up to 4 GiB") from None
        return [(("whole", None), items[2])] if items[0] is _MARKS[_NAMED] else None

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


class _Mark(NamedTuple):
    """A mark that has been read."""

    read: Callable[[_Reader, list[Any]], Any]


class _Reader:
    """Reads one object. Before it creates a container, it knows that the items of the container are there."""

    def __init__(self, data: memoryview, allow_pickle: bool, given_bytes: int) -> None:
        self._data = data.cast("B")
        self._allow_pickle = allow_pickle
        self._given_bytes = 0 if data.readonly else given_bytes
        self._at = 0  # where the elements of the next large array begin
        self._shared: dict[int, Any] = {}
        self._marks = 0  # how many marks have been read that begin no array so far

    def read(self) -> Any:
        if len(self._data) < _HEADER.size:
            raise msgpack.OutOfData
        length, flags = _HEADER.unpack_from(self._data)
        value = self._data[_HEADER.size :][:length]
        if _skipped(value) != length:
            raise ValueError("more bytes follow the object")
        self._at = _aligned(_HEADER.size + length)
        options: dict[str, Any] = {}
        if flags & _OTHER_KEYS:
            options.update(strict_map_key=False, object_pairs_hook=self._dict)
        if flags & _HAS_MARKS:
            options.update(list_hook=self._list)
        obj = msgpack.unpackb(value, unicode_errors="surrogatepass", ext_hook=self._mark, **options)
        if self._marks:
            raise ValueError("an extension that does not begin an array")
        if self._at != len(self._data):
            raise ValueError("more or fewer bytes follow the object than its arrays have")
        return obj

    def _mark(self, code: int, data: bytes) -> _Mark:
        if data:
            raise ValueError("an extension that is not empty")
        if code not in _READ_MARKS:
            raise ValueError(f"unknown extension {code}")
        self._marks += 1
        return _READ_MARKS[code]

    def _list(self, items: list[Any]) -> Any:
        if not items or type(items[0]) is not _Mark:
            return items
        self._marks -= 1
        mark, *parts = items
        return tuple(parts) if mark is _READ_MARKS[_TUPLE] else mark.read(self, parts)

    def _dict(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return _distinct(dict, pairs, [key for key, _ in pairs], "a key")

    def _set(self, elements: list[Any]) -> set[Any]:
        return _distinct(set, elements, elements, "an element")

    def _complex(self, parts: list[Any]) -> complex:
        real, imag = _checked(parts, float, float)
        return complex(real, imag)

    def _integer(self, parts: list[Any]) -> int:
        (digits,) = _checked(parts, bytes)
        return int.from_bytes(digits, "little", signed=True)

    def _array(self, parts: list[Any]) -> np.ndarray[Any, Any]:
        name, elements = _checked(parts[:2], str, object)
        dtype, shape = _dtype(name), parts[2:]
        if len(shape) > 64 or not all(type(extent) is int and 0 <= extent < 1 << 62 for extent in shape):
            raise ValueError("a shape that no array has")
        given = False
        if type(elements) is int:
            given = elements * 8 >= self._given_bytes > 0
            elements = self._data[self._at :][:elements]
            self._at = _aligned(self._at + len(elements))
        elif type(elements) is not bytes:
            raise ValueError(f"a {type(elements).__name__}, expected a bytes")
        if math.prod(shape) * dtype.itemsize != len(elements):
            raise ValueError(f"{len(elements)} bytes for an array of {dtype} with shape {shape}")
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, elements)
        if not given:
            array = array.copy()
        if dtype == np.bool_ and array.view(np.uint8).max(initial=0) > 1:
            raise ValueError("an element that is neither True nor False")
        return array

    def _scalar(self, parts: list[Any]) -> np.generic:
        name, element = _checked(parts, str, bytes)
        dtype = _dtype(name)
        if dtype.itemsize != len(element) or dtype.kind in "SU":
            raise ValueError(f"{len(element)} bytes for a scalar of {dtype}")
        scalar: np.generic = np.frombuffer(element, dtype)[0]
        return scalar

    def _named(self, parts: list[Any]) -> Any:
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

    def _pickled(self, parts: list[Any]) -> Any:
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

    def _first(self, parts: list[Any]) -> Any:
        number, obj = _checked(parts, int, object)
        if number in self._shared or not _may_be_shared(obj):
            raise ValueError(f"a {type(obj).__name__} that cannot be shared, or a number that is not new")
        self._shared[number] = obj
        return obj

    def _again(self, parts: list[Any]) -> Any:
        (number,) = _checked(parts, int)
        if number not in self._shared:
            raise ValueError(f"the shared object {number} before it is complete")
        return self._shared[number]


def _skipped(value: memoryview) -> int:
    """Return the length of the msgpack value at the beginning of `value`.

    Raise OutOfData if a container or text has less items or bytes than its size says.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(value), 1))
    unpacker.feed(value)
    unpacker.skip()
    length: int = unpacker.tell()
    return length


def _is_leaf(kind: type) -> bool:
    """Return whether an object of this type is neither a container nor converted by a row of the registry."""
    return kind in _PLAIN or kind is np.ndarray or kind is complex or issubclass(kind, np.generic)


def _may_be_shared(obj: Any) -> bool:
    """Return whether obj cannot be hashed, or is hashed without looking at its items."""
    own: Any = type(obj).__hash__
    return own is None or own is object.__hash__ or packable(obj) is not None


def _by_type(level: list[Any]) -> Iterator[tuple[type, list[Any]]]:
    kinds = set(map(type, level))
    for kind in kinds - _PLAIN:
        yield kind, level if len(kinds) == 1 else [x for x in level if type(x) is kind]


def _unless_plain(parts: Callable[[list[Any]], Iterable[Any]], level: list[Any]) -> list[Any]:
    return [] if _PLAIN.issuperset(map(type, parts(level))) else list(parts(level))


def _values(dicts: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _keys_and_items(obj: dict[Any, Any], kind: str) -> Iterator[tuple[tuple[str, Any], Any]]:
    for key, item in obj.items():
        yield ("key", None), key
        yield (kind, key), item


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _checked(parts: list[Any], *kinds: type) -> list[Any]:
    """Return the parts. Raise ValueError if their types are not exactly these; `object` stands for any type."""
    if len(parts) != len(kinds):
        raise ValueError(f"{len(parts)} parts, expected {len(kinds)}")
    for part, kind in zip(parts, kinds, strict=True):
        if type(part) is not kind and kind is not object:
            raise ValueError(f"a {type(part).__name__}, expected a {kind.__name__}")
    return parts


def _distinct(make: type[_C], items: list[Any], hashed: list[Any], what: str) -> _C:
    """Create a dict or set from the items. `hashed` holds the keys of the dict, or the items of the set.

    Raise ValueError if two elements of `hashed` are equal, if many have the same hash, or if an element cannot be
    hashed.
    """
    hashes: list[int] = []
    try:
        hashes.extend(map(hash, hashed))
        if len(set(hashes)) < len(hashes) and max(Counter(hashes).values()) > _MOST_WITH_ONE_HASH:
            raise ValueError(f"{what} has the same hash as {_MOST_WITH_ONE_HASH} others")
        made = make(items)
    except (MemoryError, ValueError):
        raise
    except Exception as error:  # a registered class may raise anything in __hash__ and __eq__
        if len(hashes) < len(hashed):
            raise ValueError(f"{what} with a {type(hashed[len(hashes)]).__name__}, which cannot be one") from error
        raise ValueError(f"{what} that cannot be compared: {type(error).__name__}: {error}") from error
    if len(made) != len(items):
        raise ValueError(f"{what} occurs twice")
    return made


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


_READ_MARKS = {
    code: _Mark(read)
    for code, read in (
        (_TUPLE, lambda reader, parts: tuple(parts)),
        (_SET, _Reader._set),
        (_FROZENSET, lambda reader, parts: frozenset(reader._set(parts))),
        (_COMPLEX, _Reader._complex),
        (_INTEGER, _Reader._integer),
        (_ARRAY, _Reader._array),
        (_SCALAR, _Reader._scalar),
        (_NAMED, _Reader._named),
        (_PICKLE, _Reader._pickled),
        (_SHARED, _Reader._first),
        (_AGAIN, _Reader._again),
    )
}

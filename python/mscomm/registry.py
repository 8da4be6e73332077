"""The table of classes whose objects can be sent, in addition to objects of plain types.

An object is sent as a name and a value of a sendable type. On the receiving rank, the name only selects the row of this
table that decodes the value. If the receiver's table has no row with that name, the call raises an error. Therefore, no
rank can make another rank run arbitrary code by sending the name of that code.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import importlib
import operator
import pathlib
import reprlib
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mscomm import arrays

# Objects of these types are sent as they are, without a row.
PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, np.ndarray)

C = TypeVar("C", bound=type)


class Row(NamedTuple):
    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class Fields(dict[str, Any]):
    """The fields of a dataclass object, by name. They are sent as a dict."""


class NotInstalled(TypeError):
    """The library of a received tensor is not installed on this rank."""


_by_class: dict[type, Row] = {}
_by_name: dict[str, Row] = {}


def register_object(
    cls: C,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    *,
    name: str | None = None,
) -> C:
    """Register the class `cls`, so that the object functions can send and receive its objects. Return the class.

    Every rank that receives such objects must also register the class. encode(obj) must return a value that can be
    sent: plain values, arrays, or objects of other registered classes. decode(value) must create the object from this
    value, and must not change the value: an object that occurs several times may be decoded from one value. If encode
    and decode are omitted, cls must be a dataclass or an Enum. A dataclass object is sent as its
    fields; the receiver does not run __init__ or __post_init__. An enum member is sent as its name. If the class does
    not have the same fields or members on both ranks, the receiver raises an Error. Subclasses must be registered
    separately.

    name: the name that identifies the class on all ranks. The default is the module and the name of the class. Pass a
    name if the default differs between ranks. Registering a class again replaces its functions.

    Raise TypeError if cls is not a class, if only one of encode and decode is passed, or if both are omitted and cls is
    neither a dataclass nor an Enum. Raise ValueError if another class has the name, if the class is registered under
    another name, or if objects of the class can be sent without being registered.

    >>> @mscomm.register_object
    ... @dataclasses.dataclass
    ... class Config:
    ...     lr: float
    >>> mscomm.broadcast_object(Config(0.1))
    Config(lr=0.1)
    >>> mscomm.register_object(Fraction, lambda x: (x.numerator, x.denominator), lambda parts: Fraction(*parts))
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_object: {cls!r} is not a class")
    if cls in PLAIN or issubclass(cls, np.generic):
        raise ValueError(f"register_object: objects of {cls.__qualname__} are sent as they are")
    if encode is None and decode is None:
        encode, decode = _defaults(cls)
    elif encode is None or decode is None:
        raise TypeError("register_object: give both encode and decode, or neither")
    name = _full_name(cls) if name is None else name
    there, other = _by_class.get(cls), _by_name.get(name)
    if there is not None and there.name != name:
        raise ValueError(f"register_object: {_full_name(cls)} is registered as {there.name!r} already")
    if other is not None and other.cls is not cls:
        if _full_name(other.cls) != _full_name(cls):
            raise ValueError(
                f"register_object: the name {name!r} is that of {_full_name(other.cls)}; give another name="
            )
        _by_class.pop(other.cls, None)  # the class was defined again, for example in a notebook cell
    _by_class[cls] = _by_name[name] = Row(name, cls, encode, decode)
    return cls


def row_of(obj: Any) -> Row | None:
    """Return the row that encodes the object, or None if there is none.

    There is none for a tensor of a subclass, which would arrive as a tensor of the base class.
    """
    if type(obj) in _by_class:
        return _by_class[type(obj)]
    library = arrays.packable(obj)
    return None if library is None else _by_name[f"{library} tensor"]


def row_named(name: str) -> Row | None:
    return _by_name.get(name)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# -- encode and decode for dataclasses and enums


def _defaults(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, enum.Flag):
        return functools.partial(_flags_of, cls), functools.partial(_flags, cls)
    if issubclass(cls, enum.Enum):
        return operator.attrgetter("name"), functools.partial(_member, cls)
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"register_object: {_full_name(cls)} is neither a dataclass nor an Enum; give encode and decode"
        )
    if cls.__new__ is not object.__new__:
        raise TypeError(
            f"register_object: {_full_name(cls)} has a __new__ of its own or its base's; give encode and decode"
        )
    names = [field.name for field in dataclasses.fields(cls)]
    return functools.partial(_fields_of, names), functools.partial(_of_fields, cls, names)


def _fields_of(names: list[str], obj: Any) -> Fields:
    kept = (functools.cached_property,)  # not sent: the receiver computes the value again
    own = vars(obj) if hasattr(obj, "__dict__") else {}
    others = [one for one in own if one not in names and not isinstance(getattr(type(obj), one, None), kept)]
    if others:
        raise TypeError(f"has attributes that are not fields ({', '.join(others)}); register it with encode and decode")
    return Fields((name, getattr(obj, name)) for name in names)


def _of_fields(cls: type, names: list[str], value: Any) -> Any:
    if type(value) is not dict or value.keys() != set(names):
        came = ", ".join(map(str, value)) if type(value) is dict else f"a {type(value).__name__}"
        raise ValueError(
            f"the fields are {', '.join(names)}, but the received object has {came}: do the ranks run the same code?"
        )
    obj: Any = object.__new__(cls)
    for name in names:
        object.__setattr__(obj, name, value[name])  # also works for frozen dataclasses
    return obj


def _member(cls: type[enum.Enum], name: Any) -> enum.Enum:
    if type(name) is not str or name not in cls.__members__:
        raise ValueError(
            f"{reprlib.repr(name)} is not one of the members {', '.join(cls.__members__)}: do the ranks run the same"
            " code?"
        )
    return cls.__members__[name]


def _flags_of(cls: type[enum.Flag], obj: Any) -> list[str]:
    names = [name for name, one in cls.__members__.items() if one.value and one.value & obj.value == one.value]
    if _flags(cls, names) != obj:
        raise TypeError(f"{obj!r} has bits that no member has")
    return names


def _flags(cls: type[enum.Flag], names: Any) -> enum.Flag:
    members = [_member(cls, name) for name in _checked(names, list, "a list of names")]
    return functools.reduce(operator.or_, members, cls(0))


def _checked(value: Any, kind: type, expected: str) -> Any:
    """Return the value if its type is exactly `kind`, not a subclass; otherwise raise ValueError."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__}, expected {expected}")
    return value


# -- the rows for classes from the standard library


def _ints(value: Any, count: int) -> list[int]:
    if type(value) is not list or len(value) != count or not all(type(one) is int for one in value):
        raise ValueError(f"{reprlib.repr(value)}, expected a list of {count} ints")
    return value


def _parts(value: Any, *kinds: type) -> list[Any]:
    if type(value) is not list or len(value) != len(kinds) or not all(map(isinstance, value, kinds)):
        raise ValueError(f"{reprlib.repr(value)}, expected a list of {', '.join(kind.__name__ for kind in kinds)}")
    return value


def _timezone(value: Any) -> datetime.timezone:
    offset, name = _parts(value, datetime.timedelta, str)
    unnamed = datetime.timezone(offset)
    return unnamed if unnamed.tzname(None) == name else datetime.timezone(offset, name)


def _zone_of(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None:
        raise TypeError("was read from a file and has no key")
    return zone.key


def _datetime_of(x: datetime.datetime) -> list[Any]:
    return [[x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond, x.fold], x.tzinfo]


def _time_of(x: datetime.time) -> list[Any]:
    return [[x.hour, x.minute, x.second, x.microsecond, x.fold], x.tzinfo]


def _with_zone(cls: Any, count: int, value: Any) -> Any:
    """Create a time or datetime from the value that _time_of() or _datetime_of() returned: `count` ints and a zone."""
    clock, zone = _parts(value, list, object)
    *ints, fold = _ints(clock, count)
    return cls(*ints, zone, fold=fold)


def _path(cls: type[pathlib.PurePath], value: Any) -> pathlib.PurePath:
    return cls(_checked(value, str, "a str"))


register_object(datetime.date, lambda x: [x.year, x.month, x.day], lambda value: datetime.date(*_ints(value, 3)))
register_object(datetime.time, _time_of, functools.partial(_with_zone, datetime.time, 5))
register_object(datetime.datetime, _datetime_of, functools.partial(_with_zone, datetime.datetime, 8))
register_object(
    datetime.timedelta,
    lambda x: [x.days, x.seconds, x.microseconds],
    lambda value: datetime.timedelta(*_ints(value, 3)),
)
register_object(datetime.timezone, lambda zone: [zone.utcoffset(None), zone.tzname(None)], _timezone)
register_object(zoneinfo.ZoneInfo, _zone_of, lambda key: zoneinfo.ZoneInfo(_checked(key, str, "a key")))
register_object(OrderedDict, dict, lambda value: OrderedDict(_checked(value, dict, "a dict")))
# These classes need an explicit name, because their modules differ between versions of Python.
for _cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath):
    register_object(_cls, str, functools.partial(_path, _cls), name=f"pathlib.{_cls.__name__}")


# -- the rows for tensors


def _numbers_of(tensor: Any) -> np.ndarray[Any, Any]:
    try:
        return arrays.on_cpu(tensor)
    except TypeError as error:
        raise TypeError(f"it {error}") from None


def _tensor(library: str, numbers: Any) -> Any:
    _checked(numbers, np.ndarray, "an array")
    try:
        module = importlib.import_module(f"mscomm.arrays.{library}")
    except ImportError as error:
        raise NotInstalled(f"received a tensor of {library}, which this rank cannot import ({error})") from error
    return module.of_numpy(numbers)


for _library in arrays.PACKABLE:
    _by_name[f"{_library} tensor"] = Row(
        f"{_library} tensor", object, _numbers_of, functools.partial(_tensor, _library)
    )

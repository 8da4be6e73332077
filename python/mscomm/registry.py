"""The table of classes whose objects can be sent, besides plain types.

An object is sent as a name and a value of a sendable type. On the receiving rank, the name only selects the row of this
table that decodes the value. If the receiver's table has no row of that name, the call raises an error. So no rank can
make another rank run code by sending the name of that code.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import importlib
import operator
import pathlib
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
    """The fields of an object of a dataclass, by name. They are sent as a dict."""


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
    """Let the object functions send and receive objects of the class `cls`. Returns the class.

    Every rank that receives such objects must register the class, too. encode(obj) returns something that can be sent:
    plain values, arrays, or objects of other registered classes. decode(value) makes the object from this value. If
    encode and decode are not given, cls must be a dataclass or an Enum. An object of a dataclass is sent as its fields;
    the receiver does not run __init__ and __post_init__. A member of an enum is sent as its name. If the class has not
    the same fields or members on both ranks, the receiver raises an Error. Subclasses must be registered separately.

    name: the name by which the ranks know the class. The default is the module and the name of the class. Give a name
    if these differ between ranks. Registering a class again replaces its functions.

    Raises TypeError if cls is not a class, or if it is neither dataclass nor Enum and encode or decode is missing.
    Raises ValueError if another class has the name, if the class is registered under another name, or if objects of the
    class can be sent without being registered.

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
        _by_class.pop(other.cls, None)  # the class was defined again, as in a notebook's cell
    _by_class[cls] = _by_name[name] = Row(name, cls, encode, decode)
    return cls


def row_of(obj: Any) -> Row | None:
    """The row that encodes the object; None if the table has none for it."""
    row = _by_class.get(type(obj))
    return row if row is not None else _row_of_tensor(obj)


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
    kept = (functools.cached_property,)  # need not be sent: the receiver computes the value again
    own = vars(obj) if hasattr(obj, "__dict__") else {}
    others = [one for one in own if one not in names and not isinstance(getattr(type(obj), one, None), kept)]
    if others:
        raise TypeError(f"has attributes that are no fields ({', '.join(others)}); register it with encode and decode")
    return Fields((name, getattr(obj, name)) for name in names)


def _of_fields(cls: type, names: list[str], value: Any) -> Any:
    if type(value) is not dict or value.keys() != set(names):
        came = ", ".join(map(str, value)) if type(value) is dict else f"a {type(value).__name__}"
        raise ValueError(
            f"the fields are {', '.join(names)}, and what came has {came}: do the ranks run the same code?"
        )
    obj: Any = object.__new__(cls)
    for name in names:
        object.__setattr__(obj, name, value[name])  # works for frozen dataclasses, too
    return obj


def _member(cls: type[enum.Enum], name: Any) -> enum.Enum:
    if type(name) is not str or name not in cls.__members__:
        raise ValueError(
            f"{name!r} is none of the members {', '.join(cls.__members__)}: do the ranks run the same code?"
        )
    return cls.__members__[name]


def _flags_of(cls: type[enum.Flag], obj: Any) -> list[str]:
    names = [name for name, one in cls.__members__.items() if one.value and one.value & obj.value == one.value]
    if _flags(cls, names) != obj:
        raise TypeError(f"{obj!r} has bits that no member has")
    return names


def _flags(cls: type[enum.Flag], names: Any) -> enum.Flag:
    if type(names) is not list:
        raise ValueError(f"a {type(names).__name__} where a list of names belongs")
    return functools.reduce(operator.or_, [_member(cls, name) for name in names], cls(0))


# -- the rows for classes of the standard library


def _ints(value: Any, count: int) -> list[int]:
    if type(value) is not list or len(value) != count or not all(type(one) is int for one in value):
        raise ValueError(f"{value!r} where a list of {count} ints belongs")
    return value


def _parts(value: Any, *kinds: type) -> list[Any]:
    if type(value) is not list or len(value) != len(kinds) or not all(map(isinstance, value, kinds)):
        raise ValueError(f"{value!r} where a list of {', '.join(kind.__name__ for kind in kinds)} belongs")
    return value


def _date(value: Any) -> datetime.date:
    return datetime.date(*_ints(value, 3))


def _timedelta(value: Any) -> datetime.timedelta:
    return datetime.timedelta(*_ints(value, 3))


def _timezone_of(zone: datetime.timezone) -> list[Any]:
    return [zone.utcoffset(None), zone.tzname(None)]


def _timezone(value: Any) -> datetime.timezone:
    offset, name = _parts(value, datetime.timedelta, str)
    unnamed = datetime.timezone(offset)
    return unnamed if unnamed.tzname(None) == name else datetime.timezone(offset, name)


def _zone_of(zone: zoneinfo.ZoneInfo) -> str:
    if zone.key is None:
        raise TypeError("was read from a file and has no key")
    return zone.key


def _zone(key: Any) -> zoneinfo.ZoneInfo:
    if type(key) is not str:
        raise ValueError(f"a {type(key).__name__} where a key belongs")
    return zoneinfo.ZoneInfo(key)


def _time_of(x: datetime.time) -> list[Any]:
    return [[x.hour, x.minute, x.second, x.microsecond, x.fold], x.tzinfo]


def _time(value: Any) -> datetime.time:
    clock, zone = _parts(value, list, object)
    hour, minute, second, microsecond, fold = _ints(clock, 5)
    return datetime.time(hour, minute, second, microsecond, zone, fold=fold)


def _datetime_of(x: datetime.datetime) -> list[Any]:
    return [[x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond, x.fold], x.tzinfo]


def _datetime(value: Any) -> datetime.datetime:
    clock, zone = _parts(value, list, object)
    year, month, day, hour, minute, second, microsecond, fold = _ints(clock, 8)
    return datetime.datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _path(cls: type[pathlib.PurePath], value: Any) -> pathlib.PurePath:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} where a str belongs")
    return cls(value)


def _ordered(value: Any) -> OrderedDict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__} where a dict belongs")
    return OrderedDict(value)


register_object(datetime.date, lambda x: [x.year, x.month, x.day], _date)
register_object(datetime.time, _time_of, _time)
register_object(datetime.datetime, _datetime_of, _datetime)
register_object(datetime.timedelta, lambda x: [x.days, x.seconds, x.microseconds], _timedelta)
register_object(datetime.timezone, _timezone_of, _timezone)
register_object(zoneinfo.ZoneInfo, _zone_of, _zone)
register_object(OrderedDict, dict, _ordered)
# These classes need a name, because their modules are not the same in all versions of Python.
for _cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath):
    register_object(_cls, str, functools.partial(_path, _cls), name=f"pathlib.{_cls.__name__}")


# -- the rows for tensors


def _row_of_tensor(obj: Any) -> Row | None:
    """The row for a tensor; None if obj is no tensor, or a tensor of a subclass that would arrive as the base class."""
    library = arrays.packable(obj)
    return None if library is None else _by_name[f"{library} tensor"]


def _numbers_of(tensor: Any) -> np.ndarray[Any, Any]:
    try:
        return arrays.on_cpu(tensor)
    except TypeError as error:
        raise TypeError(f"it {error}") from None


def _tensor(library: str, numbers: Any) -> Any:
    if type(numbers) is not np.ndarray:
        raise ValueError(f"a {type(numbers).__name__} where an array belongs")
    try:
        module = importlib.import_module(f"mscomm.arrays.{library}")
    except ImportError as error:
        raise NotInstalled(f"a tensor of {library} came, which this rank cannot import ({error})") from error
    return module.of_numpy(numbers)


for _library in arrays.PACKABLE:
    _by_name[f"{_library} tensor"] = Row(
        f"{_library} tensor", object, _numbers_of, functools.partial(_tensor, _library)
    )

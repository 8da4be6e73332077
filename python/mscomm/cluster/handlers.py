"""Calls the method that handles a control frame, and checks the types of the frame's fields first."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, get_origin, get_type_hints

from mscomm.cluster.frames import Frame
from mscomm.errors import Error

_LEVELS = 16  # how deeply the lists and maps of a frame may be nested

Handlers = Mapping[str, Callable[[Any, Any, Frame], None]]
ERROR: Mapping[str, type] = {"kind": str, "text": str, "ranks": list, "waiting_for": list}  # Error.fields()


def handlers(of: type) -> Handlers:
    """Return, for each kind of control frame, a function that calls the method of this class for this kind.

    The method's name is `_on_` followed by the kind, with underscores for spaces. The method's parameters after the
    link are the fields of the frame, and their annotations are the types of the fields.
    """
    prefix = "_on_"
    found = {name: method for name, method in vars(of).items() if name.startswith(prefix)}
    return {name.removeprefix(prefix).replace("_", " "): _handler(method) for name, method in found.items()}


def _handler(method: Callable[..., None]) -> Callable[[Any, Any, Frame], None]:
    _, *types, _ = get_type_hints(method).items()  # without the link, and without the type of the result
    return lambda owner, link, frame: method(owner, link, **{name: field_of(frame, name, kind) for name, kind in types})


def check(frame: Frame, types: Mapping[str, type]) -> None:
    """Raise Error if one of these fields of the frame is missing or has another type."""
    for name, kind in types.items():
        field_of(frame, name, kind)


def field_of(frame: Frame, name: str, kind: Any) -> Any:
    """Return the value of a field of the frame. Raise Error if it is missing or has another type."""
    value = frame.get(name)
    kind = get_origin(kind) or kind
    if not isinstance(value, kind):
        raise Error(f"{frame['t']!r} needs {name!r} as {kind.__name__}, not {reprlib.repr(value)}")
    if kind in (dict, object) and _nested(value, _LEVELS):  # the hub passes such a value on to other ranks
        raise Error(f"{frame['t']!r} has a value in {name!r} that is nested in more than {_LEVELS} lists and maps")
    return value


def _nested(value: Any, levels: int) -> bool:
    """Return whether the value is nested in more than `levels` lists and maps."""
    if not isinstance(value, (list, dict)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_nested(item, levels - 1) for item in items)

"""Trees of arrays: lists, tuples and dicts, possibly nested. Parameters that do not belong to a module or cell have
this form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(tree: Any) -> dict[str, Any]:
    """Return {path: array} for all arrays of the tree, in order. A path is, for example, layers.0.weight."""
    found: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            items: Any = node.items()
        elif isinstance(node, list | tuple):
            items = enumerate(node)
        else:
            found[path] = node
            return
        for key, value in items:
            walk(value, f"{path}.{key}" if path else str(key))

    walk(tree, "")
    return found


def mapped(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a copy of the tree in which convert(x) replaces each x that is not a list, tuple or dict."""
    if isinstance(tree, dict):
        return {key: mapped(value, convert) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        made = [mapped(one, convert) for one in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return convert(tree)


def rebuilt(tree: Any, arrays: list[Any]) -> Any:
    """Return a copy of the tree with the given arrays in place of the tree's arrays."""
    rest = iter(arrays)
    return mapped(tree, lambda _: next(rest))

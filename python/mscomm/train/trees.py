"""Trees of arrays: lists, tuples and dicts, possibly nested. Parameters that do not belong to a module or cell have
this form."""

from __future__ import annotations

from collections.abc import Iterator
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


def rebuilt(tree: Any, arrays: list[Any]) -> Any:
    """Return a copy of the tree with the given arrays in place of the tree's arrays."""

    def walk(node: Any, rest: Iterator[Any]) -> Any:
        if isinstance(node, dict):
            return {key: walk(value, rest) for key, value in node.items()}
        if isinstance(node, list | tuple):
            made = [walk(one, rest) for one in node]
            return type(node)(*made) if hasattr(node, "_fields") else type(node)(made)
        return next(rest)

    return walk(tree, iter(arrays))

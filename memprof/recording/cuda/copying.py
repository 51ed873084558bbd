"""Copy plain data that may share parts."""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")


def copied(value: _T) -> _T:
    """Return a copy of dicts, lists and plain values that shares nothing with the original. What parts of it share,
    such as events their stacks, they share in the copy."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, (dict, list)):
            return value
        made = copies.get(id(value))
        if made is None:
            made = copies[id(value)] = (
                {name: copy(inner) for name, inner in value.items()}
                if isinstance(value, dict)
                else [copy(inner) for inner in value]
            )
        return made

    result: _T = copy(value)
    return result

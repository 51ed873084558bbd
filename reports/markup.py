"""Elements with everything escaped: the only way text gets into a page."""

from __future__ import annotations

from html import escape
from typing import Union

__all__ = ["Child", "Markup", "el", "join"]

# HTML's only: an SVG shape without an end tag would hold every shape that follows.
_VOID = {"br", "col", "hr", "input", "link", "meta", "wbr"}


class Markup(str):
    """Text that is already markup."""


Child = Union[str, Markup, None, "list[Child]", "tuple[Child, ...]"]


def join(*children: Child) -> Markup:
    """Children one after the other; plain text escaped, ``None`` nothing."""
    return Markup("".join(_render(child) for child in children))


def _render(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, (list, tuple)):
        return join(*child)
    return escape(child, quote=False)


def el(tag: str, attributes: dict[str, object] | None = None, *children: Child) -> Markup:
    """One element. An attribute that is ``None`` or ``False`` is left out, ``True`` has no value."""
    parts = [tag]
    for name, value in (attributes or {}).items():
        if value is True:
            parts.append(name)
        elif value is not None and value is not False:
            parts.append(f'{name}="{escape(str(value), quote=True)}"')
    head = " ".join(parts)
    return Markup(f"<{head}>" if tag in _VOID else f"<{head}>{join(*children)}</{tag}>")

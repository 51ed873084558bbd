"""Find the private names of other packages that source code mentions, as far as reading it can tell.

What is found: imports of private modules and names, attributes (``torch._C``, ``trainer._step``) and names given as
text (``getattr(trainer, "_step")``) that nothing in memprof defines, or that ``memprof.compat`` declares. What is not
found: an undeclared private name that memprof has for something of its own too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from typing import NamedTuple

#: Calls whose text arguments are names of attributes.
_BY_NAME = ("attrgetter", "delattr", "getattr", "hasattr", "put", "replacing", "setattr", "wrap")


class Found(NamedTuple):
    """One mention of a foreign private name."""

    line: int
    name: str
    how: str


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def defined_names(tree: ast.AST) -> set[str]:
    """Names a module defines: functions, classes, variables, attributes of ``self``, slots, arguments, its imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Assign) and any(_is_slots(target) for target in node.targets):
            found |= {text.value for text in ast.walk(node.value) if _is_text(text)}
    return found


def private_names(tree: ast.AST, ours: Set[str], here: Set[str], declared: Set[str], own: str) -> Iterator[Found]:
    """Yield the foreign private names a module mentions.

    Args:
        tree: the module.
        ours: all names memprof's modules define.
        here: those this module defines.
        declared: names ``memprof.compat`` declares.
        own: the package whose own private modules may be imported.
    """

    def foreign(name: str) -> bool:
        if name.startswith(f"_{own}"):
            return False  # what it puts on other packages' objects
        return is_private(name) and (name not in ours or (name in declared and name not in here))

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (module := node.module or "").split(".")[0] != own:
            parts = [*module.split("."), *(alias.name for alias in node.names)]
            yield from (Found(node.lineno, part, f"from {module}") for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = [] if alias.name.split(".")[0] == own else alias.name.split(".")
                yield from (Found(node.lineno, part, f"import {alias.name}") for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and foreign(node.attr):
            yield Found(node.lineno, node.attr, ast.unparse(node))
        elif isinstance(node, ast.Call) and _called(node) in _BY_NAME:
            texts = (text for given in node.args for text in ast.walk(given) if _is_text(text))
            yield from (Found(node.lineno, t.value, ast.unparse(node)) for t in texts if foreign(t.value))
        elif _is_text(node) and is_private(node.value) and node.value in declared and node.value not in here:
            yield Found(node.lineno, node.value, repr(node.value))


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_slots(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "__slots__"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)

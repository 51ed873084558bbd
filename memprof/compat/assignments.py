"""Find out whether a class still gives its instances an attribute, without an instance.

Attributes such as ``trainer._metrics`` exist only once ``__init__`` has run. Here the compiled code of a class's
methods is searched for an assignment of that name, and the class for a slot, a property or an annotation. That finds
a rename. It does not find an attribute that is still assigned and means something else, and it takes any object's
attribute of that name for ``self``'s: ``other._metrics = ...`` counts too.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["assigns", "names_used"]


def assigns(holder: Any, name: str) -> bool:
    """Whether ``holder``, a class (with its bases) or a module, declares or assigns an attribute ``name``."""
    if isinstance(holder, ModuleType):
        return any(_stores(code, name) for code in _codes(vars(holder)))
    for kind in holder.__mro__:
        if name in vars(kind) or name in _annotated(kind):
            return True
        if any(_stores(code, name) for code in _codes(vars(kind))):
            return True
    return False


def names_used(function: Any) -> set[str]:
    """All names a function's code uses, its local variables and those of functions inside it too.

    Empty where it is not written in Python.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return set()
    return {name for part in _with_inner(code) for name in (*part.co_names, *part.co_varnames)}


def _annotated(kind: type) -> Any:
    try:
        return getattr(kind, "__annotations__", {})
    except NameError:  # Python 3.14 evaluates them here, and some name what is imported for type checkers only
        return {}


def _stores(code: CodeType, name: str) -> bool:
    return any(name in part.co_names and name in _stored(part) for part in _with_inner(code))


@functools.lru_cache(maxsize=512)
def _stored(code: CodeType) -> frozenset[str]:
    """Names of attributes a function's code assigns."""
    return frozenset(str(i.argval) for i in dis.get_instructions(code) if i.opname == "STORE_ATTR")


def _codes(namespace: Any) -> Iterator[CodeType]:
    """Code of the functions and methods in a class's or module's dictionary."""
    for value in list(namespace.values()):
        for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
            if isinstance(function, FunctionType):
                code = getattr(inspect.unwrap(function), "__code__", None)  # torch wraps functions written in C
                if code is not None:
                    yield code


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)

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
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any


def assigns(holder: Any, name: str) -> bool:
    """Tell whether ``holder``, a class (with its bases) or a module, declares or assigns an attribute ``name``."""
    if isinstance(holder, ModuleType):
        return any(_stores(code, name) for code in _codes(vars(holder)))
    for kind in holder.__mro__:
        if name in vars(kind) or name in _annotated(kind):
            return True
        if any(_stores(code, name) for code in _codes(vars(kind))):
            return True
    return False


def names_used(function: Any) -> set[str]:
    """Return all names a function's code uses, its local variables and those of functions inside it too.

    Of a table that methods are looked up in by name, the names. Empty for what is not written in Python.
    """
    if isinstance(function, Mapping):
        return {value for value in function.values() if isinstance(value, str)}
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return set()
    return {name for part in _with_inner(code) for name in (*_mentioned(part), *part.co_varnames)}


def keys_in(function: Any) -> set[str]:
    """Return all keys that a function's code writes or reads by a constant text, and attributes it sets; names of
    arguments and local variables are none. Empty where it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return set()
    return {key for part in _with_inner(code) for key in (*_texts(part), *_stored(part))}


@functools.lru_cache(maxsize=512)
def _texts(code: CodeType) -> frozenset[str]:
    """Texts a code loads; a dictionary that is written out has all its keys in one tuple up to Python 3.13."""
    found: set[str] = set()
    instructions = list(dis.get_instructions(code))
    for this, following in zip(instructions, [*instructions[1:], None], strict=True):
        if not this.opname.startswith("LOAD_CONST"):
            continue
        if isinstance(this.argval, str):
            found.add(this.argval)
        elif following is not None and following.opname == "BUILD_CONST_KEY_MAP":
            found |= {key for key in this.argval if isinstance(key, str)}
    return frozenset(found)


@functools.lru_cache(maxsize=512)
def _mentioned(code: CodeType) -> frozenset[str]:
    """Names that instructions have. Code that can never run has none, and still has its names in ``co_names``."""
    return frozenset(code.co_names).intersection(str(i.argval) for i in dis.get_instructions(code))


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

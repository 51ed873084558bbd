"""Taking one target out of an installed package, or renaming it there, for the length of a test.

What is changed is the package's own module or class, in memory. An attribute of instances is renamed in the compiled
code of every function that assigns it, as an edit of the source would.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from types import CodeType, ModuleType
from typing import Any

import pytest

from memprof.compat.check import look_up
from memprof.compat.targets import ASSIGNED, KEY, LOCAL, Target

RENAMED = "renamed_by_a_test"


def remove(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the target, and all that serves in its stead, out of what is installed."""
    if target.how == ASSIGNED:
        names = [target.name, *(path.rpartition(".")[2] for path in target.or_else)]
        holders = [(target.module, target.owner), *(tuple(place.split(":")) for place in target.assigned_in)]
        for holder in holders:
            for name in names:
                _rename_assignments(look_up(*holder), name, monkeypatch)
        return
    if target.how in (LOCAL, KEY):
        stop_using(target, monkeypatch)
        return
    for module, path in target.places:
        owner, _, name = path.rpartition(".")
        _take_out(look_up(module, owner), name, monkeypatch, module, owner)


def stop_using(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the function that is said to use the target name something else instead."""
    user = look_up(*target.user)
    if isinstance(user, dict):
        for key in [key for key, name in user.items() if name == target.name]:
            monkeypatch.setitem(user, key, RENAMED)
        return
    function = inspect.unwrap(user)
    rename = _with_other_key if target.how == KEY else _renamed
    monkeypatch.setattr(function, "__code__", rename(function.__code__, target.name))


def _take_out(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, module: str, path: str) -> None:
    if path.startswith("ops."):
        _hide_operator(path, name, monkeypatch)
    elif isinstance(owner, type):
        _take_out_of_class(owner, name, monkeypatch, module, path)
    elif hasattr(owner, name):
        if name in vars(owner):
            monkeypatch.delattr(owner, name)
        if hasattr(owner, name):  # a lazy module would look it up again; an instance has it from its class
            _hide(look_up(module, path.rpartition(".")[0]), path.rpartition(".")[2], module, path, name, monkeypatch)


def _take_out_of_class(owner: type, name: str, monkeypatch: pytest.MonkeyPatch, module: str, path: str) -> None:
    for kind in owner.__mro__:
        if name in vars(kind):
            try:
                monkeypatch.delattr(kind, name)
            except TypeError:  # classes written in C cannot be changed: one without the name stands in
                outer, _, last = path.rpartition(".")
                _hide(look_up(module, outer), last, module, path, name, monkeypatch)
                return


class _Without:
    """All of ``thing`` but one name."""

    def __init__(self, thing: Any, name: str) -> None:
        self._thing, self._name = thing, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._thing, name)


_Without.__init__.__module__ = "builtins"  # what stands in is no script's patch of the name


def _hide(outer: Any, last: str, module: str, path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thing = look_up(module, path)
    if not path:  # the module itself
        monkeypatch.setitem(sys.modules, module, _module_without(thing, name))
    else:
        monkeypatch.setattr(outer, last, _Without(thing, name))


def _module_without(module: ModuleType, name: str) -> ModuleType:
    copy = ModuleType(module.__name__)
    copy.__dict__.update({key: value for key, value in vars(module).items() if key not in (name, "__getattr__")})
    copy.__dict__["__getattr__"] = _Without(module, name).__getattr__
    return copy


def _hide_operator(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks operators up by name each time: the first part below ``torch.ops.aten`` is hidden."""
    import torch

    hidden = [*path.split("."), name][2]
    monkeypatch.setattr(torch.ops, "aten", _Without(torch.ops.aten, hidden))


def _rename_assignments(holder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in holder.__mro__:
        annotations = vars(kind).get("__annotations__", {})
        if name in annotations:
            monkeypatch.delitem(annotations, name)
        if name in vars(kind) and kind is not object:
            monkeypatch.delattr(kind, name)
        for value in list(vars(kind).values()):
            for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
                inner = inspect.unwrap(function) if inspect.isfunction(function) else None
                if inspect.isfunction(inner) and _mentions(inner.__code__, name):
                    monkeypatch.setattr(inner, "__code__", _renamed(inner.__code__, name))


def _mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(_mentions(c, name) for c in code.co_consts if isinstance(c, CodeType))


def _renamed(code: CodeType, name: str) -> CodeType:
    names = tuple(RENAMED if n == name else n for n in code.co_names)
    variables = tuple(RENAMED if n == name else n for n in code.co_varnames)
    constants = tuple(_renamed(c, name) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_names=names, co_varnames=variables, co_consts=constants)


def _with_other_key(code: CodeType, key: str) -> CodeType:
    """The code with another text in place of ``key``, in the tuples of keys that dictionaries are made from too."""
    calls = ("CALL_FUNCTION_KW", "CALL_KW")
    keywords = {
        i.argval
        for i, following in itertools.pairwise([*dis.get_instructions(code)])
        if isinstance(i.argval, tuple) and (i.opname == "KW_NAMES" or following.opname in calls)
    }

    def other(constant: Any) -> Any:
        if isinstance(constant, CodeType):
            return _with_other_key(constant, key)
        if isinstance(constant, tuple) and constant not in keywords:  # names of arguments stay, as they would
            return tuple(map(other, constant))
        return RENAMED if isinstance(constant, str) and constant == key else constant

    return code.replace(co_consts=tuple(map(other, code.co_consts)))

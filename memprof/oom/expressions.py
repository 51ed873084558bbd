"""Evaluate the conditions and sums that the knowledge files state, over names of which some are unknown.

A subset of Python's expressions: names, numbers, texts, arithmetic, comparisons, ``and``, ``or``, ``not``,
``a if c else b`` and calls of the functions a caller gives. An unknown value is None: a comparison with it does not
hold, a sum with it is unknown.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from memprof.units import GIB

if TYPE_CHECKING:
    from memprof.oom.failure import Frame

# Frames from the innermost on that count as near the failure.
_INNER = 6
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "EiB": 2**60}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_NODES = (
    ast.Expression, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And,
    ast.Or, ast.Compare, ast.IfExp, ast.Call, *_ARITHMETIC, *_COMPARISONS,
)  # fmt: skip


class Scope(Mapping[str, Any]):
    """Names and their values; those of ``let`` are evaluated when they are first asked for."""

    def __init__(self, values: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]) -> None:
        self._values = dict(values)
        self._let: dict[str, str] = {}
        self.functions = functions

    def within(self, let: Mapping[str, str]) -> Scope:
        """Return a scope with more names, each an expression over these and over one another."""
        inner = Scope(self._values, self.functions)
        inner._let = {**self._let, **let}
        for name in let:
            inner._values.pop(name, None)
        return inner

    def __getitem__(self, name: str) -> Any:
        if name not in self._values and name in self._let:
            source = self._let[name]
            self._values[name] = None  # while it is worked out: a name that asks for itself is unknown
            self._values[name] = evaluate(source, self)
        return _UNITS.get(name) if name in _UNITS else self._values.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._let, **self._values})

    def __len__(self) -> int:
        return len({**self._let, **self._values})


def evaluate(source: str, scope: Scope) -> Any:
    """Return the value of an expression, None where it is unknown."""
    return _value(check(source), scope)


@lru_cache(maxsize=1024)
def check(source: str) -> ast.expr:
    """Return an expression's tree.

    Raises:
        ValueError: It holds something that is not allowed there.
    """
    # Texts are regular expressions: their backslashes stand for themselves.
    tree = ast.parse(source.strip().replace("\\", "\\\\"), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ValueError(f"{type(node).__name__} is not allowed in {source!r}")
    return tree.body


def _value(node: ast.expr, scope: Scope) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return scope[node.id]
    if isinstance(node, ast.BoolOp):
        value: Any = None
        for part in node.values:
            value = _value(part, scope)
            if bool(value) == isinstance(node.op, ast.Or):
                return value
        return value
    if isinstance(node, ast.IfExp):
        return _value(node.body if _value(node.test, scope) else node.orelse, scope)
    if isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        return scope.functions[node.func.id](*(_value(argument, scope) for argument in node.args))
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand, scope)
        return not value if isinstance(node.op, ast.Not) else None if value is None else -value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, scope), _value(node.right, scope)
        if left is None or right is None or (isinstance(node.op, ast.Div) and not right):
            return None
        return _ARITHMETIC[type(node.op)](left, right)
    assert isinstance(node, ast.Compare)
    left = _value(node.left, scope)
    for comparison, operand in zip(node.ops, node.comparators, strict=True):
        right = _value(operand, scope)
        if left is None or right is None or not _COMPARISONS[type(comparison)](left, right):
            return False
        left = right
    return True


def place_of_frame(frame: Frame) -> str:
    """Return a frame's file and function, as patterns see it."""
    return f"{frame.path}:{frame.function}"


def functions_over(
    frames: Sequence[Frame], message: str, surroundings: str, values: dict[str, Any]
) -> dict[str, Callable[..., Any]]:
    """Return the functions that expressions may call, over a text and what stands around it."""
    places = [place_of_frame(frame) for frame in frames]
    code = frames[-1].code if frames else ""

    def found(pattern: str, where: str) -> bool:
        return re.search(pattern, where) is not None

    def torch_before(major: int, minor: int) -> bool:
        known = values["torch"] or values["torch_most"]
        return known is not None and known < major * 100 + minor

    def text(pattern: str) -> str | None:
        match = re.search(pattern, f"{surroundings}\n{message}")
        return match[1] if match else None

    def number(pattern: str) -> float | None:
        match = text(pattern)
        return None if match is None else float(match)

    def join(*pieces: Any) -> str | None:
        return None if any(p is None for p in pieces) else "".join(str(p) for p in pieces)

    return {
        "known": lambda value: value is not None,
        "first": lambda *options: next((o for o in options if o is not None), None),
        "min": lambda *v: None if any(x is None for x in v) else min(v),
        "max": lambda *v: None if any(x is None for x in v) else max(v),
        "floor": lambda v: None if v is None else math.floor(v),
        "ceil": lambda v: None if v is None else math.ceil(v),
        "sqrt": lambda v: None if v is None else math.sqrt(v),
        "in_gib": lambda v: None if v is None else v / GIB if v > 1e6 else v,
        "join": join,
        "frames": lambda pattern: found(pattern, "\n".join(places)),
        "inner": lambda pattern: found(pattern, "\n".join(p.rpartition("/")[2] for p in places[-_INNER:])),
        "deep": lambda pattern, count: found(pattern, "\n".join(places[-int(count) :])),
        "said": lambda pattern: found(pattern, message),
        "seen": lambda pattern: found(pattern, "\n".join([*places, message, surroundings])),
        "code": lambda pattern: found(pattern, code),
        "code_line": lambda pattern: code.strip()[:90] if code and found(pattern, code) else None,
        "log": lambda pattern: found(pattern, f"{surroundings}\n{message}"),
        "set_in_log": lambda pattern: found(f"(?i){pattern}", surroundings),
        "torch_before": torch_before,
        "text": text,
        "number": number,
    }

"""Compare the arguments we use with those a function takes now.

A declaration is written as a function's head: ``"(self, prompt_ids, images, *args, **kwargs)"``.

- Positional arguments stand at the same places by the same names; ``_`` is any name, and what can only be given by its
  place may have any: Python 3.13 makes up names for functions written in C.
- Arguments after ``*`` are accepted by name.
- What we call may have more arguments as long as they have defaults. What we replace may have none that our
  replacement does not name, unless the declaration ends in ``**kwargs``.
- With ``*args`` or ``**kwargs`` declared, we pass on what we are given, so further arguments are welcome.
"""

from __future__ import annotations

import ast
import functools
import inspect
from dataclasses import dataclass
from typing import Any

from memprof.compat.targets import REPLACED

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Declared:
    """Hold a declaration's parts."""

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    is_open: bool


@functools.cache
def declared(signature: str) -> Declared:
    """Parse a declaration; ValueError where it is no function's head."""
    try:
        (head,) = ast.parse(f"def f{signature}: ...").body
    except SyntaxError:
        raise ValueError(f"{signature!r} is no function's head") from None
    assert isinstance(head, ast.FunctionDef)
    given = head.args
    return Declared(
        tuple(a.arg for a in (*given.posonlyargs, *given.args)),
        tuple(a.arg for a in given.kwonlyargs),
        given.vararg is not None or given.kwarg is not None,
    )


def parameters_of(function: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a function, a class or one of torch's operators; None where not known."""
    schema = getattr(function, "_schema", None)
    if schema is not None:  # torch.ops: their arguments stand in the schema
        return [_of_schema(argument) for argument in schema.arguments]
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _of_schema(argument: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = None if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kind, default=default)


def fits(signature: str, parameters: list[inspect.Parameter], how: str) -> bool:
    """Tell whether a function with these parameters can be used as declared; ``how`` as in a target."""
    wanted = declared(signature)
    kinds = {p.kind for p in parameters}
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    for place, name in enumerate(wanted.positional):
        if place >= len(positional):
            if inspect.Parameter.VAR_POSITIONAL not in kinds:
                return False
        elif name not in ("_", positional[place].name) and positional[place].kind in _NAMED:
            return False
    names = {p.name for p in parameters if p.kind in _NAMED}
    if inspect.Parameter.VAR_KEYWORD not in kinds and not names.issuperset(wanted.keywords):
        return False
    if wanted.is_open:
        return True
    rest = [p for p in parameters if p not in positional[: len(wanted.positional)] and p.name not in wanted.keywords]
    rest = [p for p in rest if p.kind not in _OPEN]
    return not rest if how == REPLACED else all(p.default is not inspect.Parameter.empty for p in rest)


def shown(parameters: list[inspect.Parameter]) -> str:
    """Write the parameters' names as a function's head, the longest cut short."""
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [marks.get(p.kind, "") + p.name for p in parameters]
    return f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})"

"""Fill the templates of the knowledge files: ``{name}``, ``{name|else}``, ``{name:spec}``, ``[[ falls away ]]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from memprof.oom.expressions import Scope, evaluate
from memprof.units import format_bytes

#: One template, or several of which the first fits whose names are all known.
Texts = str | Sequence[str]

#: Names whose values are bytes, written with their unit.
SIZES = frozenset(
    {
        "asked", "total", "free", "allowed", "in_use", "allocated", "cached", "idle", "reserved", "outside", "others",
        "other", "missing", "unexplained", "private_pools", "piece", "mine", "held_by_torch", "gaps",
    }
)  # fmt: skip
_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.S)
_NAME = re.compile(r"\{([a-z_]+(?:\.[a-z_]+)?)(?::([^{}|]*))?(?:\|([^{}]*))?\}")


class _Unknown(Exception):
    """A name of the template is not known."""


def choose(texts: Texts, scope: Scope, conditions: Sequence[str] = ()) -> str | None:
    """Return the first text whose condition holds and whose names are all known, filled in; None where none is."""
    options = [texts] if isinstance(texts, str) else texts
    for i, text in enumerate(options):
        if i < len(conditions) and not evaluate(conditions[i], scope):
            continue
        if (filled := fill(text, scope)) is not None:
            return filled
    return None


def fill(text: str, scope: Scope) -> str | None:
    """Return a template with its names filled in, None where one that may not fall away is unknown."""

    def optional(match: re.Match[str]) -> str:
        return fill(match[1], scope) or ""

    try:
        return _NAME.sub(lambda match: _said(match, scope), _OPTIONAL.sub(optional, text))
    except _Unknown:
        return None


def _said(match: re.Match[str], scope: Scope) -> str:
    name, spec, otherwise = match.groups()
    value = scope[name.replace(".", "_")]
    if value is None or value == "":
        if otherwise is None:
            raise _Unknown(name)
        return str(otherwise)
    return _formatted(name, value, spec or "")


def _formatted(name: str, value: Any, spec: str) -> str:
    if isinstance(value, str):
        return value
    if spec == "size" or (not spec and name in SIZES):
        return format_bytes(int(value))
    if spec == "mib":
        return f"{value / 2**20:.0f}"
    return format(float(value) if spec[-1:] in ("f", "g") else value, spec)

"""Fill the templates of the knowledge files.

``{name}``, ``{name|else}``, ``{name:spec}``; ``[[ falls away ]]`` where a name in it is unknown; ``{?fact}`` stands for
nothing, and is unknown where the fact does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memprof.oom.derived import SIZES
from memprof.oom.facts import FailureFacts, Value
from memprof.oom.knowledge_files import Texts
from memprof.units import format_bytes

_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.S)
_NAME = re.compile(r"\{(\??[a-z_0-9]+(?:\.[a-z_]+)?)(?::([^{}|]*))?(?:\|([^{}]*))?\}")


class _Unknown(Exception):
    """A name of the template is not known."""


def choose(texts: Texts, facts: FailureFacts, conditions: Sequence[Sequence[str]] = ()) -> str | None:
    """Return the first text whose facts hold and whose names are all known, filled in; None where none is."""
    options = (texts,) if isinstance(texts, str) else texts
    for i, text in enumerate(options):
        if i < len(conditions) and not all(map(facts.has, conditions[i])):
            continue
        if (filled := fill(text, facts)) is not None:
            return filled
    return None


def fill(text: str, facts: FailureFacts) -> str | None:
    """Return a template with its names filled in, None where one that may not fall away is unknown."""

    def optional(match: re.Match[str]) -> str:
        return fill(match[1], facts) or ""

    try:
        return _NAME.sub(lambda match: _said(match, facts), _OPTIONAL.sub(optional, text))
    except _Unknown:
        return None


def _said(match: re.Match[str], facts: FailureFacts) -> str:
    name, spec, otherwise = match.groups()
    if name.startswith("?"):
        if facts.has(name[1:]):
            return ""
        raise _Unknown(name)
    value = facts.value(name.replace(".", "_"))
    if value is None or value == "":
        if otherwise is None:
            raise _Unknown(name)
        return str(otherwise)
    return _formatted(name, value, spec or "")


def _formatted(name: str, value: Value, spec: str) -> str:
    if isinstance(value, str) or value is None:
        return value or ""
    if spec == "size" or (not spec and name in SIZES):
        return format_bytes(int(value))
    if spec == "mib":
        return f"{value / 2**20:.0f}"
    return format(float(value) if spec[-1:] in ("f", "g") else value, spec)

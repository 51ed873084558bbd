"""Write answers as JSON, and hold JSON against its schema (``report.schema.json`` in this package)."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from memprof.reports.document.text import plain
from memprof.reports.files import write_text

from memprof.errors import InputError

__all__ = ["dumps", "schema", "validate", "write_json"]


def dumps(data: dict[str, Any], indent: int | None = 1) -> str:
    """Write standard JSON, ASCII only, ending in a newline; what JSON has no number for becomes a string."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_finite(data), indent=indent, separators=separators, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def write_json(data: dict[str, Any], path: Path) -> None:
    """Write ``data``, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, dumps(data))


_KINDS = {
    "memprof.report/1": "report",
    "memprof.explain/1": "explain",
    "memprof.compare/1": "compare",
    "memprof.plan/1": "plan",
    "memprof.serving/1": "serving",
}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of ``memprof.report/1``, ``explain/1``, ``compare/1``, ``plan/1``, ``serving/1``."""
    text = files("memprof.reports").joinpath("report.schema.json").read_text(encoding="utf-8")
    return cast("dict[str, Any]", json.loads(text))


def validate(data: dict[str, Any]) -> None:
    """Hold ``data`` against the schema.

    Raises:
        InputError: it is not what the schema says; the message names the first place that differs.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    whole = schema()
    kind = _KINDS.get(str(data.get("schema")))
    # Held against its own kind, the message names what is wrong in it, not that it is none of several kinds.
    wanted = {"$defs": whole["$defs"], "$ref": f"#/$defs/{kind}"} if kind else whole
    found = best_match(Draft202012Validator(wanted).iter_errors(data))
    if found is not None:
        where = "/".join(str(part) for part in found.absolute_path) or "the top level"
        raise InputError(f"not a report that memprof understands: {plain(found.message[:300])} (at {plain(where)}).")

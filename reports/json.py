"""Write answers as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from memprof.files import write_text


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


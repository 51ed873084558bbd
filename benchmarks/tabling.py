"""Read results as they were kept, and make Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def read(name: str) -> Any:
    """Read one of the results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Make a Markdown table; floats get two decimals, columns after the first are right-aligned."""
    cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    first, *rest = ("| " + " | ".join(line) + " |\n" for line in (head, *cells))
    return f"{first}|---|{'--:|' * (len(head) - 1)}\n{''.join(rest)}"

"""Keep what the comparisons of advice found, so that a run can be cut short."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import environment
from memprof.report.advice import Advice

Rows = list[dict[str, Any]]

ONLY = click.option("--only", multiple=True, help="Runs whose name holds this word; may be given more than once.")
FIRST = click.option("--first", default=8, show_default=True, help="So many changes of each run.")
OUT = click.option("--out", type=click.Path(path_type=Path), help="File of results; what it has is not done again.")


def row_of(
    run: str, by: str, entry: Advice, place: int, measured: int, simulated: int, saved: int
) -> dict[str, Any]:
    """Make a row of one change: what it was said to save beside what it saved."""
    predicted = entry.saves_bytes
    return {
        "run": run, "id": entry.id, "rank": place + 1, "basis": entry.basis, "executed": by,
        "peak_bytes": measured, "simulated_peak_bytes": simulated, "predicted_bytes": predicted, "saved_bytes": saved,
        "error": (predicted - saved) / abs(saved) if saved else None,
        "error_of_peak": (predicted - saved) / measured,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return errors of the predicted savings, and how many of each run's first three have a wrong sign."""
    errors = [abs(r["error"]) for r in rows if r["error"] is not None]
    first = [r for r in rows if r["rank"] <= 3]
    return {
        "changes": len(rows),
        "median_error": statistics.median(errors) if errors else None,
        "largest_error": max(errors, default=None),
        "largest_error_of_peak": max((abs(r["error_of_peak"]) for r in rows), default=None),
        "wrong_sign_in_first_three": sum(r["predicted_bytes"] * r["saved_bytes"] < 0 for r in first),
    }


def known(path: Path | None) -> dict[str, Any]:
    """Read the results a file has; none where there is no file."""
    found: dict[str, Any] = {}
    if path is not None and path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def fill(part: str, path: Path | None, run: Callable[[Rows, Callable[[Rows], None]], None]) -> None:
    """Run what is missing of one part, keep each row as it is made, and print the summary.

    Args:
        part: the part's name in the file.
        path: the file; None keeps nothing.
        run: called with the rows that are known, to which it adds, and with what keeps them.
    """
    before = known(path)
    rows: Rows = list(before.get(part, {}).get("rows", []))

    def keep(found: Rows) -> None:
        print(json.dumps(found[-1]), flush=True)
        save({**before, part: {"rows": found, "summary": summary(found)}}, path)

    run(rows, keep)
    print(json.dumps(summary(rows), indent=1))


def save(result: dict[str, Any], path: Path | None) -> None:
    """Write results with the versions they were made with; print them where there is no file."""
    text = json.dumps({**result, "environment": environment()}, indent=1)
    if path is None:
        print(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")

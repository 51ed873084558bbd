"""Gather every comparison of a prediction with something measured, by class of run, and hold each to its class's range.

A comparison is *inside* where the range that is stated of the others in its class (``stated_range`` in
``memprof/config/expected_error.py``) holds it: what a prediction would have said before it was measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.simulator import programs
from benchmarks.tabling import RESULTS
from memprof.config.expected_error import CAPTURED, PUBLISHED, TRACED, class_of, model_parts, parts_of, stated_range
from memprof.config.settings import Settings
from memprof.report.run import KnownSettings

_ORDER = ("gpu", "emulated", "cpu", "published")


def gathered() -> dict[str, Any]:
    """Return what the package keeps: all comparisons in order, and how many exactly known runs have each part."""
    rows, covered = [*_captured(), *_emulated(), *_traced(), *_published()], Counter[str]()
    rows.sort(key=lambda row: _ORDER.index(row["where"]))
    for settings in _exactly_known():
        covered.update(parts_of(KnownSettings.of({**Settings(model="").to_dict(), **settings})))
    from benchmarks.simulator.comparisons import MODELS, RUNS

    for name, _ in RUNS.values():
        covered.update(model_parts(MODELS[name]))
    return {"comparisons": rows, "compared": dict(sorted(covered.items()))}


def _row(name: str, kind: str, where: str, what: str, measured: int, simulated: int) -> dict[str, Any]:
    return {
        "name": name, "class": kind, "where": where, "what": what, "measured_bytes": measured,
        "simulated_bytes": simulated,
    }  # fmt: skip


def _kept() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / "simulator.json").read_text())["comparisons"]
    return rows


def _captured() -> list[dict[str, Any]]:
    from benchmarks.simulator.published import ROWS, read

    found = [
        _row(row["name"], CAPTURED, "gpu", row["what"], row["measured_bytes"], row["simulated_bytes"])
        for row in _kept()
        if row["where"] == "gpu"
    ]
    done = read()
    found += [
        _row(row.name, CAPTURED, "gpu", row.what, row.measured_bytes, done[row.name]["simulated_bytes"])
        for row in ROWS
        if row.name in done
    ]
    for row in programs.read().values():
        kind = (PUBLISHED, "published") if row["open"] else (CAPTURED, "gpu")
        found += [_row(f"{row['name']}, {what}", *kind, what, *row[what]) for what in ("allocated", "reserved")]
    return found


def _traced() -> list[dict[str, Any]]:
    return [
        _row(row["name"], TRACED, "cpu", row["what"], row["measured_bytes"], row["simulated_bytes"])
        for row in _kept()
        if row["where"] == "cpu"
    ]


def _emulated() -> list[dict[str, Any]]:
    from benchmarks.simulator.emulated import edges, matrix

    found = []
    for name, row in matrix.read().items():
        if "simulated" in row:
            for what in ("allocated", "reserved"):
                both = (row[of][f"{what}_bytes"] for of in ("measured", "simulated"))
                found.append(_row(name, class_of(KnownSettings.of(row["settings"])), "emulated", what, *both))
    for name, row in edges.read().items():
        both = (row[of]["reserved_bytes"] for of in ("real", "said"))
        kind = class_of(KnownSettings.of(row["settings"]))
        found.append(_row(f"{name}, at the edge", kind, "emulated", "reserved", *both))
    return found


def _published() -> list[dict[str, Any]]:
    from benchmarks.simulator.decisions import published
    from benchmarks.simulator.published import TEXTS, read

    done = read()
    table = [_row(name, PUBLISHED, "published", "device", peak, need) for name, peak, need in published() if peak]
    return table + [
        _row(row.name, PUBLISHED, "published", row.what, row.measured_bytes, done[row.name]["simulated_bytes"])
        for row in TEXTS
        if row.name in done
    ]


def _exactly_known() -> list[Mapping[str, Any]]:
    """List the settings of the runs that were executed here: on the real allocator, and on a CPU."""
    from benchmarks.simulator.comparisons import RUNS, SHARED
    from benchmarks.simulator.emulated import edges, matrix

    emulated = [row["settings"] for of in (matrix, edges) for row in of.read().values()]
    return emulated + [{**SHARED, **changes} for _, changes in RUNS.values()]


def inside(rows: list[dict[str, Any]]) -> list[bool]:
    """Tell of each comparison of one class whether the range stated of the others holds it; of one alone nothing."""
    if len(rows) == 1:
        return []
    errors = [row["simulated_bytes"] / row["measured_bytes"] - 1 for row in rows]
    found = []
    for i, error in enumerate(errors):
        low, high = stated_range(errors[:i] + errors[i + 1 :])
        found.append(low <= error <= high)
    return found


_CARD = ", on an emulated GPU"


def class_table(found: Mapping[str, Any]) -> str:
    """Make the Markdown table of classes: how many comparisons, their errors, the stated range, which lie outside.

    Classes on the emulated GPU share a row for each figure; a range is stated for each of them.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in found["comparisons"]:
        # Texts seldom say what was measured, so these are one class whatever it was.
        what = "any" if row["where"] == "published" else row["what"]
        groups.setdefault((row["where"], row["class"], what), []).append(row)
    lines = [
        "| class | of | comparisons | errors | stated | inside the others' |",
        "|---|---|--:|--:|--:|--:|",
    ]
    held = total = 0
    drawn: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    for (_, kind, what), rows in groups.items():
        drawn.setdefault(("trainers on an emulated GPU" if kind.endswith(_CARD) else kind, what), []).append(rows)
    for (kind, what), classes in drawn.items():
        errors = [[row["simulated_bytes"] / row["measured_bytes"] - 1 for row in rows] for rows in classes]
        ranges = [stated_range(of_class) for of_class in errors]
        held_here = [is_held for rows in classes if len(rows) > 1 for is_held in inside(rows)]
        held, total = held + sum(held_here), total + len(held_here)
        flat = [error for of_class in errors for error in of_class]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        share = f"{sum(held_here)} of {len(held_here)}"
        cells = [kind, what, str(len(flat)), _span(min(flat), max(flat)), _span(low, high), share]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"| all | | {len(found['comparisons'])} | | | {held} of {total} |")
    return "\n".join(lines) + "\n"


def _span(low: float, high: float) -> str:
    """Write a range of errors: one figure where both ends are written alike."""
    ends = dict.fromkeys(_percent(end) for end in (low, high))
    return " to ".join(ends).replace(" % to", " to")


def outside(found: Mapping[str, Any]) -> list[str]:
    """Name the comparisons that the ranges stated of the others in their class do not hold."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in found["comparisons"]:
        groups.setdefault((row["class"], "any" if row["where"] == "published" else row["what"]), []).append(row)
    return [row["name"] for rows in groups.values() for row, held in zip(rows, inside(rows), strict=False) if not held]


def _percent(error: float) -> str:
    return f"{100 * error:+.1f}%".replace("-", "−") if abs(error) >= 0.0005 else "0.0%"

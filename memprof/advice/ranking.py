"""Put the entries of advice in order: the first thing to change first, then what saves most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ranked"]

# A change that keeps the gradients goes first if it saves at least this share of what the best one saves.
_NEAR = 0.4
# Of those that save at least this share of the best of them, the one that asks for least goes first.
_ALIKE = 0.75


def ranked(entries: Sequence[dict[str, Any]], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Order a report's ``advice``: row 1 is the first thing to change, the others follow by what they save.

    Where memory ran out, the first is the change that asks for least among those that are enough for the whole step.
    Elsewhere it keeps the gradients and asks for least among those that save nearly most; where all that saves much
    changes the training, it changes it least.
    """
    rows = sorted(entries, key=lambda row: (-row["saves_bytes"], row.get("toll") or 0))
    if not rows:
        return []
    first = _after_failure(rows, report["oom"]) if report.get("oom") else None
    first = first or _in_general(rows)
    return [first, *(row for row in rows if row is not first)]


def _after_failure(rows: Sequence[dict[str, Any]], oom: Mapping[str, Any]) -> dict[str, Any] | None:
    """Choose what suffices; None where nothing alone does. What lies idle suffices only where that was the trouble."""
    short = int((oom.get("ahead") or {}).get("short_bytes") or 0)
    if oom.get("fits_defragmented") and not short:
        gaps = [row for row in rows if row.get("peak") == "device"]
        if gaps:
            return min(gaps, key=_toll)
    missing = max(short, int(oom["requested_bytes"] or 0) - int(oom["device_free_bytes"] or 0))
    open_ = [row for row in rows if row.get("peak") != "device"]
    promised = [row for row in open_ if row.get("enough")]
    enough = promised or [row for row in open_ if row["saves_bytes"] >= missing > 0]
    return min(enough, key=lambda row: (_toll(row), row["saves_bytes"]), default=None)


def _in_general(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    open_ = [row for row in rows if row.get("peak") != "device"] or list(rows)
    best = max(row["saves_bytes"] for row in open_)
    kept = [row for row in open_ if row["exact"] and row["saves_bytes"] >= _NEAR * best]
    if not kept:  # every one changes the training: begin with the one that changes it least
        return min((r for r in open_ if r["saves_bytes"] >= _NEAR * best), key=lambda r: (_toll(r), -r["saves_bytes"]))
    most = max(row["saves_bytes"] for row in kept)
    near = [row for row in kept if row["saves_bytes"] >= _ALIKE * most]
    return min(near, key=lambda row: (_toll(row), -row["saves_bytes"]))


def _toll(row: Mapping[str, Any]) -> int:
    return int(row.get("toll") or 0)

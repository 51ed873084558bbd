"""What a run that ran out of memory says on the terminal: ten lines, from its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memprof.frame_paths import text_path
from memprof.units import format_bytes
from memprof.vocabulary import CATEGORY_LABELS

__all__ = ["oom_lines"]

MOST_LINES = 10
_LABELS = {str(category): label for category, label in CATEGORY_LABELS.items()}
_HOLDERS = 3
# Files that are nobody's mistake: the innermost frame outside them is where to look.
_NO_FILE = ("<frozen", "<string>")


def oom_lines(report: Mapping[str, Any], page: str | None = None) -> list[str]:
    """At most ten lines: what was asked for, where, who held the memory, and what to change.

    Args:
        report: a report (``memprof.report/1``) whose ``oom`` is not null.
        page: the page or snapshot that tells the rest.
    """
    oom = report["oom"]
    rank = report["source"].get("rank")
    who = f"memprof [rank {rank}]" if (report["source"].get("world_size") or 1) > 1 else "memprof"
    lines = [f"{who}: out of memory in {_where(oom)}."]
    lines.append(f"  asked for  {_asked(oom, report['source'].get('device_total_bytes'))}")
    lines += [f"  by         {frame}" for frame in _frames(oom["stack"])]
    lines.append(f"  held       {_held(oom, report)}")
    if idle := _idle(oom):
        lines.append(f"  idle       {idle}")
    ahead = [f"  {'change' if not i else '      '}     {line}" for i, line in enumerate(_changes(report))]
    room = MOST_LINES - len(lines) - (page is not None)
    lines += ahead[:room]
    if page is not None:
        lines.append(f"  page       {page}")
    return lines


def _where(oom: Mapping[str, Any]) -> str:
    phase = oom["phase"] or "an unknown phase"
    return phase if oom["step"] is None else f"{phase}, step {oom['step']}"


def _asked(oom: Mapping[str, Any], total: int | None) -> str:
    text = format_bytes(oom["requested_bytes"]) if oom["requested_bytes"] else "an unknown size"
    if oom.get("limited"):
        limit = oom.get("limit_bytes")
        reserved = format_bytes(oom.get("reserved_bytes") or 0)
        text += (
            f" with {reserved} reserved of the {format_bytes(limit)} this process may"
            if limit
            else (f" with {format_bytes(oom['device_free_bytes'])} free: a limit of this process refused it")
        )
    elif oom["device_free_bytes"] is not None:
        text += f" with {format_bytes(oom['device_free_bytes'])} free"
        if total:
            text += f" of {format_bytes(total)}"
    return text


def _frames(stack: Sequence[str]) -> list[str]:
    """Where it was asked for: the innermost frame, and the innermost of the user's own."""
    if not stack:
        return []
    own = next((f for f in stack if not (text_path(f).rooted or f.startswith(_NO_FILE))), None)
    return list(dict.fromkeys([stack[0], own] if own else [stack[0]]))


def _held(oom: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    categories = oom.get("categories")
    allocated, when = oom.get("allocated_bytes"), ""
    if not categories:
        categories, allocated, when = report["peak"]["categories"], report["peak"]["allocated_bytes"], " at the peak"
    largest = sorted(((n, c) for c, n in categories.items() if n), key=lambda row: (-row[0], row[1]))
    parts = [f"{_LABELS.get(c, c)} {format_bytes(n)}" for n, c in largest[:_HOLDERS]]
    rest = sum(n for n, _ in largest[_HOLDERS:])
    if rest:
        parts.append(f"other {format_bytes(rest)}")
    return f"{format_bytes(int(allocated or 0))}{when}: {', '.join(parts) or 'nothing that was seen'}"


def _idle(oom: Mapping[str, Any]) -> str | None:
    idle = (oom.get("cached_bytes") or 0) + (oom.get("inactive_split_bytes") or 0)
    if not idle:
        return None
    if oom.get("fits_defragmented"):
        verdict = "in one piece it would have been enough: PYTORCH_ALLOC_CONF=expandable_segments:True"
    else:
        verdict = "too little even in one piece"
    return f"{format_bytes(idle)} reserved by torch and unused; {verdict}"


def _room(oom: Mapping[str, Any]) -> int:
    """Return the bytes that torch could still have taken: a limit of the process counts what it has reserved."""
    free, limit = int(oom["device_free_bytes"] or 0), oom.get("limit_bytes")
    if limit is None:
        return 0 if oom.get("limited") else free
    return min(free, max(0, int(limit) - int(oom.get("reserved_bytes") or 0)))


def _changes(report: Mapping[str, Any]) -> list[str]:
    """The report's own advice, what saves most first; one that is enough alone is named before the others."""
    advice = sorted(report.get("advice") or [], key=lambda row: -row["saves_bytes"])
    oom = report["oom"]
    missing = max(0, oom["requested_bytes"] - _room(oom))
    enough = [row for row in advice if row["saves_bytes"] >= missing > 0]
    smallest = min(enough, key=lambda row: row["saves_bytes"], default=None)
    ordered = ([smallest] if smallest else []) + [row for row in advice if row is not smallest]
    lines = []
    for row in ordered:
        verdict = "; enough alone" if row is smallest else ""
        lines.append(f"{row['action']} (saves {format_bytes(row['saves_bytes'])}, {row['basis']}{verdict})")
    if not lines:
        lines.append("halve the micro-batch and double the accumulation: the same gradients from half the activations")
        lines.append("`memprof plan` says what fits without another run")
    return lines

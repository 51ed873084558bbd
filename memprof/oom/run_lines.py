"""Write the ten terminal lines of a run that ran out of memory, from its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memprof.frame_paths import text_path
from memprof.units import format_bytes
from memprof.vocabulary import CATEGORY_LABELS, EXPANDABLE_SEGMENTS, ahead_words

MOST_LINES = 10
_LABELS = {str(category): label for category, label in CATEGORY_LABELS.items()}
_HOLDERS = 3
_ENOUGH = {True: "; enough alone", False: "; not enough alone", None: ""}
# Files that are nobody's mistake: the innermost frame outside them is where to look.
_NO_FILE = ("<frozen", "<string>")


def oom_lines(report: Mapping[str, Any], page: str | None = None) -> list[str]:
    """Return at most ten lines: what was asked for, where, who held the memory, and what to change.

    The report's ``oom`` is not null; ``page`` is the page or snapshot that tells the rest.
    """
    oom = report["oom"]
    rank = report["source"].get("rank")
    who = f"memprof [rank {rank}]" if (report["source"].get("world_size") or 1) > 1 else "memprof"
    headline = report["headline"]
    lines = [f"{who}: {headline['verdict']}. {headline['cause']}"]
    lines.append(f"  asked for  {_asked(oom, report['source'].get('device_total_bytes'))}")
    lines += [f"  by         {frame}" for frame in _frames(oom["stack"])]
    lines.append(f"  held       {_held(oom, report)}")
    if idle := _idle(oom):
        lines.append(f"  idle       {idle}")
    ahead = [f"  {'change' if not i else '      '}     {line}" for i, line in enumerate(_changes(report))]
    if step := _step(oom):
        lines.append(f"  the step   {step}")
    room = MOST_LINES - len(lines) - (page is not None)
    lines += ahead[:room]
    if page is not None:
        lines.append(f"  page       {page}")
    return lines


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
        segment, free = oom.get("segment_bytes") or 0, oom["device_free_bytes"]
        if oom["requested_bytes"] <= free < segment:
            text += f", which takes a piece of {format_bytes(segment)} from the device,"
        text += f" with {format_bytes(free)} free"
        if total:
            text += f" of {format_bytes(total)}"
    return text


def _frames(stack: Sequence[str]) -> list[str]:
    """Return where memory was asked for: the innermost frame and the user's innermost; none of memprof's."""
    others = [f for f in stack if not _is_own(f)]
    if not others:
        return []
    own = next((f for f in others if not (text_path(f).rooted or f.startswith(_NO_FILE))), None)
    return list(dict.fromkeys([others[0], own] if own else [others[0]]))


def _is_own(frame: str) -> bool:
    file = text_path(frame)
    return file.rooted and file.path.startswith("memprof/")


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
    idle = sum(oom.get(f"{name}_bytes") or 0 for name in ("cached", "inactive_split", "private_pool"))
    if not idle:
        return None
    if not oom.get("fits_defragmented"):
        verdict = "too little even in one piece"
    elif _short(oom):
        verdict = "in one piece it would have held this request, not the step"
    else:
        verdict = f"in one piece it would have been enough: {EXPANDABLE_SEGMENTS}"
    return f"{format_bytes(idle)} reserved by torch and unused; {verdict}"


def _step(oom: Mapping[str, Any]) -> str | None:
    """Say what the step had still to make, and what it would have needed in all."""
    ahead = oom.get("ahead")
    if not ahead:
        return None
    return ahead_words(ahead)


def _short(oom: Mapping[str, Any]) -> int:
    """Return what is missing for the whole step, as far as it is known; 0 where nothing is."""
    return int((oom.get("ahead") or {}).get("short_bytes") or 0)


def _changes(report: Mapping[str, Any]) -> list[str]:
    """Return the report's own advice in its order, each with whether it is enough alone, where that is known."""
    oom = report["oom"]
    # What lies idle helps where idle memory is what is wrong.
    gaps = bool(oom.get("fits_defragmented")) and not _short(oom)
    advice = [row for row in report.get("advice") or [] if gaps or row.get("peak") != "device"]
    lines = []
    for row in advice:
        verdict = _ENOUGH[row.get("enough")]
        lines.append(f"{row['action']} (saves {format_bytes(row['saves_bytes'])}, {row['basis']}{verdict})")
    if not lines:
        lines.append("halve the micro-batch and double the accumulation: the same gradients from half the activations")
        lines.append("`memprof plan` says what fits without another run")
    return lines

"""Write the ten terminal lines of a run that ran out of memory, from its report."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.frame_paths import text_path
from memprof.report import Report
from memprof.report.base import known
from memprof.report.run import OutOfMemory, StillAhead
from memprof.units import format_bytes
from memprof.vocabulary import CATEGORY_LABELS, EXPANDABLE_SEGMENTS

MOST_LINES = 10
_HOLDERS = 3
# Files that are nobody's mistake: the innermost frame outside them is where to look.
_NO_FILE = ("<frozen", "<string>")


def oom_lines(report: Report, page: str | None = None) -> list[str]:
    """Return at most ten lines: what was requested, where, what uses the memory, and what to change.

    The report's ``oom`` and ``headline`` are not ``None``; ``page`` is the page or snapshot to open.
    """
    oom, source, headline = report.oom, report.source, report.headline
    assert oom is not None
    assert headline is not None
    who = f"memprof [rank {source.rank}]" if (source.world_size or 1) > 1 else "memprof"
    lines = [f"{who}: {headline.verdict}. {headline.cause}"]
    lines.append(f"  requested  {_requested(oom, source.device_total_bytes)}")
    lines += [f"  by         {frame}" for frame in _frames(oom.stack)]
    lines.append(f"  allocated  {_allocated(oom, report)}")
    if idle := _idle(oom):
        lines.append(f"  idle       {idle}")
    ahead = [f"  {'change' if not i else '      '}     {line}" for i, line in enumerate(_changes(report, oom))]
    if (step := known(oom.ahead)) is not None:
        lines.append(f"  the step   {step.words}")
    room = MOST_LINES - len(lines) - (page is not None)
    lines += ahead[:room]
    if page is not None:
        lines.append(f"  page       {page}")
    return lines


def _requested(oom: OutOfMemory, total: int | None) -> str:
    text = format_bytes(oom.requested_bytes) if oom.requested_bytes else "an unknown size"
    free, limit = oom.device_free_bytes, known(oom.limit_bytes)
    if oom.limited and limit:
        reserved = format_bytes(known(oom.reserved_bytes) or 0)
        text += f" with {reserved} reserved of the {format_bytes(limit)} this process may"
    elif oom.limited:
        text += f" with {format_bytes(free or 0)} free: a limit of this process was reached"
    elif free is not None:
        segment = oom.segment_bytes or 0
        if oom.requested_bytes <= free < segment:
            text += f", which is allocated as a segment of {format_bytes(segment)},"
        text += f" with {format_bytes(free)} free"
        if total:
            text += f" of {format_bytes(total)}"
    return text


def _frames(stack: Sequence[str]) -> list[str]:
    """Return where memory was requested: the innermost frame and the user's innermost; none of memprof's."""
    others = [f for f in stack if not _is_own(f)]
    if not others:
        return []
    own = next((f for f in others if not (text_path(f).rooted or f.startswith(_NO_FILE))), None)
    return list(dict.fromkeys([others[0], own] if own else [others[0]]))


def _is_own(frame: str) -> bool:
    file = text_path(frame)
    return file.rooted and file.path.startswith("memprof/")


def _allocated(oom: OutOfMemory, report: Report) -> str:
    categories, allocated, when = oom.categories, oom.allocated_bytes, ""
    if not categories:
        categories, allocated, when = report.peak.categories, report.peak.allocated_bytes, " at the peak"
    largest = sorted(((n, c) for c, n in categories.items() if n), key=lambda row: (-row[0], row[1]))
    parts = [f"{CATEGORY_LABELS[c]} {format_bytes(n)}" for n, c in largest[:_HOLDERS]]
    rest = sum(n for n, _ in largest[_HOLDERS:])
    if rest:
        parts.append(f"other {format_bytes(rest)}")
    return f"{format_bytes(allocated or 0)}{when}: {', '.join(parts) or 'nothing recorded'}"


def _idle(oom: OutOfMemory) -> str | None:
    idle = (oom.cached_bytes or 0) + (oom.inactive_split_bytes or 0) + (oom.private_pool_bytes or 0)
    if not idle:
        return None
    if not oom.fits_defragmented:
        verdict = "too little even if contiguous"
    elif _short(known(oom.ahead)):
        verdict = "if contiguous it would fit this request, not the step"
    else:
        verdict = f"if contiguous it would be enough: {EXPANDABLE_SEGMENTS}"
    return f"{format_bytes(idle)} reserved by PyTorch but unused; {verdict}"


def _short(ahead: StillAhead | None) -> int:
    """Return what is missing for the whole step, as far as it is known; 0 where nothing is."""
    return 0 if ahead is None else ahead.short_bytes or 0


def _changes(report: Report, oom: OutOfMemory) -> list[str]:
    """Return the report's own advice in its order, each with whether it is enough alone, where that is known."""
    # What lies idle helps where idle memory is what is wrong.
    gaps = bool(oom.fits_defragmented) and not _short(known(oom.ahead))
    lines = []
    for row in report.advice:
        if gaps or row.peak != "device":
            verdict = "; enough alone" if row.enough is True else "; not enough alone" if row.enough is False else ""
            lines.append(f"{row.action} (saves {format_bytes(row.saves_bytes)}, {row.basis}{verdict})")
    if not lines:
        lines.append("halve the micro-batch and double gradient accumulation: same gradients, half the activations")
        lines.append("`memprof plan` shows what fits without another run")
    return lines

"""A comparison: one bar a run on one scale, then the rows, then what the runs allocate differently by stack."""

from __future__ import annotations

from dataclasses import replace

from memprof.reports.document.blocks import Bars, Block, Notes, Paragraph, ReportLayout
from memprof.reports.document.comparison import ChangedStacks, ComparisonDocument

from memprof.units import gib

# So many settings are listed where none is known to matter; so many stacks that changed, beside few runs and many.
_FEW_SETTINGS, _FEW_STACKS, _FEWER_STACKS, _STACKS_IN_MARKDOWN = 6, 6, 3, 8


def comparison(found: ComparisonDocument) -> ReportLayout:
    """Show settings, bars, rooms, rows, and the stacks whose allocations differ most."""
    rooms = [(column.label, column.room) for column in found.columns if column.room is not None]
    far = "how far from out of memory"
    listed = Notes(tuple(f"{label}, {far}: {room.sentence}" for label, room in rooms), on="m")
    sections = (
        (Paragraph(found.unchanged) if found.unchanged else None,),
        _settings(found),
        _bars(found),
        _rooms(found),
        (found.rows, listed if rooms else None),
        *(_changed(entry, _FEW_STACKS if len(found.columns) == 2 else _FEWER_STACKS) for entry in found.changed),
        (Notes(found.notes) if found.notes else None,),
    )
    return ReportLayout(sections, found.title, headline=found.headline)


def _settings(found: ComparisonDocument) -> tuple[Block | None, ...]:
    """Show the settings that matter; where none does, the first others beside few runs."""
    shown, others = found.settings, found.others
    rest = len(others.lines) if others else 0
    if shown is None and others is not None and len(found.columns) <= 3:
        shown, rest = others.part(0, _FEW_SETTINGS), rest - _FEW_SETTINGS
    words = f"… and {rest} other settings" if shown else f"{rest} circumstances differ"
    folded = f"{len(others.lines)} other settings differ" if others else ""
    return (
        replace(shown, on="t") if shown else None,
        Paragraph(f"{words}, see --json or the page", tone="muted", on="t") if rest > 0 else None,
        replace(found.settings, on="m") if found.settings else None,
        replace(others, on="m", folded=folded) if others else None,
    )


def _bars(found: ComparisonDocument) -> tuple[Block | None, ...]:
    capacity = found.capacity_bytes
    bars = [
        (column.label, column.parts, "–" if total is None else gib(total))
        for column, total in zip(found.columns, found.totals, strict=True)
    ]
    end = Paragraph(f"¦ {gib(capacity)} GiB, the device", tone="muted", on="t") if capacity else None
    return Bars(tuple(bars), max(found.scale_bytes, capacity or 0), capacity), end


def _rooms(found: ComparisonDocument) -> tuple[Block | None, ...]:
    """Show how far each run was from out of memory, on one scale."""
    rooms = [(column.label, column.room) for column in found.columns if column.room is not None]
    if not rooms:
        return ()
    bars = tuple((label, room.parts, "") for label, room in rooms)
    scale, ends = max(room.scale_bytes for _, room in rooms), tuple(room.capacity_bytes for _, room in rooms)
    said = (Paragraph(f"{label}: {room.sentence}", on="t") for label, room in rooms)
    return Paragraph("", lead="How far from out of memory", on="t"), Bars(bars, scale, ends=ends), *said


def _changed(entry: ChangedStacks, most: int) -> tuple[Block, ...]:
    listed = entry.stacks
    first, more = replace(listed.part(0, most), on="t"), replace(listed.part(0, _STACKS_IN_MARKDOWN), on="m")
    return Paragraph("", lead=entry.title, after=f"  {entry.note}"), first, more

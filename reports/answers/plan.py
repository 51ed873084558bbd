"""A plan: a table of what fits, a bar for each row, the settings to paste."""

from __future__ import annotations

from memprof.reports.document.blocks import Bars, Code, Notes, Paragraph, ReportLayout
from memprof.reports.document.plan import PlanDocument, parts_of, verdict_of

from memprof.units import gib


def plan(found: PlanDocument) -> ReportLayout:
    """Show the headline, the table, the bars, the settings to paste, the notes and how far off figures may be."""
    bars = tuple(
        (row.method, parts_of(row), f"{gib(row.device_peak_bytes)} {verdict_of(row)}") for row in found.plan.rows
    )
    limit, elsewhere = found.plan.limit_bytes, (found.varied, found.room)
    told = tuple(note for note in found.plan.notes if note not in elsewhere)
    front = "* on the front: no other row is both faster (estimated) and needs less memory."
    sections = (
        (),
        (Paragraph(found.varied) if found.varied else None,),
        (found.table, Paragraph(front) if any(row.on_front for row in found.plan.rows) else None),
        (
            Bars(bars, found.scale_bytes, limit),
            Paragraph(f"¦ {gib(limit)} GiB may be used", tone="muted", on="t"),
        ),
        (
            Paragraph(found.room) if found.room else None,
            *((Paragraph(f"Ready to paste, {found.best}:"), _code(found.plan.code)) if found.plan.code else ()),
        ),
        (Paragraph(found.fastest_sentence),),
        (_code(found.fastest_code) if found.fastest_code else None,),
        (Notes(told) if told else None,),
        (Paragraph(found.plan.expected_error.sentence),),
        (_code(found.yaml, "yaml") if found.yaml else None,),
    )
    return ReportLayout(sections, found.title, headline=found.headline)


def _code(lines: str, language: str = "python") -> Code:
    return Code(tuple(lines.rstrip("\n").split("\n")), language)

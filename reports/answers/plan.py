"""A plan: a table of what fits, a bar for each row, the settings to paste."""

from __future__ import annotations

from memprof.reports.document.blocks import Bars, Code, Notes, Said, Sheet
from memprof.reports.document.plan import PlanDocument

from memprof.units import gib


def plan(found: PlanDocument) -> Sheet:
    """Show the headline, the table, the bars, the settings to paste, the notes and how far off figures may be."""
    bars = tuple((row.method, row.parts, f"{gib(row.needed_bytes)} {row.verdict}") for row in found.rows)
    front = "* on the front: no other row both takes less time (estimated) and needs less memory."
    sections = (
        (),
        (Said(found.varied) if found.varied else None,),
        (found.table, Said(front) if any(row.on_front for row in found.rows) else None),
        (
            Bars(bars, found.scale_bytes, found.limit_bytes),
            Said(f"¦ {gib(found.limit_bytes)} GiB may be used", tone="muted", on="t"),
        ),
        (
            Said(found.room) if found.room else None,
            *((Said(f"Ready to paste, {found.best}:"), _code(found.code)) if found.code else ()),
        ),
        (Said(found.fastest_sentence),),
        (_code(found.fastest_code) if found.fastest_code else None,),
        (Notes(found.told) if found.told else None,),
        (Said(found.error),),
        (_code(found.yaml, "yaml") if found.yaml else None,),
    )
    return Sheet(sections, found.title, headline=found.headline)


def _code(lines: str, language: str = "python") -> Code:
    return Code(tuple(lines.rstrip("\n").split("\n")), language)

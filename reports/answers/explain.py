"""``memprof explain``: each allocation, how its category is known, its stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memprof.reports.document.blocks import Block, Code, Paragraph, ReportLayout
from memprof.reports.document.model import AllocationRow
from memprof.reports.document.tables import fold_shared
from memprof.reports.document.text import size, thousands

from memprof.units import gib


def explained(allocations: Sequence[AllocationRow]) -> ReportLayout:
    """Show every allocation with its evidence and its stack; frames that all stacks share stand once, above."""
    shared, rest = fold_shared(allocations)
    above = (Paragraph("All share:"), Code(shared, indent=6, paths=True)) if shared else ()
    return ReportLayout(((*above, *(block for allocation in rest for block in _allocation(allocation))),))


def _allocation(a: AllocationRow) -> Iterator[Block]:
    label = a.label + (f" / {a.detail}" if a.detail else "")
    many = f" in {thousands(a.count)} blocks of {size(a.group.each_bytes)}" if a.count > 1 else ""
    where = (
        f"{a.address}, {a.phase_label.lower()}, alive {a.lifetime}"
        if a.phase_label
        else f"{a.address}, alive {a.lifetime}"
    )
    yield Paragraph(f"{many}  {label} at {where}", lead=f"{gib(a.bytes)} GiB", category=a.category)
    if what := "  ".join(words for words in (a.name, a.shape) if words):
        yield Paragraph(what, tone="code", indent=4)
    kept = "; outlives the step or phase that made it" if a.group.retained else ""
    kept += f"; owned by {', '.join(a.group.held_by)}" if a.group.held_by else ""
    yield Paragraph(f"{a.group.evidence}: {a.why}{kept}", tone="muted", indent=4)
    if a.stack:
        yield Code(a.stack, indent=6, paths=True)

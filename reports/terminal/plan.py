"""Draw a plan for a terminal: a table of what fits, a bar for each row, the settings to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.reports.document.model import Part
from memprof.reports.document.plan import PlanDocument
from memprof.reports.document.text import gib
from memprof.reports.terminal.elements import draw_bar, legend
from memprof.reports.terminal.screen import console_of, text_of

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["render_bars", "render_plan"]


def render_plan(plan: PlanDocument, width: int = 100, colour: bool = False) -> str:
    """Render the table, the bars, the best configuration and how far off the figures may be."""
    lines = [plan.title, "", *_table(plan), "", render_bars(plan, width, colour), plan.best_sentence]
    lines += ["", plan.code] if plan.code else []
    lines += ["", plan.error, ""]
    return "\n".join(lines) + (f"\n{plan.yaml}" if plan.yaml else "")


def _table(plan: PlanDocument) -> list[str]:
    cells = plan.cells()
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    numbers = {2, 3, 4, 7}
    lines = []
    for row in cells:
        parts = [c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(parts).rstrip())
    return lines


def render_bars(plan: PlanDocument, width: int = 100, colour: bool = False) -> str:
    """Render a bar for each row, all on one scale, with a mark where the card ends."""
    from rich.text import Text

    console = console_of(width, colour)
    longest = min(max(len(row.method) for row in plan.rows), width // 3)
    room = max(width - longest - 22, 10)
    used: dict[str, Part] = {}
    for row in plan.rows:
        used.update({part.id: part for part in row.parts})
        line = Text(row.method[:longest].ljust(longest) + "  ", no_wrap=True)
        line.append(draw_bar(row.parts, plan.scale_bytes, room, colour))
        line.append(f"  {gib(row.needed_bytes)} {row.verdict}")
        console.print(line)
    console.print(_limit_mark(plan, longest + 2, room, width))
    for entry in legend(list(used.values()), width - 1, colour, figures=False):
        console.print(entry)
    return text_of(console)


def _limit_mark(plan: PlanDocument, left: int, room: int, width: int) -> Text:
    """Mark below the bars where the card ends, the words on the side that has room for them."""
    from rich.text import Text

    place = left + max(round(room * plan.limit_bytes / plan.scale_bytes) - 1, 0)
    words = f"{gib(plan.limit_bytes)} GiB may be used"
    if place + 2 + len(words) <= width:
        return Text(f"{' ' * place}^ {words}", no_wrap=True)
    return Text(f"{words} ^".rjust(place + 1), no_wrap=True)

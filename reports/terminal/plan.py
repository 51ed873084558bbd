"""Draw a plan for a terminal: a table of what fits, a bar for each row, the settings to paste."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memprof.reports.document.model import Part
from memprof.reports.document.plan import PlanDocument
from memprof.reports.document.text import gib, sentence_list
from memprof.reports.terminal.elements import draw_bar, legend, print_headline
from memprof.reports.terminal.screen import console_of, text_of

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["render_bars", "render_plan"]


def render_plan(plan: PlanDocument, width: int = 100, colour: bool = False) -> str:
    """Render the headline, the table, the bars, the settings to paste, the notes and how far off figures may be."""
    varied = [*_wrapped(plan.varied, width), ""] if plan.varied else []
    console = console_of(width, colour)
    print_headline(console, plan.headline)
    lines = [text_of(console), plan.title, "", *varied, *_table(plan, width), "", render_bars(plan, width, colour)]
    lines += [*_wrapped(plan.room, width), ""] if plan.room else []
    lines += [f"Ready to paste, {plan.best}:", plan.code] if plan.code else []
    lines += ["", *_wrapped(plan.fastest_sentence, width)]
    lines += ["", plan.fastest_code] if plan.fastest_code else []
    lines += ["", *(line for note in plan.told for line in _wrapped(f"Note: {note}", width))] if plan.told else []
    lines += ["", *_wrapped(plan.error, width), ""]
    return "\n".join(lines) + (f"\n{plan.yaml}" if plan.yaml else "")


# The table's columns of words, by their heads; the others hold figures. What is searched for has a head of its own and
# comes where None stands: all of them, the most important first.
_WORDS = ("Method", "Verdict", "Highest in", "Largest")
_BY_IMPORTANCE = (
    "Method", "Verdict", "Needed GiB", None, "Step", "Largest", "Highest in", "Allocated GiB", "Host GiB",
)  # fmt: skip


def _table(plan: PlanDocument, width: int) -> list[str]:
    """Write the rows as columns, heads in two lines where one is too wide; columns without room are named below."""
    head, *rows = plan.cells()
    heads = [head]
    if len(_kept(heads, rows, width)) < len(head):
        heads = [tuple(word.rpartition(" ")[0] for word in head), tuple(word.rpartition(" ")[2] for word in head)]
    kept = _kept(heads, rows, width)
    widths = _widths(heads, rows)
    lines = []
    for row in (*heads, *rows):
        parts = [row[i].ljust(widths[i]) if head[i] in _WORDS else row[i].rjust(widths[i]) for i in kept]
        lines.append("  ".join(parts).rstrip())
    lines += _wrapped(_STARRED, width) if any(row.on_front for row in plan.rows) and head.index("Step") in kept else []
    left = [name for i, name in enumerate(head) if i not in kept]
    more = f"No room here for {sentence_list(left)}: a wider terminal, the page and the JSON have them."
    return lines + (_wrapped(more, width) if left else [])


_STARRED = "* on the front: no other row both takes less time (estimated) and needs less memory."


def _widths(heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> dict[int, int]:
    return {i: max(len(row[i]) for row in (*heads, *rows)) for i in range(len(heads[0]))}


def _kept(heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    names = [" ".join(parts).strip() for parts in zip(*heads, strict=True)]
    return _fitting(names, _widths(heads, rows), width)


def _wrapped(sentence: str, width: int) -> list[str]:
    return textwrap.wrap(sentence, width, break_on_hyphens=False)


def _fitting(head: Sequence[str], widths: Mapping[int, int], width: int) -> list[int]:
    """Choose the columns that fit ``width`` together, the most important first."""
    searched = _BY_IMPORTANCE.index(None)
    order = {name: place for place, name in enumerate(_BY_IMPORTANCE)}
    kept: list[int] = []
    for i in sorted(widths, key=lambda column: order.get(head[column], searched)):
        if not kept or sum(widths[k] + 2 for k in kept) + widths[i] <= width:
            kept.append(i)
    return sorted(kept)


def render_bars(plan: PlanDocument, width: int = 100, colour: bool = False) -> str:
    """Render a bar for each row, all on one scale, with a mark where the card ends."""
    from rich.text import Text

    console = console_of(width, colour)
    longest = min(max(len(row.method) for row in plan.rows), width * 2 // 5)
    words = {row.method: f"{gib(row.needed_bytes)} {row.verdict}" for row in plan.rows}
    room = max(width - longest - 4 - max(map(len, words.values())), 10)
    used: dict[str, Part] = {}
    for row in plan.rows:
        used.update({part.id: part for part in row.parts})
        method = row.method if len(row.method) <= longest else f"{row.method[: longest - 1]}…"
        line = Text(method.ljust(longest) + "  ", no_wrap=True)
        line.append(draw_bar(row.parts, plan.scale_bytes, room, colour))
        line.append(f"  {words[row.method]}")
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

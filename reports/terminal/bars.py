"""Draw bars for a terminal: a letter or a colour for each category, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memprof.reports.document.blocks import BarPart, Bars
from memprof.reports.document.text import plain
from memprof.reports.palette import FALLBACK, LETTERS, TERMINAL

from memprof.units import gib

if TYPE_CHECKING:
    from rich.text import Text


def swatch(identifier: str, colour: bool) -> Text:
    """Draw a category's square in its colour, or its letter."""
    from rich.text import Text

    return Text("■", style=TERMINAL.get(identifier, FALLBACK)) if colour else Text(LETTERS.get(identifier, "?"))


def draw_bar(parts: Sequence[BarPart], scale: int, width: int, colour: bool) -> Text:
    """Draw parts side by side, ``scale`` bytes to ``width`` columns.

    Ends are rounded, not widths, so the bar never grows longer than its sum.
    """
    from rich.text import Text

    bar, done, drawn = Text(no_wrap=True), 0, 0
    for part in parts:
        done += part.bytes
        end = min(width, round(width * done / scale)) if scale else 0
        if colour:
            bar.append("█" * (end - drawn), style=TERMINAL.get(part.id, FALLBACK))
        else:
            bar.append(LETTERS.get(part.id, "?") * (end - drawn))
        drawn = max(drawn, end)
    return bar


def bar_lines(bars: Bars, width: int, colour: bool) -> Iterator[Text]:
    """Draw the bars on one scale, each with its name and its words, then what their parts are."""
    from rich.text import Text

    names = short_labels([plain(name) for name, _, _ in bars.lines], min(24, width // 3))
    margin = max(map(len, names)) + 1 if any(names) else 0
    words = max(len(after) for _, _, after in bars.lines)
    space = max(width - margin - (max(words, 10) + 2 if words else 1), 10)
    ends = bars.ends or (bars.capacity,) * len(names)
    for name, end, (_, parts, after) in zip(names, ends, bars.lines, strict=True):
        bar = draw_bar(parts, bars.scale, space, colour)
        _mark(bar, end, bars.scale, space)
        line = Text.assemble(name.ljust(margin), bar, no_wrap=True)
        yield line.append(f" {after}", style="bold") if after else line
    used = {part.id: part for _, parts, _ in reversed(bars.lines) for part in parts if part.bytes}
    yield from _legend(_in_order(bars, used), width - 1, colour, bars.figures)


def _in_order(bars: Bars, used: dict[str, BarPart]) -> list[BarPart]:
    """List every colour once, under the name it has in the first bar that shows it."""
    order = dict.fromkeys(part.id for _, parts, _ in bars.lines for part in parts if part.id in used)
    return [used[identifier] for identifier in order]


def _legend(parts: Sequence[BarPart], width: int, colour: bool, figures: bool) -> list[Text]:
    """Put the parts' names side by side, as many to a line as fit."""
    from rich.text import Text

    lines = [Text()]
    for part in parts:
        name = f" {plain(part.label)} {gib(part.bytes)}" if figures else f" {plain(part.label)}"
        entry = Text.assemble(swatch(part.id, colour), name)
        if lines[-1].cell_len and lines[-1].cell_len + 3 + entry.cell_len > width:
            lines.append(Text())
        lines[-1].append("   " if lines[-1].cell_len else "").append(entry)
    return lines


def _mark(bar: Text, capacity: int | None, scale: int, space: int) -> None:
    """Put a ``¦`` where the device ends."""
    from rich.text import Text

    if not capacity:
        return
    at = min(round(space * capacity / scale), space - 1)
    bar.pad_right(max(at + 1 - len(bar), 0))
    rest = bar[at + 1 :] if at + 1 < len(bar) else Text()
    marked = Text.assemble(bar[:at] if at else Text(), "¦", rest)
    bar.truncate(0)
    bar.append_text(marked)


def short_labels(labels: Sequence[str], room: int) -> list[str]:
    """Cut labels to ``room`` characters: their ends stay where they begin alike, their beginnings otherwise.

    Labels that differ stay different, wherever it is that they do.
    """
    alike = len({label[: room // 2] for label in labels}) == 1
    short = [
        label if len(label) <= room else f"…{label[1 - room :]}" if alike else _cut(label, room) for label in labels
    ]
    if len(set(short)) == len(set(labels)):
        return short
    # Their ends are alike too: what differs is between.
    begun = next((i for i, letters in enumerate(zip(*labels, strict=False)) if len(set(letters)) > 1), 0)
    return [_cut(f"…{label[begun:]}" if begun else label, room) for label in labels]


def _cut(words: str, room: int) -> str:
    return words if len(words) <= room else f"{words[: room - 1]}…"

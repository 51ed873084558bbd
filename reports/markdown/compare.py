"""Render a comparison as GitHub Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.reports.document.comparison import Compared, Comparison, OnlyIn, children_worth_a_line
from memprof.reports.document.text import gib
from memprof.reports.markdown.elements import draw_table, headline, table, text

__all__ = ["render_comparison"]


def render_comparison(comparison: Comparison) -> str:
    """Render the headline, settings, rows, who fits, and the largest allocations one run has and the other has not."""
    blocks = [
        f"### {text(comparison.title)}",
        headline(comparison.headline),
        text(comparison.unchanged),
        _settings(comparison),
        _compared_rows(comparison),
        _rooms(comparison),
        *[_only_in(entry) for entry in comparison.only_in],
        "\n".join(f"- {text(note)}" for note in comparison.notes),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _rooms(comparison: Comparison) -> str:
    """Say of each run how far it was from out of memory, where a card is known."""
    rooms = [(column.label, column.room) for column in comparison.columns if column.room is not None]
    return "\n".join(f"- {text(label)}, how far from out of memory: {text(room.sentence)}" for label, room in rooms)


def _settings(comparison: Comparison) -> str:
    blocks = [draw_table(comparison.settings)] if comparison.settings else []
    if (others := comparison.others) is not None:
        summary = f"<summary>{len(others.lines)} other settings differ</summary>"
        blocks.append(f"<details>{summary}\n\n{draw_table(others)}\n\n</details>")
    return "\n\n".join(blocks)


def _compared_rows(comparison: Comparison) -> str:
    head = ["GiB"]
    for column in comparison.columns:
        head += [f"{text(column.label)} ({text(column.badge)})", "own peak"]
    for column in comparison.columns[1:]:
        name = f" {text(column.label)}" if len(comparison.columns) > 2 else ""
        head += [f"Difference{name}", f"Ratio{name}", f"Change{name}"]
    lines = [cells for row in comparison.rows for cells in _with_children(row, 0)]
    lines += [_cells(line, 0) for line in comparison.beside]
    if comparison.verdicts:
        fits = [f"Fits in {gib(comparison.capacity_bytes or 0)} GiB"]
        for verdict in comparison.verdicts:
            fits += [text(verdict.words), ""]
        lines.append(fits + [""] * (len(head) - len(fits)))
    return table(head, "l" + "r" * (len(head) - 1), lines)


def _with_children(line: Compared, level: int) -> Iterator[list[str]]:
    yield _cells(line, level)
    if level < 1:  # details are for the page
        for child in children_worth_a_line(line):
            yield from _with_children(child, level + 1)


def _cells(line: Compared, level: int) -> list[str]:
    bold = "**" if line.id == "total" else ""
    cells = [f"{bold}{'&nbsp;&nbsp;' * level}{text(line.label)}{bold}"]
    for figure, own in zip(line.at_peak, line.own_peak, strict=True):
        cells += [f"{bold}{_figure(figure)}{bold}", _figure(own)]
    for difference, ratio, change in zip(line.differences, line.ratios, line.changes, strict=True):
        cells += [f"{bold}{text(difference)}{bold}", text(ratio), f"{bold}{text(change)}{bold}"]
    return cells


def _figure(n_bytes: int | None) -> str:
    return "–" if n_bytes is None else text(gib(n_bytes))


def _only_in(entry: OnlyIn, most: int = 8) -> str:
    return f"**{text(entry.title)}** ({text(entry.note)})\n\n{draw_table(entry.allocations.part(0, most))}"

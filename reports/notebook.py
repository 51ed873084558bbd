"""Draw an analysis in a notebook: a piece of HTML with its own style, and the page that ``to_html`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escape_html
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.reports.document.blocks import BarPart
from memprof.reports.document.build import build_document, document_of, oom_sentence
from memprof.reports.document.model import Document, PublishedRow
from memprof.reports.document.tables import allocation_rows, category_parts
from memprof.reports.document.text import plain, where_words
from memprof.reports.html.elements import what
from memprof.reports.html.report import write_html
from memprof.reports.palette import FALLBACK, LIGHT

from memprof.report.allocations import AllocationGroup
from memprof.units import amount, percent
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.analysis.breakdown import Breakdown

# Notebooks draw on white or on black: the text keeps their colour, and only bars have one of their own.
_BOX = "font-family:system-ui,sans-serif;font-variant-numeric:tabular-nums;max-width:860px"
_CELL = "padding:2px 14px 2px 0;text-align:left;background:none"
_NUMBER = "padding:2px 14px 2px 0;text-align:right;white-space:nowrap;background:none"


def escape(text: str, quote: bool = True) -> str:
    """Return text that is no markup and prints as it is."""
    return escape_html(plain(text), quote=quote)


def analysis_fragment(analysis: Analysis) -> str:
    """Return the peak, what it is made of, its bar and the rows, as a piece of HTML."""
    return document_fragment(build_document(analysis.report))


def document_fragment(document: Document, link: str = "") -> str:
    """Return a document's first screen as a piece of HTML; ``link`` is the address of its page.

    Where memory ran out it says what was asked for and how the card was filled, too.
    """
    shown = document.summary
    rows = [line for row in document.rows for line in _lines(row)]
    if shown.guessed:
        rows.append((escape(shown.guessed.label), shown.guessed.value, escape(shown.guessed.note)))
    more = f'<p><a href="{escape(link, quote=True)}">{escape(link)}</a></p>' if link else ""
    said = [document.headline.sentences]
    if document.report.oom is not None:
        said += [oom_sentence(document.report.oom), *([document.room.sentence] if document.room else [])]
    return _fragment(
        f"{shown.peak_word} in {shown.where}", shown.peak_bytes, " ".join(said), shown.bar,
        _table(rows, "Highest"), more,
    )


def breakdown_fragment(breakdown: Breakdown) -> str:
    """Return the composition at one instant as a piece of HTML."""
    categories, guessed = ({Category(c): n for c, n in of.items()} for of in (breakdown.categories, breakdown.guessed))
    parts = category_parts(categories, guessed)
    whole = breakdown.active_bytes
    largest = sorted(parts, key=lambda part: -part.bytes)
    rows = [(_swatch(p.id) + escape(p.marked), amount(p.bytes), percent(p.bytes, whole)) for p in largest]
    where = where_words(breakdown.phase, breakdown.step)
    return _fragment(f"Alive in {where}", whole, "", parts, _table(rows, "Share"))


def largest_fragment(groups: Sequence[AllocationGroup]) -> str:
    """Return grouped allocations as a table in HTML."""
    cells = [
        (escape(what(row)), amount(row.bytes), _swatch(row.category) + escape(row.label))
        for row in allocation_rows(groups, sum(group.bytes for group in groups))
    ]
    return f'<div style="{_BOX}">{_table(cells, "Category", "Allocation", numeric=False)}</div>'


def write_page(analysis: Analysis, path: Path) -> None:
    """Write the page of an analysis, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_html(document_of(analysis), path)


def _lines(row: PublishedRow) -> list[tuple[str, str, str]]:
    """Write a group's line and those of its categories; groups that never held a byte are left out."""
    if not row.at_peak and not row.own_peak:
        return []
    own = "–" if row.own_peak is None else amount(row.own_peak)
    lines = [(f"<b>{escape(row.label)}</b>", f"<b>{amount(row.at_peak)}</b>", own)]
    for child in row.children:
        label = f'<span style="padding-left:14px">{_swatch(child.id)}{escape(child.marked)}</span>'
        lines.append((label, amount(child.at_peak), "–" if child.own_peak is None else amount(child.own_peak)))
    return lines


def _fragment(title: str, n_bytes: int, cause: str, parts: Sequence[BarPart], table: str, more: str = "") -> str:
    number, _, unit = amount(n_bytes).partition(" ")
    head = f'<div>{escape(title)}</div><div style="font-size:30px;font-weight:700;line-height:1.2">{number}'
    head += f'<span style="font-size:15px;font-weight:400"> {unit}</span></div>'
    sentence = f"<div>{escape(cause)}</div>" if cause else ""
    return f'<div style="{_BOX}">{head}{sentence}{_bar(parts)}{table}{more}</div>'


def _bar(parts: Sequence[BarPart]) -> str:
    whole = sum(part.bytes for part in parts) or 1
    words = escape(", ".join(f"{p.label} {amount(p.bytes)}" for p in parts), quote=True)
    boxes = "".join(
        f'<span style="width:{100 * p.bytes / whole:.3f}%;background:{LIGHT.get(p.id, FALLBACK)}"'
        f' title="{escape(p.label, quote=True)}: {amount(p.bytes)}"></span>'
        for p in parts
    )
    style = "display:flex;height:22px;margin:8px 0;border-radius:4px;overflow:hidden"
    return f'<div role="img" aria-label="{words}" style="{style}">{boxes}</div>'


def _swatch(category: str) -> str:
    style = f"display:inline-block;width:10px;height:10px;margin-right:6px;background:{LIGHT.get(category, FALLBACK)}"
    return f'<span style="{style}"></span>'


def _table(rows: Sequence[tuple[str, str, str]], last: str, first: str = "", numeric: bool = True) -> str:
    kinds = (_CELL, _NUMBER, _NUMBER if numeric else _CELL)
    head = "".join(
        f'<th style="{k};font-weight:400">{t}</th>' for k, t in zip(kinds, (first, "Size", last), strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td style="{k}">{cell}</td>' for k, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

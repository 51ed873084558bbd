"""Draw the program's own lines with what each allocated, as line profilers do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from memprof.reports.document.tables import category_parts
from memprof.reports.document.text import short_path, thousands
from memprof.reports.html.elements import Markup, bar, breakable, column, el, scrolling, section
from memprof.reports.html.views.source_lines import CodeLine, SourceView, sources_of

from memprof.analysis.source_files import SourceText
from memprof.report import Report
from memprof.report.allocations import SourceLine
from memprof.units import amount, percent

_OPEN = 3
_NAMED = 2


def source_anchor(file: str, line: int) -> str:
    """Return the id of a line's row, for links."""
    return "source-" + re.sub(r"\s", "_", file) + f"-{line}"


def source_section(report: Report, texts: Mapping[str, SourceText], moment: str) -> Markup | None:
    """List the files; what libraries allocate counts for the line of the program that called them."""
    sources = sources_of(report, texts)
    if sources is None:
        return None
    scale = max((line.found.bytes for view in sources.files for line in _lines(view) if line.found), default=0)
    rest = report.peak.active_bytes - sources.bytes
    note = f"lines of the program itself; {amount(sources.bytes)} at the {moment}"
    # Without code a file is a list of numbers: the first will do.
    n_open = _OPEN if texts else 1
    files = [_file(view, scale or 1, i < n_open, moment) for i, view in enumerate(sources.files)]
    more = f" {thousands(sources.other_files)} other files allocated less." if sources.other_files else ""
    words = "What a library allocates counts for the line that called it, the innermost of the program's own."
    outside = f" {amount(rest)} of the {moment} have no such line on their stack." if rest else ""
    return section("source", "Source", note, *files, el("p.muted fine", words + outside + more))


def _lines(view: SourceView) -> list[CodeLine]:
    return [line for stretch in view.stretches for line in stretch]


def _file(view: SourceView, scale: int, opened: bool, moment: str) -> Markup:
    name = short_path(view.path, 3)
    summary = el("summary", el("b", breakable(name)), " ", el("span.muted", amount(view.bytes)))
    known = any(line.text is not None for line in _lines(view))
    head = el(
        "tr", column("Share", extra="margin wide"), column(f"At the {moment}", True), column("Highest", True, "wide"),
        column("Category", extra="wide"), column("Line", True), column("Code" if known else "Function"),
    )  # fmt: skip
    rows: list[Markup] = []
    for i, stretch in enumerate(view.stretches):
        if i:
            left_out = stretch[0].number - view.stretches[i - 1][-1].number - 1
            rows.append(el("tr.gap", el("td", {"colspan": "6"}, f"⋯ {thousands(left_out)} lines")))
        rows += [_line(view.path, line, scale) for line in stretch]
    table = el("table.source", {"data-fixed": True}, el("thead", head), el("tbody", *rows))
    remark = el("p.muted fine", view.remark) if view.remark else None
    return el("details.source-file", {"open": opened}, summary, remark, scrolling(table, f"Lines of {name}"))


def _line(file: str, line: CodeLine, scale: int) -> Markup:
    code = el("td.line", el("code", line.text or "")) if line.text is not None else el("td.muted", _function(line))
    found = line.found
    if found is None:
        empty = (el("td.margin wide"), el("td"), el("td.wide"), el("td.wide"))
        return el("tr", *empty, el("td.num muted", str(line.number)), code)
    parts = category_parts(found.categories)
    return el(
        "tr.allocates",
        {"id": source_anchor(file, found.line), "title": _words(found)},
        el("td.margin wide", bar(parts, scale) if parts else None),
        el("td.num", {"data-bytes": str(found.bytes)}, el("b", amount(found.bytes)) if found.bytes else "0"),
        el("td.num wide", {"data-bytes": str(found.own_peak_bytes)}, amount(found.own_peak_bytes)),
        el("td.wide category", _categories(found)),
        el("td.num muted", str(line.number)),
        code,
    )


def _function(line: CodeLine) -> str:
    return line.found.function if line.found else ""


def _categories(found: SourceLine) -> str:
    """Name what most of a line's bytes are."""
    parts: Sequence[tuple[str, int]] = sorted(
        ((part.label.lower(), part.bytes) for part in category_parts(found.categories)), key=lambda part: -part[1]
    )
    words = [f"{label} {percent(n, found.bytes)}" if len(parts) > 1 else label for label, n in parts[:_NAMED]]
    return ", ".join(words) + (", ..." if len(parts) > _NAMED else "")


def _words(found: SourceLine) -> str:
    n = found.count
    count = f"{thousands(n)} allocation{'' if n == 1 else 's'}"
    return f"{found.function}: {amount(found.bytes)} in {count}; peak of this line {amount(found.own_peak_bytes)}"

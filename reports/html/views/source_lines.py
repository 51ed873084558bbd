"""Lay out the program's own files: the lines that allocate, each with its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from memprof.analysis.source_files import SourceText, by_file, mismatch
from memprof.report import Report
from memprof.report.allocations import SourceLine

# Lines shown above and below each that allocates.
_AROUND = 2
_MOST_FILES = 12


class CodeLine(NamedTuple):
    """A line of a file; ``text`` is ``None`` if the source is not known, ``found`` if it allocates nothing."""

    number: int
    text: str | None
    found: SourceLine | None


class SourceView(NamedTuple):
    """A file's lines in stretches. ``bytes`` are those of the peak; ``remark`` says what is wrong with its text."""

    path: str
    bytes: int
    remark: str
    stretches: tuple[tuple[CodeLine, ...], ...]


class Sources(NamedTuple):
    """The files that allocated most of the peak.

    ``bytes`` are those of all the program's lines, ``other_files`` is the number of files left out.
    """

    files: tuple[SourceView, ...]
    bytes: int
    other_files: int

    def text_of(self, file: str, number: int) -> str:
        """Return a line that is shown, without its indentation; "" for others."""
        for view in self.files:
            if view.path == file:
                lines = (line for stretch in view.stretches for line in stretch)
                return next((line.text.strip() for line in lines if line.number == number and line.text), "")
        return ""


def sources_of(report: Report, texts: Mapping[str, SourceText]) -> Sources | None:
    """Lay out the program's lines; None if no stack names one."""
    if not report.source_lines:
        return None
    files = by_file(report.source_lines)
    order = sorted(files, key=lambda file: -sum(line.bytes for line in files[file]))
    views = tuple(_view(file, files[file], texts.get(file)) for file in order[:_MOST_FILES])
    return Sources(views, sum(line.bytes for line in report.source_lines), len(order) - len(views))


def _view(file: str, lines: Sequence[SourceLine], text: SourceText | None) -> SourceView:
    remark, shown = "Its source is not known: --source DIR shows the code from a folder.", None
    if text is not None and not (remark := mismatch(text, lines)):
        remark, shown = text.doubt, text.lines
        if text.cut and lines[-1].line > len(text.lines):
            remark = f"Only its first {len(text.lines)} lines were recorded."
    return SourceView(file, sum(line.bytes for line in lines), remark, tuple(_stretches(lines, shown)))


def _stretches(lines: Sequence[SourceLine], text: Sequence[str] | None) -> list[tuple[CodeLine, ...]]:
    """Show each line that allocates with its neighbours; what is close to each other is one stretch."""
    if text is None:
        return [tuple(CodeLine(line.line, None, line) for line in lines)]
    found = {line.line: line for line in lines}
    shown: set[int] = set(found)
    for number in found:
        shown.update(n for n in range(number - _AROUND, number + _AROUND + 1) if 0 < n <= len(text))
    stretches: list[list[CodeLine]] = []
    for number in sorted(shown):
        line = CodeLine(number, text[number - 1] if 0 < number <= len(text) else None, found.get(number))
        if stretches and stretches[-1][-1].number == number - 1:
            stretches[-1].append(line)
        else:
            stretches.append([line])
    return [tuple(_trimmed(stretch)) for stretch in stretches]


def _trimmed(stretch: list[CodeLine]) -> list[CodeLine]:
    """Leave out empty lines at both ends."""
    full = [i for i, line in enumerate(stretch) if line.found or (line.text or "").strip()]
    return stretch[full[0] : full[-1] + 1]

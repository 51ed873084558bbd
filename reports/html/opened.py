"""Collect what a reader can open: allocations and growth with their whole stacks, each named by a short reference."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from memprof.reports.document.model import AllocationRow, Document
from memprof.reports.document.tables import call_site, site_words
from memprof.reports.document.text import category_label, phase_label, size, thousands
from memprof.reports.html.elements import colour_class, what

from memprof.analysis.allocations.places import is_native, is_torch
from memprof.analysis.source_files import mismatch
from memprof.frame_paths import text_path
from memprof.report.allocations import SourceLine
from memprof.report.peaks import Growth
from memprof.report.run import LeftBehind
from memprof.units import amount

_Entry = AllocationRow | Growth | LeftBehind
_PLACE = re.compile(r"(.*):(\d+)(?: |$)", re.DOTALL)
_LONGEST = 200


def _lines_of(document: Document, file: str) -> list[SourceLine]:
    return [line for line in document.report.source_lines if line.file == file]


class Opened:
    """Record which of a document's entries can be opened. A reference is ``run:place``."""

    def __init__(self, document: Document, run: int = 0) -> None:
        left = document.report.growth.left_behind if document.report.growth else ()
        entries: list[_Entry] = [*document.openable, *document.elsewhere, *document.grown_by, *left]
        self._references = {id(entry): f"{run}:{place}" for place, entry in enumerate(entries)}
        # An allocation over time is the entry of the same kind that a table or the icicle shows.
        known = {_kind(row): self._references[id(row)] for row in (*document.elsewhere, *document.openable)}
        for row in document.individuals.rows if document.individuals else ():
            reference = known.get(_kind(row))
            if reference is None:
                reference = f"{run}:{len(entries)}"
                entries.append(row)
            self._references[id(row)] = reference
        self.entries: tuple[_Entry, ...] = tuple(entries)
        texts = document.texts.items()
        self._texts = {file: text for file, text in texts if not mismatch(text, _lines_of(document, file))}

    def code(self, frame: str) -> str:
        """Return the line of code of a frame, without its indentation; "" if the source is not known."""
        place = _PLACE.match(frame)
        text = self._texts.get(place[1]) if place else None
        number = int(place[2]) if place else 0
        return text.lines[number - 1].strip()[:_LONGEST] if text and 0 < number <= len(text.lines) else ""

    def __call__(self, entry: _Entry | None) -> str | None:
        """Return the reference of an entry; None where it cannot be opened."""
        return self._references.get(id(entry)) if entry is not None else None


def _kind(row: AllocationRow) -> tuple[object, ...]:
    """Return what alike allocations share; of their names all but the numbers."""
    group = row.group
    name = re.sub(r"\d+|\*", "#", group.name or "")
    return group.category, group.detail, group.each_bytes, group.phase, group.evidence, name, row.shape, group.stack


class OpenedEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry as the page's script reads it; ``stack`` are numbers of frames."""

    what: str
    colour: str | None = None
    label: str | None = None
    size: str | None = None
    evidence: str | None = None
    about: tuple[str, ...]
    stack: tuple[int, ...]


class OpenedData(msgspec.Struct, frozen=True, kw_only=True):
    """All runs' entries; every frame is written once.

    ``native`` lists the frames of C++, ``library`` those of Python that are not the program's own, ``code`` the
    program's lines.
    """

    entries: tuple[tuple[OpenedEntry, ...], ...]
    frames: tuple[str, ...]
    native: tuple[int, ...]
    library: tuple[int, ...]
    code: dict[int, str] = {}


def opened_data(runs: Sequence[Opened]) -> OpenedData:
    """Write all runs' entries for the page's script."""
    frames: dict[str, int] = {}
    entries = tuple(tuple(_written(entry, frames) for entry in run.entries) for run in runs)
    native = tuple(number for frame, number in frames.items() if is_native(frame))
    library = tuple(n for frame, n in frames.items() if not is_native(frame) and _is_library(frame))
    lines = {number: [run.code(frame) for run in runs] for frame, number in frames.items()}
    code = {number: next(filter(None, found)) for number, found in lines.items() if any(found)}
    return OpenedData(entries=entries, frames=tuple(frames), native=native, library=library, code=code)


def _is_library(frame: str) -> bool:
    """Tell whether a Python frame is of an installed package or of the interpreter."""
    return text_path(frame).rooted or is_torch(frame)


def _written(entry: _Entry, frames: dict[str, int]) -> OpenedEntry:
    whole = entry.group.stack if isinstance(entry, AllocationRow) else entry.stack
    stack = tuple(frames.setdefault(frame, len(frames)) for frame in whole)
    if isinstance(entry, Growth):
        phase = phase_label(entry.phase) if entry.phase else "no known phase"
        words = f"the allocator reserved {amount(entry.bytes)} more of the GPU's memory here, in {phase}"
        return OpenedEntry(what=site_words(call_site(whole), whole), about=(words,), stack=stack)
    colour = colour_class(entry.category)
    if isinstance(entry, LeftBehind):
        words = f"{size(entry.bytes)} left behind in {entry.steps} steps"
        held = f"owned by {', '.join(entry.held_by)}" if entry.held_by else "the object that owns it is unknown"
        return OpenedEntry(
            what=site_words(call_site(whole), whole), colour=colour, label=category_label(entry.category),
            about=(words, held), stack=stack,
        )  # fmt: skip
    return OpenedEntry(
        what=what(entry),
        colour=colour,
        label=entry.label + (f", {entry.detail}" if entry.detail else ""),
        size=amount(entry.bytes),
        evidence=entry.group.evidence,
        about=(entry.why, particulars(entry)),
        stack=stack,
    )


def particulars(allocation: AllocationRow) -> str:
    """Say how many blocks there are, where and when they lived, and what holds them."""
    group = allocation.group
    each = f"{thousands(group.count)} blocks of {amount(group.each_bytes)} each, the first at "
    many = each if group.count > 1 else "at "
    shape = f"{allocation.shape}, " if allocation.shape else ""
    made = f", made in {allocation.phase_label.lower()}" if allocation.phase_label else ""
    outlives = "; outlives the step or phase that made it" if group.retained else ""
    held = f"; owned by {', '.join(group.held_by)}" if group.held_by else ""
    return f"{shape}{many}{allocation.address}{made}, alive {allocation.lifetime}{outlives}{held}"

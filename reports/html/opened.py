"""Collect what a reader can open: allocations and growth with their whole stacks, each named by a short reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memprof.reports.document.model import Allocation, Document, Growth, Leftover
from memprof.reports.document.tables import site_words
from memprof.reports.document.text import size, thousands
from memprof.reports.html.elements import colour_class, what

from memprof.analysis.allocations.places import is_native
from memprof.units import amount

_Entry = Allocation | Growth | Leftover


class Opened:
    """Record which of a document's entries can be opened. A reference is ``run:place``."""

    def __init__(self, document: Document, run: int = 0) -> None:
        grown = document.device_peak.grown_by if document.device_peak else ()
        left = document.steps.left_behind if document.steps else ()
        self.entries: tuple[_Entry, ...] = (*document.openable, *document.elsewhere, *grown, *left)
        self._references = {id(entry): f"{run}:{place}" for place, entry in enumerate(self.entries)}

    def __call__(self, entry: _Entry | None) -> str | None:
        """Return the reference of an entry; None where it cannot be opened."""
        return self._references.get(id(entry)) if entry is not None else None


def opened_data(runs: Sequence[Opened]) -> dict[str, Any]:
    """Write all runs' entries for the page's script; every frame is written once, ``native`` lists those of C++."""
    frames: dict[str, int] = {}
    entries = []
    for run in runs:
        entries.append([_written(entry, frames) for entry in run.entries])
    native = [number for frame, number in frames.items() if is_native(frame)]
    return {"entries": entries, "frames": list(frames), "native": native}


def _written(entry: _Entry, frames: dict[str, int]) -> dict[str, Any]:
    stack = [frames.setdefault(frame, len(frames)) for frame in entry.whole_stack]
    if isinstance(entry, Growth):
        words = (
            f"made the allocator take {amount(entry.bytes)} more from the device, in {entry.phase or 'no known phase'}"
        )
        return {"what": site_words(entry.site, entry.whole_stack), "about": [words], "stack": stack}
    colour = colour_class(entry.category)
    if isinstance(entry, Leftover):
        words = f"{size(entry.bytes)} left behind in {entry.steps} steps"
        held = f"held by {', '.join(entry.held_by)}" if entry.held_by else "what holds it is not known"
        return {
            "what": site_words(entry.site, entry.whole_stack), "colour": colour, "label": entry.category_label,
            "about": [words, held], "stack": stack,
        }  # fmt: skip
    return {
        "what": what(entry),
        "colour": colour,
        "label": entry.category_label + (f", {entry.detail}" if entry.detail else ""),
        "size": amount(entry.bytes),
        "evidence": entry.evidence,
        "about": [entry.why, particulars(entry)],
        "stack": stack,
    }


def particulars(allocation: Allocation) -> str:
    """Say how many blocks there are, where and when they lived, and what holds them."""
    many = (
        f"{thousands(allocation.count)} blocks of {size(allocation.each_bytes)} each, the first at "
        if allocation.count > 1
        else "at "
    )
    shape = f"{allocation.shape}, " if allocation.shape else ""
    made = f", made in {allocation.phase_label.lower()}" if allocation.phase_label else ""
    outlives = "; outlives the step or phase that made it" if allocation.retained else ""
    held = f"; held by {', '.join(allocation.held_by)}" if allocation.held_by else ""
    return f"{shape}{many}{allocation.address}{made}, alive {allocation.lifetime}{outlives}{held}"

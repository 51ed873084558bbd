"""Draw ``memprof explain`` for a terminal: each allocation, how its category is known, its stack."""

from __future__ import annotations

from collections.abc import Sequence

from memprof.reports.document.model import Allocation
from memprof.reports.document.tables import fold_shared
from memprof.reports.document.text import gib, short_path, size, thousands
from memprof.reports.terminal.elements import swatch
from memprof.reports.terminal.screen import console_of, text_of

__all__ = ["render_allocations"]


def render_allocations(allocations: Sequence[Allocation], width: int = 100, colour: bool = False) -> str:
    """Render every allocation with its evidence and its stack; frames that all stacks share stand once, above."""
    from rich.text import Text

    console = console_of(width, colour)
    shared, allocations = fold_shared(allocations)
    for line in ("All share:", *(f"      {_shortened(frame, width - 6)}" for frame in shared)) if shared else ():
        console.print(Text(line), no_wrap=True, overflow="ellipsis")
    for allocation in allocations:
        head = Text.assemble(swatch(allocation.category, colour), " ", (f"{gib(allocation.bytes)} GiB", "bold"))
        label = allocation.category_label + (f" / {allocation.detail}" if allocation.detail else "")
        if allocation.count > 1:
            head.append(f" in {thousands(allocation.count)} blocks of {size(allocation.each_bytes)}")
        head.append(f"  {label}  {allocation.address}  {allocation.phase_label}, alive {allocation.lifetime}")
        console.print(head)
        what = "  ".join(w for w in (allocation.name, allocation.shape) if w)
        if what:
            console.print(Text(f"    {what}"))
        retained = "; outlives the step or phase that made it" if allocation.retained else ""
        retained += f"; held by {', '.join(allocation.held_by)}" if allocation.held_by else ""
        console.print(Text(f"    {allocation.evidence}: {allocation.why}{retained}", style="dim"))
        for frame in allocation.stack:
            console.print(Text(f"      {_shortened(frame, width - 6)}"), no_wrap=True, overflow="ellipsis")
    return text_of(console)


def _shortened(frame: str, room: int) -> str:
    """Leave out the beginning of a path that is too long: the line and the function are what a reader looks for."""
    for keep in range(frame.count("/"), 0, -1) if len(frame) > room else ():
        if len(short := f"…/{short_path(frame, keep)}") <= room:
            return short
    return frame

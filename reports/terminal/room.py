"""Draw how far a run was from out of memory: one bar, with a mark where the card ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.reports.document.model import Room
from memprof.reports.terminal.elements import draw_bar, legend, mark_capacity

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_room"]


def print_room(console: Console, room: Room, colour: bool, drawn: bool = True) -> None:
    """Print the sentence and, where it is to be drawn, the bar as wide as the console and what its parts are."""
    from rich.text import Text

    width = console.width - 1
    console.print(Text.assemble(("How far from out of memory: ", "bold"), room.sentence))
    if not drawn:
        return
    bar = draw_bar(room.parts, room.scale_bytes, width, colour)
    mark_capacity(bar, room.capacity_bytes, room.scale_bytes, width)
    console.print(bar)
    for line in legend(room.parts, width, colour):
        console.print(line)

"""Find what a terminal can show: its width, its colours, its characters."""

from __future__ import annotations

import os
from io import StringIO
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 100
# Stand-ins where the encoding is not Unicode.
_ASCII = str.maketrans("×·–−µ█■›³⁰¦▁▂▃▄▅▆▇", "x---u##>30|_.-:=+*") | str.maketrans({"…": "..."})


def abilities(stream: TextIO) -> tuple[int, bool]:
    """Return ``(columns, colour)`` of a stream; a pipe gets 100 columns unless ``COLUMNS`` says otherwise."""
    from rich.console import Console

    probe = Console(file=stream)
    width = probe.width if probe.is_terminal or "COLUMNS" in os.environ else _PIPE_WIDTH
    return width, probe.color_system is not None and not probe.no_color


def write_to(stream: TextIO, text: str) -> None:
    """Write text, with ASCII stand-ins and question marks for what the stream's encoding lacks."""
    stream.write(writable(text, stream))
    stream.flush()


def writable(text: str, stream: TextIO) -> str:
    """Return the text with stand-ins for what the stream's encoding lacks."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    if encoding.startswith("utf"):
        return text
    return text.translate(_ASCII).encode(encoding, "replace").decode(encoding)


def console_of(width: int, colour: bool) -> Console:
    """Return a console that collects text, ``width`` columns wide."""
    from rich.console import Console

    return Console(
        file=StringIO(),
        width=width,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
    )


def text_of(console: Console) -> str:
    """Return what a console of :func:`console_of` collected, without spaces at the ends of lines."""
    stream = console.file
    assert isinstance(stream, StringIO)
    return "\n".join(line.rstrip() for line in stream.getvalue().split("\n"))

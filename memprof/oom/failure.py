"""One failure found in a text, before it is explained."""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.oom.message_form import Form


@dataclass(frozen=True)
class TracebackFrame:
    """One frame of a pasted traceback; ``line`` is 0 and ``code`` empty where the paste does not tell."""

    path: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True)
class Failure:
    """One failure. Sizes are bytes, None where the message does not say.

    ``kind`` is ``device`` (torch's own message), ``driver``, ``library``, ``cpu``, ``host``, ``killed`` or ``engine``;
    ``processes`` are (process id, bytes in use) of those that are not said to be this one; ``frames`` of the
    traceback around it, outermost first; ``facts`` what else its form reads, by name;
    ``actor`` the process of Ray's or an engine's that a log names before the line, with its process id;
    ``around`` the lines around it, ``around_lines`` their numbers, ``head`` the log's first lines.
    """

    form: Form = field(repr=False)
    kind: str
    backend: str
    line: int
    text: str
    rank: int | None = None
    actor: str = ""
    device: int | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    in_use: int | None = None
    allocated: int | None = None
    private_pools: int | None = None
    unallocated: int | None = None
    reserved: int | None = None
    other: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    frames: tuple[TracebackFrame, ...] = field(default=(), repr=False)
    facts: dict[str, int | float | str] = field(default_factory=dict)
    around: str = field(default="", repr=False)
    around_lines: tuple[int, ...] = field(default=(), repr=False)
    head: str = field(default="", repr=False)

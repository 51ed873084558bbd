"""Define a form: one way a program words that memory ran out, and what can be read from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from memprof.oom.reading.sizes import SIZE

_MACRO = re.compile(r"\{(size|tight|int|num|word):(\w+)\}")
_WHAT = {
    "size": SIZE,
    "tight": r"\d[\d,]{0,24}(?:\.\d{1,9})?[kmgt]i?b?",
    "int": r"\d{1,19}",
    "num": r"\d[\d,]{0,24}(?:\.\d{1,20})?",
    "word": r"[\w./:@-]{1,90}?",
}


@dataclass(frozen=True)
class Form:
    """One wording.

    Attributes:
        id: a unique name, ``vllm.free_below_share``.
        kind: ``device``, ``driver``, ``library``, ``cpu``, ``host``, ``killed``, ``engine`` or ``not_memory``.
        program: whose message it is, as a reader knows it.
        pattern: matched against text in lower case without any white space, so that a line broken anywhere still fits.
        backend: ``CUDA``, ``HIP``, ...; empty where the message does not concern one.
        event: forms of one event that stand near each other count once; the earliest in the list of forms leads.
        absorbs: kinds whose messages directly before this one belong to the same failure.
        line_start: the match has to begin a line, and to end with a word of that line.
        whole_line: the match has to be all of a line.
        weak: a guess that counts only where nothing else was found.
        phase: what the program was doing whenever it words it so, where no frames tell.
        types: the type (``size``, ``int``, ``num``, ``word``) of each named group.
        frames: it counts only where this is found in one of the innermost frames (``path:function code``).
        asked_by: a driver's bare words are this form's where this is found in one of the innermost frames.
        says: of a text that is not about memory: what it is about.
    """

    id: str
    kind: str
    program: str
    pattern: re.Pattern[str]
    backend: str = ""
    event: str = ""
    absorbs: tuple[str, ...] = ()
    line_start: bool = False
    whole_line: bool = False
    weak: bool = False
    phase: str = ""
    types: dict[str, str] = field(default_factory=dict)
    frames: re.Pattern[str] | None = None
    asked_by: re.Pattern[str] | None = None
    says: str = ""


def form(id: str, kind: str, program: str, words: str, *, frames: str = "", asked_by: str = "", **more: Any) -> Form:
    """Make a form from ``words``: a regular expression in lower case whose spaces stand for any white space or none.

    ``{size:free}`` reads ``5.06 MiB`` as ``free`` (``{tight:free}`` where a word follows ``58.64M``),
    ``{int:pid}`` a whole number, ``{num:share}`` any number, ``{word:node}`` a name.
    ``more`` are other fields.
    """
    squeezed = words.replace(" ?", "").replace(" ", "")
    types = {name: kind_of for kind_of, name in _MACRO.findall(squeezed)}
    source = _MACRO.sub(lambda m: f"(?P<{m.group(2)}>{_WHAT[m.group(1)]})", squeezed)
    return Form(
        id, kind, program, re.compile(source), types=types,
        frames=re.compile(frames) if frames else None, asked_by=re.compile(asked_by) if asked_by else None,
        **{"event": id, **more},
    )  # fmt: skip

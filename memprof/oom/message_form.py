"""Define a form: one way a program words that memory ran out, and what can be read from it."""

from __future__ import annotations

import re
from functools import cached_property

import msgspec

from memprof.oom.reading.sizes import SIZE

_MACRO = re.compile(r"\{(size|tight|int|num|word):(\w+)\}")
_WHAT = {
    "size": SIZE,
    "tight": r"\d[\d,]{0,24}(?:\.\d{1,9})?[kmgt]i?b?",
    "int": r"\d{1,19}",
    "num": r"\d[\d,]{0,24}(?:\.\d{1,20})?",
    "word": r"[\w./:@-]{1,90}?",
}


class Form(msgspec.Struct, kw_only=True, dict=True, forbid_unknown_fields=True):
    """One wording, as an entry of the knowledge files states it.

    Attributes:
        id: a unique name, ``vllm.free_below_share``.
        words: a regular expression in lower case whose spaces stand for any white space or none. ``{size:free}`` reads
            ``5.06 MiB`` as ``free`` (``{tight:free}`` where a word follows ``58.64M``), ``{int:pid}`` a whole number,
            ``{num:share}`` any number, ``{word:node}`` a name.
        kind: ``device``, ``driver``, ``library``, ``cpu``, ``host``, ``killed``, ``engine`` or ``not_memory``.
        program: whose message it is, as a reader knows it.
        backend: ``CUDA``, ``HIP``, ...; empty where the message does not concern one.
        event: forms of one event that stand near each other count once; the earliest in the list of forms leads.
        absorbs: kinds whose messages directly before this one belong to the same failure.
        line_start: the match has to begin a line, and to end with a word of that line.
        whole_line: the match has to be all of a line.
        weak: a guess that counts only where nothing else was found.
        symptom: it shows that a process ended, not what ended it: a message of the text that does replaces it.
        phase: what the program was doing whenever it words it so, where no frames tell.
        frames: it counts only where this is found in one of the innermost frames (``path:function code``).
        asked_by: a driver's bare words are this form's where this is found in one of the innermost frames.
        says: of a text that is not about memory: what it is about.
        source, example, expect: where the wording is from, one as printed, and what is read from it (tests, docs).
    """

    id: str
    words: str
    kind: str = "not_memory"
    program: str = ""
    backend: str = ""
    event: str = ""
    absorbs: tuple[str, ...] = ()
    line_start: bool = False
    whole_line: bool = False
    weak: bool = False
    symptom: bool = False
    phase: str = ""
    frames: str = ""
    asked_by: str = ""
    says: str = ""
    source: str = ""
    example: str = ""
    expect: dict[str, int | float | str] = {}

    def __post_init__(self) -> None:
        self.event = self.event or self.id

    @cached_property
    def types(self) -> dict[str, str]:
        """Return the type (``size``, ``int``, ``num``, ``word``) of each named group."""
        return {name: kind for kind, name in _MACRO.findall(self.words)}

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return what is matched against text in lower case without white space, so that a broken line still fits."""
        squeezed = self.words.replace(" ?", "").replace(" ", "")
        return re.compile(_MACRO.sub(lambda m: f"(?P<{m.group(2)}>{_WHAT[m.group(1)]})", squeezed))

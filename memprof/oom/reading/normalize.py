"""Straighten text as people paste it: remove colours, HTML, log prefixes, boxes, quotes and line breaks.

A region of a log becomes streams, one for each rank or process whose lines are tagged, so that the interleaved output
of several ranks reads as several texts. A stream keeps its lines (for tracebacks and for showing a message) and one
``squeezed`` string, lower case without white space, in which a message is whole however its lines were broken.
"""

from __future__ import annotations

import html
import json
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import itemgetter

from memprof.oom.knowledge_files import typed

_MARKS = {name: re.compile(pattern) for name, pattern in typed("log_lines", "marks", dict[str, str]).items()}
_ANSI, _TAG, _BREAK, _RULE, _BOX_END, _RIGHT_EDGE, _REPEATED, _ESCAPED = itemgetter(
    "ansi", "tag", "break", "rule", "box_end", "right_edge", "repeated", "escaped"
)(_MARKS)
_PREFIXES = "|".join(typed("log_lines", "prefixes", tuple[str, ...]))
_PREFIX = re.compile(rf"[ \t]{{0,400}}(?:{_PREFIXES.replace('{level}', typed('log_lines', 'level', str))})")
_JSON_KEYS = typed("log_lines", "json_keys", tuple[str, ...])
_ESCAPE = re.compile(r"\\([\\\"/nrt])")
_UNESCAPED = {"n": "\n", "r": "", "t": "\t"}
_MOST_LEVELS = 4
_MOST_ATOMS = 8
_LONGEST_LINE = 2_000


@dataclass(frozen=True)
class LogLine:
    """One line with its number in the log (from 1), who wrote it, and its text without prefixes.

    ``actor`` is the name that Ray or an engine gives the process: ``WorkerDict``.
    """

    number: int
    who: str
    rank: int | None
    text: str
    actor: str = ""


@dataclass
class Stream:
    """The lines of one rank or process of a region, in order."""

    lines: list[LogLine]
    squeezed: str = field(default="", init=False)
    starts: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        parts, at = [], 0
        for line in self.lines:
            self.starts.append(at)
            parts.append(_squeeze(line.text))
            at += len(parts[-1])
        self.squeezed = "".join(parts)

    @cached_property
    def ranks(self) -> frozenset[int]:
        """Return the ranks that lines of this stream are tagged with."""
        return frozenset(line.rank for line in self.lines if line.rank is not None)

    def begins_word(self, position: int) -> bool:
        """Say whether a word begins at ``position``: after white space, a mark or the line's start."""
        index = self.index_at(position)
        at = self.starts[index]
        for part in self.lines[index].text.split():
            if position < at + len(part):
                return position == at or not part[position - at - 1].isalnum()
            at += len(part)
        return True

    def index_at(self, position: int) -> int:
        """Return the index of the line that a position of ``squeezed`` falls into."""
        return max(0, bisect_right(self.starts, position) - 1)

    def shown(self, start: int, stop: int) -> str:
        """Return the text of ``squeezed[start:stop]`` with its spaces, on one line."""
        first, last = self.index_at(start), self.index_at(max(start, stop - 1))
        parts = []
        for i in range(first, last + 1):
            text = self.lines[i].text
            lo = _unsqueezed(text, start - self.starts[i]) if i == first else 0
            hi = _unsqueezed(text, stop - self.starts[i]) if i == last else len(text)
            parts.append(text[lo:hi])
        return _join(parts)


def streams_of(text: str, first_line: int) -> list[Stream]:
    """Straighten a region of a log, whole lines from ``first_line`` on, and part it into streams."""
    lines = [line for i, raw in enumerate(text.split("\n")) for line in _lines_of(raw, first_line + i)]
    if len({line.who for line in lines if line.who}) < 2:
        return [Stream(lines)]
    parted: dict[str, list[LogLine]] = {}
    last = ""
    for line in lines:
        last = line.who or last  # a line without a tag goes on with the one above
        parted.setdefault(last, []).append(line)
    return [Stream(part) for part in parted.values()]


def _lines_of(raw: str, number: int) -> list[LogLine]:
    if raw[:1] == "{" and raw.rstrip()[-1:] == "}":
        raw = _of_json(raw)
    for _ in range(_MOST_LEVELS):
        if _ESCAPED.search(raw) is None:
            break
        raw = _ESCAPE.sub(lambda match: _UNESCAPED.get(match[1], match[1]), raw)
    if 'File ""' in raw:  # a field of CSV doubles its quotes
        raw = raw.replace('""', '"')
    if "\x1b" in raw or "\\u001b" in raw or "\\x1b" in raw or "\\033" in raw:
        raw = _ANSI.sub("", raw)
    if "<" in raw and ">" in raw:
        raw = html.unescape(_TAG.sub("", _BREAK.sub("\n", raw)))
    elif "&" in raw and ";" in raw:
        raw = html.unescape(raw)
    parts = raw.split("\n")
    pieces = (part[i : i + _LONGEST_LINE] for part in parts for i in range(0, max(1, len(part)), _LONGEST_LINE))
    return [_line(piece, number) for piece in pieces]


def _of_json(raw: str) -> str:
    """Return what a logger's JSON object says, line by line; the line as it stands where it is none."""
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    rank = next((entry[key] for key in ("rank", "local_rank") if isinstance(entry.get(key), int)), None)
    said = [text for key in _JSON_KEYS for text in [entry.get(key)] if isinstance(text, str) and text]
    # Texts that are all further inside are read as they stand, without the brace that would lead here again.
    text = "\n".join(said or [v for v in entry.values() if isinstance(v, str) and " " in v]) or raw[1:]
    tag = "" if rank is None or isinstance(rank, bool) else f"[rank{rank}]: "
    return "\n".join(f"{tag}{_of_json(line) if line[:1] == '{' else line}" for line in text.rstrip("\n").split("\n"))


def _line(raw: str, number: int) -> LogLine:
    who, rank, actor, at = "", None, "", 0
    for _ in range(_MOST_ATOMS):
        match = _PREFIX.match(raw, at)
        if match is None or match.end() == at:
            break
        at = match.end()
        tag, of_rank = _tag(match)
        who, rank = tag or who, of_rank if of_rank is not None else rank
        actor = match["actor"] or actor
    text = raw[at:]
    if raw[at - 1 : at] == '"' == text[-1:]:  # a field of CSV
        text = text[:-1]
    if text[-1:] in "│┃║" or "│" in text[-3:]:
        text = _BOX_END.sub("", text)
    if text[:1] in "╭╮╰╯─━═┌┐└┘├┤╔╗╚╝+-=" and _RULE.match(text):
        text = ""
    if ".py:" in text[-80:]:
        text = _RIGHT_EDGE.sub("", text)
    if "x across cluster]" in text:
        text = _REPEATED.sub("", text)
    return LogLine(number, who, rank, text.rstrip(), actor)


def _tag(match: re.Match[str]) -> tuple[str, int | None]:
    """Return who wrote a line, and as which rank, from one part of its prefix."""
    groups = match.groupdict()
    for name in ("rank", "mpi", "srun"):
        if groups[name] is not None:
            return f"rank {groups[name]}", int(groups[name])
    said = groups["actor"] or groups["tags"] or ""
    tensor_parallel = re.search(r"(?<![A-Za-z])TP(\d{1,4})\b", said)
    rank = groups["arank"] or (tensor_parallel[1] if tensor_parallel else None)
    who = f"pid {groups['pid']}" if groups["actor"] is not None else said.strip()
    return who, int(rank) if rank is not None else None


def _squeeze(text: str) -> str:
    packed = "".join(text.split())
    lowered = packed.lower()
    if len(lowered) == len(packed):
        return lowered
    return "".join(c.lower() if len(c.lower()) == 1 else c for c in packed)


def _unsqueezed(text: str, count: int) -> int:
    """Return the index in ``text`` of its ``count``-th character that is no white space."""
    ends = (i + 1 for i, char in enumerate(text) if not char.isspace())
    return 0 if count <= 0 else next(islice(ends, count - 1, None), len(text))


# Words of these messages: two halves of one at a line's end were broken by a terminal, not by the author.
_WORDS = typed("torch", "broken_words", frozenset[str])


def _join(parts: list[str]) -> str:
    joined = ""
    for part in parts:
        stripped = part.strip()
        head, tail = joined.rsplit(" ", 1)[-1], stripped.split(" ", 1)[0]
        number = re.search(r"\d\n\.\d|\.\d\n\d", f"{head}\n{tail}")  # ``20`` and ``.00``, ``20.0`` and ``0``
        broken = number or (head + tail).lower().strip(".,:;()") in _WORDS
        joined += stripped if not joined or broken else f" {stripped}"
    return " ".join(joined.split())

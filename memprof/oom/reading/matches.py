"""Every match of every form in one stream, without the ones that do not count."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from memprof.oom.knowledge_files import typed
from memprof.oom.known_messages import DEVICE_FORMS, FORMS
from memprof.oom.message_form import Form
from memprof.oom.reading.fields import messages_in
from memprof.oom.reading.normalize import Stream
from memprof.oom.reading.sizes import bytes_of

_CODE, _QUOTED, _HUNK, _IN_HUNK, _FRAME = (
    re.compile(pattern) for pattern in typed("log_lines", "source", dict[str, str]).values()
)


@dataclass
class Hit:
    """One match of one form: where it stands in the squeezed text and in which lines, and what it says."""

    start: int
    stop: int
    form: Form
    line: int
    last_line: int
    values: dict[str, int | float | str] = field(default_factory=dict)
    processes: tuple[tuple[int, int], ...] = ()
    backend: str = ""


def hits_in(stream: Stream) -> list[Hit]:
    """Return the matches that count, in order: each once, none inside another or in a line of code."""
    found = _without_overlaps(_each_once_a_line(stream, [*_form_hits(stream), *_device_hits(stream)]))
    found = _without_source_lines(stream, found)
    return [hit for hit in found if not hit.form.weak] or found[:1]


def _hit(stream: Stream, start: int, stop: int, form: Form, values: dict[str, int | float | str], backend: str) -> Hit:
    return Hit(start, stop, form, stream.index_at(start), stream.index_at(stop - 1), values, (), backend)


def _each_once_a_line(stream: Stream, hits: list[Hit]) -> list[Hit]:
    """Return the hits without those that say the same again in one line."""
    seen: dict[tuple[object, ...], Hit] = {}
    for hit in hits:
        seen.setdefault((hit.form.id, hit.line, stream.squeezed[hit.start : hit.stop]), hit)
    return list(seen.values())


def _form_hits(stream: Stream) -> Iterator[Hit]:
    text = stream.squeezed
    for form in (*FORMS, DEVICE_FORMS[-1]):
        for match in _matches(stream, form):
            if match.end() > match.start() and _stands(stream, form, match):
                stop = _stop(stream, form, match)
                found = {name: text[match.start(name) : min(match.end(name), stop)] for name in match.groupdict()}
                values = {name: _value(form, name, text_) for name, text_ in found.items() if text_}
                backend = str(values.pop("backend", "")).upper() or form.backend
                yield _hit(stream, match.start(), stop, form, values, backend)
                if form.weak:
                    break  # a guess counts once, if at all


def _matches(stream: Stream, form: Form) -> Iterator[re.Match[str]]:
    """Yield the matches of a form, only at the beginning of a line if it has to stand there."""
    if not (form.line_start or form.whole_line):
        yield from form.pattern.finditer(stream.squeezed)
        return
    for start in stream.starts:
        if (match := form.pattern.match(stream.squeezed, start)) is not None:
            yield match


def _stands(stream: Stream, form: Form, match: re.Match[str]) -> bool:
    """Say whether a match ends where its form has to end in its line."""
    if not (form.line_start or form.whole_line):
        return True
    i = stream.index_at(match.start())
    rest = stream.starts[i] + len("".join(stream.lines[i].text.split())) - match.end()
    if form.whole_line:
        return rest == 0
    after = stream.squeezed[match.end() : match.end() + 1] if rest > 0 else ""
    return rest >= 0 and not (after.isalnum() and form.pattern.pattern.endswith("error"))


def _stop(stream: Stream, form: Form, match: re.Match[str]) -> int:
    """Return where a match ends; a number that ends it ends with its line, and takes no digits of the next."""
    last = match.lastgroup
    if last is None or form.types.get(last) not in ("int", "num") or match.end(last) != match.end():
        return match.end()
    following = stream.index_at(match.start(last)) + 1
    return min(match.end(), stream.starts[following]) if following < len(stream.starts) else match.end()


def _value(form: Form, name: str, text: str) -> int | float | str:
    what = form.types.get(name)
    if what in ("size", "tight"):
        return bytes_of(text)
    if what == "int":
        return int(text)
    return float(text.replace(",", "")) if what == "num" else text


def _device_hits(stream: Stream) -> Iterator[Hit]:
    for message in messages_in(stream.squeezed):
        if message.form is DEVICE_FORMS[0] and not message.numbers and not stream.begins_word(message.start):
            continue
        values: dict[str, int | float | str] = dict(message.numbers)
        if message.device is not None:
            values["device"] = message.device
        backend = message.backend or _backend_near(stream, message.start)
        hit = _hit(stream, message.start, message.stop, message.form, values, backend)
        hit.processes = tuple(message.processes)
        yield hit


def _backend_near(stream: Stream, position: int) -> str:
    """Return the backend whose name stands before fields that do not say whose they are."""
    before = stream.squeezed[max(0, position - 300) : position + 400]
    for word, backend in (("hip", "HIP"), ("xpu", "XPU"), ("npu", "NPU"), ("mps", "MPS")):
        if f"{word}outofmemory" in before or f"torch.{word}" in before or f"{word}:" in before:
            return backend
    return "CUDA"


def _without_overlaps(hits: list[Hit]) -> list[Hit]:
    """Return the hits in order; of two that share words, the one whose form comes first in the list of forms."""
    order = {form.id: i for i, form in enumerate((*FORMS, *DEVICE_FORMS))}
    starts: list[int] = []
    kept: list[Hit] = []
    for hit in sorted(hits, key=lambda h: (order[h.form.id], h.start)):
        i = bisect_left(starts, hit.start)
        over = [other for other in kept[max(0, i - 1) : i + 1] if other.start < hit.stop and hit.start < other.stop]
        if over:
            if hit.form.kind == "device":  # another program's words around torch's own: its numbers count
                over[0].values = {**hit.values, **over[0].values}
                over[0].processes = over[0].processes or hit.processes
            continue
        starts.insert(i, hit.start)
        kept.insert(i, hit)
    return kept


def _without_source_lines(stream: Stream, hits: list[Hit]) -> list[Hit]:
    """Return the hits that a program printed: none in a diff, in ``grep``'s output or in source code.

    A traceback's line of code counts if the message itself was cut off.
    """
    hunks = _diff_lines(stream)
    hits = [hit for hit in hits if hit.line not in hunks and not _QUOTED.match(stream.lines[hit.line].text)]
    in_source = [_in_source(stream, hit) for hit in hits]
    events = {hit.form.event for hit, source in zip(hits, in_source, strict=True) if not source}
    return [
        hit
        for hit, source in zip(hits, in_source, strict=True)
        if not source or (hit.form.event not in events and (hit.values or _below_frame(stream, hit.line)))
    ]


def _diff_lines(stream: Stream) -> set[int]:
    """Return the indices of the lines that belong to hunks of a diff."""
    found: set[int] = set()
    for i, line in enumerate(stream.lines):
        if _HUNK.match(line.text) or (i - 1 in found and _IN_HUNK.match(line.text)):
            found.add(i)
    return found


def _below_frame(stream: Stream, index: int) -> bool:
    return any(_FRAME.search(line.text) for line in stream.lines[max(0, index - 8) : index])


def _in_source(stream: Stream, hit: Hit) -> bool:
    text = stream.lines[hit.line].text.strip()
    if _CODE.search(text) is None:
        return False
    before = text[: max(0, text.lower().find(stream.squeezed[hit.start : hit.start + 4]))]
    return "Error: " not in before or "raise " in before

"""Finding failures in a text: each once, whoever repeats it, with its numbers, its rank and its frames."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from memprof.oom.failure import Failure
from memprof.oom.fields import messages_in
from memprof.oom.form import Form
from memprof.oom.forms import DEVICE_FORMS, FORMS, NOT_MEMORY
from memprof.oom.frames import frames_around
from memprof.oom.sizes import bytes_of
from memprof.oom.unbend import Stream, streams_of

__all__ = ["Reading", "find_failures", "read_log"]

# A region of the log is read closely where one of these stands; they are searched for in lower case, one by one, which
# is ten times as fast as one expression of all of them. Words that ordinary log lines hold (memory, kv cache usage) are
# not among them.
_TRIGGERS = (
    "out of mem",
    "outofmem",
    "out_of_mem",
    "out_of_resource",
    "out_of_device",
    "outofresource",
    "out of resource",
    "oom_kill",
    "oom-kill",
    "oom kill",
    "oomkill",
    "oom when",
    "to allocate",
    "by pytorch",
    "total capac",
    "alloc_failed",
    "status_not_init",
    "cudamalloc",
    "memoryerror",
    "memoryallocation",
    "memory_error",
    "cache blocks",
    "kv cache is",
    "in kv cache",
    "gpu memory util",
    "memory profiling",
    "mem-fraction-static",
    "enough memory",
    "enough gpu",
    "memory_saver",
    "cumem_alloc",
    "expandable segments",
    "shared memory",
    "/dev/shm",
    "bus error",
    "paging file",
    " 1455",
    "allocate memory",
    "calloc",
    "buffer size",
    "insufficient memory",
    "memory capacity",
    "killed",
    "kill process",
    "sigkill",
    "signal 9",
    "9/kill",
    "137",
    "-9",
    "oom_reaper",
    "low on memory",
    "memory pressure",
    "memory usage threshold",
    "memory low",
    "object store",
    "objectstore",
    "pod memory",
    "worker exit",
    "low on resource",
    "session crashed",
    "abruptly",
    "memlimit",
    "memory limit",
    "exceeded limit",
    "swap space",
    "bad_alloc",
    "hostalloc",
    "mallochost",
    "memlock",
    "pinning memory",
    "cudnn algorithm",
    "engine to execute",
    "el0004",
    "207001",
    "swapping",
    "shared data",
    "illegal memory",
    "device-side",
    "no space left",
    "quota exceeded",
    "open files",
    "ancdata",
    "segmentation fault",
    "collective operation",
    "kernel appears to have died",
    "resources requested",
    "req_slots",
    "unbalanced",
    "graph failed",
    "dummy requests",
    "of the memory on node",
)
_SMALL = 150_000  # characters that are read closely whatever they hold: a broken line can hide every trigger
_BEFORE, _AFTER = 40_000, 8_000
# A log that speaks of memory everywhere: its head and tail are read, and a note says so.
_MOST = 800_000
_MOST_EVENTS = 200
_NEAR = 40  # lines between two signs of one event
_CHAIN = 400  # lines a chained traceback may be long
_LOOK_BACK = 60  # events
_SOURCE = re.compile(r"^(?:raise |except |assert |if |elif |return |logger\.|logging\.|print\(|f?[\"'`])|\braise \w+\(")
_LOG_RANK = re.compile(r"\brank[ =:]{1,2}(\d{1,5})\b|\[rank(\d{1,5})\]", re.I)
_NUMBERS = ("requested", "total", "free", "allowed", "allocated", "device", "rank")


@dataclass
class Reading:
    """What a text holds: failures, notes for the reader, and what it is about where memory did not run out."""

    failures: list[Failure]
    notes: list[str]
    elsewhere: list[Form]


@dataclass
class _Hit:
    """One match of one form in one stream."""

    start: int
    stop: int
    form: Form
    values: dict[str, int | float | str] = field(default_factory=dict)
    processes: tuple[tuple[int, int], ...] = ()
    backend: str = ""


def find_failures(log: str) -> list[Failure]:
    """Return every failure in ``log``, in its order; one that is told twice by one rank counts once."""
    return read_log(log).failures


def read_log(log: str) -> Reading:
    """Read a text of any length: failures, each once, and what else the reader should know."""
    text = log.replace("\r\n", "\n").replace("\r", "\n")
    notes: list[str] = []
    found: list[Failure] = []
    elsewhere: dict[str, Form] = {}
    for first_line, region in _regions(text, notes):
        for stream in streams_of(region, first_line):
            found += _of_stream(stream, notes)
            for form_ in NOT_MEMORY:
                if form_.pattern.search(stream.squeezed):
                    elsewhere.setdefault(form_.id, form_)
    found.sort(key=lambda failure: failure.line)
    return Reading(_once(found), notes, list(elsewhere.values()))


# ------------------------------------------------------------------------------------------ where to look


def _regions(text: str, notes: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (number of its first line, whole lines) around every place that may concern memory."""
    if len(text) <= _SMALL:
        yield 1, text
        return
    spans: list[tuple[int, int]] = []
    for at in _places(text.lower()):
        lo = text.rfind("\n", 0, max(0, at - _BEFORE)) + 1
        hi = text.find("\n", min(len(text), at + _AFTER))
        hi = len(text) if hi < 0 else hi
        if spans and lo <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(hi, spans[-1][1]))
        else:
            spans.append((lo, hi))
    kept = _within(spans, notes, text)
    line, at = 1, 0
    for lo, hi in kept:
        line += text.count("\n", at, lo)
        at = lo
        yield line, text[lo:hi]


def _places(lowered: str) -> list[int]:
    """Return where a trigger stands, in order, not more than one in a quarter of what is read after it."""
    places = []
    for word in _TRIGGERS:
        at = lowered.find(word)
        while at >= 0:
            places.append(at)
            at = lowered.find(word, at + _AFTER // 4)
    return sorted(places)


def _within(spans: list[tuple[int, int]], notes: list[str], text: str) -> list[tuple[int, int]]:
    """Return ``spans``, or only their first and last parts where they are too much to read closely."""
    if sum(hi - lo for lo, hi in spans) <= _MOST:
        return spans
    head, tail = _first(spans, _MOST // 2), _first([(-hi, -lo) for lo, hi in reversed(spans)], _MOST // 2)
    kept = head + [(-hi, -lo) for lo, hi in reversed(tail)]
    kept = [(text.rfind("\n", 0, lo) + 1, hi) for lo, hi in kept]
    skipped = sum(hi - lo for lo, hi in spans) - sum(hi - lo for lo, hi in kept)
    notes.append(
        f"This log speaks of memory almost everywhere; its first and last {_MOST / 2e6:.1f} MB were read closely "
        f"and {max(0, skipped) / 1e6:.1f} MB between them were not: cut out the part you mean to be sure."
    )
    return kept


def _first(spans: Iterable[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    kept = []
    for lo, hi in spans:
        if most <= 0:
            break
        kept.append((lo, min(hi, lo + most)))
        most -= kept[-1][1] - lo
    return kept


# --------------------------------------------------------------------------------------------- one stream


def _of_stream(stream: Stream, notes: list[str]) -> list[Failure]:
    hits = _without_overlaps(_each_once_a_line(stream, [*_form_hits(stream), *_device_hits(stream)]))
    hits = _without_weak(_without_source_lines(stream, hits))
    events = _events(stream, hits)
    bounds = [(stream.index_at(e.start), stream.index_at(e.stop - 1) + 1) for e in events]
    chosen = list(range(len(events)))
    if len(events) > _MOST_EVENTS:
        chosen = [*chosen[: _MOST_EVENTS // 2], *chosen[-_MOST_EVENTS // 2 :]]
        notes.append(
            f"Of {len(events)} failures in one part of the log the first and last {_MOST_EVENTS // 2} were read."
        )
    failures = []
    for i in chosen:
        floor = bounds[i - 1][1] if i else 0
        ceiling = bounds[i + 1][0] if i + 1 < len(events) else len(stream.lines)
        failures.append(_failure(stream, events[i], floor, ceiling))
    return failures


def _each_once_a_line(stream: Stream, hits: list[_Hit]) -> list[_Hit]:
    """Return the hits without those that say the same again in one line."""
    seen: dict[tuple[object, ...], _Hit] = {}
    for hit in hits:
        seen.setdefault((hit.form.id, stream.index_at(hit.start), stream.squeezed[hit.start : hit.stop]), hit)
    return list(seen.values())


def _form_hits(stream: Stream) -> Iterator[_Hit]:
    text = stream.squeezed
    for form in (*FORMS, DEVICE_FORMS[-1]):
        if form.hint and form.hint not in text:
            continue
        for match in form.pattern.finditer(text):
            if match.end() > match.start() and _stands(stream, form, match):
                values = {name: _value(form, name, text_) for name, text_ in match.groupdict().items() if text_}
                backend = str(values.pop("backend", "")).upper() or form.backend
                yield _Hit(match.start(), match.end(), form, values, (), backend)


def _stands(stream: Stream, form: Form, match: re.Match[str]) -> bool:
    """Say whether a match stands where its form has to stand in its line."""
    if not (form.line_start or form.whole_line):
        return True
    if not stream.begins_line(match.start()):
        return False
    i = stream.index_at(match.start())
    rest = stream.starts[i] + len("".join(stream.lines[i].text.split())) - match.end()
    if form.whole_line:
        return rest == 0
    after = stream.squeezed[match.end() : match.end() + 1] if rest > 0 else ""
    return rest >= 0 and not (after.isalnum() and form.pattern.pattern.endswith("error"))


def _value(form: Form, name: str, text: str) -> int | float | str:
    what = form.types.get(name)
    if what == "size":
        return bytes_of(text)
    if what == "int":
        return int(text)
    return float(text.replace(",", "")) if what == "num" else text


def _device_hits(stream: Stream) -> Iterator[_Hit]:
    for message in messages_in(stream.squeezed):
        if message.form is DEVICE_FORMS[0] and message.start not in stream.word_starts:
            continue
        values: dict[str, int | float | str] = dict(message.numbers)
        if message.device is not None:
            values["device"] = message.device
        backend = message.backend or _backend_near(stream, message.start)
        yield _Hit(message.start, message.stop, message.form, values, tuple(message.processes), backend)


def _backend_near(stream: Stream, position: int) -> str:
    """Return the backend whose name stands before fields that do not say whose they are."""
    before = stream.squeezed[max(0, position - 300) : position + 400]
    for word, backend in (("hip", "HIP"), ("xpu", "XPU"), ("npu", "NPU"), ("mps", "MPS")):
        if f"{word}outofmemory" in before or f"torch.{word}" in before or f"{word}:" in before:
            return backend
    return "CUDA"


def _without_overlaps(hits: list[_Hit]) -> list[_Hit]:
    """Return the hits in order; of two that share words, the one whose form comes first in the list of forms."""
    order = {form.id: i for i, form in enumerate((*FORMS, *DEVICE_FORMS))}
    starts: list[int] = []
    kept: list[_Hit] = []
    for hit in sorted(hits, key=lambda h: (order[h.form.id], h.start)):
        i = bisect_left(starts, hit.start)
        if (i and kept[i - 1].stop > hit.start) or (i < len(kept) and kept[i].start < hit.stop):
            continue
        starts.insert(i, hit.start)
        kept.insert(i, hit)
    return kept


def _without_source_lines(stream: Stream, hits: list[_Hit]) -> list[_Hit]:
    """Return the hits without those in a traceback's line of code, unless the message itself is missing."""
    in_source = [_in_source(stream, hit) for hit in hits]
    events = {hit.form.event for hit, source in zip(hits, in_source, strict=True) if not source}
    return [hit for hit, source in zip(hits, in_source, strict=True) if not source or hit.form.event not in events]


def _in_source(stream: Stream, hit: _Hit) -> bool:
    index = stream.index_at(hit.start)
    text = stream.lines[index].text.strip()
    if _SOURCE.search(text) is None:
        return False
    before = text[: max(0, text.lower().find(stream.squeezed[hit.start : hit.start + 4]))]
    return "Error: " not in before or "raise " in before


def _without_weak(hits: list[_Hit]) -> list[_Hit]:
    strong = [hit for hit in hits if not hit.form.weak]
    return strong or hits[:1]


def _events(stream: Stream, hits: list[_Hit]) -> list[_Hit]:
    """Return one hit for each event: near signs of one thing joined, what caused an engine's message folded into it."""
    events: list[_Hit] = []
    for hit in hits:
        line = stream.index_at(hit.start)
        near = [e for e in events[-_LOOK_BACK:] if e.form.event == hit.form.event and _same_event(stream, e, hit, line)]
        if near and hit.form.kind != "device":
            _fold(near[-1], hit)
            continue
        for before in reversed(events[-_LOOK_BACK:] if hit.form.absorbs else []):
            chained = line - stream.index_at(before.stop - 1) <= _CHAIN
            if chained and before.form.kind in hit.form.absorbs:
                _fold(hit, before, words=False)
                events.remove(before)
                break
        events.append(hit)
    return _without_consequences(stream, events)


def _same_event(stream: Stream, earlier: _Hit, hit: _Hit, line: int) -> bool:
    if line - stream.index_at(earlier.stop - 1) > _NEAR:
        return False
    mine, theirs = hit.values.get("pid"), earlier.values.get("pid")
    if hit.form.event == "launcher" and hit.values.get("rank") not in (None, earlier.values.get("rank")):
        return False
    return mine is None or theirs is None or mine == theirs


def _fold(into: _Hit, other: _Hit, *, words: bool = True) -> None:
    """Add to ``into`` what only ``other`` says; the more telling form of two leads."""
    order = [form.id for form in FORMS]
    if words and order.index(other.form.id) < order.index(into.form.id):
        into.form, into.backend = other.form, other.backend or into.backend
    into.values = {**other.values, **into.values}
    into.processes = into.processes or other.processes
    if words:
        into.stop = max(into.stop, other.stop) if other.stop - into.start < 3000 else into.stop


def _without_consequences(stream: Stream, events: list[_Hit]) -> list[_Hit]:
    """Drop a driver's bare *out of memory* that only repeats a fuller failure beside it."""
    kept = []
    for i, hit in enumerate(events):
        line = stream.index_at(hit.start)
        beside = [
            e for e in events[max(0, i - 3) : i + 4] if e is not hit and abs(stream.index_at(e.start) - line) <= 3
        ]
        fuller = any(e.form.kind in ("engine", "library") or e.values.get("requested") for e in beside)
        if not (hit.form.event == "driver" and not hit.values and fuller):
            kept.append(hit)
    return kept


def _failure(stream: Stream, hit: _Hit, floor: int, ceiling: int) -> Failure:
    index = stream.index_at(hit.start)
    end = stream.index_at(max(hit.start, hit.stop - 1))
    values = dict(hit.values)
    rank = values.pop("rank", None)
    device_fields = {
        name: values.pop(name)
        for name in (*_NUMBERS[:-1], "in_use", "private_pools", "unallocated", "reserved", "other")
        if name in values
    }
    if hit.form.kind != "device" and not isinstance(device_fields.get("total", 0), int):
        values["total"] = device_fields.pop("total")
    allocated, reserved = device_fields.get("allocated"), device_fields.get("reserved")
    if isinstance(allocated, int) and isinstance(reserved, int) and "unallocated" not in device_fields:
        device_fields["unallocated"] = max(0, reserved - allocated)
    host = hit.form.kind in ("host", "cpu", "killed")
    if host and "total" in device_fields:
        values["total"] = device_fields.pop("total")
    around = "\n".join(line.text for line in stream.lines[max(0, floor, index - 200) : min(ceiling, end + 40)])
    return Failure(
        hit.form,
        hit.form.kind,
        hit.backend,
        stream.lines[index].number,
        _message(stream, hit),
        rank=int(rank) if rank is not None else _rank(stream, index, end, floor),
        processes=hit.processes,
        frames=frames_around(stream.lines, index, floor, ceiling),
        facts=values,
        around=around[-20_000:],
        **device_fields,  # type: ignore[arg-type]
    )


def _message(stream: Stream, hit: _Hit) -> str:
    """Return the message as it was printed: for torch up to its last number, else the words and their line."""
    stop = hit.stop
    if hit.form.kind == "device":
        dot = stream.squeezed.find(".", stop, stop + 40)
        return stream.shown(hit.start, dot + 1 if dot >= 0 else stop)
    last = stream.index_at(max(hit.start, stop - 1))
    line_end = stream.starts[last] + len("".join(stream.lines[last].text.split()))
    return stream.shown(hit.start, max(stop, min(line_end, hit.start + 400)))[:500]


def _rank(stream: Stream, index: int, end: int, floor: int) -> int | None:
    for line in (*stream.lines[index : end + 1], *reversed(stream.lines[max(floor, index - 3) : index])):
        if line.rank is not None:
            return line.rank
    if (match := _LOG_RANK.search(stream.lines[index].text)) is not None:
        return next(int(g) for g in match.groups() if g)
    ranks = {line.rank for line in stream.lines if line.rank is not None}
    return ranks.pop() if len(ranks) == 1 else None


# ---------------------------------------------------------------------------------------- each one once


def _once(failures: list[Failure]) -> list[Failure]:
    """Drop what a launcher, a driver process or a later line only repeats, and guesses where something is known."""
    strong = [failure for failure in failures if not failure.form.weak]
    failures = strong or failures
    kept: dict[tuple[object, ...], Failure] = {}
    for failure in failures:
        key = (failure.rank, failure.form.event, _plain(failure.text))
        kept.setdefault(key, failure)
        if failure.frames and not kept[key].frames:
            kept[key] = replace(kept[key], frames=failure.frames)
    rows = list(kept.values())
    return [f for f in rows if not any(_echoes(f, other) for other in rows if other is not f)]


def _plain(text: str) -> str:
    return "".join(text.split()).lower().rstrip(".)")


def _echoes(failure: Failure, other: Failure) -> bool:
    """Say whether ``failure`` tells nothing that ``other`` does not."""
    if failure.rank is not None and other.rank is not None and failure.rank != other.rank:
        return False
    if failure.kind == other.kind == "device":
        if failure.requested is None and failure.total is None and (failure.backend == other.backend):
            return _knows(other) > _knows(failure)
        return _plain(other.text).startswith(_plain(failure.text)) and _knows(other) > _knows(failure)
    if failure.form.event != other.form.event or failure.facts.get("pid", 0) != other.facts.get("pid", 0):
        return False
    same = _plain(failure.text)[:160] == _plain(other.text)[:160] or failure.form.event in ("slurm", "container")
    return same and (_knows(other), -other.line) > (_knows(failure), -failure.line)


def _knows(failure: Failure) -> int:
    numbers = (failure.requested, failure.total, failure.free, failure.allocated, failure.in_use, failure.rank)
    return (
        sum(n is not None for n in numbers) * 10_000
        + len(failure.facts) * 100
        + len(failure.frames)
        + len(failure.text)
    )

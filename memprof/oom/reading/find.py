"""Finding failures in a text: each once, whoever repeats it, with its numbers, its rank and its frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memprof.oom.failure import Failure, TracebackFrame
from memprof.oom.known_messages import FORMS, NOT_MEMORY
from memprof.oom.message_form import Form
from memprof.oom.reading.events import events_of
from memprof.oom.reading.frames import frames_around
from memprof.oom.reading.matches import Hit, hits_in
from memprof.oom.reading.normalize import Stream, streams_of
from memprof.oom.reading.regions import regions
from memprof.oom.reading.sizes import bytes_of_tensor
from memprof.units import GIB

_MOST_EVENTS = 200
_AROUND = 20_000  # characters around a message
_HEAD = 60_000  # characters at the beginning of a log, where programs print their settings
_LOG_RANK = re.compile(r"\brank[ =:]{1,2}(\d{1,5})\b|\[rank(\d{1,5})\]", re.I)
_NUMBERS = ("requested", "total", "free", "allowed", "allocated", "device", "rank")
_INNERMOST = 4  # frames that tell what a driver's bare words are about
_ASKED = [(re.compile(form.asked_by), form) for form in FORMS if form.asked_by]


@dataclass
class LogReading:
    """Hold what a text says: failures, notes for the reader, and its subject where memory did not run out."""

    failures: list[Failure]
    notes: list[str]
    elsewhere: list[Form]


def find_failures(log: str) -> list[Failure]:
    """Return every failure in ``log``, in order; what one rank prints twice counts once."""
    return read_log(log).failures


def read_log(log: str) -> LogReading:
    """Read a text of any length: failures, each once, and what else the reader should know."""
    text = log.replace("\r\n", "\n").replace("\r", "\n")
    notes: list[str] = []
    found: list[Failure] = []
    elsewhere: dict[str, Form] = {}
    for first_line, region in regions(text, notes):
        streams = streams_of(region, first_line)
        actors = " ".join(sorted({line.actor for stream in streams for line in stream.lines if line.actor}))
        for stream in streams:
            fitting = filter(_fits_frames, _of_stream(stream, notes))
            found += [_retold(replace(f, around=f"{f.around}\n{actors}", head=text[:_HEAD])) for f in fitting]
            for form_ in NOT_MEMORY:
                if form_.pattern.search(stream.squeezed):
                    elsewhere.setdefault(form_.id, form_)
    found.sort(key=lambda failure: failure.line)
    return LogReading(_once(found), notes, list(elsewhere.values()))


def _of_stream(stream: Stream, notes: list[str]) -> list[Failure]:
    events = events_of(stream, hits_in(stream))
    chosen = list(range(len(events)))
    if len(events) > _MOST_EVENTS:
        half = _MOST_EVENTS // 2
        chosen = [*chosen[:half], *chosen[-half:]]
        notes.append(f"Of {len(events)} failures in one part of the log the first and last {half} were read.")
    failures = []
    for i in chosen:
        floor = events[i - 1].last_line + 1 if i else 0
        ceiling = events[i + 1].line if i + 1 < len(events) else len(stream.lines)
        failures.append(_failure(stream, events[i], floor, ceiling))
    return failures


def _failure(stream: Stream, hit: Hit, floor: int, ceiling: int) -> Failure:
    index, end = hit.line, hit.last_line
    values = dict(hit.values)
    rank = values.pop("rank", None)
    names = (*_NUMBERS[:-1], "in_use", "private_pools", "unallocated", "reserved", "other")
    device_fields = {name: values.pop(name) for name in names if name in values}
    if hit.form.kind != "device" and not isinstance(device_fields.get("total", 0), int):
        values["total"] = device_fields.pop("total")
    allocated, reserved = device_fields.get("allocated"), device_fields.get("reserved")
    if isinstance(allocated, int) and isinstance(reserved, int) and "unallocated" not in device_fields:
        device_fields["unallocated"] = max(0, reserved - allocated)
    for name in ("total", "free", "used"):  # figures in GiB without a unit behind each
        if f"{name}_gib" in values:
            (values if name == "used" else device_fields).setdefault(name, round(float(values[f"{name}_gib"]) * GIB))
    if size := bytes_of_tensor(str(values.get("shape", "")), str(values.get("dtype", ""))):
        device_fields.setdefault("requested", size)
    host = hit.form.kind in ("host", "cpu", "killed")
    if host and "total" in device_fields:
        values["total"] = device_fields.pop("total")
    beside = stream.lines[max(0, floor, index - 200) : min(ceiling, end + 40)]
    while len(beside) > 1 and sum(len(line.text) + 1 for line in beside) > _AROUND:
        beside = beside[max(1, len(beside) // 8) :]
    return Failure(
        hit.form,
        hit.form.kind,
        hit.backend,
        stream.lines[index].number,
        _message(stream, hit),
        rank=int(rank) if rank is not None else _rank(stream, index, end, floor),
        actor=stream.lines[index].actor,
        processes=hit.processes,
        frames=frames_around(stream.lines, index, floor, ceiling),
        facts=values,
        around="\n".join(line.text for line in beside),
        around_lines=tuple(line.number for line in beside),
        **device_fields,  # type: ignore[arg-type]
    )


def _retold(failure: Failure) -> Failure:
    """Return a failure in the form that its innermost frames tell, where its message is the driver's bare words."""
    if failure.form.event != "driver" or failure.requested is not None:
        return failure
    for place in reversed(_places(failure.frames)):
        for asked_by, form in _ASKED:
            if asked_by.search(place):
                return replace(failure, form=form, kind=form.kind)
    return failure


def _fits_frames(failure: Failure) -> bool:
    """Say whether the frames are those its form asks for, where it asks for any."""
    pattern = failure.form.frames
    return not pattern or any(re.search(pattern, place) for place in _places(failure.frames))


def _places(frames: Sequence[TracebackFrame]) -> list[str]:
    return [f"{frame.path.replace(chr(92), '/')}:{frame.function} {frame.code}" for frame in frames[-_INNERMOST:]]


def _message(stream: Stream, hit: Hit) -> str:
    """Return the message as it was printed: for torch up to its last number, else the words and their line."""
    stop = hit.stop
    if hit.form.kind == "device":
        dot = stream.squeezed.find(".", stop, stop + 40)
        return stream.shown(hit.start, dot + 1 if dot >= 0 else stop)
    last = hit.last_line
    line_end = stream.starts[last] + len("".join(stream.lines[last].text.split()))
    return stream.shown(hit.start, max(stop, min(line_end, hit.start + 400)))[:500]


def _rank(stream: Stream, index: int, end: int, floor: int) -> int | None:
    for line in (*stream.lines[index : end + 1], *reversed(stream.lines[max(floor, index - 3) : index])):
        if line.rank is not None:
            return line.rank
    if (match := _LOG_RANK.search(stream.lines[index].text)) is not None:
        return next(int(g) for g in match.groups() if g)
    return next(iter(stream.ranks)) if len(stream.ranks) == 1 else None


# ---------------------------------------------------------------------------------------- each one once


def _once(failures: list[Failure]) -> list[Failure]:
    """Drop what a launcher, a driver process or a later line only repeats, and guesses where something is known."""
    strong = [failure for failure in failures if not failure.form.weak and _knows_any(failure)]
    failures = _with_warnings(strong or [f for f in failures if not f.form.weak] or failures)
    kept: dict[tuple[object, ...], Failure] = {}
    for failure in failures:
        key = (failure.rank, failure.form.event, _plain(failure.text))
        kept.setdefault(key, failure)
        if failure.frames and not kept[key].frames:
            kept[key] = replace(kept[key], frames=failure.frames)
    rows = list(kept.values())
    if any(f.kind == "killed" and not f.form.symptom for f in rows):
        rows = [f for f in rows if not f.form.symptom]
    return [f for f in rows if not any(_echoes(f, other) for other in rows if other is not f)]


def _knows_any(failure: Failure) -> bool:
    """Say whether a device's message is more than the bare words, which prose says too."""
    numbers = (failure.requested, failure.total, failure.allocated, failure.free)
    return failure.kind != "device" or bool(failure.frames) or any(n is not None for n in numbers)


def _with_warnings(failures: list[Failure]) -> list[Failure]:
    """Join torch's warnings with the message of the same request: they say what was free. The last one counts."""
    kept: list[Failure] = []
    for failure in failures:
        before = kept[-1] if kept and kept[-1].form.id == "torch.oom_warning" else None
        if before is not None and _same_request(before, failure):
            kept.pop()
            missing = ("free", "total", "device") if failure.form.id != before.form.id else ()
            known = {name: getattr(before, name) for name in missing if getattr(failure, name) is None}
            failure = replace(failure, **known)
        kept.append(failure)
    return kept


def _same_request(a: Failure, b: Failure) -> bool:
    """Say whether two messages are about one request: torch's has two decimals, its warning bytes."""
    if a.requested is None or b.requested is None or b.kind != "device":
        return False
    ranks = {a.rank, b.rank} - {None}
    return abs(a.requested - b.requested) <= 0.005 * b.requested + 2**13 and len(ranks) < 2


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
    known = sum(n is not None for n in numbers)
    return known * 10_000 + len(failure.facts) * 100 + len(failure.frames) + len(failure.text)

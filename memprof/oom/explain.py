"""A text explained: every failure in it, what its numbers mean, why it happened, and what to try."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from memprof.oom.arithmetic import Parts, free_bytes, missing_bytes, parts_of
from memprof.oom.facts import Fact, facts_of
from memprof.oom.failure import Failure
from memprof.oom.framework_settings import Names, names_for_program, names_in, plain_in
from memprof.oom.judge import Advice, Verdict, judge
from memprof.oom.knowledge_files import table
from memprof.oom.reading.engine_share import engine_shares, share_note
from memprof.oom.reading.find import Reading, read_log
from memprof.oom.stack import makes_logits, own_frame, phase_of
from memprof.units import GIB, format_bytes

SCHEMA = "memprof.oom/1"
_MOST_RANKS_NAMED = 16
# Lines between the messages of two ranks of one event: tracebacks of a node's ranks stand between them.
_APART = 4_000
_TASK = re.compile(r"ray::\w{1,60}\.(\w{1,80})\(\)")
_LOWER_NAMES = ("torch", "bitsandbytes", "vLLM")


@dataclass(frozen=True)
class Number:
    """One number of a message, in bytes, with what it means."""

    name: str
    bytes: int
    meaning: str


@dataclass(frozen=True)
class Explained:
    """One failure with what is made of it; ``ranks`` are those that failed alike, the first of them this one."""

    failure: Failure
    parts: Parts
    framework: str
    phase: str | None
    logits: bool
    frame: str | None
    verdict: Verdict
    tried: Sequence[Advice]
    evidence: tuple[Fact, ...] = ()
    ranks: tuple[Explained, ...] = ()


def explain_log(log: str, *, explain_facts: bool = False) -> dict[str, Any]:
    """Explain every failure of a text, as plain data (``memprof.oom/1``).

    Where memory did not run out ``failures`` is empty, and ``notes`` say what the text is about if that is known.

    Args:
        log: any text.
        explain_facts: list in each failure's ``evidence`` every fact that was read, with its line.
    """
    reading = read_log(log)
    shares = engine_shares(log)
    return {
        "schema": SCHEMA,
        "failures": [_row(event) for event in _events([_explained(f, explain_facts) for f in reading.failures])],
        "engines": [share.row() for share in shares],
        "notes": [*_notes(reading), *(share_note(share) for share in shares if reading.failures), *reading.notes],
    }


def _events(failures: Sequence[Explained]) -> list[Explained]:
    """Join what several ranks say of one event: one entry, the first rank's, with each rank's figures in ``ranks``."""
    events: list[Explained] = []
    for found in failures:
        at = next((i for i in reversed(range(len(events))) if _same_event(events[i], found)), None)
        if at is None:
            at = len(events)
            events.append(found)
        if found.failure.rank is not None:
            events[at] = replace(events[at], ranks=(*events[at].ranks, found))
    return events


def _same_event(event: Explained, found: Explained) -> bool:
    """Say whether another rank failed likewise, in the same place and nearby; a rank fails once in an event."""
    rank = found.failure.rank
    if rank is None or not event.ranks or rank in [row.failure.rank for row in event.ranks]:
        return False
    places = {event.frame, found.frame} - {None}
    alike = _kind_of(event) == _kind_of(found)
    return alike and len(places) < 2 and found.failure.line - event.ranks[-1].failure.line <= _APART


def _kind_of(found: Explained) -> tuple[str, str, str, str | None, str]:
    failure = found.failure
    return failure.form.id, failure.backend, found.verdict.cause, found.phase, found.framework


def _notes(reading: Reading) -> list[str]:
    notes = []
    ranks = sorted({f.rank for f in reading.failures if f.rank is not None})
    if len(ranks) > 1:
        named = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
        notes.append(f"{len(ranks)} ranks ran out of memory ({named}): {_fullest(reading)}")
    kinds = {f.form.event for f in reading.failures}
    if "launcher" in kinds and len(kinds) > 1:
        notes.append("The −9 (SIGKILL) may be the launcher ending the other processes after the first failure.")
    if not reading.failures:
        notes += [f"This text is not about memory that ran out: {form.says}." for form in reading.elsewhere[:1]]
    return notes


def _fullest(reading: Reading) -> str:
    """Say which rank to look at first: the one that was missing most, where the messages tell."""
    missing = [(missing_bytes(f) or 0, -f.rank) for f in reading.failures if f.rank is not None]
    if not all(n for n, _ in missing):
        return "look at the one with the least free first, the others may only have been as full."
    most, rank = max(missing)
    return f"look at rank {-rank} first, which was missing most ({format_bytes(most)}); the others may only follow."


def _explained(failure: Failure, explain_facts: bool) -> Explained:
    parts = parts_of(failure)
    logits, names = makes_logits(failure.frames), _names(failure)
    phase = _phase(failure, names)
    facts = facts_of(failure, parts, phase, logits, names)
    verdict, tried = judge(failure, facts)
    evidence = tuple(facts.listed()) if explain_facts else ()
    frame = own_frame(failure.frames)
    return Explained(failure, parts, names.framework, phase, logits, frame, verdict, tried, evidence)


def _row(found: Explained) -> dict[str, Any]:
    """Return a failure as a row of ``memprof.oom/1``."""
    failure, parts = found.failure, found.parts
    return {
        "kind": failure.kind,
        "form": failure.form.id,
        "program": failure.form.program,
        "framework": found.framework or None,
        "backend": failure.backend,
        "message": failure.text,
        **_of_a_rank(found),
        "device_total_bytes": failure.total,
        "allowed_bytes": failure.allowed,
        "in_use_bytes": parts.in_use,
        "private_pools_bytes": failure.private_pools,
        "reserved_bytes": parts.reserved,
        "outside_torch_bytes": parts.outside,
        "other_processes_bytes": parts.others,
        "unexplained_bytes": parts.unexplained,
        "processes": [{"pid": pid, "bytes": held} for pid, held in parts.processes],
        "facts": dict(failure.facts),
        "sum": _sum(parts),
        "contradictions": list(parts.contradictions),
        "cause": found.verdict.cause,
        "reason": found.verdict.reason,
        "because": found.verdict.because,
        "phase": found.phase,
        "logits": found.logits,
        "frame": found.frame,
        "numbers": [asdict(number) for number in _meanings(failure, parts)],
        "try": [{"action": action, "why": why} for action, why in found.tried],
        "evidence": [asdict(fact) for fact in found.evidence],
        "ranks": [_of_a_rank(rank) for rank in found.ranks],
        "headline": _headline(found),
    }


def _of_a_rank(found: Explained) -> dict[str, str | int | None]:
    """Return what a rank's own message says, of an event that several have."""
    failure, parts = found.failure, found.parts
    return {
        "rank": failure.rank,
        "actor": failure.actor or None,
        "device": failure.device,
        "line": failure.line,
        "requested_bytes": failure.requested,
        "device_free_bytes": free_bytes(failure),
        "allocated_bytes": parts.allocated,
        "cached_bytes": parts.cached,
        "missing_bytes": missing_bytes(failure),
    }


def _names(failure: Failure) -> Names:
    """Return the framework the failure's frames, message and surroundings show."""
    text = "\n".join([*(frame.path for frame in failure.frames), failure.text, failure.around])
    return names_in(text) or names_for_program(failure.form.program) or plain_in(text)


def _phase(failure: Failure, names: Names) -> str | None:
    """Return what the run was doing, by its frames, else by what the message alone says."""
    if (found := phase_of(failure.frames)) is not None:
        return found
    if failure.form.event == "torch_memory_saver" and "resume" in failure.around.lower():
        return "wake"
    task = _TASK.search(failure.around)
    known = next((phase for name, phase in names.tasks.items() if task and task[1].endswith(name)), None)
    return known or failure.form.phase or None


def _sum(parts: Parts) -> str | None:
    """Return ``14.43 GiB in use = 11.82 allocated + 2.41 cached + 0.20 outside torch``."""
    if parts.in_use is None or parts.allocated is None or parts.cached is None or parts.outside is None:
        return None
    gib = [f"{n / GIB:.2f}" for n in (parts.in_use, parts.allocated, parts.cached, parts.outside)]
    return f"{gib[0]} GiB in use = {gib[1]} allocated + {gib[2]} cached + {gib[3]} non-PyTorch"


def _meanings(failure: Failure, parts: Parts) -> list[Number]:
    """Return each number of the message with what it means."""
    who = "" if parts.own_process is None else f" (process {parts.own_process}, seen from outside its container)"
    outside = (
        "other Metal allocations of this process"
        if failure.backend == "MPS"
        else ("CUDA context and kernels, NCCL, cuBLAS handles, other allocators")
    )
    rows = [
        (failure.requested, "asked for", "the block that did not fit, rounded up as the allocator does"),
        (failure.total, "device", "all memory of the device, or of the MIG slice"),
        (free_bytes(failure), "free", "free on the device, by the driver"),
        (failure.allowed, "allowed", "the limit set for this process"),
        (parts.in_use, "in use", f"memory of this process on the device, by the driver{who}"),
        (parts.allocated, "allocated", "in live tensors"),
        (failure.private_pools, "private pools", "of that, in pools of CUDA graphs or an engine"),
        (
            parts.cached,
            "cached",
            "reserved by PyTorch but unallocated; fully unused segments were released already, so these are gaps",
        ),
        (parts.outside, "non-PyTorch", outside),
        (parts.others, "others", "the other processes that the message names, added up"),
        (parts.unexplained, "unaccounted", "in use on the device, and the message does not say by what"),
    ]
    if failure.kind in ("cpu", "host", "library", "driver"):
        rows = [(failure.requested, "asked for", "in one piece")]
    return [Number(name, n, meaning) for n, name, meaning in rows if n is not None]


# -- the headline ------------------------------------------------------------------------------------------------------


def _headline(found: Explained) -> dict[str, str | list[str]]:
    """Return the ``headline`` of a failure of ``memprof.oom/1``, as of a report; a text tells no ``places``."""
    labels: dict[str, str] = table("causes")["label"]
    label = labels.get(found.verdict.reason, labels[found.verdict.cause])
    cause = f"Cause: {label}. {_sentence(found.verdict.because)}"
    do, why = found.tried[0] if found.tried else ("", "")
    action = f"Try first: {do}. {_sentence(why)}" if do else ""
    return {
        "verdict": _verdict(found),
        "cause": f"{cause} {where}" if (where := _where(found)) else cause,
        "places": [],
        "action": action,
        "assumed": [],
    }


def _verdict(found: Explained) -> str:
    """Say who ran out of memory where in the log, and how much was missing."""
    failure, who = found.failure, _who(found)
    asked = failure.requested
    if failure.kind != "device":
        size = f": {format_bytes(asked)} did not fit" if asked is not None else ""
        program = failure.form.program
        program = _sentence(program) if program.startswith("the ") else program
        return f"{who}{program} (line {failure.line}){size}"
    where = f"{failure.backend} {failure.device}" if failure.device is not None else failure.backend
    what = f"{format_bytes(asked)} did not fit" if asked is not None else "out of memory"
    missing = missing_bytes(failure)
    short = f", {format_bytes(missing)} missing" if missing else ""
    return f"{who}{where or failure.kind} (line {failure.line}): {what}{short}"


def _who(found: Explained) -> str:
    """Name the rank whose figures these are and the others of the event, or the process that a log names."""
    failure = found.failure
    if failure.rank is None:
        return f"{failure.actor}: " if failure.actor else ""
    others = [str(row.failure.rank) for row in found.ranks[1:]]
    if not others:
        return f"rank {failure.rank}, "
    more = f" and {len(others) - _MOST_RANKS_NAMED} more" if len(others) > _MOST_RANKS_NAMED else ""
    likewise = f"rank{'s' if len(others) > 1 else ''} {', '.join(others[:_MOST_RANKS_NAMED])}{more}"
    return f"rank {failure.rank} (likewise {likewise}), "


def _where(found: Explained) -> str | None:
    """Say in which phase and from which frame memory was asked for; None where neither is known."""
    wide = " It makes logits: a tensor as wide as the vocabulary." if found.logits else ""
    if found.phase and found.frame:
        return f"It was in {found.phase}, called from {found.frame}.{wide}"
    if found.phase:
        return f"It was in {found.phase}.{wide}"
    return f"It was called from {found.frame}.{wide}" if found.frame else None


def _sentence(text: str) -> str:
    """Begin a sentence with a capital, unless it begins with a name in lower case."""
    return text if text.startswith(_LOWER_NAMES) else text[:1].upper() + text[1:]

"""A text explained: every failure in it, what its numbers mean, why it happened, and what to try."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from memprof.oom.arithmetic import Parts, free_bytes, missing_bytes, parts_of
from memprof.oom.facts import facts_of
from memprof.oom.failure import Failure
from memprof.oom.framework_settings import Names, names_for_program, names_in, plain_in
from memprof.oom.judge import judge
from memprof.oom.knowledge_files import table
from memprof.oom.reading.engine_share import engine_shares, share_note
from memprof.oom.reading.find import Reading, read_log
from memprof.oom.stack import makes_logits, own_frame, phase_of
from memprof.units import GIB, format_bytes

SCHEMA = "memprof.oom/1"
_MOST_RANKS_NAMED = 16
# Lines between the messages of two ranks of one event: tracebacks of a node's ranks stand between them.
_APART = 4_000
# What a rank's own message says, of an event that several have.
_OF_A_RANK = (
    "rank", "actor", "device", "line", "requested_bytes", "device_free_bytes", "allocated_bytes", "cached_bytes",
    "missing_bytes",
)  # fmt: skip
_TASK = re.compile(r"ray::\w{1,60}\.(\w{1,80})\(\)")
_LOWER_NAMES = ("torch", "bitsandbytes", "vLLM")


def explain_log(log: str) -> dict[str, Any]:
    """Explain every failure of a text, as plain data (``memprof.oom/1``).

    Where memory did not run out ``failures`` is empty, and ``notes`` say what the text is about if that is known.
    """
    reading = read_log(log)
    shares = engine_shares(log)
    return {
        "schema": SCHEMA,
        "failures": _events([_explained(failure) for failure in reading.failures]),
        "engines": shares,
        "notes": [*_notes(reading), *(share_note(share) for share in shares if reading.failures), *reading.notes],
    }


def _events(failures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join what several ranks say of one event: one entry, the first rank's, with each rank's figures in ``ranks``."""
    events: list[dict[str, Any]] = []
    for failure in failures:
        event = next((e for e in reversed(events) if _same_event(e, failure)), None)
        if event is None:
            events.append({**failure, "ranks": []})
            event = events[-1]
        if failure["rank"] is not None:
            event["ranks"].append({name: failure[name] for name in _OF_A_RANK})
    return [{**event, "headline": _headline(event)} for event in events]


def _same_event(event: Mapping[str, Any], failure: Mapping[str, Any]) -> bool:
    """Say whether another rank failed likewise, in the same place and nearby; a rank fails once in an event."""
    ranks = event["ranks"]
    if failure["rank"] is None or not ranks or failure["rank"] in [row["rank"] for row in ranks]:
        return False
    places = {event["frame"], failure["frame"]} - {None}
    alike = all(event[key] == failure[key] for key in ("form", "backend", "cause", "phase", "framework"))
    return alike and len(places) < 2 and failure["line"] - ranks[-1]["line"] <= _APART


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


def _explained(failure: Failure) -> dict[str, Any]:
    parts = parts_of(failure)
    logits, names = makes_logits(failure.frames), _names(failure)
    phase = _phase(failure, names)
    verdict, tried = judge(failure, facts_of(failure, parts, phase, logits, names))
    return {
        "kind": failure.kind,
        "form": failure.form.id,
        "program": failure.form.program,
        "framework": names.framework or None,
        "backend": failure.backend,
        "rank": failure.rank,
        "actor": failure.actor or None,
        "device": failure.device,
        "line": failure.line,
        "message": failure.text,
        "requested_bytes": failure.requested,
        "device_total_bytes": failure.total,
        "device_free_bytes": free_bytes(failure),
        "allowed_bytes": failure.allowed,
        "in_use_bytes": parts.in_use,
        "allocated_bytes": parts.allocated,
        "private_pools_bytes": failure.private_pools,
        "cached_bytes": parts.cached,
        "reserved_bytes": parts.reserved,
        "outside_torch_bytes": parts.outside,
        "other_processes_bytes": parts.others,
        "unexplained_bytes": parts.unexplained,
        "processes": [{"pid": pid, "bytes": held} for pid, held in parts.processes],
        "missing_bytes": missing_bytes(failure),
        "facts": dict(failure.facts),
        "sum": _sum(parts),
        "contradictions": list(parts.contradictions),
        "cause": verdict.cause,
        "reason": verdict.reason,
        "because": verdict.because,
        "phase": phase,
        "logits": logits,
        "frame": own_frame(failure.frames),
        "numbers": _meanings(failure, parts),
        "try": [{"action": action, "why": why} for action, why in tried],
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
    return f"{gib[0]} GiB in use = {gib[1]} allocated + {gib[2]} cached + {gib[3]} outside torch"


def _meanings(failure: Failure, parts: Parts) -> list[dict[str, Any]]:
    """Return each number of the message with what it means."""
    who = "" if parts.own_process is None else f" (process {parts.own_process}, seen from outside its container)"
    outside = (
        "Metal allocations beside torch's tensors"
        if failure.backend == "MPS"
        else ("CUDA context and kernels, NCCL, cuBLAS handles, other allocators")
    )
    rows = [
        (failure.requested, "asked for", "the block that did not fit, rounded up as the allocator does"),
        (failure.total, "device", "all memory of the device, or of the MIG slice"),
        (free_bytes(failure), "free", "what no process has taken, by the driver"),
        (failure.allowed, "allowed", "the limit set for this process"),
        (parts.in_use, "in use", f"what this process holds on the device, by the driver{who}"),
        (parts.allocated, "allocated", "in tensors that are alive"),
        (failure.private_pools, "private pools", "of that, kept by CUDA graphs or an engine's pool for themselves"),
        (parts.cached, "cached", "torch's, used by no tensor; whole unused segments go back first, so: gaps between"),
        (parts.outside, "outside torch", outside),
        (parts.others, "others", "the other processes the message names, added up"),
        (parts.unexplained, "not explained", "in use on the device, and the message names nobody for it"),
    ]
    if failure.kind in ("cpu", "host", "library", "driver"):
        rows = [(failure.requested, "asked for", "in one piece")]
    return [{"name": name, "bytes": n, "meaning": meaning} for n, name, meaning in rows if n is not None]


# -- the headline ------------------------------------------------------------------------------------------------------


def _headline(failure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``headline`` of a failure of ``memprof.oom/1``, as of a report; a text tells no ``places``."""
    cause = f"Cause: {table('causes')['label'][failure['cause']]}. {_sentence(failure['because'])}"
    first = failure["try"][0] if failure["try"] else None
    return {
        "verdict": _verdict(failure),
        "cause": f"{cause} {where}" if (where := _where(failure)) else cause,
        "places": [],
        "action": f"Try first: {first['action']}. {first['why']}" if first else "",
        "assumed": [],
    }


def _verdict(failure: Mapping[str, Any]) -> str:
    """Say who ran out of memory where in the log, and how much was missing."""
    who = _who(failure)
    if failure["kind"] != "device":
        asked = failure["requested_bytes"]
        size = f": {format_bytes(asked)} did not fit" if asked is not None else ""
        program = failure["program"]
        program = _sentence(program) if program.startswith("the ") else program
        return f"{who}{program} (line {failure['line']}){size}"
    where = f"{failure['backend']} {failure['device']}" if failure["device"] is not None else failure["backend"]
    title = f"{who}{where or failure['kind']}"
    asked = failure["requested_bytes"]
    what = f"{format_bytes(asked)} did not fit" if asked is not None else "out of memory"
    missing = failure["missing_bytes"]
    short = f", {format_bytes(missing)} missing" if missing else ""
    return f"{title} (line {failure['line']}): {what}{short}"


def _who(failure: Mapping[str, Any]) -> str:
    """Name the rank whose figures these are and the others of the event, or the process that a log names."""
    if failure["rank"] is None:
        return f"{failure['actor']}: " if failure["actor"] else ""
    others = [str(row["rank"]) for row in failure["ranks"][1:]]
    if not others:
        return f"rank {failure['rank']}, "
    more = f" and {len(others) - _MOST_RANKS_NAMED} more" if len(others) > _MOST_RANKS_NAMED else ""
    likewise = f"rank{'s' if len(others) > 1 else ''} {', '.join(others[:_MOST_RANKS_NAMED])}{more}"
    return f"rank {failure['rank']} (likewise {likewise}), "


def _where(failure: Mapping[str, Any]) -> str | None:
    """Say in which phase and from which frame memory was asked for; None where neither is known."""
    frame = failure["frame"] or ""
    wide = " It makes logits: a tensor as wide as the vocabulary." if failure["logits"] else ""
    if failure["phase"] and frame:
        return f"It was in {failure['phase']}, called from {frame}.{wide}"
    if failure["phase"]:
        return f"It was in {failure['phase']}.{wide}"
    return f"It was called from {frame}.{wide}" if frame else None


def _sentence(text: str) -> str:
    """Begin a sentence with a capital, unless it begins with a name in lower case."""
    return text if text.startswith(_LOWER_NAMES) else text[:1].upper() + text[1:]

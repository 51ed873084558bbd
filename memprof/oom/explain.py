"""A text explained: every failure in it, what its numbers mean, why it happened, and what to try."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec.structs import asdict, replace

from memprof.oom.arithmetic import Parts, free_bytes, missing_bytes, parts_of
from memprof.oom.facts import facts_of
from memprof.oom.failure import Failure
from memprof.oom.framework_settings import Names, names_for_program, names_in, plain_in
from memprof.oom.judge import judge
from memprof.oom.knowledge_files import NumberMeaning, typed
from memprof.oom.reading.engine_share import engine_shares, share_note
from memprof.oom.reading.find import LogReading, read_log
from memprof.oom.reading.unread import unread_figures
from memprof.oom.stack import own_frame, phase_of
from memprof.report.advice import Headline
from memprof.report.oom import ExplainedFailure, ExplainedText, FailedRank, MessageNumber, OtherProcess, Suggestion
from memprof.units import GIB, format_bytes
from memprof.vocabulary import phase_words

_MOST_RANKS_NAMED = 16
# Lines between the messages of two ranks of one event: tracebacks of a node's ranks stand between them.
_APART = 4_000
_ALIKE = ("form", "backend", "cause", "phase", "framework")
_TASK = re.compile(r"ray::\w{1,60}\.(\w{1,80})\(\)")
_LOWER_NAMES = ("torch", "bitsandbytes", "vLLM", "llama.cpp")
_NO_HEADLINE = Headline(verdict="", cause="", places=(), action="", assumed=())
# Messages that say nothing about the device.
_ONE_NUMBER = ("cpu", "host", "library", "driver")


def explain_log(log: str, *, explain_facts: bool = False) -> ExplainedText:
    """Explain every failure of a text.

    If memory did not run out ``failures`` is empty, and ``notes`` say what the text is about if that is known.

    Args:
        log: any text.
        explain_facts: list in each failure's ``evidence`` every fact that was read, with its line.
    """
    reading, shares = read_log(log), engine_shares(log)
    events = _events([_explained(failure, explain_facts) for failure in reading.failures])
    return ExplainedText(
        failures=tuple(replace(event, headline=_headline(event)) for event in events),
        engines=shares,
        notes=(*_notes(reading), *(share_note(share) for share in shares if reading.failures), *reading.notes),
    )


def _events(failures: Sequence[ExplainedFailure]) -> list[ExplainedFailure]:
    """Join what several ranks say of one event: one entry, the first rank's, with each rank's figures in ``ranks``."""
    events: list[ExplainedFailure] = []
    for found in failures:
        at = next((i for i in reversed(range(len(events))) if _same_event(events[i], found)), None)
        if at is None:
            at = len(events)
            events.append(found)
        if found.rank is not None:
            figures = {key: value for key, value in asdict(found).items() if key in FailedRank.__struct_fields__}
            events[at] = replace(events[at], ranks=(*events[at].ranks, FailedRank(**figures)))
    return events


def _same_event(event: ExplainedFailure, found: ExplainedFailure) -> bool:
    """Say whether another rank failed likewise, in the same place and nearby; a rank fails once in an event."""
    if found.rank is None or not event.ranks or found.rank in [rank.rank for rank in event.ranks]:
        return False
    alike = all(getattr(event, key) == getattr(found, key) for key in _ALIKE)
    return alike and len({event.frame, found.frame} - {None}) < 2 and found.line - event.ranks[-1].line <= _APART


def _notes(reading: LogReading) -> list[str]:
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


def _fullest(reading: LogReading) -> str:
    """Say which rank to look at first: the one that was missing most, where the messages tell."""
    missing = [(missing_bytes(f) or 0, -f.rank) for f in reading.failures if f.rank is not None]
    if not all(n for n, _ in missing):
        return "look at the one with the least free first, the others may only have been as full."
    most, rank = max(missing)
    return f"look at rank {-rank} first, which was missing most ({format_bytes(most)}); the others may only follow."


def _explained(failure: Failure, explain_facts: bool) -> ExplainedFailure:
    parts, names = parts_of(failure), _names(failure)
    phase = _phase(failure, names)
    facts = facts_of(failure, parts, phase, names)
    logits = facts.has("logits")
    verdict, tried = judge(failure, facts)
    read = {**failure.facts, **facts.sizes()}
    row = ExplainedFailure(
        kind=failure.kind,
        form=failure.form.id,
        program=failure.form.program,
        framework=names.framework or None,
        backend=failure.backend,
        message=failure.text,
        rank=failure.rank,
        actor=failure.actor or None,
        device=failure.device,
        line=failure.line,
        requested_bytes=failure.requested,
        device_free_bytes=free_bytes(failure),
        allocated_bytes=parts.allocated,
        cached_bytes=parts.cached,
        missing_bytes=missing_bytes(failure),
        device_total_bytes=failure.total,
        allowed_bytes=failure.allowed,
        in_use_bytes=parts.in_use,
        private_pools_bytes=failure.private_pools,
        reserved_bytes=parts.reserved,
        outside_torch_bytes=parts.outside,
        other_processes_bytes=parts.others,
        unexplained_bytes=parts.unexplained,
        processes=tuple(OtherProcess(pid=pid, bytes=size) for pid, size in parts.processes),
        facts=read,
        sum=_sum(parts),
        contradictions=parts.contradictions,
        cause=verdict.cause,
        reason=verdict.reason,
        because=verdict.because,
        phase=phase,
        logits=logits,
        frame=own_frame(failure.frames),
        numbers=(),
        suggestions=tuple(Suggestion(action=action, why=why) for action, why in tried),
        unread=unread_figures(failure, read),
        evidence=tuple(facts.listed()) if explain_facts else (),
        ranks=(),
        headline=_NO_HEADLINE,
    )
    return replace(row, numbers=tuple(_numbers(row, parts)))


def _names(failure: Failure) -> Names:
    """Return the framework the failure's frames, message and surroundings show."""
    text = "\n".join([*(f"/{frame.path}" for frame in failure.frames), failure.text, failure.around])
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


def _numbers(row: ExplainedFailure, parts: Parts) -> Iterator[MessageNumber]:
    """Yield each number of the message with what it means (``torch.toml``)."""
    for number in typed("torch", "number", tuple[NumberMeaning, ...])[: 1 if row.kind in _ONE_NUMBER else None]:
        meaning = number.by_kind.get(row.kind) or number.by_kind.get(row.backend) or number.meaning
        if number.field == "in_use_bytes" and parts.own_process is not None:
            meaning += f" (process {parts.own_process}, seen from outside its container)"
        if (size := getattr(row, number.field)) is not None:
            yield MessageNumber(name=number.name, bytes=size, meaning=meaning)


# -- the headline ------------------------------------------------------------------------------------------------------


def _headline(row: ExplainedFailure) -> Headline:
    """Return a failure's answer in sentences, as of a report; a text tells no ``places``."""
    labels = typed("causes", "label", dict[str, str])
    cause = f"Cause: {labels.get(row.reason, labels[row.cause])}. {_sentence(row.because)}"
    first = row.suggestions[0] if row.suggestions else None
    action = f"Try first: {first.action}. {_sentence(first.why)}" if first and first.action else ""
    return Headline(
        verdict=_verdict(row),
        cause=f"{cause} {where}" if (where := _where(row)) else cause,
        places=(),
        action=action.replace("?. ", "? "),
        assumed=(),
    )


def _verdict(row: ExplainedFailure) -> str:
    """Say who ran out of memory where in the log, and how much was missing."""
    size = None if row.requested_bytes is None else f"{format_bytes(row.requested_bytes)} did not fit"
    if row.kind != "device":
        program = _sentence(row.program) if row.program.startswith("the ") else row.program
        return f"{_who(row)}{program} (line {row.line}){f': {size}' if size else ''}"
    where = f"{row.backend} {row.device}" if row.device is not None else row.backend
    short = f", {format_bytes(row.missing_bytes)} missing" if row.missing_bytes else ""
    return f"{_who(row)}{where or row.kind} (line {row.line}): {size or 'out of memory'}{short}"


def _who(row: ExplainedFailure) -> str:
    """Name the rank whose figures these are and the others of the event, or the process that a log names."""
    if row.rank is None:
        return f"{row.actor}: " if row.actor else ""
    others = [str(rank.rank) for rank in row.ranks[1:]]
    if not others:
        return f"rank {row.rank}, "
    more = f" and {len(others) - _MOST_RANKS_NAMED} more" if len(others) > _MOST_RANKS_NAMED else ""
    likewise = f"rank{'s' if len(others) > 1 else ''} {', '.join(others[:_MOST_RANKS_NAMED])}{more}"
    return f"rank {row.rank} (likewise {likewise}), "


def _where(row: ExplainedFailure) -> str | None:
    """Say in which phase and from which frame memory was asked for; None where neither is known."""
    phase = f"happened in the {phase_words(row.phase)} phase" if row.phase else None
    known = [words for words in (phase, row.frame and f"{'' if phase else 'was '}called from {row.frame}") if words]
    wide = " It makes logits: a tensor as wide as the vocabulary." if row.logits else ""
    return f"It {', '.join(known)}.{wide}" if known else None


def _sentence(text: str) -> str:
    """Begin a sentence with a capital, unless it begins with a name in lower case."""
    return text if text.startswith(_LOWER_NAMES) else text[:1].upper() + text[1:]

"""Say why a failure happened and rank what would help, by the rules of ``causes.toml`` and ``remedies.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memprof.oom.facts import FailureFacts
from memprof.oom.failure import Failure
from memprof.oom.knowledge_files import Cause, Circumstance, Remedy, Tries, causes, circumstances, typed
from memprof.oom.known_messages import answer_of
from memprof.oom.remedies import possible, remedy
from memprof.oom.wording import choose

Advice = tuple[str, str]
# Of what makes less of the work, where what surrounds the message names what was done.
_WORK_BESIDE = Cause(work=0.7)
# A remedy that would free less of what is missing is of no use.
_USELESS = 0.05
_NO_RECORDING = {"overflow", "metal_buffer", "memprof_said"}


@dataclass(frozen=True)
class OomVerdict:
    """The cause as an id, a finer id of why, and a sentence."""

    cause: str
    reason: str
    because: str


@dataclass(frozen=True)
class _Proposal:
    """A remedy as one source proposes it: how sure that source is, and where in its list it stands."""

    entry: Remedy
    certainty: float
    place: int
    id: str = ""


def judge(failure: Failure, facts: FailureFacts) -> tuple[OomVerdict, list[Advice]]:
    """Return why it failed and what to try, first things first."""
    verdict, rule, around = _decided(failure, facts)
    proposals = [*_proposed(rule.tries, rule.certainty)]
    for entry in around:
        proposals += _proposed(entry.tries, entry.certainty)
    if failure.kind == "device" and rule.work:
        proposals += _proposed(_of_work(facts), rule.work)
    tried = _ranked(proposals, facts)
    if failure.kind == "device" and not _NO_RECORDING & {verdict.reason, *(entry.id for entry in around)}:
        tried += _worded(remedy("snapshot"), facts)
    return verdict, _for_backend(failure.backend, list(dict(tried).items()))


def _decided(failure: Failure, facts: FailureFacts) -> tuple[OomVerdict, Cause, list[Circumstance]]:
    """Return the verdict, the rule whose remedies count, and the circumstances that hold."""
    device = failure.kind == "device"
    rule = next(row for row in causes() if facts.holds(row)) if device else answer_of(failure.form)
    cause, reason = rule.cause or failure.kind, rule.reason or failure.form.id
    facts.decide(cause, reason)
    around = _around(failure, cause, facts)
    said = [choose(rule.because, facts, rule.because_when) or ""]
    # What surrounds a message decides over what its numbers alone would say.
    over = next((row for row in around if cause in row.instead_of and all(map(facts.has, row.instead_when))), None)
    sentences = [(entry.leads, choose(entry.says, facts) or "") for entry in around]
    if over is not None:
        said, cause, reason, rule = [], over.cause, over.id, _WORK_BESIDE
        facts.decide(cause, reason)
    for leads, sentence in sentences:
        said.insert(0 if leads else len(said), sentence)
    return OomVerdict(cause, reason, " ".join(_sentences(said))), rule, around


def _around(failure: Failure, cause: str, facts: FailureFacts) -> list[Circumstance]:
    """Return the circumstances that hold, of one group only the first."""
    found: dict[str, Circumstance] = {}
    for entry in circumstances():
        fits = cause in entry.only_causes if entry.only_causes is not None else failure.kind == "device"
        if fits and (entry.group or entry.id) not in found and facts.holds(entry):
            found[entry.group or entry.id] = entry
    return list(found.values())


def _sentences(said: Sequence[str]) -> Iterator[str]:
    """Yield sentences: each after the first begins with a capital, each but the last ends with a full stop."""
    kept = [text for text in said if text]
    for i, text in enumerate(kept):
        text = text if i == 0 or text.startswith(("torch ", "memprof")) else text[:1].upper() + text[1:]
        yield text if i == len(kept) - 1 or text.endswith(".") else f"{text}."


# ------------------------------------------------------------------------------------------------------ remedies


def _proposed(tries: Tries, certainty: float) -> Iterator[_Proposal]:
    for place, item in enumerate(tries):
        entry = remedy(item) if isinstance(item, str) else Remedy(do=item[0], why=item[1])
        yield _Proposal(entry, certainty, place, item if isinstance(item, str) else "")


def _of_work(facts: FailureFacts) -> Tries:
    """Return what makes less of the work that was being done."""
    if facts.has("images") or facts.has("serving"):
        kind = "images" if facts.has("images") else "serving"
    else:
        kind = "training" if facts.has("training") or facts.text("phase") not in (None, "forward") else "unknown"
    work = typed("remedies", "work", dict[str, dict[str, tuple[str, ...]]])[kind]
    return work.get(facts.text("phase") or ("load" if facts.has("loading") else "other")) or work["other"]


def _ranked(proposals: Sequence[_Proposal], facts: FailureFacts) -> list[Advice]:
    """Return what is possible and of use: by certainty and what it frees of what is missing, then by its price."""
    scored = [(score, p) for p in proposals if (score := _score(p, facts)) is not None]
    listed: list[_Proposal] = []
    for _, proposal in sorted(scored, key=lambda row: -row[0]):
        covered = {name for p in listed for name in p.entry.covers}
        covers_one = any(p.id in proposal.entry.covers for p in listed if p.id)
        if proposal.id not in covered and not covers_one and _worded(proposal.entry, facts):
            listed.append(proposal)
    return [advice for proposal in listed for advice in _worded(proposal.entry, facts)]


def _worded(entry: Remedy, facts: FailureFacts) -> list[Advice]:
    """Return a remedy in words; none where its framework has no word for it."""
    do, why = choose(entry.do, facts, entry.do_when), choose(entry.why, facts, entry.why_when)
    return [(do, why)] if do and why else []


def _score(proposal: _Proposal, facts: FailureFacts) -> float | None:
    """Return a remedy's rank, None where it is impossible, done already or of no use."""
    entry = proposal.entry
    if not possible(entry, facts):
        return None
    helps = entry.help_then if entry.help_when and all(map(facts.has, entry.help_when)) else entry.help
    need, freed = facts.or_0("missing", "asked"), getattr(facts, entry.frees) if entry.frees else float("nan")
    if need and freed == freed:
        if freed < _USELESS * need:
            return None
        helps *= min(1.0, freed / need)
    return proposal.certainty * helps - 0.02 * entry.price - 0.004 * proposal.place


def _for_backend(backend: str, rows: Sequence[Advice]) -> list[Advice]:
    """Return the rows with the backend's own names of tools, variables and modules."""
    names = typed("remedies", "backend", dict[str, tuple[tuple[str, str], ...]]).get(backend, ())
    found = []
    for action, why in rows:
        for ours, theirs in names:
            action, why = action.replace(ours, theirs), why.replace(ours, theirs)
        found.append((action, why))
    return found

"""Say why a failure happened and rank what would help, by the rules of ``causes.toml`` and ``remedies.toml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.oom.expressions import Scope, evaluate
from memprof.oom.failure import Failure
from memprof.oom.knowledge_files import table
from memprof.oom.known_messages import answer_of
from memprof.oom.remedies import possible, remedy
from memprof.oom.wording import choose

Remedy = tuple[str, str]
_CERTAINTY, _HELP, _PRICE = 0.9, 0.8, 1
# Of what makes less of the work, where what surrounds the message names what was done.
_WORK_BESIDE = 0.7
# A remedy that would free less of what is missing is of no use.
_USELESS = 0.05
_NO_RECORDING = {"overflow", "metal_buffer", "memprof_said"}


@dataclass(frozen=True)
class Verdict:
    """The cause as an id, a finer id of why, and a sentence."""

    cause: str
    reason: str
    because: str


@dataclass(frozen=True)
class _Proposal:
    """A remedy as one source proposes it: how sure that source is, and where in its list it stands."""

    entry: Mapping[str, Any]
    certainty: float
    place: int
    scope: Scope


def judge(failure: Failure, scope: Scope) -> tuple[Verdict, list[Remedy]]:
    """Return why it failed and what to try, first things first."""
    verdict, rule, around, inner = _decided(failure, scope)
    proposals = [*_proposed(rule, rule.get("certainty", _CERTAINTY), inner)]
    for entry in around:
        proposals += _proposed(entry, entry["certainty"], inner.within(entry.get("let", {})))
    if failure.kind == "device" and rule.get("work"):
        proposals += _of_work(rule["work"], inner)
    tried = _ranked(proposals)
    if failure.kind == "device" and not _NO_RECORDING & {verdict.reason, *(entry["id"] for entry in around)}:
        tried.append((remedy("snapshot")["do"], remedy("snapshot")["why"]))
    return verdict, _for_backend(failure.backend, list(dict(tried).items()))


def _decided(failure: Failure, scope: Scope) -> tuple[Verdict, Mapping[str, Any], list[dict[str, Any]], Scope]:
    """Return the verdict, the rule whose remedies count, the circumstances that hold, and the scope of both."""
    rule: Mapping[str, Any] = _rule(scope) if failure.kind == "device" else answer_of(failure.form)
    cause, reason = rule.get("cause", failure.kind), rule.get("reason", failure.form.id)
    inner = scope.within({**rule.get("let", {}), "cause": repr(cause), "fragmented": repr(cause == "fragmentation")})
    around = _around(failure, cause, inner)
    said = [choose(rule["because"], inner, rule.get("because_when", ())) or ""]
    # What surrounds a message decides over what its numbers alone would say.
    over = next((entry for entry in around if _decides(entry, cause, inner)), None)
    if over is not None:
        said, cause, reason, rule = [], over["cause"], over["id"], {"work": _WORK_BESIDE}
        inner = inner.within({"cause": repr(cause)})
    for entry in around:
        sentence = choose(entry["says"], inner.within(entry.get("let", {}))) or ""
        said.insert(0 if entry.get("leads") else len(said), sentence)
    return Verdict(cause, reason, " ".join(_sentences(said))), rule, around, inner


def _rule(scope: Scope) -> dict[str, Any]:
    causes = table("causes")
    inner = scope.within(causes["let"])
    return next(rule for rule in causes["cause"] if evaluate(rule["when"], inner))


def _around(failure: Failure, cause: str, scope: Scope) -> list[dict[str, Any]]:
    """Return the circumstances that hold, of one group only the first."""
    found: dict[str, dict[str, Any]] = {}
    for entry in table("causes")["circumstance"]:
        key = entry.get("group", entry["id"])
        if key not in found and _holds(entry, cause, failure, scope):
            found[key] = entry
    return list(found.values())


def _holds(entry: Mapping[str, Any], cause: str, failure: Failure, scope: Scope) -> bool:
    only = entry.get("only_causes")
    if cause not in only if only is not None else failure.kind != "device":
        return False
    return bool(evaluate(entry["when"], scope))


def _decides(entry: Mapping[str, Any], cause: str, scope: Scope) -> bool:
    return cause in entry.get("instead_of", ()) and bool(evaluate(entry.get("instead_when", "True"), scope))


def _sentences(said: Sequence[str]) -> Iterator[str]:
    """Yield sentences: each after the first begins with a capital, each but the last ends with a full stop."""
    kept = [text for text in said if text]
    for i, text in enumerate(kept):
        text = text if i == 0 or text.startswith(("torch ", "memprof")) else text[:1].upper() + text[1:]
        yield text if i == len(kept) - 1 or text.endswith(".") else f"{text}."


# ------------------------------------------------------------------------------------------------------ remedies


def _proposed(source: Mapping[str, Any], certainty: float, scope: Scope) -> Iterator[_Proposal]:
    for place, item in enumerate(source.get("try", ())):
        entry = remedy(item) if isinstance(item, str) else {"do": item[0], "why": item[1]}
        yield _Proposal(entry, certainty, place, scope.within(entry.get("let", {})))


def _of_work(certainty: float, scope: Scope) -> Iterator[_Proposal]:
    """Yield what makes less of the work that was being done."""
    work = table("remedies")["work"]
    phase = scope["phase"]
    if scope["images"] or scope["serving"]:
        kind = "images" if scope["images"] else "serving"
    else:
        kind = "training" if scope["training"] or phase not in (None, "forward") else "unknown"
    listed = work[kind].get(phase) or work[kind]["other"]
    yield from _proposed({"try": listed}, certainty, scope)


def _ranked(proposals: Sequence[_Proposal]) -> list[Remedy]:
    """Return what is possible and of use: by certainty and what it frees of what is missing, then by its price."""
    scored = []
    for proposal in proposals:
        score = _score(proposal)
        if score is None:
            continue
        entry, scope = proposal.entry, proposal.scope
        do = choose(entry["do"], scope, entry.get("do_when", ()))
        why = choose(entry["why"], scope, entry.get("why_when", ()))
        if do and why:
            scored.append((score, (do, why)))
    scored.sort(key=lambda row: -row[0])
    return [row for _, row in scored]


def _score(proposal: _Proposal) -> float | None:
    """Return a remedy's rank, None where it is impossible, done already or of no use."""
    entry, scope = proposal.entry, proposal.scope
    if not possible(entry, scope):
        return None
    helps = entry.get("help", _HELP)
    helps = float(evaluate(helps, scope) if isinstance(helps, str) else helps)
    need = scope["missing"] or scope["asked"]
    if "frees" in entry and need:
        freed = evaluate(entry["frees"], scope)
        if freed is not None:
            if freed < _USELESS * need:
                return None
            helps *= min(1.0, freed / need)
    return float(proposal.certainty * helps - 0.02 * entry.get("price", _PRICE) - 0.004 * proposal.place)


def _for_backend(backend: str, rows: Sequence[Remedy]) -> list[Remedy]:
    """Return the rows with the backend's own names of tools, variables and modules."""
    names: list[list[str]] = table("remedies")["backend"].get(backend, [])
    found = []
    for action, why in rows:
        for ours, theirs in names:
            action, why = action.replace(ours, theirs), why.replace(ours, theirs)
        found.append((action, why))
    return found

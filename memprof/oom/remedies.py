"""Choose the remedies that apply to a run: for texts and for advice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from memprof.oom.facts import FailureFacts
from memprof.oom.knowledge_files import REMEDY_FILES, Change, Remedy, remedies_of, typed
from memprof.oom.wording import fill


@dataclass(frozen=True)
class WordedChange:
    """A remedy as advice for a recording: what to do, what to paste, what it costs, all filled in."""

    action: str
    setting: str
    costs: str
    exact: bool
    cost_rank: str


_changes = cache(lambda: typed("remedies", "change", dict[str, Change]))


def remedy(name: str) -> Remedy:
    """Return a remedy by its id.

    Raises:
        KeyError: there is none.
    """
    # Advice names those of the first file, so a report parses no other.
    for file in REMEDY_FILES:
        if entry := remedies_of(file).get(name):
            return entry
    raise KeyError(name)


def possible(entry: Remedy, facts: FailureFacts) -> bool:
    """Tell whether a remedy applies, contradicts no fact and is not set already."""
    return facts.holds(entry) and not (entry.already and facts.has(entry.already))


def change(name: str, facts: FailureFacts) -> WordedChange | None:
    """Return a remedy as advice for a recording; None where it is not open to the run or has no setting there."""
    entry = _changes()[name]
    if not possible(remedy(entry.remedy), facts):
        return None
    action, setting, costs = (fill(text, facts) for text in (entry.action, entry.setting, entry.costs))
    if action is None or setting is None or costs is None:
        return None
    return WordedChange(action, setting, costs, entry.exact, entry.cost_rank)

"""The functions that read reports, with JSON's own types: for tests that change a report before they ask about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memprof.advice import after_oom, estimate, ranking, recorded_run
from memprof.advice.recorded_run import Effect
from memprof.analysis import compare as comparing
from memprof.analysis import headline
from memprof.analysis.allocations import alike, differences
from memprof.analysis.peaks import next_step as following
from memprof.analysis.ranks import across as comparing_ranks
from memprof.analysis.ranks import merge, summary
from memprof.analysis.views import Views
from memprof.report import Report
from memprof.report.advice import Advice
from memprof.report.allocations import Allocation
from memprof.report.codec import from_builtins, plain_entries, to_builtins
from memprof.report.comparison import Comparison, Published
from memprof.report.ranks import MissingRank, RankSummary
from memprof.report.run import OutOfMemory
from tests.reports.sample import sample

Plain = dict[str, Any]


def as_report(plain: Mapping[str, Any]) -> Report:
    return from_builtins(plain, Report)


# ---- analysis --------------------------------------------------------------------------------------------------------


def headline_of(report: Plain) -> Plain:
    return to_builtins(headline.headline_of(as_report(report)))


def with_headline(report: Plain) -> Plain:
    return to_builtins(headline.with_headline(as_report(report)))


def headline_of_comparison(comparison: Plain) -> Plain:
    return to_builtins(headline.headline_of_comparison(from_builtins(comparison, Comparison)))


def next_step(report: Plain) -> Plain | None:
    found = following.next_step(as_report(report))
    return None if found is None else to_builtins(found)


def fold(allocations: Iterable[Plain]) -> list[Plain]:
    return plain_entries(alike.fold(from_builtins(a, Allocation) for a in allocations))


def holdings_of_report(report: Plain) -> differences.Holdings:
    return differences.holdings_of_report(as_report(report))


def as_run(
    label: str,
    badge: comparing.Badge,
    report: Plain | None = None,
    published: Published | None = None,
    held: differences.Holdings | None = None,
) -> comparing.ComparisonColumn:
    return comparing.ComparisonColumn(label, badge, None if report is None else as_report(report), published, held)


def compare(runs: Sequence[comparing.ComparisonColumn], capacity: int | None = None) -> Plain:
    return to_builtins(comparing.compare(runs, capacity))


# ---- ranks -----------------------------------------------------------------------------------------------------------


def rank_summary(report: Plain, rank: int | None = None, file: str | None = None) -> Plain:
    return to_builtins(summary.rank_summary(as_report(report), rank, file))


def across(ranks: Iterable[Plain], world_size: int | None) -> Plain:
    return to_builtins(comparing_ranks.across(_summaries(ranks), world_size))


def merged(report: Plain, ranks: Iterable[Plain], world_size: int | None, missing: Iterable[Plain]) -> Plain:
    absent = [from_builtins(m, MissingRank) for m in missing]
    return to_builtins(merge.merged(as_report(report), _summaries(ranks), world_size, absent))


def fullest(ranks: Iterable[Plain]) -> int:
    return merge.fullest(_summaries(ranks))


def _summaries(ranks: Iterable[Plain]) -> list[RankSummary]:
    return [from_builtins(rank, RankSummary) for rank in ranks]


# ---- advice ----------------------------------------------------------------------------------------------------------


def run_of(report: Plain) -> recorded_run.AdvisedRun:
    return recorded_run.run_of(as_report(report))


def estimated_advice(report: Plain, analysis: Views | None = None) -> list[Plain]:
    return plain_entries(estimate.estimated_advice(as_report(report), analysis))


def look_ahead(report: Plain) -> Plain | None:
    found = after_oom.look_ahead(as_report(report))
    return None if found is None else to_builtins(found)


def ranked(entries: Sequence[Plain], oom: Plain | None = None) -> list[Plain]:
    """Rank entries that may lack what does not matter here."""
    rows = [_advice(entry) for entry in entries]
    found = ranking.ranked(rows, _failed(oom))
    return [entries[next(i for i, row in enumerate(rows) if row is each)] for each in found]


def with_words(entries: Sequence[Plain], oom: Plain | None = None) -> list[str | None]:
    """Return the words of each entry."""
    return [row.enough_words for row in ranking.with_words([_advice(entry) for entry in entries], _failed(oom))]


def is_enough(effect: Effect, run: recorded_run.AdvisedRun, oom: Plain | None) -> bool | None:
    return ranking.is_enough(effect, run, as_oom(oom))


def enough_together(first: Effect, second: Effect, run: recorded_run.AdvisedRun, oom: Plain | None) -> bool | None:
    return ranking.enough_together(first, second, run, as_oom(oom))


def as_oom(oom: Plain | None) -> OutOfMemory | None:
    """Return the allocation that failed; what is not given does not matter."""
    return None if oom is None else from_builtins(whole_oom(oom), OutOfMemory)


def whole_oom(oom: Plain) -> Plain:
    """Return a report's ``oom`` with what the model requires."""
    found = {"requested_bytes": 0, "device_free_bytes": None, "phase": None, "step": None, "stack": [], **oom}
    if found.get("ahead"):
        more = {"moment": None, "needed_bytes": 0, "available_bytes": None, "short_bytes": None}
        found["ahead"] = {"still": {}, **more, **found["ahead"]}
    return found


def _advice(entry: Plain) -> Advice:
    return from_builtins(
        {"action": "", "saves_bytes": 0, "costs": "", "exact": True, "basis": "estimated", **entry}, Advice
    )


def _failed(oom: Plain | None) -> Report:
    return as_report({**sample()[0], "oom": None if oom is None else whole_oom(oom)})

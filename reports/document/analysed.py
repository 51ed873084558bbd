"""Turn what :mod:`memprof.analysis` returns as dictionaries into the model, until it returns the model itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from memprof.analysis.allocations import alike
from memprof.analysis.headline import fit_words as _fit_words
from memprof.analysis.headline import headline_of, headline_of_comparison
from memprof.analysis.headline import peak_phase as _peak_phase
from memprof.analysis.headline import peak_words as _peak_words
from memprof.report.advice import Headline
from memprof.report.allocations import AliveGroup, Allocation
from memprof.report.codec import from_builtins, to_builtins
from memprof.report.comparison import ComparedCapacity, Comparison
from memprof.report.report import Report
from memprof.report.run import Source
from memprof.vocabulary import Phase


class SeriesSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a phase; its points are indices into the series."""

    phase: str
    step: int | None
    start_point: int
    end_point: int


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of each category at chosen instants, as ``Analysis.series`` gives them."""

    time_us: list[int]
    phase_spans: tuple[SeriesSpan, ...]
    categories: dict[str, list[int]]
    reserved: list[int] | None
    peak_point: int


def series_of(plain: object) -> Series:
    """Convert ``Analysis.series``."""
    return msgspec.convert(plain, Series)


def groups_of(plain: Iterable[object]) -> tuple[AliveGroup, ...]:
    """Convert ``Analysis.largest``."""
    return tuple(from_builtins(group, AliveGroup) for group in plain)


def allocations_of(plain: Iterable[object]) -> tuple[Allocation, ...]:
    """Convert ``Analysis.explain``."""
    return tuple(from_builtins(allocation, Allocation) for allocation in plain)


def fold(listed: Iterable[Allocation]) -> tuple[AliveGroup, ...]:
    """Fold similar allocations."""
    return groups_of(alike.fold(to_builtins(allocation) for allocation in listed))


def headline(report: Report) -> Headline:
    """Return the report's headline; one that was written without gets it here."""
    if report.headline is not None:
        return report.headline
    plain = to_builtins(report)
    if not report.peak.largest:  # an older memprof listed single allocations only
        del plain["peak"]["largest"]
    return from_builtins(headline_of(plain), Headline)


def compared_headline(comparison: Comparison) -> Headline:
    """Return the comparison's headline; one that was written without gets it here."""
    return comparison.headline or from_builtins(headline_of_comparison(to_builtins(comparison)), Headline)


def peak_words(source: Source) -> str:
    """Name the peak by what was recorded."""
    return _peak_words(to_builtins(source))


def peak_phase(report: Report) -> Phase | None:
    """Return the phase of the peak; ``None`` if nothing distinguishes the phases."""
    plain: Mapping[str, object] = {
        "peak": {"phase": report.peak.phase},
        "source": {"phases_known_by": report.source.phases_known_by},
        "phases": [{"phase": phase.phase} for phase in report.phases],
    }
    return Phase(found) if (found := _peak_phase(plain)) else None


def fit_words(capacity: ComparedCapacity, run: int) -> str:
    """Say whether a run of a comparison fits."""
    return _fit_words(to_builtins(capacity), run)

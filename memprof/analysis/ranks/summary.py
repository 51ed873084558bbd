"""Summarise one rank's report in a few kilobytes, enough for every comparison between ranks."""

from __future__ import annotations

from collections.abc import Iterable

from memprof.errors import InputError
from memprof.report import Report
from memprof.report.base import ByCategory
from memprof.report.codec import from_builtins
from memprof.report.peaks import PhasePeak
from memprof.report.ranks import RankDevicePeak, RankOutOfMemory, RankPeak, RankPhase, RankSummary
from memprof.vocabulary import Phase


def rank_summary(report: Report, rank: int | None = None, file: str | None = None) -> RankSummary:
    """Summarise one rank's report.

    Args:
        report: the rank's own report.
        rank: its number, where the report does not know it.
        file: the name of the recording; default: the report's own.
    """
    source, peak, device, oom = report.source, report.peak, report.device_peak, report.oom
    return RankSummary(
        rank=rank if rank is not None else source.rank or 0,
        node=source.node,
        device=source.device,
        device_name=source.device_name,
        device_total_bytes=source.device_total_bytes,
        file=file if file is not None else next(iter(source.files), None),
        history=source.history,
        tokens=_tokens(report, peak.step),
        peak=RankPeak(
            allocated_bytes=peak.allocated_bytes,
            active_bytes=peak.active_bytes,
            reserved_bytes=peak.reserved_bytes,
            non_torch_bytes=peak.non_torch_bytes,
            phase=peak.phase,
            step=peak.step,
            categories=_present(peak.categories),
        ),
        device_peak=RankDevicePeak(
            reserved_bytes=device.reserved_bytes,
            non_torch_bytes=device.non_torch_bytes,
            phase=device.phase,
            step=device.step,
        ),
        own_peaks=_present(report.own_peaks),
        phases=_highest(report.phases),
        host=report.host,
        oom=None
        if oom is None
        else RankOutOfMemory(
            requested_bytes=oom.requested_bytes, device_free_bytes=oom.device_free_bytes, phase=oom.phase, step=oom.step
        ),
    )


def check_summary(summary: object) -> RankSummary:
    """Read a summary that comes from another machine or version.

    Raises:
        InputError: it cannot be used.
    """
    try:
        return from_builtins(summary, RankSummary)
    except InputError:
        rank = summary.get("rank") if isinstance(summary, dict) else None
        raise InputError(
            f"the summary of rank {str(rank)[:12]} is damaged or of another version; write its report again."
        ) from None


def _present(categories: ByCategory) -> ByCategory:
    return {category: n for category, n in categories.items() if n}


def _highest(spans: Iterable[PhasePeak]) -> tuple[RankPhase, ...]:
    """Return each phase at its highest peak, in the order in which they first ran."""
    found: dict[Phase, RankPhase] = {}
    for span in spans:
        if span.phase not in found or span.peak_bytes > found[span.phase].peak_bytes:
            found[span.phase] = RankPhase(
                phase=span.phase, peak_bytes=span.peak_bytes, categories=_present(span.categories)
            )
    return tuple(found.values())


def _tokens(report: Report, step: int | None) -> int | None:
    """Return the tokens of the peak's step, or of the only step where the peak lies outside any step."""
    steps = report.growth.steps if report.growth is not None else ()
    return next((s.tokens for s in steps if s.step == step or len(steps) == 1), None)

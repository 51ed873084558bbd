"""Analyse a snapshot; users and everything that shows a run call :func:`analyze`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from memprof.analysis.allocations.alike import TimedGroup
from memprof.analysis.allocations.individual import IndividualAllocations, individual_allocations, largest_rows
from memprof.analysis.allocations.places import places_at_peak
from memprof.analysis.allocations.segment_map import SegmentMap, segment_map, segment_maps
from memprof.analysis.breakdown import Breakdown
from memprof.analysis.headline import headline_of, named_category
from memprof.analysis.peaks.by_device import devices_report
from memprof.analysis.report import build_report
from memprof.analysis.views import Views
from memprof.attribution.pipeline import attribute
from memprof.attribution.result import Attribution
from memprof.errors import UsageError
from memprof.report import Report
from memprof.report.advice import Advice
from memprof.report.codec import to_builtins
from memprof.report.peaks import Device
from memprof.report.run import StillAhead
from memprof.snapshot import Snapshot
from memprof.timeline.timeline import Timeline, build_timeline
from memprof.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from memprof.attribution.rules import RuleSet

#: A function that reads a report without advice, and the analysis it is of, and returns its advice.
Advisor = Callable[[Report, Views], tuple[Advice, ...]]
#: A function that reads a report with an ``oom`` and returns what is ``oom.ahead``, or None where nothing is known.
Outlook = Callable[[Report], StillAhead | None]
_LISTED = 50


class Largest(tuple[TimedGroup, ...]):
    """Groups of alike allocations, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from memprof.reports.notebook import largest_fragment

        return largest_fragment(self)


class Analysis(Views):
    """Give views of a snapshot's device, and its report.

    ``advisor`` fills the report's ``advice``; ``outlook`` says what a run that ran out of memory still had to allocate.
    ``rules`` are the stack rules that it was attributed with, None for the shipped ones.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        timeline: Timeline,
        attribution: Attribution,
        advisor: Advisor | None = None,
        outlook: Outlook | None = None,
        rules: RuleSet | None = None,
    ) -> None:
        super().__init__(snapshot, timeline, attribution)
        self._advisor, self._outlook, self._rules = advisor, outlook, rules

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return every device's own peak where the snapshot holds several."""
        return devices_report(self, self._rules)

    @cached_property
    def report(self) -> Report:
        """Return the report, its 50 largest allocations listed."""
        return self.report_listing(_LISTED)

    def report_listing(self, allocations: int | None) -> Report:
        """Return the report with so many allocations listed; ``None`` lists every one alive at the peak."""
        report = build_report(self, allocations, self.devices)
        if self._outlook is not None and report.oom is not None:
            report = replace(report, oom=replace(report.oom, ahead=self._outlook(report)))
        if self._advisor is not None:
            report = replace(report, advice=self._advisor(report, self))
        category = named_category(report)
        return replace(report, headline=headline_of(report, places_at_peak(self, category) if category else ()))

    def to_dict(self, allocations: int | None = _LISTED) -> dict[str, Any]:
        """Return the report as JSON's own types (schema ``memprof.report/1``); for ``allocations`` see
        :meth:`report_listing`."""
        return to_builtins(self.report if allocations == _LISTED else self.report_listing(allocations))

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report's page to ``path`` and return it; the page is one file and asks the network for nothing.

        Raises:
            InputError: the file cannot be written.
        """
        from memprof.reports.notebook import write_page

        page = Path(path)
        write_page(self, page)
        return page

    def figure(self, kind: str = "timeline", axis: str = "phase", max_points: int | None = 10_000) -> Figure:
        """Return a ``plotly.graph_objects.Figure``, the one that the page draws.

        Args:
            kind: ``timeline`` (memory by category over the run), ``breakdown`` (the peak by category) or ``steps``.
            axis: of a timeline: ``phase`` draws every phase equally wide, ``time`` uses the recording's clock.
            max_points: of a timeline: about how many instants are drawn, no peak missing; ``None`` draws the page's.

        Raises:
            UsageError: there is no such kind or axis, or the recording has nothing to draw for it.
        """
        from memprof.reports.figures import analysis_figure

        return analysis_figure(self, kind, axis, max_points)

    def largest(
        self, top: int | None = 10, at: str = "peak", category: str | None = None, address: int | None = None
    ) -> Largest:
        """List what is alive at an instant, alike allocations folded, the largest sum first; a notebook draws it."""
        return Largest(super().largest(top, at, category, address))

    def segments_at(self, at: str = "peak") -> SegmentMap:
        """Return the allocator's segments at an instant (see :meth:`instant_of`), their blocks and free memory.

        Raises:
            UsageError: there is no such instant, or the recording has no segments, as on a CPU.
        """
        if self.timeline.reserved is None:
            raise UsageError("a CPU recording has no segments.")
        return segment_map(self, self.instant_of(at), (at,))

    @cached_property
    def segment_maps(self) -> tuple[SegmentMap, ...]:
        """Return the segments at the peaks, when memory ran out, and at the end; empty for a CPU recording."""
        return segment_maps(self)

    def individual(self, most: int = 1500, most_groups: int = 400) -> IndividualAllocations:
        """Return the largest allocations by bytes times lifetime, each with its birth and death.

        The largest at the peak of every phase are among them. At most ``most`` are returned, of ``most_groups`` kinds.
        """
        highest: dict[str, Breakdown] = {str(self.peak.phase): self.peak}
        for breakdown in self.phases:
            if breakdown.active_bytes > getattr(highest.get(breakdown.phase), "active_bytes", -1):
                highest[breakdown.phase] = breakdown
        sets = [self.peak.rows, *(breakdown.rows for breakdown in highest.values())]
        forced = largest_rows(self.timeline.size, sets, 40)
        return individual_allocations(self, forced, most, most_groups)

    def __repr__(self) -> str:
        peak = self.peak
        where = [] if peak.phase == "other" else [str(peak.phase)]
        where += [] if peak.step is None else [f"step {peak.step}"]
        place = f" in {', '.join(where)}" if where else ""
        return f"Analysis(peak of {format_bytes(peak.active_bytes)}{place}, {self.timeline.n_events:,} events)"

    def _repr_html_(self) -> str:
        from memprof.reports.notebook import analysis_fragment

        return analysis_fragment(self)


def analyze(
    snapshot: Snapshot | str | Path,
    device: int | None = None,
    rules: RuleSet | None = None,
    advisor: Advisor | None = None,
    outlook: Outlook | None = None,
) -> Analysis:
    """Do what :func:`memprof.analyze` does, which passes the estimates of :mod:`memprof.advice`.

    Args:
        advisor: fills the report's ``advice``.
        outlook: fills the report's ``oom.ahead``.

    Raises:
        InputError: the file cannot be used.
        UsageError: the snapshot holds nothing of ``device``.
    """
    if not isinstance(snapshot, Snapshot):
        from memprof.snapshot import load_snapshot

        snapshot = load_snapshot(snapshot)
    timeline = build_timeline(snapshot, device)
    return Analysis(snapshot, timeline, attribute(snapshot, timeline, rules), advisor, outlook, rules)

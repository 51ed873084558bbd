"""Analyse a snapshot; users and everything that shows a run call :func:`analyze`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.analysis.allocations.places import places_at_peak
from memprof.analysis.headline import headline_of, named_category
from memprof.analysis.peaks.by_device import devices_report
from memprof.analysis.registered_renderer import Largest, drawing
from memprof.analysis.report import report_dict
from memprof.analysis.views import Views
from memprof.attribution.pipeline import attribute
from memprof.attribution.result import Attribution
from memprof.report import Report
from memprof.report.codec import from_builtins
from memprof.snapshot import Snapshot
from memprof.timeline.timeline import Timeline, build_timeline
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.attribution.rules import RuleSet

#: A function that reads a report without advice, and the analysis it is of, and returns its ``advice`` entries.
Advisor = Callable[[Mapping[str, Any], Views], list[dict[str, Any]]]
#: A function that reads a report with an ``oom`` and returns what is ``oom.ahead``, or None where nothing is known.
Outlook = Callable[[Mapping[str, Any]], dict[str, Any] | None]


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
    def devices(self) -> list[dict[str, Any]]:
        """Return every device's own peak where the snapshot holds several (see ``devices`` in the report's JSON)."""
        return devices_report(self, self._rules)

    def to_dict(self, allocations: int | None = 50) -> dict[str, Any]:
        """Return the report (schema ``memprof.report/1``); ``allocations=None`` lists every one alive at the peak."""
        report = report_dict(self, allocations, self.devices)
        if self._outlook is not None and report["oom"]:
            report["oom"]["ahead"] = self._outlook(report)
        if self._advisor is not None:
            report["advice"] = self._advisor(report, self)
        category = named_category(report)
        return {**report, "headline": headline_of(report, places_at_peak(self, category) if category else ())}

    @cached_property
    def report(self) -> Report:
        """Return the report, its 50 largest allocations listed."""
        return from_builtins(self.to_dict(), Report)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the report's page to ``path`` and return it; the page is one file and asks the network for nothing.

        Raises:
            InputError: the file cannot be written.
        """
        page = Path(path)
        drawing().write_page(self, page)
        return page

    def largest(
        self, top: int | None = 10, at: str = "peak", category: str | None = None, address: int | None = None
    ) -> Largest:
        """List what is alive at an instant, alike allocations folded, the largest sum first; a notebook draws it."""
        return Largest(super().largest(top, at, category, address))

    def __repr__(self) -> str:
        peak = self.peak
        where = [] if peak.phase == "other" else [str(peak.phase)]
        where += [] if peak.step is None else [f"step {peak.step}"]
        place = f" in {', '.join(where)}" if where else ""
        return f"Analysis(peak of {format_bytes(peak.active_bytes)}{place}, {self.timeline.n_events:,} events)"

    def _repr_html_(self) -> str:
        return str(drawing().analysis_fragment(self))


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

"""Draw a report's page, section by section; a section that has nothing to say is left out."""

from __future__ import annotations

from pathlib import Path

from memprof.reports.document.build import badge_of
from memprof.reports.document.model import Document
from memprof.reports.document.page_title import subtitle_of
from memprof.reports.document.ranks import recordings_table
from memprof.reports.document.tables import phase_table
from memprof.reports.html.advice import advice_section
from memprof.reports.html.charts import icicle_section, timeline_section
from memprof.reports.html.elements import Markup, el
from memprof.reports.html.evidence import bottom
from memprof.reports.html.interactive_timeline import MAX_PACKED, timeline_data
from memprof.reports.html.opened import Opened, opened_data
from memprof.reports.html.page import PageData, render_page
from memprof.reports.html.ranks_sections import ranks_section, recordings_section
from memprof.reports.html.summary import oom_banner, prediction_section, room_section, summary
from memprof.reports.html.tables import (
    allocation_table,
    component_section,
    device_peak_table,
    phases_section,
    steps_section,
)
from memprof.reports.html.views.segment_map import MapDrawing, map_drawings, segment_section
from memprof.reports.html.views.source import source_section
from msgspec.structs import replace

from memprof.files import write_text

# More are in the JSON file for those who ask for them.
_MAX_ALLOCATIONS = 200


def write_html(document: Document, path: Path) -> None:
    """Write a report's page, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, render_html(document))


def render_html(document: Document) -> str:
    """Render a report's page as text."""
    opened = Opened(document)
    chart = "timeline" if document.timeline else None
    subtitle = subtitle_of(document.report)
    maps = map_drawings(document.segments)
    sections, data = _sections(document, opened, maps), _data(document, opened, maps)
    return render_page(document.title, subtitle, sections, data, chart)


def _sections(document: Document, opened: Opened, maps: tuple[MapDrawing, ...]) -> list[Markup | None]:
    """Make everything between the page's header and its footer."""
    report, recordings = document.report, recordings_section(recordings_table(document.report))
    return [
        oom_banner(report.oom),
        ranks_section(document.ranks),
        recordings if document.ranks else None,
        el("h2", {"id": "in-full", "class": "in-full"}, document.ranks.in_full) if document.ranks else None,
        summary(document.summary, badge_of(report.source), document.headline, document.rows),
        room_section(document.room),
        prediction_section(report),
        advice_section(report),
        recordings if not document.ranks else None,
        component_section(document.rows, document.summary.moment),
        timeline_section(document, opened),
        segment_section(document.segments, maps),
        icicle_section(document.icicle, opened, document.summary.moment),
        allocation_table(document, opened),
        source_section(report, document.texts, document.summary.moment),
        phases_section(phase_table(report)),
        device_peak_table(document, opened),
        steps_section(report.growth, opened),
        bottom(document),
    ]


def _data(document: Document, opened: Opened, maps: tuple[MapDrawing, ...]) -> PageData:
    """Collect what the page's script needs: the report to download, and the timeline."""
    peak, timeline = document.report.peak, document.timeline
    peak = replace(peak, allocations=peak.allocations[:_MAX_ALLOCATIONS])
    return PageData(
        report=replace(document.report, peak=peak),
        opened=opened_data([opened]),
        segments=maps or None,
        timeline=timeline_data(timeline, document, MAX_PACKED, opened) if timeline else None,
    )

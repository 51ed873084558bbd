"""The page's sections, top to bottom; a section that has nothing to say is left out."""

from __future__ import annotations

from memprof.reports.markup import Markup, el, join
from memprof.reports.model import Document
from memprof.reports.page_advice import advice_section
from memprof.reports.page_bottom import bottom
from memprof.reports.page_charts import icicle_section, timeline_section
from memprof.reports.page_prediction import prediction_section
from memprof.reports.page_ranks import ranks_section
from memprof.reports.page_summary import oom_banner, page_header, summary
from memprof.reports.page_tables import allocation_table, component_table, device_peak_table, phase_table, steps_table

__all__ = ["page_body"]


def page_body(document: Document) -> Markup:
    """Everything between the page's header and its footer."""
    return join(
        page_header(document.title, document.subtitle),
        el(
            "main",
            {"id": "main"},
            oom_banner(document.oom),
            summary(document.summary, document.badge, document.advice.first),
            prediction_section(document.prediction),
            advice_section(document.advice),
            ranks_section(document.ranks),
            component_table(document.rows),
            timeline_section(document.timeline, document),
            icicle_section(document.icicle),
            allocation_table(document),
            phase_table(document.phases),
            device_peak_table(document.device_peak),
            steps_table(document.steps),
            bottom(document),
        ),
    )

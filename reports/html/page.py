"""The page's sections, top to bottom; a section that has nothing to say is left out."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from memprof.reports.document.comparison import Comparison
from memprof.reports.document.model import Allocation, Document, Timeline
from memprof.reports.document.words import category_label
from memprof.reports.files import write_text
from memprof.reports.html.charts import icicle_section, timeline_section
from memprof.reports.html.compare import comparison_body
from memprof.reports.html.elements import Markup, el, join
from memprof.reports.html.evidence import bottom
from memprof.reports.html.plotly_figures import thinned, timeline_figure
from memprof.reports.html.ranks import ranks_section
from memprof.reports.html.summary import advice_section, oom_banner, page_header, prediction_section, summary
from memprof.reports.html.tables import allocation_table, component_table, device_peak_table, phase_table, steps_table
from memprof.reports.json import dumps
from memprof.reports.palette import DARK, LIGHT, PATTERNS, PHASES, css_variables, slug

from memprof._version import __version__

__all__ = [
    "PHASE_UNIT",
    "pack_columns",
    "page_body",
    "render_comparison",
    "render_html",
    "render_plain",
    "write_comparison",
    "write_html",
]

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


# Nothing is fetched and nothing but the page's own scripts (by their hashes) is run; plotly sets inline styles.
_POLICY = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


# Real runs take one to two bytes an event, packed. What takes more than this in all is thinned until it fits, which
# keeps the page below 2 MB beside plotly's 1.2.
_MAX_PACKED = 650_000
# The phase axis travels in whole numbers, this many to a unit.
PHASE_UNIT = 1_000_000
# More are in the JSON file for those who ask for them.
_MAX_ALLOCATIONS = 200


def write_html(document: Document, path: Path) -> None:
    """Write the page, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, render_html(document))


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the page of a comparison, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, render_comparison(comparison))


def render_html(document: Document) -> str:
    """The whole page as text."""
    return _render(document.title, page_body(document), _data(document), bool(document.timeline))


def render_plain(title: str, body: Markup, data: dict[str, Any]) -> str:
    """A page without a chart of its own script's: ``data["report"]`` is what its download button would save."""
    return _render(title, body, data, charts=False)


def render_comparison(comparison: Comparison) -> str:
    """The whole page of a comparison as text."""
    drawn = [c.document for c in comparison.columns if c.document and c.document.timeline]
    data: dict[str, Any] = {"report": comparison.data}
    if drawn:
        data["timelines"] = [_timeline_data(d.timeline, d, _MAX_PACKED // len(drawn)) for d in drawn if d.timeline]
    return _render(comparison.title, comparison_body(comparison), data, bool(drawn))


def _render(title: str, body: Markup, data: dict[str, Any], charts: bool) -> str:
    scripts = [_asset("templates/report.js")]
    if charts:
        scripts.insert(0, _asset("assets/plotly-basic.min.js"))
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    page = Template(_asset("templates/page.html"))
    return page.substitute(
        policy=_POLICY.format(hashes=hashes),
        title=join(f"{title} · memprof"),
        style=_style(),
        body=body,
        footer=_footer(charts),
        data=_packed(data),
        scripts=join(*[Markup(f"<script>{script}</script>") for script in scripts]),
    )


def _asset(name: str) -> str:
    return files("memprof.reports").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _packed(data: Any) -> str:
    """JSON, gzip'd, in base64: small, and without a character that could end its element."""
    return base64.b64encode(gzip.compress(dumps(data, indent=None).encode(), mtime=0)).decode()


def _style() -> str:
    css = Template(_asset("templates/report.css"))
    colours = "\n".join(f".c-{name} {{ --c: var(--c-{name}); --on: var(--on-{name}); }}" for name in LIGHT)
    phases = "\n".join(f".p-{name} {{ --c: {colour}; }}" for name, colour in PHASES.items())
    return css.substitute(light=css_variables(LIGHT), dark=css_variables(DARK), categories=colours, phases=phases)


def _footer(charts: bool) -> Markup:
    words = f"memprof {__version__} · self-contained file, no network access"
    words += " · plotly.js basic (MIT)" if charts else ""
    return el("footer", {"class": "muted"}, words)


def _data(document: Document) -> dict[str, Any]:
    """What the page's script needs: the report to download, and the timeline."""
    peak = document.report["peak"]
    peak = {**peak, "allocations": peak["allocations"][:_MAX_ALLOCATIONS]}
    data: dict[str, Any] = {"report": {**document.report, "peak": peak}}
    if document.timeline:
        data["timeline"] = _timeline_data(document.timeline, document, _MAX_PACKED)
    return data


def _unfilled(timeline: Timeline) -> Timeline:
    """The same traces with one point each: what they look like."""
    return replace(
        timeline,
        time_us=(0,),
        phase_x=(0.0,),
        spans=(),
        categories=dict.fromkeys(timeline.categories, (0,)),
        reserved=None if timeline.reserved is None else (0,),
        total=(0,),
        peak_point=0,
    )


def pack_columns(columns: Iterable[Sequence[int]]) -> str:
    """Whole numbers as differences, their bytes of equal weight side by side, gzip'd, in base64.

    An event changes one category: nearly every difference is zero, and 200k events take some hundred kilobytes.
    """
    planes = []
    for column in columns:
        steps = np.diff(np.asarray(column, dtype=np.int64), prepend=0).astype("<i8")
        planes.append(steps.view(np.uint8).reshape(-1, 8).T.tobytes())
    return base64.b64encode(gzip.compress(b"".join(planes), 6, mtime=0)).decode()


def _columns(timeline: Timeline) -> dict[str, Sequence[int]]:
    """Everything drawn, by name, in whole numbers: microseconds, parts of the phase axis, bytes."""
    columns: dict[str, Sequence[int]] = {
        "time": timeline.time_us,
        "phase": [round(x * PHASE_UNIT) for x in timeline.phase_x],
        **timeline.categories,
    }
    if timeline.reserved is not None:
        columns["reserved"] = timeline.reserved
    return columns


def _fitted(timeline: Timeline, most: int) -> tuple[Timeline, str]:
    """The timeline and its packed points, thinned where they would take more than ``most`` bytes."""
    points = pack_columns(_columns(timeline).values())
    while len(points) > most and len(timeline.time_us) > 5000:
        timeline = thinned(timeline, len(timeline.time_us) // 2)
        points = pack_columns(_columns(timeline).values())
    return timeline, points


def _timeline_data(whole: Timeline, document: Document, most: int) -> dict[str, Any]:
    timeline, points = _fitted(whole, most)
    figure = json.loads(timeline_figure(_unfilled(timeline)).to_json())
    figure["layout"].pop("template", None)
    for trace in figure["data"]:
        del trace["x"], trace["y"]  # sent once and packed: "points"
    return {
        "figure": figure,
        "n_points": len(timeline.time_us),
        "columns": list(_columns(timeline)),
        "points": points,
        "spans": [
            [slug(s.phase), s.label, s.step, s.start_point, min(s.end_point, len(timeline.time_us) - 1), s.short]
            for s in timeline.spans
        ],
        "phase_colours": PHASES,
        "patterns": PATTERNS,
        "labels": {c: category_label(c) for c in timeline.categories},
        "peak_point": timeline.peak_point,
        "clock_us": timeline.clock_us,
        # The largest at the peak, and at the other phases' peaks: of those the panel says which are alive.
        "allocations": [
            *[[*_lives(a), 1] for a in document.allocations],
            *[[*_lives(a), 0] for a in document.elsewhere],
        ],
    }


def _lives(allocation: Allocation) -> list[Any]:
    name = allocation.name or allocation.site or allocation.detail or allocation.category_label
    lives = [list(life) for life in allocation.lives]
    return [name, slug(allocation.category), allocation.each_bytes, lives]

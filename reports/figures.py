"""Build plotly's figures of a run, a comparison and a plan; notebooks show them and the page draws the same ones.

plotly is imported when a figure is built. Colours are the light theme's; the page replaces them in the dark one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from memprof.reports.document.build import timeline_of
from memprof.reports.document.model import TimelineSeries
from memprof.reports.document.tables import category_parts
from memprof.reports.document.text import category_label, phase_label, plain, thousands
from memprof.reports.html.static_timeline import nice_step
from memprof.reports.palette import FALLBACK, LIGHT, PATTERNS, PHASES
from memprof.reports.thinning import thinned

from memprof.errors import UsageError
from memprof.report import Report
from memprof.report.run import StepGrowth
from memprof.units import GIB, amount
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.reports.document.plan import PlanDocument, Point
    from plotly.graph_objects import Figure

    from memprof.analysis.analysis import Analysis
    from memprof.analysis.breakdown import Breakdown
    from memprof.report.comparison import Comparison
    from memprof.report.plan import Plan


class FigureJson(TypedDict):
    """A figure as plotly.js draws it; the page needs no more of plotly, whose Python classes take long to import."""

    data: list[dict[str, object]]
    layout: dict[str, object]


_MIB = 1 << 20
#: What a figure of one run shows, and where a timeline's points lie (see :func:`analysis_figure`).
_KINDS = ("timeline", "breakdown", "steps")
_AXES = ("phase", "time")
# Plotly draws so many points a category at once; the page, which draws pixel columns, has more.
MAX_POINTS = 10_000
_INK, _SOFT, _LINE, _FAINT, _GOOD, _BAD, _PAPER = (
    "#15191e", "#5b636d", "#e2e6ea", "#f3f5f7", "#1a7f37", "#b3231f", "#ffffff",
)  # fmt: skip
_CLEAR = "rgba(0,0,0,0)"
# plotly's template "none", in the form in which its Python classes write it.
_NO_TEMPLATE = {"data": {"scatter": [{"type": "scatter"}]}}
# About how wide a figure is drawn, and a letter of its labels, in pixels: what fits where.
_WIDTH, _LETTER = 900, 6.6


def analysis_figure(
    analysis: Analysis, kind: str = "timeline", axis: str = "phase", max_points: int | None = MAX_POINTS
) -> Figure:
    """Build a figure of an analysed run.

    Args:
        analysis: what :func:`memprof.analyze` returned.
        kind: ``timeline`` (memory by category over the run), ``breakdown`` (the peak by category) or ``steps`` (peaks
            and what is left, from optimizer step to optimizer step).
        axis: of a timeline: ``phase`` draws every phase equally wide, ``time`` uses the recording's clock.
        max_points: of a timeline: about how many instants are drawn, no peak missing; ``None`` draws those of the page.

    Raises:
        UsageError: there is no such kind or axis, or the recording has nothing to draw for it.
    """
    if axis not in _AXES:
        raise UsageError(f"no axis {axis!r}: give {' or '.join(_AXES)}.")
    if kind == "timeline":
        whole = timeline_of(analysis)
        if whole is None:
            raise UsageError("this recording has no history, so there is no timeline; use figure('breakdown').")
        return timeline_figure(thinned(whole, max_points) if max_points else whole, axis)
    if kind == "breakdown":
        return breakdown_figure(analysis.peak)
    if kind == "steps":
        growth = analysis.report.growth
        if growth is None:
            raise UsageError("this recording has no optimizer steps to compare.")
        return steps_figure(growth)
    raise UsageError(f"no figure {kind!r}: give {', '.join(_KINDS)}.")


def figure(found: Analysis | Breakdown | Report | Comparison | Plan, kind: str = "timeline") -> Figure:
    """Build the figure of what memprof found, as a ``plotly.graph_objects.Figure``.

    Args:
        found: an analysis (see ``kind``), a breakdown, a report (its peak by category), a comparison, or a plan.
        kind: of an analysis: ``timeline``, ``breakdown`` or ``steps``.

    Raises:
        UsageError: there is nothing to draw.
    """
    if isinstance(found, Report):
        return _category_bars(found.peak.categories)
    from memprof.analysis.analysis import Analysis
    from memprof.report.comparison import Comparison
    from memprof.report.plan import Plan

    if isinstance(found, Comparison):
        return comparison_figure(found)
    if isinstance(found, Plan):
        from memprof.reports.document.plan import PlanDocument

        return front_figure(PlanDocument(found))
    return analysis_figure(found, kind) if isinstance(found, Analysis) else breakdown_figure(found)


# ---- memory over the run ---------------------------------------------------------------------------------------------


def timeline_figure(timeline: TimelineSeries, axis: str = "phase") -> Figure:
    """Stack the categories' bytes over the run, the phases as a ribbon above, reserved memory as a dotted line."""
    drawn = timeline_json(timeline, axis)
    return _made(drawn["data"], drawn["layout"])


def timeline_json(timeline: TimelineSeries, axis: str = "phase", points: bool = True) -> FigureJson:
    """Return :func:`timeline_figure` as the JSON that plotly.js draws, without importing plotly.

    Without ``points`` the traces have no coordinates: the page sends those once, packed, and puts them in again.
    """
    x = timeline.phase_x if axis == "phase" else [time / timeline.unit for time in timeline.time_us]
    both = {"mode": "lines", "type": "scatter", "hovertemplate": "%{y:.2f} GiB"}
    curves: list[tuple[dict[str, object], Sequence[int]]] = [
        (
            {
                **both, "name": category_label(category), "meta": category, "stackgroup": "memory",
                # Separator lines would erase narrow spikes.
                "fillcolor": LIGHT.get(category, FALLBACK), "line": {"shape": "hv", "width": 0},
            },
            values,
        )
        for category, values in timeline.categories.items()
    ]  # fmt: skip
    if timeline.reserved is not None:
        line = {"color": _INK, "dash": "dot", "shape": "hv", "width": 1.3}
        curves.append(({**both, "name": "Reserved", "meta": "reserved", "line": line}, timeline.reserved))
    traces = [
        {**trace, **({"x": list(x), "y": [n / GIB for n in values]} if points else {})} for trace, values in curves
    ]
    title = {} if axis == "phase" else {"title": {"text": "seconds" if timeline.timed else "events"}}
    last = x[-1] if x[-1] > x[0] else x[0] + 1
    layout = {
        **_layout(),
        "margin": {"l": 46, "r": 8, "t": 42, "b": 44},
        "xaxis": {
            "range": [x[0], last], "showgrid": False, "zeroline": False, "showticklabels": axis == "time", **title,
        },
        "yaxis": {**_gib_or_mib_axis(timeline.highest_bytes), "fixedrange": True, **_beyond_the_traces(timeline)},
        "dragmode": "zoom",
        "hovermode": "x unified",
        "shapes": [*_ribbon(timeline, x), *_limit(timeline, x)],
        "annotations": [_peak_label(timeline, x), *_limit_labels(timeline, x), *_phase_names(timeline, x)],
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _ribbon(timeline: TimelineSeries, x: Sequence[float]) -> list[dict[str, object]]:
    """Draw a box for each phase above the chart, in order."""
    last = len(x) - 1
    return [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": x[span.start_point], "x1": x[min(span.end_point, last)],
            "y0": 1.015, "y1": 1.055, "line": {"width": 0}, "fillcolor": PHASES.get(span.phase, FALLBACK),
        }
        for span in timeline.spans
    ]  # fmt: skip


def _beyond_the_traces(timeline: TimelineSeries) -> dict[str, object]:
    """Return the range of an axis that also has the GPU's capacity and the request that failed on it."""
    shown = timeline.capacity_bytes is not None or timeline.failed is not None
    return {"range": [0, timeline.highest_bytes * 1.06 / GIB]} if shown else {}


def _limit(timeline: TimelineSeries, x: Sequence[float]) -> list[dict[str, object]]:
    """Draw the GPU's capacity as a line, and the request that failed on top of what was reserved then."""
    shapes = []
    if timeline.capacity_bytes is not None:
        shapes.append({**_capacity_line(timeline.capacity_bytes), "name": "capacity"})
    if (failed := timeline.failed) is not None:
        at, base = x[failed.point], failed.base_bytes / GIB
        shapes.append({
            "type": "line", "xref": "x", "yref": "y", "x0": at, "x1": at, "y0": base, "y1": base + failed.bytes / GIB,
            "line": {"color": _BAD, "width": 6}, "name": "request",
        })  # fmt: skip
    return shapes


def _capacity_line(capacity: int) -> dict[str, object]:
    y = capacity / GIB
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": y, "y1": y,
        "line": {"color": _BAD, "dash": "dash", "width": 1.5},
    }  # fmt: skip


def _limit_labels(timeline: TimelineSeries, x: Sequence[float]) -> list[dict[str, object]]:
    labels: list[dict[str, object]] = []
    shared = {"showarrow": False, "font": {"size": 11.5, "color": _BAD}}
    if (capacity := timeline.capacity_bytes) is not None:
        labels.append({
            **shared, "xref": "paper", "x": 0.005, "xanchor": "left", "y": capacity / GIB, "yanchor": "bottom",
            "text": f"capacity {amount(capacity)}", "name": "capacity",
        })  # fmt: skip
    if (failed := timeline.failed) is not None:
        at = x[failed.point]
        right = at > (x[0] + x[-1]) / 2
        labels.append({
            **shared, "xref": "x", "x": at, "xanchor": "right" if right else "left", "xshift": -6 if right else 6,
            "y": (failed.base_bytes + failed.bytes) / GIB, "yanchor": "top", "text": failed.label, "name": "request",
        })  # fmt: skip
    return labels


def _peak_label(timeline: TimelineSeries, x: Sequence[float]) -> dict[str, object]:
    peak, at = timeline.total[timeline.peak_point], x[timeline.peak_point]
    side = -46 if at > (x[0] + x[-1]) / 2 else 46
    return {
        "x": at, "y": peak / GIB, "text": f"<b>{amount(peak)}</b> peak", "showarrow": True, "arrowhead": 0,
        "arrowwidth": 1, "arrowcolor": _SOFT, "ax": side, "ay": -12, "font": {"size": 12, "color": _INK},
    }  # fmt: skip


def _phase_names(timeline: TimelineSeries, x: Sequence[float]) -> list[dict[str, object]]:
    """Write the phases' names where they fit."""
    whole, last = (x[-1] - x[0]) or 1, len(x) - 1
    found: list[dict[str, object]] = []
    for span in timeline.spans:
        left, right = x[span.start_point], x[min(span.end_point, last)]
        label = phase_label(span.phase)
        if (right - left) / whole * _WIDTH > _LETTER * len(label):
            found.append({
                "x": (left + right) / 2, "y": 1.06, "xref": "x", "yref": "paper", "yanchor": "bottom", "text": label,
                "showarrow": False, "font": {"size": 10.5, "color": _SOFT},
            })  # fmt: skip
    return found


# ---- the composition at one instant, from step to step, side by side -------------------------------------------------


def breakdown_figure(breakdown: Breakdown) -> Figure:
    """Draw the composition at one instant, a bar for each category."""
    return _category_bars(breakdown.categories)


def _category_bars(categories: Mapping[Category, int]) -> Figure:
    """Draw a bar for each category that is there, the largest on top."""
    parts = sorted(category_parts({Category(c): n for c, n in categories.items()}), key=lambda part: part.bytes)
    bars: dict[str, object] = {
        "type": "bar", "orientation": "h", "y": [part.label for part in parts], "x": [p.bytes / GIB for p in parts],
        "text": [amount(part.bytes) for part in parts], "textposition": "auto", "hoverinfo": "skip",
        "marker": {
            "color": [LIGHT.get(part.id, FALLBACK) for part in parts],
            "pattern": {"shape": [PATTERNS.get(part.id, "") for part in parts], "size": 6, "solidity": 0.2},
        },
    }  # fmt: skip
    return _made([bars], {**_layout(), "xaxis": _value_axis(), "yaxis": {"automargin": True}})


def steps_figure(growth: StepGrowth) -> Figure:
    """Draw each optimizer step's peak, and what its end leaves."""
    steps = [step.step for step in growth.steps]
    lines: list[dict[str, object]] = [
        {
            "type": "scatter", "mode": "lines+markers", "name": name, "x": steps, "y": [n / GIB for n in values],
            "line": {"color": colour}, "meta": colour_name, "hovertemplate": "%{y:.2f} GiB",
        }
        for name, values, colour, colour_name in (
            ("Peak", [step.peak_bytes for step in growth.steps], _BAD, "bad"),
            ("Left at its end", [step.end_bytes for step in growth.steps], _SOFT, "soft"),
        )
    ]  # fmt: skip
    layout = {
        **_layout(), "showlegend": True, "hovermode": "x unified",
        "xaxis": {"title": {"text": "optimizer step"}, "tickformat": "d", "zeroline": False}, "yaxis": _value_axis(),
    }  # fmt: skip
    return _made(lines, layout)


def comparison_figure(comparison: Comparison) -> Figure:
    """Stack the categories at each run's peak, the runs side by side, with the device's capacity where it is known.

    Published runs have rows and no categories; they are drawn by rows.
    """
    labels = [plain(run.label) for run in comparison.runs]
    bars = []
    for row in comparison.rows:
        if row.id == "total":
            continue
        for part in row.categories:
            bars.append(_stacked(part.label, labels, part.at_peak, LIGHT.get(part.id, FALLBACK), part.id))
        whole = [n if run.report is None else None for n, run in zip(row.at_peak, comparison.runs, strict=True)]
        if any(whole):
            bars.append(_stacked(f"{row.label} (published)", labels, whole, FALLBACK, row.id))
    layout = {**_layout(), "barmode": "stack", "showlegend": True, "yaxis": _value_axis()}
    if (capacity := comparison.capacity) is not None and capacity.bytes:
        layout["shapes"] = [_capacity_line(capacity.bytes)]
        layout["annotations"] = [{
            "xref": "paper", "x": 1, "y": capacity.bytes / GIB, "text": f"capacity {amount(capacity.bytes)}",
            "showarrow": False, "xanchor": "right", "yanchor": "bottom", "font": {"color": _BAD},
        }]  # fmt: skip
    return _made(bars, layout)


def _stacked(
    name: str, labels: Sequence[str], values: Sequence[int | None], colour: str, identifier: str
) -> dict[str, object]:
    return {
        "type": "bar", "name": name, "x": list(labels), "y": [None if n is None else n / GIB for n in values],
        "text": [amount(n) if n else "" for n in values], "hovertemplate": "%{fullData.name}: %{text}<extra></extra>",
        "textposition": "none", "marker": {"color": colour}, "meta": identifier,
    }  # fmt: skip


# ---- a plan: memory against time -------------------------------------------------------------------------------------


def front_figure(plan: PlanDocument) -> Figure:
    """Draw a plan's rows by memory and estimated time: the front as a line, the GPU's limit, what lies beyond it grey.

    Raises:
        UsageError: the plan has no estimated times.
    """
    drawn = front_json(plan)
    return _made(drawn["data"], drawn["layout"])


def front_json(plan: PlanDocument) -> FigureJson:
    """Return :func:`front_figure` as the JSON that plotly.js draws, without importing plotly.

    Raises:
        UsageError: the plan has no estimated times.
    """
    points = plan.priced()
    if not points:
        raise UsageError("the plan has no estimated times, so there is no front to draw; give --gpu by its name.")
    limit = plan.plan.limit_bytes
    front = sorted((p for p in points if p.on_front), key=lambda point: point.bytes)
    scale, unit = (1000, "ms") if max(p.seconds for p in points) < 1 else (1, "s")
    path: dict[str, object] = {
        "type": "scatter", "mode": "lines", "x": [p.bytes / GIB for p in front], "meta": "soft",
        "y": [p.seconds * scale for p in front], "hoverinfo": "skip", "name": "front",
        "line": {"color": _SOFT, "width": 1.5, "dash": "dot"},
    }  # fmt: skip
    traces = [path]
    for fits, colour, name in ((False, _SOFT, "soft"), (True, _GOOD, "good")):
        traces.append(_dots([p for p in points if p.fits is fits], scale, colour, name))
    of = f"time of {thousands(1000)} tokens" if plan.per_tokens else "time of a step"
    x_axis, high = _memory_axis([limit, *(p.bytes for p in points)])
    end = limit / GIB
    layout = {
        **_layout(),
        "margin": {"l": 56, "r": 14, "t": 26, "b": 46},
        "hovermode": "closest",
        "hoverlabel": {"align": "left", "bgcolor": _PAPER, "bordercolor": _SOFT, "font": {"color": _INK, "size": 12.5}},
        "xaxis": x_axis,
        "yaxis": {
            **_value_axis(f"estimated {of}, {unit}"), "fixedrange": True,
            "range": [0, max(p.seconds for p in points) * scale * 1.2],
        },
        "shapes": [
            {**_UPRIGHT, "type": "rect", "x0": end, "x1": max(high, end), "line": {"width": 0}, "fillcolor": _FAINT,
             "layer": "below", "name": "faint"},
            {**_UPRIGHT, "type": "line", "x0": end, "x1": end, "line": {"width": 1.5, "color": _BAD}, "name": "bad"},
        ],
        "annotations": [{
            "x": math.log10(end) if x_axis["type"] == "log" else end, "y": 1, "xref": "x", "yref": "paper",
            "text": f"limit {amount(limit)}", "showarrow": False, "xanchor": "right", "yanchor": "bottom",
            "font": {"size": 11.5, "color": _BAD}, "name": "bad",
        }],
    }  # fmt: skip
    return {"data": traces, "layout": layout}


_UPRIGHT = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1}
_TICKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 80, 128, 192, 256, 384, 512, 1024)


def _memory_axis(sizes: Sequence[int]) -> tuple[dict[str, object], float]:
    """Return the axis of memory, logarithmic if the sizes differ by more than four times, and where it ends in GiB."""
    least, most = min(sizes) / GIB, max(sizes) / GIB
    axis: dict[str, object] = {
        "title": {"text": "memory needed, GiB"}, "gridcolor": _LINE, "zeroline": False, "fixedrange": True,
    }  # fmt: skip
    if most <= 4 * least:
        return {**axis, "type": "linear", "range": [0, most * 1.08]}, most * 1.08
    low, high = least * 0.8, most * 1.2
    ticks = [n for n in _TICKS if low <= n <= high]
    shown = {"tickvals": ticks, "ticktext": [str(n) for n in ticks]}
    return {**axis, "type": "log", "range": [math.log10(low), math.log10(high)], **shown}, high


def _dots(points: Sequence[Point], scale: int, colour: str, name: str) -> dict[str, object]:
    """Draw rows as points: filled on the front, larger the fastest that fits."""
    return {
        "type": "scatter", "mode": "markers+text", "meta": name, "name": "fits" if name == "good" else "does not fit",
        "x": [p.bytes / GIB for p in points], "y": [p.seconds * scale for p in points],
        "text": [_unmarked(p.name) if p.on_front else "" for p in points], "textposition": "top center",
        "customdata": [[_unmarked(p.name), p.on_front, p.fastest] for p in points],
        "hovertemplate": [
            f"<b>{_unmarked(p.name)}</b><br>{'<br>'.join(_unmarked(line) for line in p.lines)}<extra></extra>"
            for p in points
        ],
        "marker": {
            "size": [15 if p.fastest else 11 for p in points], "opacity": 1, "line": {"width": 1.5, "color": colour},
            "color": [colour if p.on_front else _PAPER for p in points],
        },
    }  # fmt: skip


def _unmarked(text: str) -> str:
    """Leave out of a name what plotly would read as markup."""
    return "".join(letter for letter in plain(text) if letter not in "<>&%{}")


# ---- all figures -----------------------------------------------------------------------------------------------------


def _layout() -> dict[str, object]:
    return {
        "template": _NO_TEMPLATE, "showlegend": False, "paper_bgcolor": _CLEAR, "plot_bgcolor": _CLEAR,
        "font": {"color": _SOFT, "size": 11.5},
    }  # fmt: skip


def _value_axis(title: str = "GiB") -> dict[str, object]:
    return {"title": {"text": title}, "rangemode": "tozero", "zeroline": False, "gridcolor": _LINE}


def _gib_or_mib_axis(highest: int) -> dict[str, object]:
    """Return the axis of values in GiB, labelled in MiB if the text beside it speaks of MiB."""
    if not amount(highest).endswith("MiB"):
        return _value_axis()
    step = nice_step(highest / _MIB)
    ticks = [round(i * step) for i in range(int(highest / _MIB / step) + 2)]
    labels = {"tickvals": [tick / 1024 for tick in ticks], "ticktext": [f"{tick:,}" for tick in ticks]}
    return {**_value_axis("MiB"), **labels} if step >= 1 else _value_axis()


def _made(traces: Sequence[dict[str, object]], layout: dict[str, object]) -> Figure:
    from plotly.graph_objects import Figure

    return Figure(data=list(traces), layout=layout)

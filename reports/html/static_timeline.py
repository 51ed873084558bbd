"""Draw the timeline as a static picture: it shows before any script runs, and in print."""

from __future__ import annotations

import math

from memprof.reports.document.model import TimelineSeries
from memprof.reports.document.text import phase_label, phase_short
from memprof.reports.html.elements import Markup, el, join
from memprof.reports.palette import slug
from memprof.reports.thinning import peak_hold

from memprof.units import GIB, amount

_WIDTH, _HEIGHT = 940, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 34, 24
_HEADROOM = 1.06
# The height of a label.
_LABEL = 14


def timeline_svg(timeline: TimelineSeries, highest: int = 0) -> Markup:
    """Draw an inline SVG with the stacked categories, phase ribbon, reserved line and the peak's label.

    ``highest`` bytes fit below its top, so that several pictures can share a scale.
    """
    x = timeline.phase_x
    held = peak_hold(x, timeline.total, (_WIDTH - _LEFT - _RIGHT) // 2)
    ceiling = max(timeline.highest_bytes, highest, 1) * _HEADROOM
    plot = _Plot(x[0], x[-1] if x[-1] > x[0] else x[0] + 1, ceiling)
    label = f"Memory over the run by category; the peak is {amount(timeline.total[timeline.peak_point])}."
    return el(
        "svg",
        {
            "viewBox": f"0 0 {_WIDTH} {_HEIGHT}",
            "role": "img",
            "aria-label": label,
            "class": "timeline-svg",
            # Where in the picture the axes are, for the cursor: left, right, top, bottom.
            "data-axes": f"{_LEFT} {_WIDTH - _RIGHT} {_TOP} {_HEIGHT - _BOTTOM}",
        },
        _grid(plot),
        _areas(timeline, held, plot),
        _reserved(timeline, held, plot),
        _ribbon(timeline, x, plot),
        _peak_mark(timeline, x, plot),
        _limit(timeline, x, plot),
    )


class _Plot:
    """Turns data into places in the picture."""

    def __init__(self, low: float, high: float, ceiling: float) -> None:
        self.low, self.high, self.ceiling = low, high, ceiling

    def x(self, value: float) -> float:
        """Place a value across the picture."""
        return round(_LEFT + (value - self.low) / (self.high - self.low) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, n_bytes: float) -> float:
        """Place bytes up the picture, whose own axis points down."""
        return round(_HEIGHT - _BOTTOM - n_bytes / self.ceiling * (_HEIGHT - _TOP - _BOTTOM), 1)


def nice_step(ceiling: float) -> float:
    """Choose a round distance (1, 2 or 5 times a power of ten) that gives about five ticks."""
    rough = ceiling / 5
    power = 10 ** math.floor(math.log10(rough))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= rough))


def _grid(plot: _Plot) -> Markup:
    # The unit of the text beside it; the ceiling is above the highest value.
    unit, name = (GIB, "GiB") if amount(round(plot.ceiling / _HEADROOM)).endswith("GiB") else (GIB // 1024, "MiB")
    step = nice_step(plot.ceiling / unit)
    lines = []
    for i in range(int(plot.ceiling / unit / step) + 1):
        y = plot.y(i * step * unit)
        lines.append(el("line", {"x1": _LEFT, "x2": _WIDTH - _RIGHT, "y1": y, "y2": y, "class": "grid"}))
        lines.append(el("text", {"x": _LEFT - 6, "y": y + 4, "text-anchor": "end"}, f"{i * step:g}"))
    lines.append(el("text", {"x": 12, "y": _TOP - 8}, name))
    return join(*lines)


def _areas(timeline: TimelineSeries, held: list[tuple[float, int]], plot: _Plot) -> Markup:
    below = [0] * len(held)
    paths = []
    edges = [plot.x(start) for start, _ in held] + [plot.x(plot.high)]
    for category, values in timeline.categories.items():
        above = [b + values[point] for b, (_, point) in zip(below, held, strict=True)]
        there = _stairs(edges, [plot.y(n) for n in above])
        back = list(reversed(_stairs(edges, [plot.y(n) for n in below])))
        path = "M" + "L".join(f"{px:g},{py:g}" for px, py in there + back) + "Z"
        paths.append(el("path", {"d": path, "class": f"fill c-{slug(category)}"}))
        below = above
    return join(*paths)


def _stairs(edges: list[float], heights: list[float]) -> list[tuple[float, float]]:
    """List the corners of a step line, without those in the middle of a level."""
    corners: list[tuple[float, float]] = []
    for i, height in enumerate(heights):
        if corners and corners[-1][1] == height:
            corners[-1] = (edges[i + 1], height)
        else:
            corners += [(edges[i], height), (edges[i + 1], height)]
    return corners


def _reserved(timeline: TimelineSeries, held: list[tuple[float, int]], plot: _Plot) -> Markup | None:
    if timeline.reserved is None:
        return None
    edges = [plot.x(start) for start, _ in held] + [plot.x(plot.high)]
    corners = _stairs(edges, [plot.y(timeline.reserved[point]) for _, point in held])
    return el("polyline", {"points": " ".join(f"{px:g},{py:g}" for px, py in corners), "class": "reserved"})


def _ribbon(timeline: TimelineSeries, x: tuple[float, ...], plot: _Plot) -> Markup:
    parts = []
    for span in timeline.spans:
        left = plot.x(x[span.start_point])
        width = plot.x(x[min(span.end_point, len(x) - 1)]) - left
        box = {"x": left, "y": _TOP - 14, "width": max(width - 0.6, 0.4), "height": 9}
        label = phase_label(span.phase)
        title = label if span.step is None else f"{label}, step {span.step}"
        parts.append(el("g", el("title", title), el("rect", {**box, "class": f"fill p-{slug(span.phase)}"})))
        name = next((n for n in (label, phase_short(span.phase)) if width > 6.4 * len(n)), "")
        if name:
            middle = {"x": left + width / 2, "y": _TOP - 18, "text-anchor": "middle"}
            parts.append(el("text", middle, name))
    return join(*parts, *_steps(timeline, x, plot))


def step_extents(timeline: TimelineSeries) -> list[tuple[int, int, int]]:
    """List ``(step, first point, last point)`` of each optimizer step, in order."""
    found: dict[int, tuple[int, int]] = {}
    last = len(timeline.time_us) - 1
    for span in timeline.spans:
        if span.step is not None:
            first, _ = found.get(span.step, (span.start_point, 0))
            found[span.step] = (first, min(span.end_point, last))
    return [(step, first, end) for step, (first, end) in found.items()]


def _steps(timeline: TimelineSeries, x: tuple[float, ...], plot: _Plot) -> list[Markup]:
    """Write the steps' numbers below the axis, each at the middle of its step."""
    marks = []
    for step, first, end in step_extents(timeline):
        left, right = plot.x(x[first]), plot.x(x[end])
        if right - left < 46:
            continue
        marks.append(el("line", {"x1": left, "x2": left, "y1": _HEIGHT - _BOTTOM, "y2": _HEIGHT - 8, "class": "grid"}))
        middle = {"x": (left + right) / 2, "y": _HEIGHT - 8, "text-anchor": "middle"}
        marks.append(el("text", middle, f"step {step}"))
    return marks


def _peak_mark(timeline: TimelineSeries, x: tuple[float, ...], plot: _Plot) -> Markup:
    px = plot.x(x[timeline.peak_point])
    peak = timeline.total[timeline.peak_point]
    side = "end" if px > _WIDTH / 2 else "start"
    shift, words = -7 if side == "end" else 7, f"{amount(peak)} peak"
    # The label stands below the line of reserved memory where that runs close above the peak.
    near = timeline.reserved is not None and plot.y(peak) - plot.y(timeline.reserved[timeline.peak_point]) < _LABEL
    above = plot.y(peak) + (_LABEL if near else -1)
    return join(
        el("line", {"x1": px, "x2": px, "y1": plot.y(peak) - 6, "y2": plot.y(0), "class": "peak"}),
        el("text", {"x": px + shift, "y": above, "text-anchor": side, "class": "peak"}, words),
    )


def _limit(timeline: TimelineSeries, x: tuple[float, ...], plot: _Plot) -> Markup:
    """Draw the GPU's memory as a line, and the request that failed on top of what was reserved then."""
    marks = []
    if (capacity := timeline.capacity_bytes) is not None:
        y = plot.y(capacity)
        marks.append(el("line", {"x1": _LEFT, "x2": _WIDTH - _RIGHT, "y1": y, "y2": y, "class": "limit"}))
        marks.append(el("text", {"x": _LEFT + 4, "y": y - 4, "class": "limit"}, f"capacity {amount(capacity)}"))
    if (failed := timeline.failed) is not None:
        px, top = plot.x(x[failed.point]), plot.y(failed.base_bytes + failed.bytes)
        marks.append(el("line", {"x1": px, "x2": px, "y1": plot.y(failed.base_bytes), "y2": top, "class": "request"}))
        side = "end" if px > _WIDTH / 2 else "start"
        where = {"x": px + (-8 if side == "end" else 8), "y": top + 11, "text-anchor": side, "class": "limit"}
        marks.append(el("text", where, failed.label))
    return join(*marks)

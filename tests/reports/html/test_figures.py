"""Thinning without losing a peak, and the figure as plotly understands it."""

from __future__ import annotations

import base64
import gzip
import re
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memprof.reports.document.model import Timeline
from memprof.reports.document.text import STACK_ORDER
from memprof.reports.html.interactive_timeline import PHASE_UNIT, peak_hold, thinned, timeline_data, timeline_figure
from memprof.reports.html.opened import Opened
from memprof.reports.html.static_timeline import nice_step, timeline_svg
from memprof.reports.palette import DARK, LIGHT, LOOKS, PATTERNS, PHASES
from plotly.graph_objects import Figure

from memprof.vocabulary import Category, Evidence, Group, History, Kind, Phase
from tests.reports.sample import sample
from tests.reports.typed import build_document


@pytest.fixture
def timeline() -> Timeline:
    found = build_document(*sample()).timeline
    assert found is not None
    return found


series = st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 10**12)), min_size=1, max_size=300)


@given(series, st.integers(1, 120))
def test_peak_hold_keeps_the_peak_and_its_order(points: list[tuple[float, int]], n_columns: int) -> None:
    x = sorted(p[0] for p in points)
    total = [p[1] for p in points]
    held = peak_hold(x, total, n_columns)
    assert max(total[point] for _, point in held) == max(total)
    assert [start for start, _ in held] == sorted(start for start, _ in held)
    assert len(held) <= n_columns


@given(series, st.integers(1, 50))
def test_peak_hold_never_invents_memory_a_column_did_not_have(points: list[tuple[float, int]], n_columns: int) -> None:
    x = sorted(p[0] for p in points)
    total = [p[1] for p in points]
    for start, point in peak_hold(x, total, n_columns):
        before = [i for i, place in enumerate(x) if place < start]
        assert point >= (before[-1] if before else 0)


def test_thinning_keeps_every_peak_that_matters(timeline: Timeline) -> None:
    thin = thinned(timeline, 60)
    assert len(thin.time_us) < len(timeline.time_us)
    assert thin.total[thin.peak_point] == timeline.total[timeline.peak_point]
    for category, values in timeline.categories.items():
        assert max(thin.categories[category]) == max(values)
    for whole, kept in zip(timeline.spans, thin.spans, strict=True):
        assert thin.time_us[kept.start_point] == timeline.time_us[whole.start_point]
        inside = timeline.total[whole.start_point : whole.end_point]
        assert max(thin.total[kept.start_point : kept.end_point]) == max(inside)
    sums = [sum(column) for column in zip(*thin.categories.values(), strict=True)]
    assert sums == list(thin.total)


def test_thinning_leaves_a_small_timeline_alone(timeline: Timeline) -> None:
    assert thinned(timeline, 10_000) is timeline


def test_plotly_understands_the_figure(timeline: Timeline) -> None:
    figure = Figure(timeline_figure(timeline))  # which refuses what it has no name for
    stacked = [trace for trace in figure.data if trace.stackgroup]
    assert [trace.meta for trace in stacked] == list(timeline.categories)
    assert [trace.meta for trace in figure.data if not trace.stackgroup] == ["reserved"]
    # Separator lines in the background's colour would erase narrow spikes.
    assert {trace.line.width for trace in stacked} == {0}
    assert figure.layout.xaxis.showticklabels is False


def test_points_hold_the_same_bytes(timeline: Timeline) -> None:
    data = timeline_data(timeline, build_document(*sample()), 10**9, Opened(build_document(*sample())))
    planes = np.frombuffer(gzip.decompress(base64.b64decode(data.points)), np.uint8)
    steps = planes.reshape(len(data.columns), 8, data.n_points).transpose(0, 2, 1).copy().view("<i8")[..., 0]
    points = dict(zip(data.columns, np.cumsum(steps, axis=1).tolist(), strict=True))
    at_peak = sum(points[category][data.peak_point] for category in timeline.categories)
    assert at_peak == timeline.total[timeline.peak_point]
    assert points["time"] == list(timeline.time_us)
    assert [x / PHASE_UNIT for x in points["phase"]] == pytest.approx(timeline.phase_x)


def test_vendored_plotly_is_the_one_the_figures_are_built_for() -> None:
    from plotly.offline import get_plotlyjs_version

    script = files("memprof.reports").joinpath("assets/plotly-basic.min.js").read_text(encoding="utf-8")
    head = re.search(r"plotly\.js \(basic - minified\) v(\S+)", script[:400])
    assert head is not None
    assert head.group(1) == get_plotlyjs_version()
    assert "MIT" in script[:400]
    assert "Plotly" in files("memprof.reports").joinpath("assets/plotly-LICENSE.txt").read_text(encoding="utf-8")
    assert "</script" not in script.lower()


def test_every_category_and_phase_has_its_colour() -> None:
    categories = {str(c) for c in Category}
    assert set(LIGHT) == set(DARK) == set(PATTERNS) == set(STACK_ORDER) == categories
    assert set(PHASES) == {str(p) for p in Phase}
    kinds = {"group": Group, "evidence": Evidence, "kind": Kind, "history": History}
    assert {name: set(LOOKS[name]) for name in kinds} == {name: {str(i) for i in ids} for name, ids in kinds.items()}
    assert len(set(LIGHT.values())) == len(LIGHT)


def test_svg_shows_the_peak_and_every_category(timeline: Timeline) -> None:
    picture = timeline_svg(timeline)
    assert "6.78 peak" in picture
    for category in timeline.categories:
        assert f'class="fill c-{category}"' in picture
    assert 'class="reserved"' in picture
    assert "step 2" in picture


@pytest.mark.parametrize(("ceiling", "step"), [(7.2, 2), (0.04, 0.01), (80, 20), (1e-6, 2e-7)])
def test_ticks_are_round(ceiling: float, step: float) -> None:
    assert nice_step(ceiling) == pytest.approx(step)

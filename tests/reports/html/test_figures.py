"""Thinning without losing a peak, and the figure as plotly understands it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memprof.reports.document import build
from memprof.reports.document.build import document_of, timeline_of
from memprof.reports.document.model import TimelineSeries
from memprof.reports.document.text import STACK_ORDER
from memprof.reports.figures import timeline_figure, timeline_json
from memprof.reports.html.interactive_timeline import PHASE_UNIT, TimelineData, timeline_data
from memprof.reports.html.opened import Opened
from memprof.reports.html.report import render_html
from memprof.reports.html.static_timeline import nice_step, timeline_svg
from memprof.reports.palette import DARK, LIGHT, LOOKS, PATTERNS, PHASES
from memprof.reports.thinning import peak_hold, thinned
from msgspec.structs import replace
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

import memprof
from memprof.analysis.analysis import Analysis, analyze
from memprof.errors import UsageError
from memprof.report.run import Capacity
from memprof.snapshot import load_snapshot, snapshot_from_raw
from memprof.vocabulary import Category, Evidence, Group, History, Kind, Phase
from tests.attribution.runs import Run, train
from tests.reports.compared import published_comparison, sample_comparison
from tests.reports.sample import sample
from tests.reports.typed import build_document, comparison_of
from tests.synthetic import SnapshotBuilder


@pytest.fixture
def timeline() -> TimelineSeries:
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


def test_thinning_keeps_every_peak_that_matters(timeline: TimelineSeries) -> None:
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


def test_thinning_leaves_a_small_timeline_alone(timeline: TimelineSeries) -> None:
    assert thinned(timeline, 10_000) is timeline


def unpacked(data: TimelineData) -> dict[str, list[int]]:
    """The points as the page's script unpacks them, whole numbers by column."""
    planes = np.frombuffer(gzip.decompress(base64.b64decode(data.points)), np.uint8)
    steps = planes.reshape(len(data.columns), 8, data.n_points).transpose(0, 2, 1).copy().view("<i8")[..., 0]
    return dict(zip(data.columns, np.cumsum(steps, axis=1).tolist(), strict=True))


def test_the_timeline_stacks_categories_without_separators(timeline: TimelineSeries) -> None:
    figure = timeline_figure(timeline)
    stacked = [trace for trace in figure.data if trace.stackgroup]
    assert [trace.meta for trace in stacked] == list(timeline.categories)
    assert [trace.meta for trace in figure.data if not trace.stackgroup] == ["reserved"]
    # Separator lines in the background's colour would erase narrow spikes.
    assert {trace.line.width for trace in stacked} == {0}
    assert figure.layout.xaxis.showticklabels is False
    assert len(figure.layout.shapes) == len(timeline.spans)
    assert timeline_figure(timeline, "time").data[0].x[-1] == timeline.time_us[-1] / timeline.unit


def test_the_page_draws_the_figure_that_plotly_would_write(timeline: TimelineSeries) -> None:
    assert json.loads(timeline_figure(timeline).to_json()) == json.loads(json.dumps(timeline_json(timeline)))


def out_of_memory() -> Analysis:
    """Ten GiB of a GPU of 12 and a request of 3 that failed."""
    builder = SnapshotBuilder()
    for _ in range(10):
        builder.alloc(1 << 30, "forward")
    builder._event("oom", 0, 3 << 30, [])
    builder.events[-1] |= {"device_free": 1 << 30}
    device = {"index": 0, "type": "cuda", "name": "GPU", "total_bytes": 12 << 30}
    return analyze(snapshot_from_raw(builder.raw({"schema": "memprof.snapshot/1", "kind": "cuda", "device": device})))


def test_capacity_and_the_failed_request_are_on_the_timeline() -> None:
    analysis = out_of_memory()
    figure, whole = analysis.figure(), timeline_of(analysis)
    assert whole is not None
    shapes = {shape.name: shape for shape in figure.layout.shapes if shape.name}
    assert (shapes["capacity"].y0, shapes["capacity"].y1) == (12, 12)
    assert (shapes["request"].y0, shapes["request"].y1) == (10, 13)
    assert shapes["request"].x0 == figure.data[0].x[-1]
    assert {note.name: note.text for note in figure.layout.annotations if note.name} == {
        "capacity": "capacity 12.00 GiB", "request": "3.00 GiB failed"
    }  # fmt: skip
    assert figure.layout.yaxis.range[1] > 13
    picture = timeline_svg(whole)
    assert picture.count('class="limit"') == 3
    assert picture.count('class="request"') == 1
    assert "capacity 12.00 GiB</text>" in picture
    assert "3.00 GiB failed</text>" in picture
    data = timeline_data(whole, document_of(analysis), 10**9, Opened(document_of(analysis)))
    assert data.failed_point == len(whole.time_us) - 1
    assert thinned(whole._replace(), 2).failed == whole.failed._replace(point=len(thinned(whole, 2).time_us) - 1)


def test_a_far_capacity_is_not_drawn() -> None:
    analysis = out_of_memory()
    report = replace(analysis.report, oom=None, capacity=Capacity(bytes=80 << 30, source="option"))
    shown = build.build_document(report, analysis.series(1000)).timeline
    assert shown is not None
    assert (shown.capacity_bytes, shown.failed) == (None, None)
    assert timeline_figure(shown).layout.yaxis.range is None


def test_points_hold_the_same_bytes(timeline: TimelineSeries) -> None:
    data = timeline_data(timeline, build_document(*sample()), 10**9, Opened(build_document(*sample())))
    points = unpacked(data)
    at_peak = sum(points[category][data.peak_point] for category in timeline.categories)
    assert at_peak == timeline.total[timeline.peak_point]
    assert points["time"] == list(timeline.time_us)
    assert [x / PHASE_UNIT for x in points["phase"]] == pytest.approx(timeline.phase_x)


def test_the_page_draws_the_figure_that_python_returns(tmp_path: Path) -> None:
    """The figure's JSON in the page, its points put in, is that of ``Analysis.figure``."""
    run = Run()
    train(run)
    analysis = analyze(load_snapshot(run.builder.save(tmp_path / "run.pickle")))
    page = analysis.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    (found,) = re.findall(r'id="memprof-data">([^<]*)<', page)
    data = msgspec.convert(json.loads(gzip.decompress(base64.b64decode(found)))["timeline"], TimelineData)
    points = unpacked(data)
    for trace in data.figure["data"]:
        trace["x"] = pytest.approx([x / PHASE_UNIT for x in points["phase"]], abs=1e-6)
        trace["y"] = [n / 2**30 for n in points[trace["meta"]]]
    figure = analysis.figure(max_points=None)
    assert isinstance(figure, Figure)
    python = json.loads(figure.to_json(engine="json"))
    assert data.figure["layout"] == python["layout"]
    for in_page, returned in zip(data.figure["data"], python["data"], strict=True):
        assert in_page == returned


def test_figures_of_a_run_and_what_has_none(tmp_path: Path) -> None:
    run = Run()
    train(run)
    analysis = analyze(load_snapshot(run.builder.save(tmp_path / "run.pickle")))
    bars = analysis.figure("breakdown").data[0]
    assert sum(bars.x) * 2**30 == pytest.approx(analysis.peak.active_bytes)
    assert analysis.peak.figure() == analysis.figure("breakdown") == memprof.figure(analysis.peak)
    assert sum(memprof.figure(analysis.report).data[0].x) == pytest.approx(sum(bars.x))
    steps = analysis.figure("steps")
    assert [list(trace.x) for trace in steps.data] == [[s.step for s in analysis.report.growth.steps]] * 2
    for wrong in ({"kind": "pie"}, {"axis": "bytes"}):
        with pytest.raises(UsageError, match=r"no (figure|axis) '(pie|bytes)': give "):
            analysis.figure(**wrong)


def test_a_comparison_is_stacked_below_its_capacity() -> None:
    comparison = comparison_of(sample_comparison()[0])
    figure = memprof.figure(comparison)
    for i, run in enumerate(comparison.runs):
        drawn = sum(trace.y[i] or 0 for trace in figure.data)
        assert drawn * 2**30 == pytest.approx(run.report.peak.active_bytes)
    assert comparison.capacity is not None
    assert figure.layout.shapes[0].y0 * 2**30 == comparison.capacity.bytes
    published = memprof.figure(comparison_of(published_comparison()))
    assert any(trace.name.endswith("(published)") for trace in published.data)


def test_plotly_is_the_installed_package_and_runs_under_its_hash(timeline: TimelineSeries) -> None:
    page = render_html(build_document(*sample()))
    (packed,) = re.findall(r'id="plotly-source">([^<]*)<', page)
    script = gzip.decompress(base64.b64decode(packed)).decode()
    assert script == get_plotlyjs()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page[: page.index("<title>")]


def test_every_category_and_phase_has_its_colour() -> None:
    categories = {str(c) for c in Category}
    assert set(LIGHT) == set(DARK) == set(PATTERNS) == set(STACK_ORDER) == categories
    assert set(PHASES) == {str(p) for p in Phase}
    kinds = {"group": Group, "evidence": Evidence, "kind": Kind, "history": History}
    assert {name: set(LOOKS[name]) for name in kinds} == {name: {str(i) for i in ids} for name, ids in kinds.items()}
    assert len(set(LIGHT.values())) == len(LIGHT)


def test_svg_shows_the_peak_and_every_category(timeline: TimelineSeries) -> None:
    picture = timeline_svg(timeline)
    assert "6.78 GiB peak" in picture
    for category in timeline.categories:
        assert f'class="fill c-{category}"' in picture
    assert 'class="reserved"' in picture
    assert "step 2" in picture


@pytest.mark.parametrize(("ceiling", "step"), [(7.2, 2), (0.04, 0.01), (80, 20), (1e-6, 2e-7)])
def test_ticks_are_round(ceiling: float, step: float) -> None:
    assert nice_step(ceiling) == pytest.approx(step)


@pytest.mark.parametrize(
    ("highest", "unit"), [(300 << 20, "MiB"), (1023 << 20, "MiB"), (1 << 30, "GiB"), (9 << 30, "GiB")]
)
def test_an_axis_has_the_unit_of_the_text_beside_it(timeline: TimelineSeries, highest: int, unit: str) -> None:
    scale = highest / max(timeline.total)
    small = {category: tuple(round(n * scale) for n in values) for category, values in timeline.categories.items()}
    total = tuple(map(sum, zip(*small.values(), strict=True)))
    shown = timeline._replace(categories=small, total=total, reserved=None)
    axis = timeline_figure(shown).layout.yaxis
    assert axis.title.text == unit
    assert f">{unit}</text>" in timeline_svg(shown)
    if unit == "MiB":
        assert [f"{round(value * 1024):,}" for value in axis.tickvals] == list(axis.ticktext)

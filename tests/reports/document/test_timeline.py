"""The page's timeline, against the story the sample report was told from."""

from __future__ import annotations

from tests.reports.sample import sample
from tests.reports.typed import build_document


def test_timeline_holds_the_peak_and_gives_each_span_one_unit() -> None:
    document = build_document(*sample())
    timeline = document.timeline
    assert timeline is not None
    assert timeline.total[timeline.peak_point] == max(timeline.total) == document.summary.peak_bytes
    assert timeline.time_us[0] == 0
    assert list(timeline.phase_x) == sorted(timeline.phase_x)
    starts = [timeline.phase_x[s.start_point] for s in timeline.spans]
    assert starts == [float(i) for i in range(len(timeline.spans))]
    assert timeline.phase_x[-1] == len(timeline.spans)
    # Stable categories at the bottom, those that come and go on top.
    order = list(timeline.categories)
    assert order.index("weights") < order.index("kv_cache") < order.index("activations") < order.index("unattributed")


def test_without_spans_the_whole_recording_is_one_unit() -> None:
    report, series = sample()
    timeline = build_document(report, {**series, "phase_spans": []}).timeline
    assert timeline is not None
    assert timeline.spans == ()
    assert (timeline.phase_x[0], timeline.phase_x[-1]) == (0, 1)

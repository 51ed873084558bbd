"""Measure pages of large runs: how many bytes, and how soon a reader can use them.

Replays a recorded snapshot to 200k and 1M events (see ``large_files.py``), writes the page of each and of the two side
by side, and opens them in headless Chromium from a file: first paint, ready (the timeline answers the pointer; plotly
comes after that), and one zoom. Times are the machine's; the limits they are held to are 0.7 s to ready at 200k events,
and 3 MB a page.

Wall times mean little on a busy machine. So the CPU seconds of the page's main thread until it is ready stand beside
them, and those of a rival in the same run: the same timeline, thinned to 20,000 points, as plotly's own ``write_html``
writes it (a chart alone, without tables and panel; with all points it needs half a minute). ``cpu_ratio`` is ours by
theirs.

    python -m benchmarks.reading page demo/full.pickle
    python -m benchmarks.reading page demo/full.pickle --events 200000
    python -m benchmarks.reading page run.pickle --json benchmarks/results/cpu/page.json
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
from memprof.reports.document.build import document_of
from memprof.reports.document.comparison import build_comparison
from memprof.reports.document.model import TimelineSeries
from memprof.reports.figures import timeline_figure
from memprof.reports.html.compare import write_comparison
from memprof.reports.html.report import write_html
from memprof.reports.thinning import thinned

from benchmarks.measure import write_result
from benchmarks.reading.large_files import replay
from memprof.analysis.allocations.holdings import holdings_of_analysis
from memprof.analysis.analysis import Analysis, analyze
from memprof.analysis.compare import ComparisonColumn, compare
from memprof.snapshot import load_snapshot
from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import save_snapshot
from tests.reports.html.browser import chromium

# Pages and the bytes they may have, by their events.
SIZES = {200_000: 3_000_000, 1_000_000: 3_000_000}
READY_MS = 700
RIVAL = "plotly write_html, 20,000 points"
_RIVAL_POINTS = 20_000

# Runs before the page's own scripts: notes the moment the page says that it is ready.
WATCH_READY = """new MutationObserver(() => {
  if (document.documentElement && document.documentElement.dataset.ready) window.readyAt ??= performance.now();
}).observe(document, { attributes: true, subtree: true });"""

# Our page says that it is ready; plotly's is when its traces are there.
_DRAWN = "html[data-ready=yes], .js-plotly-plot .main-svg .trace"

_ZOOM = """async () => { const start = performance.now();
  document.querySelector("[data-value=peak]").click();
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - start; }"""


@click.command(help=__doc__)
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=5, show_default=True)
@click.option("--events", type=click.Choice([str(n) for n in SIZES]), help="Measure this size only.")
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(source: Path, rounds: int, events: str | None, json_file: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pages = _pages(source, Path(folder), [int(events)] if events else list(SIZES))
        with chromium() as browser:
            # A round opens every page once, so that what else the machine does falls on all of them.
            opened = [{name: _open(browser, path) for name, path in pages.items()} for _ in range(rounds)]
        found = {name: _summary(name, path, [o[name] for o in opened]) for name, path in pages.items()}
    rival = found.pop(RIVAL)
    for summary in found.values():
        summary["cpu_ratio"] = round(summary["best_cpu_ms"] / rival["best_cpu_ms"], 2)
    kept = {key: rival[key] for key in ("bytes", "best_ready_ms", "best_cpu_ms")}
    write_result({"pages": found, "rival": {"name": RIVAL, **kept}}, json_file)


def _pages(source: Path, folder: Path, sizes: list[int]) -> dict[str, Path]:
    """Write one page a size, the rival's, and one of both sizes side by side."""
    pages: dict[str, Path] = {}
    runs, documents = [], []
    for events in sizes:
        name = f"{events:,} events"
        analysis = _analysis(source, events, folder)
        document = document_of(analysis)
        pages[name] = folder / f"{events}.html"
        write_html(document, pages[name])
        runs.append(ComparisonColumn(name, "measured", analysis.report, held=holdings_of_analysis(analysis)))
        documents.append(document)
    pages[RIVAL] = folder / "rival.html"
    _write_rival(documents[0].timeline, pages[RIVAL])
    if len(sizes) > 1:
        pages["both compared"] = folder / "compared.html"
        write_comparison(build_comparison(compare(runs), documents), pages["both compared"])
    return pages


def _write_rival(timeline: TimelineSeries | None, path: Path) -> None:
    """Write the same stack of categories, of fewer points, as plotly itself writes a page."""
    assert timeline is not None, "a replayed history has a timeline"
    timeline_figure(thinned(timeline, _RIVAL_POINTS)).write_html(path, include_plotlyjs=True)


def _analysis(source: Path, events: int, folder: Path) -> Analysis:
    file = folder / f"{events}.pickle"
    save_snapshot(replay(read_plain(source), events), file)
    analysis = analyze(load_snapshot(file))
    file.unlink()
    return analysis


def _open(browser: Any, path: Path) -> dict[str, float]:
    """Open a page; return milliseconds to first paint and to ready, of CPU until then, and of one zoom of ours."""
    view = browser.new_context(viewport={"width": 1360, "height": 900})
    try:
        page = view.new_page()
        session = view.new_cdp_session(page)
        session.send("Performance.enable")
        page.add_init_script(WATCH_READY)
        page.goto(path.as_uri(), wait_until="commit", timeout=120_000)
        page.wait_for_selector(_DRAWN, state="attached", timeout=120_000)
        metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0] ?? null")
        ready = page.evaluate("window.readyAt ?? performance.now()")
        if page.locator("#plotly-source").count():
            page.wait_for_selector("html[data-charts=yes]", state="attached", timeout=120_000)
        zoom = page.evaluate(_ZOOM) if page.locator("[data-value=peak]").count() else 0.0
        return {"paint_ms": paint or ready, "ready_ms": ready, "cpu_ms": 1000 * metrics["ThreadTime"], "zoom_ms": zoom}
    finally:
        view.close()


def _summary(name: str, path: Path, opened: list[dict[str, float]]) -> dict[str, Any]:
    """Return size, medians and the best ready time, with whether the limits hold."""
    size = path.stat().st_size
    limit = next((most for events, most in SIZES.items() if name == f"{events:,} events"), max(SIZES.values()))
    best = min(o["ready_ms"] for o in opened)
    return {
        "bytes": size,
        "bytes_ok": size < limit,
        **{f"median_{key}": round(statistics.median(o[key] for o in opened)) for key in opened[0]},
        "best_ready_ms": round(best),
        "best_cpu_ms": round(min(o["cpu_ms"] for o in opened)),
        "ready_ok": best < READY_MS,
    }

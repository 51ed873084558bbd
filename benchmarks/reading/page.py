"""Measure pages of large runs: how many bytes, and how soon a reader can use them.

Replays a recorded snapshot to 200k and 1M events (see ``large_files.py``), writes the page of each and of the two side
by side, and opens them in headless Chromium from a file: first paint, ready (the chart answers), and one zoom. Times
are the machine's; the limits they are held to are 1 s to ready, 2 MB a page at 200k events and 3 MB at 1M.

    python -m benchmarks.reading page demo/full.pickle
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
from memprof.reports.html.compare import write_comparison
from memprof.reports.html.report import write_html

from benchmarks.measure import write_result
from benchmarks.reading.large_files import replay
from memprof.analysis.allocation_differences import holdings_of_analysis
from memprof.analysis.analysis import Analysis, analyze
from memprof.analysis.compare import Run, compare
from memprof.snapshot import load_snapshot
from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import save_snapshot
from tests.reports.html.browser import chromium

# Pages and the bytes they may have.
SIZES = {"200k events": (200_000, 2_000_000), "1M events": (1_000_000, 3_000_000)}
READY_MS = 1000

# Runs before the page's own scripts: notes the moment the page says that it is ready.
WATCH_READY = """new MutationObserver(() => {
  if (document.documentElement && document.documentElement.dataset.ready) window.readyAt ??= performance.now();
}).observe(document, { attributes: true, subtree: true });"""

_ZOOM = """async () => { const start = performance.now();
  document.querySelector("[data-value=peak]").click();
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - start; }"""


@click.command(help=__doc__)
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(source: Path, rounds: int, json_file: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pages = _pages(source, Path(folder))
        with chromium() as browser:
            opened = {name: [_open(browser, path) for _ in range(rounds)] for name, path in pages.items()}
        found = {name: _summary(name, path, opened[name]) for name, path in pages.items()}
    write_result({"pages": found}, json_file)


def _pages(source: Path, folder: Path) -> dict[str, Path]:
    """Write one page a size, and one of both side by side."""
    pages, runs, documents = {}, [], []
    for name, (events, _) in SIZES.items():
        analysis = _analysis(source, events, folder)
        document = document_of(analysis)
        pages[name] = folder / f"{events}.html"
        write_html(document, pages[name])
        runs.append(Run(name, "measured", analysis.to_dict(), held=holdings_of_analysis(analysis)))
        documents.append(document)
    pages["both compared"] = folder / "compared.html"
    write_comparison(build_comparison(compare(runs), documents), pages["both compared"])
    return pages


def _analysis(source: Path, events: int, folder: Path) -> Analysis:
    file = folder / f"{events}.pickle"
    save_snapshot(replay(read_plain(source), events), file)
    analysis = analyze(load_snapshot(file))
    file.unlink()
    return analysis


def _open(browser: Any, path: Path) -> dict[str, float]:
    """Open a page; return milliseconds to first paint and to ready, and of one zoom."""
    view = browser.new_context(viewport={"width": 1360, "height": 900})
    try:
        page = view.new_page()
        page.add_init_script(WATCH_READY)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=60_000)
        paint = "performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0] ?? null"
        ready = page.evaluate("window.readyAt")
        return {"paint_ms": page.evaluate(paint) or ready, "ready_ms": ready, "zoom_ms": page.evaluate(_ZOOM)}
    finally:
        view.close()


def _summary(name: str, path: Path, opened: list[dict[str, float]]) -> dict[str, Any]:
    """Return size, medians and the best ready time, with whether the limits hold."""
    size = path.stat().st_size
    limit = SIZES.get(name, (0, 3_000_000))[1]
    best = min(o["ready_ms"] for o in opened)
    return {
        "bytes": size,
        "bytes_ok": size < limit,
        **{f"median_{key}": round(statistics.median(o[key] for o in opened)) for key in opened[0]},
        "best_ready_ms": round(best),
        "ready_ok": best < READY_MS,
    }

"""Measure the page of many ranks: how long it takes to write, how large it is, how soon a reader can use it.

The ranks are made up (``tests/analysis/ranks/simulated.py``): the sample run with batches of other lengths. Their
summaries are merged, the page written and opened in headless Chromium from a file. Times are the machine's;
the limit is 2 s to load 1024 ranks.

    python -m benchmarks.reading ranks
    python -m benchmarks.reading ranks --json benchmarks/results/cpu/ranks.json
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from memprof.reports.document.build import build_document
from memprof.reports.html.report import write_html

from benchmarks.measure import write_result
from benchmarks.reading.page import WATCH_READY
from tests.analysis.ranks.simulated import many_ranks
from tests.reports.html.browser import chromium
from tests.reports.sample import sample

LOAD_MS = 2000


@click.command(help=__doc__)
@click.option("--ranks", type=int, multiple=True, default=(8, 128, 1024), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(ranks: tuple[int, ...], rounds: int, json_file: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        found = {str(n): measure(n, Path(folder), browser, rounds) for n in ranks}
    write_result({"load_limit_ms": LOAD_MS, "ranks": found}, json_file)


def measure(world: int, folder: Path, browser: Any, rounds: int) -> dict[str, Any]:
    """Measure a page of ``world`` ranks."""
    report = many_ranks(world, missing=(3,))
    path = folder / f"{world}.html"
    begun = time.process_time()
    write_html(build_document(report, sample()[1]), path)
    written = time.process_time() - begun
    times = [_loaded(browser, path) for _ in range(rounds)]
    return {
        "summaries_bytes": len(json.dumps(report["ranks"])),
        "write_cpu_s": round(written, 2),
        "page_bytes": path.stat().st_size,
        "median_ready_ms": round(statistics.median(times)),
        "best_ready_ms": round(min(times)),
        "worst_ready_ms": round(max(times)),
        "ready_ok": statistics.median(times) <= LOAD_MS,
    }


def _loaded(browser: Any, path: Path) -> float:
    """Open a page; return milliseconds until it says that it is ready."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    try:
        page = context.new_page()
        page.add_init_script(WATCH_READY)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=60_000)
        return float(page.evaluate("window.readyAt"))
    finally:
        context.close()

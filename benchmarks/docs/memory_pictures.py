"""Draw the pictures of docs/grpo-memory.md: two simulated runs, their timelines, and every category's own peak.

    python -m benchmarks.docs memory-pictures [--json FILE] [--pictures docs/images]

The same pages come from ``memprof simulate ... -o page.html`` with the settings below; this also photographs them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import write_result
from memprof.config.settings import Settings

FULL = Settings(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    beta=0.04,
    num_generations=8,
    per_device_train_batch_size=8,
    prompt_length=256,
    completion_length=768,
)
RUNS = {"full": FULL, "lora": FULL.with_(dtype="bfloat16", lora_r=16)}


@click.command(help=__doc__)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
@click.option("--pictures", type=click.Path(path_type=Path), help="Folder for the timelines; needs Chromium.")
def main(json_file: Path | None, pictures: Path | None) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: simulated(settings, Path(scratch) / f"{name}.html") for name, settings in RUNS.items()}
        write_result({"runs": found}, json_file)
        if pictures is not None:
            photograph(Path(scratch), pictures)


def simulated(settings: Settings, page: Path) -> dict[str, Any]:
    """Simulate one run; return settings, peak and own peaks in bytes. The page goes to ``page``."""
    from memprof.reports.document.build import document_of
    from memprof.reports.html.report import write_html

    from memprof.simulate.evaluate import evaluate

    analysis = evaluate(settings, None).analysis
    write_html(document_of(analysis), page)
    ends = [b for b in analysis.phases if b.phase == "optimizer_step"]
    return {
        "settings": settings.to_dict(),
        "peak_bytes": analysis.peak.allocated_bytes,
        "peak_phase": analysis.peak.phase,
        "peak_categories": analysis.peak.categories,
        "optimizer_step_requested": ends[-1].categories_requested,
        "own_peaks": analysis.own_peaks,
        "phases": {b.phase: b.allocated_bytes for b in analysis.phases},
    }


def photograph(pages: Path, folder: Path) -> None:
    """Take a picture of each page's timeline, as ``memory-NAME.png``."""
    from tests.reports.html.browser import chromium, open_page

    folder.mkdir(parents=True, exist_ok=True)
    size = {"width": 1280, "height": 1400}
    with chromium() as browser:
        for name in RUNS:
            with open_page(browser, pages / f"{name}.html", viewport=size, color_scheme="light") as view:
                view.wait_for_timeout(500)  # plotly draws after the page is ready
                view.locator("#timeline").screenshot(path=folder / f"memory-{name}.png")

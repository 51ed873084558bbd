"""Take pictures for the README and the tutorial from the pages of the demo: one run, its timeline, and both runs.

python -m benchmarks.docs report-picture [demo] [docs/images]
"""

from __future__ import annotations

from pathlib import Path

import click

from tests.reports.html.browser import chromium, open_page

# Page of the demo, its picture and what it shows: a section, or all from the top to the end of the last one named.
PICTURES = (
    ("full.html", "report.png", "", "#components"),
    ("full.html", "timeline.png", "#timeline", "#timeline"),
    ("compare.html", "compare.png", "", "#components"),
)
_WIDTH, _MARGIN = 1280, 16


@click.command(help=__doc__)
@click.argument("pages", default="demo", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("pictures", default="docs/images", type=click.Path(path_type=Path, file_okay=False))
def main(pages: Path, pictures: Path) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for page, picture, first, last in PICTURES:
            size = {"width": _WIDTH, "height": 1000}
            with open_page(browser, pages / page, viewport=size, color_scheme="light") as view:
                top = view.locator(first).bounding_box()["y"] if first else 0
                box = view.locator(last).bounding_box()
                clip = {"x": 0, "y": top, "width": _WIDTH, "height": box["y"] + box["height"] + _MARGIN - top}
                view.screenshot(path=pictures / picture, full_page=True, clip=clip)

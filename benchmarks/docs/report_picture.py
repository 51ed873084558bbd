"""Take the README's pictures from the pages of the demo: one run, and both runs side by side.

python -m benchmarks.docs report-picture [demo] [docs/images]
"""

from __future__ import annotations

from pathlib import Path

import click

from tests.reports.html.browser import chromium, open_page

# Page of the demo and its picture: from the top to the end of the table of components.
PICTURES = {"full.html": "report.png", "compare.html": "compare.png"}
_LAST = "#components"
_WIDTH, _MARGIN = 1280, 16


@click.command(help=__doc__)
@click.argument("pages", default="demo", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("pictures", default="docs/images", type=click.Path(path_type=Path, file_okay=False))
def main(pages: Path, pictures: Path) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for page, picture in PICTURES.items():
            size = {"width": _WIDTH, "height": 1000}
            with open_page(browser, pages / page, viewport=size, color_scheme="light") as view:
                box = view.locator(_LAST).bounding_box()
                clip = {"x": 0, "y": 0, "width": _WIDTH, "height": box["y"] + box["height"] + _MARGIN}
                view.screenshot(path=pictures / picture, full_page=True, clip=clip)

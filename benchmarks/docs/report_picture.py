"""Take the README's picture from a page of the demo.

    python -m benchmarks.docs report-picture [demo/full.html] [docs/images/report.png]
"""

from __future__ import annotations

from pathlib import Path

import click

from tests.reports.html.browser import chromium, open_page


@click.command(help=__doc__)
@click.argument("page", default="demo/full.html", type=click.Path(path_type=Path, exists=True))
@click.argument("picture", default="docs/images/report.png", type=click.Path(path_type=Path))
@click.option("--height", default=1500, show_default=True, help="How much of the page is shown.")
def main(page: Path, picture: Path, height: int) -> None:
    size = {"width": 1280, "height": height}
    with chromium() as browser, open_page(browser, page, viewport=size, color_scheme="light") as view:
        picture.parent.mkdir(parents=True, exist_ok=True)
        view.wait_for_timeout(500)  # plotly draws after the page is ready
        view.screenshot(path=picture)

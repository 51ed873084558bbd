"""Pictures of a page, light, dark, narrow and printed, to look at and for the README.

    python -m tests.reports.html.screenshots demo/full.html docs/images      # a page
    python -m tests.reports.html.screenshots run.pickle /tmp/pictures        # a snapshot, reported first

Writes ``report.png`` (down to the end of the timeline), ``report-dark.png``, ``report-full.png``, ``report-narrow.png``
and ``report-print.pdf``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reports.html.browser import chromium, open_page


def main(source: Path, folder: Path) -> None:
    """Photograph ``source`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, chromium() as browser:
        page = source if source.suffix == ".html" else _reported(source, Path(scratch) / "report.html")
        with open_page(browser, page) as light:
            _first_part(light, folder / "report.png")
            light.screenshot(path=folder / "report-full.png", full_page=True)
            light.emulate_media(media="print")
            light.pdf(path=folder / "report-print.pdf", format="A4", print_background=True)
        with open_page(browser, page, color_scheme="dark") as dark:
            _first_part(dark, folder / "report-dark.png")
        with open_page(browser, page, viewport={"width": 420, "height": 900}) as narrow:
            narrow.screenshot(path=folder / "report-narrow.png", full_page=True)
    print(f"pictures of {source} in {folder}")


def _first_part(page: Any, path: Path) -> None:
    """Everything down to the timeline's end, where there is one."""
    last = page.locator("#timeline") if page.locator("#timeline").count() else page.locator("#components")
    box = last.bounding_box()
    clip = {"x": 0, "y": 0, "width": 1360, "height": box["y"] + box["height"] + 16}
    page.screenshot(path=path, full_page=True, clip=clip)


def _reported(snapshot: Path, page: Path) -> Path:
    from memprof.reports.document.build import document_of
    from memprof.reports.html.report import write_html

    from memprof.analysis.analysis import analyze

    write_html(document_of(analyze(snapshot)), page)
    return page


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Headless Chromium for the tests and for the pictures in the documentation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; one at a time (playwright's synchronous interface does not nest)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(browser: Any, path: Path, charts: bool = True, **context: Any) -> Iterator[Any]:
    """The page at ``path``, ready, from ``file://``; errors go to ``page.problems``, addresses to ``requested``.

    ``charts``: wait for plotly's too, which come after the page is ready.
    """
    view = browser.new_context(**{"viewport": {"width": 1360, "height": 900}, **context})
    try:
        page = view.new_page()
        page.problems, page.requested = [], []
        page.on("console", lambda m: page.problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.requested.append(request.url))
        page.goto(path.resolve().as_uri())
        if context.get("java_script_enabled", True):
            page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=20_000)
            if charts and page.locator("#plotly-source").count():
                page.wait_for_selector("html[data-charts=yes]", state="attached", timeout=20_000)
        yield page
    finally:
        view.close()


def violations(page: Any, *without: str) -> list[str]:
    """What axe-core has against the page as it is: rule, impact and the first elements, one line each."""
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    rules = {rule: {"enabled": False} for rule in without}
    found = page.evaluate("(rules) => axe.run(document, { rules, resultTypes: ['violations'] })", rules)
    return [
        f"{v['id']} ({v['impact']}): {[n['target'] for n in v['nodes'][:3]]} {v['nodes'][0]['failureSummary'][:300]}"
        for v in found["violations"]
    ]

"""Make a page around a body: one self-contained file that loads nothing and runs only its own scripts."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

import msgspec
from memprof.reports.html.elements import Child, Markup, el, join
from memprof.reports.palette import DARK, LIGHT, PHASES, css_variables

from memprof._version import __version__
from memprof.report.base import Model
from memprof.report.codec import dumps

if TYPE_CHECKING:
    from memprof.reports.html.interactive_timeline import TimelineData
    from memprof.reports.html.opened import OpenedData
    from memprof.reports.html.views.segment_map import MapDrawing

# Plotly sets inline styles.
_POLICY = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


# plotly.js is inert text until the page inflates it after its first paint, and runs it under its hash.
# One function's parts, in the order they run; a page has at most one of those that draw with plotly.
_SCRIPTS = (
    "page", "rows", "copying", "address", "categories", "stacks", "icicle", "allocations", "segments", "timeline",
    "moments", "bands", "pareto_front",
)  # fmt: skip
_DRAWING = {"timeline": "timeline", "moments": "timeline", "bands": "timeline", "pareto_front": "pareto_front"}
_READY = 'root.dataset.ready = "yes";'


class PageData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a page's script reads: the answer that the download button saves, and what it draws and opens.

    ``front`` is plotly's figure of a plan.
    """

    report: Model
    front: dict[str, object] | None = None
    timelines: tuple[TimelineData, ...] | None = None
    opened: OpenedData | None = None
    timeline: TimelineData | None = None
    segments: tuple[MapDrawing, ...] | None = None


def render_page(
    title: str, subtitle: Sequence[str], sections: Sequence[Child], data: PageData, chart: str | None
) -> str:
    """Render a whole page as text.

    Args:
        title: what the page and the browser's tab are called; ``subtitle`` is what was recorded.
        sections: everything between the page's header and its footer.
        data: what the page's script reads.
        chart: what plotly draws of ``data``: its timelines (``timeline``), a plan's points (``front``), or nothing.
    """
    parts = [part for part in _SCRIPTS if _DRAWING.get(part, chart) == chart]
    written = [_asset(f"scripts/{part}.js") for part in parts]
    scripts = ["\n".join(['"use strict";', "(async () => {", *written, _READY, "})();"])]
    plotly, hashes = (None, [_sha256(script) for script in scripts])
    if chart is not None:
        plotly, its_hash = _plotly()
        hashes.append(its_hash)
    page = Template(_asset("templates/page.html"))
    return page.substitute(
        policy=_POLICY.format(hashes=" ".join(f"'sha256-{one}'" for one in hashes)),
        title=join(f"{title} · memprof"),
        style=_style(),
        body=join(_header(title, subtitle), el("main", {"id": "main"}, *sections)),
        footer=_footer(chart is not None),
        data=_packed(data),
        plotly=el("script", {"type": "text/plain", "id": "plotly-source"}, Markup(plotly)) if plotly else "",
        scripts=join(*[Markup(f"<script>{script}</script>") for script in scripts]),
    )


def _header(title: str, subtitle: Sequence[str]) -> Markup:
    """Make the header: title, what was recorded, and the buttons."""
    buttons = (
        el("button", {"id": "theme", "type": "button", "class": "needs-js"}, "Theme: auto"),
        el("button", {"id": "download", "type": "button", "class": "needs-js"}, "Download JSON"),
        el("button", {"id": "print", "type": "button", "class": "needs-js"}, "Print"),
    )
    return el(
        "header.top", el("div", el("h1", title), el("p.muted sub", " · ".join(subtitle))), el("div.buttons", *buttons)
    )


def _footer(charts: bool) -> Markup:
    words = f"memprof {__version__} · self-contained file, no network access"
    words += " · plotly.js (MIT)" if charts else ""
    return el("footer.muted", words)


def _packed(data: PageData) -> str:
    """Pack data as gzip'd JSON in base64: small, and without a character that could end its element."""
    text = dumps(msgspec.to_builtins(data), indent=None)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def _plotly() -> tuple[str, str]:
    """Return plotly.js of the installed package, packed, and the hash of the script that the page makes of it."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs()
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), _sha256(script)


def _style() -> str:
    css = Template(_asset("templates/report.css"))
    colours = "\n".join(f".c-{name} {{ --c: var(--c-{name}); --on: var(--on-{name}); }}" for name in LIGHT)
    phases = "\n".join(f".p-{name} {{ --c: {colour}; }}" for name, colour in PHASES.items())
    return css.substitute(light=css_variables(LIGHT), dark=css_variables(DARK), categories=colours, phases=phases)


def _asset(name: str) -> str:
    return files("memprof.reports").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

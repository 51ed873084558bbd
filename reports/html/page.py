"""Make a page around a body: one self-contained file that loads nothing and runs only its own scripts."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

import msgspec
from memprof.reports.html.elements import Child, Markup, el, join
from memprof.reports.palette import DARK, LIGHT, PATTERNS, PHASES, css_variables

from memprof._version import __version__
from memprof.report.base import Model
from memprof.report.codec import dumps

if TYPE_CHECKING:
    from memprof.reports.figures import FigureJson
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
    "page", "rows", "copying", "address", "categories", "tables", "stacks", "icicle", "allocations", "segments",
    "source", "contents", "pictures", "timeline", "moments", "bands", "pareto_front",
)  # fmt: skip
_DRAWING = {"timeline": "timeline", "moments": "timeline", "bands": "timeline", "pareto_front": "pareto_front"}
_PLOTLY_LEVEL = 5
_READY = 'root.dataset.ready = "yes"; arrive();'


class PageData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a page's script reads: the answer that the download button saves, and what it draws and opens.

    ``front`` is plotly's figure of a plan.
    """

    report: Model
    front: FigureJson | None = None
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
    page, main = Template(_asset("templates/page.html")), el("main", {"id": "main"}, *sections)
    return page.substitute(
        name=download_name(title),
        policy=_POLICY.format(hashes=" ".join(f"'sha256-{one}'" for one in hashes)),
        title=join(f"{title} · memprof"),
        style=_style(),
        body=join(_header(title, subtitle), _contents(main), main),
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


# What the list of contents calls a section; one that is not here has no entry.
_CONTENTS = {
    "summary": "Overview", "ranks": "Ranks", "recordings": "Dumps", "advice": "Advice",
    "changed": "Settings", "components": "Components", "difference": "Grown and shrunk", "timeline": "Timeline",
    "icicle": "Call sites", "allocations": "Allocations", "segments": "Segments", "source": "Source",
    "phases": "Phases", "device-peak": "Device peak", "steps": "Steps", "stacks": "Stacks", "best": "Settings",
    "growth": "Memory", "front": "Time", "rows": "Side by side", "adds-up": "Checks", "reproduce": "Reproduce",
}  # fmt: skip
_SECTION = re.compile(r'<section id="([\w-]+)"')


def _contents(main: Markup) -> Markup | None:
    """List the page's sections in a bar that stays in sight, next to the button that copies a link to what it shows."""
    found = [name for name in dict.fromkeys(_SECTION.findall(main)) if name in _CONTENTS]
    links = [el("a", {"href": f"#{name}"}, _CONTENTS[name]) for name in found]
    copy = el("button", {"id": "copy-link", "type": "button", "class": "needs-js"}, "Copy link to this view")
    return el("nav", {"id": "contents", "aria-label": "Contents"}, el("div.links", *links), copy)


def download_name(title: str) -> str:
    """Return a title as the beginning of a file's name."""
    stem = re.sub(r"\.(?:pickle|pkl|json|html)(?:\.gz)?$", "", title)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:60].strip("-.") or "memprof"


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
    # 1% larger than at the highest level, in half the time, which is a fifth of a small report's.
    return base64.b64encode(gzip.compress(script.encode(), _PLOTLY_LEVEL, mtime=0)).decode(), _sha256(script)


def _stripes(angle: int) -> str:
    return f"repeating-linear-gradient({angle}deg, var(--stripe) 0 1.5px, transparent 1.5px 5px)"


_PATTERNED = '[data-patterns="on"] :is(.seg, .swatch)'
# Plotly's names of fills in CSS, so that bars and legend have the patterns of the chart.
_FILLS = {
    "/": _stripes(-45), "\\": _stripes(45), "|": _stripes(90), "-": _stripes(0),
    "x": f"{_stripes(45)}, {_stripes(-45)}", "+": f"{_stripes(0)}, {_stripes(90)}",
    ".": "radial-gradient(var(--stripe) 1px, transparent 1.5px) 0 0 / 4px 4px",
}  # fmt: skip


def _style() -> str:
    css = Template(_asset("templates/report.css"))
    colours = "\n".join(f".c-{name} {{ --c: var(--c-{name}); --on: var(--on-{name}); }}" for name in LIGHT)
    phases = "\n".join(f".p-{name} {{ --c: {colour}; }}" for name, colour in PHASES.items())
    rules = [f"{_PATTERNED}.c-{name} {{ background: {_FILLS[p]}, var(--c); }}" for name, p in PATTERNS.items() if p]
    patterns = "\n".join(rules)
    variables = {"light": css_variables(LIGHT), "dark": css_variables(DARK)}
    return css.substitute(variables, categories=colours, phases=phases, patterns=patterns)


def _asset(name: str) -> str:
    return files("memprof.reports").joinpath(name).read_text(encoding="utf-8").replace("\r\n", "\n")


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

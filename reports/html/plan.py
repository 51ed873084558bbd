"""A plan drawn: how memory grows along its rows, against the card; for a terminal, and as a page of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.reports.document.model import Part
from memprof.reports.document.text import gib, plain
from memprof.reports.document.words import STACK_ORDER, category_label, phase_label
from memprof.reports.files import write_text
from memprof.reports.html.elements import Markup, column, el, join, section, swatch
from memprof.reports.html.page import render_plain
from memprof.reports.html.static_timeline import nice_step
from memprof.reports.palette import slug
from memprof.reports.terminal.report import abilities, console_of, draw_bar, legend, text_of

from memprof.units import GIB

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["bars", "write_plan"]

_WIDTH, _ROW, _LEFT, _RIGHT, _TOP = 940, 26, 210, 130, 22


def _parts(row: Mapping[str, Any]) -> tuple[Part, ...]:
    """What a row holds at its peak, then what the device needs beyond: cached, split, outside torch."""
    held = [Part(c, category_label(c), row["categories"][c]) for c in STACK_ORDER if row["categories"].get(c)]
    beyond = row["device_peak_bytes"] - sum(part.bytes for part in held)
    rest = [Part("cached", "Reserved beyond, and outside torch", beyond)] if beyond > 0 else []
    return (*held, *rest)


def _scale(plan: Mapping[str, Any]) -> int:
    return int(max([plan["limit_bytes"], *(row["device_peak_bytes"] for row in plan["rows"])]))


def bars(plan: Mapping[str, Any], stream: Any) -> str:
    """A bar for each row, all on one scale, in the width and colours of ``stream``."""
    from rich.text import Text

    width, colour = abilities(stream)
    console = console_of(width, colour)
    names = [plain(row["method"]) for row in plan["rows"]]
    longest = min(max(map(len, names)), width // 3)
    room = max(width - longest - 22, 10)
    used: dict[str, Part] = {}
    for name, row in zip(names, plan["rows"], strict=True):
        parts = _parts(row)
        used.update({part.id: part for part in parts})
        line = Text(name[:longest].ljust(longest) + "  ", no_wrap=True)
        line.append(draw_bar(parts, _scale(plan), room, colour))
        line.append(f"  {gib(row['device_peak_bytes'])} {'fits' if row['fits'] else 'does not fit'}")
        console.print(line)
    console.print(_limit_mark(plan, longest + 2, room, width))
    for entry in legend([Part(p.id, p.label, p.bytes) for p in used.values()], width - 1, colour, figures=False):
        console.print(entry)
    return text_of(console)


def _limit_mark(plan: Mapping[str, Any], left: int, room: int, width: int) -> Text:
    """A mark below the bars where the card ends, its words on the side that has room for them."""
    from rich.text import Text

    place = left + max(round(room * plan["limit_bytes"] / _scale(plan)) - 1, 0)
    words = f"{gib(plan['limit_bytes'])} GiB may be used"
    if place + 2 + len(words) <= width:
        return Text(f"{' ' * place}^ {words}", no_wrap=True)
    return Text(f"{words} ^".rjust(place + 1), no_wrap=True)


def write_plan(plan: Mapping[str, Any], path: Path) -> None:
    """Write the plan's page, complete or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    title = f"{plain(plan['model'])} on {plain(plan['gpu'])}"
    body = join(
        el(
            "header",
            {"class": "top"},
            el("div", {}, el("h1", {}, title), el("p", {"class": "muted sub"}, _subtitle(plan))),
        ),
        el("main", {"id": "main"}, _chart(plan), _table(plan["rows"]), _best(plan), _notes(plan["notes"])),
    )
    write_text(path, render_plain(title, body, {"report": dict(plan)}))


def _subtitle(plan: Mapping[str, Any]) -> str:
    return f"simulated · {gib(plan['total_bytes'])} GiB, of which {gib(plan['limit_bytes'])} may be used"


def _chart(plan: Mapping[str, Any]) -> Markup:
    """One stacked bar a row, and a line where the card ends."""
    rows, scale = plan["rows"], _scale(plan) * 1.03
    height = _TOP + _ROW * len(rows) + 24

    def x(n_bytes: float) -> float:
        return round(_LEFT + n_bytes / scale * (_WIDTH - _LEFT - _RIGHT), 1)

    drawn = [_grid(scale, height, x)]
    used: dict[str, Part] = {}
    for index, row in enumerate(rows):
        top, below = _TOP + index * _ROW, 0
        drawn.append(el("text", {"x": _LEFT - 8, "y": top + 16, "text-anchor": "end"}, plain(row["method"])[:34]))
        for part in _parts(row):
            used[part.id] = part
            colour = part.id if part.id == "cached" else slug(part.id)
            box = {"x": x(below), "y": top + 4, "width": max(x(below + part.bytes) - x(below), 0), "height": _ROW - 8}
            label = f"{part.label}: {gib(part.bytes)} GiB"
            drawn.append(el("g", {}, el("title", {}, label), el("rect", {**box, "class": f"fill c-{colour}"})))
            below += part.bytes
        words = f"{gib(row['device_peak_bytes'])}{'' if row['fits'] else ', does not fit'}"
        drawn.append(el("text", {"x": x(below) + 6, "y": top + 16}, words))
    limit = x(plan["limit_bytes"])
    drawn.append(el("line", {"x1": limit, "x2": limit, "y1": _TOP - 6, "y2": height - 20, "class": "peak"}))
    drawn.append(el("text", {"x": limit, "y": _TOP - 9, "text-anchor": "middle", "class": "peak"}, "limit"))
    about = "Needed memory of each row: " + "; ".join(
        f"{plain(row['method'])} {gib(row['device_peak_bytes'])} GiB" for row in rows
    )
    picture = el(
        "svg",
        {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "aria-label": about, "class": "timeline-svg"},
        *drawn,
    )
    entries = [el("li", {}, swatch(part.id), part.label) for part in used.values()]
    return section("growth", "What each needs", "GiB", picture, el("ul", {"class": "legend"}, *entries))


def _grid(scale: float, height: int, x: Any) -> Markup:
    step = nice_step(scale / GIB)
    lines = []
    for i in range(int(scale / GIB / step) + 1):
        at = x(i * step * GIB)
        lines.append(el("line", {"x1": at, "x2": at, "y1": _TOP, "y2": height - 20, "class": "grid"}))
        lines.append(el("text", {"x": at, "y": height - 6, "text-anchor": "middle"}, f"{i * step:g}"))
    return join(*lines)


def _table(rows: Sequence[Mapping[str, Any]]) -> Markup:
    head = el(
        "tr", {}, column("Method"), column("Verdict"), column("Needed, GiB", True), column("Held, GiB", True),
        column("Host, GiB", True), column("Highest in"), column("Largest"),
    )  # fmt: skip
    body = [
        el(
            "tr",
            {},
            el("th", {"scope": "row"}, plain(row["method"])),
            el(
                "td",
                {},
                el("span", {"class": "ok" if row["fits"] else "bad"}, "fits" if row["fits"] else "does not fit"),
            ),
            *[el("td", {"class": "num"}, gib(row[k])) for k in ("device_peak_bytes", "peak_bytes", "host_bytes")],
            el("td", {}, phase_label(row["phase"])),
            el("td", {}, category_label(row["largest_category"])),
        )
        for row in rows
    ]
    table = el("table", {"class": "plain"}, el("thead", {}, head), el("tbody", {}, *body))
    return section("rows", "Side by side", "", el("div", {"class": "scroll"}, table))


def _best(plan: Mapping[str, Any]) -> Markup | None:
    if not plan["best"]:
        return None
    return section("best", "Ready to paste", plain(plan["best"]["method"]), el("pre", {"tabindex": "0"}, plan["code"]))


def _notes(notes: Sequence[str]) -> Markup | None:
    items = [el("li", {}, plain(note)) for note in notes]
    return section("notes", "Notes", "", el("ul", {"class": "notes"}, *items)) if items else None

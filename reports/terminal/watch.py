"""Draw the newest counters of a run for a terminal, by rank, phase and category: what ``memprof watch`` shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memprof.reports.document.text import category_label, gib, percent, phase_label, plain
from memprof.reports.palette import DARK, FALLBACK
from memprof.reports.terminal.elements import LETTERS
from memprof.reports.terminal.screen import console_of, text_of
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memprof.analysis.host.growth import host_growth

if TYPE_CHECKING:
    from memprof.analysis.counters import Counters

__all__ = ["frame", "render_counters"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-:=+*#"
_QUIET_SECONDS = 120
_LEVELS = (
    ("peak_allocated", "Peak allocated"), ("peak_reserved", "Peak reserved"), ("allocated", "Allocated"),
    ("reserved", "Reserved"), ("cached", "Cached"), ("inactive_split", "Inactive split"),
    ("non_torch", "Outside torch"), ("host_rss", "Host, resident"), ("host_rss_peak", "Host, highest"),
    ("host_pinned", "Host, pinned"),
)  # fmt: skip
_HIGHEST = ("peak_allocated", "peak_reserved", "host_rss_peak")


def render_counters(ranks: Sequence[Counters], width: int = 100, colour: bool = False) -> str:
    """Render what is known now as text of at most ``width`` columns."""
    console = console_of(width, colour)
    console.print(frame(ranks, width, colour))
    return text_of(console)


def frame(ranks: Sequence[Counters], width: int, colour: bool, ascii_only: bool = False) -> RenderableType:
    """Make everything that is shown at once, ``width`` columns wide."""
    first = ranks[0]
    parts: list[RenderableType] = [_title(first), _state(ranks)]
    if first.newest is None:
        return Group(*parts, Text("No step has ended yet."))
    parts += [Text(), _levels(ranks, width, ascii_only)]
    if len(ranks) > 1:
        parts += [Text(), _ranks(ranks)]
    if (phases := _newest_phases(first)) is not None:
        parts += [Text(), _phases(first, phases, width, ascii_only)]
    if (growth := host_growth(first.steps)) is not None:
        parts += [Text(), Text(growth.sentence)]
    if first.categories is not None:
        parts += [Text(), _categories(first.categories, width, colour, ascii_only)]
    return Group(*parts)


def _title(run: Counters) -> Text:
    about = run.about
    words = [plain(str(about[k])) for k in ("model_name", "device") if about.get(k)]
    total = about.get("device_total_bytes")
    if isinstance(total, int):
        words.append(f"{gib(total)} GiB")
    if run.world_size > 1:
        words.append(f"{run.world_size} ranks")
    return Text(" · ".join(words) or plain(str(run.path)), style="bold")


def _state(ranks: Sequence[Counters]) -> Text:
    run = ranks[0]
    step, last = (run.newest or {}).get("step", 0), run.about.get("max_steps")
    words = f"Step {step}" + (f" of {last}" if isinstance(last, int) and last > 0 else "")
    if run.ended is not None:
        return Text(f"{words} · " + ("ended by an error" if run.ended.get("error") else "finished"))
    changed = max((_time(r.newest) or _time(r.about, "started") or 0.0) for r in ranks)
    age = max(0, round(time.time() - changed))
    quiet = "" if age < max(_QUIET_SECONDS, 5 * _pace(run)) else "; it may have been stopped"
    return Text(f"{words} · last heard {_ago(age)} ago{quiet}", style="" if not quiet else "bold")


def _pace(run: Counters) -> float:
    """Say how many seconds a step has taken so far, loading included."""
    begun, last = _time(run.about, "started"), _time(run.newest)
    return (last - begun) / len(run.steps) if begun is not None and last is not None and run.steps else 0.0


def _levels(ranks: Sequence[Counters], width: int, ascii_only: bool) -> Table:
    run = ranks[0]
    newest = run.newest or {}
    table = _table("GiB", "Newest", "Highest", "Of the run" if width >= 70 else "")
    for name, label in _LEVELS:
        values = [v if isinstance(v := row.get(name), int) else None for row in run.steps]
        known = [v for v in values if v is not None]
        if not known:
            continue
        now = newest.get(name)
        curve = _curve(values, max(8, min(40, width - 50)), ascii_only) if width >= 70 else ""
        table.add_row(label, gib(now) if isinstance(now, int) else "–", gib(max(known)), curve)
    return table


def _ranks(ranks: Sequence[Counters]) -> Table:
    table = _table("Rank", "Step", "Peak reserved", "Peak allocated", "Resident")
    for run in ranks:
        row = run.newest or {}
        cells = [gib(v) if isinstance(v := row.get(k), int) else "–" for k in _HIGHEST[1::-1]]
        resident = row.get("host_rss")
        table.add_row(str(run.rank), str(row.get("step", "–")), *cells, gib(resident) if resident else "–")
    return table


def _newest_phases(run: Counters) -> dict[str, Any] | None:
    """Find the last step that says what its phases peaked at: with no allocator, only recorded steps do."""
    rows = (row for row in reversed(run.steps) if isinstance(row.get("phases"), dict) and row["phases"])
    return next(rows, None)


def _phases(run: Counters, newest: dict[str, Any], width: int, ascii_only: bool) -> Table:
    table = _table(f"Phase, step {newest['step']}", "Peak", "Highest", "")
    highest: dict[str, int] = {}
    for row in run.steps:
        for phase, peak in (row.get("phases") or {}).items():
            if isinstance(peak, int):
                highest[phase] = max(peak, highest.get(phase, 0))
    scale = max(highest.values(), default=0)
    for phase, peak in newest["phases"].items():
        if isinstance(peak, int):
            bar = _bar(peak, scale, width - 48, "█" if not ascii_only else "#") if width >= 70 else ""
            table.add_row(phase_label(plain(phase)), gib(peak), gib(highest[phase]), bar)
    return table


def _categories(row: dict[str, Any], width: int, colour: bool, ascii_only: bool) -> Table:
    sizes = {plain(k): v for k, v in row["categories"].items() if isinstance(v, int) and v > 0}
    total = sum(sizes.values())
    table = _table(f"Category at the peak, step {row.get('step', '–')}", "GiB", "Share", "")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        letter = LETTERS.get(name, "?")
        swatch = Text("■ " if colour and not ascii_only else f"{letter} ", style=DARK.get(name, FALLBACK))
        bar = _bar(size, total, width - 62, "█" if colour and not ascii_only else letter) if width >= 80 else ""
        label = Text.assemble(swatch, category_label(name))
        table.add_row(label, gib(size), percent(size, total), Text(bar, style=DARK.get(name, FALLBACK)))
    table.add_row("Total", gib(total), "", "", style="bold")
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for position, title in enumerate(titles):
        bars = title in ("", "Of the run")
        table.add_column(title, justify="left" if position == 0 or bars else "right", no_wrap=True)
    return table


def _curve(values: Sequence[int | None], width: int, ascii_only: bool) -> str:
    """Draw the newest values as blocks, the highest of each group of neighbours."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    group = -(-len(values) // width)
    heights = [
        max((v for v in values[i : i + group] if v is not None), default=None) for i in range(0, len(values), group)
    ]
    known = [h for h in heights if h is not None]
    low, high = min(known), max(known)
    span = max(high - low, 1)
    return "".join(" " if h is None else blocks[min(7, (h - low) * 8 // span)] for h in heights)


def _bar(size: int, scale: int, width: int, block: str) -> str:
    return block * round(max(width, 0) * size / scale) if scale else ""


def _time(row: dict[str, Any] | None, name: str = "time") -> float | None:
    value = (row or {}).get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _ago(seconds: int) -> str:
    if seconds < 90:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 5400 else f"{seconds // 3600} h"

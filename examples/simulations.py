"""Share what the simulated examples need: many simulations at once, a table, a page with a chart, options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memprof.config.catalogue import find_config
from memprof.config.settings import Settings
from memprof.errors import MemprofError
from memprof.plan import cache
from memprof.plan.simulations import SimulatedRow, SimulationRequest
from memprof.plan.subprocess_runner import runner
from memprof.simulate.evaluate import run_row

__all__ = ["chart", "ending", "options", "save", "simulate_all", "table"]


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the options every simulated example has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, metavar="N", help="processes; 1: this one; default: one a core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures as JSON")
    return parser


def ending(main: Callable[[], None]) -> None:
    """Call ``main``; a mistake in what was asked for ends in one sentence and memprof's exit code."""
    try:
        main()
    except MemprofError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def simulate_all(wanted: Sequence[Settings], gpu: str, workers: int | None) -> list[SimulatedRow]:
    """Simulate each of the settings; return rows: peaks in bytes, categories, verdict."""
    if workers == 1:
        return [_known_or_run(settings, gpu) for settings in wanted]
    with runner(gpu, workers=workers) as machine:
        return machine.run(list(wanted))


def _known_or_run(settings: Settings, gpu: str) -> SimulatedRow:
    """Simulate in this process; results are kept where ``memprof plan`` keeps its own."""
    key = cache.key_of(settings.to_dict(), find_config(settings.model), gpu)
    row = cache.load(key)
    if row is None:
        row = run_row(SimulationRequest(settings=settings.to_dict(), gpu=gpu))
        cache.store(key, row)
    return row


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Make a Markdown table; the first column is words, the others are figures."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def save(data: Any, path: Path | None) -> None:
    """Keep the figures, where a file was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def chart(
    path: Path, title: str, across: str, values: Sequence[float], lines: dict[str, Sequence[float]], capacity: float
) -> None:
    """Draw a page that needs no network: GiB by ``values``, a line each, and the card's memory dashed."""
    from plotly import graph_objects as go

    figure = go.Figure(
        [go.Scatter(x=list(values), y=list(gib), name=name, mode="lines+markers") for name, gib in lines.items()]
    )
    figure.add_hline(y=capacity, line_dash="dash", annotation_text=f"{capacity:.1f} GiB")
    figure.update_layout(
        title=title,
        template="simple_white",
        xaxis={"title": across, "tickvals": list(values)},
        yaxis={"title": "GiB needed", "rangemode": "tozero"},
        legend={"orientation": "h", "y": -0.2},
    )
    figure.write_html(path, include_plotlyjs=True)

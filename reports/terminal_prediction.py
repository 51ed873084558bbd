"""A simulated run's verdict on a terminal: its sentence, phase by phase, length by length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.reports.model import Prediction
from memprof.reports.text import gib, percent, thousands

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_prediction"]

_WORDS = {True: "fits", False: "does not fit", None: "–"}


def print_prediction(console: Console, prediction: Prediction) -> None:
    """The verdict and its tables; narrow ones leave columns out."""
    from rich.text import Text

    if prediction.needs:
        console.print(_phases(prediction))
    if prediction.lengths:
        console.print()
        console.print(Text(prediction.lengths_sentence))
        console.print(_lengths(prediction, console.width))


def _table(*columns: tuple[str, bool]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title, numeric in columns:
        table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    return table


def _phases(prediction: Prediction) -> Table:
    table = _table(("Does it fit? GiB", False), ("Held", True), ("Needed", True), ("", False))
    for need in prediction.needs:
        word = _WORDS[need.fits] + (" decides" if need.decides else "")
        table.add_row(need.label, gib(need.allocated_bytes), gib(need.needed_bytes), word)
    return table


def _lengths(prediction: Prediction, width: int) -> Table:
    wide = width >= 80
    columns = [("Longest completion", False), ("Tokens", True), ("Steps", True)]
    columns += [("Held", True)] if wide else []
    columns += [("Needed", True), ("", False)]
    columns += [("", False)] if wide else []
    table = _table(*columns)
    for row in prediction.lengths:
        cells = [row.label, thousands(row.tokens), percent(round(1e6 * row.share_below), 1_000_000)]
        cells += [gib(row.peak_bytes)] if wide else []
        cells += [gib(row.needed_bytes), _WORDS[row.fits]]
        cells += ["executed" if row.executed else "between"] if wide else []
        table.add_row(*cells)
    return table

"""Make of recorded snapshots what a person reads: JSON beside each, one page, one table.

Everything here runs after the recording, needs other parts of memprof, and must never end a training run: whatever
goes wrong becomes one warning.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.recording.guard import Door

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.report import Report

# What `memprof run` prints when the script is over, below its traceback; None: at once.
LATER: list[str] | None = None


@dataclass
class Result:
    """List what a run wrote: snapshots in the order they were taken, their reports, and the page."""

    snapshots: list[Path] = field(default_factory=list)
    reports: dict[Path, Report] = field(default_factory=dict)
    page: Path | None = None
    table: str = ""
    drawn: Path | None = None  # whose document this is
    document: Any = field(default=None, repr=False)

    @property
    def highest(self) -> Path | None:
        """Return the analysed snapshot to show: one that ends out of memory, else the one with the highest peak."""

        def weight(path: Path) -> tuple[bool, int]:
            report = self.reports[path]
            return report.oom is not None, report.peak.allocated_bytes

        return max(self.reports, key=weight, default=None)


def summarise(
    snapshots: list[Path], folder: Path, page: bool = True, done: Result | None = None, notes: Sequence[str] = ()
) -> Result:
    """Analyse each snapshot, write its JSON, and the page of the one with the highest peak; only warn.

    ``done`` holds what :func:`add_report` did before. ``notes`` stand on the page and in the JSON of the highest.
    """
    result = done or Result()
    result.snapshots = list(snapshots)
    names = ", ".join(path.name for path in snapshots)
    Door("run", f"the report of {names}; try `memprof report` on the file")(_summarise, result, folder, page, notes)
    return result


def prune(snapshots: list[Path], max_bytes: int | None) -> list[Path]:
    """Delete the oldest snapshots, with their JSON, until the rest fits ``max_bytes``; the newest always stays."""
    kept = [p for p in snapshots if p.exists()]
    if max_bytes is None:
        return kept
    while len(kept) > 1 and sum(p.stat().st_size for p in kept) > max_bytes:
        oldest = kept.pop(0)
        oldest.unlink(missing_ok=True)
        oldest.with_suffix(".json").unlink(missing_ok=True)
    return kept


def add_report(result: Result, path: Path, folder: Path, page: bool = True) -> Report:
    """Analyse one snapshot and write its JSON; table and page too if no other has a higher peak. MemprofError where
    that cannot be done."""
    analysis = write_report(path)
    result.reports[path] = analysis.report
    if result.highest == path:
        from memprof.reports.document.build import document_of

        result.document, result.drawn = document_of(analysis), path
        _render(result, folder / "report.html" if page else None)
    return analysis.report


def write_report(path: Path) -> Analysis:
    """Analyse one snapshot, write its JSON beside it, and return the analysis. MemprofError where that cannot be
    done."""
    from memprof.advice.analyze_with_advice import analyze
    from memprof.report.files import write_answer

    analysis = analyze(path)
    write_answer(analysis.report, path.with_suffix(".json"))
    return analysis

def _summarise(result: Result, folder: Path, page: bool, notes: Sequence[str]) -> None:
    for path in result.snapshots:
        if path not in result.reports:
            add_report(result, path, folder, page)
    if notes and result.highest is not None and result.highest.exists():
        _add_notes(result, result.highest, folder, page, notes)


def _add_notes(result: Result, path: Path, folder: Path, page: bool, notes: Sequence[str]) -> None:
    """Add notes to the highest snapshot's JSON, its page and its table."""
    from memprof.reports.document.build import notes_of
    from msgspec.structs import replace

    from memprof.report.files import write_answer

    if result.drawn != path:  # a higher one was deleted
        add_report(result, path, folder, page)
    report = result.reports[path]
    report = replace(report, notes=tuple(dict.fromkeys([*report.notes, *notes])))
    result.reports[path] = report
    write_answer(report, path.with_suffix(".json"))
    result.document = result.document._replace(report=report, notes=notes_of(report))
    _render(result, folder / "report.html" if page else None)


def _render(result: Result, page: Path | None) -> None:
    from memprof.reports.terminal import report as terminal

    result.table = terminal.render_short(result.document)
    if page is not None:
        from memprof.reports.html.report import write_html

        write_html(result.document, page)
        result.page = page


def say(text: str, stream: str = "stdout") -> None:
    """Print for the person who runs the training."""
    from memprof.reports.terminal.screen import writable

    file = sys.stderr if stream == "stderr" else sys.stdout
    shown = writable(text, file)
    with suppress(OSError, ValueError):  # a full disk, a closed terminal
        print(shown, file=file, flush=True)


def say_oom(result: Result) -> None:
    """Print ten lines on stderr where the newest recording ended out of memory."""
    newest = next((path for path in reversed(result.snapshots) if path in result.reports), None)
    if newest is None or result.reports[newest].oom is None:
        return
    lines = Door("run", f"the lines on where memory ran out; see {newest}")(_oom_lines, result, newest)
    if lines is None:
        return
    if LATER is None:
        say("\n".join(lines), "stderr")
    else:
        LATER.append("\n".join(lines))


def _oom_lines(result: Result, newest: Path) -> list[str]:
    from memprof.oom.run_lines import oom_lines
    from memprof.report.codec import to_builtins

    return oom_lines(to_builtins(result.reports[newest]), str(result.page or newest))


def say_later() -> None:
    """Print what was kept for the end of a script."""
    while LATER:
        say(LATER.pop(0), "stderr")

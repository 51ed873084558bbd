"""Make of recorded snapshots what a person reads: JSON beside each, one page, one table.

Everything here runs after the recording, needs other parts of memprof, and must never end a training run: whatever
goes wrong becomes one warning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.recording.guard import FailureGuard

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis
    from memprof.report import Report

# What `memprof run` prints when the script is over, below its traceback; None: at once.
LATER: list[str] | None = None


class Reports(Mapping[Path, "Report"]):
    """Reports of recordings, by snapshot. A long run writes thousands, so all but the newest are read from their JSON
    when they are asked for; those whose JSON was deleted are left out."""

    def __init__(self) -> None:
        self._peaks: dict[Path, tuple[bool, int]] = {}
        self._newest: tuple[Path, Report] | None = None

    def add(self, path: Path, report: Report) -> None:
        """Add the report of a snapshot, whose JSON is written."""
        self._peaks[path] = (report.oom is not None, report.peak.allocated_bytes)
        self._newest = (path, report)

    def forget(self, path: Path) -> None:
        """Leave out a snapshot that is deleted or not yet reported."""
        self._peaks.pop(path, None)
        if self._newest is not None and self._newest[0] == path:
            self._newest = None

    def weight(self, path: Path) -> tuple[bool, int]:
        """Return what decides which recording is shown: whether it ends out of memory, and its peak in bytes."""
        return self._peaks[path]

    def __getitem__(self, path: Path) -> Report:
        if self._newest is not None and self._newest[0] == path:
            return self._newest[1]
        from memprof.errors import InputError
        from memprof.report.files import read_report

        try:
            report = read_report(self._json_of(path))
        except InputError:
            report = None
        if report is None:
            raise KeyError(path)
        return report

    def __iter__(self) -> Iterator[Path]:
        newest = self._newest[0] if self._newest is not None else None
        return (path for path in list(self._peaks) if path == newest or self._json_of(path).exists())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _json_of(self, path: Path) -> Path:
        if path not in self._peaks:
            raise KeyError(path)
        return path.with_suffix(".json")


@dataclass
class Result:
    """List what a run wrote: snapshots in the order they were taken, their reports, and the page."""

    snapshots: list[Path] = field(default_factory=list)
    reports: Reports = field(default_factory=Reports)
    page: Path | None = None
    table: str = ""
    drawn: Path | None = None  # whose document this is
    document: Any = field(default=None, repr=False)
    _drawn_weight: tuple[bool, int] = (False, -1)

    @property
    def highest(self) -> Path | None:
        """Return the analysed snapshot to show: one that ends out of memory, else the one with the highest peak."""
        return max(self.reports, key=self.reports.weight, default=None)

    def draws(self, path: Path) -> bool:
        """Return whether page and table are to show this recording; those of a higher one stay, also if ``max_disk``
        has deleted its snapshot."""
        weight = self.reports.weight(path)
        if weight < self._drawn_weight:
            return False
        self._drawn_weight, self.drawn = weight, path
        return True


def summarise(
    snapshots: list[Path], folder: Path, page: bool = True, done: Result | None = None, notes: Sequence[str] = ()
) -> Result:
    """Analyse each snapshot, write its JSON, and the page of the one with the highest peak; only warn.

    ``done`` holds what :func:`add_report` did before. ``notes`` stand on the page and in the JSON of the highest.
    """
    result = done or Result()
    result.snapshots = list(snapshots)
    names = ", ".join(path.name for path in snapshots)
    FailureGuard("run", f"the report of {names}; try `memprof report` on the file")(
        _summarise, result, folder, page, notes
    )
    return result


def prune(snapshots: list[Path], max_bytes: int | None) -> tuple[list[Path], list[Path]]:
    """Delete the oldest snapshots, with their JSON, until the rest fits ``max_bytes``; the newest always stays.

    Returns:
        The snapshots that are there, and those that were deleted here.
    """
    kept = [p for p in snapshots if p.exists()]
    sizes = {p: bytes_of(p) + bytes_of(p.with_suffix(".json")) for p in kept} if max_bytes is not None else {}
    deleted: list[Path] = []
    total = sum(sizes.values())
    while max_bytes is not None and len(kept) > 1 and total > max_bytes:
        oldest = kept.pop(0)
        total -= sizes[oldest]
        oldest.unlink(missing_ok=True)
        oldest.with_suffix(".json").unlink(missing_ok=True)
        deleted.append(oldest)
    return kept, deleted


def bytes_of(path: Path) -> int:
    """Return a file's size; 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def add_report(result: Result, path: Path, folder: Path, page: bool = True) -> Report:
    """Analyse one snapshot and write its JSON; table and page too if no other has a higher peak.

    Raises:
        MemprofError: the snapshot cannot be read.
    """
    analysis = write_report(path)
    result.reports.add(path, analysis.report)
    if result.draws(path):
        from memprof.reports.document.build import document_of

        result.document = document_of(analysis)
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
    result.reports.add(path, report)
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
    lines = FailureGuard("run", f"the lines on where memory ran out; see {newest}")(_oom_lines, result, newest)
    if lines is None:
        return
    if LATER is None:
        say("\n".join(lines), "stderr")
    else:
        LATER.append("\n".join(lines))


def _oom_lines(result: Result, newest: Path) -> list[str]:
    from memprof.reports.terminal.out_of_memory import oom_lines

    return oom_lines(result.reports[newest], str(result.page or newest))


def say_later() -> None:
    """Print what was kept for the end of a script."""
    while LATER:
        say(LATER.pop(0), "stderr")

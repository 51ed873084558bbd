"""Write a run's recordings and report on them, beside the training where that is safe; bound what they take of disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.integrations.run_recorder.background import Background
from memprof.integrations.run_recorder.output import Result, add_report, bytes_of, prune

from memprof.errors import MemprofError
from memprof.recording.recorder import RunIdentity
from memprof.recording.session import Session
from memprof.recording.system.signals import finish_first
from memprof.snapshot.columns import collector_paused
from memprof.snapshot.writer import save_snapshot
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.report import Report

# Deleted recordings that a note names.
_MOST_NAMED = 5


class Writing:
    """Hold what one rank of a run has written: ``snapshots`` in order, and the ``result`` of their reports.

    The ranks share ``max_disk`` bytes; ``share`` is this rank's (None: no bound). ``report``, where given, is called
    with each report on the thread that trains. ``identity`` is written to every file.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        max_disk: int | None,
        report: Callable[[Report], None] | None,
        identity: RunIdentity,
    ) -> None:
        self.folder, self.rank, self.identity = folder, rank, identity
        self.snapshots: list[Path] = []
        self.result = Result()
        self.unwritten: set[Path] = set()  # files whose writing an exception of the program's ended
        self.share = None if max_disk is None else max_disk // max(1, world_size)
        self._tell = report
        self._background = Background()
        self._deleted: list[str] = []  # the first and the newest
        self._deleted_count = 0

    def now(self, session: Session, step: int) -> Path:
        """Write the session at once, and before SIGTERM or Ctrl-C is acted on; return the file.

        Raises:
            InputError: it cannot be written.
        """
        self.settle()
        path, session.identity = self.path_of(step), self.identity
        self.result.reports.forget(path)
        with finish_first():
            self.unwritten.add(path)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                session.write(path)
            except MemprofError:
                self.unwritten.discard(path)  # the error names it
                raise
            self.unwritten.discard(path)
            self._keep(path)
        return path

    def report_newest(self) -> None:
        """Analyse what was just written, so that its categories are seen while the run goes."""
        if self._tell is not None and self.snapshots:
            report = self._reported(self.snapshots[-1])
            self.keep_within_share()
            if report is not None:
                self._tell(report)

    def beside(self, session: Session, step: int, took: Callable[[float], None]) -> None:
        """Take the snapshot, of CUDA's history, now; write and report it beside the training. ``took`` is called at the
        end with the seconds that all of it took. InputError: the previous snapshot could not be written."""
        self.settle()
        path, began, session.identity = self.path_of(step), time.monotonic(), self.identity
        with finish_first(), collector_paused():
            raw = session.to_raw()
        taking = time.monotonic() - began

        def work() -> Report | None:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_snapshot(raw, path)
            raw.clear()
            return self._reported(path) if self._tell is not None else None

        def done(report: Report | None, seconds: float) -> None:
            took(taking + seconds)
            self._keep(path)
            if report is not None and self._tell is not None:
                self._tell(report)

        self._background.start(work, done)

    def look(self) -> None:
        """Take over what was written beside the training, if writing is done."""
        self._background.look()

    def settle(self) -> None:
        """Wait for what is being written beside the training."""
        self._background.finish()

    def notes(self) -> list[str]:
        """Say what was deleted to keep within the disk's share."""
        if not self._deleted or self.share is None:
            return []
        names = f" ... {self._deleted[-1]}" if self._deleted_count > len(self._deleted) else ""
        shown = self._deleted[:-1] if names else self._deleted
        return [
            f"Deleted to stay within max_disk ({format_bytes(self.share)} for this rank): "
            f"{', '.join(shown)}{names}."
        ]

    def forget(self, path: Path) -> None:
        """Delete a recording that turned out not to be wanted."""
        path.unlink(missing_ok=True)
        self.snapshots = [p for p in self.snapshots if p != path]

    def path_of(self, step: int) -> Path:
        """Return the file of this rank's recording that is named after ``step``."""
        return self.folder / f"step-{step:06d}.rank-{self.rank}.pickle"

    def _keep(self, path: Path) -> None:
        self.snapshots = [*(p for p in self.snapshots if p != path), path]
        self.keep_within_share()

    def keep_within_share(self) -> None:
        """Delete the oldest recordings until everything that this rank has in the folder fits its share of the disk."""
        left = None if self.share is None else self.share - sum(map(bytes_of, self._other_files()))
        self.snapshots, deleted = prune(self.snapshots, left)
        for path in deleted:
            self.result.reports.forget(path)
            self._deleted = [*self._deleted[:_MOST_NAMED], path.name]
        self._deleted_count += len(deleted)

    def _other_files(self) -> list[Path]:
        """Return what this rank writes beside the recordings."""
        counters = self.folder / f"counters.rank-{self.rank}.jsonl"
        if self.rank != 0:
            return [counters]
        return [counters, self.folder / "report.html", *self.folder.glob("step-*.ranks.json")]

    def _reported(self, path: Path) -> Report | None:
        try:
            return add_report(self.result, path, self.folder)
        except Exception:
            self.result.reports.forget(path)
            return None  # tried again, and said, when training ends

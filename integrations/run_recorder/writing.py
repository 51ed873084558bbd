"""Write a run's recordings and report on them, beside the training where that is safe; bound what they take of disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.integrations.run_recorder.background import Background
from memprof.integrations.run_recorder.output import Result, add_report, prune

from memprof.errors import MemprofError
from memprof.recording.session import Session
from memprof.recording.system.signals import finish_first
from memprof.snapshot import save_snapshot
from memprof.snapshot.unpickle import collector_paused
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.report import Report


class Writing:
    """Hold what one rank of a run has written: ``snapshots`` in order, and the ``result`` of their reports.

    The ranks share ``max_disk`` bytes. ``report``, where given, is called with each report on the thread that trains.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        max_disk: int | None,
        report: Callable[[Report], None] | None,
    ) -> None:
        self.folder, self.rank = folder, rank
        self.snapshots: list[Path] = []
        self.result = Result()
        self.unwritten: set[Path] = set()  # files whose writing an exception of the program's ended
        self._share = None if max_disk is None else max_disk // max(1, world_size)
        self._tell = report
        self._background = Background()
        self._pruned: list[str] = []

    def now(self, session: Session, step: int) -> Path:
        """Write the session at once, and before SIGTERM or Ctrl-C is acted on; return the file.

        Raises:
            InputError: it cannot be written.
        """
        self.settle()
        path = self.path_of(step)
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
            if report is not None:
                self._tell(report)

    def beside(self, session: Session, step: int, took: Callable[[float], None]) -> None:
        """Take the snapshot, of CUDA's history, now; write and report it beside the training. ``took`` is called at the
        end with the seconds that all of it took. InputError: the previous snapshot could not be written."""
        self.settle()
        path, began = self.path_of(step), time.monotonic()
        with finish_first(), collector_paused():
            raw = session.to_raw()
        taking = time.monotonic() - began

        def work() -> Report | None:
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
        if not self._pruned or self._share is None:
            return []
        return [
            f"Deleted to keep the recordings within max_disk ({format_bytes(self._share)} for this rank): "
            f"{', '.join(self._pruned)}."
        ]

    def forget(self, path: Path) -> None:
        """Delete a recording that turned out not to be wanted."""
        path.unlink(missing_ok=True)
        self.snapshots = [p for p in self.snapshots if p != path]

    def path_of(self, step: int) -> Path:
        """Return the file of this rank's recording that is named after ``step``."""
        return self.folder / f"step-{step:06d}.rank-{self.rank}.pickle"

    def _keep(self, path: Path) -> None:
        every = [*(p for p in self.snapshots if p != path), path]
        self.snapshots = prune(every, self._share)
        self._pruned += [p.name for p in every if p not in self.snapshots]

    def _reported(self, path: Path) -> Report | None:
        try:
            return add_report(self.result, path, self.folder)
        except Exception:
            self.result.reports.pop(path, None)
            return None  # tried again, and said, when training ends

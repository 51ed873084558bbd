"""Record one run, whoever drives it: a trainer's callback, hooks on a loop, or a worker that was attached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.integrations.run_recorder.output import Result, say, say_oom, summarise
from memprof.integrations.run_recorder.writing import Writing

from memprof.errors import one_line
from memprof.recording import phases
from memprof.recording.guard import FailureGuard, on_stderr
from memprof.recording.phases import PhaseMark
from memprof.recording.recorder import FailedRequest, RunIdentity
from memprof.recording.session import Session
from memprof.recording.system.signals import Interrupts, Terminations, delayed_termination
from memprof.report import Report

if TYPE_CHECKING:
    from memprof.report import Report


class RunRecorder:
    """Hold the session that runs, write it when memory runs out or the process is ended, report when all is over.

    The ranks share ``max_disk``. ``rescue`` writes what there is before a SIGTERM ends the process; ``reported`` is
    called with each report that is made while the run goes (None: none is made). ``session`` is None between
    recordings; what is written now is named after ``step``; ``failed_step`` is the one whose failure is written.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        world_size: int = 1,
        max_disk: int | None = None,
        rescue: Callable[[], None] = lambda: None,
        reported: Callable[[Report], None] | None = None,
        identity: RunIdentity | None = None,
    ) -> None:
        self.writing = Writing(folder, rank, world_size, max_disk, reported, identity or RunIdentity.new())
        self.session: Session | None = None
        self.step = 0
        self.failed_step: int | None = None
        self._failure: FailedRequest | None = None
        self.terminations = Terminations(rescue)

    # -- session -----------------------------------------------------------------------------------------------

    def begin(self, session: Session, on_oom: Callable[[], object] | None = None) -> None:
        """Start a session, or take one that runs; call ``on_oom`` where memory runs out, else write it."""
        session.on_oom(on_oom or self.out_of_memory)
        self.session = session
        try:
            if session not in phases.ACTIVE:
                session.start()
        except BaseException:
            self.session = None
            raise

    def stop(self) -> Session | None:
        """End the session and return it."""
        session, self.session = self.session, None
        if session is not None:
            session.stop()
        return session

    def enter(self, phase: str, step: int | None = None) -> PhaseMark | None:
        return None if self.session is None else self.session.enter_phase(phase, step)

    def leave(self, mark: PhaseMark | None) -> None:
        if mark is not None and self.session is not None:
            self.session.exit_phase(mark)

    # -- failure -----------------------------------------------------------------------------------------------

    def out_of_memory(self) -> None:
        """Write when the allocator is about to raise, at once (nothing may run afterwards) and once a step."""
        session = self.session
        if session is None or self.failed_step == self.step:
            return
        self.failed_step, self._failure = self.step, session.recorder.oom()
        guard = FailureGuard(
            "training", "the recording of the moment at which memory ran out, unless the next attempt succeeds"
        )
        if not guard(self.writing.now, session, self.step):
            self.failed_step = self._failure = None  # tried again when the exception leaves the run

    def knows_failure(self, session: Session) -> bool:
        """Tell whether the failure of this session is written, and nothing followed it."""
        return self._failure is not None and self._failure == session.recorder.oom()

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish writing and reporting at the end of the run before SIGTERM is acted on."""
        with delayed_termination():
            try:
                yield
            finally:
                self.terminations.stop()

    def finish(self, end: Callable[[], None], report: Callable[[bool], None]) -> bool:
        """End and report; put off a Ctrl-C until ``end`` has written what is recorded, and tell whether one came.

        ``report`` is called with False where it did: then nobody waits for a report.
        """
        interrupts = Interrupts()
        with self.finishing():
            try:
                with interrupts:
                    end()
            finally:
                report(not interrupts.pending)
                if lost := sorted(self.writing.unwritten):
                    on_stderr(f"memprof: interrupted while writing; not saved: {', '.join(map(one_line, lost))}")
        return interrupts.pending

    # -- report ------------------------------------------------------------------------------------------------

    @property
    def snapshots(self) -> list[Path]:
        """List what is written and kept, in order."""
        return self.writing.snapshots

    def say(self, text: str, stream: str) -> None:
        """Print a text on rank 0 alone."""
        if self.writing.rank == 0 and text:
            say(text, stream)

    def say_interrupted(self, stream: str, how: str = "interrupted") -> None:
        """Say where the recordings are, and that there is no report."""
        say(f"memprof: {how}, no report; recorded: {', '.join(map(one_line, self.snapshots))}", stream)

    def report(
        self,
        stream: str,
        table: bool,
        page: bool,
        notes: Sequence[str] = (),
        ranks: Callable[[Result], None] = lambda result: None,
    ) -> Result:
        """Analyse what was written; write the JSON and the page; print the ``table`` with the notes and where the
        ``page`` is.

        ``ranks`` puts other ranks' figures into the result.
        """
        writing, result = self.writing, Result(list(self.snapshots))
        try:
            result = summarise(self.snapshots, writing.folder, writing.rank == 0, writing.result, notes)
            ranks(result)
            writing.keep_within_share()
            result.snapshots = list(writing.snapshots)
        except KeyboardInterrupt:
            self.say_interrupted(stream)
            return result
        for line in [result.table, *(f"memprof: {note}" for note in notes)] if table else []:
            self.say(line, stream)
        if page and result.page is not None:
            self.say(f"memprof: {one_line(result.page)}", stream)
        say_oom(result)
        return result

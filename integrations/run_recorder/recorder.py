"""Record one run, whoever drives it: a trainer's callback, hooks on a loop, or a worker that was attached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.integrations.run_recorder.output import Result, say, say_oom, summarise
from memprof.integrations.run_recorder.writing import Writing

from memprof.errors import one_line
from memprof.recording import phases
from memprof.recording.guard import FailureGuard, on_stderr
from memprof.recording.phases import PhaseInterval
from memprof.recording.recorder import FailedRequest, RunIdentity
from memprof.recording.session import Session
from memprof.recording.system.signals import Interrupts, Terminations, delayed_termination, finish_first

if TYPE_CHECKING:
    from memprof.report import Report


class State(Enum):
    """What a :class:`RunRecorder` does: follow the run, record it or a rehearsal before it, or nothing any more."""

    FOLLOWING = "following"
    RECORDING = "recording"
    REHEARSING = "rehearsing"
    ENDED = "ended"


@dataclass(frozen=True)
class Driver:
    """What a trainer's callback, a loop's hooks or an attached worker do when the state of their run changes.

    Attributes:
        unhook: takes back what was hooked into the run.
        session_ends: takes over what a session has, which is about to be stopped.
        ended: closes what follows the run, whether or not it failed.
        report: reports on what was written; False if somebody pressed Ctrl-C and does not wait.
    """

    unhook: Callable[[], object]
    session_ends: Callable[[Session], object] = lambda session: None
    ended: Callable[[bool], object] = lambda failed: None
    report: Callable[[bool], object] = lambda waited_for: None


class RunRecorder:
    """Record a run: follow it, record steps of it, write them, and end once, however the run ends.

    A session runs all along (``ring``), and a recording is what it holds; or each recording has a session of its own.
    The ranks share ``max_disk``. ``driver`` is told what happens; ``reported`` is called with each report that is made
    while the run goes (None: none is made). With ``beside``, which gets the seconds that it took, recordings are
    written in another thread while the run goes on.

    ``session`` is None where none runs; ``first_step`` is that of the recording in progress, None without one; what is
    written now is named after ``step``; ``failed_step`` is the one whose failure is written. ``failed`` is whether an
    exception, a signal or a mistake of memprof's own ended the run.
    """

    def __init__(
        self,
        folder: Path,
        guard: FailureGuard,
        driver: Driver,
        *,
        rank: int = 0,
        world_size: int = 1,
        max_disk: int | None = None,
        ring: bool = False,
        beside: Callable[[float], None] | None = None,
        reported: Callable[[Report], None] | None = None,
        identity: RunIdentity | None = None,
    ) -> None:
        self.writing = Writing(folder, rank, world_size, max_disk, reported, identity or RunIdentity.new())
        self._stage = State.FOLLOWING
        self.failed = False
        self.session: Session | None = None
        self.first_step: int | None = None
        self.step = 0
        self.failed_step: int | None = None
        self._failure: FailedRequest | None = None
        self._guard, self._driver = guard, driver
        self._ring, self._beside = ring, beside
        self.terminations = Terminations(self._terminate)

    @property
    def is_over(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._stage is State.ENDED

    @property
    def state(self) -> State:
        """What it does now; it records if it follows the run and a recording is in progress."""
        is_recording = self._stage is State.FOLLOWING and self.first_step is not None
        return State.RECORDING if is_recording else self._stage

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
            self._halt(session)
        return session

    def _halt(self, session: Session) -> None:
        if session in phases.ACTIVE:
            self._driver.session_ends(session)
        session.stop()

    def enter(self, phase: str, step: int | None = None) -> PhaseInterval | None:
        return None if self.session is None else self.session.enter_phase(phase, step)

    def leave(self, mark: PhaseInterval | None) -> None:
        if mark is not None and self.session is not None:
            self.session.exit_phase(mark)

    # -- states ------------------------------------------------------------------------------------------------

    def record(self, step: int) -> None:
        """Begin a recording of the session that runs, with ``step`` as its first."""
        self.first_step = step

    def rehearse(self) -> None:
        """Rehearse from now on, as step 0."""
        self._stage, self.step = State.REHEARSING, 0

    def rehearsed(self, keep: bool = True) -> None:
        """Follow the run from now on, with what the rehearsal recorded to be written, or without (``keep``)."""
        if self.is_over:
            return  # a failure of memprof's has ended everything meanwhile
        self._stage = State.FOLLOWING
        if not keep:
            self.first_step = None
            if not self._ring:
                self.stop()

    def write_recording(self, last: bool = False) -> None:
        """Write the recording in progress, if there is one; ``last``: nothing is recorded after it."""
        session, first = self.session, self.first_step
        if session is None or (first is None and self._ring):
            return
        if last or not self._ring:
            self._halt(session)
        if self.knows_failure(session):
            first = None  # it is written, and nothing followed it
        # Both are forgotten only now: what a signal's handler of the program's interrupts is written at the end.
        with finish_first():
            if first is not None:
                self.write(session, first, last)
            self.first_step = None
            if not self._ring:
                self.stop()
        if first is not None and not last:
            self.report_newest()

    def write(self, session: Session, step: int, last: bool = False) -> None:
        """Write what a session holds, named after ``step``; if the run goes on, in another thread where that is safe.
        """
        if self._beside is not None and not last:
            self.writing.beside(session, step, self._beside)
        else:
            self.writing.now(session, step)

    def report_newest(self) -> None:
        """Analyse what was just written; the thread that writes beside the run does so itself."""
        if self._beside is None:
            self.writing.report_newest()

    def end(self) -> None:
        """Take back what was hooked, and write the recording in progress; once."""
        if self.is_over:
            return
        self._stage = State.ENDED
        self._guard.forget(self.abandon)
        self._driver.unhook()
        try:
            self.write_recording(last=True)
            self.writing.settle()
        finally:
            self.stop()
            self._driver.ended(self.failed)

    def abandon(self) -> None:
        """End after a mistake of memprof's own; nothing is written."""
        self._stage, self.failed = State.ENDED, True
        self._guard.run_all_cleanups(
            self.terminations.stop, self._driver.unhook, self.stop, lambda: self._driver.ended(True)
        )

    def _terminate(self) -> None:
        """Write before the process ends by SIGTERM. Nothing is unhooked."""
        session, self._stage, self.failed = self.session, State.ENDED, True
        if session is not None and (self._ring or self.first_step is not None):
            self.writing.now(session, self.first_step or self.step)
        self._driver.ended(True)
        self._driver.report(True)

    def end_by(self, error: BaseException) -> None:
        """End by an exception that leaves the run: it is the last chance to write.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed meanwhile, and ``error`` is another exception.
        """
        if self._stage is State.REHEARSING:
            return  # whoever rehearses decides
        self.failed = True
        if self.failed_step == self.step:
            self.first_step = None  # written when it happened, before anything was freed
        elif self.session is not None and self._ring and self.first_step is None:
            self.first_step = self.step
        if self.finish() and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt

    def finish(self) -> bool:
        """End and report; put off a Ctrl-C until what is recorded is written, and tell whether one came."""
        interrupts = Interrupts()
        with delayed_termination():
            try:
                with interrupts:
                    self._guard(self.end)
            finally:
                try:
                    self._driver.report(not interrupts.pending)
                    if lost := sorted(self.writing.unwritten):
                        on_stderr(f"memprof: interrupted while writing; not saved: {', '.join(map(one_line, lost))}")
                finally:
                    self.terminations.stop()
        return interrupts.pending

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

"""Follow one ``train()``: when recordings begin and end, and what they leave."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.integrations.callback.distributed import Gathering
from memprof.integrations.callback.options import Options
from memprof.integrations.callback.peak_records import NewRecords
from memprof.integrations.callback.schedule import Schedule
from memprof.integrations.callback.sessions import cycle_of, introduce, new_session, runs_always, uses_cuda
from memprof.integrations.callback.worst_step import WorstStep, refusal
from memprof.integrations.run_recorder.recorder import RunRecorder
from memprof.integrations.run_recorder.rehearsal import ran_out_of_memory, rehearse
from memprof.integrations.run_recorder.run_folder import claim_folder, moved_sentence
from memprof.integrations.trackers.alerts import Alert
from memprof.integrations.trackers.step_logging import Tracking

from memprof.analysis.ranks.run_folders import RUN_FOLDER
from memprof.compat import missing
from memprof.compat.trl import BUFFERED
from memprof.recording.guard import FailureGuard, MethodPatcher, mark_user_error
from memprof.recording.run_facts import collect_facts
from memprof.recording.session import Session
from memprof.recording.system.host import device_name, device_total
from memprof.recording.system.signals import finish_first
from memprof.recording.trainer_phases import TrainerPhases
from memprof.report.counters import CountersStart
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.report import Report


class Stage(Enum):
    """What a :class:`TrainingRun` does: follow the training, run the worst case before it, or nothing any more."""

    FOLLOWING = "following"
    REHEARSING = "rehearsing"
    ENDED = "ended"


class TrainingRun:
    """Follows one trainer from ``on_train_begin`` to its end, however it ends.

    On CUDA, and where a capacity is enforced, one session runs all along and snapshots are taken from its ring;
    elsewhere each recording is a session of its own, so that nothing is paid between recordings. ``early`` has run
    since the trainer was built. ``on_error`` is told when the training ends by an exception or a signal, after what was
    recorded is written; with False when somebody will not wait for a report.
    """

    def __init__(
        self,
        trainer: Any,
        options: Options,
        early: Session | None,
        guard: FailureGuard,
        on_error: Callable[[bool], None],
    ) -> None:
        rank = int(getattr(trainer.accelerator, "process_index", 0))
        world_size = int(getattr(trainer.accelerator, "num_processes", 1))
        self.gathering = Gathering(rank, world_size)
        folder = options.output_dir or Path(trainer.args.output_dir) / RUN_FOLDER
        self.folder = claim_folder(folder, world_size == 1, lambda own: self.gathering.agree_on("folder", own))
        self._trainer = weakref.ref(trainer)
        self._options = options
        self._guard = guard
        self._on_error = on_error
        self._stage = Stage.FOLLOWING
        #: Whether an exception, a signal or a mistake of memprof's own ended it.
        self.failed = False
        self._schedule = Schedule(options.steps, options.every)
        self._first_step = trainer.state.global_step + 1
        self._from_step: int | None = None  # first step of the recording in progress
        self._records = NewRecords(wanted=options.steps is None and options.every is None)
        self._seams = MethodPatcher(guard, self._error)
        self._tracking: Tracking | None = None
        self._always = runs_always(trainer, options)
        self._on_cuda = uses_cuda(trainer, options)
        self._cannot = missing("rehearse" if options.rehearse else "callback", of=trainer)
        tell = self._reported if options.scalars and options.report and not rank else None
        identity = self.gathering.agree_on_identity()
        self.recorder = RunRecorder(
            self.folder, rank, world_size, options.max_disk, self._terminated, tell, identity
        )
        self.recorder.step = trainer.state.global_step
        self.recorder.say(moved_sentence(folder, self.folder), "stderr")
        try:
            self._phases = TrainerPhases(trainer, self._seams)
            if options.scalars:
                self._tracking = self._track(trainer)
            if early is not None or self._always:
                self._follow_always(trainer, early)
            self.recorder.terminations.start()
        except Exception:
            self._seams.restore()
            raise
        guard.disable_in_forked_children()
        guard.on_failure(self._undo)

    # -- events of the trainer ---------------------------------------------------------------------------------

    def step_begin(self) -> None:
        """Note that an optimizer step begins."""
        trainer = self._trainer()
        if trainer is None or self.over:
            return
        state = trainer.state
        step = state.global_step + 1
        if self._from_step is not None and not self._schedule.goes_on(step):
            self._finish_recording()
        self.recorder.step = step
        if self._schedule.begins(step, self._first_step, state.max_steps, lambda: cycle_of(trainer)):
            if self._from_step is not None:
                self._finish_recording()
            self._begin_recording(trainer, step)
        if self.recorder.session is not None:
            self.recorder.session.set_step(step)

    def step_end(self) -> None:
        """Note that the optimizer has stepped."""
        self._phases.end_step()
        recorder, session = self.recorder, self.recorder.session
        if not self.over:
            recorder.writing.look()
        if self._tracking is not None and not self.over:
            self._tracking.step_end(recorder.step, session, self._from_step is not None)
        if session is None or not self._always:
            return
        peak = session.peak_of_step()
        if self._from_step is not None or recorder.failed_step == recorder.step:
            self._records.recorded(peak)
        elif self._records.is_one(recorder.step, peak):
            self._write(session, recorder.step)
            self._report_newest()

    def rehearse(self, dataloader: Any) -> str | None:
        """One step at the worst case before the first; what it needed, in a sentence (None: it did not take place).

        What would end the run later, out of memory or an interrupt, is written and reported, and then raised.
        """
        trainer = self._trainer()
        if trainer is None or self.over:
            return None
        if (why := refusal(trainer)) is not None:
            warnings.warn(f"memprof cannot rehearse this run: {why}.", stacklevel=4)
            return None
        self._stage, self.recorder.step = Stage.REHEARSING, 0
        try:
            worst = WorstStep(trainer, dataloader, self._phases.end_step)
            self._begin_recording(trainer, 0)
            if (session := self.recorder.session) is None:
                raise RuntimeError("nothing is recorded")
        except Exception as error:
            self._forget_rehearsal(error)
            return None
        try:
            peak = rehearse(session, worst.run, worst.kept)
        except BaseException as error:
            if not isinstance(error, Exception) or ran_out_of_memory(error):
                self._follow_again()
                self._guard(self._error, error)
                mark_user_error(error)
                raise
            self._forget_rehearsal(error)
            return None
        self._follow_again()
        self._records.recorded(peak)
        self._guard(self._finish_recording)
        self.recorder.step = trainer.state.global_step
        return f"memprof: rehearsed {worst.sentence}: peak {format_bytes(peak)}."

    def _forget_rehearsal(self, error: Exception) -> None:
        warnings.warn(f"memprof could not rehearse this run ({error!r}); training goes on.", stacklevel=5)
        self._follow_again()
        self._from_step = None
        if not self._always:
            self._stop_session()

    def _follow_again(self) -> None:
        if self._stage is Stage.REHEARSING:  # a failure of memprof's may have ended everything meanwhile
            self._stage = Stage.FOLLOWING

    def end(self) -> None:
        """Write what is recorded, and put everything back."""
        if self.over:
            return
        self._stage = Stage.ENDED
        self._guard.forget(self._undo)
        self._seams.restore()
        try:
            if self.recorder.session is not None:
                self._finish_recording(last=True)
            self.recorder.writing.settle()
        finally:
            self._stop_session()
            self._phases.forget()
            if self._tracking is not None:
                self._tracking.end(self.failed)

    def _undo(self) -> None:
        """Undo everything after a mistake of memprof's own."""
        self._stage, self.failed = Stage.ENDED, True
        tracking = [] if (followed := self._tracking) is None else [lambda: followed.end(True)]
        stops = (self.recorder.terminations.stop, self._seams.restore, self._phases.forget, self._stop_session)
        self._guard.run_all_cleanups(*stops, *tracking, lambda: self.gathering.tell([]))

    def _error(self, error: BaseException) -> None:
        """Write when an exception leaves the trainer: it is the last chance."""
        if self._stage is Stage.REHEARSING:
            return  # whoever rehearses decides
        self.failed = True
        recorder = self.recorder
        if recorder.failed_step == recorder.step:
            self._from_step = None  # written when it happened, before anything was freed
        elif recorder.session is not None and self._always:
            self._from_step = self._from_step or recorder.step
        if recorder.finish(self.end, self._on_error) and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt

    def _terminated(self) -> None:
        """Write before the process ends by SIGTERM. Nothing is unhooked."""
        session, self._stage, self.failed = self.recorder.session, Stage.ENDED, True
        if session is not None and (self._always or self._from_step is not None):
            self.recorder.writing.now(session, self._from_step or self.recorder.step)
        if self._tracking is not None:
            self._tracking.end(True)
        self._on_error(True)

    @property
    def over(self) -> bool:
        """Whether nothing is recorded any more."""
        return self._stage is Stage.ENDED

    # -- recordings --------------------------------------------------------------------------------------------

    def _follow_always(self, trainer: Any, early: Session | None) -> None:
        session = early or new_session(trainer, self._options, self._guard)
        self._introduce(session, trainer)
        self.recorder.begin(session)
        if early is not None:
            session.look_again()
            self.recorder.leave(session.phases.current)  # loading
        if self._tracking is not None:
            self._tracking.follow(session)
        self._phases.current = session

    def _introduce(self, session: Session, trainer: Any) -> None:
        introduce(session, trainer, self._options)
        session.notes += self._cannot

    def _begin_recording(self, trainer: Any, step: int) -> None:
        if self.recorder.session is None:
            session = new_session(trainer, self._options, self._guard)
            self._introduce(session, trainer)
            self.recorder.begin(session)
            if self.over:
                return
            self._phases.current = session
            session.owners.claim_inputs(BUFFERED.of(trainer), "rollout")
        self._from_step = step

    def _finish_recording(self, last: bool = False) -> None:
        """Write the recording in progress, if there is one; ``last``: nothing is recorded after it."""
        session, first = self.recorder.session, self._from_step
        if session is None or (first is None and self._always):
            return
        if self._tracking is not None:
            self._tracking.collect(session)
        if last or not self._always:
            session.stop()
        # Both are forgotten only now: what a signal's handler of the program's interrupts is written at the end.
        with finish_first():
            if first is not None:
                self._write(session, first, last)
            self._from_step = None
            if not self._always:
                self._stop_session()
        if first is not None and not last:
            self._report_newest()

    def _track(self, trainer: Any) -> Tracking:
        facts = collect_facts(trainer, self._options.redact)
        on_device = uses_cuda(trainer, self._options)
        device, index = trainer.args.device.type, trainer.args.device.index or 0
        total = device_total(device, index)
        about = CountersStart(
            run_id=self.recorder.writing.identity.id,
            started=self.recorder.writing.identity.started,
            model_name=facts.get("model_name"),
            parameters=facts.get("parameters"),
            dtype=facts.get("dtype"),
            device=device_name(device, index),
            device_total_bytes=total,
        )
        share, options = self.recorder.writing.share, self._options
        alert = None
        if options.warn_above is not None:
            whole = options.capacity or total
            alert = Alert(options.warn_above, whole, self.gathering.rank, on_device, options.on_high_memory)
        return Tracking(trainer, self._seams, self.folder, about, on_device, self._before_summary, share, alert)

    def _before_summary(self) -> None:
        """Log before the trainer's closing summary: the last moment at which its trackers listen."""
        if self._from_step is not None:
            self._finish_recording()
        self.recorder.writing.settle()
        self.attach(self.recorder.writing.result.page)

    def attach(self, page: Path | None) -> None:
        """Store the page with the trackers that are active, once."""
        if self._tracking is not None:
            self._tracking.attach(page)

    def _reported(self, report: Report) -> None:
        """Log what a recording says, while the run goes."""
        trainer = self._trainer()
        if self._tracking is not None and trainer is not None:
            self._tracking.reported(trainer, report)

    def _stop_session(self) -> None:
        self._phases.forget()
        self.recorder.stop()

    def _write(self, session: Session, step: int, last: bool = False) -> None:
        """Write a recording; if training goes on, on CUDA in another thread, which CUDA's history does not see."""
        if self._on_cuda and not last:
            self.recorder.writing.beside(session, step, self._records.took)
        else:
            self.recorder.writing.now(session, step)

    def _report_newest(self) -> None:
        """Analyze what was just written; on CUDA the thread that writes it does."""
        if not self._on_cuda:
            self.recorder.writing.report_newest()

    def notes(self) -> list[str]:
        """Say which high peaks are in no recording any more, or never were."""
        return [*self._records.notes(), *self.recorder.writing.notes()]

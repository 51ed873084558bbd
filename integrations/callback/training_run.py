"""Follow one ``train()``: when recordings begin and end, and what they leave."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.integrations.callback.distributed import Gathering
from memprof.integrations.callback.options import Options
from memprof.integrations.callback.peak_records import NewRecords
from memprof.integrations.callback.schedule import RecordingSchedule
from memprof.integrations.callback.sessions import cycle_of, introduce, new_session, runs_always, uses_cuda
from memprof.integrations.callback.worst_step import WorstStep, refusal
from memprof.integrations.run_recorder.recorder import Driver, RunRecorder
from memprof.integrations.run_recorder.rehearsal import ran_out_of_memory, rehearse
from memprof.integrations.run_recorder.run_folder import claim_folder, moved_sentence
from memprof.integrations.trackers.alerts import Alert
from memprof.integrations.trackers.step_logging import StepTracking

from memprof.analysis.ranks.run_folders import RUN_FOLDER
from memprof.compat import missing
from memprof.compat.trl import BUFFERED
from memprof.recording.guard import FailureGuard, MethodPatcher, mark_user_error
from memprof.recording.run_facts import collect_facts
from memprof.recording.session import Session
from memprof.recording.system.host import device_name, device_total
from memprof.recording.trainer_phases import TrainerPhases
from memprof.report.counters import CountersStart
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.report import Report


class TrainingRun:
    """Follows one trainer from ``on_train_begin`` to its end, however it ends.

    On CUDA, and where a capacity is enforced, one session runs all along and snapshots are taken from its ring;
    elsewhere each recording is a session of its own, so that nothing is paid between recordings. ``early`` has run
    since the trainer was built. ``report`` is called when the training has ended, after what was recorded is written;
    with False when somebody will not wait for a report.
    """

    def __init__(
        self,
        trainer: Any,
        options: Options,
        early: Session | None,
        guard: FailureGuard,
        report: Callable[[bool], None],
    ) -> None:
        rank = int(getattr(trainer.accelerator, "process_index", 0))
        world_size = int(getattr(trainer.accelerator, "num_processes", 1))
        self.gathering = Gathering(rank, world_size)
        folder = options.output_dir or Path(trainer.args.output_dir) / RUN_FOLDER
        self.folder = claim_folder(folder, world_size == 1, lambda own: self.gathering.agree_on("folder", own))
        self._trainer = weakref.ref(trainer)
        self._options = options
        self._guard = guard
        self._schedule = RecordingSchedule(options.steps, options.every)
        self._first_step = trainer.state.global_step + 1
        self._records = NewRecords(wanted=options.steps is None and options.every is None)
        self._seams = MethodPatcher(guard, lambda error: self.recorder.end_by(error))
        self._tracking: StepTracking | None = None
        self._always = runs_always(trainer, options)
        self._cannot = missing("rehearse" if options.rehearse else "callback", of=trainer)
        tell = self._reported if options.scalars and options.report and not rank else None
        identity = self.gathering.agree_on_identity()
        driver = Driver(self._seams.restore, self._session_ends, self._ended, report)
        self.recorder = RunRecorder(
            self.folder, guard, driver, rank=rank, world_size=world_size, max_disk=options.max_disk, ring=self._always,
            beside=self._records.took if uses_cuda(trainer, options) else None, reported=tell, identity=identity,
        )  # fmt: skip
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
        guard.on_failure(self.recorder.abandon)

    # -- events of the trainer ---------------------------------------------------------------------------------

    def step_begin(self) -> None:
        """Note that an optimizer step begins."""
        trainer, recorder = self._trainer(), self.recorder
        if trainer is None or recorder.is_over:
            return
        state = trainer.state
        step = state.global_step + 1
        if recorder.first_step is not None and not self._schedule.goes_on(step):
            recorder.write_recording()
        recorder.step = step
        if self._schedule.begins(step, self._first_step, state.max_steps, lambda: cycle_of(trainer)):
            if recorder.first_step is not None:
                recorder.write_recording()
            self._begin_recording(trainer, step)
        if recorder.session is not None:
            recorder.session.set_step(step)

    def step_end(self) -> None:
        """Note that the optimizer has stepped."""
        self._phases.end_step()
        recorder, session = self.recorder, self.recorder.session
        is_recorded = recorder.first_step is not None
        if not recorder.is_over:
            recorder.writing.look()
        if self._tracking is not None and not recorder.is_over:
            self._tracking.step_end(recorder.step, session, is_recorded)
        if session is None or not self._always:
            return
        peak = session.peak_of_step()
        if is_recorded or recorder.failed_step == recorder.step:
            self._records.recorded(peak)
        elif self._records.is_one(recorder.step, peak):
            recorder.write(session, recorder.step)
            recorder.report_newest()

    def rehearse(self, dataloader: Any) -> str | None:
        """One step at the worst case before the first; what it needed, in a sentence (None: it did not take place).

        What would end the run later, out of memory or an interrupt, is written and reported, and then raised.
        """
        trainer, recorder = self._trainer(), self.recorder
        if trainer is None or recorder.is_over:
            return None
        if (why := refusal(trainer)) is not None:
            warnings.warn(f"memprof cannot rehearse this run: {why}.", stacklevel=4)
            return None
        recorder.rehearse()
        try:
            worst = WorstStep(trainer, dataloader, self._phases.end_step)
            self._begin_recording(trainer, 0)
            if (session := recorder.session) is None:
                raise RuntimeError("nothing is recorded")
        except Exception as error:
            self._forget_rehearsal(error)
            return None
        try:
            peak = rehearse(session, worst.run, worst.kept)
        except BaseException as error:
            if not isinstance(error, Exception) or ran_out_of_memory(error):
                recorder.rehearsed()
                self._guard(recorder.end_by, error)
                mark_user_error(error)
                raise
            self._forget_rehearsal(error)
            return None
        recorder.rehearsed()
        self._records.recorded(peak)
        self._guard(recorder.write_recording)
        recorder.step = trainer.state.global_step
        return f"memprof: rehearsed {worst.sentence}: peak {format_bytes(peak)}."

    def _forget_rehearsal(self, error: Exception) -> None:
        warnings.warn(f"memprof could not rehearse this run ({error!r}); training goes on.", stacklevel=5)
        self.recorder.rehearsed(keep=False)

    def _session_ends(self, session: Session) -> None:
        if self._tracking is not None:
            self._tracking.collect(session)
        self._phases.forget()

    def _ended(self, failed: bool) -> None:
        self._phases.forget()
        if self._guard.failure is not None:
            self.gathering.tell([])  # rank 0 waits for nothing
        if self._tracking is not None:
            self._tracking.end(failed)

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
            if self.recorder.is_over:
                return
            self._phases.current = session
            session.owners.claim_inputs(BUFFERED.of(trainer), "rollout")
        self.recorder.record(step)

    def _track(self, trainer: Any) -> StepTracking:
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
        return StepTracking(trainer, self._seams, self.folder, about, on_device, self._before_summary, share, alert)

    def _before_summary(self) -> None:
        """Log before the trainer's closing summary: the last moment at which its trackers listen."""
        if self.recorder.first_step is not None:
            self.recorder.write_recording()
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

    def notes(self) -> list[str]:
        """Say which high peaks are in no recording any more, or never were."""
        return [*self._records.notes(), *self.recorder.writing.notes()]

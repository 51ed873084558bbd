"""Follow one ``train()``: when recordings begin and end, and what they leave."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memprof.integrations.callback.distributed import Gathering
from memprof.integrations.callback.options import Options
from memprof.integrations.callback.output import Result
from memprof.integrations.callback.records import NewRecords
from memprof.integrations.callback.rehearsal import Rehearsal, ran_out_of_memory, refusal
from memprof.integrations.callback.schedule import Schedule
from memprof.integrations.callback.sessions import cycle_of, introduce, new_session, runs_always, uses_cuda
from memprof.integrations.callback.writing import Writing
from memprof.integrations.trackers.tracking import Tracking

from memprof.compat import missing
from memprof.compat.trl import BUFFERED
from memprof.recording.guard import Door, Seams, meant
from memprof.recording.phases import REHEARSAL
from memprof.recording.run_facts import collect_facts
from memprof.recording.session import Session
from memprof.recording.system.host import device_name, device_total
from memprof.recording.system.signals import Interrupts, Terminations
from memprof.recording.trainer_phases import TrainerPhases
from memprof.units import format_bytes
from memprof.vocabulary import Phase

__all__ = ["TrainingRun"]


class TrainingRun:
    """Follows one trainer from ``on_train_begin`` to its end, however it ends.

    On CUDA, and where a capacity is enforced, one session runs all along and snapshots are taken from its ring;
    elsewhere each recording is a session of its own, so that nothing is paid between recordings.

    Args:
        trainer: the trainer.
        options: the user's.
        early: a CUDA session that has run since the trainer was built.
        door: between the trainer and this; when it shuts, everything is undone.
        on_error: told when the training ends by an exception or a signal, after what was recorded is written;
            with False when somebody will not wait for a report.
    """

    def __init__(
        self,
        trainer: Any,
        options: Options,
        early: Session | None,
        door: Door,
        on_error: Callable[[bool], None],
    ) -> None:
        self.folder = options.output_dir or Path(trainer.args.output_dir) / "_memprof"
        self.rank = int(getattr(trainer.accelerator, "process_index", 0))
        world_size = int(getattr(trainer.accelerator, "num_processes", 1))
        self.gathering = Gathering(self.rank, world_size)
        self._trainer = weakref.ref(trainer)
        self._options = options
        self._door = door
        self._on_error = on_error
        self._ended = self._failed = self._failed_by_error = self._rehearsing = False
        self._schedule = Schedule(options.steps, options.every)
        self._first_step = trainer.state.global_step + 1
        self._step = trainer.state.global_step
        self._from_step: int | None = None  # first step of the recording in progress
        self._records = NewRecords(wanted=options.steps is None and options.every is None)
        self._oom_step: int | None = None
        self._session: Session | None = None
        self._seams = Seams(door, self._error)
        self._tracking: Tracking | None = None
        self._always = runs_always(trainer, options)
        self._on_cuda = uses_cuda(trainer, options)
        self._cannot = missing("rehearse" if options.rehearse else "callback", of=trainer)
        self._terminations = Terminations(self._terminated)
        try:
            self._phases = TrainerPhases(trainer, self._seams)
            if options.scalars:
                self._tracking = self._track(trainer)
            reports = self._tracking is not None and options.report and not self.rank
            tell = self._reported if reports else None
            self._writing = Writing(self.folder, self.rank, world_size, options.max_disk, tell)
            if early is not None or self._always:
                self._follow_always(trainer, early)
            self._terminations.start()
        except Exception:
            self._seams.restore()
            raise
        door.when_shut(self._undo)

    # -- events of the trainer ---------------------------------------------------------------------------------

    def step_begin(self) -> None:
        """Note that an optimizer step begins."""
        trainer = self._trainer()
        if trainer is None or self._ended:
            return
        state = trainer.state
        step = state.global_step + 1
        if self._from_step is not None and not self._schedule.goes_on(step):
            self._finish_recording()
        self._step = step
        cycle, micro = cycle_of(trainer)
        if self._schedule.begins(step, self._first_step, state.max_steps, micro, cycle):
            if self._from_step is not None:
                self._finish_recording()
            self._begin_recording(trainer, step)
        if self._session is not None:
            self._session.set_step(step)

    def step_end(self) -> None:
        """Note that the optimizer has stepped."""
        self._phases.end_step()
        session = self._session
        if not self._ended:
            self._writing.look()
        if self._tracking is not None and not self._ended:
            self._tracking.step_end(self._step, session, self._from_step is not None)
        if session is None or not self._always:
            return
        peak = session.peak_of_step()
        if self._from_step is not None or self._oom_step == self._step:
            self._records.recorded(peak)
        elif self._records.is_one(self._step, peak):
            self._write(session, self._step)

    def rehearse(self, dataloader: Any) -> str | None:
        """One step at the worst case before the first; what it needed, in a sentence (None: it did not take place).

        Raises:
            BaseException: what would end the run later: out of memory, an interrupt. It is written and reported first.
        """
        trainer = self._trainer()
        if trainer is None or self._ended:
            return None
        if (why := refusal(trainer)) is not None:
            warnings.warn(f"memprof cannot rehearse this run: {why}.", stacklevel=4)
            return None
        self._rehearsing, self._step = True, 0
        try:
            rehearsal = Rehearsal(trainer, dataloader, self._phases.end_step)
            self._begin_recording(trainer, 0)
        except Exception as error:
            self._forget_rehearsal(error)
            return None
        session = self._session
        mark = None
        if session is not None:
            session.set_step(0)
            mark = session.enter_phase(Phase.OTHER.value, detail=REHEARSAL)
        try:
            rehearsal.run()
        except BaseException as error:
            self._rehearsing = False
            rehearsal.restore()
            if not isinstance(error, Exception) or ran_out_of_memory(error):
                self._door(self._error, error)
                meant(error)
                raise
            self._forget_rehearsal(error)
            return None
        self._rehearsing = False
        peak = 0 if session is None else session.peak_of_step()
        if session is not None and mark is not None:
            session.exit_phase(mark)
            peak = max(peak, session.peak_of_step())
        rehearsal.restore()
        self._records.recorded(peak)
        self._door(self._finish_recording)
        self._step = trainer.state.global_step
        return f"memprof: rehearsed {rehearsal.sentence}: peak {format_bytes(peak)}."

    def _forget_rehearsal(self, error: Exception) -> None:
        warnings.warn(f"memprof could not rehearse this run ({error!r}); training goes on.", stacklevel=5)
        self._rehearsing, self._from_step = False, None
        if not self._always:
            self._stop_session()

    def end(self) -> None:
        """End: write what is recorded and put everything back."""
        if self._ended:
            return
        self._ended = True
        self._door.forget(self._undo)
        self._seams.restore()
        try:
            if self._session is not None:
                self._finish_recording(last=True)
            self._writing.settle()
        finally:
            self._stop_session()
            self._phases.forget()
            if self._tracking is not None:
                self._tracking.end(self._failed_by_error)

    def _undo(self) -> None:
        """Undo everything after a mistake of memprof's own."""
        self._ended = self._failed = True
        tracking = [] if (followed := self._tracking) is None else [lambda: followed.end(True)]
        stops = (self._terminations.stop, self._seams.restore, self._phases.forget, self._stop_session)
        self._door.tidy(*stops, *tracking, lambda: self.gathering.tell([]))

    def _error(self, error: BaseException) -> None:
        """Write when an exception leaves the trainer: it is the last chance."""
        if self._rehearsing:
            return  # whoever rehearses decides
        self._failed_by_error = True
        if self._oom_step == self._step:
            self._from_step = None  # written when it happened, before anything was freed
        elif self._session is not None and self._always:
            self._from_step = self._from_step or self._step
        interrupts = Interrupts()
        with self.finishing():
            try:
                with interrupts:
                    self.end()
            finally:
                self._on_error(not interrupts.pending)
        if interrupts.pending and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Guard writing and reporting at the end: a signal to end waits for it."""
        try:
            with self._terminations.finishing():
                yield
        finally:
            self._terminations.stop()

    def _terminated(self) -> None:
        """Write before the process dies by a signal. Nothing is stopped: this may be another thread than the run's."""
        session, self._ended, self._failed_by_error = self._session, True, True
        if session is not None and (self._always or self._from_step is not None):
            self._writing.now(session, self._from_step or self._step)
        if self._tracking is not None:
            self._tracking.end(True)
        self._on_error(True)

    @property
    def failed(self) -> bool:
        """Tell whether an exception, a signal or a mistake of memprof's own ended it."""
        return self._failed_by_error or self._failed

    @property
    def over(self) -> bool:
        """Tell whether this run has ended."""
        return self._ended

    # -- recordings --------------------------------------------------------------------------------------------

    def _follow_always(self, trainer: Any, early: Session | None) -> None:
        session = early or new_session(trainer, self._options, self._door)
        self._introduce(session, trainer)
        if early is None:
            session.start()
        else:
            session.look_again()
            if (loading := session.phases.current) is not None:
                session.exit_phase(loading)
        session.on_oom(self._out_of_memory)
        if self._tracking is not None:
            self._tracking.follow(session)
        self._session = self._phases.current = session

    def _introduce(self, session: Session, trainer: Any) -> None:
        introduce(session, trainer, self._options)
        session.notes += self._cannot

    def _out_of_memory(self) -> None:
        """Write when the allocator is about to raise, at once (nothing may run afterwards) and once a step."""
        if self._session is None or self._oom_step == self._step:
            return
        self._oom_step = self._step
        door = Door("training", "the recording of the moment at which memory ran out, unless the next attempt succeeds")
        if door(self._write_oom, self._session) is None:
            self._oom_step = None  # tried again when the exception leaves the trainer

    def _write_oom(self, session: Session) -> bool:
        session.look_again()
        self._writing.now(session, self._step)
        return True

    def _begin_recording(self, trainer: Any, step: int) -> None:
        if self._session is None:
            session = new_session(trainer, self._options, self._door)
            self._introduce(session, trainer)
            self._session = session
            session.on_oom(self._out_of_memory)
            session.start()
            if self._ended:
                return
            self._phases.current = session
            session.owners.claim_inputs(BUFFERED.of(trainer), "rollout")
        self._from_step = step

    def _finish_recording(self, last: bool = False) -> None:
        """Write the recording in progress, if there is one; ``last``: nothing is recorded after it."""
        session, first = self._session, self._from_step
        self._from_step = None
        if session is None or (first is None and self._always):
            return
        if self._tracking is not None:
            self._tracking.collect(session)
        if not self._always:
            self._stop_session()
        elif last:
            session.stop()
        if first is not None and last:
            self._writing.now(session, first)
        elif first is not None:
            self._write(session, first)

    def _track(self, trainer: Any) -> Tracking:
        facts = collect_facts(trainer, self._options.redact)
        about = {key: facts.get(key) for key in ("model_name", "parameters", "dtype")}
        on_device = uses_cuda(trainer, self._options)
        device, index = trainer.args.device.type, trainer.args.device.index or 0
        about |= {"device": device_name(device, index), "device_total_bytes": device_total(device, index)}
        return Tracking(trainer, self._seams, self.folder, about, on_device, self._before_summary)

    def _before_summary(self) -> None:
        """Log before the trainer's closing summary: the last moment at which its trackers listen."""
        if self._from_step is not None:
            self._finish_recording()
        self._writing.settle()
        self.attach(self.result.page)

    def attach(self, page: Path | None) -> None:
        """Store the page with the trackers that are active, once."""
        if self._tracking is not None:
            self._tracking.attach(page)

    def _reported(self, report: dict[str, Any]) -> None:
        """Log what a recording says, while the run goes."""
        trainer = self._trainer()
        if self._tracking is not None and trainer is not None:
            self._tracking.reported(trainer, report)

    def _stop_session(self) -> None:
        session, self._session = self._session, None
        self._phases.forget()
        if session is not None:
            session.stop()

    def _write(self, session: Session, step: int) -> None:
        """Write and report while the run goes on: beside it on CUDA, whose history sees nothing of it."""
        if self._on_cuda:
            self._writing.beside(session, step, self._records.took)
        else:
            self._writing.now(session, step)
            self._writing.report_newest()

    # -- what is left ------------------------------------------------------------------------------------------

    @property
    def snapshots(self) -> list[Path]:
        """List what is written and kept, in order."""
        return self._writing.snapshots

    @property
    def result(self) -> Result:
        """Return what was reported while the run went."""
        return self._writing.result

    def not_written(self) -> list[str]:
        """Say which high peaks are in no recording any more, or never were."""
        return [*self._records.notes(), *self._writing.notes()]

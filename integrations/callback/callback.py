"""``MemProfCallback``: put it into a trainer's callbacks, get a page that says where the memory went."""

from __future__ import annotations

import functools
import html
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from memprof.integrations.callback.options import Options
from memprof.integrations.callback.ranks import put_ranks_together
from memprof.integrations.callback.schedule import RecordingSchedule
from memprof.integrations.callback.sessions import load_session, uses_cuda
from memprof.integrations.callback.trainer_lookup import find_trainer
from memprof.integrations.callback.training_run import TrainingRun
from memprof.integrations.run_recorder.output import Result
from memprof.integrations.trackers.alerts import HighMemory
from transformers.trainer_callback import TrainerCallback

from memprof.compat import require
from memprof.recording.api import switched_off
from memprof.recording.guard import FailureGuard, constructor, guarded, mark_user_error
from memprof.recording.session import Session


def _numbers(steps: int | Iterable[int] | None) -> int | tuple[int, ...] | None:
    """Return the steps once they are counted through: what the user's own iterator raises is the user's."""
    try:
        return steps if steps is None or isinstance(steps, int) else tuple(steps)
    except Exception as error:
        mark_user_error(error)
        raise


class MemProfCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Profile a TRL ``GRPOTrainer`` or any ``transformers.Trainer``.

    ::

        trainer = GRPOTrainer(..., callbacks=[MemProfCallback()])

    Writes ``step-000002.rank-0.pickle`` (PyTorch's viewers open it), a ``.json`` beside it and ``report.html`` into
    ``<trainer.args.output_dir>/_memprof/``, and prints one table when training ends, by an exception too. The
    training itself is not changed: losses and parameters stay the same to the bit, and if memprof fails, training
    goes on with one warning. ``MEMPROF=0`` in the environment switches everything off.

    Args:
        output_dir: the folder to write to instead.
        steps: numbers of the optimizer steps to record, from 1. By default one whole generation cycle after the
            first optimizer step; on CUDA, where recording never stops, also later steps whose peak is a new
            record: by more than 2%, then 4%, 8% ..., eight at most, in a twentieth of the time at most. Where
            ``steps`` or ``every`` choose, new records are reported and not written.
        every: record a cycle at every such step instead.
        max_entries: how many of the newest trace entries to keep (default: all; on CUDA one million).
        stacks: ``"python"``, ``"all"`` (C++ frames too; slow to write) or None.
        report: analyse, write JSON and page, print the table. Without it only snapshots are written.
        table: print one short table and the page's path when training ends.
        max_disk: bytes, or a size such as ``"10GB"`` (the default), that one run's folder may take, all its ranks and
            files together; the oldest recordings go first, the newest and the page always stay. None: no limit.
        redact: leave paths of this machine out of what is written.
        kind: ``"cuda"``, ``"trace"`` or ``"auto"``: which recorder.
        reset_peaks: measure per-phase peaks on CUDA by resetting the allocator's peak counters at phase boundaries
            (``torch.cuda.max_memory_allocated`` read by your own code then counts from the latest boundary).
        scalars: log ``memory/...`` in GiB with everything the trainer logs, keep the counters ``memprof watch`` reads,
            and store the page with W&B, MLflow and Trackio where they are active.
        capacity: bytes, or a size such as ``"24GB"``, the device is to have: what needs more ends in
            ``torch.OutOfMemoryError``, so that a smaller device can be tried on a larger one, or on none.
        rehearse: before the first step, run one at the worst case the configuration allows (the longest prompt,
            completions of full length, a full batch), and put everything back: what does not fit fails at once.
        warn_above: warn once when a step has used more than this share (``"90%"``) of the device's memory, or than this
            size (``"20GB"``). Without a GPU, the process's resident memory counts, and the machine's memory.
        on_high_memory: also called then, on each rank for itself, with a ``HighMemory`` (``rank``, ``step``,
            ``used_bytes``, ``limit_bytes``, ``capacity_bytes``), to send a message from.

    Attributes:
        result: what the last ``train()`` left: ``snapshots``, ``reports``, ``page``, ``table``.
        stream: where table and page's path are printed, ``"stdout"`` or ``"stderr"``.

    Raises:
        UsageError: options that cannot be satisfied.
    """

    @constructor("training")
    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        steps: int | Iterable[int] | None = None,
        every: int | None = None,
        max_entries: int | None = None,
        stacks: str | None = "python",
        report: bool = True,
        table: bool = True,
        max_disk: int | str | None = "10GB",
        redact: bool = False,
        kind: str = "auto",
        reset_peaks: bool = True,
        scalars: bool = True,
        capacity: int | str | None = None,
        rehearse: bool = False,
        warn_above: int | str | None = None,
        on_high_memory: Callable[[HighMemory], object] | None = None,
    ) -> None:
        chosen = _numbers(steps)
        RecordingSchedule(chosen, every)  # complains about impossible steps now, not in the middle of a run
        self._print = table
        self._options = Options.of(
            max_disk, output_dir, max_entries, stacks, capacity, warn_above, on_high_memory=on_high_memory,
            steps=chosen, every=every, report=report, redact=redact, kind=kind, reset_peaks=reset_peaks,
            scalars=scalars, rehearse=rehearse,
        )  # fmt: skip

    stream = "stdout"
    result = Result()
    _options: Options | None = None  # what a callback that could not be made is left with, and records nothing
    _print = _over = False
    _run: TrainingRun | None = None
    _state: Any = None
    _early: tuple[weakref.ref[Any], Session] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy has: the options. The recording stays with the original."""
        return {name: value for name, value in vars(self).items() if name in ("_options", "_print", "stream")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.guard, self.result = FailureGuard("training"), Result()

    # -- what transformers calls -------------------------------------------------------------------------------

    @guarded
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the ring inside the trainer's construction: on CUDA the ring starts here, so that loading is in it."""
        if switched_off() or self._options is None:
            return
        trainer = self._found_trainer()
        if trainer is not None and self._early is None and uses_cuda(trainer, self._options):
            self._early = (weakref.ref(trainer), load_session(trainer, self._options, self.guard))

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if switched_off() or self._options is None:
            return
        if self._over:
            self.guard, self._over = FailureGuard("training"), False  # each training has its own
        self.guard(self._begin, self._options, state)
        if self._options.rehearse and (run := self._following(state)) is not None:
            sentence = run.rehearse(kwargs.get("train_dataloader"))
            if sentence is not None and self._print:
                run.recorder.say(sentence, self.stream)

    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._following(state)) is not None:
            self.guard(run.step_begin)

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (run := self._following(state)) is not None:
            self.guard(run.step_end)

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._over = self._state is None or state is self._state
        run = self._following(state)
        if run is not None and run.recorder.finish():
            raise KeyboardInterrupt

    # -- our own -----------------------------------------------------------------------------------------------

    def _begin(self, options: Options, state: Any) -> None:
        trainer = self._found_trainer(state)
        if trainer is None:
            warnings.warn("memprof could not find the trainer it was given to; nothing is recorded.", stacklevel=3)
            return
        if self._run is not None:
            if self._state is not state and not self._run.recorder.is_over:
                warnings.warn("memprof already follows another training; this one is not recorded.", stacklevel=3)
                return
            self._run.recorder.end()
        early = None
        if self._early is not None:
            ref, session = self._early
            self._early = None
            if ref() is trainer:
                early = session
            else:
                session.stop()
        self._run = TrainingRun(trainer, options, early, self.guard, self._finish)
        self._state = state

    def _found_trainer(self, state: Any = None) -> Any:
        """Return the trainer this callback was given to, None if it cannot be found; UsageError where the installed
        packages lack what the callback needs."""
        require("callback")
        return find_trainer(self, state)

    def _following(self, state: Any) -> TrainingRun | None:
        return self._run if self._run is not None and state is self._state else None

    def _finish(self, report: bool = True) -> None:
        """Report after training, however it ended: reports, one table, and what a run out of memory has to say."""
        run, self._run, self._state = self._run, None, None
        if run is None:
            return
        self._over = True
        recorder = run.recorder
        self.result = Result(list(recorder.snapshots))
        wanted = recorder.snapshots and self._options is not None and self._options.report
        if wanted and report:
            together = functools.partial(
                put_ranks_together, folder=run.folder, gathering=run.gathering, failed=recorder.failed
            )
            self.result = recorder.report(self.stream, self._print, self._print, run.notes(), together)
            run.attach(self.result.page)
            return
        if wanted:
            recorder.say_interrupted(self.stream, "interrupted again")
        run.gathering.tell([])

    def _repr_html_(self) -> str:
        """Show in a notebook the peak, its bar and its rows, and a link to the page."""
        if not self.result.snapshots:
            return "<p>memprof: nothing recorded yet.</p>"
        link = self.result.page.as_posix() if self.result.page is not None else ""
        if self.result.highest is not None:
            from memprof.reports.document.build import build_document
            from memprof.reports.notebook import document_fragment

            return document_fragment(build_document(self.result.reports[self.result.highest]), link)
        address = html.escape(link, quote=True)
        return f"<pre>{html.escape(self.result.table)}</pre>" + (f'<a href="{address}">{address}</a>' if link else "")

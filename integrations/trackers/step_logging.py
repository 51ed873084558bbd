"""Log memory beside loss and reward: what every step counts, in the trainer's own logs and in the counters file.

Costs counters only: reads of the allocator's statistics and of ``/proc``, and one short line a step in
``_memprof/counters.rank-N.jsonl``. The values go into the very dict the trainer logs, before any reporter sees it, so
TensorBoard, W&B and the others show them as ``train/memory/...``, in GiB. ``docs/tensorboard.md`` lists the names.

Ranks do not talk to each other for this (a collective more could hang a run): each writes its line when a step ends,
before the trainer gathers the loss, and the main process reads the others' files when it logs.
"""

from __future__ import annotations

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.integrations.trackers.alerts import Alert
from memprof.integrations.trackers.reporters import Reporters
from msgspec.structs import replace

from memprof.analysis.counters import MAX_BYTES, CountersFile, read_counters
from memprof.recording.guard import FailureGuard, MethodPatcher
from memprof.recording.session import Session
from memprof.recording.system.host import host_parts, pinned_bytes, rss_bytes
from memprof.report.counters import CountersStart, RecordedPeak, StepCounters, TrainingEnd
from memprof.units import GIB
from memprof.vocabulary import Category, Group

if TYPE_CHECKING:
    from memprof.foreign import Args, Kwargs
    from memprof.report import Report
    from memprof.vocabulary import Category, Group

# A row's sizes that are highest values: over several steps the highest counts, of the others the newest.
_PEAKS = ("peak_allocated", "peak_reserved")
_STATES = ("allocated", "reserved", "inactive_split", "cached", "non_torch", "host_rss", "host_rss_peak", "host_pinned")
# More ranks than this get their maximum and imbalance only.
_MAX_RANKS = 64
_TAIL = 64 * 2**10
# Seconds between two lines at least, and the share of a training's time that counting may take.
_PAUSE = 0.1
_SHARE = 0.005
# A counters file has at least this many bytes, whatever the bound of the folder: some fifty lines.
_LEAST_BYTES = 2**14


class StepTracking:
    """Follows the steps of one ``train()``, whose trainer's ``log`` is wrapped through ``seams``.

    ``about`` are facts for the counters file's first line. ``on_device``: an allocator counts (CUDA); otherwise only
    the host's figures are known between recordings. ``before_end`` is called when the trainer writes its closing
    summary, while its trackers still listen. ``max_bytes`` is what the rank may write to its folder; the counters take
    an eighth of it at most. ``alert`` gets each line too.

    A line is written at most ten times a second, and as seldom as counting takes 0.5% of the training's time: steps of
    milliseconds share lines, whose peaks are those of all. A step that is recorded or logged always has one.
    """

    def __init__(
        self,
        trainer: Any,
        seams: MethodPatcher,
        folder: Path,
        about: CountersStart,
        on_device: bool,
        before_end: Callable[[], None],
        max_bytes: int | None = None,
        alert: Alert | None = None,
    ) -> None:
        self._alert = alert
        self.reporters = Reporters(trainer)
        self._to_trackers = FailureGuard("training", "memory figures that a tracker was to get")
        self._trainer_state, self._trainer_control = trainer.state, weakref.ref(trainer.control)
        self._due = 0.0  # when the next line is written, on the monotonic clock
        self._on_device = on_device
        self._rank = int(getattr(trainer.accelerator, "process_index", 0))
        self._world = int(getattr(trainer.accelerator, "num_processes", 1))
        self._main = bool(trainer.state.is_world_process_zero)
        self._before_end = before_end
        self._seen: tuple[weakref.ref[Session], int] | None = None  # whose counters, and how many of them
        self._phases: dict[str, int] = {}
        self._since_log: dict[str, int] = {}
        self._phases_since_log: dict[str, int] = {}
        self._logged_step = int(trainer.state.global_step)
        about = replace(about, rank=self._rank, world_size=self._world, max_steps=trainer.state.max_steps)
        self._file = self._opened(folder, about, max_bytes)
        self._folder = folder
        seams.wrap(trainer, "log", self._enter_log)
        self._to_trackers(self.reporters.lay_out, on_device)

    # -- events of the run -------------------------------------------------------------------------------------

    def follow(self, session: Session) -> None:
        """Follow a session that ran before the first step: what it counted so far belongs to no step."""
        self._phases_of(session)
        session.peaks_since_last()

    def collect(self, session: Session | None) -> None:
        """Take over the peaks of phases that ended; asked once more before a session stops."""
        if session is not None:
            for phase, peak in self._phases_of(session).items():
                self._phases[phase] = max(peak, self._phases.get(phase, 0))

    def step_end(self, step: int, session: Session | None, recorded: bool) -> None:
        """Count what the steps since the last line needed, and write the line, if it is time for one."""
        now, control = time.monotonic(), self._trainer_control()
        if not recorded and now < self._due and not (control is not None and control.should_log):
            return
        began = time.thread_time()
        self._count(step, session, recorded)
        self._due = now + max(_PAUSE, (time.thread_time() - began) / _SHARE)

    def _count(self, step: int, session: Session | None, recorded: bool) -> None:
        self.collect(session)
        sizes = {**_host(self._on_device), **self._peaks(session)}
        phases, self._phases = self._phases, {}
        row = StepCounters(step=step, time=round(time.time(), 3), recorded=recorded, phases=phases, **sizes)
        for name in _PEAKS:
            if (peak := row.size(name)) is not None:
                self._since_log[name] = max(peak, self._since_log.get(name, 0))
        self._since_log |= {name: size for name in _STATES if (size := row.size(name)) is not None}
        for phase, peak in phases.items():
            self._phases_since_log[phase] = max(peak, self._phases_since_log.get(phase, 0))
        self._append(row)
        if self._alert is not None:
            self._alert.look(row)

    def reported(self, trainer: Any, report: Report) -> None:
        """Log a recording that has been analysed: its categories and groups, at its peak."""
        peak = report.peak
        categories, groups = _known(peak.categories), _known(peak.groups)
        self._append(
            RecordedPeak(
                step=peak.step,
                phase=peak.phase,
                peak_allocated=peak.allocated_bytes,
                time=round(time.time(), 3),
                categories=categories,
                groups=groups,
            )
        )
        if self._main:
            values = {f"category/{c}": n for c, n in categories.items()}
            values |= {f"group/{g}": n for g, n in groups.items()}
            self._to_trackers(self.reporters.log, trainer, _scalars(values))

    def end(self, error: bool = False) -> None:
        """Write the closing line: training is over."""
        self._append(TrainingEnd(ended=time.time(), step=int(self._trainer_state.global_step), error=error))
        self._file = None

    # -- the trainer's log -------------------------------------------------------------------------------------

    def _enter_log(self, args: Args, kwargs: Kwargs) -> None:
        logs = args[0] if args else kwargs.get("logs")
        if not isinstance(logs, dict):
            return
        if "train_runtime" in logs:
            self._before_end()
        elif "loss" in logs and self._main:
            logs.update(self._values())

    def _values(self) -> dict[str, float]:
        """Return what is logged now: peaks since the log before, states of the last step."""
        values: dict[str, int] = {**self._since_log}
        values |= {f"phase/{phase}": peak for phase, peak in self._phases_since_log.items()}
        self._since_log, self._phases_since_log = {}, {}
        scalars = _scalars(values)
        if self._world > 1:
            scalars |= self._over_ranks(values)
        self._logged_step = int(self._trainer_state.global_step)
        return scalars

    def _over_ranks(self, own: Mapping[str, int]) -> dict[str, float]:
        name = next((n for n in (*_PEAKS[::-1], "host_rss") if n in own), None)
        if name is None:
            return {}
        ranks = {self._rank: own[name], **self._other_ranks(name)}
        highest, mean = max(ranks.values()), sum(ranks.values()) / len(ranks)
        # How far the fullest rank stands above the mean of all: 0 where all are alike.
        found = {f"memory/max/{name}": highest / GIB, f"memory/imbalance/{name}": highest / mean - 1 if mean else 0.0}
        if len(ranks) <= _MAX_RANKS:
            found |= {f"memory/rank_{rank}/{name}": n / GIB for rank, n in sorted(ranks.items())}
        return found

    def _other_ranks(self, name: str) -> dict[int, int]:
        """Return the highest (or newest) of each other rank since the log before, of those whose files are in reach."""
        found = {}
        for rank in range(self._world):
            path = self._folder / f"counters.rank-{rank}.jsonl"
            if rank == self._rank or not path.exists():
                continue
            try:
                steps = read_counters(path, _TAIL).steps
            except Exception:
                continue  # another machine's folder, an older file: that rank is not shown
            sizes = [n for row in steps if row.step > self._logged_step and (n := row.size(name)) is not None]
            if sizes:
                found[rank] = max(sizes) if name in _PEAKS else sizes[-1]
        return found

    # -- counting ----------------------------------------------------------------------------------------------

    def _phases_of(self, session: Session) -> dict[str, int]:
        before = self._seen[1] if self._seen is not None and self._seen[0]() is session else 0
        rows, count = session.counters_after(before)
        self._seen = (weakref.ref(session), count)
        peaks: dict[str, int] = {}
        for row in reversed(rows):
            if row.peaks.allocated_peak is not None:
                peaks[row.phase] = max(row.peaks.allocated_peak, peaks.get(row.phase, 0))
        return peaks

    def _peaks(self, session: Session | None) -> dict[str, int | None]:
        if session is None:
            return {}
        peaks = session.peaks_since_last()
        allocated = max([*self._phases.values(), peaks.allocated_peak if peaks and peaks.allocated_peak else 0])
        found: dict[str, int | None] = {"peak_allocated": allocated or None}
        if self._on_device:
            found |= {"peak_reserved": peaks.reserved_peak if peaks else None, **session.allocator_state()}
            found["non_torch"] = session.non_torch_bytes()
        return found

    # -- never in the way --------------------------------------------------------------------------------------

    def _opened(self, folder: Path, about: CountersStart, max_bytes: int | None) -> CountersFile | None:
        most = MAX_BYTES if max_bytes is None else min(MAX_BYTES, max(_LEAST_BYTES, max_bytes // 8))
        try:
            return CountersFile(folder, about, most)
        except OSError as error:
            warnings.warn(f"memprof cannot write its counters to {folder} ({error}).", stacklevel=2)
            return None

    def _append(self, row: StepCounters | RecordedPeak | TrainingEnd) -> None:
        if self._file is None:
            return
        try:
            self._file.append(row)
        except OSError as error:
            self._file = None
            warnings.warn(f"memprof writes no more counters ({error}); training goes on.", stacklevel=2)

    def attach(self, page: Path | None) -> None:
        """Store the page with the trackers that are active."""
        if page is not None:
            self._to_trackers(self.reporters.attach, page)


def _scalars(sizes: Mapping[str, int]) -> dict[str, float]:
    return {f"memory/{name}": n / GIB for name, n in sizes.items()}


def _known(sizes: Mapping[Category, int] | Mapping[Group, int]) -> dict[str, int]:
    return {str(name): n for name, n in sizes.items() if n}


def _host(on_device: bool) -> dict[str, int | None]:
    pinned = pinned_bytes() if on_device else None
    now = rss_bytes() or None
    peak = max(_rss_peak() or 0, now or 0) or None
    return {"host_rss": now, "host_rss_peak": peak, "host_pinned": pinned, **host_parts()}


def _rss_peak() -> int | None:
    """Return the highest resident bytes of this process so far."""
    try:
        import resource
    except ImportError:
        return None
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(highest) * (1 if sys.platform == "darwin" else 1024)

"""Hold one recording together: a recorder, the phases, the owners and the facts that go into the ``"memprof"`` key."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

from memprof.compat.torch import AFTER_STEP, BEFORE_STEP
from memprof.errors import UsageError
from memprof.foreign import SnapshotFile
from memprof.frame_paths import own_folders
from memprof.recording import phases
from memprof.recording.guard import FailureGuard, as_warning, error_text, guarded, read_foreign
from memprof.recording.kv_caches import CacheWatch
from memprof.recording.owners import OwnershipRegistry
from memprof.recording.phase_peaks import PhasePeaks
from memprof.recording.phases import PhaseInterval, PhaseLog, step_number
from memprof.recording.recorder import (
    AllocationTags,
    DeviceInfo,
    FailedRequest,
    PhaseCount,
    RawSnapshot,
    Recorded,
    Recorder,
    RunIdentity,
    WindowPeaks,
)
from memprof.recording.referrers import find_holders
from memprof.recording.system.engine_sleep import SWITCHES, Residency
from memprof.recording.system.host import host_section, node_name, rss_bytes, versions
from memprof.recording.system.outside_torch import Outside
from memprof.recording.system.sampler import Sampler
from memprof.recording.system.sources import program_sources
from memprof.redact import redact_snapshot
from memprof.vocabulary import Kind, Phase

SCHEMA = "memprof.snapshot/1"
_KEEP = 20_000
_MOST_HELD = 5
_WORTH_ASKING = 1 << 20  # bytes
_MOST_SURVIVED = 100
# Phases that a run may still enter to save what it has, after memory ran out.
_LAST_THINGS = {p.value for p in (Phase.SAVE, Phase.SLEEP, Phase.OTHER)}
_ELSEWHERE = (
    "written on another thread than the one that trains: parameters, gradients and optimizer state are those of the "
    "end of its latest phase"
)
# Where gradients are in place, and where optimizer state is.
_AFTER_GRADIENTS = {Phase.BACKWARD.value, Phase.OPTIMIZER_STEP.value}
# After which sharded parameters may be gathered, or reduced gradients lie in flat buffers.
_WITH_SHARDS = {Phase.FORWARD.value, Phase.BACKWARD.value}


@dataclass(frozen=True)
class _Failure:
    """An allocation that failed, where, and when the run was seen to go on."""

    request: FailedRequest
    phase: str
    step: int | None
    went_on_us: int | None = None

    def to_plain(self) -> dict[str, object]:
        """Return the snapshot's ``oom``, or an entry of ``survived``, which has no stack."""
        found: dict[str, object] = {**self.request.to_plain(), "phase": self.phase, "step": self.step}
        if self.went_on_us is None:
            return found
        return {**{name: value for name, value in found.items() if name != "stack"}, "went_on_us": self.went_on_us}


class Session:
    """Run a recorder, and collect what only memprof knows.

    Nothing in here raises into the run: a failure of memprof closes the guard, which ends the recording. ``config`` are
    flat facts about the run, written as they are; ``setup`` is plain data that it takes to simulate the run again (see
    ``memprof/recording/run_facts.py``); ``redact`` leaves this machine's paths out of what is written; ``identity`` is
    the run's (None: a simulation); by default nobody knows what else belongs to the run.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        config: Mapping[str, Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        guard: FailureGuard | None = None,
        redact: bool = False,
    ) -> None:
        self.recorder = recorder
        self.guard = recorder.guard = FailureGuard() if guard is None else guard
        self.owners = OwnershipRegistry(recorder.now_us, recorder.watches, self.guard)
        self.phases = PhaseLog(recorder.now_us)
        self.caches = CacheWatch(self.owners, getattr(recorder, "on_token", None), self.guard)
        self.config: dict[str, Any] = dict(config or {})
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        self.notes: list[str] = []
        self.seconds = 0.0
        self._redact = redact
        self._created = time.time()
        self.identity: RunIdentity | None = RunIdentity(None, round(self._created, 3))
        self._step: int | None = None
        self.setup: dict[str, Any] = {}
        self._steps: deque[list[int | None]] = deque(maxlen=_KEEP)
        self._batches: deque[list[int | None]] = deque(maxlen=_KEEP)
        self._lengths: deque[list[int | None]] = deque(maxlen=_KEEP)
        self._counters: deque[PhaseCount] = deque(maxlen=_KEEP)
        self._counted = 0
        self._peaks = PhasePeaks(recorder)
        self._between: deque[PhaseCount] = deque(maxlen=_KEEP)  # counters of what lay between phases
        self._between_us = 0
        self._survived: deque[_Failure] = deque(maxlen=_MOST_SURVIVED)
        self._samples: deque[list[int | None]] = deque(maxlen=_KEEP)
        self._holders: list[list[Any]] = []
        self._search_notes: list[str] = []
        self._sources: list[Any] | None = None  # of the first file after the end, too
        self._handles: list[Any] = []
        self._residency = Residency()
        self._outside: Outside | None = None
        self._sampler: Sampler | None = None
        self._host: Mapping[str, object] | None = None  # as it was when the recording ended
        self._started = False
        self._ended: datetime | None = None  # when it was stopped: what happens later changes nothing that is written
        # The thread that trains. Others must not look at gradients: torch changes them without a lock.
        self._thread = threading.get_ident()
        self._looked = True  # whether the newest file says what lived when it was written
        # Several threads may mark phases, and one may write meanwhile; a signal's handler may come in between.
        self._lock = threading.RLock()

    # -- life --------------------------------------------------------------------------------------------------

    def add_model(self, model: Any, role: str) -> None:
        """Claim a model's parameters as ``role``: policy, reference, reward, value or engine."""
        self.owners.add_model(model, role)
        scope = getattr(self.recorder, "scope", None)
        if scope is not None:
            read_foreign(lambda: scope.add_root(model, role), None)  # whose parameters' names say what could be read

    def start(self) -> None:
        """Begin to record. Raise what goes wrong, with everything undone: nothing runs yet."""
        self._started, self._ended, self._host = True, None, None
        self._thread = threading.get_ident()
        self.guard.disable_in_forked_children()
        self.guard.on_failure(self.stop)
        try:
            self.phases.begin()
            self.recorder.start()
            phases.ACTIVE.append(self)
            self.caches.start()
            self._watch_optimizers()
            self._peaks.begin()
            self._between_us = self.recorder.now_us()
            self._guarded(self._look_again)
            self._guarded(self._watch_device)
            self._guarded(self._sample)
        except BaseException:
            self._started = False
            self._unhook()
            raise

    def stop(self) -> None:
        """End the recording; what was hooked is unhooked, whatever happens."""
        if not self._started:
            return
        self._started = False
        self._guarded(self._look_last)
        self._unhook()
        self._ended = datetime.now(timezone.utc)
        self.guard.forget(self.stop)

    def _look_last(self) -> None:
        self._renew()
        for mark in reversed(self.phases.open):
            self._close(mark)
        self._count_between()
        self._sample()
        self._host = self._host_now()

    def _host_now(self) -> Mapping[str, object]:
        return {**host_section(), **({"offloaded": self.owners.elsewhere()} if self._may_look() else {})}

    def _unhook(self) -> None:
        handles, self._handles = self._handles, []
        sampler = [] if self._sampler is None else [self._sampler.stop]
        active = [lambda: phases.ACTIVE.remove(self)] if self in phases.ACTIVE else []
        removes = [handle.remove for handle in handles]
        self.guard.run_all_cleanups(
            *sampler, *active, *removes, self.owners.unhook, self.caches.stop, self.recorder.stop
        )

    def on_oom(self, tell: Callable[[], object]) -> None:
        """Set the function to call at once when an allocation runs out of memory (CUDA only)."""

        def failed() -> None:
            self._thread = threading.get_ident()  # the training waits for it, or is on it
            tell()

        if hasattr(self.recorder, "on_oom"):
            self.recorder.on_oom = failed

    def look_again(self) -> None:
        """Claim the parameters, gradients and optimizer state that are alive now."""
        self._guarded(self._look_again)

    def peak_of_step(self) -> int:
        """Return highest allocated bytes of any phase of the current step."""
        return max((c.peaks.allocated_peak or 0 for c in self._counters if c.step == self._step), default=0)

    def counters_after(self, count: int) -> tuple[list[PhaseCount], int]:
        """Return the counters of all phases but the first ``count``, newest first, and how many phases there are."""
        return list(islice(reversed(self._counters), max(0, self._counted - count))), self._counted

    def peaks_since_last(self) -> WindowPeaks | None:
        """Return the highest bytes since the last call (or the start), in phases and between them; None while a phase
        is open, when the recording is over or has failed."""
        with self._lock:
            if not self._started or self.guard.failure is not None or self.phases.depth:
                return None
            return self._peaks.since_last()

    def allocator_state(self) -> dict[str, int]:
        """Return the allocator's counters now, by name; nothing where there is no allocator to ask."""
        state: Callable[[], dict[str, int]] | None = getattr(self.recorder, "state", None)
        return {} if state is None or not self._started else state()

    def non_torch_bytes(self) -> int | None:
        """Return the process's device bytes beside what torch reserves, at the last sample; None without NVML."""
        if not self._samples or not self._counters:
            return None
        held, reserved = self._samples[-1][2], self._counters[-1].peaks.reserved_end
        return None if held is None or reserved is None else max(0, int(held) - int(reserved))

    # -- phases ------------------------------------------------------------------------------------------------

    @guarded
    def set_step(self, step: int | None) -> None:
        """Set the optimizer step that runs from now on; a value that is no step is a warning, and no step."""
        with self._lock:
            if self._ended is not None:
                return
            self._thread = threading.get_ident()
            if self._started and not self.phases.depth:
                self._guarded(self._count_between)
            step = None if step is None else self._readable(step)
            if step != self._step:
                self._guarded(self._go_on)
            now = self.recorder.now_us()
            if self._steps and self._steps[-1][2] is None:
                self._steps[-1][2] = now
            self._step = step
            if step is not None:
                self._steps.append([step, now, None, None])
            self._tag()

    @staticmethod
    def _readable(step: int) -> int | None:
        try:
            return step_number(step)
        except UsageError as error:
            as_warning(f"memprof: {error} What follows is recorded without a step.")
            return None

    def add_tokens(self, count: int) -> None:
        """Count tokens the current step trains on, padding included: memory follows what is there."""
        if self._steps and self._ended is None:
            self._steps[-1][3] = (self._steps[-1][3] or 0) + count

    def add_batch(self, sequences: int, prompt: int, completion: int) -> None:
        """Note the shape of a micro-batch the current step trains on: tokens a sequence, padding included."""
        if self._ended is None:
            self._batches.append([self._step, sequences, prompt, completion])

    def add_lengths(self, lengths: list[tuple[int, int]]) -> None:
        """Note the tokens of prompt and completion of sequences the current step has generated, without padding."""
        if self._ended is None:
            self._lengths.extend([self._step, prompt, completion] for prompt, completion in lengths)

    @guarded
    def enter_phase(self, name: str, step: int | None = None, detail: str | None = None) -> PhaseInterval | None:
        """Open a phase; None if memprof failed."""
        mark: PhaseInterval | None = self._guarded(self._enter, name, step, detail)
        return mark

    def _enter(self, name: str, step: int | None, detail: str | None) -> PhaseInterval:
        self._thread = threading.get_ident()
        if name not in _LAST_THINGS:
            self._go_on()
        mark = self.phases.enter(name, step if step is not None else self._step, detail)
        self._peaks.enter(mark)
        self._tag()
        return mark

    @guarded
    def exit_phase(self, mark: PhaseInterval) -> None:
        """Close a phase, and look at what it left: gradients, optimizer state, the allocator's peaks."""
        if self._ended is None:
            self._guarded(self._exit, mark)
        else:
            self.guard(self._tag)  # the recording has closed it, and this thread's tag goes

    def _exit(self, mark: PhaseInterval) -> None:
        if mark.phase in _AFTER_GRADIENTS:
            self.owners.claim_gradients()
        if mark.phase in _WITH_SHARDS:
            self.owners.claim_shards(again=True)
        if mark.phase == Phase.OPTIMIZER_STEP.value:
            self.owners.claim_optimizers()
        self._close(mark)
        self._tag()

    def _close(self, mark: PhaseInterval) -> None:
        for closed in self.phases.exit(mark):
            self._count(closed, self._peaks.leave(closed))

    def _count(self, mark: PhaseInterval, peaks: WindowPeaks) -> None:
        end_us = self.recorder.now_us() if mark.end_us is None else mark.end_us
        self._counters.append(PhaseCount(mark.phase, mark.step, mark.start_us, end_us, peaks))
        self._counted += 1
        self._sample()
        if mark.phase in SWITCHES:
            own, used = (self._samples[-1][2], self._samples[-1][4]) if len(self._samples[-1]) > 4 else (None, None)
            state = self.allocator_state() or {"allocated": peaks.allocated_end}
            self._residency.note(end_us, mark.phase, mark.step, state, used, own)

    def _count_between(self) -> None:
        """Count what lay between the phases of a step."""
        now = self.recorder.now_us()
        row = PhaseCount(Phase.OTHER.value, self._step, self._between_us, now, self._peaks.between())
        self._between.append(row)
        self._between_us = now

    def _go_on(self) -> None:
        """Record that the run survived an out-of-memory error, which then does not explain its end."""
        failed = self._failure()
        if failed is not None:
            self._survived.append(replace(failed, went_on_us=self.recorder.now_us()))
            self.recorder.forget_oom()

    def _tag(self) -> None:
        current = self.phases.newest
        phase = current.phase if current else Phase.OTHER.value
        step = current.step if current and current.step is not None else self._step
        role = "reference" if phase == Phase.REFERENCE_LOGPROBS.value else None
        self.recorder.set_tags(AllocationTags(phase, step, role))
        if self.phases.current is None and (untag := getattr(self.recorder, "untag", None)) is not None:
            untag()

    # -- looking -----------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """State once more what lives now: a ring may have lost the time at which it was first said."""
        self._looked = self._may_look()
        if not self._looked:
            return
        if self.recorder.bounded:
            self.owners.renew()
        self._look_again()
        if self.recorder.oom() is None:  # no time for questions when memory has run out
            self._ask_holders()

    def _may_look(self) -> bool:
        return self._thread == threading.get_ident() and not self.phases.is_open_on_another_thread

    def _ask_holders(self) -> None:
        """Find what refers to the largest tensors without an owner."""
        now = self.recorder.now_us()
        found = find_holders(self.owners.owns, self.recorder.watches, _MOST_HELD, _WORTH_ASKING)
        self._holders = [[address, now, *names] for address, names in found.rows]
        self._search_notes = [] if found.note is None else [found.note]

    def _look_again(self) -> None:
        self.owners.claim_shards()  # before their parameters: a flat parameter's views know less
        self.owners.claim_models()
        self.owners.claim_gradients()
        self.owners.claim_optimizers()

    def _watch_optimizers(self) -> None:
        def before(_optimizer: Any, *_: Any) -> None:
            self._timed(self.owners.claim_gradients)

        def after(optimizer: Any, *_: Any) -> None:
            self._timed(self.owners.add_optimizer, optimizer)
            self._timed(self.owners.claim_optimizer, optimizer)

        self._handles += [BEFORE_STEP.get()(self.guard.hook(before)), AFTER_STEP.get()(self.guard.hook(after))]

    def _sample(self) -> None:
        self._samples.append(self._look())

    def _look(self) -> list[int | None]:
        """Return a sample; on CUDA also what the driver says, on whatever thread asks."""
        now = self.recorder.now_us()
        if self._outside is None:
            return [now, rss_bytes(), None, None]
        return self._outside.row(now, self.allocator_state().get("reserved"))

    def _watch_device(self) -> None:
        """Read the driver's figures on CUDA, between phases too."""
        if self.recorder.kind is Kind.CUDA and self._outside is None:
            self._outside = Outside(self.recorder.device().index)
            self._sampler = Sampler(self._look, self._samples.append)
            self._sampler.start()

    def _guarded(self, step: Callable[..., Any], *arguments: Any) -> Any:
        return None if self._ended is not None else self.guard(self._timed, step, *arguments)

    def _timed(self, step: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            started = time.perf_counter()
            try:
                return step(*arguments)
            finally:
                self.seconds += time.perf_counter() - started

    # -- writing -----------------------------------------------------------------------------------------------

    def to_raw(self) -> SnapshotFile:
        """Return the snapshot in torch's format with the ``"memprof"`` key; it shares nothing with the session."""
        with self._lock:
            if self._started:
                self._guarded(self._renew)
            if self._host is None or self._ended is None:
                self._host = self._host_now()
            snapshot, recorded = self.recorder.dump()
            raw: SnapshotFile = dict(snapshot)
            if not self._redact and (self._sources is None or self._ended is None):
                self._sources = program_sources(raw, self._created)
            device = self.recorder.device()
            facts: dict[str, object] = {
                "schema": SCHEMA,
                "kind": self.recorder.kind.value,
                "versions": versions(),
                "device": vars(device),
                "devices": self._device_rows(snapshot, recorded),
                "rank": self.rank,
                "world_size": self.world_size,
                "node": self._node(),
                "created": (self._ended or datetime.now(timezone.utc)).isoformat(timespec="seconds"),
                "config": self.config or None,
                "setup": self._setup(),
                "recorded": recorded.to_plain(),
                "phases": self.phases.to_plain(recorded.earliest_us, recorded.stop_us),
                "steps": [[s, a, recorded.stop_us if b is None else b, tokens] for s, a, b, tokens in self._steps],
                "owners": self.owners.rows(recorded.earliest_us),
                "holders": self._holders,
                "own_folders": own_folders(),
                "sources": self._sources or [],
                "buckets": self.owners.bucket_bytes(),
                "counters": [count.to_plain() for count in self._counters_since(recorded.start_us)],
                "samples": list(self._samples),  # first: the sampler may add to them
                "switches": list(self._residency.rows),
                "outside": None if self._outside is None else self._outside.to_plain(),
                "host": self._host,
                "oom": None if (failure := self._failure()) is None else failure.to_plain(),
                "survived": [failure.to_plain() for failure in self._survived],
                "non_torch_bytes": self._non_torch(),
                "overhead": {"seconds_in_memprof": self.seconds},  # marks, claims and counters, not the recorder's own
                "notes": self._all_notes(),
            }
            if self.identity is not None:
                facts |= {"run_id": self.identity.id, "run_started": self.identity.started}
            raw["memprof"] = _plain(facts)
            if self._redact:
                redact_snapshot(raw)
            return raw

    def _all_notes(self) -> list[str]:
        error = self.guard.failure
        cut = [] if error is None else [f"recording was cut short by an error inside memprof: {error_text(error)}"]
        cut += [] if self._looked else [_ELSEWHERE]
        own = [*self.notes, *self._search_notes, *self._residency.notes]
        return [*cut, *own, *self.recorder.notes, *self.owners.remarks()]

    def _device_rows(self, raw: RawSnapshot, recorded: Recorded) -> list[dict[str, int | str | None]]:
        """Describe every device that the snapshot holds something of, and how complete the others' histories are."""
        histories = {one.index: one for one in recorded.others}
        rows = []
        for device in self._devices(raw, recorded):
            row = dict(vars(device))
            if (one := histories.get(device.index)) is not None:
                row |= {"history": one.history.value, "start_us": one.start_us}
            rows.append(row)
        return rows

    def _devices(self, raw: RawSnapshot, recorded: Recorded) -> list[DeviceInfo]:
        """Return every device that the snapshot holds something of."""
        own, others = self.recorder.device(), getattr(self.recorder, "other_device", None)
        used = {s.get("device", 0) for s in raw.get("segments") or []}
        used |= {index for index, trace in enumerate(raw.get("device_traces") or []) if trace}
        used |= {one.index for one in recorded.others}
        if others is None:
            return [own]
        return [own if index == own.index else others(index) for index in sorted(used | {own.index})]

    def _counters_since(self, start_us: int) -> list[PhaseCount]:
        """Return the counters of the steps that the history touches, phases it has lost included."""
        steps = {step for step, _, end, _ in self._steps if end is None or end >= start_us}
        known = [*self._counters, *self._between, *self._unfinished()]
        return [c for c in known if not self._steps or c.end_us >= start_us or c.step in steps]

    def _unfinished(self) -> list[PhaseCount]:
        """Return the counters so far of what is open."""
        if not self._started or self.guard.failure is not None:
            return []
        now, rows = self.recorder.now_us(), []
        for mark, peaks in self._peaks.open():
            if mark is None:
                rows.append(PhaseCount(Phase.OTHER.value, self._step, self._between_us, now, peaks))
            else:
                rows.append(PhaseCount(mark.phase, mark.step, mark.start_us, now, peaks))
        return rows

    def _setup(self) -> Mapping[str, object] | None:
        if not self.setup:
            return None
        seen = {"batches": list(self._batches), "lengths": list(self._lengths)}
        return {**self.setup, **{name: rows for name, rows in seen.items() if rows}}

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the snapshot; InputError where the file cannot be written."""
        from memprof.snapshot.columns import collector_paused
        from memprof.snapshot.writer import save_snapshot

        target = Path(path)
        with collector_paused():
            save_snapshot(self.to_raw(), target)
        return target

    def _node(self) -> str | None:
        """Return which machine this is, where there may be several."""
        several = self.world_size > 1 and self.recorder.kind is not Kind.SIMULATED
        return node_name(self._redact) if several else None

    def _failure(self) -> _Failure | None:
        found = self.recorder.oom()
        if found is None:
            return None
        mark = self.phases.at(found.time_us)  # by now the exception has closed it
        if mark is None:
            return _Failure(found, Phase.OTHER.value, self._step)
        return _Failure(found, mark.phase, mark.step)

    def _non_torch(self) -> int | None:
        rows = [(c.peaks.reserved_end, c.end_us) for c in self._counters if c.peaks.reserved_end is not None]
        held = [s for s in list(self._samples) if s[2] is not None]
        if not rows or not held:
            return None
        reserved, at = max(rows)
        nearest = min(held, key=lambda s: abs((s[0] or 0) - at))
        return max(0, int(nearest[2] or 0) - int(reserved))


def _plain(value: Any) -> Any:
    """Return a copy in plain data only: what a foreign unpickler may read back."""
    if type(value) in (int, str):  # most are
        return value
    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses (enums, numpy scalars) would need a global to be unpickled.
        for kind in (bool, int, float, str):
            if isinstance(value, kind):
                return kind(value)
        return None
    if isinstance(value, Mapping):
        pairs: list[tuple[Any, Any]] = []
        return {_text(k): _plain(v) for k, v in read_foreign(lambda: list(value.items()), pairs)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items: list[Any] = []
        return [_plain(v) for v in read_foreign(lambda: list(value), items)]
    return _text(value)


def _text(value: object) -> str:
    """Return an object of the program's as text; its class if its ``__str__`` raises."""
    return read_foreign(lambda: str(value), f"<{type(value).__name__}>")

"""Define what a snapshot file says next to its events: memprof's own key and PyTorch's annotations.

``docs/snapshot-format.md`` documents the key. :mod:`memprof.snapshot.validation` reads these classes from a file: a
field or an entry that is not as declared here is dropped with a note. Times are microseconds on the events' clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from memprof.report.base import Positive, Rank, Settings
from memprof.report.simulation import EstimatedTime, ExpectedError, Fit, GenerationNeed, Lengths
from memprof.vocabulary import Category, History, Kind, Phase

#: The value of ``schema`` in the files that this version writes.
SCHEMA = "memprof.snapshot/1"

#: A size in bytes, or a count of events.
Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
#: A point in time, in microseconds.
Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
#: The number of an optimizer step.
Step = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
#: The index of a device.
Index = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
#: An address: unsigned, 64 bits. The columns of a snapshot have the same bits, signed.
Address = Annotated[int, msgspec.Meta(ge=0)]


class RecordPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of a record that is read field by field: a field that is not as declared is dropped alone."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of an entry of a list, a record in the file: it is used as a whole, or dropped."""


class RecordEntry(msgspec.Struct, frozen=True, array_like=True):
    """Base of an entry of a list, a list in the file: it is used as a whole, or dropped."""


class Annotation(Entry, frozen=True, kw_only=True):
    """An entry of PyTorch's ``external_annotations``, made by ``torch.profiler.record_function`` and optimizers.

    Attributes:
        name: such as ``Optimizer.step#AdamW.step``.
        stage: ``START`` or ``END``.
        time_us: when.
        device: index of the device; -1 or ``None`` for all.
    """

    name: str
    stage: str = ""
    time_us: Time
    device: Index | None = None


class RecordedDevice(RecordPart, frozen=True, kw_only=True):
    """A device.

    Attributes:
        index: its index; ``None`` if only one device was recorded.
        type: ``cuda``, ``cpu`` or another type of torch's.
        name: its name.
        total_bytes: its memory; a CPU's is the machine's.
        history: how much of the history the file has of it; ``None`` if as ``recorded`` says.
        start_us: when recording it began.
    """

    index: Index | None = None
    type: str | None = None
    name: str | None = None
    total_bytes: Size | None = None
    history: History | None = None
    start_us: Time | None = None


class RecordedHistory(RecordPart, frozen=True, kw_only=True):
    """What the recorder knows about the history.

    Attributes:
        start_us: when recording began.
        stop_us: when it ended.
        history: how much of the history the file has.
        dropped_events: number of events that the ring buffer overwrote.
        max_entries: size of the ring buffer.
        thinned: intervals whose events were not recorded: in steady decoding, or left out by the program.
    """

    start_us: Time | None = None
    stop_us: Time | None = None
    history: History | None = None
    dropped_events: Size | None = None
    max_entries: Size | None = None
    thinned: tuple[Interval, ...] = ()


class Interval(RecordEntry, frozen=True):
    """A stretch of time, its ends included."""

    start_us: Time
    end_us: Time


class PhaseMark(Entry, frozen=True, kw_only=True):
    """A stretch of one phase. Marks may be nested: of those that contain an instant, the latest to start applies.

    Attributes:
        phase: the phase.
        start_us: when it began.
        end_us: when it ended; ``None`` if the recording ended first.
        step: optimizer step.
        within: ``evaluate`` or ``rehearsal`` if nested in one.
        detail: more about it.
    """

    phase: Phase
    start_us: Time
    end_us: Time | None = None
    step: Step | None = None
    within: str | None = None
    detail: str | None = None


class StepMark(RecordEntry, frozen=True):
    """An optimizer step, and the ``tokens`` it trained on, padding included."""

    step: Step
    start_us: Time
    end_us: Time
    tokens: Size | None = None


class Owner(RecordEntry, frozen=True):
    """What the allocation is for that was alive at ``time_us`` and contains ``address``.

    Attributes:
        address: an address in the allocation.
        time_us: when it was alive.
        category: what it is for, for its whole life.
        detail: part of the category.
        name: of the tensor.
    """

    address: Address
    time_us: Time
    category: Category
    detail: str | None = None
    name: str | None = None


class Holder(RecordEntry, frozen=True):
    """What referred to an allocation without an owner when the recording ended.

    Attributes:
        address: of the allocation.
        time_us: when it was alive.
        names: such as ``MyCallback.history[3]``. In the file they follow the time, without a list of their own.
    """

    address: Address
    time_us: Time
    names: tuple[str, ...] = ()


class OwnFolder(RecordEntry, frozen=True):
    """A ``folder`` that memprof ran from, and the ``name`` it is imported as."""

    folder: str
    name: str


class SourceFile(Entry, frozen=True, kw_only=True):
    """The text of one of the program's own files that stacks name.

    Attributes:
        path: its path, as in the stacks.
        text: its text, from the beginning.
        cut: whether the file goes on.
        edited: whether the file changed after recording began, so that it may not be what ran.
    """

    path: str
    text: str
    cut: bool = False
    edited: bool = False


class PhaseCounters(Entry, frozen=True, kw_only=True):
    """The allocator's counters over one stretch of a phase, without the phases nested in it; ``None`` if unknown.

    Attributes:
        phase: the phase; ``other`` for what lies between the phases of a step.
        step: optimizer step.
        start_us: when it began.
        end_us: when it ended.
        allocated_peak: highest allocated memory.
        reserved_peak: highest reserved memory.
        active_peak: highest active memory.
        requested_peak: highest sum of requested bytes.
        allocated_end: allocated memory at its end.
        reserved_end: reserved memory at its end.
    """

    phase: Phase
    step: Step | None = None
    start_us: Time
    end_us: Time
    allocated_peak: Size | None = None
    reserved_peak: Size | None = None
    active_peak: Size | None = None
    requested_peak: Size | None = None
    allocated_end: Size | None = None
    reserved_end: Size | None = None


class MemorySample(RecordEntry, frozen=True):
    """Memory at one time; ``None`` if unknown.

    Attributes:
        time_us: when.
        rss_bytes: resident memory of the process.
        process_bytes: device memory of the process, as NVML reports.
        pinned_bytes: pinned host memory.
        device_used_bytes: device memory of all processes.
        others_bytes: device memory of the other processes.
        reserved_bytes: memory reserved by PyTorch.
    """

    time_us: Time
    rss_bytes: Size | None = None
    process_bytes: Size | None = None
    pinned_bytes: Size | None = None
    device_used_bytes: Size | None = None
    others_bytes: Size | None = None
    reserved_bytes: Size | None = None


class EngineSwitch(RecordEntry, frozen=True):
    """The memory after a switch between rollout and training; ``None`` if unknown.

    Attributes:
        time_us: when.
        phase: what happened.
        step: optimizer step.
        allocated_bytes: allocated memory.
        reserved_bytes: reserved memory.
        unmapped_bytes: pages that an engine released and PyTorch still counts.
        device_used_bytes: device memory of all processes.
    """

    time_us: Time
    phase: Literal["sleep", "wake", "weight_sync"]
    step: Step | None
    allocated_bytes: Size | None
    reserved_bytes: Size | None
    unmapped_bytes: Size | None
    device_used_bytes: Size | None


class ProcessMemory(RecordEntry, frozen=True):
    """A process on the device, and its memory, ``None`` if the driver does not report it."""

    pid: Index
    bytes: Size | None


class OutsideTorch(RecordPart, frozen=True, kw_only=True):
    """Device memory as the driver (NVML) reported it at the device peak; ``None`` if unknown.

    Attributes:
        reason: why figures are missing.
        mig: whether the figures are of a MIG slice.
        capacity_bytes: memory of the device.
        used_bytes: memory that all processes used.
        own_bytes: memory that this process used.
        others_bytes: memory that the other processes used.
        first_own_bytes: memory that this process used when recording began.
        first_reserved_bytes: memory that PyTorch had reserved then.
        processes: all processes on the device.
        this_process: the process that was recorded.
        process_groups: number of NCCL groups.
        allocators: libraries that allocate without PyTorch.
    """

    reason: str | None = None
    mig: bool | None = None
    capacity_bytes: Size | None = None
    used_bytes: Size | None = None
    own_bytes: Size | None = None
    others_bytes: Size | None = None
    first_own_bytes: Size | None = None
    first_reserved_bytes: Size | None = None
    processes: tuple[ProcessMemory, ...] = ()
    this_process: Index | None = None
    process_groups: Size = 0
    allocators: tuple[str, ...] = ()


class HostMemory(RecordPart, frozen=True, kw_only=True):
    """The memory of the process on the host.

    Attributes:
        pinned_bytes: pinned memory, rounded up to powers of two.
        pinned_requested_bytes: pinned memory that was requested.
        managed_bytes: managed memory (paged optimizer state).
        rss_bytes: resident memory.
        offloaded: bytes of parameters, gradients and optimizer state on another device, by category.
    """

    pinned_bytes: Size | msgspec.UnsetType | None = msgspec.UNSET
    pinned_requested_bytes: Size | msgspec.UnsetType | None = msgspec.UNSET
    managed_bytes: Size | msgspec.UnsetType | None = msgspec.UNSET
    rss_bytes: Size | msgspec.UnsetType | None = msgspec.UNSET
    offloaded: Mapping[Category, Size] | None = None


class FailedAllocation(RecordPart, frozen=True, kw_only=True):
    """The allocation that failed and ended the run.

    Attributes:
        requested_bytes: size of the request.
        device_free_bytes: free memory of the device, if known.
        limit_bytes: what the process may reserve; ``None`` if it may reserve the whole device, ``UNSET`` if unknown.
        time_us: when, if the history has no event of it.
        device: index of the device.
        step: optimizer step.
        phase: phase.
        stack: of the request, innermost first.
    """

    requested_bytes: Size
    device_free_bytes: Size | None = None
    limit_bytes: Size | msgspec.UnsetType | None = msgspec.UNSET
    time_us: Time | msgspec.UnsetType | None = msgspec.UNSET
    device: Index | None = None
    step: Step | None = None
    phase: Phase | None = None
    stack: tuple[str, ...] = ()


class SurvivedFailure(Entry, frozen=True, kw_only=True):
    """An allocation that failed in a run that caught the error.

    Attributes:
        requested_bytes: size of the request.
        time_us: when it failed.
        went_on_us: when the run was seen to go on.
        device: index of the device.
        step: optimizer step.
        phase: phase.
    """

    requested_bytes: Size
    time_us: Time
    went_on_us: Time
    device: Index | None = None
    step: Step | None = None
    phase: str | None = None


class Overhead(RecordPart, frozen=True, kw_only=True):
    """What recording cost.

    Attributes:
        seconds_in_memprof: time spent in memprof.
        bytes_of_history: size of the history in memory.
    """

    seconds_in_memprof: float | None = None
    bytes_of_history: Size | None = None


class RecordedRun(RecordPart, frozen=True, kw_only=True):
    """The ``"memprof"`` key of a snapshot: what the recorder, or the simulator, knows about the run.

    Attributes:
        schema: the version of this key.
        kind: ``cuda``, ``trace`` (CPU recording, tensor-level) or ``simulated``.
        versions: of memprof, Python, torch and libraries.
        device: the device that the driver's figures and the counters are about.
        devices: all devices in the file.
        rank: number of the process.
        world_size: number of processes.
        node: name of the machine.
        run_id: the same in all files of a run.
        run_started: when the run began, in Unix seconds.
        created: when the recording ended; of a file written before that, when it was written.
        config: settings of the run and facts about its model.
        setup: what a simulation of the run needs.
        recorded: what the recorder knows about the history.
        phases: stretches of phases.
        steps: optimizer steps.
        owners: what allocations are for, known by tensor identity.
        holders: what referred to the largest allocations without an owner.
        own_folders: where memprof ran from.
        sources: the program's own files that stacks name, at most 256 KiB of each and 2 MiB in all.
        redacted: whether paths, names and secrets were removed.
        buckets: sizes of gradient buckets of DistributedDataParallel that are not views of gradients, in bytes.
        counters: the allocator's counters of each phase.
        samples: memory of the process over time.
        switches: switches between rollout and training.
        outside: device memory that PyTorch did not allocate.
        host: memory on the host.
        oom: the allocation that failed and ended the run.
        survived: allocations that failed in a run that went on.
        non_torch_bytes: device memory of the process beyond what PyTorch reserved, at the device peak.
        overhead: what recording cost.
        notes: what the recorder could not record, in sentences.
        expected_error: of a simulated run.
        estimated_time: of a simulated run on a known GPU model.
        fit: whether a simulated run fits on a GPU.
        generation: memory at the peak of a simulated generation.
        lengths: memory of a simulated run over a distribution of completion lengths.
    """

    schema: str | None = None
    kind: Kind = Kind.CUDA
    versions: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    device: RecordedDevice | None = None
    devices: tuple[RecordedDevice, ...] = ()
    rank: Rank = 0
    world_size: Rank = 1
    node: str | None = None
    run_id: str | None = None
    run_started: Positive | None = None
    created: str | None = None
    config: Settings | None = None
    setup: Settings | None = None
    recorded: RecordedHistory = RecordedHistory()
    phases: tuple[PhaseMark, ...] = ()
    steps: tuple[StepMark, ...] = ()
    owners: tuple[Owner, ...] = ()
    holders: tuple[Holder, ...] = ()
    own_folders: tuple[OwnFolder, ...] = ()
    sources: tuple[SourceFile, ...] = ()
    redacted: bool = False
    buckets: tuple[Size, ...] = ()
    counters: tuple[PhaseCounters, ...] = ()
    samples: tuple[MemorySample, ...] = ()
    switches: tuple[EngineSwitch, ...] = ()
    outside: OutsideTorch | None = None
    host: HostMemory | None = None
    oom: FailedAllocation | None = None
    survived: tuple[SurvivedFailure, ...] = ()
    non_torch_bytes: Size | None = None
    overhead: Overhead | None = None
    notes: tuple[str, ...] = ()
    expected_error: ExpectedError | None = None
    estimated_time: EstimatedTime | None = None
    fit: Fit | None = None
    generation: GenerationNeed | None = None
    lengths: Lengths | None = None

"""Describe a run around its peaks: its source, the host, non-PyTorch memory, growth, and an out-of-memory error."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import msgspec

from memprof.report.base import ByCategory, Bytes, Count, Model, Positive, Rank, Settings, Stack, written
from memprof.units import format_bytes
from memprof.vocabulary import CATEGORY_LABELS, Category, History, Kind, Phase


class Source(Model, frozen=True, kw_only=True):
    """Where the figures come from.

    Attributes:
        files: paths as given on the command line.
        kind: ``cuda`` (recorded by the caching allocator), ``trace`` (CPU recording, tensor-level) or ``simulated``.
        device: index of the device that the report is about.
        device_name: its name, if recorded.
        device_total_bytes: its memory, if recorded.
        torch: torch's version, or what the file's format implies (``">=2.10"``).
        versions: of memprof, Python, torch and libraries.
        events: number of trace events read.
        dropped_events: number of events known to be lost.
        history: how much of the allocation history the file has.
        timed: ``false`` if times count events.
        phases_known_by: ``marks`` (recorded), ``stacks`` (inferred) or ``none``.
        devices: indices of all devices in the file.
        rank: number of the process.
        world_size: number of processes.
        node: name of the machine.
        run_id: the same in all files of a run. ``None`` for ``memprof.record``, and if the run's
            processes could not agree on one.
        run_started: when the run began, in Unix seconds.
        config: flat settings of the run, or ``None``.
        setup: what a simulation of the run needs, or ``None``
            ([as recorded](snapshot-format.md#the-memprof-key-schema-memprofsnapshot1)).
        alloc_conf: the allocator's settings from the environment, or ``None``.
        file_bytes: size of the snapshot's file.
    """

    files: tuple[str, ...]
    kind: Kind
    device: int
    device_name: str | None = written(None)
    device_total_bytes: Bytes | None
    torch: str
    versions: Mapping[str, str | None] = written({})
    events: Count
    dropped_events: Count | None = written(0)
    history: History
    timed: bool = written(True)
    phases_known_by: str = written("none")
    devices: tuple[int, ...] = written(())
    rank: Rank | None
    world_size: Rank | None
    node: str | None = written(None)
    run_id: str | None = None
    run_started: Positive | None = None
    config: Settings | None
    setup: Settings | None = written(None)
    alloc_conf: str | None = written(None)
    file_bytes: Bytes | None = None

    @property
    def run_order(self) -> tuple[bool, float]:
        """What the newest of several runs has the most of: files without an id come before all others."""
        return self.run_id is not None, self.run_started or 0.0

    def is_of_run(self, other: Source) -> bool:
        """Return whether another report may be of the same run: their ids are equal, or one of them is not known."""
        return self.run_id is None or other.run_id is None or self.run_id == other.run_id


class Capacity(Model, frozen=True, kw_only=True):
    """The memory of the device.

    Attributes:
        bytes: its size.
        source: where it is known from: ``device`` (recorded), ``machine`` (a CPU's memory), ``option``
            (``--capacity``), ``limit`` (what the process may reserve) or ``oom`` (at least what was reserved and free
            when memory ran out). ``from`` in JSON.
    """

    bytes: Bytes
    source: Literal["device", "machine", "option", "limit", "oom"] = msgspec.field(name="from")


class HostGrowth(Model, frozen=True, kw_only=True):
    """Growth of host memory over the steps of a run.

    Attributes:
        steps: number of steps.
        bytes: growth over them.
        parts: bytes of each part that grew: ``children`` (dataloader workers), ``shared`` (``/dev/shm``), ``files``
            (mapped), ``pinned`` (torch's cache), ``arenas`` (what malloc caches), ``anon`` (private memory in use).
        sentence: the same in words.
    """

    steps: Count
    bytes: Bytes
    parts: Mapping[str, Bytes]
    sentence: str


class Host(Model, frozen=True, kw_only=True):
    """The process's memory on the host.

    Attributes:
        pinned_bytes: pinned memory, rounded up to powers of two.
        pinned_requested_bytes: pinned memory that was requested.
        managed_bytes: managed memory (paged optimizer state).
        rss_bytes: resident memory; for a simulation 3 GiB for the process plus the other two.
        offloaded: bytes of parameters, gradients and optimizer state on another device, by category.
        growth: growth over the steps of the run, if it grows.
    """

    pinned_bytes: Bytes | None = written(None)
    pinned_requested_bytes: Bytes | None = written(None)
    managed_bytes: Bytes | None = written(None)
    rss_bytes: Bytes | None = written(None)
    offloaded: ByCategory | None = None
    growth: HostGrowth | None = None


class OtherProcess(Model, frozen=True, kw_only=True):
    """Another process on the device: its ``pid`` and ``bytes``, ``None`` if the driver does not report them."""

    pid: int
    bytes: Bytes | None


class NonTorchMemory(Model, frozen=True, kw_only=True):
    """``outside``: device memory that torch did not allocate, as NVML reported it at the device peak.

    Attributes:
        reason: why figures are missing, or ``None``.
        mig: whether the figures are a MIG slice's.
        capacity_bytes: memory of the device.
        highest_used_bytes: the most that all processes used.
        own_bytes: this process's share of it.
        others_bytes: the other processes' share.
        unnamed_bytes: used, but reported for no process.
        at_start_bytes: non-PyTorch memory of this process when recording began.
        highest_bytes: the most it reached.
        grown_bytes: how much it grew.
        estimated_bytes: a CUDA context for each process whose share is not reported, or ``None``.
        process_groups: number of NCCL groups.
        group_at_most_bytes: ``grown_bytes`` divided by the number of groups.
        allocators: libraries that allocate without torch.
        processes: the other processes, largest first.
    """

    reason: str | None
    mig: bool | None
    capacity_bytes: Bytes | None
    highest_used_bytes: Bytes | None
    own_bytes: Bytes | None
    others_bytes: Bytes | None
    unnamed_bytes: Bytes | None
    at_start_bytes: Bytes | None
    highest_bytes: Bytes | None
    grown_bytes: Bytes | None
    estimated_bytes: Bytes | None = written(None)
    process_groups: Count
    group_at_most_bytes: Bytes | None = written(None)
    allocators: tuple[str, ...]
    processes: tuple[OtherProcess, ...]


class Switch(Model, frozen=True, kw_only=True):
    """One entry of ``switches``: a switch between rollout and training, with the figures after it.

    Attributes:
        time_us: when.
        phase: ``sleep``, ``wake`` or ``weight_sync``.
        step: optimizer step.
        allocated_bytes: allocated memory, as torch counts.
        reserved_bytes: reserved memory, as torch counts.
        unmapped_bytes: pages that an engine released and torch still counts.
        resident_bytes: reserved memory without these.
        device_used_bytes: used by all processes, as the driver reports.
    """

    time_us: int
    phase: Phase
    step: int | None
    allocated_bytes: Bytes | None
    reserved_bytes: Bytes | None
    unmapped_bytes: Bytes
    resident_bytes: Bytes | None
    device_used_bytes: Bytes | None


class StillAhead(Model, frozen=True, kw_only=True):
    """``oom.ahead``: what the run still had to allocate when memory ran out.

    Attributes:
        still: bytes still to be allocated, by category.
        moment: the phase that needs most.
        needed_bytes: allocated memory in it, at least.
        available_bytes: what torch could have had: allocated, idle and free memory.
        short_bytes: what is missing for the whole step.
    """

    still: ByCategory
    moment: Phase | None
    needed_bytes: Bytes
    available_bytes: Bytes | None
    short_bytes: Bytes | None

    @property
    def words(self) -> str:
        """Return what the step had still to allocate, next to what it keeps, and how much that is in all."""
        parts = " and ".join(f"{format_bytes(n)} of {CATEGORY_LABELS[c].lower()}" for c, n in self.still.items())
        kept = self.needed_bytes - sum(self.still.values())
        short = f", {format_bytes(self.short_bytes)} more than there was" if self.short_bytes else ""
        needed = format_bytes(self.needed_bytes)
        if self.moment in (Phase.FORWARD, Phase.BACKWARD) or kept <= 0:
            return f"had still to allocate {parts}; the request that failed brings it to {needed} before{short}"
        return f"had still to allocate {parts} in addition to {format_bytes(kept)}: {needed} in total{short}"


class OutOfMemory(Model, frozen=True, kw_only=True):
    """The allocation that failed. It is ``None`` also if the run caught the error and went on; ``notes`` name it then.

    Attributes:
        requested_bytes: size of the request.
        device_free_bytes: free memory of the device, if known.
        limit_bytes: what the process may reserve.
        limited: whether that limit refused the request.
        reserved_bytes: reserved memory then.
        fits_defragmented: whether the request would fit if all free memory were contiguous.
        phase: phase.
        step: optimizer step.
        stack: of the request.
        time_us: when.
        allocated_bytes: allocated memory then.
        categories: bytes of each category then, zeros left out.
        cached_bytes: free segments then.
        inactive_split_bytes: free parts of used segments then.
        private_pool_bytes: free bytes in private pools then.
        segment_bytes: size of the segment that the allocator requests from the device.
        ahead: what the run still had to allocate, or ``None``.
    """

    requested_bytes: Bytes
    device_free_bytes: Bytes | None
    limit_bytes: Bytes | msgspec.UnsetType | None = msgspec.UNSET
    limited: bool | None = None
    reserved_bytes: Bytes | msgspec.UnsetType | None = msgspec.UNSET
    fits_defragmented: bool | None = None
    phase: Phase | None
    step: int | None
    stack: Stack
    time_us: int | msgspec.UnsetType | None = msgspec.UNSET
    allocated_bytes: Bytes | None = None
    categories: ByCategory | None = None
    cached_bytes: Bytes | None = None
    inactive_split_bytes: Bytes | None = None
    private_pool_bytes: Bytes | None = None
    segment_bytes: Bytes | None = None
    ahead: StillAhead | msgspec.UnsetType | None = msgspec.UNSET


class StepMemory(Model, frozen=True, kw_only=True):
    """Memory of one optimizer step.

    Attributes:
        step: its number.
        peak_bytes: its highest allocated memory.
        end_bytes: allocated memory when it ends.
        tokens: tokens that it trained on, padding included, if known.
    """

    step: int
    peak_bytes: Bytes
    end_bytes: Bytes
    tokens: int | None


class LeftBehind(Model, frozen=True, kw_only=True):
    """Memory that one stack allocated in several steps and that was never freed.

    Attributes:
        bytes: in total.
        bytes_per_step: on average.
        steps: number of steps that left some.
        category: of the largest allocation.
        held_by: what referred to it when the recording ended.
        stack: of the allocations.
    """

    bytes: Bytes
    bytes_per_step: float
    steps: int
    category: Category
    held_by: tuple[str, ...] = written(())
    stack: Stack


class StepGrowth(Model, frozen=True, kw_only=True):
    """``growth``: memory from optimizer step to optimizer step.

    Attributes:
        steps: each step.
        end_bytes_per_step: slope of ``end_bytes``; ``None`` below three steps.
        peak_bytes_per_token: slope of the peaks over tokens, if known.
        explained_by_tokens: the share of the peaks' variance that tokens explain (R²), if known.
        left_behind: stacks that left memory behind in several steps.
    """

    steps: tuple[StepMemory, ...]
    end_bytes_per_step: float | None
    peak_bytes_per_token: float | None
    explained_by_tokens: float | None
    left_behind: tuple[LeftBehind, ...]


class KnownSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a report, a snapshot or a program's own ``config`` may have; each is ``None`` or empty if not.

    The fields are named as those of :class:`memprof.config.settings.Settings`.

    Attributes:
        names: names of the settings that are known.
    """

    names: frozenset[str] = frozenset()
    adapter_options: Mapping[str, object] = {}
    assumed: tuple[str, ...] = ()
    attn: str | None = None
    beta: int | float | None = None
    cache_dtype: str | None = None
    cache_implementation: str | None = None
    completion_length: int | None = None
    device: str | None = None
    dtype: str | None = None
    generation: str | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gradient_checkpointing: bool | str | None = None
    host_memory: str | None = None
    left_out: tuple[str, ...] = ()
    load_in_4bit: bool | None = None
    lora_r: int | None = None
    loss_type: str | None = None
    mixed_precision: str | None = None
    model: str | None = None
    modules_to_save: tuple[str, ...] = ()
    num_generations: int | None = None
    optim: str | None = None
    padding: str | None = None
    peft_type: str | None = None
    per_device_train_batch_size: int | None = None
    prompt_length: int | None = None
    recipe: str | None = None
    reward_model: str | None = None
    sharding: str | None = None
    trainer: str | None = None
    trainer_options: Mapping[str, object] = {}
    use_dora: bool | None = None
    vllm_enable_sleep_mode: bool | None = None

    @classmethod
    def of(cls, plain: Mapping[str, object] | None) -> KnownSettings:
        """Read plain data, without the settings whose value is of another type."""
        found: dict[str, object] = {}
        for field in msgspec.structs.fields(cls):
            if plain and plain.get(field.name) is not None and field.name != "names":
                with suppress(msgspec.ValidationError):
                    found[field.name] = msgspec.convert(plain[field.name], field.type)
        known = [name for name in plain or () if name in found or (plain and plain[name] is None)]
        return msgspec.convert({**found, "names": known}, cls)

    @property
    def trainer_kind(self) -> str:
        """Return the trainer, TRL's GRPO if none is known."""
        return self.trainer or "grpo"

    def value(self, name: str) -> str | int | float | bool | None:
        """Return a setting that is a single value."""
        found: str | int | float | bool | None = getattr(self, name, None)
        return found

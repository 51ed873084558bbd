"""Describe a run: ``memprof.report/1``, and ``memprof.explain/1`` for allocations alone."""

from __future__ import annotations

from memprof.report.advice import Advice, Combination, Headline, Unchanged
from memprof.report.allocations import Allocation, SourceLine
from memprof.report.base import ByCategory, ByGroup, Bytes, Model, written
from memprof.report.peaks import Device, DevicePeak, Peak, PhasePeak
from memprof.report.ranks import AcrossRanks, RankSummary, Recording
from memprof.report.run import Capacity, Host, NonTorchMemory, OutOfMemory, Source, StepGrowth, Switch
from memprof.report.simulation import EstimatedTime, ExpectedError, Fit, Lengths


class Report(Model, tag_field="schema", tag="memprof.report/1", frozen=True, kw_only=True):
    """A report: ``memprof.report/1``.

    Attributes:
        source: where the figures come from.
        peak: the allocated peak.
        device_peak: the highest reserved plus non-PyTorch memory: what decides an out-of-memory error.
        devices: each device of a file with several, at its own peak.
        max_requested_bytes: the highest sum of requested bytes, before rounding.
        own_peaks: highest bytes of each category over the run; they don't add up.
        group_own_peaks: highest bytes of each group over the run; they don't add up.
        phases: every stretch of every phase, in order.
        host: the process's memory on the host, or ``None``.
        outside: device memory that torch did not allocate, as the driver reports it, or ``None``.
        switches: switches between rollout and training.
        oom: the request that failed, or ``None``.
        capacity: the memory of the device, or ``None``.
        growth: memory from optimizer step to optimizer step.
        advice: what would lower the peak: the recommended first step, then sorted by memory saved.
        ranks: each rank of a distributed run.
        notes: what could not be known, and what was inferred.
        expected_error: of a simulated run.
        estimated_time: of a simulated run on a known GPU model.
        fit: of a simulated run with a GPU.
        lengths: of a simulated run with a distribution of lengths.
        headline: the answer in sentences.
        recordings: the dumps of a folder that contains more than ``ranks``.
        across_ranks: the ranks compared.
        unchanged: with simulated advice, the run compared with its own simulation.
        combination: with ``memprof advise --gpu``.
        source_lines: lines of the program's own files, those that allocated most of the peak first, at most 300.
    """

    source: Source
    peak: Peak
    device_peak: DevicePeak
    devices: tuple[Device, ...] = written(())
    max_requested_bytes: Bytes
    own_peaks: ByCategory
    group_own_peaks: ByGroup = written({})
    phases: tuple[PhasePeak, ...]
    host: Host | None
    outside: NonTorchMemory | None = written(None)
    switches: tuple[Switch, ...] = written(())
    oom: OutOfMemory | None
    capacity: Capacity | None = written(None)
    growth: StepGrowth | None = written(None)
    advice: tuple[Advice, ...]
    ranks: tuple[RankSummary, ...]
    notes: tuple[str, ...]
    expected_error: ExpectedError | None = None
    estimated_time: EstimatedTime | None = None
    fit: Fit | None = None
    lengths: Lengths | None = None
    headline: Headline | None = None
    recordings: tuple[Recording, ...] | None = None
    across_ranks: AcrossRanks | None = None
    unchanged: Unchanged | None = None
    combination: Combination | None = None
    source_lines: tuple[SourceLine, ...] = ()


class Explanation(Model, tag_field="schema", tag="memprof.explain/1", frozen=True, kw_only=True):
    """``memprof.explain/1``: the allocations alive at an instant, largest first."""

    allocations: tuple[Allocation, ...]

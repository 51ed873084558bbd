"""Describe what only a simulated run has: its expected error, its time, whether it fits, and other lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from memprof.report.base import Bytes, Count, Model, Positive, Share, written
from memprof.vocabulary import Phase


class ErrorRange(Model, frozen=True, kw_only=True):
    """The signed relative errors of past predictions.

    Attributes:
        low: the lowest (negative: memprof predicted less than was measured).
        high: the highest.
        comparisons: number of comparisons.
    """

    low: float
    high: float
    comparisons: Count


class ErrorClass(Model, frozen=True, kw_only=True):
    """One entry of ``expected_error.basis``: a class of comparisons and its own range.

    Attributes:
        name: the class. ``class`` in JSON.
    """

    name: str = msgspec.field(name="class")
    low: float
    high: float
    comparisons: Count


class Assumed(Model, frozen=True, kw_only=True):
    """A ``setting`` that was not given, and the ``value`` that was assumed."""

    setting: str
    value: str | int | float | bool | None


class ExpectedError(Model, frozen=True, kw_only=True):
    """How far predictions like this one were from measurements ([classes](accuracy.md#expected-error)).

    Attributes:
        allocated: error of allocated memory, if what was given is what runs.
        reserved: error of reserved memory.
        not_compared: parts that no comparison covers.
        sentence: the same in words.
        not_simulated: settings that the simulation leaves out; the ranges allow for them.
        name: the class of comparisons. ``class`` in JSON.
        margin: the share that a verdict adds.
        basis: the classes that it comes from.
        assumed: settings that were not given.
    """

    allocated: ErrorRange
    reserved: ErrorRange
    not_compared: tuple[str, ...]
    sentence: str
    not_simulated: tuple[str, ...] = ()
    name: str | None = msgspec.field(default=None, name="class")
    margin: Positive | None = None
    basis: tuple[ErrorClass, ...] | None = None
    assumed: tuple[Assumed, ...] | None = None


class EstimatedTime(Model, frozen=True, kw_only=True):
    """The estimated time of one optimizer step on one rank ([method](simulating.md#how-long-a-step-takes)).

    Attributes:
        step_s: seconds of the step.
        phases: seconds of each phase.
        basis: ``roofline``.
        assumptions: in words.
    """

    step_s: Positive
    phases: Mapping[str, Positive]
    basis: Literal["roofline"]
    assumptions: tuple[str, ...]


class PhaseNeed(Model, frozen=True, kw_only=True):
    """What one phase needs: its highest allocated and reserved memory, with non-PyTorch memory, and whether it fits."""

    phase: Phase
    allocated_bytes: Bytes
    reserved_bytes: Bytes
    needed_bytes: Bytes
    fits: bool


class HostNeed(Model, frozen=True, kw_only=True):
    """Host memory: ``needed_bytes`` of ``total_bytes`` (``None`` if unknown), and whether it fits."""

    needed_bytes: Bytes
    total_bytes: Bytes | None
    fits: bool | None


class GenerationNeed(Model, frozen=True, kw_only=True):
    """Memory at the peak of generation, if its tokens were simulated.

    Attributes:
        held_bytes: allocated memory.
        reserved_bytes: reserved memory.
        flushes: how often the allocator frees its cache.
        expandable: whether segments are expandable.
    """

    held_bytes: Bytes = 0
    reserved_bytes: Bytes = 0
    flushes: Count = written(0)
    expandable: bool = written(False)


class Ensemble(Model, frozen=True, kw_only=True):
    """Variants of a simulation that differ in the order of frees.

    Attributes:
        members: number of variants.
        failed: number that ran out of memory.
        flushes: whether one freed its cache.
        lowest_bytes: the lowest reserved memory, with unlimited memory.
        highest_bytes: the highest.
    """

    members: Count
    failed: Count
    flushes: bool
    lowest_bytes: Bytes
    highest_bytes: Bytes


class Fit(Model, frozen=True, kw_only=True):
    """Whether a simulated run fits on a GPU.

    Attributes:
        gpu: the GPU.
        total_bytes: its memory.
        limit_bytes: the most that ``needed_bytes`` may be: ``total_bytes / (1 + margin)``.
        needed_bytes: ``reserved_bytes + non_torch_bytes`` at the device peak.
        reserved_bytes: reserved memory.
        non_torch_bytes: non-PyTorch memory.
        headroom_bytes: ``total_bytes - needed_bytes``.
        margin: the share added to the prediction.
        kept: what the margin is for.
        fits: the verdict: of the run, all its variants and the host.
        flushes: whether it fits only because the allocator frees its cache.
        phase: phase of the device peak.
        phases: each phase at its highest.
        host: the host's memory, or ``None``.
        generation: the peak of generation, if its tokens were simulated.
        ensemble: the variants, or ``None``.
        sentence: the verdict in words.
    """

    gpu: str
    total_bytes: Bytes
    limit_bytes: Bytes
    needed_bytes: Bytes
    reserved_bytes: Bytes
    non_torch_bytes: Bytes
    headroom_bytes: int
    margin: Positive
    kept: str | None = None
    fits: bool
    flushes: bool
    phase: Phase
    phases: tuple[PhaseNeed, ...]
    host: HostNeed | None = written(None)
    generation: GenerationNeed | None = None
    ensemble: Ensemble | None = written(None)
    sentence: str


class LengthPoint(Model, frozen=True, kw_only=True):
    """A run whose longest completion has ``length`` tokens.

    Attributes:
        length: tokens of the longest completion.
        share_below: share of steps whose longest completion is at most as long.
        needed_bytes: reserved plus non-PyTorch memory.
        peak_bytes: allocated memory.
        fits: whether it fits, or ``None``.
        executed: whether it was simulated (otherwise interpolated).
        names: such as ``p50``, ``p95``, ``longest``.
    """

    length: Count
    share_below: Share
    needed_bytes: Bytes
    peak_bytes: Bytes
    fits: bool | None
    executed: bool
    names: tuple[str, ...]


class Lengths(Model, frozen=True, kw_only=True):
    """Memory over a distribution of completion lengths.

    Attributes:
        source: where the lengths come from.
        count: number of lengths.
        batch: completions that are padded to the longest of them.
        mean: mean length in tokens.
        points: runs with other longest completions.
        worst_case: every completion at the maximum length.
        largest_fitting: the largest length that fits; 0 if none does.
        share_of_steps_fitting: share of steps that fit.
        sentence: the same in words.
    """

    source: str
    count: Count
    batch: Count
    mean: float
    points: tuple[LengthPoint, ...]
    worst_case: LengthPoint
    largest_fitting: Count | None
    share_of_steps_fitting: Share | None
    sentence: str

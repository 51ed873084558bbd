"""Describe the ranks of a distributed run: each in short, compared, and the recordings of a folder."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memprof.report.base import ByCategory, Bytes, Model, Positive, Rank
from memprof.report.run import Host
from memprof.vocabulary import Category, History, Phase


class RankPeak(Model, frozen=True, kw_only=True):
    """A rank's allocated peak; fields as in ``peak``, zeros left out of ``categories``."""

    allocated_bytes: Bytes
    active_bytes: Bytes
    reserved_bytes: Bytes | None
    non_torch_bytes: Bytes | None
    phase: Phase | None
    step: int | None
    categories: ByCategory


class RankDevicePeak(Model, frozen=True, kw_only=True):
    """A rank's device peak; fields as in ``device_peak``."""

    reserved_bytes: Bytes | None
    non_torch_bytes: Bytes | None
    phase: Phase | None
    step: int | None


class RankPhase(Model, frozen=True, kw_only=True):
    """A phase of a rank at its highest: active ``peak_bytes`` and their ``categories``, zeros left out."""

    phase: Phase
    peak_bytes: Bytes
    categories: ByCategory


class RankOutOfMemory(Model, frozen=True, kw_only=True):
    """The request of a rank that failed; fields as in ``oom``."""

    requested_bytes: Bytes
    device_free_bytes: Bytes | None
    phase: Phase | None
    step: int | None


class RankSummary(Model, frozen=True, kw_only=True):
    """One entry of ``ranks``. The rest of the report is about one of them (``source.rank``).

    Attributes:
        rank: number of the process.
        node: name of its machine.
        device: as in ``source``.
        device_name: as in ``source``.
        device_total_bytes: as in ``source``.
        file: its recording.
        history: as in ``source``.
        tokens: tokens that its highest step trained on, padding included.
        peak: its allocated peak.
        device_peak: its device peak.
        own_peaks: highest bytes of each category, zeros left out.
        phases: each phase at its highest.
        host: as in a report.
        oom: the request that failed, or ``None``.
    """

    rank: Rank
    node: str | None
    device: int
    device_name: str | None
    device_total_bytes: Bytes | None
    file: str | None
    history: History
    tokens: int | None
    peak: RankPeak
    device_peak: RankDevicePeak
    own_peaks: ByCategory
    phases: tuple[RankPhase, ...]
    host: Host | None
    oom: RankOutOfMemory | None


class MissingRank(Model, frozen=True, kw_only=True):
    """A rank without a recording, with the last step and the highest allocated memory of its counters, if any."""

    rank: int
    last_step: int | None
    peak_allocated_bytes: Bytes | None


#: A sum over ranks, which may be more than one size can be.
Total = Annotated[int, msgspec.Meta(ge=0)]


class Spread(Model, frozen=True, kw_only=True):
    """The spread of a figure over the ranks, each at its own peak, in active bytes.

    Attributes:
        highest_rank: the rank with the highest figure, the lowest number among equal ones.
        highest_bytes: its figure.
        lowest_rank: the rank with the lowest figure.
        lowest_bytes: its figure.
        median_bytes: the median (the lower of two middle ones).
        mean_bytes: the mean.
        total_bytes: the sum.
        imbalance: the highest over the mean, minus 1.
    """

    # What is spread stands first in the JSON, so the subclasses' fields are reserved here.
    category: Category | None = None
    phase: Phase | None = None
    node: str | msgspec.UnsetType | None = msgspec.UNSET
    ranks: tuple[int, ...] | None = None
    highest_rank: int
    highest_bytes: Bytes
    lowest_rank: int
    lowest_bytes: Bytes
    median_bytes: Bytes
    mean_bytes: Bytes
    total_bytes: Total
    imbalance: Positive


class CategorySpread(Spread, frozen=True, kw_only=True):
    """The spread of one ``category`` at the ranks' own peaks."""

    category: Category


class PhaseSpread(Spread, frozen=True, kw_only=True):
    """The spread of one ``phase`` at its highest."""

    phase: Phase


class NodeSpread(Spread, frozen=True, kw_only=True):
    """The spread over the ``ranks`` of one ``node``."""

    node: str | None
    ranks: tuple[int, ...]


class Difference(Model, frozen=True, kw_only=True):
    """What a rank uses above the median in the phase that it peaks in.

    Attributes:
        rank: the rank that uses most, or rank 0.
        phase: the phase.
        category: a category, or ``non_torch``.
        bytes: above the median.
        median_bytes: the median.
        reason: the usual reason, or empty.
    """

    rank: int
    phase: Phase | None
    category: str
    bytes: Bytes
    median_bytes: Bytes
    reason: str


class AcrossRanks(Model, frozen=True, kw_only=True):
    """The ranks compared.

    Attributes:
        world_size: number of ranks of the run, or ``None``.
        missing: ranks without a recording.
        steps: the optimizer steps of the peaks.
        peak: spread of the peaks.
        device_peak: spread of reserved plus non-PyTorch memory at the device peak.
        categories: spread of each category.
        phases: spread of each phase.
        nodes: spread over each machine.
        differences: what the rank that uses most, and rank 0, use above the median.
    """

    world_size: Rank | None
    missing: tuple[MissingRank, ...]
    steps: tuple[int, ...]
    peak: Spread
    device_peak: Spread | None
    categories: tuple[CategorySpread, ...]
    phases: tuple[PhaseSpread, ...]
    nodes: tuple[NodeSpread, ...]
    differences: tuple[Difference, ...]


class Recording(Model, frozen=True, kw_only=True):
    """One entry of ``recordings``: a dump in a folder that contains more than ``ranks``.

    Attributes:
        file: its path in the folder.
        rank: according to its path, or ``None``.
        step: according to its path, or ``None``.
        role: what the process was for.
        role_from: where the role is known from: ``name``, ``recording`` or ``content``.
        pid: according to its path, or ``None``.
        time: according to its path, or ``None``.
        label: a replica, a stage or a framework's own word in the path, or ``None``.
        out_of_memory: whether it was written because memory ran out.
        shown: whether it is one of ``ranks``.
        peak_bytes: its peak in active bytes, or ``None`` if it was not read.
        because: why it is not shown, and how to show it.
    """

    file: str
    rank: Rank | None
    step: int | None
    role: str | None
    role_from: Literal["name", "recording", "content"] | None
    pid: int | None
    time: str | None
    label: str | None
    out_of_memory: bool
    shown: bool
    peak_bytes: Bytes | None
    because: str | None

"""Describe runs side by side: ``memprof.compare/1``. Lists are in the order of ``runs``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from memprof.report.advice import Headline, Unchanged
from memprof.report.base import ByGroup, Bytes, Count, Model, Positive, Stack, written
from memprof.report.report import Report
from memprof.vocabulary import Category, Group, Phase

#: Bytes of each run; ``None`` if a run has no such figure.
Figures = tuple[Bytes | None, ...]
#: Each run's bytes minus the first run's.
Differences = tuple[int | None, ...]
#: Each run's bytes over the first run's.
Ratios = tuple[float | None, ...]


class Published(Model, frozen=True, kw_only=True):
    """A published table in place of a run.

    Attributes:
        label: heading of its column.
        set: name of the table, such as ``unsloth-2025``.
        source: where it was published.
        setting: of what run.
        groups: bytes of each published row, and their ``total``.
        notes: sentences.
    """

    label: str
    set: str
    source: str
    setting: str
    groups: ByGroup
    notes: tuple[str, ...]


class ComparedRun(Model, frozen=True, kw_only=True):
    """One column.

    Attributes:
        label: its heading.
        badge: ``measured``, ``simulated`` or ``published``.
        report: the run's report; ``None`` for a published table.
        published: the published table.
    """

    label: str
    badge: Literal["measured", "simulated", "published"]
    report: Report | None
    published: Published | None = None

    def __post_init__(self) -> None:
        if self.report is None and self.published is None:
            raise ValueError("a run without a report and without a published table")


class ComparedDetail(Model, frozen=True, kw_only=True):
    """A part of a category; ``id`` is empty for what no part covers."""

    id: str
    label: str
    at_peak: Differences
    difference: Differences
    ratio: Ratios


class ComparedCategory(Model, frozen=True, kw_only=True):
    """A category: bytes at the allocated peak and over the run."""

    id: Category
    label: str
    at_peak: Figures
    own_peak: Figures
    difference: Differences
    ratio: Ratios
    details: tuple[ComparedDetail, ...]


class ComparedGroup(Model, frozen=True, kw_only=True):
    """A row of the published table: a group, its bytes at the peak and over the run, and its categories."""

    id: Group
    label: str
    at_peak: Figures
    own_peak: Figures
    difference: Differences
    ratio: Ratios
    categories: tuple[ComparedCategory, ...]


class ComparedLine(Model, frozen=True, kw_only=True):
    """A row that is in no total.

    Attributes:
        id: ``device_peak``, ``reserved``, ``non_torch``, ``pinned_bytes``, ``managed_bytes``, ``rss_bytes`` or
            ``phase:NAME``.
        label: in words.
        values: bytes of each run.
        difference: to the first run.
        ratio: to the first run.
    """

    id: str
    label: str
    values: Figures
    difference: Differences
    ratio: Ratios


class ComparedCapacity(Model, frozen=True, kw_only=True):
    """Which run fits.

    Attributes:
        bytes: the device's memory.
        source: ``option`` or ``device``. ``from`` in JSON.
        needs: each run's need (with 600 MiB of CUDA context if none was recorded).
        basis: what each need is: ``device_peak``, otherwise ``total``.
        left: what remains.
        margins: the share added to each.
        fits: the verdicts.
    """

    bytes: Bytes
    source: Literal["option", "device"] = msgspec.field(name="from")
    needs: tuple[Bytes, ...]
    basis: tuple[Literal["device_peak", "total"], ...]
    left: tuple[int, ...]
    margins: tuple[Positive, ...] | None = None
    fits: tuple[bool, ...]


class ChangedSetting(Model, frozen=True, kw_only=True):
    """A setting that differs.

    Attributes:
        setting: its name.
        of: ``config``, ``source`` or ``versions``.
        matters: whether memory depends on it.
        values: each run's value; ``None`` if it has none.
    """

    setting: str
    of: Literal["config", "source", "versions"]
    matters: bool
    values: tuple[Any, ...]


class Surplus(Model, frozen=True, kw_only=True):
    """Similar allocations (equal size, file names and functions) of which one run has more than another.

    Attributes:
        bytes: of the surplus.
        each_bytes: of each allocation.
        count_in: number in the one run.
        count_not_in: number in the other.
        category: their category.
        detail: part of the category.
        name: of the tensors.
        phase: of the allocations.
        stack: of the allocations.
    """

    bytes: Bytes
    each_bytes: Bytes
    count_in: Count
    count_not_in: Count
    category: Category
    detail: str | None = written(None)
    name: str | None = written(None)
    phase: Phase | None = written(None)
    stack: Stack


class OnlyIn(Model, frozen=True, kw_only=True):
    """What one run allocates at its peak and another does not.

    Attributes:
        in_run: index of the one run. ``in`` in JSON.
        not_in_run: index of the other. ``not_in`` in JSON.
        bytes: in total.
        above_bytes: only larger allocations were compared.
        allocations: the largest.
    """

    in_run: Count = msgspec.field(name="in")
    not_in_run: Count = msgspec.field(name="not_in")
    bytes: Bytes
    above_bytes: Bytes
    allocations: tuple[Surplus, ...]


class Comparison(Model, tag_field="schema", tag="memprof.compare/1", frozen=True, kw_only=True):
    """A comparison: ``memprof.compare/1``.

    Attributes:
        runs: the columns; all are compared with the first.
        rows: rows of the published table, ``total`` last.
        beside: rows that are in no total.
        capacity: which run fits, or ``None``.
        config_diff: settings that differ.
        allocations_only_in: what one run allocates at its peak and another does not.
        notes: sentences.
        headline: the answer in sentences.
        unchanged: with ``memprof simulate --like``, the recorded run compared with its own simulation.
    """

    runs: Annotated[tuple[ComparedRun, ...], msgspec.Meta(min_length=2)]
    rows: tuple[ComparedGroup, ...]
    beside: tuple[ComparedLine, ...]
    capacity: ComparedCapacity | None
    config_diff: tuple[ChangedSetting, ...]
    allocations_only_in: tuple[OnlyIn, ...]
    notes: tuple[str, ...]
    headline: Headline | None = None
    unchanged: Unchanged | None = None

    def __post_init__(self) -> None:
        tables: list[tuple[object, ...]] = [setting.values for setting in self.config_diff]
        for row in self.rows:
            tables += [row.at_peak, row.own_peak, row.difference, row.ratio]
            for category in row.categories:
                tables += [category.at_peak, category.own_peak, category.difference, category.ratio]
                for detail in category.details:
                    tables += [detail.at_peak, detail.difference, detail.ratio]
        for line in self.beside:
            tables += [line.values, line.difference, line.ratio]
        if self.capacity is not None:
            capacity = self.capacity
            tables += [capacity.needs, capacity.basis, capacity.left, capacity.fits]
        if any(len(figures) != len(self.runs) for figures in tables):
            raise ValueError("a row without one figure for each run")
        if any(only.in_run >= len(self.runs) or only.not_in_run >= len(self.runs) for only in self.allocations_only_in):
            raise ValueError("allocations of a run that is not there")

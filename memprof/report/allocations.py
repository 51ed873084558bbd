"""Describe allocations, and what they are folded into."""

from __future__ import annotations

from typing import Literal

from memprof.report.base import ByCategory, Bytes, Count, Model, Stack, written
from memprof.vocabulary import Category, Evidence, Phase


class Allocation(Model, frozen=True, kw_only=True):
    """An allocation alive at an instant.

    Attributes:
        address: of the block.
        bytes: size of the block.
        requested_bytes: size that the program requested.
        category: what the allocation is for.
        detail: part of the category, or ``None``.
        name: of the tensor, if an owner was recorded.
        evidence: how the category is known ([evidence](reading-a-report.md#how-it-is-known)).
        rule: the rule that decided, or ``None``.
        alternatives: other categories that the evidence allows.
        phase: of the allocation.
        step: optimizer step of the allocation.
        born_us: time of the allocation; ``None`` if it precedes the recording.
        died_us: time of the free; ``None`` if it was not freed in the recording.
        retained: whether it outlives the step or phase that allocated it.
        held_by: what referred to it when the recording ended (only the largest allocations without an owner).
        tag: torch's metadata string, or ``None``.
        stack: of the allocation.
    """

    address: int
    bytes: Bytes
    requested_bytes: Bytes = written(0)
    category: Category
    detail: str | None
    name: str | None = written(None)
    evidence: Evidence
    rule: str | None
    alternatives: tuple[str, ...]
    phase: Phase | None
    step: int | None = written(None)
    born_us: int | None
    died_us: int | None
    retained: bool
    held_by: tuple[str, ...] = written(())
    tag: str | None = written(None)
    stack: Stack


class AllocationGroup(Allocation, frozen=True, kw_only=True):
    """One entry of ``peak.largest``: allocations that differ only in the digits of their names.

    ``bytes`` and ``requested_bytes`` are sums, ``address`` is the first allocation's, ``born_us`` the first
    allocation and ``died_us`` the last free. Digits that differ in ``name`` are replaced by ``*``.

    Attributes:
        count: number of allocations.
        each_bytes: size of each.
    """

    count: Count
    each_bytes: Bytes


class Finding(Model, frozen=True, kw_only=True):
    """One entry of ``peak.findings``: something that explains part of the peak beyond its category.

    Attributes:
        kind: ``left_over`` (allocations of an earlier iteration still alive), ``two_copies`` (two copies of the
            weights) or ``brief_workspace`` (a convolution's workspace).
        category: of the allocations.
        bytes: of the allocations at the peak.
        count: number of allocations.
        saves_bytes: how much lower the highest peak of the recording would be without them.
        frame: ``file:line`` where most were allocated, or empty.
        held_at: the user's line that released them, or that led to them.
        passes: number of iterations that left some.
        holds_bytes: the part of ``bytes`` that is freed with them, such as inputs of their graph.
    """

    kind: Literal["left_over", "two_copies", "brief_workspace"]
    category: Category
    bytes: Bytes
    count: Count
    saves_bytes: Bytes
    frame: str
    held_at: str | None = None
    passes: Count | None = None
    holds_bytes: Bytes | None = None


class SourceLine(Model, frozen=True, kw_only=True):
    """A line of the program's own files. An allocation counts for the innermost such line on its stack.

    Attributes:
        file: the file, as in the stacks.
        line: its number, from 1.
        function: the function that it is in.
        bytes: allocated at this line and in use at the peak.
        count: number of these allocations.
        own_peak_bytes: the most that was ever in use at once of what this line allocated.
        categories: ``bytes`` by category, zeros left out.
    """

    file: str
    line: Count
    function: str
    bytes: Bytes
    count: Count
    own_peak_bytes: Bytes
    categories: ByCategory

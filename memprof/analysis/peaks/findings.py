"""Say what explains more of the peak than its categories do, and what the peak would be without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from memprof.analysis.allocations.places import place_of
from memprof.analysis.peaks.left_over import left_over
from memprof.report.allocations import Finding
from memprof.snapshot.model import I64, is_among
from memprof.vocabulary import Category, Evidence

if TYPE_CHECKING:
    from memprof.analysis.views import Views

# Gradients of this many copies of the weights show that all of them train.
_BOTH_TRAIN = 1.5
# A finding is worth naming from this share of the peak on.
_WORTH = 0.05
_NOTICEABLE = 1024
# The rule that knows the workspace of a convolution's plan, and how many events it lives at most.
_PLAN, _MOMENT = "cudnn.workspace", 4
# A parameter's bytes; a norm's vector and a square matrix of its width tell which.
_WIDTHS = (2, 4)
_VECTORS, _MATRICES = (512, 1 << 17), 1 << 17


def findings(views: Views) -> tuple[Finding, ...]:
    """List what explains a part of the peak that is worth naming."""
    found = (f for f in (left_over(views), _two_copies(views), _brief_workspace(views)) if f is not None)
    return tuple(f for f in found if f.saves_bytes >= _WORTH * views.peak.active_bytes)


def _two_copies(views: Views) -> Finding | None:
    """Find two copies of the weights: nearly every size is there an even number of times.

    A model has its embeddings once and an odd number of norms. Sizes with odd counts may hold a hundredth of the bytes.
    """
    rows = views.peak.rows
    found, size = views.attribution, _requested(views)
    guessed = (found.category == Category.WEIGHTS.code) & (found.evidence == Evidence.FINGERPRINT.code)
    rows = rows[guessed[rows] & (size[rows] >= _NOTICEABLE // 2)]
    sizes, counts = np.unique(size[rows], return_counts=True)
    total, odd = int((sizes * counts).sum()), int(sizes[counts % 2 == 1].sum())
    if len(sizes) < 4 or total < _NOTICEABLE or odd > 0.01 * total or (counts[counts > 2] % 2).any():
        return None
    half = (total - odd) // 2
    if views.own_peaks.get(Category.GRADIENTS, 0) > _BOTH_TRAIN * half:
        return None  # more has gradients than one copy: these are one model's layers
    return Finding(
        kind="two_copies",
        category=Category.WEIGHTS,
        bytes=half,
        count=len(rows) // 2,
        saves_bytes=half,
        frame=_made_twice(views, rows, total),
    )


def _made_twice(views: Views, rows: I64, total: int) -> str:
    """Return the line that made both copies, where the same stacks made each size an even number of times; else ""."""
    size, stack = _requested(views), views.timeline.stack
    made, counts = np.unique(np.stack([stack[rows].astype(np.int64), size[rows]]), axis=1, return_counts=True)
    held = made[1] * counts
    twice = (counts % 2 == 0) & np.array([bool(views.stacks.of(s)) for s in made[0].tolist()])
    if held[twice].sum() < 0.98 * total:
        return ""
    return place_of(views.stacks.of(int(made[0][int(np.argmax(held * twice))])))


def _brief_workspace(views: Views) -> Finding | None:
    """Find a convolution plan's brief workspace at the peak; ``saves_bytes``: without all such workspaces."""
    line, found = views.timeline, views.attribution
    if _PLAN not in found.rules:
        return None
    rows = np.flatnonzero((found.rule == found.rules.index(_PLAN)) & (line.alloc_event >= 0))
    rows = rows[line.free_event[rows] - line.alloc_event[rows] <= _MOMENT]
    here = rows[is_among(rows, views.peak.rows)]
    if not len(here):
        return None
    return Finding(
        kind="brief_workspace",
        category=Category.WORKSPACE,
        bytes=int(line.size[here].sum()),
        count=len(here),
        saves_bytes=line.saved_without(rows, line.alloc_event[rows]),
        frame=place_of(views.stacks.of(int(line.stack[here[0]]))),
    )


def weights_bits(views: Views) -> Literal[16, 32] | None:
    """Return 16 or 32 where the sizes of the weights say so; None elsewhere.

    A norm's vector has ``width × bytes``, a square matrix ``width² × bytes``: the square of the first over the second
    is a parameter's bytes. Other matrices give other quotients; where both 2 and 4 occur nothing is said.
    """
    rows = views.peak.rows
    rows = rows[views.attribution.category[rows] == Category.WEIGHTS.code]
    sizes, counts = np.unique(_requested(views)[rows], return_counts=True)
    sizes, counts = sizes[counts > 2], counts[counts > 2]
    vectors = (sizes >= _VECTORS[0]) & (sizes <= _VECTORS[1])
    if not vectors.any():
        return None
    usual = sizes[vectors][counts[vectors] >= counts[vectors].max() / 2]
    widths = set(_quotients(usual.tolist(), sizes[sizes > _MATRICES].tolist()))
    if len(widths) != 1:
        return None
    return 16 if widths == {2} else 32


def _quotients(vectors: list[int], matrices: list[int]) -> Iterator[int]:
    for vector in vectors:
        for matrix in matrices:
            for width in _WIDTHS:
                if vector * vector == width * matrix:
                    yield width


def _requested(views: Views) -> I64:
    line = views.timeline
    requested: I64 = np.where(line.requested > 0, line.requested, line.size)
    return requested

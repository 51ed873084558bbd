"""Hold a run as advice looks at it: its settings, its model's shape, and what was alive at each phase's peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from memprof.config.model_shape import ModelShape
from memprof.config.settings import Settings
from memprof.oom.frameworks import PLAIN, Names

__all__ = ["Effect", "Made", "Peak", "Run", "bounded", "highest"]


@dataclass(frozen=True)
class Peak:
    """One phase's highest moment: bytes in all, and by category."""

    phase: str
    bytes: int
    categories: Mapping[str, int]

    def of(self, category: str) -> int:
        """Return the bytes of one category."""
        return self.categories.get(category, 0)


@dataclass(frozen=True)
class Made:
    """What one line made of a category: its bytes at the peak, and the line as ``file.py:123 function``."""

    bytes: int
    site: str


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    ``settings`` and ``shape`` are None where the file does not say how it was configured. ``peaks`` holds the highest
    peak of every phase; ``own_peaks`` each category's highest bytes at any time; ``idle_bytes`` are reserved and not
    active at the allocated peak. ``made`` has for each category the lines that made most of it, largest first;
    ``names`` are the settings in the words of the framework whose frames were seen; ``engine`` tells
    that vLLM or SGLang is in the process. ``lasting`` has for a category the share of its largest blocks that the
    recording does not see freed; ``failed`` tells that memory ran out.
    """

    peaks: tuple[Peak, ...]
    settings: Settings | None = None
    shape: ModelShape | None = None
    own_peaks: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    idle_bytes: int = 0
    alloc_conf: str = ""
    made: Mapping[str, tuple[Made, ...]] = field(default_factory=dict)
    names: Names = PLAIN
    engine: bool = False
    lasting: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False

    @property
    def peak(self) -> Peak:
        """Return the highest of the phases' peaks."""
        return max(self.peaks, key=lambda p: p.bytes)

    def after(self, effect: Effect) -> Peak:
        """Return the peak that is left when a change takes ``effect(run, peak)`` bytes from each phase's peak."""
        left = [Peak(p.phase, p.bytes - sum(bounded(p, effect(self, p)).values()), {}) for p in self.peaks]
        return max(left, key=lambda p: p.bytes)


def bounded(peak: Peak, saved: Mapping[str, int]) -> dict[str, int]:
    """Limit ``saved`` to what each category holds."""
    return {category: min(n, peak.of(category)) for category, n in saved.items()}


# Bytes that a change takes from each category at one phase's peak; below zero where it adds some.
Effect = Callable[[Run, Peak], Mapping[str, int]]


def highest(rows: Iterable[Peak]) -> tuple[Peak, ...]:
    """Return the highest peak of every phase."""
    found: dict[str, Peak] = {}
    for row in rows:
        if row.phase not in found or row.bytes > found[row.phase].bytes:
            found[row.phase] = row
    return tuple(found.values())

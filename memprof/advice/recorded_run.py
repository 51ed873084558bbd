"""A run as advice looks at it: its settings, its model's sizes, and what was alive at each phase's peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memprof.config.settings import Settings

__all__ = ["DTYPE_BYTES", "Candidate", "Effect", "Peak", "Run", "Sizes", "Toll", "bounded", "highest"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Toll:
    """How much a change asks for, least first: combinations take what asks for less."""

    NOTHING = 0
    SLOWER = 1
    NEEDS = 2  # a package, host memory, another GPU
    ROUNDED = 3  # the same training in coarser numbers
    TRAINED = 4  # fewer parameters are trained
    OBJECTIVE = 5  # other data, or another objective


@dataclass(frozen=True)
class Sizes:
    """A model's extents (elements); ``parameters`` counts all of them, ``embeddings`` the input's and the head's."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    embeddings: int
    parameters: int

    @classmethod
    def of(cls, values: Mapping[str, Any], parameters: int | None = None) -> Sizes:
        """From a config's values; a config that nests its language model is looked into.

        Raises:
            KeyError, TypeError: an extent is missing or no number.
        """
        text = values.get("text_config")
        inner: Mapping[str, Any] = text if isinstance(text, Mapping) else values
        hidden, layers = int(inner["hidden_size"]), int(inner["num_hidden_layers"])
        heads = int(inner.get("num_attention_heads") or 1)
        kv_heads = int(inner.get("num_key_value_heads") or heads)
        head_dim = int(inner.get("head_dim") or hidden // heads)
        intermediate = int(inner.get("intermediate_size") or 4 * hidden)
        vocabulary = int(inner["vocab_size"])
        tied = bool(inner.get("tie_word_embeddings", False))
        embeddings = vocabulary * hidden * (1 if tied else 2)
        layer = hidden * (2 * heads + 2 * kv_heads) * head_dim + 3 * hidden * intermediate + 2 * hidden
        experts = inner.get("num_local_experts") or inner.get("num_experts")
        if experts:
            layer += 3 * hidden * int(inner.get("moe_intermediate_size") or intermediate) * (int(experts) - 1)
        count = parameters or layers * layer + embeddings + hidden
        return cls(layers, hidden, intermediate, vocabulary, heads, kv_heads, head_dim, embeddings, count)

    def adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear layer of the blocks."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ends = 2 * (self.hidden + q) + 2 * (self.hidden + kv) + 3 * (self.hidden + self.intermediate)
        return rank * ends * self.layers


@dataclass(frozen=True)
class Peak:
    """One phase's highest moment: bytes in all, and by category."""

    phase: str
    bytes: int
    categories: Mapping[str, int]

    def of(self, category: str) -> int:
        """Bytes of one category."""
        return self.categories.get(category, 0)


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    ``settings`` and ``sizes`` are None where the file does not say how it was configured. ``peaks`` holds the highest
    peak of every phase; ``own_peaks`` each category's highest bytes at any time; ``idle_bytes`` are reserved and not
    active at the device peak's neighbour, the allocated peak.
    """

    peaks: tuple[Peak, ...]
    settings: Settings | None = None
    sizes: Sizes | None = None
    own_peaks: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    idle_bytes: int = 0
    alloc_conf: str = ""

    @property
    def peak(self) -> Peak:
        """The highest of the phases' peaks."""
        return max(self.peaks, key=lambda p: p.bytes)

    def after(self, effect: Effect) -> Peak:
        """The peak that is left when a change takes ``effect(run, peak)`` bytes from each phase's peak."""
        left = [Peak(p.phase, p.bytes - sum(bounded(p, effect(self, p)).values()), {}) for p in self.peaks]
        return max(left, key=lambda p: p.bytes)


def bounded(peak: Peak, saved: Mapping[str, int]) -> dict[str, int]:
    """What ``saved`` really gives back: no category more than it holds."""
    return {category: min(n, peak.of(category)) for category, n in saved.items()}


# Bytes that a change takes from each category at one phase's peak; below zero where it adds some.
Effect = Callable[[Run, Peak], Mapping[str, int]]


@dataclass(frozen=True)
class Candidate:
    """A change worth considering.

    Args:
        id: what combinations and tests call it.
        action: what to do, as a sentence without its full stop.
        setting: what to paste.
        costs: what it costs, with the reason.
        exact: whether gradients stay the same (to rounding, where sums are only taken in another order).
        toll: how much is asked, of :class:`Toll`.
        changes: settings of the changed run; empty where it cannot be simulated.
        effect: the estimate; None where only a simulation can tell.
        device: the change is about what the device holds, not about what the program allocates.
    """

    id: str
    action: str
    setting: str
    costs: str
    exact: bool
    toll: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect | None = None
    device: bool = False


def highest(rows: Iterable[Peak]) -> tuple[Peak, ...]:
    """The highest peak of every phase."""
    found: dict[str, Peak] = {}
    for row in rows:
        if row.phase not in found or row.bytes > found[row.phase].bytes:
            found[row.phase] = row
    return tuple(found.values())

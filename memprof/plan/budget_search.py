"""Choose the lean trainer's settings for a memory budget: the fastest first, each simulated before it is chosen.

Training and generation peak at different times, so each has its own ladder of settings. Training's first rung
recomputes nothing; every later rung keeps less in memory and costs more (:func:`cost_of`). Generation's first rung
runs all sequences at once. Rungs that cannot fit by arithmetic (:mod:`memprof.plan.lower_bound`) are not simulated.
The rest is searched by bisection, or in as many parts as simulations run side by side. This module needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from memprof.config.catalogue import find_config
from memprof.config.fits import fits, kept_for, words_of
from memprof.config.model_shape import ModelShape
from memprof.config.piece_size import MOST_TOKENS
from memprof.config.settings import Settings, TrainerSettings
from memprof.errors import DoesNotFit, UsageError
from memprof.plan.lower_bound import least_bytes
from memprof.plan.simulations import SimulatedRow
from memprof.units import format_gib
from memprof.vocabulary import CATEGORY_LABELS, Phase

#: The settings that are chosen, by their names in ``Settings``; all others stay as given.
CHOSEN = ("gradient_checkpointing", "max_tokens_per_piece", "tiled_mlp", "generation_batch")

_LARGE_PIECE = 8192
_TILE = 2048
_SMALL_TILE = 256  # tokens; with smaller tiles a GPU waits for launches longer than it computes

Rows = Callable[[list[Settings]], list[SimulatedRow]]


@dataclass(frozen=True)
class Cost:
    """State what a micro-batch costs beyond a forward and backward: FLOPs computed again, bytes moved to the host."""

    recomputed_flops: int
    host_bytes: int
    pieces: int
    tiles: int


@dataclass(frozen=True)
class Choice:
    """Hold the fastest settings that fit, the row of their simulation, and the rungs below them.

    ``slower`` are training's next rungs. ``simulated`` counts the settings that were simulated or read from the cache.
    """

    settings: Settings
    row: SimulatedRow
    budget_bytes: int
    slower: tuple[Settings, ...]
    simulated: int

    @property
    def needed_bytes(self) -> int:
        """Return reserved and non-torch bytes where a GPU was simulated, else allocated ones."""
        return self.row.needed_bytes


@dataclass(frozen=True)
class Tried:
    """Tell how a search goes: settings that were simulated, what came of it, and how much may be left to do.

    ``seconds`` are those of the settings simulated side by side with these; ``most`` is how many simulations the whole
    search takes at most.
    """

    settings: Settings
    needed_bytes: int
    fits: bool
    seconds: float
    done: int
    most: int


def ladder(base: Settings, fixed: Collection[str] = ()) -> list[Settings]:
    """List training's rungs, the fastest first; settings named in ``fixed`` stay as ``base`` has them."""
    length, rows = base.sequence_length, base.per_device_train_batch_size
    piece = min(max(MOST_TOKENS, length), rows * length)
    tile = max(min(_TILE, 1 << (piece // 4).bit_length() - 1), _SMALL_TILE) if piece > 3 else _SMALL_TILE
    small = max(tile // 4, _SMALL_TILE)
    lowest = "full" if base.device == "cpu" else "offloaded"
    rungs: list[tuple[str, int | None, int | None]] = [
        ("none", _LARGE_PIECE, None),
        ("none", None, None),
        ("none", None, tile),
        ("selective", None, None),
        ("full", None, None),
        ("full", None, tile),
        (lowest, None, tile),
        (lowest, None, small),
        (lowest, length, small),
    ]
    found: list[Settings] = []
    for kind, tokens, tiled in rungs:
        if kind == "selective" and base.attn == "math":
            continue  # this would keep the output of a fused attention, and the run has none
        if (tokens == _LARGE_PIECE and min(rows * length, tokens // length * length) <= piece) or (
            tokens == length and (rows == 1 or length * 2 > MOST_TOKENS)
        ):
            continue  # this makes the same pieces as the rung before
        changes = {"gradient_checkpointing": kind, "max_tokens_per_piece": tokens, "tiled_mlp": tiled}
        settings = base.with_(**{name: value for name, value in changes.items() if name not in fixed})
        if settings not in found:
            found.append(settings)
    return found


def cost_of(settings: TrainerSettings, config: Mapping[str, object]) -> Cost:
    """Count the recomputed FLOPs and host traffic of one micro-batch, from the model's config.

    A linear layer of ``n`` weights takes ``2 n`` FLOPs per token, causal attention ``2 * heads * head_dim * length``.
    A tile's network is computed again once, in its backward; under a checkpoint that is the recomputation itself.
    """
    shape = ModelShape.of(config)
    hidden, layers, heads, width = shape.hidden, shape.layers, shape.heads, shape.head_dim
    kv, inner = shape.kv_heads, shape.intermediate
    length, rows = settings.sequence_length, settings.per_device_train_batch_size
    tokens = rows * length
    network = 2 * 3 * hidden * inner * layers
    linear = network + 2 * (2 * heads + 2 * kv) * width * hidden * layers
    attention = 2 * heads * width * length * layers
    kind = settings.checkpointing
    again = {"none": network if settings.tiled_mlp else 0, "selective": linear}.get(kind, linear + attention)
    piece = _piece_tokens(settings)
    pieces = -(-tokens // piece)
    tiles = pieces * -(-min(piece, tokens) // settings.tiled_mlp) if settings.tiled_mlp else pieces
    away = 2 * 2 * tokens * hidden * (layers - 1) if kind == "offloaded" else 0
    return Cost(tokens * again, away, pieces, tiles)


def _piece_tokens(settings: TrainerSettings) -> int:
    """Return the tokens of the largest piece of a micro-batch whose sequences have their full length."""
    length = settings.sequence_length
    rows = max((settings.max_tokens_per_piece or MOST_TOKENS) // length, 1)
    return min(rows, settings.per_device_train_batch_size) * length


def choose(
    base: Settings,
    budget_bytes: int,
    run: Rows,
    fixed: Collection[str] = (),
    *,
    together: int = 1,
    tell: Callable[[Tried], None] | None = None,
) -> Choice:
    """Choose the fastest settings that fit.

    Args:
        base: the run, with ``recipe="lean"``.
        budget_bytes: the device's memory; reserved memory, memory outside torch and a margin must fit in it.
        run: simulates settings and returns their rows (:func:`memprof.simulate.evaluate.run_row`), judged on a GPU of
            ``budget_bytes`` where ``base.device`` is ``cuda``.
        fixed: names of settings that must not change.
        together: how many settings ``run`` simulates side by side.
        tell: called after every simulation.

    Raises:
        DoesNotFit: no settings fit; the message names the smallest need.
        UsageError: the recipe is not the lean trainer's.
    """
    if not base.lean:
        raise UsageError("--memory-budget chooses settings of the lean trainer: add --recipe lean.")
    if ModelShape.of(find_config(base.model)).experts:
        fixed = {*fixed, "tiled_mlp"}  # tiles refuse a mixture of experts
    if base.checkpointing == "auto":  # the kind of checkpointing is open
        fixed = set(fixed) - {"gradient_checkpointing"}
    return _Search(base, budget_bytes, run, fixed, together, tell).found()


_Place = tuple[int, int]


class _Search:
    """Search both ladders; a place is (training's rung, generation's rung), counted from the fastest."""

    def __init__(
        self,
        base: Settings,
        budget: int,
        run: Rows,
        fixed: Collection[str],
        together: int,
        tell: Callable[[Tried], None] | None,
    ) -> None:
        self._budget, self._run = budget, run
        self._together, self._tell = max(1, together), tell
        self._training = ladder(base, fixed)
        self._generation = _generation_batches(base, fixed)
        self._rows: dict[_Place, SimulatedRow] = {}
        self._first, self._last = self._fastest(), (len(self._training) - 1, len(self._generation) - 1)
        # The fastest, both ladders' ends, and a bisection of each.
        rungs = [last - first for first, last in zip(self._first, self._last, strict=True)]
        self._most = 1 + sum(1 for n in rungs if n) + sum(n.bit_length() for n in rungs)

    def found(self) -> Choice:
        """Return the fastest settings that fit.

        Raises:
            DoesNotFit: not even the slowest rungs fit.
        """
        first, last = self._first, self._last
        leanest = (last[0], first[1])
        # Where simulations run side by side, the ends cost no time of their own.
        self._simulate([first, *([leanest, last][: self._together - 1])])
        if self._fits(first):
            return self._choice(first)
        too_high = _held_too_high(self._rows[first], self._budget)
        generates = Phase.GENERATE
        batch = first[1]
        # Choose the generation batch first, with training at its leanest: a smaller batch slows generation most.
        if (generates in too_high and leanest not in self._rows) or not self._tried(leanest):
            if not self._tried(last):
                raise DoesNotFit(self._refusal(last))
            _, batch = self._search([(last[0], i) for i in range(first[1], last[1] + 1)], True)
        rungs = [(i, batch) for i in range(first[0], last[0] + 1)]
        return self._choice(self._search(rungs, bool(too_high - {generates})))

    def _fastest(self) -> _Place:
        """Return the first place of both ladders that arithmetic does not rule out."""
        config = find_config(self._training[0].model)

        def possible(settings: Settings) -> tuple[bool, bool]:
            least = least_bytes(settings, config, _piece_tokens(settings))
            training, generation = (fits(n, self._budget) for n in least)
            return training, generation

        training = [i for i, rung in enumerate(self._training) if possible(rung)[0]]
        generation = [
            i for i, n in enumerate(self._generation) if possible(self._training[0].with_(generation_batch=n))[1]
        ]
        return (
            training[0] if training else len(self._training) - 1,
            generation[0] if generation else len(self._generation) - 1,
        )

    def _tried(self, place: _Place) -> bool:
        self._simulate([place])
        return self._fits(place)

    def _search(self, places: list[_Place], not_the_first: bool) -> _Place:
        """Find the first of ``places`` that fits, in as many parts as run side by side; the last is known to fit."""
        low, high = int(not_the_first and len(places) > 1), len(places) - 1
        while low < high:
            parts = min(self._together, high - low) + 1
            middles = sorted({low + (high - low) * i // parts for i in range(1, parts)} or {low})
            self._simulate([places[i] for i in middles])
            for middle in middles:
                if self._fits(places[middle]):
                    high = middle
                    break
                low = middle + 1
        return places[high]

    def _simulate(self, places: list[_Place]) -> None:
        new = [place for place in dict.fromkeys(places) if place not in self._rows]
        if not new:
            return
        began = time.monotonic()
        rows = self._run([self._settings(place) for place in new])
        for place, row in zip(new, rows, strict=True):
            self._rows[place] = row
            if self._tell is not None:
                seconds, done = time.monotonic() - began, len(self._rows)
                told = row.needed_bytes, self._fits(place), seconds, done, max(self._most, done)
                self._tell(Tried(self._settings(place), *told))

    def _settings(self, place: _Place) -> Settings:
        return self._training[place[0]].with_(generation_batch=self._generation[place[1]])

    def _fits(self, place: _Place) -> bool:
        row = self._rows[place]
        if row.verdict is not None:
            return bool(row.fits)
        return fits(row.peak_bytes, self._budget)

    def _choice(self, place: tuple[int, int]) -> Choice:
        below = tuple(self._settings((i, place[1])) for i in range(place[0] + 1, len(self._training)))
        return Choice(self._settings(place), self._rows[place], self._budget, below, len(self._rows))

    def _refusal(self, last: tuple[int, int]) -> str:
        least = min(row.needed_bytes for row in self._rows.values())
        row = self._rows[last]
        kept = words_of(kept_for(self._settings(last).known))
        return (
            f"Nothing fits a memory budget of {format_gib(self._budget)} GiB: the leanest settings "
            f"({describe(self._settings(last))}) need {format_gib(least)} GiB, highest in "
            f"{row.peak_phase} ({kept}). Shorter sequences, a 4-bit base or a smaller model "
            "would need less."
        )


def _generation_batches(base: Settings, fixed: Collection[str]) -> list[int | None]:
    """List batches for generation: all sequences at once, half of them, and so on down to one."""
    if base.generation != "hf" or "generation_batch" in fixed:
        return [base.generation_batch]
    sizes = [base.per_device_train_batch_size * base.generation_steps]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return list(sizes)


def _held_too_high(row: SimulatedRow, budget: int) -> set[Phase]:
    """Name the phases that hold more than there is, whatever the allocator keeps cached."""
    verdict = row.verdict
    if verdict is None:
        return {phase for phase, peak in row.phases.items() if not fits(peak, budget)}
    room = verdict.limit_bytes - verdict.non_torch_bytes
    return {need.phase for need in verdict.phases if need.allocated_bytes > room}


def describe(settings: Settings) -> str:
    """Say the chosen settings in words, by the lean trainer's own names."""
    parts = [f"checkpointing={settings.checkpointing}"]
    for name in ("max_tokens_per_piece", "tiled_mlp", "generation_batch"):
        if (value := getattr(settings, name)) is not None:
            parts.append(f"{name}={value}")
    return ", ".join(parts)


def sentences(choice: Choice) -> str:
    """Tell a person the choice, what it costs, the expected peak by category."""
    row, settings = choice.row, choice.settings
    cost = cost_of(settings, find_config(settings.model))
    large = {n: size for n, size in row.categories.items() if size >= row.peak_bytes / 200}
    named = [(CATEGORY_LABELS[n], size) for n, size in sorted(large.items(), key=lambda pair: -pair[1])]
    rest = row.peak_bytes - sum(large.values())
    held = [f"  {label:<24}{format_gib(size):>9} GiB" for label, size in [*named, ("The rest", rest)]]
    what = f"{cost.recomputed_flops / 1e12:.3g} TFLOP recomputed, {format_gib(cost.host_bytes)} GiB moved to the host"
    return "\n".join(
        [
            f"Memory budget {format_gib(choice.budget_bytes)} GiB: {describe(settings)}",
            f"Cost of a micro-batch: {what} and back, {cost.pieces} pieces. Settings simulated: {choice.simulated}.",
            f"Expected: {format_gib(choice.needed_bytes)} GiB needed, {format_gib(row.peak_bytes)} GiB allocated at "
            f"the peak (in {row.peak_phase}):",
            *held,
        ]
    )

"""Replay one simulation's allocations as they might have been, to say how far its reserved memory can be trusted.

What the allocator reserves depends on which block a request finds: 48 MiB more of workspace have moved it by 324 MiB.
So the same allocations go through the allocator's model again, with the workspaces of other cards where only the card's
size is known, with sequences one token shorter (and longer, where nobody gave the prompts' length: else the lengths
given are the longest), and on a card that is full, where cached segments are given back. Nothing is simulated again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memprof.allocator import replay
from memprof.allocator.model import AllocatorOutOfMemory
from memprof.allocator.replay import Program
from memprof.allocator.settings import AllocatorSettings, settings_of
from memprof.config.fits import MARGIN, room_bytes
from memprof.config.gpus import Gpu, workspace_bytes, workspaces_of
from memprof.report.run import KnownSettings
from memprof.report.simulation import Ensemble
from memprof.simulate.shortcut_switches import shortcut
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.analysis.analysis import Analysis

#: What grows with the sequences.
BY_TOKENS = (
    Category.ACTIVATIONS, Category.ACTIVATION_GRADIENTS, Category.LOSS_LOGITS, Category.KV_CACHE, Category.INPUTS,
)  # fmt: skip


class Variant(NamedTuple):
    """Hold a run as it might have been: with this workspace, and sequences that are ``more`` tokens longer."""

    program: Program
    workspace: int
    more: int


def ensemble_of(analysis: Analysis, gpu: Gpu) -> Ensemble:
    """Run the variants of a simulated run on a card.

    A run of the lengths that were asked for must leave the margin free, whatever its workspaces; one of other
    lengths need only live.
    """
    settings = allocator_of(analysis, gpu)
    reserved, failed, flushes = [], 0, False
    for variant in variants_of(analysis, gpu):
        room = _room_of(variant, analysis, gpu)
        reserved.append(reserved_within(variant.program, settings, None))
        if reserved[-1] > room:
            fits = fits_within(variant.program, settings, room)
            failed += not fits
            flushes |= fits
    return Ensemble(
        members=len(reserved), failed=failed, flushes=flushes, lowest_bytes=min(reserved), highest_bytes=max(reserved)
    )


def all_fit(analysis: Analysis, gpu: Gpu, program: Program, lengths: tuple[int, int]) -> bool:
    """Tell whether every variant of a program that was made of a simulated run's fits a card.

    ``lengths``: tokens of its prompts and of its completions.
    """
    settings = allocator_of(analysis, gpu)
    return all(
        fits_within(variant.program, settings, _room_of(variant, analysis, gpu))
        for variant in variants_of(analysis, gpu, program, lengths)
    )


def _room_of(variant: Variant, analysis: Analysis, gpu: Gpu) -> int:
    return gpu.available_bytes if variant.more else room_bytes(gpu, margin_kept(analysis))


def margin_kept(analysis: Analysis) -> float:
    """Return the safety margin of this run's verdict: larger where parts of the run were never compared."""
    error = analysis.snapshot.run.expected_error
    return MARGIN if error is None or error.margin is None else error.margin


def allocator_of(analysis: Analysis, gpu: Gpu) -> AllocatorSettings:
    """Return the allocator's settings of a simulated run on a GPU."""
    return settings_of(analysis.snapshot.settings).on_device(gpu.total_bytes)


def reserved_within(program: Program, settings: AllocatorSettings, room: int | None) -> int:
    """Return the most bytes that a program reserves: in the allocator's model in C, where that may be used."""
    reserved: int = (shortcut("native") or replay).reserved_within(program, settings, room)
    return reserved


def fits_within(program: Program, settings: AllocatorSettings, room: int) -> bool:
    """Tell whether a program runs in ``room`` bytes, cached segments given back where they have to be."""
    try:
        reserved_within(program, settings, room)
    except AllocatorOutOfMemory:
        return False
    return True


def variants_of(
    analysis: Analysis, gpu: Gpu, program: Program | None = None, of_lengths: tuple[int, int] | None = None
) -> Iterator[Variant]:
    """Yield the run as it was simulated, and then as it would be with other workspaces and other lengths.

    ``program``: the run's, or one of the same rows whose prompts and completions have ``of_lengths`` tokens.
    """
    config = KnownSettings.of(analysis.snapshot.run.config)
    program = program or analysis.timeline.program()
    prompt, completion = of_lengths or (config.prompt_length or 0, config.completion_length or 0)
    categories = list(Category)
    category = analysis.attribution.category
    own = workspace_bytes(gpu)
    is_workspace = (category == categories.index(Category.WORKSPACE)) & (program.requested == own)
    by_tokens = np.isin(category, [categories.index(name) for name in BY_TOKENS])
    lengths: tuple[int, ...] = (completion, prompt + completion)
    if 4 * completion < prompt:  # so few tokens divide nearly every size, and one more of them is no small change
        lengths = lengths[1:]
    if not completion:  # a script's own trainer, whose lengths are not known
        lengths = ()
    shifts = (0,) if not lengths else (0, 1, -1) if "prompt_length" in config.assumed else (0, -1)
    for workspace in sorted(workspaces_of(gpu), key=lambda size: size != own):
        requested = np.where(is_workspace, workspace, program.requested)
        for more in shifts:
            sizes = _with_length(requested, by_tokens, lengths, more)
            yield Variant(replace(program, requested=sizes), workspace, more)


def _with_length(requested: Any, by_tokens: Any, lengths: tuple[int, ...], more: int) -> Any:
    """Return what is requested where sequences are ``more`` tokens longer; what is no multiple of a length stays."""
    sizes = requested.copy()
    open_rows = by_tokens.copy()
    for length in lengths:
        rows = open_rows & (requested % length == 0)
        sizes[rows] = requested[rows] // length * (length + more)
        open_rows &= ~rows
    return sizes

"""Learn what a generation's steps do from a few of them, and play all of it on the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memprof.compat import transformers as transformers_names
from memprof.config.settings import Settings, TrainerSettings
from memprof.grpo.techniques.apply import TILE_TOKENS
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.shortcuts.decoding.decoding import AROUND, Decoding, DecodingLog, Player, learn
from memprof.simulate.shortcuts.decoding.identical_steps import Jumps, PatternMismatch
from memprof.simulate.trainer.kv_caches import LayerShape, filled_cache, quantised_every, shapes_of
from memprof.simulate.trainer.rollout import some_tokens

__all__ = ["PatternMismatch", "Player", "learned", "pieces_to_execute"]

# Tokens executed after the prompt and at the end, where the steps between them are repeated from logs.
_FIRST_TOKENS, _LAST_TOKENS = 3, 4
_SHORTEST_PERIOD = 16
_MANY_TILES = 4


def learned(trainer: Any, model: Any, batch: int, settings: Settings, recorder: FakeRecorder) -> Decoding:
    if settings.divided:
        raise PatternMismatch(f"the model is divided by {settings.sharding}")
    jumps, windows = _jumps(model, trainer, settings), _windows(model, settings)
    shapes: list[LayerShape] = []
    if jumps is not None or (not windows and _tiles(settings)):
        shapes = _layer_shapes(trainer, model, batch, settings, recorder)
    runs: list[DecodingLog] = []
    for prompt, tokens in pieces_to_execute(settings, windows, jumps):
        with recorder.blocks.rehearsing() as rehearsal, recorder.work.apart() as work:
            cache = None
            if runs and (jumps is not None or (shapes and all(s.keys and s.state is None for s in shapes))):
                plain = (prompt - 1 - settings.prompt_length) % jumps.length if jumps is not None else None
                cache = filled_cache(model, shapes, prompt - 1, trainer.generation_config, plain)
            longest = settings.sequence_length - prompt
            some_tokens(trainer, model, batch, prompt, longest, cache, count=tokens, whole=True)
            del cache
        runs.append(DecodingLog(prompt, rehearsal, work))
    return learn(runs, settings.completion_length, jumps)


def _jumps(model: Any, trainer: Any, settings: TrainerSettings) -> Jumps | None:
    """Number the tokens after which a quantised cache quantises all of itself; None where it never does."""
    every = quantised_every(model, trainer.generation_config)
    if every is None:
        return None
    if every < _SHORTEST_PERIOD:
        raise PatternMismatch(f"the cache is quantised anew every {every} tokens")
    return Jumps(every + 1, every, (settings.completion_length - 1) // every)


def _tiles(settings: Settings) -> bool:
    """Tell whether a prompt as long as the sequence goes through MLPs in many tiles, each of which is executed: filling
    a cache takes a fraction of that."""
    plain = settings.generation == "hf" and settings.cache_implementation == "dynamic"
    return plain and settings.lean and settings.sequence_length > _MANY_TILES * TILE_TOKENS


def _layer_shapes(
    trainer: Any, model: Any, batch: int, settings: TrainerSettings, recorder: FakeRecorder
) -> list[LayerShape]:
    """Return what a prompt's forward puts into the cache."""
    with recorder.blocks.rehearsing(), recorder.work.apart():
        cache = some_tokens(trainer, model, batch, settings.prompt_length, settings.completion_length, count=1)
        return shapes_of(cache)


def pieces_to_execute(
    settings: TrainerSettings, windows: Sequence[int], jumps: Jumps | None = None
) -> list[tuple[int, int]]:
    """List which tokens are executed, as prompts and how many tokens after each: the first ones, those around the
    length at which a window is full and around the first and the last jump, the last ones."""
    first, last = settings.prompt_length, settings.sequence_length
    wanted = [(first, first + _FIRST_TOKENS)]
    wanted += [(window - 4, window + 3) for window in windows if first < window + 3 and window - 4 < last]
    around = (first + AROUND[0] - 3, first + AROUND[-1])
    wanted += [(jump + around[0], jump + around[1]) for jump in _jumps_to_execute(jumps, last - first)]
    wanted.append((last - _LAST_TOKENS, last))
    found: list[tuple[int, int]] = []
    for begin, end in wanted:
        begin, end = max(begin, first), min(end, last)
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return [(begin, end - begin) for begin, end in found]


def _jumps_to_execute(jumps: Jumps | None, tokens: int) -> list[int]:
    """Choose the first jump and the last one after which enough tokens come, and those after it."""
    numbers = list(jumps.numbers) if jumps is not None else []
    whole = [number for number in numbers if number + AROUND[-1] <= tokens]
    return sorted({*whole[:1], *whole[-1:], *numbers[len(whole) :]})


def _windows(model: Any, settings: Settings) -> list[int]:
    """List the lengths at which a layer's cache stops growing."""
    from transformers import DynamicCache

    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return sorted({w for layer in layers if (w := transformers_names.CACHE_WINDOW.of(layer)) is not None})

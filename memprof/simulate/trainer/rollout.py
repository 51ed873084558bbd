"""Make up the tokens of completions, and execute generation where its memory is highest."""

from __future__ import annotations

import copy
import functools
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from memprof.compat import trl as trl_names
from memprof.compat.patching import bind
from memprof.config.layer_caches import STATE_ONLY
from memprof.config.settings import Settings
from memprof.simulate.generation.decode_work import DecodeWork
from memprof.simulate.generation.lean_generation import generate_lean
from memprof.simulate.generation.policy import unwrapped_policy
from memprof.simulate.generation.vllm_engine import ColocatedEngine
from memprof.simulate.recorder.recorder import FakeRecorder
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.shortcut_switches import shortcut
from memprof.simulate.trainer.kv_caches import filled_cache, shapes_of

# Tokens generated at the end: the last one's step runs while the sampling of the one before is still held.
_DECODED = 2
_MANY_TOKENS = 2048  # from so many on, the warm-up step's generation is not repeated token by token
_NOT_REPLAYED = "generation was executed at its first and last tokens only"
_wanted: ContextVar[int] = ContextVar("wanted", default=_DECODED)


def fake_rollout(trainer: Any, settings: Settings, session: FakeSession | None = None) -> None:
    """Make a trainer generate completions of the settings' length, without tokenizer, text or sampling's outcome.

    Without a session nothing is generated, and none is recorded.

    Raises:
        UsageError: the settings ask for vLLM, and not on which card.
    """
    prompt, completion = settings.prompt_length, settings.completion_length
    engine = None
    if settings.generation == "vllm" and session is not None:
        engine = ColocatedEngine(settings, session, trainer.model.config)
        setattr(trainer, trl_names.USE_VLLM.name, True)  # the loss is corrected for what the engine sampled with

    def tokenize(self: Any, prompts: list[Any]) -> Any:
        return [[0] * prompt for _ in prompts], None, {}

    def single_turn(self: Any, prompt_ids: list[Any], *_: Any, **__: Any) -> Any:
        if settings.generation == "hf" and session is not None:
            in_passes = partial(_generate, self, settings, session)
            if settings.lean:
                generate_lean(self, settings, session, len(prompt_ids), in_passes)
            else:
                in_passes(len(prompt_ids), 1)
        logprobs = None
        if engine is not None:
            engine.generate(self, len(prompt_ids))
            logprobs = [[0.0] * completion for _ in prompt_ids]  # what the engine sampled with
        if settings.lean and settings.device == "cuda" and session is not None:
            session.fake_recorder.allocator.empty_cache()  # type: ignore[union-attr]  # as the lean trainer does
        made = [[0] * completion for _ in prompt_ids]
        return made if settings.trainer == "rloo" else (made, logprobs)

    bind(trainer, trl_names.TOKENIZE_PROMPTS, tokenize)
    bind(trainer, trl_names.GENERATE_SINGLE_TURN, single_turn)


def _generate(trainer: Any, settings: Settings, session: FakeSession, batch: int, passes: int) -> None:
    """Generate a batch's completions: from what a few tokens' steps do, where these repeat one another.

    The work of the tokens between is counted as that of the first and the last of them, on average; that of all
    ``passes`` as this one's.
    """
    decoding = shortcut("decoding")
    with unwrapped_policy(trainer) as model, _gathered(trainer):
        if decoding is None and session.growth:
            with session.generating():
                length = settings.completion_length
                some_tokens(trainer, model, batch, settings.prompt_length, length, count=length, whole=True)
            return
        work = DecodeWork(session, settings.completion_length, passes)
        steps = _decoding(decoding, trainer, model, batch, settings, session) if decoding is not None else None
        if steps is None:
            _execute_ends(trainer, model, batch, settings, work)
            return
        work.of_runs([run.work for run in steps.runs])
        work.of_jumps(steps.jump_work(), steps.jumps.times if steps.jumps is not None else 0)
        warm = vars(trainer).get("_memprof_generated", False)
        trainer._memprof_generated = True
        whole = session.growth and (warm or steps.repeated < _MANY_TOKENS)
        with session.generating() if whole else nullcontext():
            decoding.Player(session.fake_recorder, steps, whole=whole).play()


def _decoding(decoding: Any, trainer: Any, model: Any, batch: int, settings: Settings, session: FakeSession) -> Any:
    """Learn what generation does, once for every size of batch; None, with a note, where that cannot be learned."""
    known: dict[int, Any] = vars(trainer).setdefault("_memprof_decodings", {})
    if batch not in known:
        try:
            known[batch] = decoding.learned(trainer, model, batch, settings, session.fake_recorder)
        except decoding.PatternMismatch as reason:
            known[batch] = None
            session.notes.append(
                f"{_NOT_REPLAYED} ({reason}): how much memory the allocator reserves because of its growth is not known"
            )
    return known[batch]


def _execute_ends(trainer: Any, model: Any, batch: int, settings: Settings, work: DecodeWork) -> None:
    """Run the prompts' forward, then the step that decodes the last token over a cache of all that went before."""
    asked = settings.prompt_length
    static = settings.cache_implementation == "static"  # the cache is as long as it will be from the start
    # Layers that keep a state hold as much after two tokens as at the end.
    few = settings.completion_length <= _DECODED or model.config.model_type in STATE_ONLY
    with work.first(alone=static or few):
        cache = some_tokens(trainer, model, batch, asked, settings.completion_length if static else _DECODED)
    if static or few:
        return
    shapes = shapes_of(cache)
    del cache
    held = settings.sequence_length - 1 - _DECODED
    cache = filled_cache(model, shapes, held, trainer.generation_config)
    with work.last():
        some_tokens(trainer, model, batch, held + 1, _DECODED, cache)


def _gathered(trainer: Any) -> AbstractContextManager[Any]:
    """Have the whole model on every rank under ZeRO-3, as TRL does to generate (``ds3_gather_for_generation``)."""
    zero = getattr(trainer, "_memprof_zero", None)
    return nullcontext() if zero is None else zero.gathered()


def some_tokens(
    trainer: Any,
    model: Any,
    batch: int,
    tokens: int,
    longest: int,
    cache: Any = None,
    *,
    count: int = _DECODED,
    whole: bool = False,
) -> Any:
    """Generate ``count`` tokens of at most ``longest`` after ``tokens``; return the cache, or what TRL asks for."""
    ids = torch.zeros(batch, tokens, dtype=torch.long, device=trainer.accelerator.device)
    generation = copy.copy(trainer.generation_config)
    generation.max_new_tokens = longest
    generation.return_dict_in_generate = not whole
    if cache is not None:
        generation.cache_implementation = generation.cache_config = None
    wanted = _wanted.set(count)
    try:
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation, past_key_values=cache
        )
    finally:
        _wanted.reset(wanted)
    return out if whole else out.get("past_key_values")


def counted(sample: Any) -> Any:
    """Wrap transformers' sampling so that it makes as many tokens as are wanted."""

    @functools.wraps(sample)
    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._memprof_tokens = _wanted.get()
        return sample(self, *args, **kwargs)

    return limited


def cutting(recorder: FakeRecorder) -> Any:
    """Make what tells whether sampling goes on: a count, since no fake token ever ends a sequence.

    It is asked before every token, where the next part of a rehearsal and of work that is counted apart begins.
    """

    def unfinished(self: Any, *_: Any, **__: Any) -> bool:
        if recorder.blocks.rehearsal is not None:
            recorder.blocks.rehearsal.cut()
        recorder.work.next_part()
        self._memprof_tokens -= 1
        return bool(self._memprof_tokens >= 0)

    return unfinished

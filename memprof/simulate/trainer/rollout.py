"""Completions without values: their tokens are made up, and generation is executed where its memory is highest."""

from __future__ import annotations

import functools
import types
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from memprof.config.settings import Settings
from memprof.errors import UsageError
from memprof.simulate.trainer.kv_caches import filled_cache, shapes_of
from memprof.simulate.trainer.lean import together
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.simulate.recorder.session import FakeSession

__all__ = [
    "ColocatedEngine",
    "counted",
    "fake_rollout",
    "unfinished",
]

class ColocatedEngine:
    """Takes ``vllm_gpu_memory_utilization`` of the card for its weights, graphs and cache; asleep, it takes nothing.

    Raises:
        UsageError: the card is not known.
    """

    def __init__(self, settings: Settings, session: FakeSession | None) -> None:
        total = session.recorder.device().total_bytes if session is not None else None
        if session is None or total is None:
            raise UsageError("--generation vllm takes a share of the card: say which one with --gpu.")
        self._session = session
        self._bytes = int(total * settings.vllm_gpu_memory_utilization)
        self._sleeps = settings.vllm_enable_sleep_mode
        if not self._sleeps:
            self._take()

    def generate(self) -> None:
        """Wake up, generate, and sleep again where that is enabled."""
        if self._sleeps:
            address = self._take()
            self._session.fake_recorder.release(address)

    def _take(self) -> int:
        session = self._session
        return session.fake_recorder.hold(self._bytes, Category.INFERENCE_ENGINE, session.book, "vLLM's share")


def fake_rollout(trainer: Any, settings: Settings, session: FakeSession | None = None) -> None:
    prompt, completion = settings.prompt_length, settings.completion_length
    if settings.generation == "vllm":
        engine = ColocatedEngine(settings, session)
        trainer.use_vllm = True  # the loss is corrected for what the engine sampled with

    def tokenize(self: Any, prompts: list[Any]) -> Any:
        return [[0] * prompt for _ in prompts], None, {}

    def single_turn(self: Any, prompt_ids: list[Any], *_: Any, **__: Any) -> Any:
        if settings.generation == "hf":
            size = together(self, prompt_ids, session) if settings.recipe == "lean" else len(prompt_ids)
            _generate(self, size, settings)
        if settings.recipe == "lean" and settings.device == "cuda" and session is not None:
            session.fake_recorder.allocator.empty_cache()  # type: ignore[union-attr]  # as the lean trainer does
        logprobs = None
        if settings.generation == "vllm":
            engine.generate()
            logprobs = [[0.0] * completion for _ in prompt_ids]  # what the engine sampled with
        return [[0] * completion for _ in prompt_ids], logprobs

    trainer._tokenize_prompts = types.MethodType(tokenize, trainer)
    trainer._generate_single_turn = types.MethodType(single_turn, trainer)


def _generate(trainer: Any, batch: int, settings: Settings) -> None:
    """The prompts' forward, then the step that decodes the last token over a cache of all that went before."""
    from trl.models import unwrap_model_for_generation

    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=False,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        _gathered(trainer),
    ):
        asked = settings.prompt_length
        if settings.cache_implementation == "static":  # the cache is as long as it will be from the first token on
            _some_tokens(trainer, model, batch, asked, settings.completion_length)
            return
        shapes = shapes_of(_some_tokens(trainer, model, batch, asked, _DECODED))
        if settings.completion_length > _DECODED:
            held = settings.sequence_length - 1 - _DECODED
            cache = filled_cache(model, shapes, held, settings)
            _some_tokens(trainer, model, batch, held + 1, _DECODED, cache)


def _gathered(trainer: Any) -> AbstractContextManager[Any]:
    """Under ZeRO-3 TRL has the whole model on every rank while it generates (``ds3_gather_for_generation``)."""
    zero = getattr(trainer, "_memprof_zero", None)
    return nullcontext() if zero is None else zero.gathered()


# Tokens generated at the end: the last one's step runs while the sampling of the one before is still held.
_DECODED = 2


def _some_tokens(trainer: Any, model: Any, batch: int, tokens: int, longest: int, cache: Any = None) -> Any:
    """Generate :data:`_DECODED` tokens of at most ``longest`` after ``tokens``; returns the cache."""
    import copy

    ids = torch.zeros(batch, tokens, dtype=torch.long, device=trainer.accelerator.device)
    generation = copy.copy(trainer.generation_config)
    generation.max_new_tokens = longest
    generation.return_dict_in_generate = True
    if cache is not None:
        generation.cache_implementation = generation.cache_config = None
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation, past_key_values=cache
    )
    return out.past_key_values


def counted(sample: Any) -> Any:
    @functools.wraps(sample)
    def limited(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._memprof_tokens = _DECODED
        return sample(self, *args, **kwargs)

    return limited


def unfinished(self: Any, *_: Any, **__: Any) -> bool:
    """Whether sampling goes on: a count, since no fake token ever ends a sequence."""
    self._memprof_tokens -= 1
    return bool(self._memprof_tokens >= 0)

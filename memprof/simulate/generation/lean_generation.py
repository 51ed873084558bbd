"""Generate as the lean trainer decides to: its own code chooses, and its rolling batch runs on fake tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memprof.compat.patching import replacing
from memprof.config.settings import Settings, ShardingSettings, TrainerSettings
from memprof.simulate.generation.policy import unwrapped_policy
from memprof.simulate.generation.simulated_batch import GenerationWork, SimulatedBatch
from memprof.simulate.recorder.session import FakeSession

if TYPE_CHECKING:
    from memprof.grpo.paged.schedule import GenerationCounts


def generate_lean(
    trainer: Any, settings: Settings, session: FakeSession, count: int, in_passes: Callable[[int, int], None]
) -> None:
    """Run what a generation of this process's ``count`` sequences runs; a note in the session says how.

    ``in_passes`` runs ``generate`` for so many sequences together, as one of so many passes.
    """
    step = _as_on_ranks(trainer._step_context(), settings)
    prompts = [[place // settings.num_generations] * settings.prompt_length for place in range(count)]
    lean = trainer.lean_generation
    passes: list[int] = []

    def generate(some: list[list[int]]) -> Any:
        if lean.rolling:
            _roll(trainer, settings, session, some)
        else:
            if not passes:  # the others are like the first
                in_passes(len(some), math.ceil(count / len(some)))
            passes.append(len(some))
        return [[0] * settings.completion_length for _ in some], None

    lean.run(step, prompts, generate, trainer.state.stateful_callbacks)
    if len(passes) > 1 and settings.generation_batch is None:
        _note_how(session, f"{_BATCH}{passes[0]} of {count} sequences generate together, by the GPU's free memory")


def _as_on_ranks(step: Any, settings: ShardingSettings) -> Any:
    """Say that ranks run their forwards together where the model is divided among them: this process is one of them."""
    from memprof.grpo.step.ranks import RankGroup

    class Alike(RankGroup):
        def least(self, size: int) -> int:
            return size

    divided = settings.divided
    return replace(step, ranks=Alike(step.accelerator, True)) if divided else step


def _roll(trainer: Any, settings: TrainerSettings, session: FakeSession, prompts: list[list[int]]) -> GenerationCounts:
    """Let transformers' ``generate`` prepare and the trainer's rolling batch decode, both on fake tensors; return what
    it ran."""
    from memprof.grpo.generation import rolling_words
    from memprof.grpo.paged import sampling, transformers_loop

    known: dict[Any, GenerationWork] = vars(trainer).setdefault("_memprof_rolled", {})
    made: list[SimulatedBatch] = []

    def batch(*given: Any) -> SimulatedBatch:
        made.append(SimulatedBatch(*given, session=session, known=known))
        return made[-1]

    with (
        unwrapped_policy(trainer) as model,
        replacing(
            (transformers_loop, "prompts_of", lambda *_: prompts),
            (transformers_loop, "RollingBatch", batch),
            (sampling, "host_draws", partial(_host_draws, session, sampling.host_draws)),
        ),
    ):
        ids = torch.zeros(len(prompts), settings.prompt_length, dtype=torch.long, device=trainer.accelerator.device)
        generation = copy.copy(trainer.generation_config)
        generation.max_new_tokens = settings.completion_length
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        words = rolling_words(trainer._step_context().base_model(), len(prompts), made[0].size, made[0].work)
        _note_how(session, f"{_ROLLING}{words}")
    return made[0].work


def _host_draws(session: FakeSession, draw: Callable[[int, int], Any], sequences: int, longest: int) -> Any:
    """Keep the draws off the device."""
    if not session.fake_recorder.cuda:  # a CPU's are where the tensors are
        return draw(sequences, longest)
    with session.fake_recorder.storages.unseen():
        draws = draw(sequences, longest)
    session.fake_recorder.storages.disown(draws)
    return draws


def _note_how(session: FakeSession, words: str) -> None:
    """Replace the note on how sequences are generated: the first generation has no optimizer state yet."""
    session.notes[:] = [*(note for note in session.notes if not note.startswith((_BATCH, _ROLLING))), words]


_BATCH, _ROLLING = "generation_batch: ", "generation: "

"""Changes to a run of the lean trainer, by its own settings: pieces, checkpointing, what generates together."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.advice import effects
from memprof.advice.checkpoints import checkpoint, offload
from memprof.advice.recorded_run import Candidate, Toll
from memprof.config.settings import Settings

__all__ = ["lean_candidates"]

# Tokens of a piece where the trainer is not told (memprof.grpo.step.pieces, which needs torch).
_PIECE = 2048


def lean_candidates(s: Settings) -> Iterator[Candidate]:
    """What takes the place of smaller micro-batches and of transformers' checkpointing."""
    yield from _pieces(s)
    yield from _checkpointing(s)
    if s.generation == "hf":
        yield from _generation(s)


def _pieces(s: Settings) -> Iterator[Candidate]:
    together = min((s.max_tokens_per_piece or _PIECE) // s.sequence_length, s.per_device_train_batch_size)
    if together > 1:
        yield Candidate(
            id="smaller_pieces",
            action=f"Let sequences go through the model one by one instead of {together} at a time",
            setting=f"max_tokens_per_piece={s.sequence_length}",
            costs="The same tokens in more passes: slower where a pass no longer fills the GPU.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"max_tokens_per_piece": s.sequence_length},
            effect=effects.smaller_micro_batch(1 / together),
        )


def _checkpointing(s: Settings) -> Iterator[Candidate]:
    if s.checkpointing == "none":
        yield checkpoint('gradient_checkpointing=True, checkpointing="auto"', "auto")
    if s.checkpointing in ("full", "selective") and s.device != "cpu":
        yield offload('checkpointing="offloaded"')


def _generation(s: Settings) -> Iterator[Candidate]:
    count = s.per_device_train_batch_size * s.generation_steps
    together = min(s.generation_batch or count, count)
    if together > 1:
        half = -(-together // 2)
        yield Candidate(
            id="generated_together",
            action=f"Generate {half} sequence{'s' if half > 1 else ''} together instead of {together}",
            setting=f"generation_batch={half}",
            costs="Slower generation: a decode step reads all weights for fewer tokens. Sampling draws in another "
            "order.",
            exact=True,
            toll=Toll.SLOWER,
            changes={"generation_batch": half},
            effect=effects.generated_together(half / together),
        )

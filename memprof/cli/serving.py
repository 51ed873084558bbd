"""``memprof plan --serve-beside``: the settings of a vLLM that shares the card with the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memprof.errors import UsageError
from memprof.reports.renderers import Answer

if TYPE_CHECKING:
    from memprof.config.settings import Settings


def refuse_without(beside: str | None, max_model_len: int | None, max_num_seqs: int | None) -> None:
    """Refuse the engine's settings where no engine is planned.

    Raises:
        UsageError: one was given without ``--serve-beside``.
    """
    if beside is None and (max_model_len, max_num_seqs) != (None, None):
        raise UsageError("--max-model-len and --max-num-seqs are the engine's: add --serve-beside SIZE.")


def serving_answer(
    settings: Settings, gpu: str, beside: str, max_model_len: int | None, max_num_seqs: int | None
) -> tuple[Answer, bool]:
    """Return the plan, and whether all that was asked for fits.

    Args:
        settings: of the run: the model, and the lengths and sequences to serve by default.
        gpu: the card.
        beside: what the trainer holds, a size.
        max_model_len: tokens of the longest sequence; default: prompt and completion.
        max_num_seqs: sequences at once; default: those of one generation.
    """
    from memprof.config.catalogue import find_config
    from memprof.config.gpus import find_gpu
    from memprof.config.model_shape import ModelShape
    from memprof.plan.serving import plan_serving
    from memprof.units import parse_size

    if beside.strip().isdecimal():
        raise UsageError(f"--serve-beside {beside}: give a unit, such as {beside}GiB.")
    card = find_gpu(gpu)
    plan = plan_serving(
        settings.model,
        ModelShape.of(find_config(settings.model)),
        gpu,
        card.total_bytes,
        parse_size(beside),
        max_model_len or settings.sequence_length,
        max_num_seqs or settings.per_device_train_batch_size * settings.generation_steps,
    )
    data: dict[str, Any] = plan.to_dict()
    return Answer("serving", data, lambda: data), plan.fits

"""Unwrap a trainer's policy for generation, as TRL does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memprof.compat import trl as trl_names


@contextmanager
def unwrapped_policy(trainer: Any) -> Iterator[Any]:
    """Yield the policy that generates, without its wrappers and without gradients."""
    with (
        trl_names.UNWRAPPED.get()(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=False,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
    ):
        yield model

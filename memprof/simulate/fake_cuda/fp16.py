"""Train in fp16 on fake tensors, as on CUDA: under autocast to float16, with a loss scaler that finds no infinity."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from memprof.compat import accelerate as accelerate_names
from memprof.compat import patching
from memprof.compat import torch as torch_names
from memprof.compat import transformers as transformers_names


@contextlib.contextmanager
def losses_scaled() -> Iterator[None]:
    """Let accelerate scale losses for fp16, while open; where it sees a CPU, and fake tensors seem to be on one, it
    would compute in float32."""
    make_accelerator: Any = transformers_names.MAKE_ACCELERATOR.get()

    @functools.wraps(make_accelerator)
    def made(self: Any) -> None:
        make_accelerator(self)
        if self.accelerator.mixed_precision == "fp16":
            setattr(self.accelerator, accelerate_names.NATIVE_AMP.name, True)
            setattr(self.accelerator, accelerate_names.SCALER.name, torch.amp.GradScaler("cpu"))

    step_if_finite: Any = torch_names.STEP_IF_FINITE.get()

    def steps(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        for found in optimizer_state["found_inf_per_device"].values():
            found._memprof_scalar = 0.0
        return step_if_finite(self, optimizer, optimizer_state, *args, **kwargs)

    with patching((transformers_names.MAKE_ACCELERATOR, made), (torch_names.STEP_IF_FINITE, steps)):
        yield

"""Choose the lean trainer's settings for a ``memory_budget`` by simulation; correct them once after the first step.

The run is simulated in another process (:mod:`memprof.plan.subprocess_runner`), so that nothing of it, random numbers
included, is touched here. Rank 0 chooses for all.
"""

from __future__ import annotations

import math
import time
import weakref
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from memprof.compat.accelerate import BROADCAST
from memprof.compat.transformers import ATTENTION_KIND, MODEL_NAME
from memprof.config.from_recording import Likeness, place_model
from memprof.config.from_trainer import from_trainer
from memprof.config.gpus import Gpu, capacity_bytes
from memprof.config.settings import Settings
from memprof.errors import MemprofError, UsageError
from memprof.grpo.once_log import OnceLog
from memprof.grpo.step.context import base_model_of
from memprof.grpo.techniques.apply import Techniques
from memprof.plan.budget_search import CHOSEN, Choice, Tried, choose, describe, sentences
from memprof.plan.cache import cache_folder
from memprof.recording.phases import ACTIVE
from memprof.recording.run_facts import plain_config
from memprof.units import format_gib
from memprof.vocabulary import Phase

_LOOKED_AT = 3  # steps within which a recording may begin


def keep_within_budget(trainer: Any, techniques: Techniques, log: OnceLog) -> None:
    """Put the fastest settings that fit ``args.memory_budget`` into ``trainer.args``, and watch the first step.

    Raises:
        UsageError: nothing fits (the smallest need is named), or the run cannot be simulated.
    """
    total = budget_bytes(trainer.args.memory_budget, trainer.accelerator.device)
    answer: list[Any] = [None]
    if trainer.accelerator.is_main_process:
        try:
            answer = [_chosen(trainer, total)]
        except MemprofError as error:
            answer = [str(error)]
    if trainer.accelerator.num_processes > 1:
        BROADCAST.get()(answer)
    if isinstance(answer[0], str):
        raise UsageError(answer[0])
    choice, notes = answer[0]
    _apply(trainer, choice.settings)
    trainer.add_callback(_FirstStep(trainer, choice, techniques, log))
    if trainer.accelerator.is_main_process:
        _say("\n".join([sentences(choice), *(f"  ({note})" for note in notes)]))


def budget_bytes(budget: str, device: torch.device) -> int:
    """Return the bytes of ``"24GB"`` or ``"4090"``, or with ``"auto"`` all the device has; UsageError for what is no
    size, and for ``"auto"`` on a device whose memory is the host's."""
    if str(budget).strip().lower() != "auto":
        return capacity_bytes(str(budget))
    if device.type != "cuda":
        raise UsageError("memory_budget='auto' is the GPU's memory, and this run has none: give a size such as '24GB'.")
    return int(torch.cuda.get_device_properties(device).total_memory)


def _chosen(trainer: Any, total: int) -> tuple[Choice, list[str]]:
    from memprof.plan.subprocess_runner import runner

    settings, notes = settings_of(trainer)
    fixed = [name for name in CHOSEN if _is_fixed(trainer.args, name)]
    card, where = card_of(trainer.accelerator.device, total), trainer.args.memory_budget_executor
    with runner(card, executor=where) as processes:
        _say(
            f"choosing settings for {format_gib(total)} GiB by simulation, {processes.workers} side by side. Each "
            "takes seconds for a small model, about a minute for 8B at 20,000 tokens; results are cached for the next "
            "start."
        )
        began = time.monotonic()
        together = processes.workers
        choice = choose(
            settings, total, processes.run, fixed, together=together, tell=partial(_say_tried, together=together)
        )
        new, kept = processes.executed, choice.simulated - processes.executed
        notes.append(f"{new} simulated in {time.monotonic() - began:.0f} s, {kept} cached from an earlier start")
        return choice, notes


def card_of(device: torch.device, total: int) -> Gpu | None:
    """Return the card a run is on, with ``total`` bytes; None where it is on no CUDA device."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    return Gpu(card.name, total, (card.major, card.minor), multiprocessors=card.multi_processor_count)


def _say(text: str) -> None:
    print(f"lean trainer: {text}", flush=True)


def _say_tried(tried: Tried, *, together: int) -> None:
    """Print what one simulation found, and how long the search may still take with ``together`` side by side."""
    verdict = "fits" if tried.fits else "does not fit"
    left = math.ceil((tried.most - tried.done) / together) * tried.seconds
    _say(
        f"{tried.done} of at most {tried.most}: {describe(tried.settings)} needs {format_gib(tried.needed_bytes)} GiB, "
        f"{verdict} ({tried.seconds:.0f} s; at most about {left:.0f} s more)."
    )


def _is_fixed(args: Any, name: str) -> bool:
    return bool(args.checkpointing != "auto" if name == "gradient_checkpointing" else getattr(args, name) is not None)


def settings_of(trainer: Any) -> tuple[Settings, list[str]]:
    """Return the run a trainer will make, as it can be simulated, and in sentences what was assumed.

    Raises:
        UsageError: a combination that cannot be simulated.
        InputError: the model's config cannot be kept where the other process reads it.
    """
    notes: list[str] = []
    base = base_model_of(trainer.accelerator, trainer.model)
    name, attention = MODEL_NAME.of(base.config) or "", ATTENTION_KIND.of(base.config)
    settings = from_trainer(trainer, base, notes, name=name, attention=attention)
    values = plain_config(base.config) or {}
    return place_model(Likeness(settings, values, ()), cache_folder().parent / "models"), notes


def _apply(trainer: Any, settings: Settings) -> None:
    args = trainer.args
    if args.checkpointing != "mlp":  # which is nobody's choice but the user's
        args.checkpointing = settings.checkpointing
    for name in ("max_tokens_per_piece", "tiled_mlp", "generation_batch"):
        setattr(args, name, getattr(settings, name))


class _FirstStep(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Hold the first measured step's peak against the expected one; over the budget, take the next rung, once."""

    def __init__(self, trainer: Any, choice: Choice, techniques: Techniques, log: OnceLog) -> None:
        self._trainer = weakref.ref(trainer)
        self._choice, self._techniques, self._log = choice, techniques, log
        self._steps = 0
        self._done = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer()
        if not self._done and not ACTIVE and trainer is not None and trainer.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.accelerator.device)  # loading is no part of a step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer()
        if self._done or trainer is None:
            return
        self._steps += 1
        measured = _measured(trainer)
        self._done = measured > 0 or self._steps >= _LOOKED_AT
        if measured:
            self._compare(trainer, measured)

    def _compare(self, trainer: Any, measured: int) -> None:
        choice, expected = self._choice, self._choice.row.peak_bytes
        seen = f"measured peak {format_gib(measured)} GiB, expected {format_gib(expected)} GiB"
        if choice.needed_bytes + measured - expected <= choice.budget_bytes:
            self._log.say(f"memory budget met: {seen}")
            return
        leaner = _next(choice)
        if leaner is None:
            self._log.warn(f"over the memory budget: {seen}; there is nothing leaner to change to")
            return
        _apply(trainer, leaner)
        self._techniques.apply()
        self._log.warn(f"over the memory budget: {seen}; changed to {describe(leaner)}")


def _next(choice: Choice) -> Settings | None:
    """Return the next rung of whichever ladder holds the peak."""
    batch = choice.settings.generation_batch
    if choice.row.peak_phase == Phase.GENERATE and batch is not None and batch > 1:
        return choice.settings.with_(generation_batch=-(-batch // 2))
    return choice.slower[0] if choice.slower else None


def _measured(trainer: Any) -> int:
    """Return the highest allocated bytes of the step on any rank; 0 where nothing measures them."""
    device = trainer.accelerator.device
    peak = max((session.peak_of_step() for session in ACTIVE), default=0)
    if not peak and device.type == "cuda":
        peak = int(torch.cuda.max_memory_allocated(device))
    if trainer.accelerator.num_processes > 1:
        peak = int(trainer.accelerator.gather(torch.tensor([peak], device=device)).max())
    return peak

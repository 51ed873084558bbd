"""Mark the phases of transformers' and TRL's trainers: a table says which of their methods is which phase.

Phases nest, and the innermost counts. What lies between them (tokenising, padding, advantages, logging) is ``other``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memprof.compat import accelerate as accelerate_names
from memprof.compat import peft as peft_names
from memprof.compat import transformers as hf_names
from memprof.compat import trl as trl_names
from memprof.foreign import Args, Kwargs
from memprof.recording.guard import Enter, Leave, MethodPatcher
from memprof.recording.phases import PhaseInterval
from memprof.recording.session import Session
from memprof.recording.system.inference_engine import engine_of
from memprof.vocabulary import Phase

# Method of the trainer -> phase. Methods a trainer does not have are skipped.
_METHODS = (
    (hf_names.LOSS, Phase.FORWARD),
    (trl_names.SCORE_REWARDS, Phase.REWARD),
    (trl_names.SWIFT_GENERATE, Phase.GENERATE),
    (trl_names.SWIFT_REWARDS, Phase.REWARD),
    (hf_names.EVALUATE, Phase.EVALUATE),
    (hf_names.PREDICT, Phase.EVALUATE),
    (hf_names.SAVE_CHECKPOINT, Phase.SAVE),
    (hf_names.SAVE, Phase.SAVE),
)
# Where older TRL keeps what generates: the policy, a vLLM engine in this process, a client of one elsewhere.
_GENERATORS = ("model", "llm", "vllm_client")
# Methods wrapped only to hear of exceptions that end the run.
_WATCHED = (
    hf_names.EPOCH,
    hf_names.FINALIZE,
    hf_names.INNER_EVALUATE,
    hf_names.TRAINING_STEP,
    hf_names.LOG_SAVE_EVALUATE,
)
# Before transformers 5 the whole loop is one method, entered before a callback hears of it: what is watched are the
# attribute of the trainer and the method of it through which the loop's exceptions come.
_LOOP_PARTS = (("callback_handler", "call_event"), ("accelerator", "clip_grad_norm_"), ("optimizer", "step"))
_SLEEP_METHODS = (("sleep", Phase.SLEEP), ("wake_up", Phase.WAKE))


class TrainerPhases:
    """Mark phases in the session that runs (``current`` is None between recordings)."""

    def __init__(self, trainer: Any, seams: MethodPatcher) -> None:
        self.current: Session | None = None
        self._trainer = trainer
        self._optimizer_step: PhaseInterval | None = None
        self._seams = seams
        self._engine: Any = None  # DeepSpeed's, whose step is wrapped
        self._watch_for_errors(seams)
        for method, phase in _METHODS:
            self._wrap(trainer, method, self._entering(phase), self._leaving)
        # Log-probs outside the loss: the reference's or the old policy's. Older TRL has another name for them.
        for name in trl_names.LOGPS_OUTSIDE_LOSS.names:
            self._wrap(trainer, name, self._enter_logps, self._leaving)
        self._lengths_by_mask = trl_names.GENERATE_PHASE.of(trainer) is None
        self._wrap_generation()
        self._wrap(trainer, trl_names.PREPARE_INPUTS, None, self._take_batch)
        self._wrap(trainer, trl_names.SCORE_COMPLETIONS, None, self._take_generated)
        accelerator = getattr(trainer, "accelerator", None)
        if accelerator is not None:
            self._wrap(accelerator, accelerate_names.BACKWARD, self._enter_backward, self._leave_backward)
        self._wrap_engine()

    def _wrap(self, owner: Any, name: Any, enter: Enter | None, leave: Leave | None) -> None:
        """Wrap a method that is a phase; between recordings, when there is nothing to mark, it is only called."""
        self._seams.wrap(owner, name, enter, leave, lambda: self.current is None)

    def _watch_for_errors(self, seams: MethodPatcher) -> None:
        """Wrap the methods whose exceptions end the run."""
        for method in _WATCHED:
            seams.wrap(self._trainer, method)
        if hf_names.EPOCH.of(self._trainer) is None:
            seams.wrap(self._trainer, "get_batch_samples")
            for attribute, name in _LOOP_PARTS:
                seams.wrap(getattr(self._trainer, attribute, None), name)

    def _wrap_generation(self) -> None:
        trainer, generating = self._trainer, self._entering(Phase.GENERATE)
        self._wrap(trainer, trl_names.GENERATE_PHASE, generating, self._leave_generate)
        # TRL before `_generate`: the method of whatever generates is the only seam, the masks tell the lengths.
        if self._lengths_by_mask and trl_names.SCORE_COMPLETIONS.of(trainer) is not None:
            for generator in _GENERATORS:
                self._wrap(getattr(trainer, generator, None), "generate", generating, self._leaving)

    def end_step(self) -> None:
        """Note that the optimizer has stepped and gradients are cleared."""
        mark, self._optimizer_step = self._optimizer_step, None
        self._leaving(mark)

    def forget(self) -> None:
        """Forget the recording, which ended with whatever was open in it."""
        self._optimizer_step = None
        self.current = None

    def _wrap_engine(self) -> None:
        engine = trl_names.VLLM.of(self._trainer)
        syncing = self._entering(Phase.WEIGHT_SYNC)
        for name in trl_names.SYNC_WEIGHTS.names:  # the trainer's own methods in older TRL
            self._wrap(self._trainer, name, syncing, self._leaving)
            self._wrap(engine, name, syncing, self._leaving)
        self._wrap(engine, trl_names.GENERATE_VLLM, self._entering(Phase.GENERATE), self._leaving)
        model = engine_of(self._trainer)
        if model is not None:
            for name, phase in _SLEEP_METHODS:
                self._wrap(model, name, self._entering(phase), self._leaving)

    def _entering(self, phase: Phase) -> Any:
        def enter(_args: Args, _kwargs: Kwargs) -> PhaseInterval | None:
            return None if self.current is None else self.current.enter_phase(phase.value)

        return enter

    def _leaving(self, mark: PhaseInterval | None, _result: Any = None, _error: BaseException | None = None) -> None:
        if mark is not None and self.current is not None:
            self.current.exit_phase(mark)

    def _leave_generate(
        self, mark: PhaseInterval | None, result: Any = None, error: BaseException | None = None
    ) -> None:
        self._leaving(mark)
        if self.current is not None and error is None and self._trainer.model.training:
            self.current.add_lengths(_lengths_of(result))

    def _enter_backward(self, _args: Args, _kwargs: Kwargs) -> PhaseInterval | None:
        self._wrap_deepspeed()
        return None if self.current is None else self.current.enter_phase(Phase.BACKWARD.value)

    def _wrap_deepspeed(self) -> None:
        """Mark the step that DeepSpeed's engine makes inside backward; the engine is there only once it is prepared."""
        engine = getattr(accelerate_names.DEEPSPEED_ENGINE.of(self._trainer.accelerator), "engine", None)
        if engine is not None and engine is not self._engine:
            self._engine = engine
            self._wrap(engine, "step", self._entering(Phase.OPTIMIZER_STEP), self._leaving)

    def _leave_backward(self, mark: PhaseInterval | None, _result: Any, error: BaseException | None) -> None:
        self._leaving(mark)
        if self.current is None or self._optimizer_step is not None or error is not None:
            return
        # The last backward of an optimizer step is the one that synchronises; clipping and the step come next.
        if self._trainer.accelerator.gradient_state.sync_gradients:
            self._optimizer_step = self.current.enter_phase(Phase.OPTIMIZER_STEP.value)

    def _enter_logps(self, args: Args, kwargs: Kwargs) -> PhaseInterval | None:
        if self.current is None:
            return None
        now = self.current.phases.current
        if now is not None and now.phase == Phase.FORWARD.value:
            return None  # the loss's own log-probs
        model = args[0] if args else kwargs.get("model")
        reference = model is trl_names.REFERENCE.of(self._trainer) or _adapters_off(model)
        phase = Phase.REFERENCE_LOGPROBS if reference else Phase.OLD_LOGPROBS
        return self.current.enter_phase(phase.value)

    def _take_batch(self, token: Any, batch: Any, error: BaseException | None) -> None:
        self._claim_batch(token, batch, error)
        if self.current is not None and self._trainer.model.training:
            self.current.add_tokens(_tokens_in(batch))
            if (shape := _shape_of(batch)) is not None:
                self.current.add_batch(*shape)

    def _take_generated(self, token: Any, batch: Any, error: BaseException | None) -> None:
        self._claim_batch(token, batch, error)
        if self._lengths_by_mask and self.current is not None and self._trainer.model.training:
            self.current.add_lengths(_lengths_masked(batch))

    def _claim_batch(self, _token: Any, batch: Any, _error: BaseException | None) -> None:
        if self.current is None or batch is None:
            return
        self.current.owners.claim_inputs(batch)
        self.current.owners.claim_inputs(trl_names.BUFFERED.of(self._trainer), "rollout")


def _tokens_in(batch: Any) -> int:
    """Return a micro-batch's tokens, padding included; from shapes, so that no device is waited for."""
    if not isinstance(batch, Mapping):
        return 0
    names = ("input_ids",) if "input_ids" in batch else ("prompt_ids", "completion_ids")
    tensors = [batch[name] for name in names if hasattr(batch.get(name), "numel")]
    return sum(int(ids.numel()) for ids in tensors)


def _shape_of(batch: Any) -> tuple[int, int, int] | None:
    """Return sequences, prompt and completion tokens of a micro-batch of GRPO, padding included; rows that are given,
    as SFT's and DPO's are, count as prompts."""
    if not isinstance(batch, Mapping):
        return None
    rows: Any = getattr(batch.get("input_ids"), "shape", ())
    if len(rows) == 2:
        return int(rows[0]), int(rows[1]), 0
    shapes: list[Any] = [getattr(batch.get(name), "shape", ()) for name in ("prompt_ids", "completion_ids")]
    if any(len(shape) != 2 for shape in shapes):
        return None
    return int(shapes[0][0]), int(shapes[0][1]), int(shapes[1][1])


def _lengths_of(generated: Any) -> list[tuple[int, int]]:
    """Return prompt and completion tokens of each sequence, where TRL hands them over as lists of ids; else nothing."""
    if not isinstance(generated, tuple) or len(generated) < 2:
        return []
    prompts, completions = generated[:2]
    if not isinstance(prompts, list) or not isinstance(completions, list) or len(prompts) != len(completions):
        return []
    pairs = zip(prompts, completions, strict=True)
    return [(len(p), len(c)) for p, c in pairs if isinstance(p, list) and isinstance(c, list)]


def _lengths_masked(batch: Any) -> list[tuple[int, int]]:
    """Return prompt and completion tokens of each sequence of a batch by its masks; [] where it has none.

    Read as lists, not summed as tensors: a recording would see the sums. TRL masks all of a completion that was cut
    off where ``mask_truncated_completions`` is set; that one is as long as the longest.
    """
    masks: list[Any] = [batch.get(name) for name in ("prompt_mask", "completion_mask")] if _shape_of(batch) else [None]
    if any(mask is None for mask in masks):
        return []
    prompts, completions = ([sum(map(int, row)) for row in mask.tolist()] for mask in masks)
    longest = int(masks[1].shape[1])
    return [(p, c or longest) for p, c in zip(prompts, completions, strict=True)]


def _adapters_off(model: Any) -> bool:
    """Tell whether a PEFT model runs as its base, or as the frozen copy TRL keeps under the name ``ref``."""
    if model is None or not hasattr(model, "modules"):
        return False
    for module in model.modules():
        off = peft_names.DISABLED.of(module)
        if isinstance(off, bool):
            active = peft_names.ACTIVE.of(module)
            return off or active == ["ref"]
    return False

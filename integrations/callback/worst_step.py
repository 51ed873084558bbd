"""Run a trainer's step at the worst case its configuration allows: what would run out of memory late does so now.

Every prompt is the longest of the dataset, every completion has its full length, the batch is full, gradients of
earlier micro-batches and the optimizer's state are there.

Functions that score completions are replaced, because they may count, log, or cost money. Reward *models* run, because
they hold memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from memprof.integrations.run_recorder.state_backup import StateBackup, make_optimizer_state

from memprof.compat import require
from memprof.compat.accelerate import SET_SYNC_GRADIENTS
from memprof.compat.transformers import BATCH_SIZE
from memprof.errors import UsageError
from memprof.recording.owners import unwrap_optimizer

# Examples looked at where a dataset has no end or cannot be asked for its length.
_MOST_STREAMED = 1024
_MOST_TOKENIZED = 64
_DATA = ("train_dataset", "eval_dataset", "callback_handler", "model", "model_wrapped", "ref_model", "accelerator")


def refusal(trainer: Any) -> str | None:
    """Say why this trainer's step cannot be rehearsed; None where it can."""
    try:
        require("rehearse")
    except UsageError as error:
        return str(error).rstrip(".")
    engine = str(getattr(trainer.accelerator.distributed_type, "value", trainer.accelerator.distributed_type))
    if engine in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        return f"{engine} keeps weights and optimizer where they cannot be put back"
    if not isinstance(unwrap_optimizer(trainer.optimizer), torch.optim.Optimizer):
        return "its optimizer is not one of torch's kind"
    return None


class WorstStep:
    """Run the step of a ``transformers.Trainer``, TRL's included, at ``on_train_begin``; ``kept`` is what it changes.

    ``dataloader`` is its prepared one of training; ``step_ended`` is called after each optimizer step.
    """

    def __init__(self, trainer: Any, dataloader: Any, step_ended: Callable[[], None]) -> None:
        self._trainer = trainer
        self._step_ended = step_ended
        self._optimizer = unwrap_optimizer(trainer.optimizer)
        self._micro_batches = min(2, int(trainer.args.gradient_accumulation_steps))
        accelerator = trainer.accelerator
        scaler = getattr(accelerator, "scaler", None)
        objects = [trainer, trainer.state, trainer.control, accelerator, accelerator.gradient_state, trainer.optimizer]
        if (settings := getattr(trainer, "generation_config", None)) is not None:
            objects.append(settings)
        wrapped = tuple(n for n, v in vars(trainer).items() if hasattr(v, "__wrapped__"))
        scalers = [scaler] if scaler is not None else []
        self.kept = StateBackup(trainer.model, self._optimizer, objects, scalers, (*_DATA, *wrapped))
        generated = int(getattr(trainer.args, "steps_per_generation", None) or 1)
        self._sequences = int(BATCH_SIZE.of(trainer)) * generated
        example, self._tokens = _longest(trainer, dataloader.dataset)
        self._batch = dataloader.collate_fn([dict(example) for _ in range(self._sequences)])

    @property
    def sentence(self) -> str:
        """Return how large the step is, in words."""
        completion = getattr(self._trainer, "max_completion_length", None)
        lengths = f"{self._tokens}" if completion is None else f"{self._tokens} + {completion}"
        return f"{self._sequences} sequences of {lengths} tokens"

    def run(self) -> None:
        """Run the step; what it raises leaves nothing put back yet."""
        trainer = self._trainer
        model = trainer.model_wrapped
        trainer.current_gradient_accumulation_steps = int(trainer.args.gradient_accumulation_steps)
        with _full_length(trainer), _quiet_rewards(trainer):
            make_optimizer_state(self._optimizer)
            state = trainer.accelerator.gradient_state
            for i in range(self._micro_batches):
                last = i == self._micro_batches - 1
                SET_SYNC_GRADIENTS.of(state)(last)
                alone = functools.partial(trainer.accelerator.no_sync, model=model)
                with contextlib.nullcontext() if last else alone():
                    trainer.training_step(model, self._batch, None)
            norm = trainer.args.max_grad_norm
            if norm is not None and norm > 0:
                trainer.accelerator.clip_grad_norm_(model.parameters(), norm)
            trainer.optimizer.step()
            model.zero_grad()
            self._step_ended()


def _longest(trainer: Any, dataset: Any) -> tuple[Mapping[str, Any], int]:
    """Return the example with the most tokens, and how many: of all, or of the first 1024 of a stream."""
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        examples: Iterator[Any] = (dataset[i] for i in range(len(dataset)))
    else:
        examples = islice(iter(dataset), _MOST_STREAMED)
    best: list[tuple[int, int, Any]] = []
    for i, example in enumerate(examples):
        best.append((_characters(example), -i, example))
        if len(best) > 8 * _MOST_TOKENIZED:
            best = sorted(best, key=lambda row: row[:2])[-_MOST_TOKENIZED:]
    if not best:
        raise ValueError("the training dataset is empty")
    longest = sorted(best, key=lambda row: row[:2])[-_MOST_TOKENIZED:]
    counted = [(_tokens(trainer, example), i, example) for _, i, example in longest]
    tokens, _, example = max(counted, key=lambda row: row[:2])
    return example, tokens


def _characters(example: Any) -> int:
    """Measure an example without a tokenizer: longer ones come first."""
    if not isinstance(example, Mapping):
        return 0
    if "input_ids" in example:
        return len(example["input_ids"])
    if "prompt" in example:
        return len(str(example["prompt"]))
    return sum(len(v) for v in example.values() if isinstance(v, (str, list)))


def _tokens(trainer: Any, example: Any) -> int:
    if not isinstance(example, Mapping):
        return 0
    if "input_ids" in example:
        return len(example["input_ids"])
    prompt = example.get("prompt")
    tokenizer = getattr(trainer, "processing_class", None)
    if prompt is None or tokenizer is None:
        return _characters(example)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(prompt)["input_ids"])


@contextlib.contextmanager
def _full_length(trainer: Any) -> Iterator[None]:
    """Generate up to the last token allowed."""
    longest = getattr(trainer, "max_completion_length", None)
    settings = getattr(trainer, "generation_config", None)
    if longest is not None and settings is not None:
        settings.min_new_tokens = longest  # its own attributes are kept and put back with the rest
    engine = getattr(getattr(trainer, "vllm_generation", None), "generation_kwargs", None)
    engine = engine if isinstance(engine, dict) else {}
    before = dict(engine)
    if longest is not None:
        engine.update(min_tokens=longest, ignore_eos=True)
    try:
        yield
    finally:
        engine.clear()
        engine.update(before)


@contextlib.contextmanager
def _quiet_rewards(trainer: Any) -> Iterator[None]:
    functions = getattr(trainer, "reward_funcs", None)
    if not isinstance(functions, list):
        yield
        return
    own = list(functions)
    functions[:] = [f if hasattr(f, "parameters") else _stand_in for f in own]
    try:
        yield
    finally:
        functions[:] = own


def _stand_in(completions: list[Any], **_: Any) -> list[float]:
    """Return rewards that differ, so that advantages are not zero."""
    return [float(i % 2) for i in range(len(completions))]

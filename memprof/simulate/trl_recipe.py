"""The installed TRL's own GRPO trainer, run on fake tensors: its loss, its optimizer, its loop.

Replaced, because a fake tensor has no values or no device: the choice of tokens (generation runs its prefill and its
longest decode step, both through the model's real ``generate``), the Triton kernels (they allocate nothing), loading
of weights. Everything else is what would run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from memprof.integrations.seams import Seams
from memprof.integrations.trainer_phases import TrainerPhases
from memprof.simulate.engines import ColocatedEngine
from memprof.simulate.fakes import patched
from memprof.simulate.models import build_model
from memprof.simulate.optimizers import MODELLED, modelled_optimizer
from memprof.simulate.recipes import apply_recipe
from memprof.simulate.session import FakeSession
from memprof.simulate.settings import Settings
from memprof.simulate.sharded import count_shards, hold_buckets, shard, shards_planned_unseen
from memprof.vocabulary import Phase

__all__ = ["run_trl", "selected_of"]

WARM_UP, MEASURED = 1, 1


def selected_of(settings: Settings) -> Any:
    """How many positions of a boolean mask are set: those of completions in ``[batch, tokens]`` masks, else all."""

    def selected(shape: tuple[int, ...]) -> int:
        total = 1
        for extent in shape:
            total *= extent
        if len(shape) == 2 and shape[1] in (settings.sequence_length - 1, settings.sequence_length):
            return shape[0] * settings.completion_length
        return total

    return selected


def run_trl(settings: Settings, config: Any, session: FakeSession, mesh: Any = None) -> None:
    """Warm-up step, then a measured one; call it inside the fake world with tracking on.

    Raises:
        InputError: the model, or an option, cannot be simulated.
        OutOfMemory: the simulated device is full.
    """
    from transformers import PrinterCallback, ProgressCallback

    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_accelerate_state())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-simulate-"))
        stack.enter_context(_quiet())
        load = session.enter_phase(Phase.LOAD.value)
        stack.enter_context(_trl_on_fakes(settings, config))
        if mesh is not None:
            stack.enter_context(shards_planned_unseen(session.fake_recorder))
        trainer = _trainer(settings, config, folder, session, mesh)
        if settings.gpus > 1 and mesh is None:
            hold_buckets(trainer.model, session)
        if load is not None:
            session.exit_phase(load)
        seams = Seams(session.fail, lambda error: None)
        stack.callback(seams.restore)
        phases = TrainerPhases(trainer, seams)
        phases.current = session
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.add_callback(_steps_callback(session, phases))
        trainer.train()
        session.look_again()


def _trainer(settings: Settings, config: Any, folder: str, session: FakeSession, mesh: Any) -> Any:
    from trl import GRPOTrainer

    recorder = session.fake_recorder
    if mesh is not None:
        recorder.paused += 1
    model = build_model(config, settings.dtype, attention=_implementation(settings), nf4=settings.load_in_4bit)
    session.add_model(model, "policy")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_reward,
        args=_arguments(settings, folder),
        train_dataset=_dataset(settings),
        processing_class=_tokenizer(config),
        peft_config=_adapter(settings),
    )
    if mesh is not None:
        _shard(trainer, mesh, recorder)
    session.owners._models.clear()
    session.add_model(trainer.model, "policy")
    if trainer.ref_model is not None:
        session.add_model(trainer.ref_model, "reference")
    session.owners.claim_models()
    _fake_rollout(trainer, settings, session)
    _set_optimizer(trainer, settings, session)
    apply_recipe(trainer, settings)
    return trainer


def _shard(trainer: Any, mesh: Any, recorder: Any) -> None:
    """The trainer was built unseen, because no rank holds a whole model; from here on its shards are counted."""
    shard(trainer.model, mesh, trained=True)
    if trainer.ref_model is not None:
        shard(trainer.ref_model, mesh, trained=False)
    recorder.paused -= 1
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            count_shards(model, recorder)


def _set_optimizer(trainer: Any, settings: Settings, session: FakeSession) -> None:
    def paged(nbytes: int) -> None:
        session.managed_bytes += nbytes

    made = modelled_optimizer(settings.optim, trainer.model, paged)
    if made is not None:
        kind, arguments = made
        trainer.get_optimizer_cls_and_kwargs = lambda args, model=None: (kind, {"lr": args.learning_rate, **arguments})


def _implementation(settings: Settings) -> str:
    return "eager" if settings.attn == "math" and settings.device == "cpu" else "sdpa"


def _arguments(settings: Settings, folder: str) -> Any:
    from trl import GRPOConfig

    cycle = max(1, settings.generation_steps // settings.gradient_accumulation_steps) * settings.num_iterations
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=settings.mixed_precision == "bf16",
        fp16=False,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        steps_per_generation=settings.generation_steps,
        num_iterations=settings.num_iterations,
        num_generations=settings.num_generations,
        max_completion_length=settings.completion_length,
        gradient_checkpointing=settings.gradient_checkpointing,
        beta=settings.beta,
        loss_type=settings.loss_type,
        optim="adamw_torch" if settings.optim == "none" or settings.optim in MODELLED else settings.optim,
        max_grad_norm=settings.max_grad_norm,
        max_steps=(WARM_UP + MEASURED) * cycle,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=1e-6,
    )


def _adapter(settings: Settings) -> Any:
    if settings.lora_r is None:
        return None
    from peft import LoraConfig

    targets: Any = list(settings.lora_target_modules)
    if targets == ["all-linear"]:
        targets = "all-linear"
    return LoraConfig(r=settings.lora_r, lora_alpha=2 * settings.lora_r, target_modules=targets, task_type="CAUSAL_LM")


def _reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(i % 2) for i in range(len(completions))]


def _dataset(settings: Settings) -> Any:
    from datasets import Dataset

    rows = settings.per_device_train_batch_size * settings.generation_steps * settings.gpus
    return Dataset.from_dict({"prompt": ["a"] * max(2, rows)})


def _tokenizer(config: Any) -> Any:
    """A tokenizer of a handful of tokens: every text is replaced by tokens of the wanted number anyway."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


# -- generation ------------------------------------------------------------------------------------------------


def _fake_rollout(trainer: Any, settings: Settings, session: FakeSession | None = None) -> None:
    prompt, completion = settings.prompt_length, settings.completion_length
    if settings.generation == "vllm":
        engine = ColocatedEngine(settings, session)
        trainer.use_vllm = True  # the loss is corrected for what the engine sampled with

    def tokenize(self: Any, prompts: list[Any]) -> Any:
        return [[0] * prompt for _ in prompts], None, {}

    def single_turn(self: Any, prompt_ids: list[Any], *_: Any, **__: Any) -> Any:
        if settings.generation == "hf":
            _generate(self, len(prompt_ids), settings)
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
    ):
        layers = _some_tokens(trainer, model, batch, settings.prompt_length, None)
        if settings.completion_length > _DECODED:
            held = settings.sequence_length - 1 - _DECODED
            _some_tokens(trainer, model, batch, held + 1, _cache(model, layers, held))


# Tokens generated at the end: the last one's step runs while the sampling of the one before is still held.
_DECODED = 2


def _some_tokens(trainer: Any, model: Any, batch: int, tokens: int, cache: Any) -> list[tuple[Any, Any, torch.dtype]]:
    """Generate some tokens after ``tokens``; returns shapes and dtype of each layer's keys and values."""
    import copy

    ids = torch.zeros(batch, tokens, dtype=torch.long, device=trainer.accelerator.device)
    generation = copy.copy(trainer.generation_config)
    generation.max_new_tokens = _DECODED
    generation.return_dict_in_generate = True
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=generation, past_key_values=cache
    )
    return [
        (tuple(layer.keys.shape), tuple(layer.values.shape), layer.keys.dtype) for layer in out.past_key_values.layers
    ]


def _cache(model: Any, layers: list[tuple[Any, Any, torch.dtype]], held: int) -> Any:
    """A cache that holds ``held`` tokens in every layer, as the model's own layers would have left it."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, (keys, values, dtype) in enumerate(layers):
        window = getattr(cache.layers[index], "sliding_window", None) if index < len(cache.layers) else None
        length = min(held, window - 1) if window else held
        parts = [torch.empty(*shape[:-2], length, shape[-1], dtype=dtype) for shape in (keys, values)]
        cache.update(*parts, index)
        del parts
        if hasattr(cache.layers[index], "cumulative_length"):
            cache.layers[index].cumulative_length = held
    return cache


# -- TRL and transformers, told that this is CUDA ------------------------------------------------------------------


@contextlib.contextmanager
def _trl_on_fakes(settings: Settings, config: Any) -> Iterator[None]:
    import trl.kernels.chunked_logprob as kernels
    import trl.trainer.grpo_trainer as grpo
    import trl.trainer.utils as utils
    from transformers import masking_utils
    from transformers.generation.utils import GenerationMixin

    def reference(*_: Any, **__: Any) -> Any:
        return build_model(config, settings.dtype, attention=_implementation(settings))

    def fast_all(mask: Any) -> Any:
        answer = mask.sum() == mask.numel()
        answer._memprof_scalar = settings.padding == "none"
        return answer

    changes: list[tuple[Any, str, Any]] = [
        (grpo, "create_model_from_path", reference),
        (masking_utils, "fast_all", fast_all),
        (GenerationMixin, "_sample", _counted(GenerationMixin._sample)),
        (GenerationMixin, "_has_unfinished_sequences", _unfinished),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(*changes))
        if settings.device == "cuda":
            stack.enter_context(
                patched(
                    (kernels, "_use_triton", lambda device: True),
                    (utils, "_use_triton", lambda device: True),
                    (kernels, "_forward_kernel", _NoKernel()),
                    (kernels, "_backward_kernel", _NoKernel()),
                    (kernels, "_addmm_fp32", lambda acc, a, b: None),
                )
            )
            if not hasattr(kernels, "triton"):
                kernels.triton = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b))
                stack.callback(delattr, kernels, "triton")
            stack.enter_context(_foreach_as_on_cuda())
        yield


def _counted(sample: Any) -> Any:
    @functools.wraps(sample)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._memprof_tokens = _DECODED
        return sample(self, *args, **kwargs)

    return counted


def _unfinished(self: Any, *_: Any, **__: Any) -> bool:
    """Whether sampling goes on: a count, since no fake token ever ends a sequence."""
    self._memprof_tokens -= 1
    return bool(self._memprof_tokens >= 0)


@contextlib.contextmanager
def _own_accelerate_state() -> Iterator[None]:
    """accelerate keeps one state a process; a simulation has its own and leaves the process's as it was."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kinds = (AcceleratorState, GradientState, PartialState)
    saved = [dict(kind._shared_state) for kind in kinds]
    for kind in kinds:
        kind._shared_state.clear()
    try:
        yield
    finally:
        for kind, state in zip(kinds, saved, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)


class _NoKernel:
    """A Triton kernel: whatever it computes, it allocates nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: None


@contextlib.contextmanager
def _foreach_as_on_cuda() -> Iterator[None]:
    """Optimizers and gradient clipping take their multi-tensor path, which on the CPU they do not."""
    import torch.optim.optimizer as optimizer
    import torch.utils._foreach_utils as foreach
    from torch._subclasses.fake_tensor import FakeTensor

    supported = lambda: ["cuda", "cpu"]  # noqa: E731
    optimizer._foreach_supported_types.append(FakeTensor)
    try:
        with patched(
            (foreach, "_get_foreach_kernels_supported_devices", supported),
            (optimizer, "_get_foreach_kernels_supported_devices", supported),
        ):
            yield
    finally:
        optimizer._foreach_supported_types.remove(FakeTensor)


def _steps_callback(session: FakeSession, phases: TrainerPhases) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            session.set_step(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            phases.end_step()

    return Steps()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A simulation prints what it found, not what transformers has to say about a model without weights."""
    names = ("transformers", "trl", "peft", "accelerate", "torch")
    before = [(logging.getLogger(n), logging.getLogger(n).level) for n in names]
    try:
        for logger, _ in before:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in before:
            logger.setLevel(level)

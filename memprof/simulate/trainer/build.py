"""What scores completions: a function that allocates nothing, or a reward model whose forward TRL executes."""

from __future__ import annotations

import contextlib
import math
import tempfile
from typing import Any

import torch

from memprof.compat.patching import Seams
from memprof.config.optimizers import optimizer
from memprof.config.settings import Settings
from memprof.config.to_grpo import grpo_arguments, lora_arguments
from memprof.recording.run_facts import plain_config
from memprof.recording.trainer_phases import TrainerPhases
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.sharding.fsdp2 import (
    count_shards,
    gathered_owned,
    hold_buckets,
    shard,
    shard_tensors,
    shards_planned_unseen,
)
from memprof.simulate.sharding.zero import attach_zero, gathering_for_zero
from memprof.simulate.trainer.kv_caches import modelled_quanto
from memprof.simulate.trainer.models import build_model, load_config
from memprof.simulate.trainer.optimizers import modelled_optimizer
from memprof.simulate.trainer.patches import (
    choose_checkpointing,
    offloading_to_host,
    own_accelerate_state,
    quiet,
    trl_on_fakes,
)
from memprof.simulate.trainer.recipes import apply_recipe, classes_of, config_of
from memprof.simulate.trainer.rollout import fake_rollout
from memprof.vocabulary import Phase

__all__ = [
    "RewardTokenizer",
    "adapter_of",
    "reward_function",
    "reward_model",
    "run_trl",
    "selected_of",
]


def reward_function(completions: list[Any], **_: Any) -> list[float]:
    """A score for each completion, so that a group's differ."""
    return [float(i % 2) for i in range(len(completions))]


def reward_model(settings: Settings) -> Any:
    """The model named by ``settings.reward_model``, built without weights, giving one number a sequence.

    TRL loads it with the policy's arguments: in the dtype asked for, or in its checkpoint's where none was (bfloat16
    where its config names none).

    Raises:
        InputError: there is no config of that name, or transformers has no such model that scores sequences.
    """
    config = load_config(str(settings.reward_model))
    config.num_labels = 1
    dtype = settings.dtype
    if dtype == "float32":
        dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    return build_model(config, dtype, scores=True).requires_grad_(False)


class RewardTokenizer:
    """Stands for the reward model's tokenizer: every text becomes as many tokens as the policy's."""

    pad_token_id = 1
    pad_token = eos_token = "<pad>"

    def __init__(self, settings: Settings) -> None:
        self._tokens = settings.sequence_length

    def __call__(self, text: list[str], **_: Any) -> dict[str, Any]:
        ids = torch.zeros(len(text), self._tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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

    session.setup = {"model_config": plain_config(config)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(own_accelerate_state())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-simulate-"))
        stack.enter_context(quiet())
        load = session.enter_phase(Phase.LOAD.value)
        stack.enter_context(trl_on_fakes(settings, config, session))
        stack.enter_context(modelled_quanto())
        if settings.device == "cuda":
            stack.enter_context(offloading_to_host(session))
        if mesh is not None:
            stack.enter_context(shards_planned_unseen(session.fake_recorder))
            stack.enter_context(gathered_owned(session))
        trainer = _trainer(settings, config, folder, session, mesh)
        stack.enter_context(gathering_for_zero(getattr(trainer, "_memprof_zero", None)))
        if settings.gpus > 1 and settings.sharding == "ddp":
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
    recorder = session.fake_recorder
    recorder.paused += settings.whole_nowhere
    model = build_model(config, settings.weights_dtype, attention="sdpa", nf4=settings.load_in_4bit)
    session.add_model(model, "policy")
    if settings.recipe != "lean":  # which has its own
        choose_checkpointing(model, settings.checkpointing)
    rewards = _rewards(settings)
    kind, _ = classes_of(settings)
    trainer = kind(
        model=model,
        args=_arguments(settings, folder),
        train_dataset=_dataset(settings),
        processing_class=_tokenizer(config),
        peft_config=adapter_of(settings),
        **rewards,
    )
    if mesh is not None:
        _shard(trainer, mesh, settings, session)
    elif settings.sharded_by_zero:
        trainer._memprof_zero = attach_zero(trainer, settings, session)
    session.owners._models.clear()
    session.add_model(trainer.model, "policy")
    if trainer.ref_model is not None and not session.host_bytes:  # the lean trainer's is not on the device
        session.add_model(trainer.ref_model, "reference")
    if settings.reward_model is not None:
        session.add_model(trainer.reward_funcs[0], "reward")
    session.owners.claim_models()
    fake_rollout(trainer, settings, session)
    _set_optimizer(trainer, settings, session)
    apply_recipe(trainer, settings)
    return trainer


def _shard(trainer: Any, mesh: Any, settings: Settings, session: FakeSession) -> None:
    """The trainer was built unseen, because no rank holds a whole model; from here on its shards are counted."""
    recorder = session.fake_recorder
    if settings.sharding == "tp":
        for model in (trainer.model, trainer.ref_model):
            if model is not None:
                shard_tensors(model, mesh)
    elif not shard(trainer.model, mesh, settings):
        session.notes.append(
            "FSDP2 gathers all layers at once here: with an adapter, transformers hands accelerate a wrapping policy "
            "that its FSDP2 does not know."
        )
    if trainer.ref_model is not None and settings.sharding == "fsdp2":
        shard(trainer.ref_model, mesh, settings)
    recorder.paused -= 1
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            count_shards(model, recorder)
    for scores in trainer.reward_funcs:
        if isinstance(scores, torch.nn.Module):  # whole on every rank: accelerate shards what is trained
            count_shards(scores, recorder)


def _set_optimizer(trainer: Any, settings: Settings, session: FakeSession) -> None:
    def paged(nbytes: int) -> None:
        session.managed_bytes += nbytes

    made = modelled_optimizer(settings.optim, trainer.model, paged)
    if made is not None:
        kind, arguments = made
        trainer.get_optimizer_cls_and_kwargs = lambda args, model=None: (kind, {"lr": args.learning_rate, **arguments})


def _arguments(settings: Settings, folder: str) -> Any:
    cycle = max(1, settings.generation_steps // settings.gradient_accumulation_steps) * settings.num_iterations
    # This process plays one of the ranks, whose share of a group may be a single completion: TRL refuses groups of
    # one, so the batch is doubled while its config is checked.
    share = settings.per_device_train_batch_size * settings.generation_steps
    group = math.gcd(settings.num_generations, share)
    double = 2 if group == 1 else 1
    asked = grpo_arguments(settings)
    for name in ("model_init_kwargs", "use_vllm", "vllm_mode", *(n for n in asked if n.startswith("vllm_"))):
        asked.pop(name, None)  # the model is built here, and what generates is modelled
    asked |= {
        "bf16": asked["bf16"] and not settings.sharded_by_zero,
        "per_device_train_batch_size": settings.per_device_train_batch_size * double,
        "num_generations": group * double,
    }
    if settings.sharded_by_zero:
        asked["max_grad_norm"] = 0.0  # DeepSpeed clips its own share
    if settings.optim == "none" or optimizer(settings.optim).modelled:
        asked["optim"] = "adamw_torch"  # replaced once the trainer is built
    _, kind = classes_of(settings)
    arguments = kind(
        output_dir=folder,
        use_cpu=True,
        fp16=False,
        max_steps=(WARM_UP + MEASURED) * cycle,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        learning_rate=1e-6,
        **asked,
        **config_of(settings),
    )
    arguments.per_device_train_batch_size //= double
    arguments.generation_batch_size //= double
    arguments.num_generations //= double
    return arguments


def adapter_of(settings: Settings) -> Any:
    """Make the ``LoraConfig`` of these settings; None where the whole model is trained."""
    told = lora_arguments(settings)
    if told is None:
        return None
    from peft import LoraConfig

    return LoraConfig(**told, task_type="CAUSAL_LM")


def _rewards(settings: Settings) -> dict[str, Any]:
    if settings.reward_model is None:
        return {"reward_funcs": reward_function}
    return {"reward_funcs": [reward_model(settings)], "reward_processing_classes": [RewardTokenizer(settings)]}


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


def _steps_callback(session: FakeSession, phases: TrainerPhases) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            session.set_step(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            phases.end_step()

    return Steps()

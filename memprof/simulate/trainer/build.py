"""Build the trainer of a simulated run: the model, its trainer's arguments, data, tokenizer and optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch

from memprof.compat import transformers as transformers_names
from memprof.config.optimizers import optimizer
from memprof.config.settings import ModelSettings, Settings, TrainerSettings
from memprof.config.to_trl_config import adapter_arguments, four_bit_arguments, grpo_arguments
from memprof.errors import UsageError
from memprof.foreign import Kwargs
from memprof.simulate.fake_cuda.images import HostValues, fake_images, images_of, processor_of, put_images
from memprof.simulate.fake_cuda.nf4 import Nf4, tell_of_adapters
from memprof.simulate.recorder.session import FakeSession
from memprof.simulate.sharding.dtensors import count_shards
from memprof.simulate.sharding.fsdp2 import shard
from memprof.simulate.sharding.tensor_parallel import shard_tensors
from memprof.simulate.sharding.zero import attach_zero
from memprof.simulate.trainer.checkpointing import choose_checkpointing
from memprof.simulate.trainer.loading import load_model
from memprof.simulate.trainer.models import build_model
from memprof.simulate.trainer.optimizers import modelled_optimizer
from memprof.simulate.trainer.recipes import apply_recipe, classes_of, config_of, loss_with_full_logits
from memprof.simulate.trainer.rewards import RewardTokenizer, reward_function, reward_model
from memprof.simulate.trainer.rollout import fake_rollout
from memprof.simulate.trainer.supervised import supervised_trainer

WARM_UP, MEASURED = 1, 1  # generation cycles


def build_trainer(
    settings: Settings, config: Any, folder: str, session: FakeSession, mesh: Any, *, by_name: bool = False
) -> Any:
    """Build the trainer of these settings on fake tensors, sharded over ``mesh`` where there is one.

    ``by_name``: the policy lies in memory as if TRL had loaded it by its name, not as a model that was moved there.
    4-bit weights always do.

    Raises:
        InputError: the model cannot be built.
        UsageError: options that cannot be satisfied.
    """
    recorder = session.fake_recorder
    recorder.storages.paused += settings.whole_nowhere
    if by_name and settings.gpus > 1:
        raise UsageError("Loading by name is simulated for one GPU.")
    if by_name or settings.load_in_4bit:  # weights become 4-bit ones while they are loaded
        nf4 = Nf4.of(four_bit_arguments(settings)) if settings.load_in_4bit else None
        model = load_model(config, settings.weights_dtype, session, nf4)
    else:
        model = build_model(config, settings.weights_dtype)
    session.add_model(model, "policy")
    if not settings.lean:  # which has its own
        choose_checkpointing(model, settings.checkpointing)
    images = images_of(settings, config)
    processor = None
    if images is not None:
        processor = processor_of(images, settings.prompt_length, make_tokenizer(), HostValues.of)
    trainer = trainer_of(settings, model, folder, processor)
    tell_of_adapters(trainer.model)
    if recorder.cuda and not settings.supervised:
        recorder.storages.disown(trainer.reward_weights)  # TRL keeps them on the host
    if mesh is not None:
        _shard(trainer, mesh, settings, session)
    elif settings.sharded_by_zero:
        trainer._memprof_zero = attach_zero(trainer, settings, session)
    session.book.forget_models()
    session.add_model(trainer.model, "policy")
    reference = getattr(trainer, "ref_model", None)
    if reference is not None and not session.host_bytes:  # the lean trainer's is not on the device
        session.add_model(reference, "reference")
    if settings.reward_model is not None:
        session.add_model(trainer.reward_funcs[0], "reward")
    session.owners.claim_models()
    set_optimizer(trainer, settings, session)
    if not settings.supervised:
        fake_rollout(trainer, settings, session)
        if images is not None:
            put_images(trainer, images, settings.prompt_length)
            fake_images(trainer, images)
        apply_recipe(trainer, settings)
    elif settings.recipe == "trl-full-logits":
        loss_with_full_logits(trainer)
    return trainer


def trainer_of(settings: Settings, model: Any, folder: str, processor: Any = None, **rewards: Any) -> Any:
    """Make the trainer of these settings.

    ``processor`` takes the tokenizer's place; ``rewards`` stand for what the settings say of rewards.
    """
    if settings.supervised:
        return supervised_trainer(
            settings, model, make_tokenizer(), adapter_of(settings), _unattended(folder, WARM_UP + MEASURED)
        )
    kind, _ = classes_of(settings)
    return kind(
        model=model,
        args=trainer_arguments(settings, folder),
        train_dataset=dataset_of(settings),
        processing_class=processor or make_tokenizer(),
        peft_config=adapter_of(settings),
        **(rewards or _rewards(settings)),
    )


def _shard(trainer: Any, mesh: Any, settings: Settings, session: FakeSession) -> None:
    """Shard a trainer that was built unseen, because no rank holds a whole model; count its shards from here on."""
    recorder = session.fake_recorder
    reference = getattr(trainer, "ref_model", None)
    if settings.sharding == "tp":
        for model in (trainer.model, reference):
            if model is not None:
                shard_tensors(model, mesh)
    else:
        from torch.distributed.fsdp import register_fsdp_forward_method

        shard(trainer.model, mesh, settings)
        # As transformers does: an adapter's generate() calls the model below the root, which gathers what is left.
        register_fsdp_forward_method(trainer.model, "generate")
    if reference is not None and settings.sharding == "fsdp2":
        shard(reference, mesh, settings)
    recorder.storages.paused -= 1
    for model in (trainer.model, reference):
        if model is not None:
            count_shards(model, recorder)
    for scores in getattr(trainer, "reward_funcs", ()):
        if isinstance(scores, torch.nn.Module):  # whole on every rank: accelerate shards what is trained
            count_shards(scores, recorder)


def set_optimizer(trainer: Any, settings: TrainerSettings, session: FakeSession) -> None:
    """Let a trainer make the modelled optimizer of these settings, where torch and transformers have none."""

    def paged(nbytes: int) -> None:
        session.managed_bytes += nbytes

    made = modelled_optimizer(settings.optim, trainer.model, paged)
    if made is not None:
        kind, arguments = made

        def chosen(args: Any, model: Any = None) -> Any:
            return kind, {"lr": args.learning_rate, **arguments}

        setattr(trainer, transformers_names.OPTIMIZER_OF.name, chosen)


def trainer_arguments(settings: Settings, folder: str) -> Any:
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
    arguments = kind(**_unattended(folder, (WARM_UP + MEASURED) * cycle), **asked, **config_of(settings))
    arguments.per_device_train_batch_size //= double
    arguments.generation_batch_size //= double
    arguments.num_generations //= double
    return arguments


def _unattended(folder: str, steps: int) -> Kwargs:
    """Return the arguments of every simulated trainer: it trains ``steps`` steps, and reports and saves nothing."""
    return {
        "output_dir": folder,
        "max_steps": steps,
        "use_cpu": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "learning_rate": 1e-6,
    }


def adapter_of(settings: ModelSettings) -> Any:
    """Make the adapter's configuration, such as a ``LoraConfig``; None where the whole model is trained."""
    if (told := adapter_arguments(settings)) is None:
        return None
    import peft

    kind, arguments = told
    return getattr(peft, kind)(**arguments, task_type="CAUSAL_LM")


def _rewards(settings: Settings) -> Kwargs:
    if settings.reward_model is None:
        return {"reward_funcs": reward_function}
    return {"reward_funcs": [reward_model(settings)], "reward_processing_classes": [RewardTokenizer(settings)]}


def dataset_of(settings: Settings) -> Any:
    """Make a dataset of as many one-letter prompts as all ranks take in one generation."""
    from datasets import Dataset

    rows = settings.per_device_train_batch_size * settings.generation_steps * settings.gpus
    prompt = [{"role": "user", "content": "a"}] if settings.images else "a"
    return Dataset.from_dict({"prompt": [prompt] * max(2, rows)})


def make_tokenizer() -> Any:
    """Make a tokenizer of a handful of tokens: every text is replaced by tokens of the wanted number anyway."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )

"""Tiny trainers, TRL's and the lean one, with equal weights, and micro-batches to feed both."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.compat.patching import replacing
from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer

VOCABULARY = 61
TOLERANCE = 1e-5


def tiny_llama(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A random Llama of 30,000 parameters with grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # sharper than usual, so that ratios and entropies spread
        "pad_token_id": 1,
        "eos_token_id": 2,
        "bos_token_id": 3,
        **changes,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)


def tiny_mixture(family: str = "mixtral") -> Any:
    """A random mixture of experts whose router has a large auxiliary loss: Mixtral, or a Qwen3 with one dense layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 1,
        "eos_token_id": 2, "bos_token_id": 3, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.7,
        "intermediate_size": 24,
    }  # fmt: skip
    experts: dict[str, Any] = {"num_local_experts": 3}
    if family == "qwen3_moe":
        experts = {"num_experts": 5, "moe_intermediate_size": 16, "mlp_only_layers": [1], "head_dim": 8}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **experts))


def tokenizer() -> Any:
    """Words ``t0`` ... and the special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<pad>", "<eos>", "<bos>"] + [f"t{i}" for i in range(VOCABULARY - 4)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        padding_side="left",
    )  # fmt: skip


def length_reward(completions: list[str], **_: Any) -> list[float]:
    """Dense, so that a group's rewards differ."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def prompts(count: int = 16) -> Any:
    from datasets import Dataset

    rows = [" ".join(f"t{(7 * i + j) % 50}" for j in range(2 + i % 5)) for i in range(count)]
    return Dataset.from_dict({"prompt": rows})


def build(kind: str, model: Any, folder: Path, *, lora: bool = False, data: Any = None, **settings: Any) -> Any:
    """``kind`` is ``trl`` or ``lean``; the model is copied, adapters get the same random values."""
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    plain: dict[str, Any] = {
        "output_dir": str(folder / kind),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 12,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        "learning_rate": 1e-3,
        **settings,
    }
    chosen: Any = (GRPOTrainer, GRPOConfig) if kind == "trl" else (LeanGRPOTrainer, LeanGRPOConfig)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    trainer = chosen[0](
        model if isinstance(model, str) else copy.deepcopy(model),
        length_reward,
        chosen[1](**plain),
        train_dataset=prompts() if data is None else data,
        processing_class=tokenizer(),
        peft_config=adapter,
    )
    if lora:
        randomise_adapters(trainer.model)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def saved_llama(folder: Path, **changes: Any) -> str:
    """The same as a checkpoint folder, which a reference model can be loaded from."""
    if not folder.exists():
        tiny_llama(**changes).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return str(folder)


class Rollouts:
    """Completions of one trainer, kept and given to another in the same order.

    The random state after each goes with them: TRL shuffles what was generated.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._next = 0

    def record(self, trainer: Any) -> None:
        generate = trainer._generate_single_turn

        def recording(*args: Any, **kwargs: Any) -> Any:
            found = generate(*args, **kwargs)
            self.kept.append((found, torch.get_rng_state()))
            return found

        trainer._generate_single_turn = recording

    def replay(self, trainer: Any) -> None:
        self._next = 0

        def replaying(*_args: Any, **_kwargs: Any) -> Any:
            found, state = self.kept[self._next]
            self._next += 1
            torch.set_rng_state(state)
            return found

        trainer._generate_single_turn = replaying


def logged(trainer: Any) -> list[dict[str, float]]:
    """What each step logged, without what depends on the clock or on who is watching."""
    clock = ("step_time", "runtime", "per_second", "train_loss", "memory/")
    return [
        {key: float(value) for key, value in row.items() if value is not None and not any(c in key for c in clock)}
        for row in trainer.state.log_history
    ]


def randomise_adapters(model: Any) -> None:
    """Adapters away from zero, else half of their gradients are."""
    source = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.1)


def batch(rows: int = 4, *, prompt: int = 9, completion: int = 13, off_policy: bool = True, seed: int = 5) -> Any:
    """A micro-batch as TRL makes it: padded left and right, off-policy by half a nat, advantages of both signs."""
    source = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, shape: Any) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=source)

    prompt_lengths, completion_lengths = numbers(2, prompt + 1, (rows,)), numbers(3, completion + 1, (rows,))
    prompt_lengths[0], completion_lengths[-1] = prompt, completion
    prompt_mask = (torch.arange(prompt) >= prompt - prompt_lengths[:, None]).long()
    completion_mask = (torch.arange(completion) < completion_lengths[:, None]).long()
    prompt_ids = torch.where(prompt_mask.bool(), numbers(4, VOCABULARY, (rows, prompt)), 1)
    completion_ids = torch.where(completion_mask.bool(), numbers(4, VOCABULARY, (rows, completion)), 1)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.randn(rows, generator=source),
        "num_items_in_batch": completion_mask.sum() + 17,
        "off_policy": off_policy,
    }


def groups(rows: int = 6, **shape: Any) -> Any:
    """A micro-batch of two prompts with ``rows / 2`` completions each, shuffled as TRL does."""
    inputs = batch(rows, **shape)
    for row in range(rows):
        for name in ("prompt_ids", "prompt_mask"):
            inputs[name][row] = inputs[name][row % 2]
    return inputs


def with_policies(trainer: Any, inputs: dict[str, Any], *, beta: float, noise: float = 0.5) -> dict[str, Any]:
    """``inputs`` with old and reference log-probs around the policy's own (TRL's ``trainer`` computes them)."""
    inputs = dict(inputs)
    off_policy = inputs.pop("off_policy", True)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        now = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, inputs["completion_ids"].shape[1])[0]
    source = torch.Generator().manual_seed(8)
    for name, wanted in (("old_per_token_logps", off_policy), ("ref_per_token_logps", beta != 0)):
        moved = now + noise * torch.randn(now.shape, generator=source)
        if wanted:
            inputs[name] = (moved * inputs["completion_mask"]).float()
    return inputs


def run_step(trainer: Any, inputs: dict[str, Any], wrapped: Any = None) -> torch.Tensor:
    """Run the forward and backward of a training step on a micro-batch; return its loss.

    ``wrapped``: the model as accelerate wrapped it, where it did.
    """
    with replacing((trainer, "_prepare_inputs", dict)):
        loss: torch.Tensor = trainer.training_step(wrapped or trainer.model, inputs, None)
    trainer._metrics["train"].pop("step_time", None)
    return loss


def loss_and_gradients(
    trainer: Any, inputs: dict[str, Any], wrapped: Any = None
) -> tuple[float, dict[str, torch.Tensor], dict[str, Any]]:
    """Loss, gradient of every trainable tensor and logged metrics of one micro-batch; ``wrapped`` as in `run_step`."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    loss = run_step(trainer, inputs, wrapped)
    gradients = {
        name: parameter.grad.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    return loss.item(), gradients, {key: list(value) for key, value in trainer._metrics["train"].items()}


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of any tensor's gradient, by norm."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name].double() - theirs[name].double()).norm() / theirs[name].double().norm().clamp(min=1e-12))
        for name in theirs
    )


def assert_same_step(theirs: Any, ours: Any, inputs: Any) -> None:
    """Both trainers make the same loss, gradients and metrics of one micro-batch."""
    loss, gradients, metrics = loss_and_gradients(theirs, inputs)
    lean_loss, lean_gradients, lean_metrics = loss_and_gradients(ours, inputs)
    assert any(gradient.norm() > 1e-4 for gradient in gradients.values())
    assert lean_loss == pytest.approx(loss, rel=TOLERANCE, abs=1e-7)
    assert worst(lean_gradients, gradients) <= TOLERANCE
    assert lean_metrics.keys() == metrics.keys()
    for name, values in metrics.items():
        assert lean_metrics[name] == pytest.approx(values, rel=1e-4, abs=1e-6, nan_ok=True), name
